// "What if" some nodes went, the job had more or fewer of them, or capacity had come and gone otherwise. Nothing is changed.
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { ask } from '../../api/queries'
import type { JobOut } from '../../api/types'
import { CsvButton } from '../../parts/CsvButton'
import { prose } from '../../parts/format'
import { Empty, Panel, Skeleton, Why } from '../../parts/Panel'
import { Table } from '../../parts/Table'
import { PlanView } from './PlanDialog'
import { Replay } from './replay/Replay'
import { WithoutNodes } from './WithoutNodes'

export default function WhatIf({ job }: { job: JobOut }) {
  return (
    <>
      <div className="grid-2">
        <OtherNodes job={job} />
        <ByCount job={job} />
      </div>
      <Replay jobId={job.job_id} />
    </>
  )
}

function OtherNodes({ job }: { job: JobOut }) {
  const [without, setWithout] = useState<readonly string[]>([])
  const plan = useQuery(ask.plan(job.job_id, without))
  return (
    <Panel title="What if these nodes went?">
      <div className="stack" style={{ gap: 12 }}>
        <WithoutNodes nodes={job.nodes} value={without} onChange={setWithout} />
        <div style={{ minHeight: 180 }}>{plan.error ? <div className="notice-box bad"><Why error={plan.error} /></div> : plan.data ? <PlanView of={plan.data} /> : <Skeleton lines={5} />}</div>
      </div>
    </Panel>
  )
}

interface ByNodes { nodes: number; layout: Record<string, number> | null; reason: string }

function ByCount({ job }: { job: JobOut }) {
  const of = job.layouts_by_count as unknown as readonly ByNodes[]
  return (
    <Panel title="What if it had another number of nodes?" flush tools={<CsvButton name={`${job.job_id} layouts by nodes`} columns={['nodes', 'layout', 'reason']} rows={() => of.map(each => [each.nodes, axesText(each.layout), each.reason])} />}>
      {of.length === 0 ? <Empty>The planner has not looked at this job yet.</Empty> : (
        <Table of={of} id={row => row.nodes} caption="Layouts by number of nodes" columns={[
          { name: 'Nodes', isLead: true, isNumber: true, cell: row => <>{row.nodes}{row.nodes === job.nodes.length && <span className="quiet"> (now)</span>}</> },
          { name: 'Layout', cell: row => row.layout ? <strong className="nowrap">{axesText(row.layout)}</strong> : <span className="warn">none fits</span> },
          { name: 'Why', isWide: true, cell: row => <span className="soft">{prose(row.reason)}</span> },
        ]} />
      )}
    </Panel>
  )
}

/** Axes of one say nothing, except of the three that every layout has. */
export function axesText(layout: Record<string, number> | null): string {
  if (!layout) return ''
  return ['tp', 'pp', 'vpp', 'cp', 'ep', 'dp'].filter(axis => ['tp', 'pp', 'dp'].includes(axis) || (layout[axis] ?? 1) > 1).map(axis => `${axis.toUpperCase()}${layout[axis] ?? 1}`).join('×')
}
