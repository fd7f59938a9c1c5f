"""The console in a browser, against a real service and its PostgreSQL: every screen, an incident as it happens,
actions, roles, a restart of the service, and the questions that operators ask."""

import re

import pytest

from agent.protocol.values import HandoffState
from liver_core.layout import ParallelLayout
from tests.cluster.real_service import RealService, real_service, service_folder
from tests.e2e.conftest import NARROW, PATIENCE_MS, SERVE, SHOTS, Visitor, sync_api
from tests.e2e.story import SETTINGS, Story, story_in, until
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
expect = sync_api.expect
CLICKS_MAX = 2


def screens(story: Story) -> dict[str, str]:
    incident, handoff = story.get("/api/v1/incidents")[-1], story.get("/api/v1/handoffs")[-1]
    job = f"/jobs/{story.job_id}"
    return {
        "fleet": "/", "job": job, "job-handoffs": f"{job}/handoffs", "job-checkpoints": f"{job}/checkpoints",
        "job-logs": f"{job}/logs", "job-metrics": f"{job}/metrics", "job-decisions": f"{job}/decisions",
        "job-what-if": f"{job}/what-if", "job-file": f"{job}/file", "incidents": "/incidents",
        "incident": f"/incidents/{incident['incident_id']}", "handoffs": "/handoffs",
        "handoff": f"/handoffs/{handoff['handoff_id']}", "node": "/nodes/node-a", "audit": "/audit",
        "tokens": "/tokens",
    }  # fmt: skip


def prose(text: str) -> str:
    """As the console writes it."""
    return re.sub(r"(?<=[A-Z]P\d)x(?=[A-Z])", "×", text).replace("+-", "±")


def test_a_login_shows_what_was_asked_for_and_a_logout_hides_it(visit, story, service):
    somebody = visit(None)
    somebody.go(f"/jobs/{story.job_id}")
    field = somebody.page.get_by_label("Token")
    field.fill("liver_0_wrong")
    somebody.page.get_by_role("button", name="Sign in").click()
    expect(somebody.page.get_by_role("alert")).to_be_visible()
    field.fill(service.token("operator"))
    somebody.page.get_by_role("button", name="Sign in").click()
    expect(somebody.page.get_by_role("heading", name="gpt-1.5b", exact=True)).to_be_visible()
    somebody.page.get_by_role("button", name="Sign out").click()
    expect(somebody.page.get_by_label("Token")).to_be_visible()


@pytest.mark.parametrize("scheme", sample(["light", "dark"], "light"))
def test_every_screen_shows_its_data_and_everybody_can_read_it(visit, story, scheme):
    admin = visit("admin", color_scheme=scheme)
    found = {}
    for name, path in screens(story).items():
        admin.go(path)
        expect(admin.page.get_by_role("alert")).to_have_count(0)
        admin.page.screenshot(path=SHOTS / f"{name}-1440{'-dark' if scheme == 'dark' else ''}.png", full_page=True)
        if violations := admin.violations():
            found[name] = violations
    assert not found
    ink = admin.page.evaluate("getComputedStyle(document.querySelector('main')).color")
    brightness = sum(map(float, re.findall(r"[\d.]+", ink)[:3])) / 3
    assert (brightness < 128) is (scheme == "light"), ink


@pytest.mark.thorough
@pytest.mark.parametrize("axis", sample(["time", "step", "dollars"], "time"))
def test_the_first_view_of_a_job_draws_its_timeline(visit, story, axis):
    viewer = visit("operator")
    viewer.go(f"/jobs/{story.job_id}?x={axis}")
    for name in ("Loss", "Tokens a second", "Goodput by cause"):
        expect(viewer.page.get_by_role("img", name=name, exact=True).locator("canvas")).to_be_visible()
    mark = viewer.page.get_by_label("Handoffs and starts").get_by_role("link").last
    expect(mark).to_have_attribute("href", re.compile("^/(incidents|handoffs)/"))
    viewer.page.screenshot(path=SHOTS / f"job-by-{axis}-1440.png", full_page=True)


@pytest.mark.thorough
def test_every_screen_fits_a_telephone(visit, story):
    admin = visit("admin", viewport=NARROW, has_touch=True)
    wide = []
    for name, path in screens(story).items():
        admin.go(path)
        admin.page.screenshot(path=SHOTS / f"{name}-390.png", full_page=True)
        over = admin.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if over > 0:
            wide.append(f"{name} is {over} pixels too wide")
    assert not wide


@pytest.mark.thorough
def test_an_incident_is_seen_from_the_notice_to_the_commit(browser):
    with (
        service_folder() as folder,
        real_service(RealService, folder, SERVE, SETTINGS) as service,
        story_in(service) as story,
    ):
        story.begin()
        watcher = Visitor(browser, service.url, service.token("operator"))
        watcher.go("/")
        number = story.notice("node-d", deadline_s=600)
        expect(watcher.page.get_by_text("node-d").first).to_be_visible()
        watcher.page.get_by_role("link", name="node-d").first.wait_for()
        watcher.sees(re.compile(r"\d:\d\d left"))
        watcher.go(f"/incidents/{number}")
        watcher.sees("aws-imds")
        watcher.sees('"action": "terminate"')
        handoff = story.stream("node-d", ParallelLayout(pp=3), moved=100_000_000)
        watcher.sees("streaming")
        handoff = story.say(handoff, HandoffState.STREAMING, 2, bytes_moved=900_000_000)
        watcher.sees("900.0 MB")
        story.commit(handoff)
        expect(watcher.page.get_by_text("moved", exact=True).first).to_be_visible(timeout=PATIENCE_MS)
        watcher.sees("420 ms")
        watcher.sees(re.compile(r"safe 9 min \d+ s before the deadline"))
        expect(watcher.page.get_by_role("timer")).to_have_count(0)
        watcher.page.screenshot(path=SHOTS / "incident-moved-1440.png", full_page=True)
        assert not watcher.errors
        watcher.context.close()


def test_an_action_names_what_it_touches_asks_why_and_stands_in_the_audit_log(visit, story):
    operator = visit("operator")
    operator.go(f"/jobs/{story.job_id}")
    operator.page.get_by_role("button", name="Checkpoint").click()
    dialog = operator.page.get_by_role("dialog")
    for name in (story.job_id, *story.world().node_ids()):
        expect(dialog).to_contain_text(name)
    confirm = dialog.get_by_role("button", name="Write checkpoint")
    expect(confirm).to_be_disabled()
    dialog.get_by_label("Reason").fill("before the upgrade – 10 %")
    operator.page.screenshot(path=SHOTS / "action-1440.png")
    confirm.click()
    expect(dialog).to_have_count(0)
    until("the checkpoint to be asked for", lambda: story.get(f"/api/v1/jobs/{story.job_id}")["checkpoint_asked"])
    assert story.get("/api/v1/audit", target=story.job_id)[0]["detail"]["why"] == "before the upgrade – 10 %"
    operator.go("/audit")
    operator.sees("before the upgrade")


@pytest.mark.thorough
def test_a_viewer_may_look_and_no_more(visit, story, service):
    admin = {"Authorization": f"Bearer {service.token('admin')}"}
    made = story.client.post("/api/v1/tokens", json={"role": "viewer", "name": "a guest"}, headers=admin).json()
    viewer = visit(token=made["token"])
    viewer.go(f"/jobs/{story.job_id}")
    stop = viewer.page.get_by_role("button", name="Stop")
    assert stop.count() == 0 or stop.is_disabled() or stop.get_attribute("aria-disabled") == "true"
    expect(viewer.page.get_by_role("link", name="Tokens")).to_have_count(0)
    answer = viewer.page.evaluate(
        "path => fetch(path, {method: 'POST', headers: {'Liver-Console': '1'}}).then(answer => answer.status)",
        f"/api/v1/jobs/{story.job_id}/stop",
    )
    assert answer == 403
    # And once the token is revoked, the page asks who one is.
    story.client.post(f"/api/v1/tokens/{made['token_id']}/revoke", headers=admin).raise_for_status()
    expect(viewer.page.get_by_label("Token")).to_be_visible(timeout=PATIENCE_MS)


@pytest.mark.thorough
def test_a_page_outlives_a_restart_of_the_service(browser):
    """On the same port; the session is in the database, and the page finds back by itself."""
    with service_folder() as folder:
        with real_service(RealService, folder, SERVE, SETTINGS) as first, story_in(first) as story:
            story.begin()
            port = first.url.rpartition(":")[2]
            watcher = Visitor(browser, first.url, first.token("operator"))
            watcher.go("/")
            standing = watcher.page.locator(".link-state")
            expect(standing).to_contain_text("live")
        expect(standing).not_to_contain_text("live", timeout=PATIENCE_MS)
        watcher.sees("gpt-1.5b")
        with real_service(RealService, folder, SERVE, SETTINGS | {"PORT": port}) as second, story_in(second) as again:
            expect(standing).to_contain_text("live", timeout=PATIENCE_MS)
            again.agents, again.job_id, again.step, again.at = story.agents, story.job_id, story.step, story.at
            for agent in again.agents.values():
                agent.client = again.client
            again.train(30)
            watcher.sees(re.compile(rf"\b{again.step}\b"))
            assert not watcher.errors
            watcher.context.close()


TRACE = "\n".join(
    f"{at * 600_000},{what}"
    for at, what in (
        (0, "add,a"),
        (0, "add,b"),
        (0, "add,c"),
        (0, "add,d"),
        (1, "remove,b"),
        (3, "add,e"),
        (6, "remove,a"),
    )
)


@pytest.mark.thorough
def test_a_job_is_replayed_on_a_trace_and_every_policy_stands_with_what_it_lost(visit, story):
    """What the page shows is what the API answers to the same question, and nothing is written in the audit log."""
    viewer = visit("operator")
    before = len(story.get("/api/v1/audit", limit=1_000))
    viewer.go(f"/jobs/{story.job_id}/what-if")
    form = viewer.page.get_by_role("form", name="Replay")
    form.get_by_role("button", name="A file").click()
    form.get_by_label("Trace file").set_input_files(
        {"name": "an hour.csv", "mimeType": "text/csv", "buffer": TRACE.encode()}
    )
    form.get_by_label("Notice").fill("-1")
    form.get_by_role("button", name="Replay").click()
    expect(form.get_by_role("alert")).to_have_text("must be at least 0")
    form.get_by_label("Notice").fill("30")
    form.get_by_role("button", name="Replay").click()
    panel = viewer.page.get_by_role("region", name="How it would have gone")
    expect(panel).to_be_visible(timeout=PATIENCE_MS)
    asked = {"job": story.job_id, "trace": {"name": "an hour.csv", "text": TRACE}, "knobs": {"notice_s": 30}}
    answer = story.client.post("/api/v1/what-if", json=asked).raise_for_status().json()
    for run in answer["policies"]:
        row = panel.get_by_role("row").filter(has_text=f"{run['goodput'] * 100:.1f} %")
        expect(row.filter(has_text=f"{round(run['tokens']):,}").first).to_be_visible()
        lost = sum(run["tokens_lost_by"].values())
        assert abs(lost - (answer["ideal_tokens"] - run["tokens"])) <= 1e-6 * answer["ideal_tokens"]
    gap = 1 - answer["policies"][0]["tokens"] / answer["ideal_tokens"]
    losses = viewer.page.get_by_role("region", name="Tokens lost, by cause")
    expect(losses.get_by_role("row").filter(has_text="LiveR")).to_contain_text(f"{gap * 100:.1f} %")
    for name in ("Nodes", "Tokens made"):
        expect(viewer.page.get_by_role("img", name=name, exact=True).locator("canvas")).to_be_visible()
    viewer.page.screenshot(path=SHOTS / "job-replay-1440.png", full_page=True)
    assert not viewer.violations()
    viewer.page.set_viewport_size(NARROW)
    viewer.page.screenshot(path=SHOTS / "job-replay-390.png", full_page=True)
    assert not viewer.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert len(story.get("/api/v1/audit", limit=1_000)) == before


def test_the_keyboard_alone_leads_to_a_job(visit, story):
    somebody = visit("operator")
    somebody.go("/")
    keys = somebody.page.keyboard
    keys.press("Tab")
    expect(somebody.page.locator(":focus")).to_have_text("Skip to the content")
    for _ in range(60):
        keys.press("Tab")
        if somebody.page.evaluate("document.activeElement.getAttribute('href')") == f"/jobs/{story.job_id}":
            break
    outline = somebody.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    keys.press("Enter")
    expect(somebody.page.get_by_role("heading", name="gpt-1.5b", exact=True)).to_be_visible()
    somebody.page.go_back()
    expect(somebody.page).to_have_url(f"{somebody.url}/")


def test_is_my_job_alive(visit, story):
    story.train(5)
    operator = visit("operator")
    operator.go("/")
    operator.click(operator.page.get_by_role("link", name=story.job_id).first)
    outlook = story.get(f"/api/v1/jobs/{story.job_id}/outlook")
    assert outlook["level"] in ("good", "busy")
    operator.sees(prose(outlook["now"]))
    assert operator.clicks <= CLICKS_MAX


@pytest.mark.thorough
def test_what_did_last_night_cost_me_and_why(visit, story):
    operator = visit("operator")
    operator.go("/")
    operator.click(operator.page.get_by_role("link", name=story.job_id).first)
    operator.settle()
    operator.sees("Cost of interruptions")
    operator.sees("Saved by spot")
    ledger = story.get("/api/v1/ledger", job_id=story.job_id)
    shown = operator.page.locator("main").inner_text()
    amounts = [float(text.replace(",", "")) for text in re.findall(r"\$([0-9][0-9.,]*)", shown)]
    for name in ("dollars", "interruptions_dollars", "saved_dollars"):
        # The ledger goes on while the page shows it.
        assert any(abs(amount - ledger[name]) <= 0.1 * ledger[name] + 1e-4 for amount in amounts), (name, ledger[name])
    operator.sees(re.compile("pause", re.IGNORECASE))
    assert operator.clicks <= CLICKS_MAX


@pytest.mark.thorough
def test_will_this_nodes_death_hurt(visit, story):
    operator = visit("operator")
    operator.go("/")
    node = story.world().node_ids()[-1]
    operator.click(operator.page.get_by_role("link", name=node).first)
    plan = story.get(f"/api/v1/jobs/{story.job_id}/plan", without=node)
    operator.sees(prose(plan["verdict_reason"])[:30] if plan["layout"] is None else plan["layout"].replace("x", "×"))
    assert operator.clicks <= CLICKS_MAX


@pytest.mark.thorough
def test_why_did_it_move_to_this_layout(visit, story):
    operator = visit("operator")
    operator.go("/")
    operator.click(operator.page.get_by_role("link", name=story.job_id).first)
    operator.click(operator.page.get_by_role("link", name="Decisions"))
    decisions = story.get(f"/api/v1/jobs/{story.job_id}/decisions")
    newest = next(item for item in decisions if item["action"] != "nothing")
    operator.sees(prose(newest["reason"])[:25])
    assert operator.clicks <= CLICKS_MAX


@pytest.mark.thorough
def test_did_anything_get_lost(visit, story):
    operator = visit("operator")
    operator.go("/")
    operator.click(operator.page.get_by_role("link", name="Incidents"))
    incident = story.get("/api/v1/incidents", job_id=story.job_id)[-1]
    row = operator.page.get_by_role("row").filter(has_text=incident["node_id"]).last
    expect(row).to_contain_text("moved")
    operator.click(row.get_by_role("link").first)
    operator.sees("No step was lost" if incident["lost_steps"] == 0 else f"{incident['lost_steps']}")
    assert operator.clicks <= CLICKS_MAX
