// What a replay is asked with: the capacity, prices, and what is assumed. Files are read in the browser.
import { useId, type ReactNode } from 'react'
import { bytes } from '../../../parts/format'
import { Segments } from '../../../parts/Segments'
import { FORMATS, KNOBS, OWN_HOURS, placeOf, type Form, type Format, type Knob, type Problem, type TextFile } from './replay'

interface FormProps { value: Form; onChange: (form: Form) => void; problems: readonly Problem[]; isBusy: boolean; onAsk: () => void }
const SOURCES = [['own', 'This installation'], ['file', 'A file']] as const

export function ReplayForm({ value, onChange, problems, isBusy, onAsk }: FormProps) {
  const set = (more: Partial<Form>) => onChange({ ...value, ...more })
  const rulesOf = (place: string) => problems.filter(each => placeOf(each.field) === place).map(each => each.rule)
  return (
    <form className="stack" style={{ gap: 12 }} aria-label="Replay" noValidate onSubmit={event => (event.preventDefault(), !isBusy && onAsk())}>
      <div className="row" style={{ alignItems: 'flex-start', gap: '8px 24px' }}>
        <Group label="Capacity" rules={rulesOf('trace')}>
          <Segments label="Where the capacity comes from" value={value.from} choices={SOURCES} onChoose={from => set({ from })} />
          {value.from === 'own'
            ? <Segments label="How far back" value={value.hours} choices={OWN_HOURS} onChoose={hours => set({ hours })} />
            : <>
                <FileField label="Trace file" value={value.trace} onChange={trace => set({ trace })} accept=".csv,.json,.jsonl,.txt,text/plain,text/csv,application/json" />
                <select aria-label="Format of the trace" value={value.format} onChange={event => set({ format: event.target.value as Format })}>{FORMATS.map(([format, name]) => <option key={format} value={format}>{name}</option>)}</select>
              </>}
        </Group>
        <Group label="Prices: pool, usd_per_hour, from_s (empty: 1 and 3 USD per hour)" rules={rulesOf('prices')}>
          <FileField label="Price file" value={value.prices} onChange={prices => set({ prices })} accept=".csv,text/csv" />
        </Group>
      </div>
      <div className="knobs">{KNOBS.map(knob => <KnobField key={knob.name} knob={knob} value={value.knobs[knob.name] ?? ''} rules={rulesOf(knob.name)} onChange={text => set({ knobs: { ...value.knobs, [knob.name]: text } })} />)}</div>
      <label className="row small" title="A handoff can come too late, be refused or be ended by a loss, as in the product. It takes ten times as long or more.">
        <input type="checkbox" checked={value.machines} onChange={event => set({ machines: event.target.checked })} /> The product's machines carry every change <span className="quiet">(slower: for short traces)</span>
      </label>
      <div className="row"><button type="submit" className="primary" disabled={isBusy}>{isBusy ? 'Replaying …' : 'Replay'}</button><span className="quiet small" role="status">{isBusy ? 'The service replays every policy; it may take 20 s.' : 'Nothing is changed and nothing stored.'}</span></div>
    </form>
  )
}

function Group({ label, rules, children }: { label: string; rules: readonly string[]; children: ReactNode }) {
  return (
    <fieldset className="stack plain-set" style={{ gap: 5 }}>
      <legend className="small soft">{label}</legend>
      <div className="row">{children}</div>
      <Rules of={rules} />
    </fieldset>
  )
}

function FileField({ label, value, onChange, accept }: { label: string; value: TextFile | null; onChange: (file: TextFile | null) => void; accept: string }) {
  const read = async (file: File | undefined) => onChange(file ? { name: file.name, text: await file.text() } : null)
  return (
    <span className="row">
      <input type="file" aria-label={label} accept={accept} onChange={event => void read(event.target.files?.[0])} />
      {value && <span className="quiet small">{bytes(value.text.length)}</span>}
    </span>
  )
}

function KnobField({ knob, value, rules, onChange }: { knob: Knob; value: string; rules: readonly string[]; onChange: (text: string) => void }) {
  const id = useId()
  return (
    <div className="field" title={knob.means}>
      <label htmlFor={id}>{knob.label}{knob.unit && <span className="quiet">, {knob.unit}</span>}</label>
      <input id={id} value={value} inputMode={knob.isText ? 'text' : knob.isWhole ? 'numeric' : 'decimal'} placeholder={knob.usual} autoComplete="off" aria-invalid={rules.length > 0} aria-describedby={rules.length > 0 ? `${id}-rules` : undefined} onChange={event => onChange(event.target.value)} />
      <Rules of={rules} id={`${id}-rules`} />
    </div>
  )
}

function Rules({ of, id }: { of: readonly string[]; id?: string }) {
  return of.length === 0 ? null : <span id={id} className="bad small" role="alert">{of.join('; ')}</span>
}
