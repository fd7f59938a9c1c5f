// A box of the screen, and the four states each has: loading, empty, error, stale.
import { useId, type ReactNode } from 'react'
import { useNow } from '../api/clock'
import { Refused } from '../api/client'
import { span } from './format'

/** As much of a query's result as its panel needs. */
export interface Standing { data: unknown; error: Error | null; dataUpdatedAt: number; refetch: () => Promise<unknown> }

interface PanelProps { title: string; tools?: ReactNode; note?: ReactNode; flush?: boolean; of?: Standing | readonly Standing[]; className?: string; lines?: number; children: ReactNode | (() => ReactNode) }

/** `of`: what the panel shows. Its children are called once all of it is there. `lines`: how tall it is while it loads. */
export function Panel({ title, tools, note, flush, of = [], className, lines = 4, children }: PanelProps) {
  const id = useId()
  const all = Array.isArray(of) ? (of as readonly Standing[]) : [of as Standing]
  const waits = all.some(each => each.data === undefined)
  const failed = all.find(each => each.error)
  return (
    <section className={`panel ${className ?? ''}`} aria-labelledby={id} aria-busy={waits && !failed}>
      <div className="panel-head">
        <h2 id={id}>{title}</h2>
        {note}
        {failed && !waits && <Stale of={failed} />}
        {tools && <div className="tools">{tools}</div>}
      </div>
      <div className={`panel-body ${flush ? 'flush' : ''}`}>
        {waits ? failed ? <Problem of={failed} /> : <Skeleton lines={lines} /> : typeof children === 'function' ? children() : children}
      </div>
    </section>
  )
}

export function Skeleton({ lines }: { lines: number }) {
  return (
    <div className="skeleton" role="status" aria-label="Loading">
      {Array.from({ length: lines }, (_, line) => <i key={line} />)}
    </div>
  )
}

export function Problem({ of }: { of: Standing }) {
  return (
    <div className="notice-box bad row apart" role="alert">
      <span><Why error={of.error} /></span>
      <button type="button" onClick={() => void of.refetch()}>Try again</button>
    </div>
  )
}

/** A refusal in words: what, why, and which fields. */
export function Why({ error }: { error: unknown }) {
  if (!(error instanceof Refused)) return <>{error instanceof Error ? error.message : String(error)}</>
  return (
    <>
      <strong>{error.title}.</strong> {error.detail}
      {error.errors.length > 0 && <ul>{error.errors.map(each => <li key={each.field + each.rule}><code>{each.field}</code> {each.rule}</li>)}</ul>}
    </>
  )
}

function Stale({ of }: { of: Standing }) {
  const now = useNow()
  const why = of.error instanceof Error ? of.error.message : ''
  return <span className="stale" role="status" title={why}>stale: {span(Math.max(0, (now - of.dataUpdatedAt) / 1000))} old</span>
}

export function Empty({ children }: { children: ReactNode }) {
  return <p className="empty">{children}</p>
}
