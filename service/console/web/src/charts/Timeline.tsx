// One axis for loss, tokens a second and goodput by cause, over steps, time or dollars; every handoff is a mark on it.
import { Link } from '@tanstack/react-router'
import { memo, useCallback, useMemo, useState, type CSSProperties } from 'react'
import type uPlot from 'uplot'
import { nowMs } from '../api/clock'
import type { TimelineOut } from '../api/types'
import { CAUSES, CAUSE_WORDS, causeColor } from '../parts/causes'
import { count, dollars, figure, layoutName, localTime, percent, plural, prose, seconds, tick, utcTime, words } from '../parts/format'
import type { Axis } from '../router'
import Plot, { AXIS_PX } from './Plot'
import { color } from './theme_colors'
import { drawn, type Drawn, type Mark } from './timeline_data'

const RIGHT_PX = 10
const MARKS_MAX = 400
/** With more marks than this in view, only those that went wrong have a line: the others would hide the curves. */
const LINES_MAX = 60
const GROUP = 'job-timeline'
const LOSS = [{ name: 'loss', colorName: 'series-2' }]
const TOKENS = [{ name: 'tokens/s', colorName: 'series-1', scale: [0, null] as [number, null] }]
// What is drawn are the bands beneath it; the line only carries the cursor.
const GOODPUT = [{ name: 'goodput', colorName: 'text', isHidden: true, scale: [0, 1] as [number, number] }]
const TITLES: Record<Axis, string> = { step: 'step', time: 'local time', dollars: 'dollars the job has cost' }

export default function Timeline({ timeline, axis }: { timeline: TimelineOut; axis: Axis }) {
  const of = useMemo(() => drawn(timeline, axis), [timeline, axis])
  const [cursor, setCursor] = useState<number | null>(null)
  const [zoom, setZoom] = useState<{ axis: Axis; range: [number, number] } | null>(null)
  const range = zoom?.axis === axis ? zoom.range : of.range
  const select = useCallback((from: number, to: number) => setZoom({ axis, range: [from, to] }), [axis])
  const formatX = (value: number) => axis === 'dollars' ? dollars(value) : axis === 'step' ? count(value) : localTime(new Date(value * 1000).toISOString(), nowMs())
  const shared = { range, formatX, group: GROUP, isTime: axis === 'time', onCursor: setCursor, onSelect: select, drawOver: (plot: uPlot) => drawMarks(plot, of) }
  const last = of.points.at(-1)
  const shown = cursor !== null && of.points[cursor] ? cursor : of.points.length - 1
  return (
    <div>
      <ReadOut of={of} at={shown} isLast={cursor === null || of.points[cursor] === last} />
      <MarkLane of={of} range={range} />
      <Caption>Loss</Caption>
      <Plot label="Loss" data={useData(of.x, of.loss)} lines={LOSS} height={118} formatY={tick} {...shared} />
      <Caption>Tokens a second</Caption>
      <Plot label="Tokens a second" data={useData(of.x, of.tokens)} lines={TOKENS} height={98} formatY={short} {...shared} />
      <Caption>Goodput by cause</Caption>
      <Plot
        label="Goodput by cause" data={useData(of.x, of.goodput)} lines={GOODPUT} height={112} hasAxis formatY={value => `${Math.round(value * 100)} %`}
        {...shared} drawUnder={plot => drawBands(plot, of)}
      />
      <div className="row apart" style={{ paddingLeft: AXIS_PX, marginTop: 4 }}>
        <span className="legend">{CAUSES.map(cause => <span key={cause}><i className="swatch" style={{ background: causeColor(cause) }} />{CAUSE_WORDS[cause]}</span>)}</span>
        <span className="quiet small">
          {zoom?.axis === axis ? <button type="button" className="plain" onClick={() => setZoom(null)}>Show all again</button> : `over ${TITLES[axis]}; drag to look closer`}
        </span>
      </div>
    </div>
  )
}

function Caption({ children }: { children: string }) {
  return <h3 style={{ paddingLeft: AXIS_PX, marginTop: 4 }}>{children}</h3>
}

const useData = (x: number[], y: (number | null)[]): uPlot.AlignedData => useMemo(() => [x, y] as uPlot.AlignedData, [x, y])
const short = (value: number) => (value >= 1e6 ? `${tick(value / 1e6)} M` : value >= 1e4 ? `${tick(value / 1e3)} k` : tick(value))

function ReadOut({ of, at, isLast }: { of: Drawn; at: number; isLast: boolean }) {
  const point = of.points[at]
  return (
    <p className="row small" style={{ paddingLeft: AXIS_PX, minHeight: 22 }} aria-live="off">
      {point ? <>
        <strong>{isLast ? 'latest step' : 'step'} {count(point.step)}</strong>
        <span className="soft" title={utcTime(point.at)}>{localTime(point.at, nowMs())}</span>
        <span className="soft">{dollars(point.dollars)}</span>
        <span>loss <strong>{figure(point.loss)}</strong></span>
        <span><strong>{point.tokens_per_s === null ? '–' : count(point.tokens_per_s)}</strong> tokens/s</span>
        <span>{seconds(point.seconds)} a step</span>
        <span>goodput <strong>{percent(of.goodput[at])}</strong></span>
      </> : <span className="quiet">No step yet.</span>}
    </p>
  )
}

/** The marks as links, above the charts: for the mouse, for the keyboard, for a screen reader. The style sheet places
    each by `--at`, between the lane's `--from` and `--to`: as steps come in only the lane changes, not its marks. */
function MarkLane({ of, range }: { of: Drawn; range: [number, number] }) {
  const [shown, setShown] = useState<Placed | null>(null)
  const inView = of.marks.filter(({ x }) => x >= range[0] && x <= range[1])
  const marks = inView.slice(-MARKS_MAX)
  // Seconds since 1970 have more digits than a style sheet is sure to keep.
  const origin = of.marks[0]?.x ?? 0
  const place = { '--from': range[0] - origin, '--to': range[1] - origin, marginLeft: AXIS_PX, marginRight: RIGHT_PX } as CSSProperties
  return (
    <div className="mark-lane" style={place} role="list" aria-label="Handoffs and starts" onMouseLeave={() => setShown(null)} onBlur={() => setShown(null)}>
      {inView.length > marks.length && <span className="quiet small">the newest {MARKS_MAX} of {count(inView.length)}</span>}
      {marks.map(({ x, mark }) => <OneMark key={mark.handoff_id ?? `${mark.kind} ${mark.generation} ${mark.at}`} mark={mark} x={x} at={x - origin} onShow={setShown} />)}
      {shown && <MarkCard mark={shown.mark} left={((shown.x - range[0]) / (range[1] - range[0])) * 100} />}
    </div>
  )
}

type Placed = Drawn['marks'][number]

const OneMark = memo(function OneMark({ mark, x, at, onShow }: { mark: Mark; x: number; at: number; onShow: (shown: Placed) => void }) {
  const show = () => onShow({ x, mark })
  const look = { className: `mark ${markLevel(mark)}`, style: { '--at': at } as CSSProperties, onMouseEnter: show, onFocus: show, 'aria-label': textOf(mark) }
  return <span role="listitem" style={{ display: 'contents' }}><MarkLink mark={mark} look={look} /></span>
})

/** To the incident that caused it, if there is one; else to the handoff. */
function MarkLink({ mark, look }: { mark: Mark; look: object }) {
  if (mark.incident_id !== null) return <Link to="/incidents/$incidentId" params={{ incidentId: String(mark.incident_id) }} {...look} />
  if (mark.handoff_id !== null) return <Link to="/handoffs/$handoffId" params={{ handoffId: mark.handoff_id }} {...look} />
  return <span role="img" tabIndex={0} {...look} />
}

function MarkCard({ mark, left }: { mark: Mark; left: number }) {
  const side = left > 60 ? { right: `${100 - left}%`, marginRight: 10 } : { left: `${left}%`, marginLeft: 10 }
  return (
    <div className="hover-card" style={{ top: 22, ...side }} role="status">
      <strong>{words(mark.kind)}: {mark.source_layout ? `${layoutName(mark.source_layout)} → ` : ''}{layoutName(mark.target_layout)}</strong>
      <table><tbody>
        <tr><td>cause</td><td>{words(mark.cause)}</td></tr>
        <tr><td>state</td><td>{words(mark.state)}</td></tr>
        <tr><td>pause</td><td>{seconds(mark.pause_s)}</td></tr>
        <tr><td>lost</td><td>{plural(mark.lost_steps, 'step')}</td></tr>
        {mark.step !== null && <tr><td>at</td><td title={utcTime(mark.at)}>step {count(mark.step)}, {localTime(mark.at, nowMs())}, {dollars(mark.dollars)}</td></tr>}
      </tbody></table>
      {mark.reason && <div className="soft">{prose(mark.reason)}</div>}
    </div>
  )
}

const markLevel = (mark: Mark) => mark.state === 'aborted' || mark.state === 'broken' || mark.lost_steps > 0 ? 'bad' : mark.kind === 'handoff' ? 'good' : 'info'
const textOf = (mark: Mark) => `${words(mark.kind)} ${mark.source_layout ? `${layoutName(mark.source_layout)} to ` : ''}${layoutName(mark.target_layout)}, cause ${words(mark.cause)}, ${mark.state}, pause ${seconds(mark.pause_s)}, ${plural(mark.lost_steps, 'step')} lost`

function drawMarks(plot: uPlot, of: Drawn): void {
  const { ctx, bbox } = plot
  ctx.save()
  ctx.lineWidth = devicePixelRatio
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio])
  const inView = of.marks.slice(-MARKS_MAX).map(({ x, mark }) => ({ left: Math.round(plot.valToPos(x, 'x', true)), mark })).filter(({ left }) => left >= bbox.left && left <= bbox.left + bbox.width)
  for (const { left, mark } of inView) {
    if (inView.length > LINES_MAX && markLevel(mark) !== 'bad') continue
    ctx.strokeStyle = color({ bad: 'lost', good: 'line-strong', info: 'bootstrap' }[markLevel(mark)])
    ctx.beginPath()
    ctx.moveTo(left, bbox.top)
    ctx.lineTo(left, bbox.top + bbox.height)
    ctx.stroke()
  }
  ctx.restore()
}

function drawBands(plot: uPlot, of: Drawn): void {
  const { ctx, bbox } = plot
  ctx.save()
  ctx.beginPath()
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height)
  ctx.clip()
  const colors = Object.fromEntries(CAUSES.map(cause => [cause, color(cause)]))
  for (const band of of.bands) {
    const left = Math.floor(plot.valToPos(band.from, 'x', true))
    const right = Math.max(left + 1, Math.floor(plot.valToPos(band.to, 'x', true)))
    if (right < bbox.left || left > bbox.left + bbox.width) continue
    let bottom = bbox.top + bbox.height
    for (const cause of CAUSES) {
      const height = (band.shares[cause] ?? 0) * bbox.height
      if (height <= 0) continue
      ctx.fillStyle = colors[cause]!
      ctx.fillRect(left, bottom - height, right - left, height)
      bottom -= height
    }
  }
  ctx.restore()
}
