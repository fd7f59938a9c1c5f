// What an event changes in what the screens know. Deltas are put into the answers they belong to; figures that the
// service has to sum up are asked for anew, each at most once in five seconds.
import type { InfiniteData, QueryClient } from '@tanstack/react-query'
import { setServiceTime } from './clock'
import type { Page } from './client'
import type { LiveEvent } from './link'
import type * as T from './types'

const SUMS_MS = 5_000
const POINTS_MAX = 4_000
type Pages<D> = InfiniteData<Page<D>>
type Known = { [E in keyof T.EventData]: { event: E; data: T.EventData[E] } }[keyof T.EventData]

export function applier(client: QueryClient, now: () => number = Date.now): (events: readonly LiveEvent[]) => void {
  const askedAt = new Map<string, number>()
  const waiting = new Set<string>()

  /** Marks answers under a path as old, at once or when their five seconds are over. */
  function old(start: string): void {
    const wait = (askedAt.get(start) ?? -SUMS_MS) + SUMS_MS - now()
    if (wait > 0) {
      if (!waiting.has(start)) setTimeout(() => (waiting.delete(start), old(start)), wait)
      waiting.add(start)
      return
    }
    askedAt.set(start, now())
    void client.invalidateQueries({ predicate: query => under(query.queryKey[0], start) }, { cancelRefetch: false })
  }

  function one({ event, data }: Known): void {
    switch (event) {
      case 'hello':
        setServiceTime(data.at)
        if (!data.resumed) void client.invalidateQueries(undefined, { cancelRefetch: false })
        return
      case 'beat':
        return setServiceTime(data.at)
      case 'jobs':
        for (const brief of data.jobs) {
          if (patchJob(client, brief)) ['', '/outlook', '/ranks', '/first-error'].forEach(part => old(`/api/v1/jobs/${brief.job_id}${part}`))
        }
        if (data.gone.length > 0) old('/api/v1/jobs')
        return
      case 'handoffs':
        for (const handoff of data.handoffs) {
          patchHandoff(client, handoff)
          old(`/api/v1/handoffs/${handoff.handoff_id}/waterfall`)
          for (const part of ['/outlook', '/ranks', '/timeline']) old(`/api/v1/jobs/${handoff.job_id}${part}`)
        }
        old('/api/v1/incidents')
        return old('/api/v1/ledger')
      case 'incidents':
        client.setQueriesData<T.FleetOut>({ queryKey: ['/api/v1/fleet'] }, fleet => fleet && { ...fleet, pending: data.pending })
        old('/api/v1/incidents')
        return old('/api/v1/fleet')
      case 'nodes':
        patchNodes(client, data.nodes)
        return old('/api/v1/fleet')
      case 'steps':
        return addSteps(client, data.job_id, data.steps)
      case 'audit':
        return old('/api/v1/audit')
    }
  }
  return events => events.forEach(event => one(event as Known))
}

function under(path: unknown, start: string): boolean {
  return typeof path === 'string' && (path === start || (path.startsWith(start) && path[start.length] === '/'))
}

function mapPages<D>(pages: Pages<D> | undefined, change: (item: D) => D): Pages<D> | undefined {
  return pages && { ...pages, pages: pages.pages.map(page => ({ ...page, items: page.items.map(change) })) }
}

/** Whether more than the step has changed. */
function patchJob(client: QueryClient, brief: T.JobBrief): boolean {
  let isNews = false
  const change = <J extends Partial<T.JobSummary>>(job: J): J => {
    if (job.job_id !== brief.job_id) return job
    isNews ||= job.state !== brief.state || job.layout !== brief.layout || job.paused !== brief.paused || job.reason !== brief.reason || job.warning !== brief.warning || job.standstill?.hook !== brief.standstill?.hook
    return { ...job, ...brief }
  }
  let isKnown = false
  client.setQueriesData<Pages<T.JobSummary>>({ predicate: query => query.queryKey[0] === '/api/v1/jobs' }, pages => {
    isKnown ||= !!pages?.pages.some(page => page.items.some(job => job.job_id === brief.job_id))
    return mapPages(pages, change)
  })
  client.setQueriesData<T.JobOut>({ queryKey: [`/api/v1/jobs/${brief.job_id}`] }, job => job && change(job))
  client.setQueriesData<T.OutlookOut>({ queryKey: [`/api/v1/jobs/${brief.job_id}/outlook`] }, outlook =>
    outlook && { ...outlook, last_step: brief.last_step, stop_steps: brief.stop_steps, last_step_at: brief.last_step_at },
  )
  if (!isKnown) void client.invalidateQueries({ predicate: query => query.queryKey[0] === '/api/v1/jobs' }, { cancelRefetch: false })
  return isNews
}

function patchHandoff(client: QueryClient, handoff: T.HandoffOut): void {
  const change = (each: T.HandoffOut) => (each.handoff_id === handoff.handoff_id ? handoff : each)
  let isKnown = false
  client.setQueriesData<Pages<T.HandoffOut>>({ predicate: query => query.queryKey[0] === '/api/v1/handoffs' }, pages => {
    isKnown ||= !!pages?.pages.some(page => page.items.some(each => each.handoff_id === handoff.handoff_id))
    return mapPages(pages, change)
  })
  client.setQueriesData<T.HandoffOut>({ queryKey: [`/api/v1/handoffs/${handoff.handoff_id}`] }, each => each && handoff)
  const isOfIncidents = (key: unknown) => typeof key === 'string' && key.startsWith('/api/v1/incidents/')
  client.setQueriesData<T.IncidentOut>({ predicate: query => isOfIncidents(query.queryKey[0]) }, incident =>
    incident?.handoffs?.some(each => each.handoff.handoff_id === handoff.handoff_id)
      ? { ...incident, handoffs: incident.handoffs.map(each => ({ ...each, handoff: change(each.handoff) })) }
      : incident,
  )
  if (!isKnown) void client.invalidateQueries({ predicate: query => query.queryKey[0] === '/api/v1/handoffs' }, { cancelRefetch: false })
}

function patchNodes(client: QueryClient, nodes: T.EventData['nodes']['nodes']): void {
  const byId = new Map(nodes.map(node => [node.node_id, node]))
  client.setQueriesData<Pages<T.NodeOut>>({ predicate: query => query.queryKey[0] === '/api/v1/nodes' }, pages =>
    // What has not changed stays the same object: of a thousand nodes a few change at a time.
    mapPages(pages, node => (byId.has(node.node_id) ? { ...node, ...byId.get(node.node_id) } : node)),
  )
  for (const [nodeId, node] of byId) {
    client.setQueriesData<T.NodeOut>({ queryKey: [`/api/v1/nodes/${nodeId}`] }, each => each && { ...each, ...node })
  }
}

function addSteps(client: QueryClient, jobId: string, steps: readonly T.StepOut[]): void {
  const isLive = (query: { queryKey: readonly unknown[] }) => {
    const range = query.queryKey[1] as { until?: unknown } | undefined
    return query.queryKey[0] === `/api/v1/jobs/${jobId}/timeline` && !range?.until
  }
  client.setQueriesData<T.TimelineOut>({ predicate: isLive }, timeline => timeline && withSteps(timeline, steps))
}

/** The dollars of a new step are not known yet: it goes on at the rate of the last bucket. */
export function withSteps(timeline: T.TimelineOut, steps: readonly T.StepOut[]): T.TimelineOut {
  const last = timeline.points.at(-1)
  const bucket = timeline.buckets.at(-1)
  const span = bucket ? (Date.parse(bucket.ends_at) - Date.parse(bucket.starts_at)) / 1_000 : 0
  const rate = bucket && span > 0 ? Object.values(bucket.dollars).reduce((sum, each) => sum + each, 0) / span : 0
  const lastMs = last ? Date.parse(last.at) : -Infinity
  const fresh = steps.filter(step => Date.parse(step.finished_at) > lastMs).map(step => ({
    at: step.finished_at, step: step.step, steps: 1, generation: step.generation, seconds: step.seconds, loss: step.loss,
    tokens_per_s: step.tokens !== null && step.seconds > 0 ? step.tokens / step.seconds : null,
    dollars: (last?.dollars ?? 0) + (last ? (rate * (Date.parse(step.finished_at) - lastMs)) / 1_000 : 0),
  }))
  if (fresh.length === 0) return timeline
  return { ...timeline, until: fresh.at(-1)!.at, points: [...timeline.points, ...fresh].slice(-POINTS_MAX) }
}
