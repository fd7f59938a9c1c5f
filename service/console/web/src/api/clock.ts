// The service's time, as far as a browser can know it, and a tick once a second for what counts down.
import { useSyncExternalStore } from 'react'

let aheadMs = 0
let shown = Date.now()
let timer: ReturnType<typeof setInterval> | null = null
const listeners = new Set<() => void>()

/** Takes the service's word for the time. Small differences are the way of the message; they are left alone. */
export function setServiceTime(iso: string): void {
  const told = Date.parse(iso) - Date.now()
  if (Number.isFinite(told) && Math.abs(told - aheadMs) > 500) aheadMs = told
}

export const nowMs = (): number => Date.now() + aheadMs

function subscribe(call: () => void): () => void {
  listeners.add(call)
  shown = nowMs()
  timer ??= setInterval(() => {
    shown = nowMs()
    for (const each of listeners) each()
  }, 1_000)
  return () => {
    listeners.delete(call)
    if (listeners.size === 0 && timer !== null) {
      clearInterval(timer)
      timer = null
    }
  }
}

/** Now, anew each second. */
export const useNow = (): number => useSyncExternalStore(subscribe, () => shown)
