// The first screen: what runs, what it costs, what is about to go.
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { ask } from '../../api/queries'
import type { FleetOut, PendingOut, PoolOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { CsvButton } from '../../parts/CsvButton'
import { Figure, Figures } from '../../parts/Figure'
import { dollars, plural, words } from '../../parts/format'
import { Countdown, Moment } from '../../parts/Moment'
import { Empty, Panel } from '../../parts/Panel'
import { Table } from '../../parts/Table'
import { Jobs } from './Jobs'
import { Nodes } from './Nodes'
import { HOUR_COLUMNS, hourRows, Strip, total } from './Strip'

export default function Fleet() {
  const fleet = useQuery(ask.fleet())
  return (
    <>
      <h1 className="hidden-text">Fleet</h1>
      <div className="grid-main">
        <Panel title="Now" of={fleet} lines={2}>{() => <Now fleet={fleet.data!} />}</Panel>
        <Panel title="Nodes that will go" of={fleet} flush lines={2}>{() => <Pending of={fleet.data!.pending} />}</Panel>
      </div>
      <Jobs />
      <Panel
        title="Pools" of={fleet} flush lines={3}
        tools={<>
          <CsvButton title="CSV of interruptions" name="interruptions by hour" columns={HOUR_COLUMNS} rows={() => (fleet.data?.pools ?? []).flatMap(hourRows)} />
          <CsvButton title="CSV of pools" name="pools" columns={POOL_COLUMNS} rows={() => (fleet.data?.pools ?? []).map(poolRow)} />
        </>}
      >
        {() => <Pools of={fleet.data!.pools} />}
      </Panel>
      <Nodes pools={fleet.data?.pools.map(each => each.pool) ?? []} />
    </>
  )
}

function Now({ fleet }: { fleet: FleetOut }) {
  const { nodes } = fleet
  return (
    <Figures>
      <Figure name="Nodes" large beneath={[`${nodes.idle} idle`, nodes.leaving > 0 && `${nodes.leaving} leaving`].filter(Boolean).join(', ')}>{nodes.ready} <small>ready</small></Figure>
      <Figure name="Slots" large beneath={plural(fleet.pools.length, 'pool')}>{nodes.slots}</Figure>
      <Figure name="Spending now" large beneath={fleet.unpriced_nodes > 0 ? `${plural(fleet.unpriced_nodes, 'node')} without a price` : 'all nodes priced'}>{dollars(fleet.usd_per_hour)} <small>/ h</small></Figure>
      <Figure name="Silent" large title="No report for a while." beneath={nodes.silent > 0 ? 'see the nodes below' : 'every node is heard from'}>
        <span className={nodes.silent > 0 ? 'warn' : undefined}>{nodes.silent}</span>
      </Figure>
    </Figures>
  )
}

function Pending({ of }: { of: readonly PendingOut[] }) {
  if (of.length === 0) return <Empty>No notice is pending. A spot notice, a drain or maintenance would stand here with its countdown.</Empty>
  return (
    <Table of={of} id={row => row.incident_id} caption="Pending notices" columns={[
      { name: 'Node', isLead: true, cell: row => <Link to="/incidents/$incidentId" params={{ incidentId: String(row.incident_id) }}>{row.node_id}</Link> },
      { name: 'Goes', cell: row => <Countdown until={row.deadline_at} /> },
      { name: 'Why', cell: row => <>{row.drained ? 'drain' : words(row.kind)} <span className="quiet">({row.source})</span></> },
      { name: 'Jobs', cell: row => row.jobs.length === 0 ? <span className="quiet">none needs it</span> : row.jobs.map(job => <Link key={job} to="/jobs/$jobId" params={{ jobId: job }}>{job} </Link>) },
      { name: 'Handoff', cell: row => row.handoff_id === null ? <span className="quiet">none</span> : <Link to="/handoffs/$handoffId" params={{ handoffId: row.handoff_id }}><Chip state={row.handoff_state ?? 'proposed'} /></Link> },
    ]} />
  )
}

const POOL_COLUMNS = ['pool', 'ready', 'leaving', 'silent', 'busy', 'slots', 'price_usd_per_hour', 'on_demand_usd_per_hour', 'usd_per_hour', 'interruptions_48h']
const poolRow = (pool: PoolOut) => [pool.pool, pool.ready, pool.leaving, pool.silent, pool.busy, pool.slots, pool.price_usd_per_hour, pool.on_demand_usd_per_hour, pool.usd_per_hour, total(pool)]

function Pools({ of }: { of: readonly PoolOut[] }) {
  if (of.length === 0) return <Empty>No pool yet. A pool appears with its first node.</Empty>
  return (
    <Table of={of} id={row => row.pool} caption="Pools" columns={[
      { name: 'Pool', isLead: true, cell: row => <Link to="/" search={{ pool: row.pool }} hash="nodes">{row.pool}</Link> },
      { name: 'Nodes', cell: row => <span className="row reserved">{row.ready} ready{row.leaving > 0 && <Chip state="leaving">{row.leaving} leaving</Chip>}{row.silent > 0 && <Chip state="silent">{row.silent} silent</Chip>}</span> },
      { name: 'Busy / slots', isNumber: true, cell: row => `${row.busy} / ${row.slots}` },
      { name: 'Price', isNumber: true, cell: row => <Price of={row} /> },
      { name: 'On demand', isNumber: true, cell: row => row.on_demand_usd_per_hour === null ? <span className="quiet">–</span> : `${dollars(row.on_demand_usd_per_hour)} / h` },
      { name: 'Spending', isNumber: true, cell: row => `${dollars(row.usd_per_hour)} / h` },
      { name: 'Interruptions, 48 h', cell: row => <Strip of={row} /> },
    ]} />
  )
}

function Price({ of }: { of: PoolOut }) {
  if (of.price_usd_per_hour === null) return <span className="warn" title="Its nodes count with $0 until it has a price: liver pools price">none</span>
  return <span>{dollars(of.price_usd_per_hour)} / h {of.price_since && <span className="quiet small">since <Moment at={of.price_since} /></span>}</span>
}
