"""What restarts would have cost, by what the job itself was seen to do."""

from datetime import timedelta

import pytest

from agent.protocol.sync import CheckpointFact, HandoffMeasures
from liver_core.handoff import RankStage
from liver_core.layout import ParallelLayout
from service.ledger.queries import CauseSum
from service.ledger.restarts import Observed, observed, restarts_instead
from service.ledger.tables import Cause
from tests.service.fake_agent import mirror, roster

PAID = [CauseSum(Cause.PRODUCTIVE, 90.0, 9.0), CauseSum(Cause.PAUSE, 10.0, 1.0)]


def test_each_move_would_have_been_a_save_of_the_old_world_and_a_start_of_the_new_one():
    seen = Observed(moves=[(4, 3), (3, 4)], saves_s=[1.0, 2.0, 9.0], restarts_s=[10.0, 30.0], starts_s=[500.0])
    found = restarts_instead(seen, PAID)
    assert (found.save_s, found.start_s) == (2.0, 20.0)
    assert found.slot_seconds == (4 * 2 + 3 * 20) + (3 * 2 + 4 * 20)
    assert found.dollars == pytest.approx(0.1 * found.slot_seconds)
    assert (found.handoffs, found.handoffs_slot_seconds) == (2, 10.0)
    assert "estimate" in found.estimate and "restart" in found.estimate


def test_first_starts_stand_for_restarts_until_one_was_seen():
    seen = Observed(moves=[(4, 3)], saves_s=[1.0], restarts_s=[], starts_s=[40.0])
    found = restarts_instead(seen, PAID)
    assert found.start_s == 40.0 and "first start" in found.estimate


@pytest.mark.parametrize(
    ("saves_s", "starts_s", "missing"), [([], [40.0], "checkpoint"), ([1.0], [], "start"), ([], [], "checkpoint")]
)
def test_what_was_never_seen_is_null_and_said(saves_s, starts_s, missing):
    found = restarts_instead(Observed(moves=[(4, 3)], saves_s=saves_s, restarts_s=[], starts_s=starts_s), PAID)
    assert (found.slot_seconds, found.dollars) == (None, None)
    assert found.estimate == f"no estimate yet: this job has not been seen to complete a {missing}"


def test_the_api_says_what_restarts_would_have_cost_once_a_start_and_a_save_were_seen(running, client, clock, database):
    job_id, agent, other = running
    asked = {"params": {"job_id": job_id}}
    assert client.get("/api/v1/ledger/restarts", **asked).json()["slot_seconds"] is None
    client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 3600, "egress_usd_per_gb": 0.01})
    # The first step is reported five seconds after the start was decided, which was a second ago.
    clock.advance(4)
    saved = CheckpointFact(
        job_id=job_id, generation=1, step=1, path="/checkpoints/1", finished_utc=clock(), seconds=2.0
    )
    for each, checkpoints in ((agent, (saved,)), (other, ())):
        each.sync(ranks=(each.rank(each.job_order(), step=1),), checkpoints=checkpoints)
    measures = HandoffMeasures(pause_s=0.5, bytes_moved=3 * 10**9)
    target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
    agent.sync(handoffs=(mirror(agent.roster(), target, clock() + timedelta(seconds=1), measures=measures),))
    found = client.get("/api/v1/ledger/restarts", **asked).json()
    assert (found["save_s"], found["start_s"], found["handoffs"]) == (2.0, 5.0, 1)
    assert (found["slot_seconds"], found["dollars"]) == (2 * 2.0 + 2 * 5.0, pytest.approx(14.0))
    assert found["handoffs_slot_seconds"] == 2 * 0.5
    assert client.get("/api/v1/ledger", **asked).json()["egress"] == {"bytes": 3 * 10**9, "dollars": 0.03}
    assert client.get("/api/v1/ledger/restarts", params={"job_id": "none"}).status_code == 404
    with database.sessions() as session:
        assert observed(session, job_id) == Observed([(2, 2)], [2.0], [], [5.0])
        for other_id in (job_id[:-1], f"{job_id}0"):
            assert observed(session, other_id) == Observed([], [], [], []), "of this job, not of those beside it"


def test_bytes_without_a_price_cost_an_unknown_amount(running, client, clock):
    job_id, agent, _ = running
    assert client.get("/api/v1/ledger").json()["egress"] == {"bytes": 0, "dollars": 0.0}
    target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
    moved = mirror(agent.roster(), target, clock(), measures=HandoffMeasures(bytes_moved=100))
    agent.sync(handoffs=(moved,), ranks=(agent.rank(agent.job_order(), stage=RankStage.TRAINING),))
    assert client.get("/api/v1/ledger").json()["egress"] == {"bytes": 100, "dollars": None}
    generations = client.get("/api/v1/ledger/generations", params={"job_id": job_id}).json()
    assert [item["generation"] for item in generations] == [2, 1]
