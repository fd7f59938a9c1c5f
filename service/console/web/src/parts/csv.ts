// What a table or a chart shows, as a file for a spreadsheet.
export type Cell = string | number | boolean | null | undefined

/** RFC 4180. A cell that a spreadsheet would take for a formula is marked as text. Pure. */
export function csvText(columns: readonly string[], rows: readonly (readonly Cell[])[]): string {
  return [columns, ...rows].map(row => row.map(csvCell).join(',')).join('\r\n') + '\r\n'
}

function csvCell(value: Cell): string {
  if (value === null || value === undefined) return ''
  const text = typeof value === 'string' && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value)
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
}

export function download(name: string, text: string, type = 'text/csv'): void {
  const url = URL.createObjectURL(new Blob([text], { type }))
  const link = Object.assign(document.createElement('a'), { href: url, download: name })
  link.click()
  setTimeout(() => URL.revokeObjectURL(url), 10_000)
}
