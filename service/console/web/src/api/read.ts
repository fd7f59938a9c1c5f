// JSON of the API as values whose text shows all that it holds. What a page would obey instead of showing it, such as
// characters that turn the direction of writing in a job's output, becomes an escape like \u202e. Pure.

// Tabs and ends of lines stay; `\\` is taken along, since what follows it is no escape.
const OBEYED = /\\\\|\\[bf]|\\u(?:00[01][\da-f]|007f|00[89][\da-f]|061c|200[ef]|202[89a-e]|206[6-9])|[\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gi
const KEPT = /^\\(?:\\|u000[9ad])$/i
const SHORT: Record<string, string> = { '\\b': '\\\\u0008', '\\f': '\\\\u000c' }

export function read<T>(json: string): T {
  return JSON.parse(json.replace(OBEYED, found => (KEPT.test(found) ? found : SHORT[found] ?? `\\\\u${code(found)}`))) as T
}

/** Of a character, or of its escape. */
function code(found: string): string {
  return found.length > 1 ? found.slice(2).toLowerCase() : found.charCodeAt(0).toString(16).padStart(4, '0')
}
