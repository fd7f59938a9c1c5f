// The job file, as `liver jobs submit` would take it again.
import type { JobOut } from '../../api/types'
import { download } from '../../parts/csv'
import { Panel } from '../../parts/Panel'
import { yaml } from '../../parts/yaml'

export default function File({ job }: { job: JobOut }) {
  const text = yaml(job.spec as unknown as Record<string, string>)
  return (
    <Panel title="Job file" note={<span className="quiet small">fields that were left out have no line</span>} tools={<button type="button" className="plain" onClick={() => download(`${job.job_id}.yaml`, text, 'text/yaml')}>Save</button>}>
      <pre className="pre" style={{ maxHeight: 'none' }} tabIndex={0}>{text}</pre>
    </Panel>
  )
}
