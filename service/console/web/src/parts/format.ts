// Numbers as people read them, always with their unit. `none` stands for what is not known. Pure.
export const none = '–'
type Maybe = number | null | undefined

// Made once: `toLocaleString` makes one for each number, and screens write thousands of them.
const formats = new Map<number, Intl.NumberFormat>()
function digits(value: number, places: number): string {
  const known = formats.get(places)
  const format = known ?? new Intl.NumberFormat('en-US', { minimumFractionDigits: places, maximumFractionDigits: places })
  if (!known) formats.set(places, format)
  return format.format(value)
}

export function dollars(value: Maybe): string {
  if (value === null || value === undefined) return none
  const size = Math.abs(value)
  const sign = value < 0 ? '−' : ''
  if (size === 0) return '$0.00'
  if (size < 0.0001) return `${sign}<$0.0001`
  // The first two digits that count, however cheap a node is.
  const places = size >= 1000 ? 0 : size >= 0.1 ? 2 : size >= 0.01 ? 3 : 4
  return `${sign}$${digits(size, places)}`
}

export function seconds(value: Maybe): string {
  if (value === null || value === undefined) return none
  const size = Math.abs(value)
  if (size < 0.0005) return '0 s'
  if (size < 1) return `${digits(value * 1000, size < 0.01 ? 1 : 0)} ms`
  if (size < 60) return `${digits(value, size < 10 ? 2 : 1)} s`
  return span(value)
}

/** Whole units, the two greatest: `3 d 4 h`, `12 min 5 s`. */
export function span(value: Maybe): string {
  if (value === null || value === undefined) return none
  const whole = Math.round(Math.abs(value))
  const units: [number, string][] = [[86_400, 'd'], [3_600, 'h'], [60, 'min'], [1, 's']]
  const at = units.findIndex(([size]) => whole >= size)
  if (at < 0) return '0 s'
  const [size, name] = units[at]!
  const first = `${Math.floor(whole / size)} ${name}`
  const next = units[at + 1]
  const rest = next ? Math.floor((whole % size) / next[0]) : 0
  return rest > 0 && next ? `${first} ${rest} ${next[1]}` : first
}

export function bytes(value: Maybe): string {
  if (value === null || value === undefined) return none
  const names = ['B', 'kB', 'MB', 'GB', 'TB', 'PB']
  let size = value
  let at = 0
  while (Math.abs(size) >= 999.5 && at < names.length - 1) (size /= 1000), at++
  return `${at === 0 ? size : digits(size, Math.abs(size) < 10 ? 2 : 1)} ${names[at]}`
}

export const rate = (value: Maybe): string => (value === null || value === undefined ? none : `${bytes(value)}/s`)
export const count = (value: Maybe): string => (value === null || value === undefined ? none : digits(Math.round(value), 0))
export const percent = (value: Maybe): string => (value === null || value === undefined ? none : `${digits(value * 100, value > 0.9995 || value === 0 ? 0 : 1)} %`)

/** Three digits that count. */
export function figure(value: Maybe): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return none
  const size = Math.abs(value)
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2)
  return digits(value, size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4)
}

/** A round number at an axis, without zeros that say nothing. */
export const tick = (value: number): string => (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-4) ? value.toExponential() : String(Number(value.toPrecision(6))))

export const plural = (value: number, one: string, many = `${one}s`): string => `${count(value)} ${value === 1 ? one : many}`

const sameDay = (a: Date, b: Date) => a.toDateString() === b.toDateString()
const MONTHS = ['Jan', 'Feb', 'Mar', 'Apr', 'May', 'Jun', 'Jul', 'Aug', 'Sep', 'Oct', 'Nov', 'Dec']
const two = (value: number) => String(value).padStart(2, '0')

/** Local time, with the day where it is another one than `now`'s. */
export function localTime(iso: string, nowMs: number): string {
  const at = new Date(iso)
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`
  if (sameDay(at, new Date(nowMs))) return clock
  const year = at.getFullYear() === new Date(nowMs).getFullYear() ? '' : `${at.getFullYear()} `
  return `${year}${MONTHS[at.getMonth()]} ${at.getDate()} ${clock}`
}

export const utcTime = (iso: string): string => `${new Date(iso).toISOString().replace('T', ' ').slice(0, 19)} UTC`
export const words = (name: string): string => name.replaceAll('_', ' ')

/** `TP2xPP2`, with the sign people write. */
export const layoutName = (layout: string | null | undefined): string => (layout ? layout.replaceAll('x', '×') : none)

const AXIS = '(?:TP|PP|VPP|CP|EP|ETP|DP)\\d+'
const LAYOUT = new RegExp(`\\b${AXIS}(?:x${AXIS})+`, 'g')
/** What the service says in words, with the signs people write: layouts as everywhere else, `±` for `+-`. */
export const prose = (text: string): string => text.replace(LAYOUT, layoutName).replace(/\+-(?=\d)/g, '±')
export const shortId = (id: string): string => id.slice(0, 8)
