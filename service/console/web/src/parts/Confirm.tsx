// The question before a change: names every object that it touches, and asks why. The reason goes to the audit log.
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { useEffect, useId, useRef, useState, type ReactNode } from 'react'
import { Why } from './Panel'

export interface Touched { kind: string; name: string; what?: ReactNode }
export interface Question {
  title: string
  verb: string
  about?: ReactNode
  touches: readonly Touched[] | null
  isDanger?: boolean
  /** More to fill in above the reason. */
  fields?: ReactNode
  act: (reason: string) => Promise<unknown>
  done?: (answer: unknown) => void
}

const REASON_CHARS_MAX = 500

export function Confirm({ question, onClose }: { question: Question; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null)
  const [reason, setReason] = useState('')
  const client = useQueryClient()
  const id = useId()
  useEffect(() => {
    const shown = dialog.current
    if (shown && !shown.open) shown.showModal()
    return () => shown?.close()
  }, [])
  const change = useMutation({
    mutationFn: () => question.act(reason.trim()),
    onSuccess: answer => {
      void client.invalidateQueries()
      question.done?.(answer)
      onClose()
    },
  })
  const isReady = reason.trim().length > 0 && question.touches !== null && !change.isPending
  return (
    <dialog ref={dialog} aria-labelledby={id} onCancel={onClose} onClose={onClose}>
      <form method="dialog" onSubmit={event => (event.preventDefault(), isReady && change.mutate())}>
        <div className="dialog-body">
          <h2 id={id} style={{ fontSize: 15 }}>{question.title}</h2>
          {question.about && <div className="soft">{question.about}</div>}
          <div className="stack">
            <h3>This touches</h3>
            {question.touches === null ? <p className="quiet" role="status">Looking what it touches …</p> : (
              <ul className="objects">
                {question.touches.map(each => (
                  <li key={`${each.kind} ${each.name}`}><span className="kind">{each.kind}</span><span><strong>{each.name}</strong>{each.what && <span className="soft"> {each.what}</span>}</span></li>
                ))}
              </ul>
            )}
          </div>
          {question.fields}
          <label className="field">
            Reason, for the audit log
            <input value={reason} maxLength={REASON_CHARS_MAX} required autoFocus onChange={event => setReason(event.target.value)} />
          </label>
          {change.error && <div className="notice-box bad" role="alert"><Why error={change.error} /></div>}
        </div>
        <div className="dialog-foot">
          <button type="button" onClick={onClose}>Cancel</button>
          <button type="submit" className={`primary ${question.isDanger ? 'danger' : ''}`} disabled={!isReady}>{change.isPending ? 'Asking …' : question.verb}</button>
        </div>
      </form>
    </dialog>
  )
}
