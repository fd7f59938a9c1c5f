// One node: what it runs, how a notice would be heard, what its end would mean.
import { useQuery } from '@tanstack/react-query'
import { Link, useParams } from '@tanstack/react-router'
import { useState } from 'react'
import { change } from '../../api/client'
import { ask } from '../../api/queries'
import type { NodeOut } from '../../api/types'
import { ActionButton } from '../../parts/ActionButton'
import { Chip } from '../../parts/Chip'
import { Confirm, type Touched } from '../../parts/Confirm'
import { Facts } from '../../parts/Figure'
import { layoutName, none, plural, prose, seconds } from '../../parts/format'
import { Countdown, Distance, Moment } from '../../parts/Moment'
import { Empty, Panel, Problem, Skeleton } from '../../parts/Panel'
import { Table } from '../../parts/Table'
import { NodeState } from './Nodes'

const DRAIN_S = 120

export default function Node() {
  const { nodeId } = useParams({ strict: false })
  const node = useQuery(ask.node(nodeId ?? ''))
  const [isAsked, setAsked] = useState(false)
  if (!node.data) return node.error ? <Problem of={node} /> : <Skeleton lines={8} />
  const of = node.data
  return (
    <>
      <div className="page-head">
        <nav className="crumbs" aria-label="Where this is"><Link to="/">Fleet</Link><span aria-hidden="true">/</span><span>{of.node_id}</span></nav>
        <h1>{of.node_id}</h1>
        <NodeState of={of} />
        <span className="push" />
        <ActionButton isDanger={!of.drained} onClick={() => setAsked(true)} why={of.state === 'gone' ? 'The node is gone.' : null}>{of.drained ? 'Undo drain' : 'Drain'}</ActionButton>
      </div>
      <div className="grid-2">
        <Panel title="Node">
          <Facts of={[
            ['Pool', of.pool], ['Provider', `${of.provider}${of.provider_id ? `, ${of.provider_id}` : ''}`], ['Zone', of.zone ?? none], ['Device', `${of.device}, ${plural(of.slots, 'slot')}`],
            of.leaving && ['Goes', <><Countdown until={of.deadline_at} /> <Link to="/incidents" search={{ node: of.node_id, open: true }}>open notice</Link></>],
            ['Last report', <Distance at={of.last_seen_at} />], ['First seen', <Moment at={of.first_seen_at} />], ['Agent', of.agent_version],
            ['Clock', of.clock_ahead_s === null ? none : `${seconds(Math.abs(of.clock_ahead_s))} ${of.clock_ahead_s >= 0 ? 'ahead' : 'behind'}`],
            ['Incidents', <Link to="/incidents" search={{ node: of.node_id }}>of this node</Link>],
          ]} />
        </Panel>
        <Panel title="If it goes">
          {of.jobs.length === 0 ? <Empty>No job runs on it: nothing would be lost.</Empty> : <div className="stack">{of.jobs.map(job => <IfItGoes key={job} jobId={job} nodeId={of.node_id} />)}</div>}
        </Panel>
      </div>
      <Panel title="How a notice would be heard" flush note={of.deaf && <Chip state="silent">deaf: no channel is alive</Chip>}>
        {of.channels.length === 0 ? <Empty>No channel is known.</Empty> : (
          <Table of={of.channels} id={row => row.channel} caption="Channels" columns={[
            { name: 'Channel', isLead: true, cell: row => row.channel },
            { name: 'State', cell: row => <Chip state={row.alive ? 'ready' : 'silent'}>{row.alive ? 'alive' : 'not alive'}</Chip> },
            { name: 'Last asked', cell: row => <Moment at={row.asked_at} /> },
            { name: 'Last heard', cell: row => <Moment at={row.heard_at} /> },
            { name: 'Why', isWide: true, cell: row => <span className="soft">{row.reason}</span> },
          ]} />
        )}
      </Panel>
      {isAsked && <AskFirst of={of} onClose={() => setAsked(false)} />}
    </>
  )
}

function IfItGoes({ jobId, nodeId }: { jobId: string; nodeId: string }) {
  const plan = useQuery(ask.plan(jobId, [nodeId]))
  return (
    <div>
      <Link to="/jobs/$jobId" params={{ jobId }}>{jobId}</Link>{' '}
      {plan.data ? <><Chip state={plan.data.verdict} /> <strong>{layoutName(plan.data.layout)}</strong><p className="soft">{prose(plan.data.reason)}</p></> : <span className="quiet">{plan.error ? plan.error.message : 'asking the planner …'}</span>}
    </div>
  )
}

function AskFirst({ of, onClose }: { of: NodeOut; onClose: () => void }) {
  const [inS, setInS] = useState(String(DRAIN_S))
  const path = `/api/v1/nodes/${encodeURIComponent(of.node_id)}/${of.drained ? 'undrain' : 'drain'}`
  const touches: Touched[] = [{ kind: 'node', name: of.node_id, what: of.drained ? 'may be used again' : 'is emptied and stays empty' }, ...of.jobs.map(job => ({ kind: 'job', name: job, what: of.drained ? 'may use it again' : 'is moved to other nodes' }))]
  return (
    <Confirm onClose={onClose} question={{
      title: of.drained ? `Use ${of.node_id} again?` : `Drain ${of.node_id}?`, verb: of.drained ? 'Undo drain' : 'Drain node', isDanger: !of.drained, touches,
      about: of.drained ? 'New work may be placed on it.' : 'As if a notice had come: its jobs move on while they train. It stays empty until that is undone.',
      fields: !of.drained && <label className="field">Empty within, seconds<input type="number" min={1} max={86400} value={inS} onChange={event => setInS(event.target.value)} /></label>,
      act: reason => change('POST', path, { reason, body: of.drained ? undefined : { in_s: Number(inS) } }),
    }} />
  )
}

