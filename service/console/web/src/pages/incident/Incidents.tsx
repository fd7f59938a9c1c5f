// Every notice, newest first: what became of it, how long it stopped the job, what it cost.
import { Link, useNavigate, useSearch } from '@tanstack/react-router'
import { ask } from '../../api/queries'
import type { IncidentSummary } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { bytes, count, dollars, prose, seconds, words } from '../../parts/format'
import { ListPanel } from '../../parts/ListPanel'
import { Countdown, Moment } from '../../parts/Moment'
import { slackOf } from './story'

export default function Incidents() {
  const search = useSearch({ from: '/incidents' })
  const go = useNavigate({ from: '/incidents' })
  const set = (more: Partial<typeof search>) => void go({ search: old => ({ ...old, ...more }), replace: true, resetScroll: false })
  return (
    <>
      <h1 className="hidden-text">Incidents</h1>
      <ListPanel<IncidentSummary>
        title="Incidents"
        query={ask.incidents({ job_id: search.job ?? null, node_id: search.node ?? null, open: search.open ?? null, failed: search.failed ?? null })}
        id={row => row.incident_id}
        empty={search.failed ? 'No incident has failed.' : search.open ? 'No notice is open.' : 'No notice yet. Each announcement that a node will go becomes an incident.'}
        tools={<>
          {(search.job || search.node) && <button type="button" className="plain" onClick={() => set({ job: undefined, node: undefined })}>only of {search.job ?? search.node} ✕</button>}
          <label className="check small"><input type="checkbox" checked={search.open === true} onChange={event => set({ open: event.target.checked || undefined })} />open only</label>
          <label className="check small"><input type="checkbox" checked={search.failed === true} onChange={event => set({ failed: event.target.checked || undefined })} />failed only</label>
        </>}
        csv={{
          columns: ['incident_id', 'node_id', 'pool', 'kind', 'source', 'first_seen_at', 'deadline_at', 'state', 'outcome', 'outcome_reason', 'jobs', 'pause_s', 'lost_steps', 'bytes_moved', 'notice_to_safe_s', 'dollars'],
          row: row => [row.incident_id, row.node_id, row.pool, row.kind, row.source, row.first_seen_at, row.deadline_at, row.state, row.outcome, row.outcome_reason, row.jobs.join(' '), row.pause_s, row.lost_steps, row.bytes_moved, row.notice_to_safe_s, row.dollars],
        }}
        columns={[
          { name: 'Incident', isLead: true, cell: row => <Link to="/incidents/$incidentId" params={{ incidentId: String(row.incident_id) }}>{row.incident_id} · {row.node_id}</Link> },
          { name: 'Outcome', cell: row => <span className="row"><Chip state={row.outcome} /><Standing of={row} /></span> },
          { name: 'Notice', cell: row => <>{row.drained ? 'drain' : words(row.kind)} <span className="quiet">{row.source}</span></> },
          { name: 'Pool', cell: row => row.pool },
          { name: 'Heard', cell: row => <Moment at={row.first_seen_at} /> },
          { name: 'Jobs', cell: row => row.jobs.length === 0 ? <span className="quiet">none</span> : row.jobs.map(job => <Link key={job} to="/jobs/$jobId" params={{ jobId: job }}>{job} </Link>) },
          { name: 'Pause', isNumber: true, cell: row => seconds(row.pause_s) },
          { name: 'Steps lost', isNumber: true, cell: row => <span className={row.lost_steps > 0 ? 'bad' : undefined}>{count(row.lost_steps)}</span> },
          { name: 'Moved', isNumber: true, cell: row => bytes(row.bytes_moved) },
          { name: 'Notice to safe', isNumber: true, cell: row => seconds(row.notice_to_safe_s) },
          { name: 'Cost', isNumber: true, cell: row => dollars(row.dollars) },
          { name: 'Why', isWide: true, cell: row => <span className="soft">{prose(row.outcome_reason)}</span> },
        ]}
      />
    </>
  )
}

/** What is left of the time, or was left when the node was needed no more. */
function Standing({ of }: { of: IncidentSummary }) {
  const slack = slackOf(of)
  if (slack !== null) return <span className={`small nowrap ${slack < 0 ? 'bad' : 'quiet'}`}>{seconds(Math.abs(slack))} {slack < 0 ? 'late' : 'early'}</span>
  return of.open && of.deadline_at && (of.outcome === 'open' || of.outcome === 'moving') ? <Countdown until={of.deadline_at} /> : null
}
