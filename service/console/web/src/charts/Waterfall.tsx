// Phases of a handoff over its time. The critical path is drawn heavier and named.
import { Fragment } from 'react'
import type { WaterfallOut } from '../api/types'
import { seconds, utcTime } from '../parts/format'

export function Waterfall({ of, isOpen }: { of: WaterfallOut; isOpen?: boolean }) {
  if (of.bars.length === 0) return <p className="empty">No phase is reported yet.</p>
  const whole = Math.max(of.total_s, ...of.bars.map(bar => bar.starts_s + bar.seconds), 1e-9)
  const labels = new Map(of.bars.map(bar => [bar.name, bar.label]))
  const criticalS = of.bars.reduce((sum, bar) => sum + (bar.critical ? bar.seconds : 0), 0)
  const path = of.critical_path.map(name => labels.get(name) ?? name)
  return (
    <figure className="stack">
      <figcaption className="small">
        <span className="soft">Critical path: </span>
        {path.length === 0 ? <span className="quiet">not known yet</span> : <><strong>{path.join(' → ')}</strong> <span className="soft">({seconds(criticalS)} of {seconds(of.total_s)})</span></>}
      </figcaption>
      <div className="waterfall" role="table" aria-label="Phases">
        {of.bars.map((bar, at) => {
          const what = `${bar.label}: from ${seconds(bar.starts_s)}, for ${seconds(bar.seconds)}${bar.critical ? ', on the critical path' : ''}`
          return (
            <Fragment key={bar.name}>
              <div role="row" style={{ display: 'contents' }} title={what}>
                <span role="rowheader" className={`name ${bar.critical ? 'critical' : ''}`}>{bar.label}</span>
                <span role="cell" className="lane" aria-label={what}>
                  <b className={`${bar.critical ? 'critical' : ''} ${bar.group === 'pause' ? 'pause' : ''} ${isOpen && at === of.bars.length - 1 ? 'open' : ''}`} style={{ left: `${(bar.starts_s / whole) * 100}%`, width: `${(bar.seconds / whole) * 100}%` }} />
                </span>
                <span role="cell" className="took">{seconds(bar.seconds)}</span>
              </div>
            </Fragment>
          )
        })}
        <span />
        <div className="scale" aria-hidden="true">{[0, 0.25, 0.5, 0.75, 1].map(part => <span key={part}>{seconds(whole * part)}</span>)}</div>
        <span />
      </div>
      <p className="quiet small">From {utcTime(of.from_at)}. {of.bars.some(bar => bar.group === 'pause') && 'Amber: nobody trains.'}</p>
    </figure>
  )
}
