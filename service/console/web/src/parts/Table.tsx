// A table: plain up to two hundred rows, beyond that only the rows in view are drawn. On a narrow screen rows are cards.
import { useVirtualizer } from '@tanstack/react-virtual'
import { useRef, type ReactNode } from 'react'

export interface Column<T> {
  name: string
  cell: (row: T) => ReactNode
  isNumber?: boolean
  /** Text that needs room. */
  isWide?: boolean
  /** What a card begins with. */
  isLead?: boolean
}

interface TableProps<T> { of: readonly T[]; columns: readonly Column<T>[]; id: (row: T) => string | number; caption: string; height?: number }
const PLAIN_ROWS_MAX = 200
const ROW_PX = 30

export function Table<T>(props: TableProps<T>) {
  return props.of.length > PLAIN_ROWS_MAX ? <LongTable {...props} /> : (
    <div className="scroll-x">
      <table className="cards">
        <Head {...props} />
        <tbody>{props.of.map(row => <Row key={props.id(row)} row={row} columns={props.columns} />)}</tbody>
      </table>
    </div>
  )
}

function Head<T>({ columns, caption }: TableProps<T>) {
  return (
    <>
      <caption className="hidden-text">{caption}</caption>
      <thead>
        <tr>{columns.map(column => <th key={column.name} scope="col" className={column.isNumber ? 'number' : undefined}>{column.name}</th>)}</tr>
      </thead>
    </>
  )
}

function Row<T>({ row, columns }: { row: T; columns: readonly Column<T>[] }) {
  return (
    <tr>
      {columns.map(column => (
        <td key={column.name} data-label={column.name} className={[column.isNumber && 'number', column.isWide && 'wide', column.isLead && 'lead'].filter(Boolean).join(' ') || undefined}>
          <div className="cell">{column.cell(row)}</div>
        </td>
      ))}
    </tr>
  )
}

function LongTable<T>(props: TableProps<T>) {
  const box = useRef<HTMLDivElement>(null)
  const rows = useVirtualizer({ count: props.of.length, getScrollElement: () => box.current, estimateSize: () => ROW_PX, overscan: 12 })
  const items = rows.getVirtualItems()
  const before = items[0]?.start ?? 0
  const after = rows.getTotalSize() - (items.at(-1)?.end ?? 0)
  return (
    <div ref={box} className="scroll-x long-table" style={{ maxHeight: props.height ?? 480, overflowY: 'auto' }} tabIndex={0} role="region" aria-label={props.caption}>
      <table aria-rowcount={props.of.length + 1}>
        <Head {...props} />
        <tbody>
          {before > 0 && <tr aria-hidden="true"><td colSpan={props.columns.length} style={{ height: before, padding: 0, border: 0 }} /></tr>}
          {items.map(item => {
            const row = props.of[item.index]!
            return (
              <tr key={props.id(row)} ref={rows.measureElement} data-index={item.index} aria-rowindex={item.index + 2}>
                {props.columns.map(column => <td key={column.name} className={column.isNumber ? 'number' : undefined}>{column.cell(row)}</td>)}
              </tr>
            )
          })}
          {after > 0 && <tr aria-hidden="true"><td colSpan={props.columns.length} style={{ height: after, padding: 0, border: 0 }} /></tr>}
        </tbody>
      </table>
    </div>
  )
}
