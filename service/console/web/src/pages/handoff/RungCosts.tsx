// Which ways there were to move the job, what each was expected to cost in training time, and what the chosen one did.
import type { HandoffOut } from '../../api/types'
import { none, plural, seconds, words } from '../../parts/format'
import { Empty } from '../../parts/Panel'

type Cost = HandoffOut['rung_costs'][number]
type Part = keyof Cost['parts']
const PARTS: readonly (readonly [Part, string])[] = [['building_s', 'Building'], ['streaming_s', 'Streaming'], ['pause_s', 'Pause'], ['after_s', 'First steps after']]
export const COST_COLUMNS = ['way', 'chosen', ...PARTS.map(([part]) => part), 'total_s', 'guessed'] as const

export function costRows(of: HandoffOut) {
  const expected = of.rung_costs.map(cost => [cost.rung, cost.rung === of.rung, ...PARTS.map(([part]) => cost.parts[part]), cost.total_s, cost.guessed.join(' ')])
  return of.lost_parts ? [...expected, ['measured', true, ...PARTS.map(([part]) => of.lost_parts![part]), of.lost_s, '']] : expected
}

export function RungCosts({ of }: { of: HandoffOut }) {
  if (of.rung_costs.length === 0 && of.lost_parts === null) return <Empty>What the ways would cost was not estimated for this handoff.</Empty>
  return (
    <div className="scroll-x"><table>
      <caption className="hidden-text">Training time that each way costs</caption>
      <thead><tr><th scope="col">Way</th>{PARTS.map(([part, name]) => <th key={part} scope="col" className="number">{name}</th>)}<th scope="col" className="number">In all</th><th scope="col">Known by</th></tr></thead>
      <tbody>
        {of.rung_costs.map(cost => (
          <tr key={cost.rung} className={cost.rung === of.rung ? 'strong' : undefined}>
            <td className="nowrap">{words(cost.rung)}{cost.rung === of.rung && ' (chosen)'}</td>
            {PARTS.map(([part]) => <td key={part} className="number">{seconds(cost.parts[part])}{isGuessed(cost, part) && <span className="quiet" title="No handoff has measured this part."> guess</span>}</td>)}
            <td className="number">{seconds(cost.total_s)}</td>
            <td className="soft nowrap">{cost.measured > 0 ? plural(cost.measured, 'handoff') : 'no handoff yet'}</td>
          </tr>
        ))}
        {of.lost_parts && (
          <tr>
            <td className="nowrap">measured</td>
            {PARTS.map(([part]) => <td key={part} className="number">{seconds(of.lost_parts![part])}</td>)}
            <td className="number"><strong>{of.lost_s === null ? none : seconds(of.lost_s)}</strong></td><td className="soft">this handoff</td>
          </tr>
        )}
      </tbody>
    </table></div>
  )
}

const isGuessed = (cost: Cost, part: Part): boolean => cost.guessed.some(name => name === part || `${name}_s` === part)
