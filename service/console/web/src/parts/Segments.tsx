// One of a few choices, all in view.
export function Segments<V extends string>({ label, value, choices, onChoose }: { label: string; value: V; choices: readonly (readonly [V, string])[]; onChoose: (value: V) => void }) {
  return (
    <div className="segments" role="group" aria-label={label}>
      {choices.map(([choice, name]) => (
        <button key={choice} type="button" aria-pressed={choice === value} onClick={() => onChoose(choice)}>{name}</button>
      ))}
    </div>
  )
}
