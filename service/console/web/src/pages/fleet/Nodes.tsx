// All nodes of the fleet, or of one pool.
import { Link, useNavigate, useSearch } from '@tanstack/react-router'
import { ask } from '../../api/queries'
import type { NodeOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { ListPanel } from '../../parts/ListPanel'
import { Countdown, Distance } from '../../parts/Moment'

export function Nodes({ pools }: { pools: readonly string[] }) {
  const search = useSearch({ from: '/' })
  const go = useNavigate({ from: '/' })
  return (
    <div id="nodes">
      <ListPanel
        title="Nodes"
        query={ask.nodes({ pool: search.pool ?? null })}
        id={row => row.node_id}
        empty={search.pool ? 'This pool has no node.' : <>No node yet. Start <code>liver-agent</code> on one.</>}
        tools={
          <select aria-label="Pool" value={search.pool ?? ''} onChange={event => void go({ search: old => ({ ...old, pool: event.target.value || undefined }), replace: true, resetScroll: false })}>
            <option value="">All pools</option>
            {[...new Set([...pools, ...(search.pool ? [search.pool] : [])])].map(pool => <option key={pool}>{pool}</option>)}
          </select>
        }
        csv={{ columns: ['node_id', 'pool', 'state', 'leaving', 'deadline_at', 'zone', 'slots', 'jobs', 'last_seen_at'], row: row => [row.node_id, row.pool, row.state, row.leaving, row.deadline_at, row.zone, row.slots, row.jobs.join(' '), row.last_seen_at] }}
        columns={[
          { name: 'Node', isLead: true, cell: row => <Link to="/nodes/$nodeId" params={{ nodeId: row.node_id }}>{row.node_id}</Link> },
          { name: 'State', cell: row => <NodeState of={row} /> },
          { name: 'Pool', cell: row => row.pool },
          { name: 'Zone', cell: row => row.zone ?? <span className="quiet">–</span> },
          { name: 'Device', cell: row => row.device },
          { name: 'Slots', isNumber: true, cell: row => row.slots },
          { name: 'Jobs', cell: row => row.jobs.length === 0 ? <span className="quiet">idle</span> : row.jobs.map(job => <Link key={job} to="/jobs/$jobId" params={{ jobId: job }}>{job} </Link>) },
          { name: 'Last report', isNumber: true, cell: row => <Distance at={row.last_seen_at} /> },
        ]}
      />
    </div>
  )
}

export function NodeState({ of }: { of: NodeOut }) {
  if (of.state === 'ready' && of.leaving) return <span className="row"><Chip state="leaving" /><Countdown until={of.deadline_at} /></span>
  return <span className="row"><Chip state={of.state} />{of.drained && <Chip state="leaving">drained</Chip>}{of.overdue && <Chip state="leaving">outlived its end</Chip>}{of.deaf && of.state !== 'gone' && <Chip state="silent">deaf</Chip>}</span>
}
