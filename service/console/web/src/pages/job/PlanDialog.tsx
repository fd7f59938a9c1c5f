// "Plan only": what the service would do now, or without some nodes. Nothing is changed.
import { useQuery } from '@tanstack/react-query'
import { useEffect, useRef, useState } from 'react'
import { ask } from '../../api/queries'
import type { JobOut, PlanOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { layoutName, prose } from '../../parts/format'
import { Skeleton, Why } from '../../parts/Panel'
import { Alternatives, Wanted } from './Alternatives'
import { WithoutNodes } from './WithoutNodes'

export function PlanDialog({ job, onClose }: { job: JobOut; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null)
  const [without, setWithout] = useState<readonly string[]>([])
  const plan = useQuery(ask.plan(job.job_id, without))
  useEffect(() => dialog.current?.showModal(), [])
  return (
    <dialog ref={dialog} aria-label="Plan only" onCancel={onClose} onClose={onClose} style={{ width: 'min(720px, calc(100vw - 24px))' }}>
      <div className="dialog-body">
        <h2 style={{ fontSize: 15 }}>Plan only: {job.name}</h2>
        <p className="soft">What the service would do now. Nothing is changed.</p>
        <WithoutNodes nodes={job.nodes} value={without} onChange={setWithout} />
        <div style={{ minHeight: 160 }}>{plan.error ? <div className="notice-box bad"><Why error={plan.error} /></div> : plan.data ? <PlanView of={plan.data} /> : <Skeleton lines={5} />}</div>
      </div>
      <div className="dialog-foot"><button type="button" onClick={onClose}>Close</button></div>
    </dialog>
  )
}

export function PlanView({ of }: { of: PlanOut }) {
  return (
    <div className="stack">
      <p><Chip state={of.verdict} /> {of.layout && <strong>{layoutName(of.layout)} </strong>}{of.nodes.length > 0 && <span className="soft">on {of.nodes.join(', ')}</span>}</p>
      <p>{prose(of.reason)}</p>
      {of.verdict_reason && of.verdict_reason !== of.reason && <p className="soft">{prose(of.verdict_reason)}</p>}
      <Alternatives of={of.alternatives} chosen={of.layout} />
      <Wanted of={of.wanted} />
    </div>
  )
}
