// An incident in sentences, and as a list of what happened when. Pure.
import type { IncidentOut, IncidentSummary } from '../../api/types'
import { count, layoutName, plural, prose, seconds, span, words } from '../../parts/format'

export function story(of: IncidentOut): string {
  const warned = of.deadline_at ? `${span((Date.parse(of.deadline_at) - Date.parse(of.first_seen_at)) / 1000)} ahead` : 'without a deadline'
  const begin = of.drained ? `A person asked for ${of.node_id} to be empty.` : `${of.source} announced the ${words(of.kind)} of ${of.node_id}, ${warned}.`
  return [begin, outcome(of), loss(of), later(of)].filter(each => each !== '').join(' ')
}

function outcome(of: IncidentOut): string {
  const jobs = of.jobs.join(', ')
  const done = of.handoffs.findLast(each => each.handoff.state === 'active')?.handoff
  switch (of.outcome) {
    case 'open':
      return 'Nothing has been done yet.'
    case 'moving':
      return `${jobs} is being moved while it trains.`
    case 'moved':
      return done ? `${jobs} went on as ${layoutName(done.to)} ${done.to === done.from ? 'on other nodes' : `instead of ${layoutName(done.from)}`}, with a pause of ${seconds(of.pause_s)}.` : `${jobs} was moved.`
    case 'restarted':
      return `${jobs} had to be started anew from a checkpoint${of.outcome_reason ? `: ${prose(of.outcome_reason)}` : '.'}`
    case 'failed':
      return `${jobs || 'The job'} could not be kept going${of.outcome_reason ? `: ${prose(of.outcome_reason)}` : '.'}`
    case 'withdrawn':
      return 'The notice was taken back.'
    case 'nothing':
      return 'No job needed the node, so nothing was done.'
  }
}

/** Of a restart the reason says it. */
function later(of: IncidentOut): string {
  return of.outcome === 'moved' && of.withdrawn_at !== null ? 'The notice was taken back later.' : ''
}

function loss(of: IncidentOut): string {
  if (of.outcome !== 'moved' && of.outcome !== 'restarted' && of.outcome !== 'failed') return ''
  return of.lost_steps === 0 ? 'No step was lost.' : `${plural(of.lost_steps, 'step')} had to be done again.`
}

/** Seconds between the moment from which the node was needed no more and its deadline; negative: it came too late. Null
 * while something still needs it, and where there is no such moment. */
export function slackOf(of: Pick<IncidentSummary, 'outcome' | 'deadline_at' | 'first_seen_at' | 'notice_to_safe_s'>): number | null {
  if (of.outcome !== 'moved' || of.deadline_at === null || of.notice_to_safe_s === null) return null
  return (Date.parse(of.deadline_at) - Date.parse(of.first_seen_at)) / 1000 - of.notice_to_safe_s
}

/** A handoff is reported on after it has become active: its nodes still retire the old world. */
function endOf(handoff: IncidentOut['handoffs'][number]['handoff'], heardAt: string): string {
  if (handoff.state !== 'active' || handoff.notice_to_active_s === null) return handoff.changed_at
  return after(heardAt, handoff.notice_to_active_s)
}

const after = (at: string, s: number): string => new Date(Date.parse(at) + s * 1000).toISOString()

export interface Event { at: string; what: string }

export function chronicle(of: IncidentOut): Event[] {
  const events: (Event | null)[] = [
    ...of.channels.flatMap(channel => [
      { at: channel.heard_at, what: `${channel.source} says ${words(channel.kind)}` },
      channel.withdrawn_at ? { at: channel.withdrawn_at, what: `${channel.source} takes it back` } : null,
    ]),
    ...of.decisions.map(decision => ({ at: decision.decided_at, what: `decided for ${decision.job_id}: ${decision.verdict}${decision.layout ? ` to ${layoutName(decision.layout)}` : ''}` })),
    ...of.handoffs.flatMap(({ handoff }) => [
      { at: handoff.opened_at, what: `handoff to ${layoutName(handoff.to)} opened by ${handoff.proposer || 'the service'}` },
      ['active', 'aborted', 'broken'].includes(handoff.state) ? { at: endOf(handoff, of.first_seen_at), what: `handoff ${handoff.state}${handoff.cutover_step !== null && handoff.state === 'active' ? ` at step ${count(handoff.cutover_step)}` : ''}` } : null,
    ]),
    ...of.restarts.flatMap(restart => [
      { at: restart.created_at, what: `generation ${restart.generation} started as ${layoutName(restart.layout)}` },
      restart.first_step_at ? { at: restart.first_step_at, what: `first step of generation ${restart.generation}` } : null,
    ]),
    of.outcome === 'moved' && of.notice_to_safe_s !== null ? { at: after(of.first_seen_at, of.notice_to_safe_s), what: `${of.node_id} is needed no more` } : null,
    of.deadline_at ? { at: of.deadline_at, what: 'deadline of the notice' } : null,
    of.lease?.ended_at ? { at: of.lease.ended_at, what: `the node's lease ended: ${of.lease.end_reason || 'no reason given'}` } : null,
  ]
  return events.filter(each => each !== null).sort((a, b) => Date.parse(a.at) - Date.parse(b.at))
}
