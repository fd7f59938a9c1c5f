// What stands under the sentence: money, ranks, what if a node goes, the timeline.
import { useQuery } from '@tanstack/react-query'
import { useNavigate, useSearch } from '@tanstack/react-router'
import { lazy, Suspense, useMemo } from 'react'
import { nowMs } from '../../api/clock'
import { ask } from '../../api/queries'
import type { JobOut, TimelineOut } from '../../api/types'
import { CAUSES } from '../../parts/causes'
import { CsvButton } from '../../parts/CsvButton'
import { Empty, Panel, Skeleton } from '../../parts/Panel'
import { RANGES, sinceOf, type Range } from '../../parts/range'
import { Segments } from '../../parts/Segments'
import type { Axis } from '../../router'
import { ENDED } from './JobActions'
import { IfGone } from './IfGone'
import { Money } from './Money'
import { Ranks } from './Ranks'

const Timeline = lazy(() => import('../../charts/Timeline'))
const TIMELINE_PX = 456
const AXES: readonly (readonly [Axis, string])[] = [['time', 'Time'], ['step', 'Steps'], ['dollars', 'Dollars']]

export function Overview({ job }: { job: JobOut }) {
  const search = useSearch({ strict: false })
  const go = useNavigate()
  const axis: Axis = search.x ?? 'time'
  const range: Range = search.range ?? 'all'
  // The beginning of the range moves on with the minutes, not with each drawing.
  const minute = Math.floor(nowMs() / 60_000)
  const since = useMemo(() => sinceOf(range, minute * 60_000), [range, minute])
  const timeline = useQuery(ask.timeline(job.job_id, since))
  const change = (more: object) => void go({ to: '.', search: (old: object) => ({ ...old, ...more }), replace: true, resetScroll: false })
  const ranges = <Segments label="Range" value={range} choices={RANGES} onChoose={value => change({ range: value === 'all' ? undefined : value })} />
  return (
    <>
      <div className="grid-main">
        <Money jobId={job.job_id} since={since} ranges={ranges} />
        <IfGone jobId={job.job_id} isEnded={ENDED.includes(job.state)} />
      </div>
      <Panel
        title="Timeline" of={timeline} lines={10}
        tools={<>
          <Segments label="Over" value={axis} choices={AXES} onChoose={value => change({ x: value === 'time' ? undefined : value })} />
          <CsvButton title="CSV of steps" name={`${job.job_id} steps`} columns={STEP_COLUMNS} rows={() => stepRows(timeline.data)} />
          <CsvButton title="CSV of goodput" name={`${job.job_id} goodput`} columns={['starts_at', 'ends_at', ...CAUSES.map(cause => `${cause}_slot_s`), 'dollars_until']} rows={() => bucketRows(timeline.data)} />
        </>}
        note={timeline.data?.thinned && <span className="quiet small">thinned; CSV has what is drawn</span>}
      >
        {() => timeline.data!.points.length + timeline.data!.buckets.length === 0
          ? <Empty>No step yet in this range.</Empty>
          : (
            <div style={{ minHeight: TIMELINE_PX }}>
              <Suspense fallback={<Skeleton lines={10} />}><Timeline timeline={timeline.data!} axis={axis} /></Suspense>
            </div>
          )}
      </Panel>
      <Ranks jobId={job.job_id} />
    </>
  )
}

const STEP_COLUMNS = ['step', 'at', 'generation', 'seconds', 'loss', 'tokens_per_s', 'dollars']
const stepRows = (of?: TimelineOut) => (of?.points ?? []).map(p => [p.step, p.at, p.generation, p.seconds, p.loss, p.tokens_per_s, p.dollars])
const bucketRows = (of?: TimelineOut) => (of?.buckets ?? []).map(b => [b.starts_at, b.ends_at, ...CAUSES.map(cause => b.slot_seconds[cause] ?? 0), b.dollars_until])
