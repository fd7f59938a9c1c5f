// Phases of a handoff over its time. The critical path is drawn heavier and named. What ranks did inside a phase is known
// by its length only, and is shown so.
import { useState } from 'react'
import type { WaterfallOut } from '../api/types'
import { plural, seconds } from '../parts/format'
import { Moment } from '../parts/Moment'

type Bar = WaterfallOut['bars'][number]
export const PHASE_COLUMNS = ['phase', 'starts_s', 'seconds', 'critical'] as const
export const phaseRows = (of: WaterfallOut | undefined) => (of?.bars ?? []).map(bar => [bar.name, bar.starts_s, bar.seconds, bar.critical])
const isPlaced = (bar: Bar) => bar.group !== 'ranks' || bar.critical

/** Seconds that the critical bars cover together. Pure. */
export function coveredS(bars: readonly Bar[]): number {
  let covered = 0
  let end = 0
  for (const bar of bars.filter(each => each.critical).sort((a, b) => a.starts_s - b.starts_s)) {
    covered += Math.max(0, bar.starts_s + bar.seconds - Math.max(end, bar.starts_s))
    end = Math.max(end, bar.starts_s + bar.seconds)
  }
  return covered
}

export function Waterfall({ of, isOpen }: { of: WaterfallOut; isOpen?: boolean }) {
  const [showsAll, setShowsAll] = useState(false)
  if (of.bars.length === 0) return <p className="empty">No phase is reported yet.</p>
  const placed = of.bars.filter(isPlaced).sort((a, b) => a.starts_s - b.starts_s || b.seconds - a.seconds)
  const inner = of.bars.filter(bar => !isPlaced(bar)).sort((a, b) => b.seconds - a.seconds)
  const whole = Math.max(of.total_s, ...placed.map(bar => bar.starts_s + bar.seconds), 1e-9)
  const longest = Math.max(inner[0]?.seconds ?? 0, 1e-9)
  const labels = new Map(of.bars.map(bar => [bar.name, bar.label]))
  const path = of.critical_path.map(name => labels.get(name) ?? name)
  return (
    <figure className="stack">
      <figcaption className="small">
        <span className="soft">Critical path: </span>
        {path.length === 0 ? <span className="quiet">not known yet</span> : <><strong>{path.join(' → ')}</strong> <span className="soft">({seconds(coveredS(of.bars))} of {seconds(of.total_s)})</span></>}
      </figcaption>
      <div className="waterfall" role="table" aria-label="Phases">
        {placed.map((bar, at) => <Row key={bar.name} bar={bar} left={bar.starts_s / whole} width={bar.seconds / whole} isOpen={isOpen === true && at === placed.length - 1} />)}
        <div role="presentation" className="scale">{[0, 0.25, 0.5, 0.75, 1].map(part => <span key={part}>{seconds(whole * part)}</span>)}</div>
      </div>
      <p className="quiet small">From <Moment at={of.from_at} /> on. {placed.some(bar => bar.group === 'pause') && 'Amber: nobody trains.'}</p>
      {inner.length > 0 && <div><button type="button" className="plain" style={{ marginLeft: -6 }} aria-expanded={showsAll} onClick={() => setShowsAll(!showsAll)}>{showsAll ? 'Hide' : 'Show'} {plural(inner.length, 'part')} of what the ranks did</button></div>}
      {showsAll && <>
        <p className="quiet small">How long each took; when each began is not recorded.</p>
        <div className="waterfall plain" role="table" aria-label="Parts of what the ranks did">{inner.map(bar => <Row key={bar.name} bar={bar} left={0} width={bar.seconds / longest} />)}</div>
      </>}
    </figure>
  )
}

function Row({ bar, left, width, isOpen }: { bar: Bar; left: number; width: number; isOpen?: boolean }) {
  const what = isPlaced(bar) ? `${bar.label}: from ${seconds(bar.starts_s)}, for ${seconds(bar.seconds)}${bar.critical ? ', on the critical path' : ''}` : `${bar.label}: ${seconds(bar.seconds)}`
  const look = [bar.critical && 'critical', bar.group === 'pause' && 'pause', isOpen && 'open'].filter(Boolean).join(' ')
  return (
      <div role="row" className="contents" title={what}>
        <span role="rowheader" className={`name ${bar.critical ? 'critical' : ''}`}>{bar.label}</span>
        <span role="cell" className="lane"><b className={look} style={{ left: `${left * 100}%`, width: `${width * 100}%` }} /></span>
        <span role="cell" className="took">{seconds(bar.seconds)}{bar.critical && <span className="hidden-text">, on the critical path</span>}</span>
      </div>
  )
}
