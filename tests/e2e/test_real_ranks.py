"""A spot notice for a node of a real job, watched in a browser from its first word to the commit: service with embedded
PostgreSQL, agents, a metadata endpoint that speaks AWS's protocol, Megatron ranks. Nothing here is played."""

import re
from collections.abc import Iterator

import pytest

from deploy.local.api import interrupt
from tests.cluster.real_service import STEPS_AFTER, RealJob, real_job
from tests.e2e.conftest import SHOTS, Visitor, sync_api

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
expect = sync_api.expect
WARNING_S, PATIENCE_S = 240, 240
PATIENCE_MS, LOOK_MS = PATIENCE_S * 1_000, 200


@pytest.fixture
def scene() -> Iterator[RealJob]:
    """On two of three nodes that have a price."""
    with real_job(RealJob, patience_s=PATIENCE_S) as job:
        job.api.put("/api/v1/pools/demo-spot/price", {"price_usd_per_hour": 3.6, "on_demand_usd_per_hour": 12.0})
        job.start("n1", "n2", "n3")
        yield job


def test_a_notice_for_a_node_with_a_real_rank_is_watched_to_its_commit(browser, scene):
    token = (scene.cluster.folder / "tokens" / "operator.token").read_text().strip()
    watcher = Visitor(browser, scene.cluster.url, token)
    watcher.go("/")
    leaver = scene.job()["nodes"][0]
    interrupt(scene.cluster.nodes[leaver].imds_url, ends_in_s=WARNING_S)
    # It stands there without a reload, with what is left; one click leads to its page.
    going = watcher.page.get_by_role("region", name="Nodes that will go")
    expect(going.get_by_role("link", name=leaver)).to_be_visible(timeout=PATIENCE_MS)
    expect(going.get_by_role("timer")).to_have_text(re.compile(r"\d:\d\d left"))
    going.get_by_role("link", name=leaver).click()
    expect(watcher.page.get_by_role("heading", name=f"{leaver}: interruption")).to_be_visible()
    expect(watcher.page.get_by_text("moved", exact=True).first).to_be_visible(timeout=PATIENCE_MS)
    expect(watcher.page.locator("main")).to_contain_text(re.compile("safe .* before the deadline"), timeout=PATIENCE_MS)

    [incident] = scene.api.get("/api/v1/incidents", node_id=leaver)
    shown = scene.api.get(f"/api/v1/incidents/{incident['incident_id']}")
    [answer] = shown["handoffs"]
    handoff, bars = answer["handoff"], answer["waterfall"]["bars"]
    assert (handoff["state"], handoff["leaving"], shown["lost_steps"]) == ("active", [leaver], 0)
    watcher.go(f"/incidents/{incident['incident_id']}")
    watcher.sees("No step was lost")
    watcher.sees(handoff["certificate"])
    watcher.sees(f"step {handoff['cutover_step']:,}")
    watcher.sees("aws-imds")
    labels = {bar["name"]: bar["label"] for bar in bars}
    watcher.sees(" → ".join(labels[name] for name in answer["waterfall"]["critical_path"]))
    watcher.page.screenshot(path=SHOTS / "incident-real-1440.png", full_page=True)
    # And the job goes on: its page says so, and counts the steps that it makes.
    watcher.go(f"/jobs/{scene.job_id}")
    before = scene.job()["last_step"]
    scene.wait("more steps", lambda: scene.job()["last_step"] >= before + STEPS_AFTER)
    bar = watcher.page.get_by_role("progressbar", name="Steps done")
    # Looked at from here, since the page's policy lets in no script of a test.
    for _ in range(PATIENCE_MS // LOOK_MS):
        if int(bar.get_attribute("aria-valuenow") or 0) > before:
            break
        watcher.page.wait_for_timeout(LOOK_MS)
    else:
        raise AssertionError(f"the page still shows {bar.get_attribute('aria-valuenow')} steps, there were {before}")
    expect(bar).to_be_visible()
    watcher.page.screenshot(path=SHOTS / "job-real-1440.png", full_page=True)
    assert not watcher.errors
    watcher.context.close()
