// From the API's timeline to what is drawn, over steps, time or dollars. Pure.
import type { TimelineOut } from '../api/types'
import type { Axis } from '../router'

export type Mark = TimelineOut['marks'][number]
export interface Band { from: number; to: number; shares: Record<string, number> }
export interface Drawn {
  x: number[]
  loss: (number | null)[]
  tokens: (number | null)[]
  goodput: (number | null)[]
  /** The points behind `x`, for what is read out under the cursor. */
  points: TimelineOut['points']
  bands: Band[]
  marks: { x: number; mark: Mark }[]
  range: [number, number]
}

export function drawn(timeline: TimelineOut, axis: Axis): Drawn {
  const points = axis === 'step' ? eachStepOnce(timeline.points) : timeline.points
  const place = { step: (p: { step: number | null }) => p.step ?? 0, time: (p: { at: string }) => Date.parse(p.at) / 1000, dollars: (p: { dollars: number }) => p.dollars }[axis] as (p: object) => number
  const x = increasing(points.map(place))
  const bands = bandsOf(timeline, axis)
  const marks = timeline.marks.filter(mark => axis !== 'step' || mark.step !== null).map(mark => ({ x: place(mark), mark }))
  const all = [x[0], x.at(-1), bands[0]?.from, bands.at(-1)?.to, ...marks.map(mark => mark.x)].filter(each => each !== undefined)
  const low = all.length ? Math.min(...all) : 0
  const high = all.length ? Math.max(...all) : 1
  return {
    x, points, bands, marks, loss: points.map(p => p.loss), tokens: points.map(p => p.tokens_per_s),
    goodput: x.map(at => productiveAt(bands, at)), range: high > low ? [low, high] : [low, low + 1],
  }
}

/** A step that was made again after a restart counts as it was made the last time. */
function eachStepOnce(points: TimelineOut['points']): TimelineOut['points'] {
  const last = new Map(points.map(point => [point.step, point]))
  return [...last.values()].sort((a, b) => a.step - b.step)
}

/** The chart wants every place greater than the one before. */
function increasing(values: number[]): number[] {
  let before = -Infinity
  return values.map(value => (before = value > before ? value : before + Math.abs(before) * 1e-12 + 1e-12))
}

const bandsKnown = { time: new WeakMap<TimelineOut['buckets'], Band[]>(), dollars: new WeakMap<TimelineOut['buckets'], Band[]>() }

/** Over steps they depend on the points. Otherwise they stay as they are while steps come in, which leave the buckets alone:
    a month of them is not summed up again for each step. */
function bandsOf(timeline: TimelineOut, axis: Axis): Band[] {
  if (axis === 'step') return bandsAnew(timeline, axis)
  const bands = bandsKnown[axis].get(timeline.buckets) ?? bandsAnew(timeline, axis)
  bandsKnown[axis].set(timeline.buckets, bands)
  return bands
}

function bandsAnew(timeline: TimelineOut, axis: Axis): Band[] {
  let step = timeline.points[0] ? timeline.points[0].step - 1 : 0
  let next = 0
  let paid = 0
  return timeline.buckets.map(bucket => {
    const ends = Date.parse(bucket.ends_at)
    let reached = step
    for (; next < timeline.points.length && Date.parse(timeline.points[next]!.at) <= ends; next++) reached = Math.max(reached, timeline.points[next]!.step)
    const [from, to] = {
      step: [step, reached], dollars: [paid, bucket.dollars_until],
      time: [Date.parse(bucket.starts_at) / 1000, ends / 1000],
    }[axis] as [number, number]
    step = reached
    paid = bucket.dollars_until
    const whole = Object.values(bucket.slot_seconds).reduce((sum, each) => sum + each, 0)
    const shares = Object.fromEntries(Object.entries(bucket.slot_seconds).map(([cause, each]) => [cause, whole > 0 ? each / whole : 0]))
    return { from, to, shares }
  })
}

function productiveAt(bands: readonly Band[], x: number): number | null {
  let low = 0
  let high = bands.length - 1
  while (low < high) {
    const middle = (low + high) >> 1
    if (bands[middle]!.to < x) low = middle + 1
    else high = middle
  }
  return bands[low]?.shares.productive ?? null
}
