// Points in time: local, with UTC and the distance on hover.
import { useNow } from '../api/clock'
import { localTime, none, span, utcTime } from './format'

export function Moment({ at }: { at: string | null | undefined }) {
  const now = useNow()
  if (!at) return <span className="quiet">{none}</span>
  return <time dateTime={at} title={`${utcTime(at)}, ${distance(at, now)}`} className="nowrap">{localTime(at, now)}</time>
}

/** `12 s ago`, `in 2 min`, anew each second. */
export function Distance({ at }: { at: string | null | undefined }) {
  const now = useNow()
  if (!at) return <span className="quiet">{none}</span>
  return <time dateTime={at} title={utcTime(at)} className="nowrap">{distance(at, now)}</time>
}

export function distance(at: string, nowMs: number): string {
  const apart = (Date.parse(at) - nowMs) / 1000
  if (Math.abs(apart) < 1.5) return 'now'
  return apart < 0 ? `${span(-apart)} ago` : `in ${span(apart)}`
}

/** What is left until a deadline. Read out once, not every second. */
export function Countdown({ until, isOver = false }: { until: string | null; isOver?: boolean }) {
  const now = useNow()
  if (!until) return <span className="quiet">no deadline</span>
  const left = (Date.parse(until) - now) / 1000
  if (isOver || left <= 0) return <time dateTime={until} title={utcTime(until)} className="quiet nowrap">was due {span(-left)} ago</time>
  const level = left < 15 ? 'bad' : left < 60 ? 'warn' : ''
  return (
    <time dateTime={until} title={utcTime(until)} className={`countdown nowrap ${level}`} role="timer" aria-live="off">
      {left < 600 ? `${Math.floor(left / 60)}:${String(Math.floor(left % 60)).padStart(2, '0')}` : span(left)} left
    </time>
  )
}
