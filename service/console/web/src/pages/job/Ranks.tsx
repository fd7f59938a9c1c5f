// Every rank by node, with its coordinates. Above 256 ranks each is a square on a canvas.
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useState } from 'react'
import { ask } from '../../api/queries'
import type { RanksOut } from '../../api/types'
import { levelOf } from '../../parts/Chip'
import { CsvButton } from '../../parts/CsvButton'
import { layoutName, plural, words } from '../../parts/format'
import { Empty, Panel } from '../../parts/Panel'
import { Segments } from '../../parts/Segments'
import { RankCanvas } from './RankCanvas'

export const CELLS_MAX = 256
export type Rank = RanksOut['ranks'][number]
export type ColorBy = 'stage' | 'tp' | 'pp' | 'dp' | 'ep'
const CHOICES: readonly (readonly [ColorBy, string])[] = [['stage', 'State'], ['tp', 'TP'], ['pp', 'PP'], ['dp', 'DP']]
const OF_EXPERTS: readonly (readonly [ColorBy, string])[] = [...CHOICES, ['ep', 'EP']]
const AXES = ['tp', 'pp', 'dp', 'cp'] as const
const EXPERT_AXES = ['ep', 'etp', 'edp'] as const
const AXIS_NAMES = { tp: 'TP', pp: 'PP', dp: 'DP', cp: 'CP', ep: 'EP', etp: 'ETP', edp: 'expert DP' } as const

export function Ranks({ jobId }: { jobId: string }) {
  const ranks = useQuery(ask.ranks(jobId))
  const [by, setBy] = useState<ColorBy>('stage')
  return (
    <Panel
      title="Ranks by node" of={ranks} lines={5}
      note={ranks.data?.layout && <span className="quiet">{layoutName(ranks.data.layout)}, {plural(ranks.data.ranks.length, 'rank')}, generation {ranks.data.generation}</span>}
      tools={<>
        <Segments label="Colour by" value={by} choices={ranks.data?.sizes?.ep ? OF_EXPERTS : CHOICES} onChoose={setBy} />
        <CsvButton name={`${jobId} ranks`} columns={['rank', 'node_id', 'slot', ...AXES, ...EXPERT_AXES, 'experts', 'stage', 'step']} rows={() => (ranks.data?.ranks ?? []).map(r => [r.rank, r.node_id, r.slot, ...[...AXES, ...EXPERT_AXES].map(axis => r.coordinates[axis]), expertsText(r), r.stage, r.step])} />
      </>}
    >
      {() => {
        const of = ranks.data!
        if (of.ranks.length === 0) return <Empty>No rank runs now.</Empty>
        return of.ranks.length > CELLS_MAX ? <RankCanvas of={of} by={by} /> : <Cells of={of} by={by} />
      }}
    </Panel>
  )
}

function Cells({ of, by }: { of: RanksOut; by: ColorBy }) {
  const byNode = ranksByNode(of)
  const shown = of.sizes?.ep ? (['tp', 'pp', 'dp', 'ep'] as const) : (['tp', 'pp', 'dp'] as const)
  return (
    <div className="ranks">
      {of.nodes.map(node => (
        <section key={node.node_id} className={`rank-node ${node.leaving ? 'leaving' : ''}`} aria-label={`Ranks on ${node.node_id}`}>
          <h3><Link to="/nodes/$nodeId" params={{ nodeId: node.node_id }} className="plain-link">{node.node_id}</Link><span className="quiet">{node.pool}</span></h3>
          <div className="rank-cells">
            {(byNode.get(node.node_id) ?? []).map(rank => (
              <div key={rank.rank} className={`rank-cell ${by === 'stage' ? levelOf(rank.stage ?? '') : ''}`} style={by === 'stage' ? undefined : { borderLeftColor: axisColor(rank.coordinates[by] ?? 0) }} title={rankText(rank)}>
                <b>{rank.rank}</b> <span className="quiet">{rank.stage === 'training' || rank.stage === null ? '' : words(rank.stage)}</span>
                <div className="quiet">{shown.map(axis => rank.coordinates[axis]).join('·')}</div>
              </div>
            ))}
          </div>
        </section>
      ))}
      <p className="quiet small" style={{ flexBasis: '100%' }}>Under each rank its place as {shown.map(axis => AXIS_NAMES[axis]).join('·')}.</p>
    </div>
  )
}

export function ranksByNode(of: RanksOut): Map<string, Rank[]> {
  const found = new Map<string, Rank[]>(of.nodes.map(node => [node.node_id, []]))
  for (const rank of of.ranks) found.get(rank.node_id)?.push(rank)
  return found
}

/** "32-63", or nothing for a dense model. */
export const expertsText = ({ experts }: Rank): string =>
  !experts ? '' : experts.first === experts.last ? `${experts.first}` : `${experts.first}-${experts.last}`

const placeText = ({ coordinates }: Rank): string =>
  [...AXES.filter(axis => axis !== 'cp' || coordinates.cp > 0), ...EXPERT_AXES.filter(axis => coordinates[axis] !== null)].map(axis => `${AXIS_NAMES[axis]} ${coordinates[axis]}`).join(', ')

export const rankText = (rank: Rank): string =>
  `rank ${rank.rank} on ${rank.node_id}, slot ${rank.slot}: ${placeText(rank)}${rank.experts ? `, ${rank.experts.first === rank.experts.last ? 'expert' : 'experts'} ${expertsText(rank)}` : ''}; ${words(rank.stage ?? 'not reported')}${rank.step === null ? '' : `, step ${rank.step}`}`

/** Neighbours differ: the golden angle goes around the circle without coming back soon. */
export const axisColor = (index: number): string => `hsl(${Math.round(index * 137.5) % 360} 55% 50%)`
