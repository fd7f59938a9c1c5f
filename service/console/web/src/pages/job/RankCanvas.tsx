// Thousands of ranks at once: a square each, a block for each node. The table beside it is the CSV.
import { memo, useEffect, useMemo, useRef, useState } from 'react'
import { color, useThemeVersion } from '../../charts/theme_colors'
import type { RanksOut } from '../../api/types'
import { levelOf } from '../../parts/Chip'
import { plural } from '../../parts/format'
import { axisColor, ranksByNode, rankText, type ColorBy, type Rank } from './Ranks'

const SIDE = 9
const GAP = 2
const BLOCK_GAP = 8
const ROW = 8
const HEIGHT_MAX = 520

interface Placed { rank: Rank; x: number; y: number }
interface Block { nodeId: string; isLeaving: boolean; x: number; y: number; width: number; height: number }

/** Where each square lies in a box of this width. Pure. */
export function placeRanks(of: RanksOut, width: number): { squares: Placed[]; blocks: Block[]; height: number } {
  const squares: Placed[] = []
  const blocks: Block[] = []
  const byNode = ranksByNode(of)
  const step = SIDE + GAP
  let x = 0
  let y = 0
  let lineHeight = 0
  for (const node of of.nodes) {
    const ranks = byNode.get(node.node_id) ?? []
    const columns = Math.min(ROW, Math.max(1, ranks.length))
    const blockWidth = columns * step + GAP
    const blockHeight = Math.max(1, Math.ceil(ranks.length / ROW)) * step + GAP
    if (x > 0 && x + blockWidth > width) {
      x = 0
      y += lineHeight + BLOCK_GAP
      lineHeight = 0
    }
    blocks.push({ nodeId: node.node_id, isLeaving: node.leaving, x, y, width: blockWidth, height: blockHeight })
    ranks.forEach((rank, at) => squares.push({ rank, x: x + GAP + (at % ROW) * step, y: y + GAP + Math.floor(at / ROW) * step }))
    x += blockWidth + BLOCK_GAP
    lineHeight = Math.max(lineHeight, blockHeight)
  }
  return { squares, blocks, height: y + lineHeight }
}

export const RankCanvas = memo(function RankCanvas({ of, by }: { of: RanksOut; by: ColorBy }) {
  const box = useRef<HTMLDivElement>(null)
  const canvas = useRef<HTMLCanvasElement>(null)
  const [width, setWidth] = useState(600)
  const [shown, setShown] = useState<Placed | null>(null)
  const theme = useThemeVersion()
  const placed = useMemo(() => placeRanks(of, width), [of, width])
  const inAll = useMemo(() => summary(of), [of])
  useEffect(() => {
    const watch = new ResizeObserver(() => box.current && setWidth(Math.max(200, box.current.clientWidth)))
    watch.observe(box.current!)
    return () => watch.disconnect()
  }, [])
  useEffect(() => draw(canvas.current!, placed, width, by), [placed, width, by, theme])
  const find = (event: React.MouseEvent) => {
    const { left, top } = canvas.current!.getBoundingClientRect()
    const [x, y] = [event.clientX - left, event.clientY - top]
    setShown(placed.squares.find(each => x >= each.x && x < each.x + SIDE + GAP && y >= each.y && y < each.y + SIDE + GAP) ?? null)
  }
  return (
    <div ref={box} style={{ maxHeight: HEIGHT_MAX, overflowY: 'auto', position: 'relative' }} tabIndex={0} role="region" aria-label="Ranks by node">
      <canvas ref={canvas} style={{ width, height: placed.height, display: 'block' }} role="img" aria-label={inAll} onMouseMove={find} onMouseLeave={() => setShown(null)} />
      <p className="small soft" style={{ minHeight: 20, position: 'sticky', bottom: 0, background: 'var(--surface)' }}>{shown ? rankText(shown.rank) : inAll}</p>
    </div>
  )
})

function summary(of: RanksOut): string {
  const stages = new Map<string, number>()
  for (const rank of of.ranks) stages.set(rank.stage ?? 'not reported', (stages.get(rank.stage ?? 'not reported') ?? 0) + 1)
  return `${plural(of.ranks.length, 'rank')} on ${plural(of.nodes.length, 'node')}: ${[...stages].map(([stage, ranks]) => `${ranks} ${stage}`).join(', ')}`
}

function draw(canvas: HTMLCanvasElement, placed: ReturnType<typeof placeRanks>, width: number, by: ColorBy): void {
  const scale = devicePixelRatio
  canvas.width = width * scale
  canvas.height = placed.height * scale
  const ctx = canvas.getContext('2d')
  if (!ctx) return
  ctx.scale(scale, scale)
  const levels = { good: color('productive'), warn: color('pause'), bad: color('lost'), info: color('bootstrap'), '': color('idle') }
  for (const block of placed.blocks) {
    ctx.strokeStyle = color(block.isLeaving ? 'lost' : 'line')
    ctx.strokeRect(block.x + 0.5, block.y + 0.5, block.width - 1, block.height - 1)
  }
  for (const { rank, x, y } of placed.squares) {
    ctx.fillStyle = by === 'stage' ? levels[levelOf(rank.stage ?? '')] : axisColor(rank.coordinates[by] ?? 0)
    ctx.fillRect(x, y, SIDE, SIDE)
  }
}
