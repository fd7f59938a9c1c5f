// Handoffs as a table, of one job or of all.
import { Link, useNavigate, useSearch } from '@tanstack/react-router'
import { ask } from '../../api/queries'
import type { HandoffOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { bytes, layoutName, prose, seconds, shortId, words } from '../../parts/format'
import { ListPanel } from '../../parts/ListPanel'
import { Moment } from '../../parts/Moment'

export function FailedOnly() {
  const search = useSearch({ strict: false })
  const go = useNavigate()
  return (
    <label className="check small">
      <input type="checkbox" checked={search.failed === true} onChange={event => void go({ to: '.', search: (old: object) => ({ ...old, failed: event.target.checked || undefined }), replace: true, resetScroll: false })} />
      failed only
    </label>
  )
}

export function HandoffList({ jobId }: { jobId?: string }) {
  const search = useSearch({ strict: false })
  const columns = [
    { name: 'Handoff', isLead: true, cell: (row: HandoffOut) => <Link to="/handoffs/$handoffId" params={{ handoffId: row.handoff_id }}><code>{shortId(row.handoff_id)}</code></Link> },
    ...(jobId ? [] : [{ name: 'Job', cell: (row: HandoffOut) => <Link to="/jobs/$jobId" params={{ jobId: row.job_id }}>{row.job_id}</Link> }]),
    { name: 'State', cell: (row: HandoffOut) => <Chip state={row.state} /> },
    { name: 'Layout', cell: (row: HandoffOut) => <span className="nowrap">{layoutName(row.from)} → {layoutName(row.to)}</span> },
    { name: 'Cause', cell: (row: HandoffOut) => <>{words(row.cause)}{row.leaving.length > 0 && <span className="quiet">: {row.leaving.join(', ')}</span>}</> },
    { name: 'How', cell: (row: HandoffOut) => words(row.rung) },
    { name: 'Opened', cell: (row: HandoffOut) => <Moment at={row.opened_at} /> },
    { name: 'Pause', isNumber: true, cell: (row: HandoffOut) => seconds(row.pause_s) },
    { name: 'Lost', isNumber: true, cell: (row: HandoffOut) => seconds(row.lost_s) },
    { name: 'Moved', isNumber: true, cell: (row: HandoffOut) => bytes(row.bytes_moved) },
    { name: 'Why', isWide: true, cell: (row: HandoffOut) => <span className="soft">{prose(row.state === 'active' ? row.why : row.reason)}</span> },
  ]
  return (
    <ListPanel<HandoffOut>
      title="Handoffs" id={row => row.handoff_id} columns={columns} tools={<FailedOnly />}
      query={ask.handoffs({ job_id: jobId ?? null, state: search.failed ? ['aborted', 'broken'] : null })}
      empty={search.failed ? 'No handoff has failed.' : 'No handoff yet. One appears when a node goes or comes.'}
      csv={{
        columns: ['handoff_id', 'job_id', 'state', 'from', 'to', 'cause', 'leaving', 'rung', 'opened_at', 'pause_s', 'lost_s', 'bytes_moved', 'certificate', 'why', 'reason'],
        row: row => [row.handoff_id, row.job_id, row.state, row.from, row.to, row.cause, row.leaving.join(' '), row.rung, row.opened_at, row.pause_s, row.lost_s, row.bytes_moved, row.certificate, row.why, row.reason],
      }}
    />
  )
}
