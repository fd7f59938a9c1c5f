// How the nodes of a job read each other's state, as their agents measured it, and what a move of all of it would take.
import { useQuery } from '@tanstack/react-query'
import { ask } from '../../api/queries'
import type { WireOut, WiresOut } from '../../api/types'
import { Chip } from '../../parts/Chip'
import { bytes, none, rate, seconds } from '../../parts/format'
import { Moment } from '../../parts/Moment'
import { Empty, Panel } from '../../parts/Panel'
import { Table } from '../../parts/Table'

export function Wires({ jobId }: { jobId: string }) {
  const wires = useQuery(ask.wires(jobId))
  return (
    <Panel title="Wires between its nodes" of={wires} flush note={wires.data && <span className="quiet small">{move(wires.data)}</span>}>
      {() => (wires.data!.wires.length === 0 ? <Empty>{nothing(wires.data!)}</Empty> : (
        <Table<WireOut>
          of={wires.data!.wires} id={row => `${row.source} ${row.target}`} caption="How each node is read by another one"
          columns={[
            { name: 'From', isLead: true, cell: row => <code>{row.source}</code> },
            { name: 'To', cell: row => <code>{row.target}</code> },
            { name: 'Wire', cell: row => <Chip state={row.wire ?? 'none'} level={row.live ? 'good' : row.wire ? 'warn' : 'bad'} /> },
            { name: 'Brings', isNumber: true, cell: row => (row.bytes_per_s > 0 ? rate(row.bytes_per_s) : none) },
            { name: 'Latency', isNumber: true, cell: row => (row.wire ? <span className="nowrap">{(row.latency_s * 1000).toFixed(2)} ms</span> : none) },
            { name: 'Measured', cell: row => <Moment at={row.measured_at} /> },
            { name: 'Why no better one', isWide: true, cell: row => <span className="soft">{[...row.refused, row.failed].filter(Boolean).join('; ') || none}</span> },
          ]}
        />
      ))}
    </Panel>
  )
}

function move(of: WiresOut): string {
  if (of.move_s === null) return ''
  return `all ${bytes(of.state_bytes)} of its state move in ${seconds(of.move_s)}${of.live ? ' while it trains' : ', in the pause'}`
}

function nothing(of: WiresOut): string {
  if (of.nodes.length < 2) return of.nodes.length ? 'The job runs on one node.' : 'The job does not run.'
  return 'Nothing was measured yet. Agents measure nodes of other addresses, about half a minute after a world began.'
}
