// Pieces of output as lines, each with its rank. Pieces of a rank may end within a line. Pure.
import type { LogOut } from '../../api/types'

export interface Line { key: string; rank: number; logId: number; text: string; isError: boolean }

export const LINES_MAX = 20_000
const ERROR = /\b(error|exception|traceback|fatal|critical|panic|nan|out of memory|oom|killed|segmentation fault)\b|\w(Error|Exception):/i

export function linesOf(pieces: readonly LogOut[]): Line[] {
  const open = new Map<number, Line>()
  const lines: Line[] = []
  for (const piece of pieces) {
    const parts = piece.text.split('\n')
    parts.forEach((text, at) => {
      const begun = at === 0 ? open.get(piece.rank) : undefined
      if (begun) {
        begun.text += text
        begun.isError = ERROR.test(begun.text)
      } else if (text !== '' || at < parts.length - 1) {
        const line = { key: `${piece.log_id} ${at}`, rank: piece.rank, logId: piece.log_id, text, isError: ERROR.test(text) }
        lines.push(line)
        if (at === parts.length - 1) open.set(piece.rank, line)
      }
      if (at < parts.length - 1) open.delete(piece.rank)
    })
  }
  return lines.slice(-LINES_MAX)
}

/** New pieces behind the old ones; the oldest go where there are too many. */
export function appended(old: readonly LogOut[], fresh: readonly LogOut[], piecesMax: number): readonly LogOut[] {
  const last = old.at(-1)?.log_id ?? -1
  const more = fresh.filter(piece => piece.log_id > last)
  return more.length === 0 ? old : [...old, ...more].slice(-piecesMax)
}
