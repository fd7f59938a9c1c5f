// A plain value as YAML, as a job file is written. Pure.
type Plain = string | number | boolean | null | undefined | readonly Plain[] | { readonly [name: string]: Plain }

/** Fields without a value are left out. Ends with a newline. */
export function yaml(value: Plain, indent = 0): string {
  const pad = '  '.repeat(indent)
  if (Array.isArray(value)) return value.map((each: Plain) => `${pad}- ${isDeep(each) ? yaml(each, indent + 1).trimStart() : `${scalar(each)}\n`}`).join('')
  return Object.entries(value as Record<string, Plain>)
    .filter(([, each]) => each !== null && each !== undefined && !(isDeep(each) && Object.keys(each as object).length === 0))
    .map(([name, each]) => (isDeep(each) ? `${pad}${scalar(name)}:\n${yaml(each, indent + 1)}` : `${pad}${scalar(name)}: ${scalar(each)}\n`))
    .join('')
}

const isDeep = (value: Plain): boolean => typeof value === 'object' && value !== null

function scalar(value: Plain): string {
  if (typeof value !== 'string') return String(value)
  // What YAML would read as something else is quoted, as JSON does it.
  const isPlain = /^[A-Za-z_/.][\w /.:@+-]*$/.test(value) && !/: |:$| #|\s$/.test(value) && !/^(true|false|null|yes|no|on|off|y|n|~|\.inf|\.nan)$/i.test(value)
  return isPlain ? value : JSON.stringify(value)
}
