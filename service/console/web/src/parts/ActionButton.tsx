// A button that changes something: who may not press it learns which role may.
import { allows, useRole, type Role } from './session'

export function ActionButton({ needs = 'operator', onClick, why, isDanger, children }: { needs?: Role; onClick: () => void; why?: string | null; isDanger?: boolean; children: React.ReactNode }) {
  const role = useRole()
  const refusal = allows(role, needs) ? why : `Needs the role ${needs}; yours is ${role ?? 'not known'}.`
  return <button type="button" className={isDanger ? 'danger' : undefined} disabled={!!refusal} title={refusal ?? undefined} onClick={onClick}>{children}</button>
}
