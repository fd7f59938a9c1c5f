// Every address of the console. A screen is loaded when it is first opened; what it shows stands in its address.
import { createRootRoute, createRoute, createRouter, lazyRouteComponent } from '@tanstack/react-router'
import { Skeleton } from './parts/Panel'
import { asRange, type Range } from './parts/range'
import { NotFound, Shell } from './Shell'

const text = (value: unknown): string | undefined => (typeof value === 'string' && value !== '' ? value : typeof value === 'number' ? String(value) : undefined)
const flag = (value: unknown): true | undefined => (value === true || value === 'true' || value === 1 ? true : undefined)

const range = (value: unknown): Range | undefined => (value === undefined ? undefined : asRange(value, 'all'))

const root = createRootRoute({ component: Shell, notFoundComponent: NotFound })
const at = <P extends string>(path: P) => ({ getParentRoute: () => root, path })

interface FleetSearch { range?: Range; match?: string; state?: string; pool?: string; failed?: true }
interface JobSearch { x?: Axis; range?: Range; rank?: string; log?: string; name?: string; failed?: true; errors?: true }
interface IncidentSearch { failed?: true; open?: true; job?: string; node?: string }
interface HandoffSearch { failed?: true; job?: string }
type Given = Record<string, unknown>

const fleet = createRoute({
  ...at('/'),
  validateSearch: (s: Given): FleetSearch => ({ range: range(s.range), match: text(s.match), state: text(s.state), pool: text(s.pool), failed: flag(s.failed) }),
  component: lazyRouteComponent(() => import('./pages/fleet/Fleet')),
})

export type Axis = 'step' | 'time' | 'dollars'
const axis = (value: unknown): Axis | undefined => (value === 'step' || value === 'dollars' ? value : undefined)
const jobSearch = (s: Given): JobSearch => ({
  x: axis(s.x), range: range(s.range), rank: text(s.rank), log: text(s.log), name: text(s.name), failed: flag(s.failed), errors: flag(s.errors),
})
const Job = lazyRouteComponent(() => import('./pages/job/Job'))
const job = createRoute({ ...at('/jobs/$jobId'), validateSearch: jobSearch, component: Job })
const jobTab = createRoute({ ...at('/jobs/$jobId/$tab'), validateSearch: jobSearch, component: Job })

const incidents = createRoute({
  ...at('/incidents'),
  validateSearch: (s: Given): IncidentSearch => ({ failed: flag(s.failed), open: flag(s.open), job: text(s.job), node: text(s.node) }),
  component: lazyRouteComponent(() => import('./pages/incident/Incidents')),
})
const incident = createRoute({ ...at('/incidents/$incidentId'), component: lazyRouteComponent(() => import('./pages/incident/Incident')) })
const handoffs = createRoute({
  ...at('/handoffs'),
  validateSearch: (s: Given): HandoffSearch => ({ failed: flag(s.failed), job: text(s.job) }),
  component: lazyRouteComponent(() => import('./pages/handoff/Handoffs')),
})
const handoff = createRoute({ ...at('/handoffs/$handoffId'), component: lazyRouteComponent(() => import('./pages/handoff/Handoff')) })
const node = createRoute({ ...at('/nodes/$nodeId'), component: lazyRouteComponent(() => import('./pages/fleet/Node')) })
const audit = createRoute({
  ...at('/audit'),
  validateSearch: (s: Given): { target?: string } => ({ target: text(s.target) }),
  component: lazyRouteComponent(() => import('./pages/Audit')),
})
const tokens = createRoute({
  ...at('/tokens'),
  validateSearch: (s: Given): { revoked?: true } => ({ revoked: flag(s.revoked) }),
  component: lazyRouteComponent(() => import('./pages/Tokens')),
})

function isReadable(path: string): boolean {
  try {
    return decodeURIComponent(path) !== ''
  } catch {
    return false
  }
}

/** An address that cannot be decoded would end the router. It stays in the browser, and leads to no screen. */
export const rewrite = { input: ({ url }: { url: URL }) => (isReadable(url.pathname) ? url : new URL('/no-such-screen', url)) }

export const router = createRouter({
  rewrite,
  routeTree: root.addChildren([fleet, job, jobTab, incidents, incident, handoffs, handoff, node, audit, tokens]),
  defaultPreload: 'intent',
  scrollRestoration: true,
  defaultPendingComponent: () => <Skeleton lines={8} />,
  defaultPendingMs: 300,
})

declare module '@tanstack/react-router' {
  interface Register { router: typeof router }
}
