// The tabs of a job that are lists: handoffs, checkpoints, decisions.
import { useState } from 'react'
import { ask } from '../../api/queries'
import type { CheckpointOut, DecisionOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { bytes, count, layoutName, plural, prose, seconds, words } from '../../parts/format'
import { ListPanel } from '../../parts/ListPanel'
import { Moment } from '../../parts/Moment'
import { HandoffList } from '../handoff/HandoffList'
import { Alternatives, Wanted } from './Alternatives'
import { Wires } from './Wires'

export default function Tables({ jobId, of }: { jobId: string; of: 'handoffs' | 'checkpoints' | 'decisions' }) {
  if (of === 'handoffs') return <div className="stack"><HandoffList jobId={jobId} /><Wires jobId={jobId} /></div>
  return of === 'checkpoints' ? <Checkpoints jobId={jobId} /> : <Decisions jobId={jobId} />
}

function Checkpoints({ jobId }: { jobId: string }) {
  return (
    <ListPanel<CheckpointOut>
      title="Checkpoints" query={ask.checkpoints(jobId)} id={row => `${row.generation} ${row.step}`}
      empty="No checkpoint yet. The job file's `checkpoint` says where and how often; “Checkpoint” writes one now."
      csv={{ columns: ['step', 'generation', 'finished_at', 'seconds', 'size_bytes', 'path', 'damage', 'left_behind'], row: row => [row.step, row.generation, row.finished_at, row.seconds, row.size_bytes, row.path, row.damage, row.left_behind] }}
      columns={[
        { name: 'Step', isLead: true, isNumber: true, cell: row => count(row.step) },
        { name: 'Finished', cell: row => <Moment at={row.finished_at} /> },
        { name: 'Generation', isNumber: true, cell: row => row.generation },
        { name: 'Took', isNumber: true, cell: row => seconds(row.seconds) },
        { name: 'Size', isNumber: true, cell: row => bytes(row.size_bytes) },
        { name: 'Path', isWide: true, cell: row => <code>{row.path}</code> },
        { name: 'Not used', isWide: true, cell: row => unused(row) },
      ]}
    />
  )
}

function unused(of: CheckpointOut) {
  if (of.damage) return <span className="bad">damaged: {of.damage}</span>
  return of.left_behind ? <span className="quiet">the job went back to an earlier step</span> : null
}

function Decisions({ jobId }: { jobId: string }) {
  return (
    <ListPanel<DecisionOut>
      title="Decisions" query={ask.decisions(jobId)} id={row => row.decision_id} empty="No decision yet."
      note={<span className="quiet small">a decision is stored when it differs from the one before</span>}
      csv={{ columns: ['decided_at', 'verdict', 'action', 'layout', 'nodes', 'reason', 'verdict_reason', 'asked_by', 'inputs_digest'], row: row => [row.decided_at, row.verdict, row.action, row.layout, row.nodes.join(' '), row.reason, row.verdict_reason, row.asked_by, row.inputs_digest] }}
      columns={[
        { name: 'When', isLead: true, cell: row => <Moment at={row.decided_at} /> },
        { name: 'Planner', cell: row => <Chip state={row.verdict} /> },
        { name: 'Done', cell: row => words(row.action) },
        { name: 'Layout', cell: row => <span className="nowrap">{layoutName(row.layout)}</span> },
        { name: 'Why', isWide: true, cell: row => <Why of={row} /> },
        { name: 'Asked by', cell: row => <span className="soft">{row.asked_by}</span> },
      ]}
    />
  )
}

function Why({ of }: { of: DecisionOut }) {
  const [isOpen, setOpen] = useState(false)
  return (
    <div className="stack" style={{ gap: 4, textAlign: 'left' }}>
      <span>{prose(of.reason)}</span>
      {of.verdict_reason && of.verdict_reason !== of.reason && <span className="soft">Planner: {prose(of.verdict_reason)}</span>}
      {of.nodes.length > 0 && <span className="quiet small">on {of.nodes.join(', ')}</span>}
      {of.alternatives.length > 0 && <div><button type="button" className="plain" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>{isOpen ? 'Hide' : 'Show'} {plural(of.alternatives.length, 'alternative')}</button></div>}
      {isOpen && <><Alternatives of={of.alternatives} chosen={of.layout} /><Wanted of={of.wanted} /></>}
    </div>
  )
}
