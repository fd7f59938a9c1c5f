// Who changed what, newest first.
import { Link, useNavigate, useSearch } from '@tanstack/react-router'
import { ask } from '../api/queries'
import type { AuditOut } from '../api/types'
import { Chip } from '../parts/Chip'
import { ListPanel } from '../parts/ListPanel'
import { Moment } from '../parts/Moment'

export default function Audit() {
  const { target } = useSearch({ from: '/audit' })
  const go = useNavigate({ from: '/audit' })
  return (
    <>
      <h1 className="hidden-text">Audit</h1>
      <ListPanel<AuditOut>
        title="Audit" query={ask.audit({ target: target ?? null })} id={row => row.audit_id}
        empty={target ? `Nobody has changed ${target}.` : 'Nobody has changed anything yet.'}
        tools={<input type="search" aria-label="Only of this job, node, pool or token" placeholder="Only of job, node, pool, token" size={26} defaultValue={target ?? ''} onKeyDown={event => event.key === 'Enter' && void go({ search: { target: event.currentTarget.value || undefined } })} />}
        csv={{ columns: ['audit_id', 'at', 'actor', 'role', 'action', 'target', 'detail'], row: row => [row.audit_id, row.at, row.actor, row.role, row.action, row.target, JSON.stringify(row.detail)] }}
        columns={[
          { name: 'When', isLead: true, cell: row => <Moment at={row.at} /> },
          { name: 'Who', cell: row => <span className="row">{row.actor} {row.role !== row.actor && <Chip state={row.role} />}</span> },
          { name: 'Did', cell: row => row.action },
          { name: 'To', cell: row => <Link to="/audit" search={{ target: row.target }}>{row.target}</Link> },
          { name: 'Why', isWide: true, cell: row => typeof row.detail.why === 'string' ? row.detail.why : <span className="quiet">–</span> },
          { name: 'Detail', isWide: true, cell: row => <Detail of={row.detail} /> },
        ]}
      />
    </>
  )
}

function Detail({ of }: { of: AuditOut['detail'] }) {
  const rest = Object.entries(of).filter(([name]) => name !== 'why')
  if (rest.length === 0) return <span className="quiet">–</span>
  return <span className="soft small">{rest.map(([name, value]) => `${name}: ${typeof value === 'string' ? value : JSON.stringify(value)}`).join('; ')}</span>
}
