// Shapes of routes whose OpenAPI description is on its way. Each goes away when the description has it.
import type { components } from './schema.gen'

type S = components['schemas']

export interface SessionOut { token_id: string; name: string; role: 'viewer' | 'operator' | 'admin'; session_expires_at: string | null }
export interface PoolOut {
  pool: string; ready: number; silent: number; leaving: number; busy: number; slots: number
  price_usd_per_hour: number | null; on_demand_usd_per_hour: number | null; price_since: string | null; usd_per_hour: number
  interruptions: { since: string; hours: readonly number[]; total: number; unannounced: readonly number[] }
}
export interface PendingOut {
  incident_id: number; node_id: string; pool: string; kind: string; source: string; first_seen_at: string; deadline_at: string | null
  state: string; drained: boolean; jobs: readonly string[]; handoff_id: string | null; handoff_state: string | null
}
export interface FleetOut {
  at: string; nodes: { ready: number; silent: number; leaving: number; idle: number; deaf: number; slots: number }
  usd_per_hour: number; unpriced_nodes: number; pools: readonly PoolOut[]; pending: readonly PendingOut[]
}
export interface JobCostOut {
  job_id: string; name: string; state: S['JobState']; slot_seconds: number; dollars: number; goodput: number | null
  interruptions_dollars: number; saved_dollars: number | null
}
export interface OutlookOut {
  job_id: string; state: S['JobState']; level: 'good' | 'busy' | 'waiting' | 'bad' | 'ended'; now: string; next: string; since: string
  deadline_at: string | null; last_step: number; stop_steps: number; steps_per_s: number | null; remaining_s: number | null
  handoff_id: string | null; incident_ids: readonly number[]; last_step_at: string | null
}
export interface RanksOut {
  job_id: string; generation: number | null; layout: string | null; sizes: Record<string, number>
  ranks: readonly { rank: number; node_id: string; slot: number; coordinates: Record<string, number>; stage: string | null; step: number | null }[]
  nodes: readonly {
    node_id: string; pool: string; state: string; leaving: boolean; deadline_at: string | null; incident_id: number | null
    ranks: readonly number[]; if_gone: { layout: string | null; nodes: readonly string[]; reason: string } | null
  }[]
}
export interface TimelineOut {
  job_id: string; since: string; until: string; thinned: boolean
  points: readonly { at: string; step: number; generation: number; seconds: number; loss: number | null; tokens_per_s: number | null; dollars: number }[]
  buckets: readonly {
    starts_at: string; ends_at: string; slot_seconds: Record<string, number>; dollars: Record<string, number>; dollars_until: number; last_step: number
  }[]
  marks: readonly {
    kind: 'handoff' | 'start' | 'restart'; handoff_id: string | null; generation: number | null; at: string; step: number | null; dollars: number
    cause: string; state: string; from: string; to: string; pause_s: number | null; lost_steps: number; reason: string; incident_id: number | null
  }[]
}
export interface IncidentSummary {
  incident_id: number; node_id: string; pool: string; kind: string; source: string; drained: boolean; first_seen_at: string
  deadline_at: string | null; withdrawn_at: string | null; open: boolean; state: S['NoticePhase']; jobs: readonly string[]; handoff_ids: readonly string[]
  outcome: 'open' | 'moving' | 'moved' | 'restarted' | 'failed' | 'withdrawn' | 'nothing'; outcome_reason: string
  pause_s: number | null; lost_steps: number; dollars: number | null; bytes_moved: number | null; notice_to_safe_s: number | null
}
export interface Waterfall {
  handoff_id: string; from_at: string; total_s: number
  bars: readonly { name: string; label: string; group: string; starts_s: number; seconds: number; critical: boolean; bytes: number | null }[]
  critical_path: readonly string[]; critical_s: number
}
export interface IncidentOut extends IncidentSummary {
  lease: { lease_id: number; started_at: string; ended_at: string | null; end_reason: string } | null
  channels: readonly S['ChannelOut'][]; decisions: readonly S['DecisionOut'][]
  handoffs: readonly { handoff: S['HandoffOut']; waterfall: Waterfall }[]; restarts: readonly S['GenerationOut'][]
  costs: Record<string, number>
}
export interface FirstErrorOut {
  job_id: string; generation: number | null; rank: number | null; node_id: string | null; log_id: number | null; offset: number | null
  at: string | null; line: string | null; excerpt: readonly string[]; cause: S['FirstCause'] | null; searched_ranks: number; searched_chars: number
}
export interface LedgerMore { interruptions_dollars: number; saved_dollars: number | null; saved_unknown_slot_seconds: number }
export interface JobBrief {
  job_id: string; name: string; state: S['JobState']; reason: string; paused: boolean; active_generation: number | null; layout: string | null
  last_step: number; stop_steps: number; lost_steps: number; last_step_at: string | null; state_changed_at: string
}

interface Answers<D> { get: { parameters: { query?: Record<string, unknown>; path?: Record<string, string> }; responses: { 200: { content: { 'application/json': D } } } } }
export interface InterimPaths {
  '/api/v1/session': Answers<SessionOut>
  '/api/v1/fleet': Answers<FleetOut>
  '/api/v1/ledger/jobs': Answers<readonly JobCostOut[]>
  '/api/v1/jobs/{job_id}/outlook': Answers<OutlookOut>
  '/api/v1/jobs/{job_id}/ranks': Answers<RanksOut>
  '/api/v1/jobs/{job_id}/timeline': Answers<TimelineOut>
  '/api/v1/jobs/{job_id}/first-error': Answers<FirstErrorOut>
  '/api/v1/incidents': Answers<readonly IncidentSummary[]>
  '/api/v1/incidents/{incident_id}': Answers<IncidentOut>
  '/api/v1/handoffs/{handoff_id}/waterfall': Answers<Waterfall>
}
