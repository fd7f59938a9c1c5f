// Who are you? A token is exchanged for a cookie once; it is not kept in the browser.
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'
import { Refused, change } from '../api/client'
import { ask } from '../api/queries'
import type { SessionOut } from '../api/types'
import { Why } from '../parts/Panel'

export function Login() {
  const [token, setToken] = useState('')
  const client = useQueryClient()
  const login = useMutation({
    mutationFn: () => change<SessionOut>('POST', '/api/v1/session', { body: { token: token.trim() } }),
    onSuccess: session => {
      client.removeQueries({ predicate: query => query.queryKey[0] !== '/api/v1/session' })
      client.setQueryData(ask.session().queryKey, session)
    },
  })
  const isWrong = login.error instanceof Refused && (login.error.status === 401 || login.error.status === 422)
  return (
    <section className="panel login" aria-labelledby="login-title">
      <form className="panel-body stack" onSubmit={event => (event.preventDefault(), login.mutate())}>
        <h1 id="login-title">Sign in</h1>
        <p className="soft">With the token of a viewer, operator or admin. <code>liver tokens create</code> makes one.</p>
        <label className="field">Token<input type="password" name="token" autoComplete="current-password" autoFocus required value={token} onChange={event => setToken(event.target.value)} /></label>
        {login.error && <div className="notice-box bad" role="alert">{isWrong ? 'This token is wrong, expired or revoked.' : <Why error={login.error} />}</div>}
        <button type="submit" className="primary" disabled={login.isPending || token.trim() === ''}>Sign in</button>
      </form>
    </section>
  )
}
