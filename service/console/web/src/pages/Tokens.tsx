// Tokens of people and for joining: make, rotate, revoke. A new token is shown once.
import { useNavigate, useSearch } from '@tanstack/react-router'
import { useState } from 'react'
import { change } from '../api/client'
import { ask } from '../api/queries'
import type { TokenOut } from '../api/types'
import { ActionButton } from '../parts/ActionButton'
import { Chip } from '../parts/Chip'
import { Confirm } from '../parts/Confirm'
import { none, shortId } from '../parts/format'
import { ListPanel } from '../parts/ListPanel'
import { Moment } from '../parts/Moment'

type Asked = { what: 'make' } | { what: 'revoke' | 'rotate'; token: TokenOut } | null
interface New { name: string; token: string }
const ROLES = ['viewer', 'operator', 'admin', 'join'] as const
const GRACE_S = 3600

export default function Tokens() {
  const { revoked } = useSearch({ from: '/tokens' })
  const go = useNavigate({ from: '/tokens' })
  const [asked, setAsked] = useState<Asked>(null)
  const [made, setMade] = useState<New | null>(null)
  const close = () => setAsked(null)
  return (
    <>
      <h1 className="hidden-text">Tokens</h1>
      {made && <Once of={made} onClose={() => setMade(null)} />}
      <ListPanel<TokenOut>
        title="Tokens" query={ask.tokens(revoked === true)} id={row => row.token_id} empty="No token is like this."
        tools={<>
          <label className="check small"><input type="checkbox" checked={revoked === true} onChange={event => void go({ search: { revoked: event.target.checked || undefined }, replace: true })} />revoked ones</label>
          <ActionButton needs="admin" onClick={() => setAsked({ what: 'make' })}>Make a token</ActionButton>
        </>}
        csv={{ columns: ['token_id', 'name', 'role', 'node_id', 'created_at', 'created_by', 'expires_at', 'revoked_at', 'uses_left'], row: row => [row.token_id, row.name, row.role, row.node_id, row.created_at, row.created_by, row.expires_at, row.revoked_at, row.uses_left] }}
        columns={[
          { name: 'Name', isLead: true, cell: row => row.name },
          { name: 'Role', cell: row => <Chip state={row.role} /> },
          { name: 'Id', cell: row => <code>{shortId(row.token_id)}</code> },
          { name: 'For node', cell: row => row.node_id ?? <span className="quiet">{none}</span> },
          { name: 'Made', cell: row => <Moment at={row.created_at} /> },
          { name: 'By', cell: row => row.created_by ?? <span className="quiet">the service</span> },
          { name: 'Expires', cell: row => row.expires_at ? <Moment at={row.expires_at} /> : <span className="quiet">never</span> },
          { name: 'Uses left', isNumber: true, cell: row => row.uses_left ?? <span className="quiet">any</span> },
          { name: 'Do', cell: row => row.revoked_at ? <span className="quiet">revoked <Moment at={row.revoked_at} /></span> : (
            <span className="row">
              <ActionButton needs="admin" onClick={() => setAsked({ what: 'rotate', token: row })}>Rotate</ActionButton>
              <ActionButton needs="admin" isDanger onClick={() => setAsked({ what: 'revoke', token: row })}>Revoke</ActionButton>
            </span>
          ) },
        ]}
      />
      {asked?.what === 'make' && <Make onClose={close} onMade={setMade} />}
      {asked !== null && asked.what !== 'make' && <Change what={asked.what} token={asked.token} onClose={close} onMade={setMade} />}
    </>
  )
}

function Once({ of, onClose }: { of: New; onClose: () => void }) {
  return (
    <div className="notice-box good row apart" role="status">
      <span>The token <strong>{of.name}</strong>, shown this once: <code style={{ userSelect: 'all' }}>{of.token}</code></span>
      <button type="button" onClick={onClose}>I have kept it</button>
    </div>
  )
}

function Make({ onClose, onMade }: { onClose: () => void; onMade: (made: New) => void }) {
  const [name, setName] = useState('')
  const [role, setRole] = useState<(typeof ROLES)[number]>('viewer')
  const [days, setDays] = useState('90')
  const body = { name: name.trim(), role, expires_in_s: days.trim() === '' ? null : Number(days) * 86_400 }
  return (
    <Confirm onClose={onClose} question={{
      title: 'Make a token?', verb: 'Make token', touches: [{ kind: 'token', name: name.trim() || 'without a name yet', what: `role ${role}, ${days.trim() === '' ? 'for ever' : `for ${days} days`}` }],
      act: reason => change('POST', '/api/v1/tokens', { body, reason }), done: answer => onMade(answer as New),
      fields: <>
        <label className="field">Name<input value={name} required maxLength={128} onChange={event => setName(event.target.value)} /></label>
        <label className="field">Role<select value={role} onChange={event => setRole(event.target.value as typeof role)}>{ROLES.map(each => <option key={each}>{each}</option>)}</select></label>
        <label className="field">Days until it expires (empty: never)<input type="number" min={1} value={days} onChange={event => setDays(event.target.value)} /></label>
      </>,
    }} />
  )
}

function Change({ what, token, onClose, onMade }: { what: 'revoke' | 'rotate'; token: TokenOut; onClose: () => void; onMade: (made: New) => void }) {
  const path = `/api/v1/tokens/${token.token_id}/${what}`
  const isRotation = what === 'rotate'
  return (
    <Confirm onClose={onClose} question={{
      title: isRotation ? `Rotate ${token.name}?` : `Revoke ${token.name}?`, verb: isRotation ? 'Rotate token' : 'Revoke token', isDanger: !isRotation,
      about: isRotation ? 'A new token takes its place; the old one is good for one more hour.' : 'Whoever uses it is refused from now on, and browsers that signed in with it are signed out.',
      touches: [{ kind: 'token', name: token.name, what: `role ${token.role}, ${shortId(token.token_id)}` }],
      act: reason => change('POST', path, { reason, body: isRotation ? { grace_s: GRACE_S } : undefined }), done: answer => isRotation && onMade(answer as New),
    }} />
  )
}
