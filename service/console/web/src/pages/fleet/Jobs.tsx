// All jobs, with what each has cost.
import { Link, useNavigate, useSearch } from '@tanstack/react-router'
import { useMemo } from 'react'
import { nowMs } from '../../api/clock'
import { ask } from '../../api/queries'
import type { LedgerJobOut, JobSummary } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { count, dollars, layoutName, none, percent, prose } from '../../parts/format'
import { ListPanel, useList } from '../../parts/ListPanel'
import { Distance } from '../../parts/Moment'
import { RANGES, sinceOf, type Range } from '../../parts/range'
import { Segments } from '../../parts/Segments'

const CHOICES = [['all', 'All'], ['alive', 'Alive'], ['failed', 'Failed only']] as const
const ALIVE = ['pending', 'starting', 'running', 'suspending', 'suspended', 'stopping'] as const
type Row = JobSummary

export function Jobs() {
  const search = useSearch({ from: '/' })
  const go = useNavigate({ from: '/' })
  const choice = search.failed ? 'failed' : search.state === 'alive' ? 'alive' : 'all'
  const states = { all: null, alive: [...ALIVE], failed: ['failed' as const] }[choice]
  const range: Range = search.range ?? 'all'
  const minute = Math.floor(nowMs() / 60_000)
  const since = useMemo(() => sinceOf(range, minute * 60_000), [range, minute])
  const costs = useList(ask.jobCosts(since))
  const costOf = useMemo(() => new Map(costs.items.map(each => [each.job_id, each])), [costs.items])
  const cost = (row: Row): LedgerJobOut | undefined => costOf.get(row.job_id)
  return (
    <ListPanel
      title="Jobs"
      query={ask.jobs({ state: states, match: search.match ?? null })}
      id={row => row.job_id}
      empty={search.match || choice !== 'all' ? 'No job is like this.' : <>No job yet. Register one with <code>liver jobs submit job.yaml</code>.</>}
      tools={<>
        <Segments label="What the figures of cost cover" value={range} choices={RANGES} onChoose={value => void go({ search: old => ({ ...old, range: value === 'all' ? undefined : value }), replace: true, resetScroll: false })} />
        <input type="search" aria-label="Filter jobs by name" placeholder="Filter" defaultValue={search.match ?? ''} size={14}
          onChange={event => void go({ search: old => ({ ...old, match: event.target.value || undefined }), replace: true })} />
        <Segments label="Which jobs" value={choice} choices={CHOICES}
          onChoose={value => void go({ search: old => ({ ...old, failed: value === 'failed' || undefined, state: value === 'alive' ? 'alive' : undefined }), replace: true })} />
      </>}
      csv={{
        columns: ['job_id', 'name', 'state', 'layout', 'nodes', 'step', 'of', 'goodput', 'dollars', 'interruptions_dollars', 'saved_dollars', 'lost_steps', 'reason', 'warning'],
        row: row => [row.job_id, row.name, row.state, row.layout, row.nodes.length, row.last_step, row.stop_steps, cost(row)?.goodput, cost(row)?.dollars, cost(row)?.interruptions_dollars, cost(row)?.saved_dollars, row.lost_steps, row.reason, row.warning],
      }}
      columns={[
        { name: 'Job', isLead: true, cell: row => <><Link to="/jobs/$jobId" params={{ jobId: row.job_id }}>{row.job_id}</Link>{row.name !== row.job_id && <div className="quiet small">{row.name}</div>}</> },
        { name: 'State', cell: row => <State of={row} /> },
        { name: 'Layout', cell: row => <span className="nowrap">{layoutName(row.layout)}</span> },
        { name: 'Nodes', isNumber: true, cell: row => row.nodes.length },
        { name: 'Step', isNumber: true, cell: row => <Progress of={row} /> },
        { name: 'Goodput', isNumber: true, cell: row => percent(cost(row)?.goodput) },
        { name: 'Cost', isNumber: true, cell: row => dollars(cost(row)?.dollars) },
        { name: 'Interruptions cost', isNumber: true, cell: row => dollars(cost(row)?.interruptions_dollars) },
        { name: 'Saved by spot', isNumber: true, cell: row => <Saved of={cost(row)?.saved_dollars} /> },
        { name: 'Steps lost', isNumber: true, cell: row => count(row.lost_steps) },
        { name: 'Why', isWide: true, cell: row => <>{row.warning && <div className="notice-box warn">{prose(row.warning)}</div>}<span className="soft">{prose(row.standstill?.because ?? row.reason) || none}</span></> },
      ]}
    />
  )
}

/** A job that runs and makes no step says so, and what runs instead if something does. */
function State({ of }: { of: Row }) {
  if (of.paused) return <Chip state="suspended">paused</Chip>
  if (!of.standstill) return <Chip state={of.state} />
  const { hook, since } = of.standstill
  return <span className="row"><Chip state={of.state} level={hook ? 'info' : 'bad'}>{hook || 'no step'}</Chip><span className="small quiet"><Distance at={since} /></span></span>
}

function Progress({ of }: { of: Row }) {
  const part = of.stop_steps > 0 ? Math.min(1, of.last_step / of.stop_steps) : 0
  return (
    <>
      {count(of.last_step)} <span className="quiet">/ {count(of.stop_steps)}</span>
      <div className="progress" style={{ minWidth: 72 }} aria-hidden="true"><i style={{ width: `${part * 100}%` }} /></div>
    </>
  )
}

function Saved({ of }: { of: number | null | undefined }) {
  if (of === null || of === undefined) return <span className="quiet" title="No pool of this job has an on-demand price: liver pools price --on-demand">{none}</span>
  return <span className={of >= 0 ? 'good' : 'bad'}>{dollars(of)}</span>
}
