// What a replay is asked with, and what is drawn of its answer.
import { readFileSync } from 'node:fs'
import { describe, expect, test } from 'vitest'
import { replayed } from '../../../test/sample'
import { bodyOf, EMPTY, enactedIn, FORMATS, gapOf, KNOBS, LOSSES, nodesOver, placeOf, PRICES_CHARS_MAX, tokensOver, TRACE_CHARS_MAX } from './replay'

interface Rule { default?: unknown; minimum?: number; exclusiveMinimum?: number; maximum?: number; maxLength?: number; type?: string; enum?: string[]; anyOf?: Rule[] }
const described = JSON.parse(readFileSync('../../../docs/openapi.json', 'utf8')).components.schemas as Record<string, { enum?: string[]; properties: Record<string, Rule> }>

describe('the form', () => {
  test('has every knob of the service, with its default and its limits', () => {
    const theirs = described.WhatIfKnobs!.properties
    expect(KNOBS.map(knob => knob.name).sort()).toEqual(Object.keys(theirs).sort())
    for (const knob of KNOBS) {
      const whole = theirs[knob.name]!
      const rule = whole.anyOf?.find(each => each.type !== 'null') ?? whole
      if (whole.default !== null) expect(Number(knob.usual), knob.name).toBe(whole.default)
      expect(knob.most, knob.name).toBe(rule.maximum ?? rule.maxLength)
      expect(knob.isText ? 'string' : knob.isWhole ? 'integer' : 'number', knob.name).toBe(rule.type)
      if (!knob.isText) expect(knob.least, knob.name).toBe(knob.above ? rule.exclusiveMinimum : rule.minimum)
    }
    expect(FORMATS.map(([format]) => format).sort()).toEqual([...described.TraceFormat!.enum!].sort())
    expect(TRACE_CHARS_MAX).toBe(described.TraceIn!.properties.text!.maxLength)
    expect(PRICES_CHARS_MAX).toBe(described.WhatIfAsk!.properties.prices!.anyOf!.find(each => each.type === 'string')!.maxLength)
  })

  test('sends what is entered and nothing else', () => {
    expect(bodyOf('gpt', EMPTY)).toEqual({ body: { job: 'gpt', builtin: 'own-48h', knobs: {} }, problems: [] })
    const trace = { name: 'p3.csv', text: '0,add,a\n' }
    const { body, problems } = bodyOf('gpt', { ...EMPTY, from: 'file', trace, format: 'events', prices: { name: 'x', text: 'pool' }, knobs: { notice_s: ' 30 ', device: 'H100', gang: '' }, machines: true })
    expect(problems).toEqual([])
    expect(body).toEqual({ job: 'gpt', trace: { ...trace, format: 'events' }, prices: 'pool', machines: true, knobs: { notice_s: 30, device: 'H100' } })
  })

  test.each([
    ['notice_s', 'soon', 'must be a number'], ['notice_s', '-1', 'must be at least 0'], ['notice_s', '1e9', 'must be at most 3,600'], ['spares_max', '1.5', 'must be a whole number'], ['usd_per_mtok', '0', 'must be more than 0'],
  ] as const)('%s = %s is refused before it is sent', (name, text, rule) => {
    expect(bodyOf('gpt', { ...EMPTY, knobs: { [name]: text } }).problems).toEqual([{ field: `knobs.${name}`, rule }])
  })

  test('a file is asked for where none is chosen, and one that is too long is not sent', () => {
    expect(bodyOf('gpt', { ...EMPTY, from: 'file' }).problems).toEqual([{ field: 'trace', rule: 'choose a file' }])
    const long = { name: 'x', text: 'x'.repeat(TRACE_CHARS_MAX + 1) }
    expect(bodyOf('gpt', { ...EMPTY, from: 'file', trace: long }).problems[0]!.field).toBe('trace')
  })

  test('every problem of the service has its place', () => {
    expect(['knobs.notice_s', 'trace.text', 'trace', 'builtin', 'prices', 'job', '(whole)', 'knobs.moon'].map(placeOf)).toEqual(['notice_s', 'trace', 'trace', 'trace', 'prices', '', '', ''])
  })
})

describe('the answer', () => {
  test('says what the machines did, by rung and end', () => {
    expect(enactedIn({ ...replayed, enacted: null })).toBe('')
    expect(enactedIn({ ...replayed, enacted: { 'live active': 3, 'drop_step aborted': 1, 'restart failed': 0 } })).toBe('3 live active, 1 drop step aborted')
  })

  test('runs are drawn over the same moments, and none makes tokens out of nothing', () => {
    const { hours, values } = tokensOver(replayed.policies)
    expect(hours).toEqual([0, 0.5, 1, 1.5, 2])
    expect(values).toEqual([[0, 200, 400, 600, 900], [0, 250, 500, 500, 500]])
  })

  test('nodes hold until the next moment', () => {
    const [hours, offered, , used] = nodesOver(replayed.policies[0]!)
    expect(hours).toEqual([0, 1, 1, 1.5, 1.5, 2, 2])
    expect(offered).toEqual([4, 4, 3, 3, 3, 3, 3])
    expect(used).toEqual([4, 4, 3, 3, 2, 2, 2])
  })

  test('causes account for the whole gap, or the page says that they do not', () => {
    for (const run of replayed.policies) expect(gapOf(run, replayed.ideal_tokens)).toEqual({ gap: replayed.ideal_tokens - run.tokens, isWhole: true })
    const run = replayed.policies[0]!
    expect(gapOf({ ...run, tokens_lost_by: { ...run.tokens_lost_by, [LOSSES[0]]: 1 } }, replayed.ideal_tokens).isWhole).toBe(false)
  })
})
