// "This job, that trace, these knobs": what it would have made and cost, under LiveR's policy and what it is compared with.
import { useMutation } from '@tanstack/react-query'
import { useMemo, useState } from 'react'
import { change, Refused } from '../../../api/client'
import type { WhatIfOut } from '../../../api/types'
import { Panel, Why } from '../../../parts/Panel'
import { bodyOf, EMPTY, placeOf, type Form, type Problem } from './replay'
import { ReplayAnswer } from './ReplayAnswer'
import { ReplayForm } from './ReplayForm'

export function Replay({ jobId }: { jobId: string }) {
  const [form, setForm] = useState<Form>(EMPTY)
  const [mine, setMine] = useState<readonly Problem[]>([])
  const replay = useMutation({ mutationFn: (body: unknown) => change<WhatIfOut>('POST', '/api/v1/what-if', { body }) })
  const theirs = useMemo(() => (replay.error instanceof Refused ? replay.error.errors : []), [replay.error])
  const problems = mine.length > 0 ? mine : theirs
  const ask = () => {
    const { body, problems: found } = bodyOf(jobId, form)
    setMine(found)
    if (found.length === 0) replay.mutate(body)
  }
  const isPlaced = problems.length > 0 && problems.every(each => placeOf(each.field) !== '')
  return (
    <>
      <Panel title="What if capacity had been another?">
        <div className="stack" style={{ gap: 12 }}>
          <ReplayForm value={form} onChange={setForm} problems={problems} isBusy={replay.isPending} onAsk={ask} />
          {mine.length === 0 && replay.error && !isPlaced && <div className="notice-box bad" role="alert"><Why error={replay.error} /></div>}
        </div>
      </Panel>
      {replay.data && <ReplayAnswer of={replay.data} />}
    </>
  )
}
