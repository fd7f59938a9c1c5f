// The causes of the goodput ledger, in the order in which they are drawn and named. Pure.
import type { Cause } from '../api/types'

export const CAUSES: readonly Cause[] = ['productive', 'bootstrap', 'pause', 'recompute', 'lost', 'stalled', 'fallback_restart', 'idle']
export const CAUSE_WORDS: Record<Cause, string> = {
  productive: 'productive', bootstrap: 'start-up', pause: 'pause', recompute: 'steps done again', lost: 'lost', stalled: 'stood still', fallback_restart: 'restart', idle: 'idle',
}
export const CAUSE_MEANS: Record<Cause, string> = {
  productive: 'Steps that count.', bootstrap: 'Ranks that start and build their model.', pause: 'The switch of a handoff: nobody trains.',
  recompute: 'Steps that were done before and had to be done again.', lost: 'Nodes that were paid for and did nothing because others were lost.',
  stalled: 'No step for far longer than steps take, though every node was heard.',
  fallback_restart: 'A restart from a checkpoint, where no live handoff was possible.', idle: 'Nodes that were paid for without a job.',
}
export const causeColor = (cause: string): string => `var(--${cause})`
