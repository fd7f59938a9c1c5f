// Interruptions of a pool over 48 hours, an hour a bar: announced ones, and above them nodes that were lost without a word.
import { nowMs } from '../../api/clock'
import type { PoolOut } from '../../api/types'
import { localTime, plural, utcTime } from '../../parts/format'

const HEIGHT = 18
const sum = (values: readonly number[]) => values.reduce((all, each) => all + each, 0)
export const total = (of: PoolOut): number => sum(of.interruptions) + sum(of.unannounced)

export const HOUR_COLUMNS = ['pool', 'hour_utc', 'announced', 'unannounced'] as const
const hourAt = (of: PoolOut, at: number): string => new Date(Date.parse(of.since) + at * 3_600_000).toISOString()
export const hourRows = (of: PoolOut) => of.interruptions.map((announced, at) => [of.pool, hourAt(of, at), announced, of.unannounced[at] ?? 0])

export function Strip({ of }: { of: PoolOut }) {
  const most = Math.max(2, ...of.interruptions.map((announced, at) => announced + (of.unannounced[at] ?? 0)))
  const height = (value: number) => (value / most) * HEIGHT
  return (
    <span className="row" style={{ flexWrap: 'nowrap' }}>
      <svg width="192" height={HEIGHT} viewBox={`0 0 192 ${HEIGHT}`} style={{ flex: 'none' }} role="img" aria-label={`${of.pool}: ${plural(total(of), 'interruption')} in 48 hours, ${sum(of.unannounced)} of them without a notice`}>
        <rect width="192" height={HEIGHT} fill="var(--sunken)" rx="2" />
        <path d={`M96 0v${HEIGHT}`} stroke="var(--line)" />
        {of.interruptions.map((announced, at) => {
          const silent = of.unannounced[at] ?? 0
          if (announced + silent === 0) return null
          return (
            <g key={at}>
              <title>{`${localTime(hourAt(of, at), nowMs())} (${utcTime(hourAt(of, at))}): ${plural(announced, 'announced', 'announced')}, ${silent} without a notice`}</title>
              <rect x={at * 4} width="3" y={HEIGHT - height(announced)} height={height(announced)} fill="var(--pause)" />
              <rect x={at * 4} width="3" y={HEIGHT - height(announced + silent)} height={height(silent)} fill="var(--lost)" />
            </g>
          )
        })}
      </svg>
      <span className="quiet nowrap">{total(of)}</span>
    </span>
  )
}
