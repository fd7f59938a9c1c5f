// "Plan only": what the service would do now, or without some nodes. Nothing is changed.
import { useQuery } from '@tanstack/react-query'
import { useEffect, useRef, useState } from 'react'
import { ask } from '../../api/queries'
import type { JobOut, PlanOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { layoutName } from '../../parts/format'
import { Skeleton, Why } from '../../parts/Panel'
import { Alternatives } from './Alternatives'

export function PlanDialog({ job, onClose }: { job: JobOut; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null)
  const [without, setWithout] = useState<readonly string[]>([])
  const plan = useQuery(ask.plan(job.job_id, without))
  useEffect(() => dialog.current?.showModal(), [])
  const toggle = (node: string) => setWithout(old => (old.includes(node) ? old.filter(each => each !== node) : [...old, node]))
  return (
    <dialog ref={dialog} aria-label="Plan only" onCancel={onClose} onClose={onClose} style={{ width: 'min(720px, calc(100vw - 24px))' }}>
      <div className="dialog-body">
        <h2 style={{ fontSize: 15 }}>Plan only: {job.name}</h2>
        <p className="soft">What the service would do now. Nothing is changed.</p>
        <fieldset className="row" style={{ border: 0, margin: 0, padding: 0 }}>
          <legend className="soft small">Without these nodes, in thought</legend>
          {job.nodes.slice(0, 64).map(node => <label key={node} className="check"><input type="checkbox" checked={without.includes(node)} onChange={() => toggle(node)} />{node}</label>)}
          {job.nodes.length === 0 && <span className="quiet">The job has no node now.</span>}
        </fieldset>
        <div style={{ minHeight: 160 }}>{plan.error ? <div className="notice-box bad"><Why error={plan.error} /></div> : plan.data ? <Plan of={plan.data} /> : <Skeleton lines={5} />}</div>
      </div>
      <div className="dialog-foot"><button type="button" onClick={onClose}>Close</button></div>
    </dialog>
  )
}

function Plan({ of }: { of: PlanOut }) {
  return (
    <div className="stack">
      <p><Chip state={of.verdict} /> <strong>{layoutName(of.layout)}</strong> {of.nodes.length > 0 && <span className="soft">on {of.nodes.join(', ')}</span>}</p>
      <p>{of.reason}</p>
      {of.verdict_reason && of.verdict_reason !== of.reason && <p className="soft">{of.verdict_reason}</p>}
      <Alternatives of={of.alternatives} chosen={of.layout} />
    </div>
  )
}
