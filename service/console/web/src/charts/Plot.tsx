// uPlot in React: made once, given new data as it comes, made anew only for another theme or other series.
import { useEffect, useRef } from 'react'
import uPlot from 'uplot'
import 'uplot/dist/uPlot.min.css'
import { color, useThemeVersion } from './theme_colors'

export const AXIS_PX = 58
export interface Line { name: string; colorName: string; isHidden?: boolean; scale?: [number | null, number | null] }

interface PlotProps {
  label: string
  data: uPlot.AlignedData
  lines: readonly Line[]
  height: number
  range: [number, number]
  formatX: (value: number) => string
  formatY: (value: number) => string
  /** Shows the names of the x axis; of several plots over one axis only the last one does. */
  hasAxis?: boolean
  group?: string
  isTime?: boolean
  onCursor?: (index: number | null) => void
  onSelect?: (from: number, to: number) => void
  drawUnder?: (plot: uPlot) => void
  drawOver?: (plot: uPlot) => void
}

export default function Plot(props: PlotProps) {
  const box = useRef<HTMLDivElement>(null)
  const plot = useRef<uPlot | null>(null)
  const now = useRef(props)
  now.current = props
  const theme = useThemeVersion()
  const kind = `${props.lines.map(line => line.name).join()} ${props.hasAxis} ${props.isTime} ${props.height} ${theme}`

  useEffect(() => {
    const place = box.current!
    const made = new uPlot(options(now, place.clientWidth), now.current.data, place)
    plot.current = made
    const watch = new ResizeObserver(() => place.clientWidth > 0 && made.setSize({ width: place.clientWidth, height: now.current.height }))
    watch.observe(place)
    return () => {
      watch.disconnect()
      made.destroy()
      plot.current = null
    }
  }, [kind])

  useEffect(() => {
    plot.current?.setData(props.data, true)
  }, [props.data, props.range[0], props.range[1]])

  return <div ref={box} className="chart" style={{ height: props.height }} role="img" aria-label={props.label} />
}

function options(now: { current: PlotProps }, width: number): uPlot.Options {
  const { lines, height, hasAxis, group, isTime } = now.current
  const axis = { stroke: color('text-3'), grid: { stroke: color('line'), width: 1 }, ticks: { stroke: color('line'), width: 1, size: 4 }, font: '11px system-ui, sans-serif', gap: 4 }
  return {
    width, height, legend: { show: false }, padding: [6, 10, hasAxis ? 0 : 4, 0],
    cursor: { y: false, points: { size: 5 }, drag: { x: true, y: false, setScale: false }, ...(group ? { sync: { key: group, setSeries: false } } : {}) },
    scales: {
      x: { time: isTime ?? false, range: () => now.current.range },
      y: { range: (_plot, low, high) => bounds(now.current.lines[0]?.scale, low, high) },
    },
    axes: [
      { ...axis, size: hasAxis ? 28 : 0, space: isTime ? 90 : 64, ticks: { ...axis.ticks, show: hasAxis ?? false }, values: (_plot, values) => (hasAxis ? isTime ? timeTicks(values) : values.map(value => now.current.formatX(value)) : values.map(() => '')) },
      { ...axis, size: AXIS_PX, values: (_plot, values) => values.map(value => now.current.formatY(value)), space: 28 },
    ],
    series: [{}, ...lines.map(line => ({ label: line.name, stroke: color(line.colorName), width: line.isHidden ? 0 : 1.5, points: { show: false }, spanGaps: false }))],
    hooks: {
      setCursor: [plot => now.current.onCursor?.(plot.cursor.idx ?? null)],
      setSelect: [plot => {
        if (plot.select.width > 6) now.current.onSelect?.(plot.posToVal(plot.select.left, 'x'), plot.posToVal(plot.select.left + plot.select.width, 'x'))
        if (plot.select.width > 0) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false)
      }],
      drawAxes: [plot => now.current.drawUnder?.(plot)],
      draw: [plot => now.current.drawOver?.(plot)],
    },
  }
}

function bounds(fixed: Line['scale'], low: number | null, high: number | null): [number, number] {
  const bottom = fixed?.[0] ?? low ?? 0
  const top = fixed?.[1] ?? high ?? 1
  const room = (top - bottom) * 0.06 || Math.abs(top) * 0.1 || 1
  return [fixed?.[0] ?? bottom - room, fixed?.[1] ?? top + room]
}

/** Local clock times; the first of a day says which day. */
export function timeTicks(values: readonly number[]): string[] {
  const isFine = values.length > 1 && values[1]! - values[0]! < 60
  let day = values.length > 0 ? new Date(values[0]! * 1000).toDateString() : ''
  return values.map(value => {
    const at = new Date(value * 1000)
    const clock = [at.getHours(), at.getMinutes(), ...(isFine ? [at.getSeconds()] : [])].map(part => String(part).padStart(2, '0')).join(':')
    if (at.toDateString() === day) return clock
    day = at.toDateString()
    const name = `${at.toLocaleString('en-US', { month: 'short' })} ${at.getDate()}`
    return at.getHours() + at.getMinutes() === 0 ? name : `${name} ${clock}`
  })
}
