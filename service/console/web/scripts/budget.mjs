// What the first screen loads: the entry of index.html and the route it opens, each with what it imports, and their
// styles, gzipped. Fails above the budget. `--json FILE` writes the figures.
import { readFileSync, writeFileSync } from 'node:fs'
import { gzipSync } from 'node:zlib'

const BUDGET_BYTES = 200 * 1024
const out = new URL('../../static/app/', import.meta.url)
const manifest = JSON.parse(readFileSync(new URL('.vite/manifest.json', out), 'utf8'))
const FIRST = ['index.html', 'src/pages/fleet/Fleet.tsx']

const files = new Set(['index.html'])
const seen = new Set()
function follow(name) {
  const chunk = manifest[name]
  if (!chunk) throw new Error(`the build has no ${name}; name the first route in scripts/budget.mjs`)
  if (seen.has(name)) return
  seen.add(name)
  files.add(chunk.file)
  for (const style of chunk.css ?? []) files.add(style)
  for (const inner of chunk.imports ?? []) follow(inner)
}
FIRST.forEach(follow)

const sizes = [...files].map(file => [file, gzipSync(readFileSync(new URL(file, out)), { level: 6 }).length])
const total = sizes.reduce((sum, [, bytes]) => sum + bytes, 0)
sizes.sort((a, b) => b[1] - a[1])
for (const [file, bytes] of sizes) console.log(`${(bytes / 1024).toFixed(1).padStart(8)} KiB  ${file}`)
console.log(`${(total / 1024).toFixed(1).padStart(8)} KiB  first load, gzipped (at most ${BUDGET_BYTES / 1024})`)

const where = process.argv.indexOf('--json')
if (where > 0) writeFileSync(process.argv[where + 1], JSON.stringify({ first_load_bytes_gzip: total }) + '\n')
if (total > BUDGET_BYTES) {
  console.error(`error: the first load is ${total} bytes gzipped, more than ${BUDGET_BYTES}`)
  process.exit(1)
}
