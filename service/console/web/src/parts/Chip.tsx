// A state in one word, coloured by what it asks of the reader.
import { words } from './format'

export type Level = 'good' | 'warn' | 'bad' | 'info' | ''
const LEVELS: Record<string, Level> = {
  // jobs
  pending: 'info', starting: 'info', running: 'good', suspending: 'warn', suspended: 'warn', stopping: 'warn', stopped: '', finished: 'good', failed: 'bad',
  // nodes
  ready: 'good', silent: 'warn', gone: '', leaving: 'warn',
  // handoffs
  proposed: 'info', preparing: 'info', streaming: 'info', cutting_over: 'warn', active: 'good', aborted: 'bad', broken: 'bad',
  // notices and incidents
  open: 'warn', moving: 'info', moved: 'good', restarted: 'warn', withdrawn: '', nothing: '', heard: 'warn', due: 'bad', over: '',
  // decisions
  stay: '', start: 'info', move: 'good', suspend: 'warn',
  // ranks
  training: 'good', prepared: 'info', left: '', admin: 'info', operator: 'info', viewer: '',
}

export const levelOf = (state: string): Level => LEVELS[state] ?? ''

export function Chip({ state, level, children }: { state: string; level?: Level; children?: React.ReactNode }) {
  return <span className={`chip ${level ?? levelOf(state)}`}>{children ?? words(state)}</span>
}
