// A tab's end of the stream: connects to the hub, keeps what it hears for at most half a second, and hands it on in one
// piece. So a screen is drawn anew at most twice a second, whatever the jobs do.
import { useEffect, useSyncExternalStore } from 'react'
import { read } from './read'
import { Hub, browser, type FromHub, type LinkState, type Port, type ToHub } from './hub'

export interface LiveEvent { event: string; data: unknown }
type Apply = (events: readonly LiveEvent[]) => void

const FLUSH_MS = 500
const SIGN_OF_LIFE_MS = 30_000
/** More than this between two flushes is not worth keeping: everything is asked for anew. */
const KEPT_MAX = 2_000

let send: ((message: ToHub) => void) | null = null
let state: LinkState = 'connecting'
let kept: LiveEvent[] = []
let flushing: ReturnType<typeof setTimeout> | null = null
const listeners = new Set<() => void>()
const watched = new Map<string, number>()

/** Begins to listen. `apply` gets the events in order. Answers what ends it. */
export function listen(apply: Apply): () => void {
  const receive = (message: FromHub) => {
    if ('state' in message) return setState(message.state)
    let data: unknown
    try {
      data = read(message.data)
    } catch {
      return
    }
    if (kept.length >= KEPT_MAX) kept = [{ event: 'hello', data: { resumed: false } }]
    kept.push({ event: message.event, data })
    flushing ??= setTimeout(() => {
      flushing = null
      const events = kept
      kept = []
      apply(events)
    }, FLUSH_MS)
  }
  const close = connect(receive)
  const timer = setInterval(tellWatched, SIGN_OF_LIFE_MS)
  // A page that the browser keeps for its back button must not keep the stream.
  const leave = () => send?.({ bye: true })
  const back = () => tellWatched()
  addEventListener('pagehide', leave)
  addEventListener('pageshow', back)
  tellWatched()
  return () => {
    leave()
    clearInterval(timer)
    removeEventListener('pagehide', leave)
    removeEventListener('pageshow', back)
    close()
    send = null
    setState('connecting')
  }
}

function connect(receive: (message: FromHub) => void): () => void {
  if (typeof SharedWorker !== 'undefined') {
    const worker = new SharedWorker(new URL('./hub_worker.ts', import.meta.url), { type: 'module', name: 'liver-events' })
    worker.port.onmessage = (event: MessageEvent<FromHub>) => receive(event.data)
    // Where the worker cannot start, the tab takes its place.
    let inTab: (() => void) | null = null
    worker.onerror = () => {
      worker.port.onmessage = null
      inTab ??= connectInTab(receive)
      tellWatched()
    }
    worker.port.start()
    send = message => worker.port.postMessage(message)
    return () => {
      worker.port.close()
      inTab?.()
    }
  }
  return connectInTab(receive)
}

function connectInTab(receive: (message: FromHub) => void): () => void {
  if (typeof EventSource === 'undefined') {
    send = () => setState('away')
    return () => undefined
  }
  const hub = new Hub(browser)
  const port: Port = { postMessage: receive }
  send = message => hub.receive(port, message)
  return () => hub.receive(port, { bye: true })
}

function tellWatched(): void {
  send?.({ watch: [...watched.keys()] })
}

function setState(next: LinkState): void {
  if (next === state) return
  state = next
  for (const call of listeners) call()
}

export const linkState = (): LinkState => state

export function useLinkState(): LinkState {
  return useSyncExternalStore(
    call => {
      listeners.add(call)
      return () => listeners.delete(call)
    },
    () => state,
  )
}

/** While mounted, the stream carries this job's steps. */
export function useWatchedJob(jobId: string): void {
  useEffect(() => {
    watched.set(jobId, (watched.get(jobId) ?? 0) + 1)
    tellWatched()
    return () => {
      const left = (watched.get(jobId) ?? 1) - 1
      if (left > 0) watched.set(jobId, left)
      else watched.delete(jobId)
      tellWatched()
    }
  }, [jobId])
}
