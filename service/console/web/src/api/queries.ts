// What the screens ask for, each with its key and its pace. While the stream is live, polling is only a net beneath it.
import { QueryClient, keepPreviousData, queryOptions, type InfiniteData, type UseInfiniteQueryOptions } from '@tanstack/react-query'
import { Refused, get, getPage, type Page, type Query } from './client'
import { linkState } from './link'
import { fill, type Answer, type Filter, type GetPath, type Item, type ListPath } from './contract'

export const client = new QueryClient({
  defaultOptions: {
    queries: {
      networkMode: 'always',
      staleTime: 2_000,
      gcTime: 120_000,
      refetchOnWindowFocus: true,
      retry: (failures, error) =>
        failures < 1 && !(error instanceof Refused && error.status > 0 && error.status < 500 && !error.retryAfterS),
      retryDelay: (_, error) => (error instanceof Refused && error.retryAfterS * 1_000) || 700,
    },
  },
})

/** Milliseconds between two polls: `liveS` while the stream works, `awayS` while it does not. Refusals are asked again slowly. */
const pace = (liveS: number, awayS = 4) => (query: { state: { error: unknown } }) => {
  const error = query.state.error
  if (error instanceof Refused && error.status >= 400 && error.status < 500) return 30_000
  return (linkState() === 'live' ? liveS : awayS) * 1_000
}

type Names = Readonly<Record<string, string>>

const one = <P extends GetPath>(path: P, names: Names, query: Filter<P>, liveS: number, awayS?: number) =>
  queryOptions<Answer<P>, Error, Answer<P>, readonly [string, Filter<P>]>({
    queryKey: [fill(path, names), query],
    queryFn: ({ signal }) => get<Answer<P>>(fill(path, names), query as Query, signal),
    refetchInterval: pace(liveS, awayS),
  })

/** As `one`, but what was shown for another range stays until the new one is there. */
const ranged = <P extends GetPath>(path: P, names: Names, query: Filter<P>, liveS: number, awayS?: number) => ({
  ...one(path, names, query, liveS, awayS),
  placeholderData: keepPreviousData,
})

/** A list, page by page. */
export type ListQuery<D> = UseInfiniteQueryOptions<Page<D>, Error, InfiniteData<Page<D>>, readonly unknown[], string | null>

const list = <P extends ListPath>(path: P, names: Names, query: Filter<P>, liveS = 20, awayS?: number): ListQuery<Item<P>> => ({
    queryKey: [fill(path, names), query, 'pages'],
    queryFn: ({ signal, pageParam }): Promise<Page<Item<P>>> =>
      getPage<Item<P>>(fill(path, names), { ...(query as Query), cursor: pageParam }, signal),
    initialPageParam: null as string | null,
    getNextPageParam: last => last.next,
    // Many pages are not fetched anew by themselves: whoever has paged down is reading.
    refetchInterval: each => ((each.state.data?.pages.length ?? 0) > 1 ? false : pace(liveS, awayS)(each)),
    placeholderData: keepPreviousData,
})

export const ask = {
  session: () => ({ ...one('/api/v1/session', {}, {}, 60, 10), staleTime: 60_000 }),
  fleet: () => one('/api/v1/fleet', {}, {}, 15),
  jobs: (filter: Filter<'/api/v1/jobs'>) => list('/api/v1/jobs', {}, { limit: 50, ...filter }),
  jobCosts: (range: Filter<'/api/v1/ledger/jobs'> = {}) => list('/api/v1/ledger/jobs', {}, { limit: 50, ...range }, 15, 10),
  nodes: (filter: Filter<'/api/v1/nodes'>) => list('/api/v1/nodes', {}, { limit: 1000, ...filter }),
  node: (node_id: string) => one('/api/v1/nodes/{node_id}', { node_id }, {}, 10),
  job: (job_id: string) => one('/api/v1/jobs/{job_id}', { job_id }, {}, 10),
  outlook: (job_id: string) => one('/api/v1/jobs/{job_id}/outlook', { job_id }, {}, 5, 3),
  ranks: (job_id: string) => one('/api/v1/jobs/{job_id}/ranks', { job_id }, {}, 10),
  timeline: (job_id: string, range: Filter<'/api/v1/jobs/{job_id}/timeline'>) =>
    ranged('/api/v1/jobs/{job_id}/timeline', { job_id }, { points: 600, ...range }, 10, 6),
  plan: (job_id: string, without: readonly string[]) => one('/api/v1/jobs/{job_id}/plan', { job_id }, { without: [...without] }, 60, 60),
  firstError: (job_id: string) => one('/api/v1/jobs/{job_id}/first-error', { job_id }, {}, 30, 15),
  ledger: (job_id: string | null, range: Filter<'/api/v1/ledger'> = {}) => ranged('/api/v1/ledger', {}, { job_id, ...range }, 10, 6),
  restarts: (job_id: string) => one('/api/v1/ledger/restarts', {}, { job_id }, 30, 15),
  handoffs: (filter: Filter<'/api/v1/handoffs'>) => list('/api/v1/handoffs', {}, { limit: 50, ...filter }, 15),
  handoff: (handoff_id: string) => one('/api/v1/handoffs/{handoff_id}', { handoff_id }, {}, 10, 2),
  waterfall: (handoff_id: string) => one('/api/v1/handoffs/{handoff_id}/waterfall', { handoff_id }, {}, 10, 2),
  checkpoints: (job_id: string) => list('/api/v1/jobs/{job_id}/checkpoints', { job_id }, { limit: 50 }),
  generations: (job_id: string) => list('/api/v1/jobs/{job_id}/generations', { job_id }, { limit: 50 }),
  decisions: (job_id: string) => list('/api/v1/jobs/{job_id}/decisions', { job_id }, { limit: 50 }),
  wires: (job_id: string) => one('/api/v1/jobs/{job_id}/wires', { job_id }, {}, 30),
  metrics: (job_id: string, query: Filter<'/api/v1/jobs/{job_id}/metrics'>) =>
    ranged('/api/v1/jobs/{job_id}/metrics', { job_id }, query, 10, 6),
  incidents: (filter: Filter<'/api/v1/incidents'>) => list('/api/v1/incidents', {}, { limit: 50, ...filter }, 15),
  incident: (incident_id: string) => one('/api/v1/incidents/{incident_id}', { incident_id }, {}, 10, 2),
  audit: (filter: Filter<'/api/v1/audit'>) => list('/api/v1/audit', {}, { limit: 100, ...filter }, 30),
  tokens: (revoked: boolean) => list('/api/v1/tokens', {}, { limit: 100, revoked: revoked || null }, 60, 30),
}
