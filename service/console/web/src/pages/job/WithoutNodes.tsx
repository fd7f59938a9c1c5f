// Choose nodes to do without, in thought.
const SHOWN_MAX = 64

export function WithoutNodes({ nodes, value, onChange }: { nodes: readonly string[]; value: readonly string[]; onChange: (value: readonly string[]) => void }) {
  const toggle = (node: string) => onChange(value.includes(node) ? value.filter(each => each !== node) : [...value, node])
  return (
    <fieldset className="row without">
      <legend className="soft small">Without these nodes, in thought</legend>
      {nodes.slice(0, SHOWN_MAX).map(node => <label key={node} className="check"><input type="checkbox" checked={value.includes(node)} onChange={() => toggle(node)} />{node}</label>)}
      {nodes.length === 0 && <span className="quiet">The job has no node now.</span>}
      {nodes.length > SHOWN_MAX && <span className="quiet small">the first {SHOWN_MAX} of {nodes.length}</span>}
    </fieldset>
  )
}
