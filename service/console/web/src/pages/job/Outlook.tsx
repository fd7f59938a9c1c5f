// One sentence: what the job does now and what happens next. Beneath it how far it is, and the first error if there is one.
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { ask } from '../../api/queries'
import type { FirstErrorOut, OutlookOut } from '../../api/types'
import { count, figure, prose, span } from '../../parts/format'
import { Countdown, Distance } from '../../parts/Moment'
import { Panel } from '../../parts/Panel'

const DOTS = { good: 'good', busy: 'warn', waiting: 'warn', bad: 'bad', ended: '' }

export function Outlook({ jobId }: { jobId: string }) {
  const outlook = useQuery(ask.outlook(jobId))
  const error = useQuery(ask.firstError(jobId))
  return (
    <Panel title="State" of={outlook} lines={3}>
      {() => (
        <div className="stack">
          <Sentence of={outlook.data!} />
          {outlook.data!.warning && <div className="notice-box warn">{prose(outlook.data!.warning)}</div>}
          <HowFar of={outlook.data!} />
          <FirstError of={error.data} jobId={jobId} />
        </div>
      )}
    </Panel>
  )
}

function Sentence({ of }: { of: OutlookOut }) {
  return (
    <p className="sentence">
      <i className={`dot ${DOTS[of.level]}`} style={{ marginRight: 8 }} aria-hidden="true" />
      {prose(of.now)} <span className="soft" style={{ fontWeight: 400 }}>{prose(of.next)}</span>
      {of.deadline_at && <> <Countdown until={of.deadline_at} /></>}
    </p>
  )
}

function HowFar({ of }: { of: OutlookOut }) {
  const part = of.stop_steps > 0 ? Math.min(1, of.last_step / of.stop_steps) : 0
  return (
    <>
      <div className="progress" role="progressbar" aria-label="Steps done" aria-valuenow={of.last_step} aria-valuemin={0} aria-valuemax={of.stop_steps}><i style={{ width: `${part * 100}%` }} /></div>
      <div className="row small soft">
        <span><strong>{count(of.last_step)}</strong> of {count(of.stop_steps)} steps</span>
        {of.steps_per_s !== null && <span>{figure(of.steps_per_s)} steps/s</span>}
        {of.remaining_s !== null && <span>{span(of.remaining_s)} to go</span>}
        {of.last_step_at && <span>last step <Distance at={of.last_step_at} /></span>}
        {of.handoff_id && <Link to="/handoffs/$handoffId" params={{ handoffId: of.handoff_id }}>handoff under way</Link>}
        {of.incident_ids.map(id => <Link key={id} to="/incidents/$incidentId" params={{ incidentId: String(id) }}>incident {id}</Link>)}
      </div>
    </>
  )
}

export function FirstError({ of, jobId }: { of: FirstErrorOut | undefined; jobId: string }) {
  if (!of || of.line === null) return null
  return (
    <div className="notice-box bad">
      <div className="row apart">
        <strong>First error: rank {of.rank}{of.node_id && ` on ${of.node_id}`}{of.generation !== null && `, generation ${of.generation}`}</strong>
        <Link to="/jobs/$jobId/$tab" params={{ jobId, tab: 'logs' }} search={{ rank: String(of.rank ?? ''), log: String(of.log_id ?? '') }}>Show it in the log</Link>
      </div>
      <code>{of.line}</code>
    </div>
  )
}
