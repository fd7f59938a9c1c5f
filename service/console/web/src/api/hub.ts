// One stream of events for all tabs of a browser. It runs in a shared worker, or in the tab itself where there is none.
// It knows nothing of what the events mean. Pure but for the source and the timers that come in.

/** What a tab sends: the jobs whose steps it shows (again every half minute, as a sign of life), or that it goes. */
export type ToHub = { watch: readonly string[] } | { bye: true }
/** What it gets: every event, and how the stream stands. `refused`: the session is over or this browser has too many streams. */
export type FromHub = { event: string; data: string } | { state: LinkState }
export type LinkState = 'connecting' | 'live' | 'away'

export interface Port { postMessage(message: FromHub): void }
export interface Source { close(): void }
export interface SourceEvents { opened(): void; failed(isOver: boolean): void; event(name: string, data: string): void }
export interface Surroundings {
  open(url: string, on: SourceEvents): Source
  now(): number
  /** Calls after `ms`; the answer takes it back. */
  after(ms: number, call: () => void): () => void
}

export const EVENTS = ['hello', 'beat', 'jobs', 'handoffs', 'incidents', 'nodes', 'steps', 'audit'] as const
export const JOBS_WATCHED_MAX = 16
const PORTS_MAX = 64
// A tab in the background may be let run once a minute only.
const PORT_SILENT_MS = 180_000
const BEAT_MISSING_MS = 20_000
const AGAIN_MS_MIN = 1_000
const AGAIN_MS_MAX = 15_000

export class Hub {
  private readonly ports = new Map<Port, { watched: readonly string[]; heardAt: number }>()
  private source: Source | null = null
  private url = ''
  private state: LinkState = 'connecting'
  private failures = 0
  private takeBack: (() => void) | null = null
  private watchdog: (() => void) | null = null

  constructor(private readonly around: Surroundings) {}

  receive(port: Port, message: ToHub): void {
    if ('bye' in message) {
      this.ports.delete(port)
    } else {
      const isNew = !this.ports.has(port)
      this.ports.set(port, { watched: message.watch.slice(0, JOBS_WATCHED_MAX), heardAt: this.around.now() })
      if (isNew) port.postMessage({ state: this.state })
    }
    this.dropSilent()
    this.settle()
  }

  /** Opens, moves or closes the stream as the tabs want it now. */
  private settle(): void {
    if (this.ports.size === 0) {
      this.stop()
      this.url = ''
      return
    }
    const wanted = this.wantedUrl()
    if (wanted === this.url) return
    this.url = wanted
    this.connect()
  }

  private wantedUrl(): string {
    const jobs = [...new Set([...this.ports.values()].flatMap(port => port.watched))].sort().slice(0, JOBS_WATCHED_MAX)
    const query = jobs.map(job => `job_id=${encodeURIComponent(job)}`).join('&')
    return query ? `/api/v1/events?${query}` : '/api/v1/events'
  }

  private connect(): void {
    this.stop()
    const source = this.around.open(this.url, {
      opened: () => this.source === source && this.heard(),
      failed: isOver => this.source === source && this.failed(isOver),
      event: (event, data) => {
        if (this.source !== source) return
        this.heard()
        this.tell({ event, data })
      },
    })
    this.source = source
    this.watch()
  }

  private heard(): void {
    this.failures = 0
    this.say('live')
    this.watch()
  }

  /** A stream without its beat for a while is taken for dead, however open it looks. */
  private watch(): void {
    this.watchdog?.()
    this.watchdog = this.around.after(BEAT_MISSING_MS, () => this.failed(true))
  }

  private failed(isOver: boolean): void {
    this.say('away')
    // The browser tries again by itself unless the answer was a refusal.
    if (!isOver) return
    this.stop()
    const wait = Math.min(AGAIN_MS_MAX, AGAIN_MS_MIN * 2 ** Math.min(this.failures++, 10))
    this.takeBack = this.around.after(wait, () => this.connect())
  }

  private stop(): void {
    this.source?.close()
    this.source = null
    this.takeBack?.()
    this.takeBack = null
    this.watchdog?.()
    this.watchdog = null
  }

  private say(state: LinkState): void {
    if (state === this.state) return
    this.state = state
    this.tell({ state })
  }

  private tell(message: FromHub): void {
    for (const port of this.ports.keys()) port.postMessage(message)
  }

  private dropSilent(): void {
    const oldest = this.around.now() - PORT_SILENT_MS
    for (const [port, { heardAt }] of this.ports) if (heardAt < oldest) this.ports.delete(port)
    while (this.ports.size > PORTS_MAX) this.ports.delete(this.ports.keys().next().value!)
  }
}

/** The surroundings of a real browser. */
export const browser: Surroundings = {
  open(url, on) {
    const source = new EventSource(url)
    source.onopen = () => on.opened()
    source.onerror = () => on.failed(source.readyState === EventSource.CLOSED)
    for (const name of EVENTS) source.addEventListener(name, event => on.event(name, (event as MessageEvent<string>).data))
    return source
  },
  now: () => Date.now(),
  after(ms, call) {
    const timer = setTimeout(call, ms)
    return () => clearTimeout(timer)
  },
}
