// Layouts that were possible, the best first: what a step takes, and how sure the planner is of it.
import type { AlternativeOut, WantedOut } from '../../api/types'
import { dollars, layoutName, none, percent, plural, seconds, words } from '../../parts/format'

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

// What the policy wants the job to have: nodes of each pool, and the options that it was chosen from.
export function Wanted({ of }: { of: WantedOut | null | undefined }) {
  if (!of) return null
  return (
    <div className="stack">
      <p>Should have {layoutName(of.layout)} on {plural(of.nodes, 'node')}{of.spares > 0 && ` and ${plural(of.spares, 'spare')}`}{of.place && ` in ${of.place}`}{of.gives_back.length > 0 && <span className="soft">; no use for {of.gives_back.join(', ')}</span>}</p>
      <div className="scroll-x"><table>
        <caption className="hidden-text">Nodes of each pool</caption>
        <thead><tr><th scope="col">Pool</th><th scope="col">Place</th><th scope="col">Sold as</th><th scope="col" className="number">Held</th><th scope="col" className="number">Should hold</th><th scope="col" className="number">One, per hour</th></tr></thead>
        <tbody>
          {of.pools.map(each => (
            <tr key={`${each.pool} ${each.place} ${each.market}`} className={each.held === each.hold ? undefined : 'strong'}>
              <td>{each.pool}</td><td>{each.place || 'any'}</td><td>{words(each.market)}</td>
              <td className="number">{each.held}</td><td className="number">{each.hold}</td><td className="number">{dollars(each.usd_per_hour)}</td>
            </tr>
          ))}
        </tbody>
      </table></div>
      <div className="scroll-x"><table>
        <caption className="hidden-text">Options that were weighed</caption>
        <thead><tr><th scope="col">Option</th><th scope="col">Place</th><th scope="col" className="number">Nodes</th><th scope="col" className="number">Spares</th><th scope="col">Holds</th><th scope="col" className="number">Costs an hour</th><th scope="col" className="number">Worth an hour</th></tr></thead>
        <tbody>
          {of.weighed.map((each, at) => (
            <tr key={`${each.layout} ${each.place} ${at}`}>
              <td className="nowrap">{layoutName(each.layout)}</td><td>{each.place}</td><td className="number">{each.nodes}</td><td className="number">{each.spares}</td>
              <td>{each.hold.map(([pool, nodes]) => `${nodes} ${pool}`).join(', ')}</td><td className="number">{dollars(each.usd_per_hour)}</td><td className="number">{dollars(each.utility_usd_per_hour)}</td>
            </tr>
          ))}
        </tbody>
      </table></div>
    </div>
  )
}
