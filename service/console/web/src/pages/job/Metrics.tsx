// The job's own numbers over its steps: learning rate, gradient norm, whatever its code reports.
import { useQuery } from '@tanstack/react-query'
import { useNavigate, useSearch } from '@tanstack/react-router'
import { lazy, Suspense, useMemo } from 'react'
import { ask } from '../../api/queries'
import type { MetricsOut } from '../../api/types'
import { CsvButton } from '../../parts/CsvButton'
import { count, figure, tick } from '../../parts/format'
import { Empty, Panel, Skeleton } from '../../parts/Panel'

const Plot = lazy(() => import('../../charts/Plot'))
const POINTS = 800
const SHOWN_MAX = 24

export default function Metrics({ jobId }: { jobId: string }) {
  const metrics = useQuery(ask.metrics(jobId, { points: POINTS }))
  const search = useSearch({ strict: false })
  const go = useNavigate()
  const names = useMemo(() => namesOf(metrics.data ?? []), [metrics.data])
  const wanted = search.name && names.includes(search.name) ? [search.name] : names.slice(0, SHOWN_MAX)
  return (
    <Panel
      title="The job's own numbers" of={metrics} lines={10}
      note={names.length > wanted.length && <span className="quiet small">{wanted.length} of {names.length}</span>}
      tools={<>
        <select aria-label="Which number" value={search.name ?? ''} onChange={event => void go({ to: '.', search: (old: object) => ({ ...old, name: event.target.value || undefined }), replace: true, resetScroll: false })}>
          <option value="">All</option>
          {names.map(name => <option key={name}>{name}</option>)}
        </select>
        <CsvButton name={`${jobId} metrics`} columns={['step', 'at', 'generation', ...names]} rows={() => (metrics.data ?? []).map(row => [row.step, row.at, row.generation, ...names.map(name => row.values[name])])} />
      </>}
    >
      {() => names.length === 0 ? <Empty>No numbers yet. A step's <code>metrics</code> appear here.</Empty> : (
        <div className={wanted.length > 1 ? 'grid-2' : undefined}>{wanted.map(name => <One key={name} name={name} of={metrics.data!} />)}</div>
      )}
    </Panel>
  )
}

export const namesOf = (rows: readonly MetricsOut[]): string[] => [...new Set(rows.flatMap(row => Object.keys(row.values)))].sort()

function One({ name, of }: { name: string; of: readonly MetricsOut[] }) {
  const data = useMemo(() => {
    const rows = of.filter(row => name in row.values)
    return [rows.map(row => row.step), rows.map(row => row.values[name] ?? null)] as [number[], (number | null)[]]
  }, [name, of])
  const [steps, values] = data
  const last = values.findLast(value => value !== null)
  return (
    <figure>
      <figcaption className="row apart"><h3>{name}</h3><span><strong>{figure(last)}</strong> <span className="quiet small">at step {count(steps.at(-1))}</span></span></figcaption>
      <div style={{ height: 150 }}>
        <Suspense fallback={<Skeleton lines={4} />}>
          <Plot label={name} data={data} lines={[{ name, colorName: 'series-1' }]} height={150} hasAxis range={[steps[0] ?? 0, Math.max((steps[0] ?? 0) + 1, steps.at(-1) ?? 1)]} formatX={count} formatY={tick} group={`metrics ${name}`} />
        </Suspense>
      </div>
    </figure>
  )
}
