// One page a notice, to follow it while it lasts and to read it as a post-mortem a month later.
import { useQuery } from '@tanstack/react-query'
import { Link, useParams } from '@tanstack/react-router'
import { useState } from 'react'
import { ask } from '../../api/queries'
import { read } from '../../api/read'
import type { ChannelOut, DecisionOut, IncidentOut } from '../../api/types'
import { PHASE_COLUMNS, phaseRows, Waterfall } from '../../charts/Waterfall'
import { CAUSE_WORDS } from '../../parts/causes'
import { Chip } from '../../parts/Chip'
import { CsvButton } from '../../parts/CsvButton'
import { Facts, Figure, Figures } from '../../parts/Figure'
import { bytes, count, dollars, layoutName, none, plural, prose, seconds, shortId, words } from '../../parts/format'
import { Countdown, Moment } from '../../parts/Moment'
import { Empty, Panel, Problem, Skeleton } from '../../parts/Panel'
import { Table } from '../../parts/Table'
import { Alternatives } from '../job/Alternatives'
import { firstCause, isOver, StreamProgress } from '../handoff/Handoff'
import { chronicle, slackOf, story } from './story'

const DECISIONS_SHOWN = 2
const WAITS: readonly IncidentOut['outcome'][] = ['open', 'moving']

export default function Incident() {
  const { incidentId } = useParams({ strict: false })
  const incident = useQuery(ask.incident(incidentId ?? ''))
  if (!incident.data) return incident.error ? <Problem of={incident} /> : <Skeleton lines={12} />
  return <Report of={incident.data} />
}

function Report({ of }: { of: IncidentOut }) {
  return (
    <>
      <div className="page-head">
        <nav className="crumbs" aria-label="Where this is"><Link to="/">Fleet</Link><span aria-hidden="true">/</span><Link to="/incidents">Incidents</Link><span aria-hidden="true">/</span><span>{of.incident_id}</span></nav>
        <h1>{of.node_id}: {of.drained ? 'drain' : words(of.kind)}</h1>
        <Chip state={of.outcome} />
        <Deadline of={of} />
      </div>
      <Panel title="In short">
        <div className="stack" style={{ gap: 12 }}>
          <p className="sentence">{story(of)}</p>
          <Figures>
            <Figure name="Notice to safe" large title="From the notice until the node was needed no more.">{seconds(of.notice_to_safe_s)}</Figure>
            <Figure name="Pause" large>{seconds(of.pause_s)}</Figure>
            <Figure name="Steps lost" large><span className={of.lost_steps > 0 ? 'bad' : undefined}>{count(of.lost_steps)}</span></Figure>
            <Figure name="Moved" large>{bytes(of.bytes_moved)}</Figure>
            <Figure name="Cost" large beneath={costWords(of.costs)}>{dollars(of.dollars)}</Figure>
          </Figures>
        </div>
      </Panel>
      {of.handoffs.map(({ handoff, waterfall }) => (
        <Panel
          key={handoff.handoff_id} title={`Handoff of ${handoff.job_id}`}
          note={<><Chip state={handoff.state} /><span className="soft">{layoutName(handoff.from)} → {layoutName(handoff.to)}, {words(handoff.rung)}</span></>}
          tools={<><Link to="/handoffs/$handoffId" params={{ handoffId: handoff.handoff_id }}>handoff {shortId(handoff.handoff_id)}</Link><CsvButton name={`handoff ${shortId(handoff.handoff_id)} phases`} columns={PHASE_COLUMNS} rows={() => phaseRows(waterfall)} /></>}
        >
          <div className="stack" style={{ gap: 12 }}>
            {!isOver(handoff) && <StreamProgress of={handoff} />}
            <Waterfall of={waterfall} isOpen={!isOver(handoff)} />
            <Facts of={[
              ['Certificate', handoff.certificate ? <code>{handoff.certificate}</code> : <span className="quiet">none</span>],
              ['Switched at', handoff.cutover_step === null ? none : `step ${count(handoff.cutover_step)}`],
              handoff.ended_by !== null && ['First cause of the failure', <span className="bad">{firstCause(handoff.ended_by)}</span>],
              handoff.why !== '' && ['Why', prose(handoff.why)],
              handoff.reason !== '' && handoff.reason !== handoff.why && [isOver(handoff) ? 'How it ended' : 'What it waits for', prose(handoff.reason)],
            ]} />
          </div>
        </Panel>
      ))}
      {of.restarts.length > 0 && <Panel title="Restarts" flush><Restarts of={of} /></Panel>}
      <div className="grid-2">
        <Panel title="Decision">{of.decisions.length === 0 ? <Empty>The service decided nothing about this notice: no job needed the node, or the agents acted on the plan they held.</Empty> : <Decisions of={of.decisions} />}</Panel>
        <Panel title="What happened, in order"><ol className="stack" style={{ gap: 5 }}>{chronicle(of).map((each, at) => <li key={at} className="row" style={{ alignItems: 'baseline', flexWrap: 'nowrap' }}><span className="soft small"><Moment at={each.at} /></span><span>{each.what}</span></li>)}</ol></Panel>
      </div>
      <Panel title="Where it was heard" flush><Channels of={of.channels} /></Panel>
    </>
  )
}

/** A countdown while the node is needed; afterwards how early it was needed no more, which reads the same a month later. */
function Deadline({ of }: { of: IncidentOut }) {
  if (!of.deadline_at) return null
  const slack = slackOf(of)
  if (slack !== null) return <span className={slack < 0 ? 'bad' : 'good'}>safe {seconds(Math.abs(slack))} {slack < 0 ? 'after' : 'before'} the deadline</span>
  if (of.open && WAITS.includes(of.outcome)) return <Countdown until={of.deadline_at} />
  return <span className="quiet">deadline <Moment at={of.deadline_at} /></span>
}

const OTHER_COSTS: Record<string, string> = { egress: 'traffic between zones' }

function costWords(costs: IncidentOut['costs']): string {
  const parts = Object.entries(costs).filter(([, value]) => (value ?? 0) > 0)
  return parts.map(([name, value]) => `${CAUSE_WORDS[name as keyof typeof CAUSE_WORDS] ?? OTHER_COSTS[name] ?? name} ${dollars(value)}`).join(', ') || 'nothing beyond the usual'
}

/** The first ones are about the notice; what was decided later stands behind a button. */
function Decisions({ of }: { of: readonly DecisionOut[] }) {
  const [showsAll, setShowsAll] = useState(false)
  const shown = showsAll ? of : of.slice(0, DECISIONS_SHOWN)
  return (
    <div className="stack" style={{ gap: 14 }}>
      {shown.map(each => <DecisionBlock key={each.decision_id} of={each} />)}
      {of.length > shown.length && <div><button type="button" onClick={() => setShowsAll(true)}>Show {plural(of.length - shown.length, 'later decision')}</button></div>}
    </div>
  )
}

function DecisionBlock({ of }: { of: DecisionOut }) {
  return (
    <div className="stack">
      <p><Moment at={of.decided_at} /> <Link to="/jobs/$jobId/$tab" params={{ jobId: of.job_id, tab: 'decisions' }}>{of.job_id}</Link> <Chip state={of.verdict} /> {of.layout && <strong className="nowrap">{layoutName(of.layout)} </strong>}<span className="quiet">asked by {of.asked_by}</span></p>
      <p>{prose(of.reason)}</p>
      {of.verdict_reason && of.verdict_reason !== of.reason && <p className="soft">Planner: {prose(of.verdict_reason)}</p>}
      <Alternatives of={of.alternatives} chosen={of.layout} />
    </div>
  )
}

function Restarts({ of }: { of: IncidentOut }) {
  return (
    <Table of={of.restarts} id={row => row.generation} caption="Restarts" columns={[
      { name: 'Generation', isLead: true, isNumber: true, cell: row => row.generation },
      { name: 'Layout', cell: row => layoutName(row.layout) },
      { name: 'From', cell: row => <>{words(row.source)}{row.checkpoint_step !== null && ` of step ${count(row.checkpoint_step)}`}</> },
      { name: 'Began', cell: row => <Moment at={row.created_at} /> },
      { name: 'First step', cell: row => <Moment at={row.first_step_at} /> },
      { name: 'Steps lost', isNumber: true, cell: row => count(row.lost_steps) },
      { name: 'Why', isWide: true, cell: row => <span className="soft">{prose(row.reason)}</span> },
    ]} />
  )
}

function Channels({ of }: { of: readonly ChannelOut[] }) {
  if (of.length === 0) return <Empty>No channel is recorded.</Empty>
  return (
    <Table of={of} id={row => `${row.source} ${row.heard_at}`} caption="Where it was heard" columns={[
      { name: 'Channel', isLead: true, cell: row => row.source },
      { name: 'Says', cell: row => words(row.kind) },
      { name: 'Heard', cell: row => <Moment at={row.heard_at} /> },
      { name: 'After the first', isNumber: true, cell: row => row.lag_s > 0 ? seconds(row.lag_s) : 'first' },
      { name: 'Deadline', cell: row => <Moment at={row.deadline_at} /> },
      { name: 'Withdrawn', cell: row => <Moment at={row.withdrawn_at} /> },
      { name: 'Raw', isWide: true, cell: row => row.raw === '' ? <span className="quiet">none</span> : <details><summary>{plural(row.raw.length, 'character')}</summary><pre className="pre" style={{ textAlign: 'left' }} tabIndex={0}>{pretty(row.raw)}</pre></details> },
    ]} />
  )
}

export function pretty(raw: string): string {
  try {
    return JSON.stringify(read(raw), null, 2)
  } catch {
    return raw
  }
}

