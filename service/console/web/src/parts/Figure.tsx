// A figure with its name, and what stands beneath it.
import type { ReactNode } from 'react'

export function Figures({ spread, children }: { spread?: boolean; children: ReactNode }) {
  return <dl className={`figures ${spread ? 'spread' : ''}`}>{children}</dl>
}

export function Figure({ name, beneath, large, title, children }: { name: string; beneath?: ReactNode; large?: boolean; title?: string; children: ReactNode }) {
  return (
    <div className={`figure ${large ? 'large' : ''}`} title={title}>
      <dt>{name}</dt>
      <dd>
        {children}
        {beneath !== undefined && <div className="beneath">{beneath}</div>}
      </dd>
    </div>
  )
}

export function Facts({ of }: { of: readonly (readonly [string, ReactNode] | null | false)[] }) {
  return (
    <dl className="facts">
      {of.filter(each => !!each).map(([name, value]) => (
        <div key={name} style={{ display: 'contents' }}><dt>{name}</dt><dd>{value}</dd></div>
      ))}
    </dl>
  )
}
