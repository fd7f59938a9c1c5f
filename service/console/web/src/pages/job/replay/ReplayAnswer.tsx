// How it went under every policy: figures side by side, what each lost and why, nodes and tokens over time.
import { lazy, Suspense, useMemo, useState } from 'react'
import type { WhatIfOut } from '../../../api/types'
import { CsvButton } from '../../../parts/CsvButton'
import { count, dollars, figure, percent, plural, prose, seconds, span, tick, words } from '../../../parts/format'
import { Panel, Skeleton } from '../../../parts/Panel'
import { Table } from '../../../parts/Table'
import { enactedIn, gapOf, LOSS_COLORS, LOSS_MEANS, LOSS_WORDS, LOSSES, nodesOver, policyName, tokensOver, type Run } from './replay'

const Plot = lazy(() => import('../../../charts/Plot'))
const COLORS = ['series-1', 'series-2', 'series-3', 'fallback_restart', 'bootstrap', 'idle']
const NODE_LINES = [{ name: 'offered', colorName: 'idle', scale: [0, null] as [number, null] }, { name: 'held', colorName: 'series-2' }, { name: 'used', colorName: 'series-1' }]
const HEIGHT = 170

export function ReplayAnswer({ of }: { of: WhatIfOut }) {
  return (
    <>
      <Panel title="How it would have gone" flush tools={<CsvButton name={`${of.job} on ${of.trace}`} columns={POLICY_COLUMNS} rows={() => of.policies.map(run => policyRow(run, of))} />}>
        <div className="stack" style={{ gap: 10, padding: '10px 14px' }}><Sentence of={of} /><Assumed of={of} /></div>
        <Policies of={of} />
      </Panel>
      <Panel title="Tokens lost, by cause" note={<span className="quiet small">against an ideal that changes at no cost; causes sum to the gap</span>}><Losses of={of} /></Panel>
      <Curves of={of} />
    </>
  )
}

function Sentence({ of }: { of: WhatIfOut }) {
  const ours = of.policies[0]
  if (!ours) return null
  return (
    <p className="sentence">
      In {span(of.hours * 3_600)} of {of.trace}, with {plural(of.nodes_most, 'node')} at most, LiveR makes {percent(ours.goodput)} of the tokens of an ideal that changes at no cost,
      {' '}{percent(of.tokens_vs_hold_all)} of those of holding every node, at {dollars(ours.usd_per_mtok)} a million tokens.
    </p>
  )
}

function Assumed({ of }: { of: WhatIfOut }) {
  return (
    <div className="row small soft" style={{ gap: '4px 16px' }}>
      <span>a change loses {seconds(of.lost_s)} {of.lost_s_is_guess && <span className="chip warn">guess</span>} <span className="quiet">({prose(of.lost_s_source)})</span></span>
      <span>{plural(of.slots_per_node, 'GPU')} a node, {of.device}</span>
      <span>notice {seconds(of.notice_s)}</span><span>{percent(of.unannounced_share)} of losses unannounced</span><span>a node is back after {seconds(of.acquire_s)}</span>
      {of.enacted && <span title="What the product's machines did under LiveR's policy.">by the machines: {enactedIn(of)}{of.handoffs_refused > 0 && `, ${plural(of.handoffs_refused, 'handoff')} refused`}{of.gave_up && <span className="bad"> {prose(of.gave_up)}</span>}</span>}
      {of.not_followed.map(text => <span key={text} className="chip warn" title={text}>not followed: {text}</span>)}
      <span title="Who knows how many nodes there will be, and who knows also which of them go.">with the future known: {count(of.oracles.count_tokens)} tokens by counts ({percent(of.oracles.regret_count)} more than LiveR), {count(of.oracles.victim_tokens)} by nodes ({percent(of.oracles.regret_victim)})</span>
    </div>
  )
}

function Policies({ of }: { of: WhatIfOut }) {
  return (
    <Table of={of.policies} id={row => row.policy} caption="Policies" columns={[
      { name: 'Policy', isLead: true, cell: row => row.policy === 'liver' ? <strong>{policyName(row.policy)}</strong> : policyName(row.policy) },
      { name: 'Goodput', isNumber: true, cell: row => percent(row.goodput) },
      { name: 'Tokens', isNumber: true, cell: row => count(row.tokens) },
      { name: 'Cost', isNumber: true, cell: row => dollars(row.usd) },
      { name: 'A million tokens', isNumber: true, cell: row => dollars(row.usd_per_mtok) },
      { name: 'Changes', isNumber: true, cell: row => count(row.changes) },
      { name: 'Node hours', isWide: true, cell: row => <span className="soft">{Object.entries(row.node_hours_by_cause).map(([cause, hours]) => `${words(cause)} ${figure(hours)}`).join(', ')}</span> },
    ]} />
  )
}

const POLICY_COLUMNS = ['policy', 'goodput', 'tokens', 'usd', 'usd_per_mtok', 'changes', 'ideal_tokens', ...LOSSES.map(loss => `tokens_lost_${loss}`)]
const policyRow = (run: Run, of: WhatIfOut) => [run.policy, run.goodput, run.tokens, run.usd, run.usd_per_mtok, run.changes, of.ideal_tokens, ...LOSSES.map(loss => run.tokens_lost_by[loss])]

function Losses({ of }: { of: WhatIfOut }) {
  const share = (tokens: number) => (of.ideal_tokens > 0 ? tokens / of.ideal_tokens : 0)
  return (
    <div className="stack" style={{ gap: 10 }}>
      <span className="legend">{LOSSES.map(loss => <span key={loss} title={LOSS_MEANS[loss]}><i className="swatch" style={{ background: `var(--${LOSS_COLORS[loss]})` }} />{LOSS_WORDS[loss]}</span>)}</span>
      <div className="scroll-x"><table>
        <caption className="hidden-text">Tokens lost, by cause, as a share of the ideal</caption>
        <thead><tr><th scope="col">Policy</th>{LOSSES.map(loss => <th key={loss} scope="col" className="number" title={LOSS_MEANS[loss]}>{LOSS_WORDS[loss]}</th>)}<th scope="col" className="number">Gap</th><th scope="col" style={{ width: '30%' }}><span className="hidden-text">As a bar</span></th></tr></thead>
        <tbody>{of.policies.map(run => {
          const { gap, isWhole } = gapOf(run, of.ideal_tokens)
          return (
            <tr key={run.policy}>
              <th scope="row" className="nowrap">{policyName(run.policy)}</th>
              {LOSSES.map(loss => <td key={loss} className="number">{percent(share(run.tokens_lost_by[loss]))}</td>)}
              <td className="number"><strong>{percent(share(gap))}</strong>{!isWhole && <span className="bad"> not all of it has a cause</span>}</td>
              <td><div className="bar" aria-hidden="true">{LOSSES.map(loss => run.tokens_lost_by[loss] > 0 && <span key={loss} title={`${LOSS_WORDS[loss]}: ${percent(share(run.tokens_lost_by[loss]))}`} style={{ width: `${share(run.tokens_lost_by[loss]) * 100}%`, background: `var(--${LOSS_COLORS[loss]})` }} />)}</div></td>
            </tr>
          )
        })}</tbody>
      </table></div>
    </div>
  )
}

function Curves({ of }: { of: WhatIfOut }) {
  const [policy, setPolicy] = useState('liver')
  const run = of.policies.find(each => each.policy === policy) ?? of.policies[0]
  const tokens = useMemo(() => tokensOver(of.policies), [of])
  const nodes = useMemo(() => (run ? nodesOver(run) : null), [run])
  const lines = of.policies.map((each, at) => ({ name: policyName(each.policy), colorName: COLORS[at % COLORS.length]!, ...(at === 0 ? { scale: [0, null] as [number, null] } : {}) }))
  const shared = { range: [0, Math.max(of.hours, 1e-3)] as [number, number], formatX: (hours: number) => `${tick(hours)} h`, group: 'replay', hasAxis: true, height: HEIGHT }
  const csv = () => of.policies.flatMap(each => each.curve.map(point => [each.policy, point.at_s, point.offered, point.held, point.used, point.tokens]))
  return (
    <Panel title="Over time" tools={<>
      <select aria-label="Whose nodes" value={run?.policy ?? ''} onChange={event => setPolicy(event.target.value)}>{of.policies.map(each => <option key={each.policy} value={each.policy}>{policyName(each.policy)}</option>)}</select>
      <CsvButton name={`${of.job} on ${of.trace} over time`} columns={['policy', 'at_s', 'offered', 'held', 'used', 'tokens']} rows={csv} />
    </>}>
      <div className="grid-2">
        <Chart title={`Nodes, ${policyName(run?.policy ?? '')}`} names={NODE_LINES}>{nodes && <Plot label="Nodes" data={nodes} lines={NODE_LINES} formatY={tick} {...shared} />}</Chart>
        <Chart title="Tokens made" names={lines}><Plot label="Tokens made" data={[tokens.hours, ...tokens.values]} lines={lines} formatY={value => (value >= 1e6 ? `${tick(value / 1e6)} M` : tick(value))} {...shared} /></Chart>
      </div>
    </Panel>
  )
}

function Chart({ title, names, children }: { title: string; names: readonly { name: string; colorName: string }[]; children: React.ReactNode }) {
  return (
    <figure className="stack" style={{ gap: 4 }}>
      <figcaption className="row apart"><h3>{title}</h3><span className="legend">{names.map(each => <span key={each.name}><i className="swatch" style={{ background: `var(--${each.colorName})` }} />{each.name}</span>)}</span></figcaption>
      <div style={{ height: HEIGHT }}><Suspense fallback={<Skeleton lines={4} />}>{children}</Suspense></div>
    </figure>
  )
}
