// One handoff: from where to where, phase by phase, with what it moved, cost and proved.
import { useQuery } from '@tanstack/react-query'
import { Link, useParams } from '@tanstack/react-router'
import { PHASE_COLUMNS, phaseRows, Waterfall } from '../../charts/Waterfall'
import { ask } from '../../api/queries'
import type { HandoffOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { CsvButton } from '../../parts/CsvButton'
import { Facts, Figure, Figures } from '../../parts/Figure'
import { bytes, count, figure, layoutName, none, percent, prose, rate, seconds, shortId, words } from '../../parts/format'
import { Countdown, Moment } from '../../parts/Moment'
import { Panel, Problem, Skeleton } from '../../parts/Panel'
import { COST_COLUMNS, costRows, RungCosts } from './RungCosts'

const OVER = ['active', 'aborted', 'broken']
export const isOver = (handoff: HandoffOut): boolean => OVER.includes(handoff.state)

export default function Handoff() {
  const { handoffId } = useParams({ strict: false })
  const handoff = useQuery(ask.handoff(handoffId ?? ''))
  const waterfall = useQuery(ask.waterfall(handoffId ?? ''))
  if (!handoff.data) return handoff.error ? <Problem of={handoff} /> : <Skeleton lines={10} />
  const of = handoff.data
  return (
    <>
      <div className="page-head">
        <nav className="crumbs" aria-label="Where this is"><Link to="/">Fleet</Link><span aria-hidden="true">/</span><Link to="/jobs/$jobId" params={{ jobId: of.job_id }}>{of.job_id}</Link><span aria-hidden="true">/</span><span>handoff {shortId(of.handoff_id)}</span></nav>
        <h1>{layoutName(of.from)} → {layoutName(of.to)}</h1>
        <Chip state={of.state} />
        {!isOver(of) && of.deadline_at && <Countdown until={of.deadline_at} />}
      </div>
      <Panel title="What happened"><HandoffStory of={of} /></Panel>
      <Panel title="Phases" of={waterfall} lines={8} tools={<CsvButton name={`handoff ${shortId(of.handoff_id)} phases`} columns={PHASE_COLUMNS} rows={() => phaseRows(waterfall.data)} />}>
        {() => <Waterfall of={waterfall.data!} isOpen={!isOver(of)} />}
      </Panel>
      <Panel title="Training time lost, by way" note={<span className="quiet small">as expected when it was chosen</span>} tools={<CsvButton name={`handoff ${shortId(of.handoff_id)} ways`} columns={COST_COLUMNS} rows={() => costRows(of)} />}><RungCosts of={of} /></Panel>
      <div className="grid-2">
        <Panel title="Bytes"><Bytes of={of} /></Panel>
        <Panel title="Proof and plan"><Proof of={of} /></Panel>
      </div>
    </>
  )
}

export function HandoffStory({ of }: { of: HandoffOut }) {
  return (
    <div className="stack" style={{ gap: 12 }}>
      <p className="sentence">{sentence(of)}</p>
      {of.why && <p className="soft">{prose(of.why)}</p>}
      {of.reason && of.reason !== of.why && <p className="soft">{prose(of.reason)}</p>}
      <Figures>
        <Figure name="Pause" large beneath={of.pause_steps === null ? undefined : `${of.pause_steps.toFixed(2)} of a step`}>{seconds(of.pause_s)}</Figure>
        <Figure name="Lost in all" large title="Training time lost: the pause and slower steps before and after it.">{seconds(of.lost_s)}</Figure>
        <Figure name="Moved" large beneath={of.bytes_planned === null ? undefined : `of ${bytes(of.bytes_planned)} planned`}>{bytes(of.bytes_moved)}</Figure>
        <Figure name="Notice to safe" large title="From the notice until the leaving node was needed no more.">{seconds(of.notice_to_safe_s)}</Figure>
      </Figures>
      {!isOver(of) && <StreamProgress of={of} />}
      <Facts of={[
        ['Opened', <Moment at={of.opened_at} />],
        ['Changed', <Moment at={of.changed_at} />],
        of.deadline_at !== null && ['Deadline', <><Moment at={of.deadline_at} /> {!isOver(of) && <Countdown until={of.deadline_at} />}</>],
        ['Cause', <>{words(of.cause)}{of.leaving.length > 0 && <>, leaving: {of.leaving.map(node => <Link key={node} to="/nodes/$nodeId" params={{ nodeId: node }}>{node} </Link>)}</>}</>],
        ['Way', words(of.rung)],
        ['From', `${layoutName(of.from)} on ${of.source_nodes.join(', ') || none}, generation ${of.parent}`],
        ['To', `${layoutName(of.to)} on ${of.target_nodes.join(', ') || none}, generation ${of.generation ?? none}`],
        of.ended_by !== null && ['First cause of the failure', <span className="bad">{firstCause(of.ended_by)}</span>],
      ]} />
    </div>
  )
}

export function StreamProgress({ of }: { of: HandoffOut }) {
  const part = of.bytes_planned ? Math.min(1, (of.bytes_moved ?? 0) / of.bytes_planned) : 0
  return (
    <div className="stack" style={{ gap: 4 }}>
      <div className="progress" style={{ height: 8 }} role="progressbar" aria-label="Bytes moved" aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(part * 100)}><i style={{ width: `${part * 100}%` }} /></div>
      <span className="small soft">{words(of.stage || of.state)}: {bytes(of.bytes_moved ?? 0)} of {bytes(of.bytes_planned)} ({percent(part)}), {rate(of.bandwidth_bytes_per_s)}</span>
    </div>
  )
}

function sentence(of: HandoffOut): string {
  const way = `${layoutName(of.from)} to ${layoutName(of.to)}`
  if (of.state === 'active') return `The job went from ${way} at step ${count(of.cutover_step)}, ${of.rung === 'live' ? 'while training went on' : `by ${words(of.rung)}`}.`
  if (of.state === 'aborted' || of.state === 'broken') return `The way from ${way} was given up; the job was${of.state === 'broken' ? ' not' : ''} left as it was.`
  return `The job is on its way from ${way}; it trains meanwhile.`
}

export function firstCause(of: NonNullable<HandoffOut['ended_by']>): string {
  const who = of.rank !== null ? `rank ${of.rank}` : of.what
  const how = of.signal !== null ? `ended by signal ${of.signal}` : of.exit_code !== null ? `ended with exit code ${of.exit_code}` : 'failed'
  return `${who}${of.node ? ` on ${of.node}` : ''} ${how}${of.step !== null ? ` at step ${of.step}` : ''}`
}

function Bytes({ of }: { of: HandoffOut }) {
  return <Facts of={[
    ['Moved', bytes(of.bytes_moved)], ['Planned', bytes(of.bytes_planned)], ['Least possible', bytes(of.bytes_lower_bound)], ['Read again', bytes(of.bytes_reread)],
    ['Gradients replayed', bytes(of.bytes_replayed)], ['Rate', rate(of.bandwidth_bytes_per_s)], ['Extra memory', of.extra_bytes_budget === null ? bytes(of.extra_bytes_peak) : `${bytes(of.extra_bytes_peak)} of ${bytes(of.extra_bytes_budget)} allowed`],
  ]} />
}

function Proof({ of }: { of: HandoffOut }) {
  return <Facts of={[
    ['Certificate', of.certificate ? <><code>{of.certificate}</code> {of.state === 'active' && <span className="good">source and target agree bit for bit</span>}</> : <span className="quiet">none</span>],
    ['Decision of the ranks', words(of.decision ?? none)], ['Plan', <code>{of.plan_digest || none}</code>], ['Plan revision', of.plan_revision], ['Proposed by', of.proposer],
    ['Notice to decided', seconds(of.notice_to_decided_s)], ['Notice to first order', seconds(of.notice_to_first_order_s)], ['Notice to active', seconds(of.notice_to_active_s)],
    ...Object.entries(of.extra).slice(0, 24).map(([name, value]) => [words(name), name.includes('bytes') ? bytes(value) : figure(value)] as const),
  ]} />
}
