// What can be done to a job. Each asks first, and names what it touches.
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { change } from '../../api/client'
import { ask } from '../../api/queries'
import type { JobOut } from '../../api/types'
import { ActionButton } from '../../parts/ActionButton'
import { Confirm, type Question, type Touched } from '../../parts/Confirm'
import { count, layoutName, shortId } from '../../parts/format'
import { PlanDialog } from './PlanDialog'

type Verb = 'checkpoint' | 'pause' | 'resume' | 'stop'
export const ENDED: readonly JobOut['state'][] = ['stopped', 'finished', 'failed']

export function JobActions({ job }: { job: JobOut }) {
  const [asked, setAsked] = useState<Verb | 'plan' | null>(null)
  const close = () => setAsked(null)
  const isEnded = ENDED.includes(job.state)
  const mayResume = job.paused || isEnded
  return (
    <div className="row">
      <button type="button" onClick={() => setAsked('plan')}>Plan only</button>
      <ActionButton onClick={() => setAsked('checkpoint')} why={job.state === 'running' ? null : 'Only a running job writes checkpoints.'}>Checkpoint</ActionButton>
      {mayResume
        ? <ActionButton onClick={() => setAsked('resume')}>Resume</ActionButton>
        : <ActionButton onClick={() => setAsked('pause')}>Pause</ActionButton>}
      <ActionButton isDanger onClick={() => setAsked('stop')} why={isEnded ? `The job is ${job.state} already.` : null}>Stop</ActionButton>
      {asked === 'plan' && <PlanDialog job={job} onClose={close} />}
      {asked !== null && asked !== 'plan' && <AskFirst job={job} verb={asked} onClose={close} />}
    </div>
  )
}

function AskFirst({ job, verb, onClose }: { job: JobOut; verb: Verb; onClose: () => void }) {
  const handoff = useQuery({ ...ask.handoff(job.open_handoff ?? ''), enabled: job.open_handoff !== null })
  const [steps, setSteps] = useState('')
  const path = `/api/v1/jobs/${encodeURIComponent(job.job_id)}/${verb}`
  const body = verb === 'resume' ? { steps: steps.trim() === '' ? null : Number(steps) } : undefined
  const touches = job.open_handoff !== null && handoff.isPending ? null : touchedBy(job, verb, handoff.data?.stage)
  return <Confirm question={{ ...QUESTIONS[verb](job), touches, act: reason => change('POST', path, { body, reason }), fields: verb === 'resume' && <Steps job={job} value={steps} onChange={setSteps} /> }} onClose={onClose} />
}

function Steps({ job, value, onChange }: { job: JobOut; value: string; onChange: (value: string) => void }) {
  return <label className="field">Train up to step (empty: {count(job.stop_steps)} as now)<input type="number" min={1} step={1} value={value} onChange={event => onChange(event.target.value)} /></label>
}

const QUESTIONS: Record<Verb, (job: JobOut) => Pick<Question, 'title' | 'verb' | 'about' | 'isDanger'>> = {
  checkpoint: job => ({ title: `Write a checkpoint of ${job.name}?`, verb: 'Write checkpoint', about: 'Training goes on; ranks write at the next boundary between two steps.' }),
  pause: job => ({ title: `Pause ${job.name}?`, verb: 'Pause job', about: 'The job writes a checkpoint if it has a place for one, its ranks end, and its nodes are free for others until it is resumed.' }),
  resume: job => ({ title: `Resume ${job.name}?`, verb: 'Resume job', about: 'It goes on from its last checkpoint that is not damaged, or from its start if it has none.' }),
  stop: job => ({ title: `Stop ${job.name}?`, verb: 'Stop job', isDanger: true, about: 'Its ranks end and its nodes are free. It can be resumed from its last checkpoint.' }),
}

/** Everything that an action changes, by name. */
export function touchedBy(job: JobOut, verb: Verb, handoffStage?: string): Touched[] {
  const found: Touched[] = [{ kind: 'job', name: job.job_id, what: `${job.state} at step ${count(job.last_step)} of ${count(job.stop_steps)}${job.layout ? `, ${layoutName(job.layout)}` : ''}` }]
  if (verb === 'resume') {
    const checkpoint = job.checkpoints.filter(item => !item.damage && !item.left_behind).at(-1)
    if (checkpoint) found.push({ kind: 'checkpoint', name: `step ${count(checkpoint.step)}`, what: 'is read' })
    return found
  }
  const what = { checkpoint: 'writes its part', pause: 'its ranks end, then it is free', stop: 'its ranks end, then it is free' }[verb]
  for (const node of job.nodes) found.push({ kind: 'node', name: node, what })
  if (job.open_handoff && verb !== 'checkpoint') found.push({ kind: 'handoff', name: shortId(job.open_handoff), what: `${handoffStage ?? 'under way'}; is given up` })
  return found
}
