// Requests to the API: what they send, and what becomes of an answer that is none. The session's cookie is the browser's.
import { read } from './read'

export interface FieldProblem { field: string; rule: string }

/** An answer that says no, or no answer at all (status 0). */
export class Refused extends Error {
  constructor(
    readonly status: number,
    readonly title: string,
    readonly detail: string,
    readonly errors: readonly FieldProblem[] = [],
    readonly retryAfterS = 0,
  ) {
    super(detail || title)
    this.name = 'Refused'
  }
}

/** One page of a list. `next`: the cursor of the page after it. */
export interface Page<T> { items: readonly T[]; next: string | null }
export type Query = Record<string, string | number | boolean | readonly (string | number)[] | null | undefined>

const TIMEOUT_MS = 30_000

export function address(path: string, query: Query = {}): string {
  const words = new URLSearchParams()
  for (const [name, value] of Object.entries(query)) {
    if (value === null || value === undefined || value === '') continue
    for (const one of Array.isArray(value) ? value : [value]) words.append(name, String(one))
  }
  const text = words.toString()
  return text ? `${path}?${text}` : path
}

export async function get<T>(path: string, query?: Query, signal?: AbortSignal): Promise<T> {
  return read(await (await send('GET', address(path, query), { signal })).text())
}

export async function getPage<T>(path: string, query?: Query, signal?: AbortSignal): Promise<Page<T>> {
  const answer = await send('GET', address(path, query), { signal })
  return { items: read<T[]>(await answer.text()), next: nextCursor(answer.headers.get('Link')) }
}

export interface Change { body?: unknown; reason?: string; ifMatch?: string }

export async function change<T>(method: 'POST' | 'PUT' | 'PATCH' | 'DELETE', path: string, how: Change = {}): Promise<T> {
  const headers: Record<string, string> = { 'Liver-Console': '1' }
  if (method === 'POST') headers['Idempotency-Key'] = freshKey()
  if (how.reason) headers['Liver-Reason'] = encodeURIComponent(how.reason)
  if (how.ifMatch) headers['If-Match'] = how.ifMatch
  if (how.body !== undefined) headers['Content-Type'] = 'application/json'
  const body = how.body === undefined ? undefined : JSON.stringify(how.body)
  const answer = await send(method, path, { headers, body })
  return answer.status === 204 ? (undefined as T) : read(await answer.text())
}

/** `</api/...?cursor=X>; rel="next"` -> X. */
export function nextCursor(link: string | null): string | null {
  const found = link?.match(/<([^>]*)>\s*;\s*rel="?next"?/)
  return found?.[1] ? new URL(found[1], 'http://any').searchParams.get('cursor') : null
}

async function send(method: string, where: string, init: RequestInit): Promise<Response> {
  const limit = AbortSignal.timeout(TIMEOUT_MS)
  const signal = init.signal ? AbortSignal.any([init.signal, limit]) : limit
  let answer: Response
  try {
    answer = await fetch(where, { ...init, method, signal, credentials: 'same-origin' })
  } catch (error) {
    if (init.signal?.aborted) throw error
    const detail = limit.aborted ? `No answer within ${TIMEOUT_MS / 1000} s.` : 'The service cannot be reached from this browser.'
    throw new Refused(0, 'No answer', detail)
  }
  if (answer.ok) return answer
  throw await refusal(answer)
}

async function refusal(answer: Response): Promise<Refused> {
  const problem: Record<string, unknown> = await answer.text().then(text => read<Record<string, unknown>>(text)).catch(() => ({}))
  const title = typeof problem.title === 'string' ? problem.title : answer.statusText || `Status ${answer.status}`
  const detail = typeof problem.detail === 'string' ? problem.detail : ''
  const errors = Array.isArray(problem.errors) ? (problem.errors as FieldProblem[]) : []
  return new Refused(answer.status, title, detail, errors, Number(answer.headers.get('Retry-After')) || 0)
}

// crypto.randomUUID is missing where the page came over plain HTTP from another machine.
function freshKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16))
  return Array.from(bytes, byte => byte.toString(16).padStart(2, '0')).join('')
}
