// A small fleet as the API would answer about it, for the component tests. Typed, so that it goes with the contract.
import type * as T from '../api/types'

const BEGIN = Date.parse('2026-11-24T08:00:00Z')
const at = (s: number) => new Date(BEGIN + s * 1000).toISOString()
export const NOW = BEGIN + 40_000 * 1000

export const job: T.JobOut = {
  job_id: 'gpt-7b', name: 'GPT 7B, run 4', state: 'running', paused: false, suspends_at: null, standstill: null, reason: 'every rank did its first step', warning: '2 checkpoints in a row failed, the last at step 30: rank 0: No space left on device', layout: 'TP2xPP2xDP2', nodes: ['a-1', 'a-2', 'b-1', 'b-2'],
  last_step: 1999, stop_steps: 5000, lost_steps: 12, active_generation: 6, created_at: at(0), state_changed_at: at(3000), checkpoint_asked: false, open_handoff: null,
  checkpoints: [{ step: 1500, generation: 5, finished_at: at(30_000), path: '/checkpoints/1500', seconds: 12.5, size_bytes: 84e9, damage: null, left_behind: false }],
  generations: [], layouts_by_count: [{ nodes: 3, layout: { tp: 2, pp: 1, dp: 3 }, reason: '24.1 s predicted per step' }, { nodes: 4, layout: { tp: 2, pp: 2, dp: 2 }, reason: '19.8 s measured per step' }], standing_plans: [], step_seconds: { TP2xPP2xDP2: 19.8 }, pace: { remaining_s: 59_000, steps_per_s: 0.05 },
  spec: {
    name: 'GPT 7B, run 4', entrypoint: 'train:Job', workdir: '/srv/train', args: { lr: 0.0003, data: 'pile: 1' }, environment: {}, global_batch: 512, micro_batch: 1, seed: 1,
    nodes: { min: 2, max: 4 }, layouts: { allowed: ['TP2xPP2xDP2', 'TP2xPP1xDP2'], pinned: [], prefer_change: false, tensor_parallel_max: null }, pools: ['a', 'b'], stop: { steps: 5000 },
    checkpoint: { every_steps: 500, keep: 2, path: '/checkpoints' }, budget_usd: 900,
  } as unknown as T.JobOut['spec'],
} as T.JobOut

export const summary: T.JobSummary = (({ job_id, name, state, paused, suspends_at, standstill, reason, warning, layout, nodes, last_step, stop_steps, lost_steps, active_generation, created_at, state_changed_at }) =>
  ({ job_id, name, state, paused, suspends_at, standstill, reason, warning, layout, nodes, last_step, stop_steps, lost_steps, active_generation, created_at, state_changed_at }))(job)
const failed: T.JobSummary = { ...summary, warning: '', job_id: 'moe-small', name: 'moe-small', state: 'failed', layout: null, nodes: [], last_step: 40, stop_steps: 1000, reason: 'rank 3 on b-1 ended with exit code 1 three times in a row' }

const NO_COST = { causes: [], egress: { bytes: 0, dollars: null }, saved_unknown_slot_seconds: 0, unpriced_slot_seconds: 0 }
export const costs: readonly T.LedgerJobOut[] = [
  { ...NO_COST, job_id: 'gpt-7b', name: 'GPT 7B, run 4', state: 'running', slot_seconds: 320_000, dollars: 211.4, goodput: 0.962, interruptions_dollars: 4.31, saved_dollars: 389.2 },
  { ...NO_COST, job_id: 'moe-small', name: 'moe-small', state: 'failed', slot_seconds: 4_000, dollars: 2.1, goodput: 0.31, interruptions_dollars: 1.2, saved_dollars: null },
]

const hours = Array.from({ length: 48 }, (_, hour) => (hour % 11 === 3 ? 2 : hour % 17 === 5 ? 1 : 0))
const pool = (name: string, more: Partial<T.PoolOut>): T.PoolOut => ({
  pool: name, ready: 2, silent: 0, leaving: 0, busy: 16, slots: 16, price_usd_per_hour: 9.83, on_demand_usd_per_hour: 27.4, price_since: at(20_000), usd_per_hour: 19.66,
  since: at(40_000 - 48 * 3600), interruptions: hours, unannounced: hours.map((_, hour) => (hour === 30 ? 1 : 0)), ...more,
})
export const pending: T.PendingOut = { incident_id: 7, node_id: 'b-2', pool: 'b', kind: 'interruption', source: 'imds', first_seen_at: at(39_970), deadline_at: at(40_090), state: 'heard', drained: false, jobs: ['gpt-7b'], handoff_id: '018f7a3e-0000-7000-8000-000000000007', handoff_state: 'streaming' }
export const fleet: T.FleetOut = {
  at: at(40_000), nodes: { ready: 4, silent: 1, leaving: 1, idle: 0, slots: 32 }, usd_per_hour: 39.32, unpriced_nodes: 0,
  pools: [pool('a', {}), pool('b', { leaving: 1, silent: 1, on_demand_usd_per_hour: null }), pool('c-on-demand', { ready: 0, busy: 0, slots: 0, usd_per_hour: 0, price_usd_per_hour: null, price_since: null, interruptions: hours.map(() => 0), unannounced: hours.map(() => 0) })],
  pending: [pending],
}

const nodeIds = ['a-1', 'a-2', 'b-1', 'b-2', 'b-3']
export const nodes: readonly T.NodeOut[] = nodeIds.map((node_id, index) => ({
  node_id, pool: node_id[0]!, state: node_id === 'b-3' ? 'silent' : 'ready', slots: 8, device: 'cuda', zone: `eu-1${node_id[0]}`, jobs: node_id === 'b-3' ? [] : ['gpt-7b'], leaving: node_id === 'b-2',
  deadline_at: node_id === 'b-2' ? at(40_090) : null, last_seen_at: at(39_999 - index), first_seen_at: at(-100), agent_version: '0.4.0', deaf: false, drained: false, announced: false, overdue: false, excused_until: null, clock_ahead_s: 0.012,
  job_user: 'train', peer_url: 'http://10.0.0.1:9000', private_address: '10.0.0.1', provider: 'aws', provider_id: `i-0abc${index}`, ranks: [],
  channels: [{ channel: 'imds', alive: true, asked_at: at(39_998), heard_at: null, reason: 'asked every 2 s' }, { channel: 'eventbridge', alive: false, asked_at: null, heard_at: null, reason: 'no queue is set' }],
  notice_source: null,
})) as unknown as readonly T.NodeOut[]

export const outlook: T.OutlookOut = {
  job_id: 'gpt-7b', state: 'running', level: 'busy', now: 'Trains on TP2×PP2×DP2 while its state moves to 3 nodes.', next: 'It switches at a step boundary before b-2 goes.', warning: job.warning, since: at(39_970), deadline_at: at(40_090),
  last_step: 1999, stop_steps: 5000, steps_per_s: 0.0504, remaining_s: 59_543, handoff_id: pending.handoff_id, incident_ids: [7], last_step_at: at(39_990),
}

export const ranks: T.RanksOut = {
  job_id: 'gpt-7b', generation: 6, layout: 'TP2xPP2xDP2', sizes: { tp: 2, pp: 2, dp: 2, cp: 1, ep: null, etp: null, edp: null },
  ranks: Array.from({ length: 8 }, (_, rank) => ({ rank, node_id: nodeIds[rank >> 1]!, slot: rank % 2, coordinates: { tp: rank % 2, dp: (rank >> 1) % 2, pp: rank >> 2, cp: 0, ep: null, etp: null, edp: null }, experts: null, stage: rank === 6 ? 'streaming' : 'training', step: 1999 })),
  nodes: nodeIds.slice(0, 4).map((node_id, index) => ({
    node_id, pool: node_id[0]!, state: 'ready', leaving: node_id === 'b-2', deadline_at: node_id === 'b-2' ? at(40_090) : null, incident_id: node_id === 'b-2' ? 7 : null, ranks: [index * 2, index * 2 + 1],
    if_gone: index === 0 ? null : { layout: 'TP2xPP1xDP3', nodes: nodeIds.slice(0, 3), reason: 'three nodes stay, all hold whole tensor groups; a step of 24.1 s is predicted' },
  })),
}

const handoffIds = [1, 2, 3, 7].map(number => `018f7a3e-0000-7000-8000-00000000000${number}`)
const mark = (index: number, more: Partial<T.TimelineOut['marks'][number]>): T.TimelineOut['marks'][number] => ({
  kind: 'handoff', handoff_id: handoffIds[index]!, generation: index + 2, at: at(9000 * (index + 1)), step: 450 * (index + 1), dollars: 47 * (index + 1), cause: 'notice', state: 'active', source_layout: 'TP2xPP2xDP2', target_layout: 'TP2xPP1xDP3',
  pause_s: 0.31, lost_steps: 0, reason: '', incident_id: index + 1, ...more,
})
export const timeline: T.TimelineOut = {
  job_id: 'gpt-7b', since: at(0), until: at(40_000), thinned: true,
  points: Array.from({ length: 600 }, (_, index) => ({ at: at(600 + index * 65), step: 1 + index * 3, steps: 3, generation: 1 + Math.floor(index / 150), seconds: 19.8, loss: 10.8 * Math.exp(-index / 130) + 2.4 + 0.06 * Math.sin(index * 1.7), tokens_per_s: index % 150 < 4 ? 21_000 : 52_000 + 900 * Math.sin(index), dollars: (index * 211) / 600 })),
  buckets: Array.from({ length: 80 }, (_, index) => {
    const bad = index % 20 === 18
    return { starts_at: at(index * 500), ends_at: at(index * 500 + 500), slot_seconds: (index === 0 ? { bootstrap: 3000, idle: 1000 } : { productive: bad ? 3100 : 3960, pause: bad ? 120 : 0, recompute: bad ? 500 : 0, lost: bad ? 280 : 0, idle: 40 }) as Record<string, number>, dollars: { productive: 2.64 }, dollars_until: ((index + 1) * 211) / 80 }
  }),
  marks: [mark(0, { kind: 'start', handoff_id: null, incident_id: null, cause: 'start', source_layout: null, target_layout: 'TP2xPP2xDP2', at: at(600), step: 1, dollars: 0, pause_s: null, reason: 'started from scratch' }), mark(1, {}), mark(2, { state: 'aborted', reason: 'superseded: b-1 will go too' }), mark(3, { lost_steps: 12, kind: 'restart', cause: 'checkpoint', reason: 'b-1 was lost without a notice' })],
}

export const handoff: T.HandoffOut = {
  handoff_id: pending.handoff_id!, job_id: 'gpt-7b', state: 'streaming', stage: 'streaming', rung: 'live', cause: 'notice', why: 'b-2 will go, the job must have left by 18:02:00 UTC', reason: 'b-2 will go in 120 s; three nodes can go on', reason_detail: null, from: 'TP2xPP2xDP2', to: 'TP2xPP1xDP3',
  generation: 7, parent: 6, proposer: 'b-2', decision: 'undecided', leaving: ['b-2'], source_nodes: nodeIds.slice(0, 4), target_nodes: nodeIds.slice(0, 3), opened_at: at(39_971), changed_at: at(39_998), deadline_at: at(40_090),
  plan_digest: 'sha256:9c1f', plan_revision: 1, superseded: false, ended_by: null, extra: {}, phases_s: { prepare: 4.2, stream: 21 }, pause_s: null, pause_steps: null, lost_s: null, lost_parts: null,
  rung_costs: [{ rung: 'live', parts: { building_s: 0.9, streaming_s: 1.4, pause_s: 0.3, after_s: 0 }, total_s: 2.6, measured: 3, guessed: [] }, { rung: 'stop_and_copy', parts: { building_s: 0.9, streaming_s: 0, pause_s: 35, after_s: 0 }, total_s: 35.9, measured: 0, guessed: ['pause'] }],
  cutover_step: null, certificate: null,
  bytes_planned: 84e9, bytes_moved: 51e9, bytes_lower_bound: 80e9, bytes_replayed: null, bytes_reread: 0, bandwidth_bytes_per_s: 2.4e9, extra_bytes_budget: 24e9, extra_bytes_peak: 19e9,
  notice_to_decided_s: 0.4, notice_to_first_order_s: 0.9, notice_to_safe_s: null, notice_to_active_s: null,
} as T.HandoffOut
export const done: T.HandoffOut = { ...handoff, handoff_id: handoffIds[1]!, state: 'active', stage: 'active', decision: 'go', pause_s: 0.312, pause_steps: 0.016, lost_s: 2.1, lost_parts: { building_s: 0.7, streaming_s: 1.1, pause_s: 0.312, after_s: 0 }, cutover_step: 902, certificate: 'xor:5be1c0de77aa0913', bytes_moved: 84.2e9, notice_to_safe_s: 41.3, notice_to_active_s: 40.9, leaving: ['a-2'], deadline_at: at(18_120), opened_at: at(18_001), changed_at: at(18_041) }

export const waterfall: T.WaterfallOut = {
  handoff_id: done.handoff_id, from_at: at(18_000), total_s: 41.3, critical_path: ['decide', 'world', 'stream', 'replay', 'switch'], incident_id: 2,
  bars: [
    { name: 'decide', label: 'decide', group: 'control', starts_s: 0, seconds: 0.9, critical: true },
    { name: 'plan', label: 'plan the transfer', group: 'control', starts_s: 0.9, seconds: 0.6, critical: false },
    { name: 'world', label: 'build the new world', group: 'prepare', starts_s: 0.9, seconds: 9.4, critical: true },
    { name: 'register', label: 'register memory', group: 'prepare', starts_s: 1.5, seconds: 3.2, critical: false },
    { name: 'stream', label: 'stream state', group: 'stream', starts_s: 10.3, seconds: 26.1, critical: true },
    { name: 'replay', label: 'replay gradients', group: 'stream', starts_s: 36.4, seconds: 3.9, critical: true },
    { name: 'switch', label: 'switch', group: 'pause', starts_s: 40.3, seconds: 0.312, critical: true },
  ],
}

const decision: T.DecisionOut = {
  decision_id: 31, job_id: 'gpt-7b', decided_at: at(18_000.4), verdict: 'move', verdict_reason: '', action: 'propose', layout: 'TP2xPP1xDP3', nodes: nodeIds.slice(0, 3), asked_by: 'a-2', inputs_digest: 'sha256:77',
  reason: 'a-2 will go in 120 s; TP2xPP1xDP3 on the three that stay takes 24.1 s a step, and moving takes 41 s of the 120',
  alternatives: [{ layout: 'TP2xPP1xDP3', nodes: 3, step_s: 24.1, measured: false }, { layout: 'TP2xPP2xDP1', nodes: 2, step_s: 35.2, measured: true }],
  wanted: {
    layout: 'TP2xPP1xDP4', place: 'zone-1', nodes: 4, spares: 1, usd_per_hour: 62.5, usd_per_hour_worth: 118.2, gives_back: ['a-9'], reason: 'wanted: 2 of pool a',
    pools: [{ pool: 'a', place: 'zone-1', market: 'spot', usd_per_hour: 12.5, held: 3, hold: 5 }, { pool: 'a', place: 'zone-1', market: 'on_demand', usd_per_hour: 40, held: 0, hold: 0 }],
    weighed: [{ layout: 'TP2xPP1xDP4', place: 'zone-1', nodes: 4, spares: 1, hold: [['a in zone-1', 5]], usd_per_hour: 62.5, utility_usd_per_hour: 118.2 }],
  },
} as unknown as T.DecisionOut
export const incident: T.IncidentOut = {
  incident_id: 2, node_id: 'a-2', pool: 'a', kind: 'interruption', source: 'imds', drained: false, first_seen_at: at(18_000), deadline_at: at(18_120), withdrawn_at: null, open: false, state: 'over', jobs: ['gpt-7b'], handoff_ids: [done.handoff_id],
  outcome: 'moved', outcome_reason: 'handed over live', pause_s: 0.312, lost_steps: 0, dollars: 0.021, bytes_moved: 84.2e9, notice_to_safe_s: 41.3,
  lease: { lease_id: 4, started_at: at(0), ended_at: at(18_121), end_reason: 'the provider took it back', instance_id: 3, node_id: 'a-2', pool: 'a', slots: 8 },
  channels: [
    { source: 'imds', kind: 'interruption', heard_at: at(18_000), deadline_at: at(18_120), lag_s: 0, raw: '{"action":"terminate","time":"2026-11-24T13:02:00Z"}', withdrawn_at: null },
    { source: 'eventbridge', kind: 'interruption', heard_at: at(18_003.2), deadline_at: at(18_120), lag_s: 3.2, raw: '{"detail-type":"EC2 Spot Instance Interruption Warning","detail":{"instance-id":"i-0abc1"}}', withdrawn_at: null },
  ] as unknown as T.IncidentOut['channels'],
  decisions: [decision], handoffs: [{ handoff: done, waterfall }], restarts: [], costs: { pause: 0.003, recompute: 0, lost: 0.018, fallback_restart: 0, egress: 0 },
}
const summaries: readonly T.IncidentSummary[] = [
  { ...incident, incident_id: 7, node_id: 'b-2', pool: 'b', first_seen_at: at(39_970), deadline_at: at(40_090), open: true, state: 'heard', outcome: 'moving', outcome_reason: 'a handoff is under way', pause_s: null, dollars: null, bytes_moved: 51e9, notice_to_safe_s: null },
  { ...incident, incident_id: 3, node_id: 'b-1', pool: 'b', kind: 'interruption', outcome: 'restarted', outcome_reason: 'lost before the handoff was safe', pause_s: null, lost_steps: 12, dollars: 3.9, bytes_moved: null, notice_to_safe_s: null },
  incident,
]

export const ledger: T.LedgerOut = {
  job_id: 'gpt-7b', slot_seconds: 320_000, dollars: 211.4, goodput: 0.962, unpriced_slot_seconds: 0, egress: { bytes: 3.1e9, dollars: 0.06 }, interruptions_dollars: 4.31, saved_dollars: 389.2, saved_unknown_slot_seconds: 0,
  causes: [
    { cause: 'productive', slot_seconds: 307_840, share: 0.962, dollars: 203.4 }, { cause: 'bootstrap', slot_seconds: 4_000, share: 0.0125, dollars: 2.64 }, { cause: 'pause', slot_seconds: 320, share: 0.001, dollars: 0.21 },
    { cause: 'recompute', slot_seconds: 2_900, share: 0.009, dollars: 1.92 }, { cause: 'lost', slot_seconds: 3_300, share: 0.0103, dollars: 2.18 }, { cause: 'idle', slot_seconds: 1_640, share: 0.0051, dollars: 1.05 },
  ],
}
const restarts: T.RestartsOut = { job_id: 'gpt-7b', handoffs: 3, handoffs_slot_seconds: 30, slot_seconds: 21_600, dollars: 14.3, save_s: 12.5, start_s: 210, estimate: 'A save and a start for each move, at the medians of this job; steps done again are left out.' }
export const firstError: T.FirstErrorOut = { job_id: 'gpt-7b', generation: 4, rank: 5, node_id: 'b-1', log_id: 42, offset: 0, at: at(27_000), line: 'RuntimeError: NCCL error: remote process exited or there was a network error', excerpt: [], cause: null, generations: [4, 5, 6] }
const logs: readonly T.LogOut[] = Array.from({ length: 60 }, (_, index) => ({ log_id: index + 1, generation: 6, rank: index % 8, offset: index * 100, text: index === 41 ? 'Traceback (most recent call last):\nRuntimeError: NCCL error: remote process exited or there was a network error\n' : `step ${index}: loss 2.41, lr 3e-4, grad norm 0.91\n` }))
const audit: readonly T.AuditOut[] = [
  { audit_id: 12, at: at(30_000), actor: 'ines', token_id: 't1', role: 'operator', action: 'job.checkpoint', target: 'gpt-7b', detail: { why: 'before the weekend' } },
  { audit_id: 11, at: at(18_121), actor: 'service', token_id: '', role: 'service', action: 'node.gone', target: 'a-2', detail: { after_s: 30 } },
]
const tokens: readonly T.TokenOut[] = [
  { token_id: '8d1f00aa11', name: 'ines', role: 'operator', created_at: at(0), created_by: 'admin', expires_at: at(9e6), revoked_at: null, node_id: null, uses_left: null },
  { token_id: '8d1f00aa12', name: 'nodes of pool a', role: 'join', created_at: at(0), created_by: 'admin', expires_at: null, revoked_at: null, node_id: null, uses_left: 12 },
]
const far = { wire: 'relay', live: true, bytes_per_s: 1.1e9, latency_s: 2.1e-4, refused: ['is on another machine or in another container, and reads over TCP are not allowed'], failed: '', measured_at: at(900) } as const
const wires: T.WiresOut = {
  nodes: nodeIds.slice(0, 3), state_bytes: 84e9, move_s: 25.5, live: false,
  wires: [
    { source: 'a-2', target: 'a-1', ...far, refused: [...far.refused] },
    { source: 'b-1', target: 'a-2', ...far, wire: 'gloo', live: false, bytes_per_s: 4e8, refused: [...far.refused, 'no relay listens on this machine: Connection refused'] },
    { source: 'a-1', target: 'b-1', ...far, wire: null, live: false, bytes_per_s: 0, latency_s: 0, refused: [], failed: 'a-1 did not answer within 40 s' },
  ],
}
const metrics: readonly T.MetricsOut[] = Array.from({ length: 200 }, (_, index) => ({ at: at(index * 200), generation: 1, step: index * 10, values: { loss: 10 * Math.exp(-index / 40) + 2.4, learning_rate: 3e-4 * Math.min(1, index / 20), grad_norm: 1 + 0.4 * Math.sin(index) } }))

type Points = readonly (readonly [number, number, number, number, number])[]
const run = (policy: string, tokens: number, lost: T.WhatIfOut['policies'][number]['tokens_lost_by'], points: Points): T.WhatIfOut['policies'][number] => ({
  policy, tokens, goodput: tokens / 1_000, usd: 8, usd_per_mtok: 8e6 / tokens, changes: 3, tokens_lost_by: lost, node_hours_by_cause: { productive: 7, idle: 0.5 }, decisions: { start: 1, stay: 0, move: 2, pause: 0 },
  curve: points.map(([hours, offered, held, used, made]) => ({ at_s: hours * 3_600, offered, held, used, tokens: made })),
})
export const replayed: T.WhatIfOut = {
  job: 'GPT 7B, run 4', trace: 'own-48h', hours: 2, nodes_most: 4, slots_per_node: 8, device: 'A100', notice_s: 120, unannounced_share: 0.05, acquire_s: 120, lost_s: 4.2, lost_s_source: 'median of 12 handoffs of another size', lost_s_is_guess: true,
  enacted: { 'live active': 3, 'start active': 1 }, handoffs_refused: 2, gave_up: '', not_followed: [],
  ideal_tokens: 1_000, oracles: { count_tokens: 960, victim_tokens: 980, regret_count: 0.0625, regret_victim: 0.0816 }, tokens_vs_hold_all: 1.8, usd_vs_hold_all: -0.44,
  policies: [
    run('liver', 900, { not_held: 20, layout: 30, pause: 40, lost_work: 10, waiting: 0 }, [[0, 4, 4, 4, 0], [1, 3, 3, 3, 400], [1.5, 3, 3, 2, 600], [2, 3, 3, 2, 900]]),
    run('hold_all', 500, { not_held: 0, layout: 100, pause: 0, lost_work: 150, waiting: 250 }, [[0, 4, 4, 4, 0], [0.5, 4, 4, 4, 250], [1, 3, 3, 0, 500], [2, 3, 3, 0, 500]]),
  ],
}

export const session: T.SessionOut = { token_id: '8d1f00aa11', name: 'ines', role: 'admin', session_expires_at: at(9e5) }

/** What the API answers to a GET; undefined where there is no such thing. */
export function answer(path: string, query: URLSearchParams): unknown {
  const [, , , noun = '', id = '', part = ''] = path.split('/')
  const isFailed = query.get('failed') === 'true'
  switch (`${noun}${id ? '/x' : ''}${part ? `/${part}` : ''}`) {
    case 'session': return session
    case 'fleet': return fleet
    case 'jobs': return [summary, failed].filter(each => query.getAll('state').length === 0 || query.getAll('state').includes(each.state))
    case 'jobs/x': return id === job.job_id ? job : undefined
    case 'jobs/x/outlook': return outlook
    case 'jobs/x/ranks': return ranks
    case 'jobs/x/timeline': return timeline
    case 'jobs/x/first-error': return firstError
    case 'jobs/x/logs': return logs.filter(each => each.log_id > Number(query.get('after') ?? 0) && (query.get('rank') === null || String(each.rank) === query.get('rank')))
    case 'jobs/x/metrics': return metrics
    case 'jobs/x/checkpoints': return job.checkpoints
    case 'jobs/x/wires': return wires
    case 'jobs/x/decisions': return [decision]
    case 'jobs/x/plan': return { job_id: id, verdict: 'move', verdict_reason: '', action: null, layout: 'TP2xPP1xDP3', nodes: nodeIds.slice(0, 3), reason: 'three nodes stay', alternatives: decision.alternatives, inputs_digest: 'sha256:1' }
    case 'ledger': return ledger
    case 'ledger/x': return id === 'jobs' ? costs : restarts
    case 'nodes': return nodes.filter(each => !query.get('pool') || each.pool === query.get('pool'))
    case 'nodes/x': return nodes.find(each => each.node_id === id)
    case 'handoffs': return [handoff, done].filter(each => query.getAll('state').length === 0 || query.getAll('state').includes(each.state))
    case 'handoffs/x': return [handoff, done].find(each => each.handoff_id === id)
    case 'handoffs/x/waterfall': return id === done.handoff_id ? waterfall : { ...waterfall, handoff_id: id, total_s: 28, critical_path: ['decide', 'world', 'stream'], bars: waterfall.bars.slice(0, 5).map(bar => (bar.name === 'stream' ? { ...bar, seconds: 17.7 } : bar)) }
    case 'incidents': return summaries.filter(each => (!isFailed || each.outcome === 'failed' || each.outcome === 'restarted') && (query.get('open') !== 'true' || each.open))
    case 'incidents/x': return id === '2' ? incident : id === '7' ? { ...incident, ...summaries[0], lease: null, handoffs: [{ handoff, waterfall: answer(`/api/v1/handoffs/${handoff.handoff_id}/waterfall`, query) }] } : undefined
    case 'audit': return audit
    case 'tokens': return tokens
    default: return undefined
  }
}
