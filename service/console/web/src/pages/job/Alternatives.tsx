// Layouts that were possible, the best first: what a step takes, and how sure the planner is of it.
import type { AlternativeOut } from '../../api/types'
import { layoutName, none, percent, seconds } from '../../parts/format'

export function Alternatives({ of, chosen }: { of: readonly AlternativeOut[]; chosen: string | null }) {
  if (of.length === 0) return <p className="quiet">There was no alternative.</p>
  return (
    <div className="scroll-x"><table>
      <caption className="hidden-text">Alternatives</caption>
      <thead><tr><th scope="col">Layout</th><th scope="col" className="number">Nodes</th><th scope="col" className="number">A step</th><th scope="col" className="number">Predicted</th><th scope="col">Known by</th></tr></thead>
      <tbody>
        {of.map((each, at) => (
          <tr key={`${each.layout} ${each.nodes} ${at}`} className={each.layout === chosen ? 'strong' : undefined}>
            <td className="nowrap">{layoutName(each.layout)}{each.layout === chosen && ' (chosen)'}</td>
            <td className="number">{each.nodes}</td><td className="number">{seconds(each.step_s)}{each.step_error ? <span className="quiet"> ± {percent(each.step_error)}</span> : null}</td>
            <td className="number">{each.predicted_s == null ? none : seconds(each.predicted_s)}</td><td className="soft nowrap">{each.measured ? 'measured' : 'predicted'}</td>
          </tr>
        ))}
      </tbody>
    </table></div>
  )
}
