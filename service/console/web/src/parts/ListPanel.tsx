// A list of the API, page by page, in a panel.
import { useInfiniteQuery } from '@tanstack/react-query'
import { useMemo, type ReactNode } from 'react'
import type { ListQuery } from '../api/queries'
import { CsvButton } from './CsvButton'
import type { Cell } from './csv'
import { Empty, Panel } from './Panel'
import { Table, type Column } from './Table'

interface ListPanelProps<T> {
  title: string
  query: ListQuery<T>
  columns: readonly Column<T>[]
  id: (row: T) => string | number
  empty: ReactNode
  tools?: ReactNode
  note?: ReactNode
  className?: string
  csv?: { columns: readonly string[]; row: (row: T) => readonly Cell[] }
}

export function useList<T>(query: ListQuery<T>) {
  const result = useInfiniteQuery(query)
  const items = useMemo(() => result.data?.pages.flatMap(page => page.items) ?? [], [result.data])
  return { ...result, items }
}

export function ListPanel<T>({ title, query, columns, id, empty, tools, note, className, csv }: ListPanelProps<T>) {
  const list = useList(query)
  const { items } = list
  return (
    <Panel
      title={title} flush of={list} note={note} className={className} lines={6}
      tools={<>{tools}{csv && <CsvButton name={title} columns={csv.columns} rows={() => items.map(csv.row)} />}</>}
    >
      {() => (
        <>
          {items.length === 0 ? <Empty>{empty}</Empty> : <Table of={items} columns={columns} id={id} caption={title} />}
          {list.hasNextPage && (
            <div style={{ padding: '8px 14px' }}>
              <button type="button" disabled={list.isFetchingNextPage} onClick={() => void list.fetchNextPage()}>
                {list.isFetchingNextPage ? 'Loading …' : 'More'}
              </button>
            </div>
          )}
        </>
      )}
    </Panel>
  )
}
