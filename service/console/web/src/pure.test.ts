// What is worked out without a screen: the stream's hub, deltas, the timeline's axes, logs, CSV, YAML, formats.
import { InfiniteQueryObserver, QueryClient } from '@tanstack/react-query'
import { describe, expect, test } from 'vitest'
import { applier, withSteps } from './api/apply'
import { nextCursor } from './api/client'
import { Hub, type FromHub, type SourceEvents } from './api/hub'
import { ask } from './api/queries'
import { read } from './api/read'
import { drawn } from './charts/timeline_data'
import { placeRanks } from './pages/job/RankCanvas'
import { rankText } from './pages/job/Ranks'
import { appended, linesOf } from './pages/job/log_lines'
import { csvText } from './parts/csv'
import { slackOf, story } from './pages/incident/story'
import { bytes, dollars, prose, seconds, span } from './parts/format'
import { yaml } from './parts/yaml'
import { done, fleet, handoff, incident, ranks, summary, timeline } from './test/sample'

test('text of the API shows what a page would obey instead, and is the same otherwise', () => {
  const text = 'loss \u202e0.1\u2069 \u001b[31m \u009b \\u202e \\ \b\f\u2029 \t\n\r "ü" \u{1f600}'
  const shown = 'loss \\u202e0.1\\u2069 \\u001b[31m \\u009b \\u202e \\ \\u0008\\u000c\\u2029 \t\n\r "ü" \u{1f600}'
  expect(read(JSON.stringify({ text, more: [text, 1, null] }))).toEqual({ text: shown, more: [shown, 1, null] })
  expect(read('"\\u202E \\\\u202e \\u000A\\u0009"')).toBe('\\u202e \\u202e \n\t')
})

function world() {
  let now = 0
  const timers: { at: number; call: () => void; isOff: boolean }[] = []
  const opened: { url: string; on: SourceEvents; isClosed: boolean }[] = []
  const hub = new Hub({
    open(url, on) {
      const source = { url, on, isClosed: false }
      opened.push(source)
      return { close: () => (source.isClosed = true) }
    },
    now: () => now,
    after(ms, call) {
      const timer = { at: now + ms, call, isOff: false }
      timers.push(timer)
      return () => (timer.isOff = true)
    },
  })
  const pass = (ms: number) => {
    const end = now + ms
    for (let next = due(end); next; next = due(end)) {
      next.isOff = true
      now = next.at
      next.call()
    }
    now = end
  }
  const due = (end: number) => timers.filter(timer => !timer.isOff && timer.at <= end).sort((a, b) => a.at - b.at)[0]
  const port = () => {
    const heard: FromHub[] = []
    return { heard, postMessage: (message: FromHub) => void heard.push(message) }
  }
  return { hub, opened, pass, port, open: () => opened.filter(source => !source.isClosed) }
}

describe('the hub of the stream', () => {
  test('any number of tabs share one stream, which ends with the last of them', () => {
    const { hub, port, open } = world()
    const [one, two] = [port(), port()]
    hub.receive(one, { watch: ['a'] })
    hub.receive(two, { watch: ['b', 'a'] })
    expect(open().map(source => source.url)).toEqual(['/api/v1/events?job_id=a&job_id=b'])
    open()[0]!.on.event('beat', '{}')
    expect(one.heard.at(-1)).toEqual({ event: 'beat', data: '{}' })
    expect(two.heard.at(-1)).toEqual({ event: 'beat', data: '{}' })
    hub.receive(one, { bye: true })
    expect(open().map(source => source.url)).toEqual(['/api/v1/events?job_id=a&job_id=b'])
    hub.receive(two, { bye: true })
    expect(open()).toEqual([])
  })

  test('a refused stream is tried again, ever more slowly, and tabs learn that they must poll', () => {
    const { hub, port, opened, pass, open } = world()
    const one = port()
    hub.receive(one, { watch: [] })
    open()[0]!.on.opened()
    expect(one.heard.at(-1)).toEqual({ state: 'live' })
    const tries: number[] = []
    for (let turn = 0; turn < 8; turn++) {
      opened.at(-1)!.on.failed(true)
      const before = opened.length
      let waited = 0
      while (opened.length === before && waited < 60_000) pass(500), (waited += 500)
      tries.push(waited)
    }
    expect(one.heard.at(-1)).toEqual({ state: 'away' })
    expect(tries).toEqual([1_000, 2_000, 4_000, 8_000, 15_000, 15_000, 15_000, 15_000])
    expect(open().length).toBe(1)
  })

  test('a stream that looks open but has lost its beat is taken for dead', () => {
    const { hub, port, opened, pass } = world()
    const one = port()
    hub.receive(one, { watch: [] })
    opened[0]!.on.opened()
    pass(19_000)
    expect(opened.length).toBe(1)
    pass(3_000)
    expect(opened[0]!.isClosed).toBe(true)
    expect(opened.length).toBe(2)
    opened[0]!.on.event('beat', '{}')
    expect(one.heard.at(-1)).toEqual({ state: 'away' })
  })

  test('a tab that has gone without a word is forgotten', () => {
    const { hub, port, pass, opened } = world()
    const [gone, alive] = [port(), port()]
    hub.receive(gone, { watch: ['old'] })
    for (let turn = 0; turn < 8; turn++) pass(30_000), hub.receive(alive, { watch: ['new'] })
    expect(opened.at(-1)!.url).toBe('/api/v1/events?job_id=new')
  })
})

describe('deltas', () => {
  const client = () => {
    const made = new QueryClient({ defaultOptions: { queries: { staleTime: Infinity, enabled: false } } })
    made.setQueryData(ask.fleet().queryKey, fleet)
    made.setQueryData(ask.handoff(handoff.handoff_id).queryKey, handoff)
    made.setQueryData(ask.jobs({}).queryKey, { pages: [{ items: [summary], next: null }], pageParams: [null] })
    return made
  }

  test('bytes of a handoff grow on its page without a request', () => {
    const made = client()
    applier(made)([{ event: 'handoffs', data: { handoffs: [{ ...handoff, bytes_moved: 60e9 }, done] } }])
    expect(made.getQueryData(ask.handoff(handoff.handoff_id).queryKey)?.bytes_moved).toBe(60e9)
  })

  test('a step changes the job in every list', () => {
    const made = client()
    applier(made)([{ event: 'jobs', data: { jobs: [{ ...summary, last_step: 2_345, last_step_at: null }], gone: [] } }])
    const observer = new InfiniteQueryObserver(made, ask.jobs({}) as never)
    expect((observer.getCurrentResult().data as unknown as { pages: { items: { last_step: number }[] }[] }).pages[0]!.items[0]!.last_step).toBe(2_345)
  })

  test('pending notices are replaced as a whole', () => {
    const made = client()
    applier(made)([{ event: 'incidents', data: { pending: [] } }])
    expect(made.getQueryData(ask.fleet().queryKey)?.pending).toEqual([])
  })

  test('an event that nobody knows is left alone', () => {
    expect(() => applier(client())([{ event: 'moon', data: {} }])).not.toThrow()
  })

  test('new steps go behind the old ones, once', () => {
    const step = { step: 2000, generation: 6, finished_at: '2026-11-24T19:10:00Z', seconds: 20, loss: 2.1, tokens: 1_000_000, consumed_samples: null, sample_digest: null }
    const once = withSteps(timeline, [step])
    expect(once.points.length).toBe(timeline.points.length + 1)
    expect(once.points.at(-1)!.tokens_per_s).toBe(50_000)
    expect(once.points.at(-1)!.dollars).toBeGreaterThan(timeline.points.at(-1)!.dollars)
    expect(withSteps(once, [step])).toBe(once)
  })
})

describe('the timeline', () => {
  test.each(['time', 'step', 'dollars'] as const)('over %s everything has a place, and places only grow', axis => {
    const of = drawn(timeline, axis)
    expect(of.x.length).toBe(of.loss.length)
    expect(of.x.every((x, index) => index === 0 || x > of.x[index - 1]!)).toBe(true)
    expect(of.bands.every(band => band.to >= band.from)).toBe(true)
    for (const { x } of of.marks) expect(x >= of.range[0] && x <= of.range[1]).toBe(true)
    for (const band of of.bands) expect(Object.values(band.shares).reduce((sum, each) => sum + each, 0)).toBeCloseTo(1)
  })

  test('a step that was made again counts as it was made the last time', () => {
    const first = timeline.points[0]!
    const of = drawn({ ...timeline, points: [first, { ...first, step: 4 }, { ...first, step: 1, loss: 0.5 }] }, 'step')
    expect(of.x).toEqual([1, 4])
    expect(of.loss[0]).toBe(0.5)
  })

  test('nothing at all can be drawn', () => {
    expect(drawn({ ...timeline, points: [], buckets: [], marks: [] }, 'step').range).toEqual([0, 1])
  })
})

test('sixteen thousand ranks have each a square of their own', () => {
  const nodes = Array.from({ length: 2048 }, (_, node) => ({ ...ranks.nodes[0]!, node_id: `n${node}` }))
  const many = { ...ranks, nodes, ranks: Array.from({ length: 16_384 }, (_, rank) => ({ ...ranks.ranks[0]!, rank, node_id: `n${rank >> 3}` })) }
  const { squares } = placeRanks(many, 1_400)
  expect(new Set(squares.map(each => `${each.x} ${each.y}`)).size).toBe(16_384)
  expect(Math.max(...squares.map(each => each.x))).toBeLessThan(1_400)
})

test('a rank says which experts it has, and of a dense model nothing of experts', () => {
  const rank = ranks.ranks[0]!
  expect(rankText(rank)).toBe('rank 0 on a-1, slot 0: TP 0, PP 0, DP 0; training, step 1999')
  const coordinates = { ...rank.coordinates, ep: 1, etp: 0, edp: 3 }
  expect(rankText({ ...rank, coordinates, experts: { first: 32, last: 63 } })).toContain('EP 1, ETP 0, expert DP 3, experts 32-63; training')
  expect(rankText({ ...rank, coordinates, experts: { first: 5, last: 5 } })).toContain(', expert 5;')
})

test('a line that comes in two pieces is one line, and errors are known', () => {
  const piece = (log_id: number, rank: number, text: string) => ({ log_id, rank, text, generation: 1, offset: 0 })
  const pieces = [piece(1, 0, 'step 1\nRuntime'), piece(2, 1, 'fine\n'), piece(3, 0, 'Error: no memory\n')]
  expect(linesOf(pieces).map(line => [line.rank, line.text, line.isError])).toEqual([[0, 'step 1', false], [0, 'RuntimeError: no memory', true], [1, 'fine', false]])
  expect(appended(pieces, [piece(3, 0, ''), piece(4, 1, 'x')], 3).map(each => each.log_id)).toEqual([2, 3, 4])
})

test('CSV quotes what it must, and no cell becomes a formula', () => {
  expect(csvText(['a', 'b'], [['x,"y"', null], ['=1+1', -2]])).toBe('a,b\r\n"x,""y""",\r\n\'=1+1,-2\r\n')
})

test('YAML keeps what it would otherwise read as something else', () => {
  expect(yaml({ name: 'yes', path: '/a b', list: [1, { deep: 'x: y' }], none: null, empty: {} })).toBe('name: "yes"\npath: /a b\nlist:\n  - 1\n  - deep: "x: y"\n')
})

test('figures have their unit, and what is not known is no zero', () => {
  expect([dollars(null), dollars(0), dollars(0.00001), dollars(0.0123), dollars(12.5), dollars(12_345)]).toEqual(['–', '$0.00', '<$0.0001', '$0.012', '$12.50', '$12,345'])
  expect([seconds(null), seconds(0.312), seconds(41.3), seconds(3_700)]).toEqual(['–', '312 ms', '41.3 s', '1 h 1 min'])
  expect([bytes(999), bytes(84.2e9), span(59.6)]).toEqual(['999 B', '84.2 GB', '1 min'])
})

test('the next page stands in the Link header', () => {
  expect(nextCursor('</api/v1/jobs?limit=50&cursor=ab_c-d>; rel="next"')).toBe('ab_c-d')
  expect(nextCursor(null)).toBeNull()
})

test('a layout is written with the same sign in every sentence, and nothing else is changed', () => {
  expect(prose('without node-b: TP1xPP3xDP1 on 3 of 3 nodes, 0.115 s (+-30%) predicted per step')).toBe('without node-b: TP1×PP3×DP1 on 3 of 3 nodes, 0.115 s (±30%) predicted per step')
  expect(prose('TP2xPP2xVPP2xDP1, then TP4; box 4x8 of the pool xDP1x')).toBe('TP2×PP2×VPP2×DP1, then TP4; box 4x8 of the pool xDP1x')
})

test('an incident that moved a job and was withdrawn later says both', () => {
  expect(story(incident)).not.toContain('taken back')
  const undone = story({ ...incident, withdrawn_at: incident.deadline_at })
  expect(undone).toContain('with a pause of')
  expect(undone).toContain('The notice was taken back later.')
})

test('how early a node was needed no more is known only once nothing needs it', () => {
  expect(slackOf(incident)).toBeCloseTo(78.7)
  expect(slackOf({ ...incident, notice_to_safe_s: 125 })).toBeCloseTo(-5)
  for (const outcome of ['open', 'moving', 'restarted', 'failed', 'withdrawn', 'nothing'] as const) expect(slackOf({ ...incident, outcome })).toBeNull()
  expect(slackOf({ ...incident, deadline_at: null })).toBeNull()
})
