// Which paths the API answers, with what, and which filters it takes: all from its committed description, so that a
// screen that asks for something else does not compile.
import type { paths } from './schema.gen'

type Described = paths
type Of<P extends keyof Described> = Described[P] extends { get: { responses: { 200: { content: { 'application/json': infer D } } } } } ? D : never
type Filters<P extends keyof Described> = Described[P] extends { get: { parameters: { query?: infer Q } } } ? NonNullable<Q> : never

export type GetPath = { [P in keyof Described]: [Of<P>] extends [never] ? never : P }[keyof Described]
export type Answer<P extends GetPath> = Of<P>
/** The filters of a path; null leaves one out. */
export type Filter<P extends GetPath> = [Filters<P>] extends [never] ? Record<string, never> : { [K in keyof Filters<P>]?: Filters<P>[K] | null }
export type ListPath = { [P in GetPath]: Of<P> extends readonly unknown[] ? P : never }[GetPath]
export type Item<P extends ListPath> = Of<P> extends readonly (infer D)[] ? D : never

/** `/jobs/{job_id}`, `{ job_id: 'a b' }` -> `/jobs/a%20b`. */
export function fill(path: string, names: Readonly<Record<string, string>>): string {
  return path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(names[name] ?? ''))
}
