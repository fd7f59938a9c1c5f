// One job: what it does and what comes next, what it costs, where it runs, and everything else in tabs.
import { useQuery } from '@tanstack/react-query'
import { Link, useParams } from '@tanstack/react-router'
import { lazy, Suspense } from 'react'
import { ask } from '../../api/queries'
import { useWatchedJob } from '../../api/link'
import { Chip } from '../../parts/Chip'
import { Problem, Skeleton } from '../../parts/Panel'
import { JobActions } from './JobActions'
import { Overview } from './Overview'
import { Outlook } from './Outlook'

const TABS = [
  ['', 'Overview'], ['handoffs', 'Handoffs'], ['checkpoints', 'Checkpoints'], ['logs', 'Logs'], ['metrics', 'Metrics'],
  ['decisions', 'Decisions'], ['what-if', 'What if'], ['file', 'Job file'],
] as const
type Tab = (typeof TABS)[number][0]

// What stands behind a tab is loaded with it.
const Tables = lazy(() => import('./Tables'))
const Logs = lazy(() => import('./Logs'))
const Metrics = lazy(() => import('./Metrics'))
const WhatIf = lazy(() => import('./WhatIf'))
const File = lazy(() => import('./File'))

export default function Job() {
  const { jobId, tab } = useParams({ strict: false })
  return <OneJob key={jobId} jobId={jobId ?? ''} tab={(TABS.some(([name]) => name === tab) ? tab : '') as Tab} />
}

function OneJob({ jobId, tab }: { jobId: string; tab: Tab }) {
  const job = useQuery(ask.job(jobId))
  useWatchedJob(jobId)
  if (!job.data) return job.error ? <Problem of={job} /> : <Skeleton lines={10} />
  return (
    <>
      <div className="page-head">
        <nav className="crumbs" aria-label="Where this is"><Link to="/">Fleet</Link><span aria-hidden="true">/</span><span>{jobId}</span></nav>
        <h1>{job.data.name}</h1>
        <Chip state={job.data.paused ? 'suspended' : job.data.state}>{job.data.paused ? 'paused' : undefined}</Chip>
        {job.data.name !== jobId && <code className="quiet">{jobId}</code>}
        <span className="push" />
        <JobActions job={job.data} />
      </div>
      <Outlook jobId={jobId} />
      <nav className="tabs" aria-label="About this job">
        {TABS.map(([name, title]) => (
          <Link
            key={name} to={name === '' ? '/jobs/$jobId' : '/jobs/$jobId/$tab'} params={{ jobId, tab: name }} resetScroll={false} search={{}}
            activeOptions={{ exact: true, includeSearch: false }}
          >{title}</Link>
        ))}
      </nav>
      <Suspense fallback={<Skeleton lines={10} />}>
        {tab === '' && <Overview job={job.data} />}
        {(tab === 'handoffs' || tab === 'checkpoints' || tab === 'decisions') && <Tables jobId={jobId} of={tab} />}
        {tab === 'logs' && <Logs jobId={jobId} />}
        {tab === 'metrics' && <Metrics jobId={jobId} />}
        {tab === 'what-if' && <WhatIf job={job.data} />}
        {tab === 'file' && <File job={job.data} />}
      </Suspense>
    </>
  )
}
