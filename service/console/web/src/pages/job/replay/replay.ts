// A replay of a job on a trace of capacity: what can be set, what is sent, and what is drawn of the answer. Pure.
import type * as T from '../../../api/types'

export type Run = T.WhatIfOut['policies'][number]
type Knobs = T.WhatIfAsk['knobs']
export type KnobName = keyof Knobs
/** `usual`: what the service takes where nothing is entered. `isWhole`: no fractions. `isText`: no number at all. */
export interface Knob { name: KnobName; label: string; unit: string; usual: string; least: number; most: number; isWhole?: boolean; isText?: boolean; above?: boolean; means: string }

/** The same rules as the service's; a test compares them with its description. */
export const KNOBS: readonly Knob[] = [
  { name: 'notice_s', label: 'Notice', unit: 's', usual: '120', least: 0, most: 3_600, means: 'How long before its end a loss is announced.' },
  { name: 'unannounced_share', label: 'Unannounced losses', unit: 'share', usual: '0.05', least: 0, most: 1, means: 'Share of the losses that nobody announces, 0 to 1.' },
  { name: 'change_s', label: 'A change loses', unit: 's', usual: 'by the size of the state', least: 0, most: 3_600, means: 'Training time that one change of nodes or layout loses.' },
  { name: 'acquire_s', label: 'Until a node is back', unit: 's', usual: 'job file, else 120', least: 0, most: 86_400, means: 'How long it takes to get a node again that was given back.' },
  { name: 'slots_per_node', label: 'GPUs of a node', unit: 'GPUs', usual: 'as the nodes here, else 1', least: 1, most: 64, isWhole: true, means: 'Slots of each node of the trace.' },
  { name: 'device', label: 'GPU', unit: '', usual: 'as the nodes here, else A100', least: 0, most: 256, isText: true, means: 'For predicted step times.' },
  { name: 'usd_per_mtok', label: 'Worth of a million tokens', unit: 'USD', usual: 'job file, else on-demand prices', least: 0, most: 1e9, above: true, means: 'What a million tokens is worth: dearer nodes are given back.' },
  { name: 'spares_max', label: 'Spare nodes at most', unit: 'nodes', usual: 'job file, else 4', least: 0, most: 64, isWhole: true, means: 'Nodes held beyond those that train.' },
  { name: 'gain_min', label: 'Gain that a change needs', unit: 'share', usual: 'job file, else 0', least: 0, most: 10, means: 'By which share another choice must be worth more.' },
  { name: 'gang', label: 'Fewest nodes', unit: 'nodes', usual: '0', least: 0, most: 10_000, isWhole: true, means: 'With fewer the job does not run.' },
]

export const TRACE_CHARS_MAX = 4 * 1024 * 1024
export const PRICES_CHARS_MAX = 1024 * 1024
export const FORMATS = [
  ['auto', 'as its first line says'], ['events', 'events: ms,add|remove,node'], ['event-lines', 'JSON lines [ms, add|remove, {nodes}]'],
  ['dated-counts', 'date, time, nodes'], ['step-curve', 'seconds, nodes'], ['counts', 'JSON of times and GPUs'],
] as const
export type Format = (typeof FORMATS)[number][0]
export const OWN_HOURS = [['48', '48 h'], ['168', '7 d'], ['720', '30 d']] as const
export type OwnHours = (typeof OWN_HOURS)[number][0]

export interface TextFile { name: string; text: string }
export interface Form { from: 'own' | 'file'; hours: OwnHours; trace: TextFile | null; format: Format; prices: TextFile | null; machines: boolean; knobs: Partial<Record<KnobName, string>> }
export const EMPTY: Form = { from: 'own', hours: '48', trace: null, format: 'auto', prices: null, machines: false, knobs: {} }
export interface Problem { field: string; rule: string }
export type Body = Omit<Partial<T.WhatIfAsk>, 'knobs' | 'trace'> & { knobs: Partial<Record<KnobName, number | string>>; trace?: TextFile & { format: Format } }

/** What is sent, or which fields keep it from being sent. */
export function bodyOf(jobId: string, form: Form): { body: Body; problems: readonly Problem[] } {
  const problems: Problem[] = []
  const knobs: Body['knobs'] = {}
  for (const knob of KNOBS) {
    const text = form.knobs[knob.name]?.trim() ?? ''
    if (text === '') continue
    const rule = ruleBroken(knob, text)
    if (rule) problems.push({ field: `knobs.${knob.name}`, rule })
    knobs[knob.name] = knob.isText ? text : Number(text)
  }
  if (form.from === 'file') {
    if (!form.trace) problems.push({ field: 'trace', rule: 'choose a file' })
    else if (form.trace.text.length > TRACE_CHARS_MAX) problems.push({ field: 'trace', rule: `must have at most ${TRACE_CHARS_MAX.toLocaleString('en-US')} characters` })
  }
  if (form.prices && form.prices.text.length > PRICES_CHARS_MAX) problems.push({ field: 'prices', rule: `must have at most ${PRICES_CHARS_MAX.toLocaleString('en-US')} characters` })
  const capacity = form.from === 'own' ? { builtin: `own-${form.hours}h` } : form.trace ? { trace: { ...form.trace, format: form.format } } : {}
  return { body: { job: jobId, ...capacity, ...(form.prices ? { prices: form.prices.text } : {}), ...(form.machines ? { machines: true } : {}), knobs }, problems }
}

function ruleBroken(knob: Knob, text: string): string | null {
  if (knob.isText) return text.length > knob.most ? `must have at most ${knob.most} characters` : null
  const value = Number(text)
  if (!Number.isFinite(value)) return 'must be a number'
  if (knob.isWhole && !Number.isInteger(value)) return 'must be a whole number'
  if (knob.above ? value <= knob.least : value < knob.least) return `must be ${knob.above ? 'more than' : 'at least'} ${knob.least}`
  return value > knob.most ? `must be at most ${knob.most.toLocaleString('en-US')}` : null
}

/** The part of the form to which a problem belongs; empty: to none of them. */
export function placeOf(field: string): 'trace' | 'prices' | KnobName | '' {
  const [first, second] = field.split('.')
  if (first === 'knobs' && KNOBS.some(knob => knob.name === second)) return second as KnobName
  return first === 'trace' || first === 'builtin' ? 'trace' : first === 'prices' ? 'prices' : ''
}

/** "3 live active", "1 restart failed": what became of handoffs and starts, by rung and end. */
export const enactedIn = (of: T.WhatIfOut): string => Object.entries(of.enacted ?? {}).filter(([, times]) => times > 0).map(([what, times]) => `${times} ${what.replaceAll('_', ' ')}`).join(', ')

export const LOSSES = ['not_held', 'layout', 'pause', 'lost_work', 'waiting'] as const
export type Loss = (typeof LOSSES)[number]
export const LOSS_WORDS: Record<Loss, string> = { not_held: 'nodes not held', layout: 'layout', pause: 'pauses', lost_work: 'steps done again', waiting: 'waiting' }
export const LOSS_MEANS: Record<Loss, string> = {
  not_held: 'Nodes could be had, and it did not hold them.', layout: 'Held nodes that the layout did not use, or not as well as the best one.',
  pause: 'It changed its layout.', lost_work: 'Steps that were made or begun, and had to be made again.', waiting: 'It had nodes and did not run.',
}
export const LOSS_COLORS: Record<Loss, string> = { not_held: 'idle', layout: 'bootstrap', pause: 'pause', lost_work: 'recompute', waiting: 'lost' }
const POLICY_WORDS: Record<string, string> = { liver: 'LiveR', hold_all: 'hold every node', reactive: 'change at once', checkpoint_restart: 'checkpoint and restart' }
export const policyName = (policy: string): string => POLICY_WORDS[policy] ?? policy.replaceAll('_', ' ')

/** Tokens of every policy over the same moments: hours, and a row of values for each run. Between its points a run goes on evenly. */
export function tokensOver(runs: readonly Run[]): { hours: number[]; values: number[][] } {
  const at = [...new Set(runs.flatMap(run => run.curve.map(point => point.at_s)))].sort((a, b) => a - b)
  return { hours: at.map(each => each / 3_600), values: runs.map(run => along(run, at)) }
}

function along(run: Run, at: readonly number[]): number[] {
  let next = 0
  return at.map(moment => {
    while (next < run.curve.length && run.curve[next]!.at_s <= moment) next++
    const before = run.curve[next - 1] ?? { at_s: 0, tokens: 0 }
    const after = run.curve[next]
    if (!after) return before.tokens
    return before.tokens + ((after.tokens - before.tokens) * (moment - before.at_s)) / (after.at_s - before.at_s)
  })
}

/** Nodes of one run as steps: each value holds until the next moment. */
export function nodesOver(run: Run): [number[], number[], number[], number[]] {
  const rows = run.curve.flatMap((point, index) => {
    const before = run.curve[index - 1]
    return before ? [{ ...before, at_s: point.at_s }, point] : [point]
  })
  return [rows.map(row => row.at_s / 3_600), rows.map(row => row.offered), rows.map(row => row.held), rows.map(row => row.used)]
}

/** What the free ideal made more than a run, and whether the causes account for all of it. */
export function gapOf(run: Run, idealTokens: number): { gap: number; isWhole: boolean } {
  const gap = idealTokens - run.tokens
  const sum = LOSSES.reduce((all, loss) => all + run.tokens_lost_by[loss], 0)
  return { gap, isWhole: Math.abs(sum - gap) <= 1e-6 * Math.max(1, idealTokens) }
}
