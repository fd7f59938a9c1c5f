// Goodput and dollars: what interruptions cost, always beside what spot saved, and what restarts would have cost.
import { useQuery } from '@tanstack/react-query'
import type { ReactNode } from 'react'
import { ask } from '../../api/queries'
import type { LedgerOut, RestartsOut } from '../../api/types'
import { CAUSES, CAUSE_MEANS, CAUSE_WORDS, causeColor } from '../../parts/causes'
import { CsvButton } from '../../parts/CsvButton'
import { Figure, Figures } from '../../parts/Figure'
import { bytes, dollars, none, percent, plural, span } from '../../parts/format'
import { Empty, Panel } from '../../parts/Panel'

export function Money({ jobId, since, ranges }: { jobId: string; since: { since?: string }; ranges: ReactNode }) {
  const ledger = useQuery(ask.ledger(jobId, since))
  const restarts = useQuery(ask.restarts(jobId))
  return (
    <Panel
      title="Goodput and dollars" of={ledger} lines={8}
      tools={<>{ranges}<CsvButton name={`${jobId} ledger`} columns={['cause', 'slot_seconds', 'share', 'dollars']} rows={() => (ledger.data?.causes ?? []).map(each => [each.cause, each.slot_seconds, each.share, each.dollars])} /></>}
    >
      {() => ledger.data!.slot_seconds === 0 ? <Empty>Nothing was paid for in this range.</Empty> : (
        <div className="stack" style={{ gap: 12 }}>
          <Sums ledger={ledger.data!} restarts={restarts.data} />
          <CauseBar of={ledger.data!} />
          <CauseTable of={ledger.data!} />
          {ledger.data!.unpriced_slot_seconds > 0 && <p className="notice-box warn small">{span(ledger.data!.unpriced_slot_seconds)} of slot time have no price and count with $0. <code>liver pools price</code> sets one.</p>}
        </div>
      )}
    </Panel>
  )
}

function Sums({ ledger, restarts }: { ledger: LedgerOut; restarts: RestartsOut | undefined }) {
  const saved = ledger.saved_dollars
  return (
    <Figures spread>
      <Figure name="Goodput" large beneath={`${span(ledger.slot_seconds)} of slot time`}>{percent(ledger.goodput)}</Figure>
      <Figure name="Cost" large>{dollars(ledger.dollars)}</Figure>
      <Figure name="Cost of interruptions" large beneath={ledger.egress.bytes > 0 ? `with ${bytes(ledger.egress.bytes)} between zones` : 'pauses, repeated steps, losses'}>
        <span className={ledger.interruptions_dollars > 0 ? 'warn' : undefined}>{dollars(ledger.interruptions_dollars)}</span>
      </Figure>
      <Figure name="Saved by spot" large beneath={saved === null ? 'no on-demand price known' : 'against the on-demand price'}>
        <span className={saved !== null && saved >= 0 ? 'good' : undefined}>{saved === null ? none : dollars(saved)}</span>
      </Figure>
      <Figure name="By restarts instead" large title={restarts?.estimate} beneath={restarts ? restarts.slot_seconds === null ? `${plural(restarts.handoffs, 'move')}; not known yet` : `${plural(restarts.handoffs, 'move')}: ${span(restarts.slot_seconds)} instead of ${span(restarts.handoffs_slot_seconds)}` : 'lifetime'}>
        {dollars(restarts?.dollars)}
      </Figure>
    </Figures>
  )
}

function CauseBar({ of }: { of: LedgerOut }) {
  const share = new Map(of.causes.map(each => [each.cause, each.share]))
  return (
    <div className="bar" role="img" aria-label={of.causes.map(each => `${CAUSE_WORDS[each.cause]} ${percent(each.share)}`).join(', ')}>
      {CAUSES.map(cause => (share.get(cause) ?? 0) > 0 && <span key={cause} title={`${CAUSE_WORDS[cause]}: ${percent(share.get(cause))}`} style={{ flexGrow: share.get(cause), background: causeColor(cause) }} />)}
    </div>
  )
}

export function CauseTable({ of }: { of: LedgerOut }) {
  const found = new Map(of.causes.map(each => [each.cause, each]))
  return (
    <table>
      <caption className="hidden-text">Slot time by cause</caption>
      <thead><tr><th scope="col">Cause</th><th scope="col" className="number">Slot time</th><th scope="col" className="number">Share</th><th scope="col" className="number">Dollars</th></tr></thead>
      <tbody>
        {CAUSES.map(cause => {
          const each = found.get(cause)
          if (!each || each.slot_seconds === 0) return null
          return (
            <tr key={cause} title={CAUSE_MEANS[cause]}>
              <td><span className="row" style={{ gap: 7 }}><i className="swatch" style={{ background: causeColor(cause) }} />{CAUSE_WORDS[cause]}</span></td>
              <td className="number">{span(each.slot_seconds)}</td><td className="number">{percent(each.share)}</td><td className="number">{dollars(each.dollars)}</td>
            </tr>
          )
        })}
      </tbody>
    </table>
  )
}
