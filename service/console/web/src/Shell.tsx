// The frame around every screen: navigation, how fresh what is shown is, who looks at it.
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { Link, Outlet, useRouterState } from '@tanstack/react-router'
import { useEffect, useRef, useState } from 'react'
import { applier } from './api/apply'
import { Refused, change } from './api/client'
import { listen, useLinkState } from './api/link'
import { ask } from './api/queries'
import { Login } from './pages/Login'
import { Problem, Skeleton } from './parts/Panel'
import { allows, type Role } from './parts/session'
import { applyTheme, storedTheme, type Theme } from './theme'

export function Shell() {
  const session = useQuery(ask.session())
  const isOut = session.error instanceof Refused && (session.error.status === 401 || session.error.status === 403)
  if (isOut) return <Frame><Login /></Frame>
  if (!session.data) return <Frame>{session.error ? <Problem of={session} /> : <Skeleton lines={6} />}</Frame>
  return <SignedIn name={session.data.name} role={session.data.role} />
}

function Frame({ children }: { children: React.ReactNode }) {
  return (
    <div className="frame">
      <header className="top"><div className="top-row"><Brand /></div></header>
      <main id="main" tabIndex={-1}>{children}</main>
    </div>
  )
}

function SignedIn({ name, role }: { name: string; role: Role }) {
  const client = useQueryClient()
  useEffect(() => listen(applier(client)), [client])
  useSessionEnd()
  return (
    <div className="frame">
      <a className="skip" href="#main">Skip to the content</a>
      <header className="top">
        <div className="top-row">
          <Brand />
          <nav className="nav" aria-label="Screens">
            <Link to="/" activeOptions={{ exact: true, includeSearch: false }}>Fleet</Link>
            <Link to="/incidents">Incidents</Link>
            <Link to="/handoffs">Handoffs</Link>
            <Link to="/audit">Audit</Link>
            {allows(role, 'admin') && <Link to="/tokens">Tokens</Link>}
          </nav>
          <span className="push" />
          <LinkStanding />
          <ThemeChoice />
          <Leave name={name} role={role} />
        </div>
      </header>
      <Focused><Outlet /></Focused>
      <footer className="foot">
        <span>Times are local; hover for UTC.</span>
        <a href="/docs">API</a>
      </footer>
    </div>
  )
}

/** After a change of the screen the keyboard begins at its top, and the title says where one is. */
function Focused({ children }: { children: React.ReactNode }) {
  const path = useRouterState({ select: state => state.location.pathname })
  const main = useRef<HTMLElement>(null)
  const before = useRef(path)
  useEffect(() => {
    const isTab = (place: string) => place.split('/').slice(0, 3).join('/')
    if (isTab(before.current) !== isTab(path)) main.current?.focus({ preventScroll: true })
    before.current = path
    const [, screen, what] = path.split('/')
    document.title = `${[what && decodeURIComponent(what), screen || 'fleet'].filter(Boolean).join(' · ')} – LiveR`
  }, [path])
  return <main id="main" ref={main} tabIndex={-1}>{children}</main>
}

/** A 401 from anywhere means the session is over: the page asks who one is, and comes back to where it was. */
function useSessionEnd() {
  const client = useQueryClient()
  useEffect(() => client.getQueryCache().subscribe(event => {
    const error = event.query.state.error
    if (event.type !== 'updated' || event.query.queryKey[0] === '/api/v1/session') return
    if (error instanceof Refused && error.status === 401) void client.resetQueries({ queryKey: ['/api/v1/session'] })
  }), [client])
}

function Brand() {
  return (
    <Link to="/" className="brand">
      <svg viewBox="0 0 32 32" aria-hidden="true">
        <rect width="32" height="32" rx="7" fill="var(--accent)" />
        <path d="M7 21h7l4-11h7" fill="none" stroke="var(--surface)" strokeWidth="3" strokeLinecap="round" strokeLinejoin="round" />
      </svg>
      LiveR
    </Link>
  )
}

function LinkStanding() {
  const state = useLinkState()
  const [level, words, why] = {
    live: ['good', 'live', 'Changes arrive as they happen.'],
    connecting: ['', 'connecting', 'The stream of changes is being opened; meanwhile the page asks every few seconds.'],
    away: ['warn', 'polling', 'The stream of changes is away; the page asks every few seconds until it is back.'],
  }[state] as [string, string, string]
  return <span className="link-state" role="status" title={why}><i className={`dot ${level}`} aria-hidden="true" /><span className="words">{words}</span></span>
}

function ThemeChoice() {
  const [theme, setTheme] = useState<Theme>(storedTheme)
  const next = { system: 'light', light: 'dark', dark: 'system' } as const
  const name = { system: 'Auto', light: 'Light', dark: 'Dark' }[theme]
  const choose = () => {
    applyTheme(next[theme])
    setTheme(next[theme])
  }
  return <button type="button" className="plain" onClick={choose} aria-label={`Colours: ${name}. Change.`} title="Light, dark, or as the system has it">{name}</button>
}

function Leave({ name, role }: { name: string; role: string }) {
  const client = useQueryClient()
  const leave = async () => {
    await change('DELETE', '/api/v1/session').catch(() => undefined)
    client.clear()
    location.assign('/')
  }
  return <button type="button" className="plain" onClick={() => void leave()} title={`Signed in with the token “${name}”, role ${role}`}>Sign out</button>
}

export function NotFound() {
  return (
    <section className="panel"><div className="panel-body stack">
      <h1>There is no such page</h1>
      <p>The address leads nowhere. <Link to="/">Go to the fleet.</Link></p>
    </div></section>
  )
}
