// Every screen over the sample API: what stands on it, where its links lead, what it says when something is missing.
import { screen, waitFor, within } from '@testing-library/react'
import userEvent from '@testing-library/user-event'
import { expect, test } from 'vitest'
import { change, get, getPage } from './api/client'
import { done, incident, replayed, session } from './test/sample'
import { open, serve } from './test/page'

const LONG = { timeout: 15_000 }
const panel = async (name: string) => within(await screen.findByRole('region', { name }, LONG))

test('the fleet names the node that will go, and its link leads to the incident', async () => {
  serve()
  open('/')
  const going = await panel('Nodes that will go')
  expect((await going.findByRole('link', { name: 'b-2' }, LONG)).getAttribute('href')).toBe('/incidents/7')
  const jobs = await panel('Jobs')
  const row = (await jobs.findByRole('link', { name: 'gpt-7b' }, LONG)).closest('tr')!
  await waitFor(() => expect(row.textContent).toContain('$4.31'), LONG)
  expect(row.textContent).toContain('$389.20')
})

test('failed only asks the service for failed jobs only, and stands in the address', async () => {
  const asked = serve()
  const page = open('/')
  await userEvent.click(await screen.findByRole('button', { name: 'Failed only' }, LONG))
  const jobs = await panel('Jobs')
  await waitFor(() => expect(jobs.queryByRole('link', { name: 'gpt-7b' })).toBeNull(), LONG)
  expect(jobs.getByRole('link', { name: 'moe-small' })).toBeTruthy()
  expect(asked.some(each => each.path.startsWith('/api/v1/jobs?') && each.path.includes('state=failed'))).toBe(true)
  expect(page.at()).toContain('failed=true')
})

test('a job begins with a sentence of what it does and what comes next', async () => {
  serve()
  open('/jobs/gpt-7b')
  const state = await panel('State')
  expect((await state.findByText(/Trains on TP2×PP2×DP2/, {}, LONG)).textContent).toContain('It switches at a step boundary')
  expect((await state.findByText(/First error: rank 5 on b-1/, {}, LONG))).toBeTruthy()
})

test('what interruptions cost stands beside what spot saved and what restarts would have cost', async () => {
  serve()
  open('/jobs/gpt-7b')
  const money = await panel('Goodput and dollars')
  for (const figure of ['96.2 %', '$211.40', '$4.31', '$389.20', '$14.30']) expect((await money.findAllByText(figure, {}, LONG)).length).toBeGreaterThan(0)
})

test('every mark of the timeline leads to its incident', async () => {
  serve()
  open('/jobs/gpt-7b')
  const marks = within(await screen.findByRole('list', { name: 'Handoffs and starts' }, LONG))
  const links = marks.getAllByRole('link').map(each => each.getAttribute('href'))
  expect(links).toEqual(['/incidents/2', '/incidents/3', '/incidents/4'])
})

test('an incident reads as a post-mortem: story, critical path, decision, channels with what they said', async () => {
  serve()
  open('/incidents/2')
  expect(await screen.findByText(/imds announced the interruption of a-2, 2 min ahead\. gpt-7b went on as TP2×PP1×DP3/, {}, LONG)).toBeTruthy()
  expect(screen.getByText('decide → build the new world → stream state → replay gradients → switch')).toBeTruthy()
  expect(within(screen.getByRole('region', { name: 'Decision' })).getByText(/takes 24.1 s a step/)).toBeTruthy()
  expect(screen.getByText(/EC2 Spot Instance Interruption Warning/)).toBeTruthy()
  expect(screen.getByText(done.certificate!)).toBeTruthy()
})

test.each([true, false])('after a move the page says how early the node was safe, and counts no more (its notice is open: %s)', async isOpen => {
  serve((_, path) => path === '/api/v1/incidents/2' ? { body: { ...incident, open: isOpen, deadline_at: new Date(Date.parse(incident.first_seen_at) + (isOpen ? 4e9 : 120_000)).toISOString(), notice_to_safe_s: isOpen ? 4e6 - 78 : 41.3 } } : undefined)
  open('/incidents/2')
  expect(await screen.findByText(isOpen ? 'safe 1 min 18 s before the deadline' : 'safe 1 min 19 s before the deadline', {}, LONG)).toBeTruthy()
  expect(screen.queryByRole('timer')).toBeNull()
  expect(screen.getByText('a-2 is needed no more')).toBeTruthy()
})

test('failed only and open only ask the service, so that what stands on older pages is found too', async () => {
  const asked = serve()
  open('/incidents')
  await userEvent.click(await screen.findByLabelText('failed only', {}, LONG))
  expect(await screen.findByRole('link', { name: '3 · b-1' }, LONG)).toBeTruthy()
  await waitFor(() => expect(screen.queryByRole('link', { name: '2 · a-2' })).toBeNull(), LONG)
  expect(asked.some(each => each.path.startsWith('/api/v1/incidents?') && each.path.includes('failed=true') && !each.path.includes('open='))).toBe(true)
})

test('incidents are listed with outcome, pause and dollars', async () => {
  serve()
  open('/incidents')
  const row = (await screen.findByRole('link', { name: '2 · a-2' }, LONG)).closest('tr')!
  for (const part of ['moved', '312 ms', '$0.021', '84.2 GB']) expect(row.textContent).toContain(part)
})

test('the handoffs of a job stand above the wires that they go over, each with what stands in its way', async () => {
  serve()
  open('/jobs/gpt-7b/handoffs')
  const wires = await panel('Wires between its nodes')
  const row = (name: string) => wires.getByText(name, { selector: '.chip' }).closest('tr')!.textContent!
  await wires.findByText(/84.0 GB of its state move in 25.5 s, in the pause/, {}, LONG)
  expect(row('relay')).toMatch(/1.10 GB\/s.*0.21 ms.*another machine/)
  expect(row('gloo')).toMatch(/400.0 MB\/s.*no relay listens on this machine/)
  expect(row('none')).toMatch(/a-1 did not answer within 40 s/)
})

test('a handoff page has its waterfall', async () => {
  serve()
  open(`/handoffs/${done.handoff_id}`)
  const phases = await panel('Phases')
  expect(await phases.findByText('stream state', {}, LONG)).toBeTruthy()
})

test('a handoff page says what each way was expected to cost, what is a guess, and what it did cost', async () => {
  serve()
  open(`/handoffs/${done.handoff_id}`)
  const ways = await panel('Training time lost, by way')
  const row = (name: string | RegExp) => ways.getByText(name).closest('tr')!.textContent!
  expect(row('live (chosen)')).toMatch(/900 ms.*1.40 s.*300 ms.*2.60 s.*3 handoffs/)
  expect(row(/^stop and copy/)).toMatch(/35.0 s guess.*35.9 s.*no handoff yet/)
  expect(row('measured')).toMatch(/700 ms.*1.10 s.*312 ms.*2.10 s/)
})

test('stopping a job names the job, every node and the open handoff, and sends the reason', async () => {
  const asked = serve()
  open('/jobs/gpt-7b')
  await userEvent.click(await screen.findByRole('button', { name: 'Stop' }, LONG))
  const dialog = within(screen.getByRole('dialog', { hidden: true }))
  for (const name of ['gpt-7b', 'a-1', 'a-2', 'b-1', 'b-2']) expect(dialog.getByText(name)).toBeTruthy()
  const act = dialog.getByRole('button', { name: 'Stop job', hidden: true }) as HTMLButtonElement
  expect(act.disabled).toBe(true)
  await userEvent.type(dialog.getByLabelText(/Reason/), 'wrong data')
  await userEvent.click(act)
  await waitFor(() => expect(asked.some(each => each.method === 'POST')).toBe(true), LONG)
  const sent = asked.find(each => each.method === 'POST')!
  expect(sent.path).toBe('/api/v1/jobs/gpt-7b/stop')
  expect(decodeURIComponent(sent.headers.get('Liver-Reason')!)).toBe('wrong data')
  expect(sent.headers.get('Liver-Console')).toBe('1')
  expect(sent.headers.get('Idempotency-Key')).toMatch(/^[0-9a-f]{32}$/)
})

test('a refused action says why, and the dialog stays', async () => {
  serve((method) => method === 'POST' ? { status: 409, body: { title: 'Conflict', status: 409, detail: 'The job is stopping already.', errors: [] } } : undefined)
  open('/nodes/b-1')
  await userEvent.click(await screen.findByRole('button', { name: 'Drain' }, LONG))
  const dialog = within(screen.getByRole('dialog', { hidden: true }))
  await userEvent.type(dialog.getByLabelText(/Reason/), 'new kernel')
  await userEvent.click(dialog.getByRole('button', { name: 'Drain node', hidden: true }))
  expect(await dialog.findByText(/The job is stopping already/, {}, LONG)).toBeTruthy()
})

test('a viewer finds the buttons off, and why', async () => {
  serve((_, path) => path === '/api/v1/session' ? { body: { token_id: 't', name: 'eva', role: 'viewer', session_expires_at: null } } : undefined)
  open('/jobs/gpt-7b')
  const stop = (await screen.findByRole('button', { name: 'Stop' }, LONG)) as HTMLButtonElement
  expect(stop.disabled).toBe(true)
  expect(stop.title).toContain('Needs the role operator')
  expect((screen.getByRole('button', { name: 'Plan only' }) as HTMLButtonElement).disabled).toBe(false)
  expect(screen.queryByRole('link', { name: 'Tokens' })).toBeNull()
})

test('without a session the page asks for a token, and then shows the address that was asked for', async () => {
  let isIn = false
  serve((method, path) => {
    if (path !== '/api/v1/session') return undefined
    if (method === 'POST') isIn = true
    return isIn ? { body: session } : { status: 401, body: { title: 'Not signed in', status: 401 } }
  })
  open('/incidents/2')
  await userEvent.type(await screen.findByLabelText('Token', {}, LONG), 'liver_abc')
  await userEvent.click(screen.getByRole('button', { name: 'Sign in' }))
  expect(await screen.findByText(/a-2: interruption/, {}, LONG)).toBeTruthy()
})

test('a panel whose figures cannot be had says so, and keeps the others', async () => {
  serve((_, path) => path === '/api/v1/ledger' ? { status: 503, body: { title: 'Not now', status: 503, detail: 'The database is away.' } } : undefined)
  open('/jobs/gpt-7b')
  const money = await panel('Goodput and dollars')
  expect(await money.findByText(/The database is away/, {}, LONG)).toBeTruthy()
  expect(await screen.findByText(/Trains on TP2×PP2×DP2/, {}, LONG)).toBeTruthy()
})

test('an answer that has become old is shown as stale, not taken away', async () => {
  let isAway = false
  serve((_, path) => (isAway && path === '/api/v1/fleet' ? { status: 0 } : undefined))
  const { client } = open('/')
  const now = await panel('Now')
  expect(await now.findByText('all nodes priced', {}, LONG)).toBeTruthy()
  isAway = true
  await client.refetchQueries({ queryKey: ['/api/v1/fleet'] })
  expect(await now.findByText(/stale: /, {}, LONG)).toBeTruthy()
  expect(now.getByText('all nodes priced')).toBeTruthy()
})

test('an empty fleet says how to begin', async () => {
  serve((_, path) => (path === '/api/v1/jobs' || path === '/api/v1/nodes' ? { body: [] } : undefined))
  open('/')
  expect(await screen.findByText(/No job yet/, {}, LONG)).toBeTruthy()
  expect(await screen.findByText(/No node yet/, {}, LONG)).toBeTruthy()
})

test('a list goes on behind its page with the cursor of the service', async () => {
  const asked = serve((_, path, query) => path === '/api/v1/audit' && !query.get('cursor') ? { body: [{ audit_id: 99, at: '2026-11-24T08:00:00Z', actor: 'ines', token_id: '', role: 'operator', action: 'job.stop', target: 'x', detail: {} }], link: '</api/v1/audit?limit=100&cursor=abc>; rel="next"' } : undefined)
  open('/audit')
  await userEvent.click(await screen.findByRole('button', { name: 'More' }, LONG))
  await waitFor(() => expect(asked.some(each => each.path.includes('cursor=abc'))).toBe(true), LONG)
  expect(await screen.findByText('job.checkpoint', {}, LONG)).toBeTruthy()
})

test('a new token is shown once', async () => {
  serve(method => (method === 'POST' ? { body: { name: 'ci', token: 'liver_secret' } } : undefined))
  open('/tokens')
  await userEvent.click(await screen.findByRole('button', { name: 'Make a token' }, LONG))
  const dialog = within(screen.getByRole('dialog', { hidden: true }))
  await userEvent.type(dialog.getByLabelText('Name'), 'ci')
  await userEvent.type(dialog.getByLabelText(/Reason/), 'for the pipeline')
  await userEvent.click(dialog.getByRole('button', { name: 'Make token', hidden: true }))
  expect(await screen.findByText('liver_secret', {}, LONG)).toBeTruthy()
})

test('what if: taking a node away asks the planner, without changing anything', async () => {
  const asked = serve()
  open('/jobs/gpt-7b/what-if')
  const away = await panel('What if these nodes went?')
  await userEvent.click(await away.findByLabelText('b-1', {}, LONG))
  await waitFor(() => expect(asked.some(each => each.path.endsWith('/plan?without=b-1'))).toBe(true), LONG)
  expect(await away.findByText('three nodes stay', {}, LONG)).toBeTruthy()
  expect((await panel('What if it had another number of nodes?')).getByText('TP2×PP1×DP3')).toBeTruthy()
  expect(asked.every(each => each.method === 'GET')).toBe(true)
})

const replays = (refusal?: object) => serve((method, path) => path !== '/api/v1/what-if' ? undefined : method === 'POST' && refusal ? { status: 422, body: refusal } : { body: replayed })

test('a trace file is read in the browser and sent with the knobs; policies stand side by side with what each lost and why', async () => {
  const asked = replays()
  open('/jobs/gpt-7b/what-if')
  const form = within(await screen.findByRole('form', { name: 'Replay' }, LONG))
  await userEvent.click(form.getByRole('button', { name: 'A file' }))
  await userEvent.click(form.getByRole('button', { name: 'Replay' }))
  expect(form.getByRole('alert').textContent).toBe('choose a file')
  await userEvent.upload(form.getByLabelText('Trace file'), new File(['0,add,a\n60000,remove,a\n'], 'two days.csv', { type: 'text/csv' }))
  await userEvent.type(form.getByLabelText(/^Notice/), '30')
  await userEvent.click(form.getByLabelText(/machines carry every change/))
  await userEvent.click(form.getByRole('button', { name: 'Replay' }))
  const policies = await panel('How it would have gone')
  expect(asked.find(each => each.method === 'POST')!.body).toEqual({ job: 'gpt-7b', trace: { name: 'two days.csv', text: '0,add,a\n60000,remove,a\n', format: 'auto' }, machines: true, knobs: { notice_s: 30 } })
  expect(policies.getByText(/LiveR makes 90.0 % of the tokens/)).toBeTruthy()
  expect(policies.getByText('guess')).toBeTruthy()
  expect(policies.getByText(/by the machines: 3 live active, 1 start active, 2 handoffs refused/)).toBeTruthy()
  const lost = within((await panel('Tokens lost, by cause')).getByRole('rowheader', { name: 'LiveR' }).closest('tr')!)
  for (const share of ['2.0 %', '3.0 %', '4.0 %', '1.0 %', '10.0 %']) expect(lost.getByText(share)).toBeTruthy()
  expect(screen.queryByText(/not all of it has a cause/)).toBeNull()
})

test('what the service refuses stands at the field that it is about', async () => {
  replays({ title: 'Invalid', status: 422, detail: 'knobs.gang: too many', errors: [{ field: 'knobs.gang', rule: 'more than the trace has' }] })
  open('/jobs/gpt-7b/what-if')
  const form = within(await screen.findByRole('form', { name: 'Replay' }, LONG))
  await userEvent.click(form.getByRole('button', { name: 'Replay' }))
  const field = form.getByLabelText(/^Fewest nodes/)
  await waitFor(() => expect(field.getAttribute('aria-invalid')).toBe('true'), LONG)
  expect(form.getByRole('alert').textContent).toBe('more than the trace has')
})

test('a decision shows what the policy wants the job to hold beside its alternatives', async () => {
  serve()
  open('/jobs/gpt-7b/decisions')
  await userEvent.click((await screen.findAllByRole('button', { name: /Show 2 alternatives/ }, LONG))[0]!)
  expect(await screen.findByText(/Should have TP2×PP1×DP4 on 4 nodes and 1 spare in zone-1/, {}, LONG)).toBeTruthy()
  expect(screen.getByText(/no use for a-9/)).toBeTruthy()
  expect(screen.getByText('5 a in zone-1')).toBeTruthy()
})

test('an address that cannot be decoded leads to no screen, and stays what it was', async () => {
  serve()
  for (const address of ['/jobs/%E0%A4%A', '/jobs/gpt-7b/%ff', '/%']) {
    const page = open(address)
    expect(await screen.findByText('There is no such page', {}, LONG)).toBeTruthy()
    expect(page.at()).toBe(address)
    page.unmount()
  }
})

test('whatever the API says reaches the screens with nothing in it that turns the direction of writing', async () => {
  serve(method => (method === 'PUT' ? { status: 422, body: { title: 'Invalid', detail: 'no \u202e' } } : { body: [{ reason: 'lost \u202e0' }] }))
  expect(await get('/api/v1/jobs')).toEqual([{ reason: 'lost \\u202e0' }])
  expect((await getPage('/api/v1/jobs')).items).toEqual([{ reason: 'lost \\u202e0' }])
  expect(await change('POST', '/api/v1/jobs')).toEqual([{ reason: 'lost \\u202e0' }])
  await expect(change('PUT', '/api/v1/jobs')).rejects.toThrow('no \\u202e')
})
