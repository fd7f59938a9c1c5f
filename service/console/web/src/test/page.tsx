// A screen as a browser would show it at an address, over an API that answers from the sample.
import { QueryClient, QueryClientProvider } from '@tanstack/react-query'
import { createMemoryHistory, createRouter, RouterProvider } from '@tanstack/react-router'
import { render } from '@testing-library/react'
import { vi } from 'vitest'
import { rewrite, router } from '../router'
import { answer } from './sample'

export interface Asked { method: string; path: string; body: unknown; headers: Headers }
type Reply = { status?: number; body?: unknown; link?: string } | undefined
/** Answers a request otherwise than the sample does, or (undefined) leaves it to the sample. */
export type Instead = (method: string, path: string, query: URLSearchParams) => Reply

export function serve(instead: Instead = () => undefined): Asked[] {
  const asked: Asked[] = []
  vi.stubGlobal('fetch', async (where: string, init: RequestInit = {}) => {
    const url = new URL(where, 'http://console.test')
    const method = init.method ?? 'GET'
    asked.push({ method, path: url.pathname + url.search, body: init.body ? JSON.parse(String(init.body)) : undefined, headers: new Headers(init.headers) })
    const other = instead(method, url.pathname, url.searchParams)
    if (other?.status === 0) throw new TypeError('failed to fetch')
    const body = other ? other.body : method === 'GET' ? answer(url.pathname, url.searchParams) : {}
    const status = other?.status ?? (body === undefined ? 404 : 200)
    const problem = { title: 'Not found', status, detail: 'There is no such thing.', errors: [] }
    return new Response(status === 204 ? null : JSON.stringify(body ?? problem), { status, headers: other?.link ? { Link: other.link } : {} })
  })
  return asked
}

export function open(address: string) {
  const client = new QueryClient({ defaultOptions: { queries: { retry: false, networkMode: 'always' }, mutations: { networkMode: 'always' } } })
  const history = createMemoryHistory({ initialEntries: [address] })
  const place = createRouter({ routeTree: router.routeTree, history, rewrite, defaultPendingMs: 0 })
  const shown = render(<QueryClientProvider client={client}><RouterProvider router={place as unknown as typeof router} /></QueryClientProvider>)
  return { ...shown, client, history, at: () => history.location.href }
}
