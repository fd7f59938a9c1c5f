// Ranges of time that a screen can show. Pure.
export const RANGES = [['1h', '1 h'], ['6h', '6 h'], ['24h', '24 h'], ['7d', '7 d'], ['30d', '30 d'], ['all', 'lifetime']] as const
export type Range = (typeof RANGES)[number][0]
const HOURS: Record<Range, number> = { '1h': 1, '6h': 6, '24h': 24, '7d': 168, '30d': 720, all: 0 }

export const asRange = (value: unknown, otherwise: Range): Range => (RANGES.some(([range]) => range === value) ? (value as Range) : otherwise)

/** The query of a range that ends now. Begins at a whole minute, so that an answer serves for a while. */
export function sinceOf(range: Range, nowMs: number): { since?: string } {
  if (range === 'all') return {}
  return { since: new Date(Math.floor(nowMs / 60_000) * 60_000 - HOURS[range] * 3_600_000).toISOString() }
}
