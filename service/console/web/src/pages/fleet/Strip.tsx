// Interruptions of a pool over 48 hours, an hour a bar: announced ones, and above them nodes that were lost without a word.
import type { PoolOut } from '../../api/types'
import { localTime, plural } from '../../parts/format'
import { nowMs } from '../../api/clock'

const HEIGHT = 18

export function Strip({ of, pool }: { of: PoolOut['interruptions']; pool: string }) {
  const most = Math.max(2, ...of.hours.map((hour, at) => hour + (of.unannounced[at] ?? 0)))
  const begin = Date.parse(of.since)
  const lost = of.unannounced.reduce((sum, each) => sum + each, 0)
  const height = (value: number) => (value / most) * HEIGHT
  return (
    <span className="row" style={{ flexWrap: 'nowrap' }}>
      <svg className="strip-48" width="192" height={HEIGHT} viewBox={`0 0 192 ${HEIGHT}`} role="img" aria-label={`${pool}: ${plural(of.total, 'interruption')} in 48 hours, ${lost} of them without a notice`}>
        <rect width="192" height={HEIGHT} fill="var(--sunken)" rx="2" />
        <path d={`M96 0v${HEIGHT}`} stroke="var(--line)" />
        {of.hours.map((hour, at) => {
          const silent = of.unannounced[at] ?? 0
          if (hour + silent === 0) return null
          return (
            <g key={at}>
              <title>{`${localTime(new Date(begin + at * 3_600_000).toISOString(), nowMs())}: ${plural(hour, 'announced')}, ${silent} without a notice`}</title>
              <rect x={at * 4} width="3" y={HEIGHT - height(hour)} height={height(hour)} fill="var(--pause)" />
              <rect x={at * 4} width="3" y={HEIGHT - height(hour + silent)} height={height(silent)} fill="var(--lost)" />
            </g>
          )
        })}
      </svg>
      <span className="quiet">{of.total}</span>
    </span>
  )
}
