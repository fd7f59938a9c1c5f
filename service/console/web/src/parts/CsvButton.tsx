// "CSV" at a chart or a table. The rows are made only when somebody asks for them.
import { csvText, download, type Cell } from './csv'

export function CsvButton({ name, title = 'CSV', columns, rows }: { name: string; title?: string; columns: readonly string[]; rows: () => readonly (readonly Cell[])[] }) {
  return (
    <button type="button" className="plain" aria-label={`${title}: download ${name}`} onClick={() => download(`${name.replaceAll(/[^\w-]+/g, '_')}.csv`, csvText(columns, rows()))}>
      {title}
    </button>
  )
}
