// The output of a job's ranks as it comes, with the first error found.
import { useQuery } from '@tanstack/react-query'
import { useNavigate, useSearch } from '@tanstack/react-router'
import { useVirtualizer } from '@tanstack/react-virtual'
import { useEffect, useMemo, useRef, useState } from 'react'
import { get } from '../../api/client'
import { linkState } from '../../api/link'
import { ask } from '../../api/queries'
import type { LogOut } from '../../api/types'
import { download } from '../../parts/csv'
import { count } from '../../parts/format'
import { Empty, Panel } from '../../parts/Panel'
import { appended, linesOf, type Line } from './log_lines'

const PIECES_MAX = 4_000
const PIECES_ASKED = 1_000
const LINE_PX = 18

/** The newest output, and then what comes behind it. Another rank begins anew. */
function usePieces(jobId: string, rank: string | undefined) {
  const kept = useRef<readonly LogOut[]>([])
  return useQuery({
    queryKey: [`/api/v1/jobs/${jobId}/logs`, { rank }] as const,
    queryFn: async ({ signal }) => {
      const after = kept.current.at(-1)?.log_id ?? 0
      const path = `/api/v1/jobs/${encodeURIComponent(jobId)}/logs`
      const fresh = await get<readonly LogOut[]>(path, { rank, after: after || null, limit: PIECES_ASKED }, signal)
      return (kept.current = appended(kept.current, fresh, PIECES_MAX))
    },
    refetchInterval: () => (linkState() === 'live' ? 2_000 : 3_000),
    structuralSharing: false,
    gcTime: 0,
  })
}

export default function Logs({ jobId }: { jobId: string }) {
  const search = useSearch({ strict: false })
  const go = useNavigate()
  const ranks = useQuery(ask.ranks(jobId))
  const rank = search.rank
  const change = (more: object) => void go({ to: '.', search: (old: object) => ({ ...old, ...more }), replace: true, resetScroll: false })
  const known = ranks.data?.ranks.map(each => each.rank) ?? []
  return (
    <OneLog
      key={rank ?? 'all'} jobId={jobId} rank={rank} errors={search.errors === true} shown={search.log}
      tools={<>
        <label className="check small"><input type="checkbox" checked={search.errors === true} onChange={event => change({ errors: event.target.checked || undefined })} />errors only</label>
        <select aria-label="Rank" value={rank ?? ''} onChange={event => change({ rank: event.target.value || undefined, log: undefined })}>
          <option value="">All ranks</option>
          {[...new Set([...known, ...(rank === undefined ? [] : [Number(rank)])])].sort((a, b) => a - b).map(each => <option key={each} value={each}>Rank {each}</option>)}
        </select>
      </>}
    />
  )
}

interface OneLogProps { jobId: string; rank?: string; errors: boolean; shown?: string; tools: React.ReactNode }

function OneLog({ jobId, rank, errors, shown, tools }: OneLogProps) {
  const pieces = usePieces(jobId, rank)
  const [text, setText] = useState('')
  const lines = useMemo(() => linesOf(pieces.data ?? []), [pieces.data])
  const seen = useMemo(() => {
    const wanted = text.toLowerCase()
    return lines.filter(line => (!errors || line.isError) && (wanted === '' || line.text.toLowerCase().includes(wanted)))
  }, [lines, errors, text])
  return (
    <Panel
      title="Output" flush of={pieces} lines={16}
      note={<span className="quiet small">{count(seen.length)} lines{seen.length < lines.length && ` of ${count(lines.length)}`}</span>}
      tools={<>
        <input type="search" aria-label="Only lines with" placeholder="Only lines with" size={16} value={text} onChange={event => setText(event.target.value)} />
        {tools}
        <button type="button" className="plain" onClick={() => download(`${jobId}_rank_${rank ?? 'all'}.log`, seen.map(line => `${line.rank}: ${line.text}`).join('\n') + '\n', 'text/plain')}>Save</button>
      </>}
    >
      {() => seen.length === 0
        ? <Empty>{lines.length === 0 ? 'No output is kept. The service keeps the newest output of each rank.' : 'No line is like this.'}</Empty>
        : <Lines of={seen} shown={shown === undefined ? null : Number(shown)} />}
    </Panel>
  )
}

function Lines({ of, shown }: { of: readonly Line[]; shown: number | null }) {
  const box = useRef<HTMLDivElement>(null)
  const follows = useRef(shown === null)
  const rows = useVirtualizer({ count: of.length, getScrollElement: () => box.current, estimateSize: () => LINE_PX, overscan: 30, getItemKey: at => of[at]!.key })
  const target = shown === null ? -1 : of.findIndex(line => line.logId >= shown)
  const isFound = target >= 0
  useEffect(() => {
    if (isFound) rows.scrollToIndex(target, { align: 'center' })
  }, [isFound])
  // At its end the view goes on with the output; somebody who has scrolled up is left alone.
  useEffect(() => {
    if (follows.current) rows.scrollToIndex(of.length - 1, { align: 'end' })
  }, [of.length])
  const scrolled = () => {
    const view = box.current!
    follows.current = view.scrollHeight - view.scrollTop - view.clientHeight < 3 * LINE_PX
  }
  return (
    <div ref={box} className="log" tabIndex={0} role="log" aria-label="Output of the ranks" aria-live="off" onScroll={scrolled}>
      <div style={{ height: rows.getTotalSize(), position: 'relative' }}>
        {rows.getVirtualItems().map(item => {
          const line = of[item.index]!
          return (
            <div key={item.key} ref={rows.measureElement} data-index={item.index} className={`log-line ${line.isError ? 'error' : ''} ${item.index === target ? 'first' : ''}`} style={{ position: 'absolute', top: 0, left: 0, right: 0, transform: `translateY(${item.start}px)` }}>
              <span className="who">{line.rank}</span><span>{line.text || ' '}</span>
            </div>
          )
        })}
      </div>
    </div>
  )
}
