// "If a node goes": what would happen, node by node. The agents hold these plans already.
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useState } from 'react'
import { ask } from '../../api/queries'
import type { RanksOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { layoutName, plural, prose } from '../../parts/format'
import { Countdown } from '../../parts/Moment'
import { Empty, Panel, Why } from '../../parts/Panel'
import { Table } from '../../parts/Table'

type Node = RanksOut['nodes'][number]

export function IfGone({ jobId, isEnded }: { jobId: string; isEnded: boolean }) {
  const ranks = useQuery(ask.ranks(jobId))
  return (
    <Panel title="If a node goes" of={ranks} flush lines={6}>
      {() => isEnded ? <Empty>The job has ended: no node would hurt it.</Empty> : ranks.data!.nodes.length === 0 ? <Empty>The job has no node now.</Empty> : (
        <Table of={ranks.data!.nodes} id={row => row.node_id} caption="If a node goes" height={330} columns={[
          { name: 'Node', isLead: true, cell: row => <><Link to="/nodes/$nodeId" params={{ nodeId: row.node_id }}>{row.node_id}</Link><Leaving of={row} /></> },
          { name: 'Then', cell: row => <Then of={row} jobId={jobId} /> },
          { name: 'Why', isWide: true, cell: row => row.if_gone && <span className="soft">{prose(row.if_gone.reason)}</span> },
        ]} />
      )}
    </Panel>
  )
}

function Leaving({ of }: { of: Node }) {
  if (!of.leaving) return null
  const badge = <><Chip state="leaving" /> <Countdown until={of.deadline_at} /></>
  return <div className="small">{of.incident_id === null ? badge : <Link to="/incidents/$incidentId" params={{ incidentId: String(of.incident_id) }}>{badge}</Link>}</div>
}

function Then({ of, jobId }: { of: Node; jobId: string }) {
  if (of.if_gone === null) return <Asked jobId={jobId} nodeId={of.node_id} />
  if (of.if_gone.layout === null) return <span className="warn">checkpoint, then wait for nodes</span>
  return <>goes on as <strong className="nowrap">{layoutName(of.if_gone.layout)}</strong> <span className="quiet">on {plural(of.if_gone.nodes.length, 'node')}</span></>
}

/** No plan is kept for this node: the planner is asked when somebody wants to know. */
function Asked({ jobId, nodeId }: { jobId: string; nodeId: string }) {
  const [wants, setWants] = useState(false)
  const plan = useQuery({ ...ask.plan(jobId, [nodeId]), enabled: wants })
  if (!wants) return <button type="button" className="plain" style={{ marginLeft: -6 }} onClick={() => setWants(true)}>Ask the planner</button>
  if (plan.error) return <span className="bad small"><Why error={plan.error} /></span>
  if (!plan.data) return <span className="quiet">asking …</span>
  return <><Chip state={plan.data.verdict} /> {layoutName(plan.data.layout)} <div className="soft small">{prose(plan.data.reason)}</div></>
}
