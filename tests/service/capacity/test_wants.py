"""What a policy wants is asked for in requests that end when it is there, is wanted no longer, or does not come."""

import pytest
from sqlalchemy import select

from agent.protocol.sync import JobFinished
from liver_core.handoff import Reason
from service.capacity.tables import InstanceRow, RequestRow
from service.capacity.wants import HAS_THEM, JOB_ENDED, NOTHING_CAME, short_pools, store_wants
from service.context import Context
from service.planner.weighing.wanted import PoolWant
from service.policy.types import Market
from service.reconcilers import upkeep
from tests.service.conftest import FakeClock
from tests.service.fake_agent import another_job
from tests.service.reconcilers.conftest import Fleet, fleet

__all__ = ["fleet"]
JOB_ID, ACQUIRE_S = "demo-1", 120.0


def spot(missing: int, pool: str = "a") -> PoolWant:
    return PoolWant(pool, "", Market.SPOT, 1.0, held=2, hold=2 + missing)


def asked(context: Context, clock: FakeClock, *wants: PoolWant, job_id: str = JOB_ID) -> list[tuple]:
    """The requests after the job has said what it wants, the oldest first."""
    with context.sessions.begin() as session:
        store_wants(session, job_id, wants, acquire_s=ACQUIRE_S, now=clock())
    with context.sessions() as session:
        rows = session.scalars(select(RequestRow).order_by(RequestRow.request_id)).all()
        return [(row.pool, row.market, row.machines, row.end_reason) for row in rows]


def requests(context: Context) -> list[tuple[str, str]]:
    """Those of policies, the oldest first: the pool, and why it ended."""
    of_policies = select(RequestRow).where(RequestRow.market.is_not(None)).order_by(RequestRow.request_id)
    with context.sessions() as session:
        rows = session.scalars(of_policies).all()
        assert all((row.ended_at is None) == (row.end_reason == "") for row in rows)
        return [(row.pool, row.end_reason) for row in rows]


def wanting(fleet: Fleet) -> None:
    """A job that trains on two nodes and wants two more."""
    fleet.add("a", "b")
    fleet.client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 2.0})
    fleet.submit(policy={"usd_per_mtok": 1e4, "spares_max": 0}, layouts={"allowed": ["TP2xPP2", "TP2"]})
    for _ in range(10):
        fleet.round(seconds=5.0)


def test_a_want_is_one_open_request_however_often_it_is_said_and_ends_when_the_machines_are_there(context, clock):
    for _ in range(3):
        assert asked(context, clock, spot(2)) == [("a", "spot", 2, "")]
    clock.advance(60)
    assert asked(context, clock, spot(1)) == [("a", "spot", 1, "")]
    assert asked(context, clock, spot(0)) == [("a", "spot", 1, HAS_THEM)]
    assert asked(context, clock, spot(3))[1:] == [("a", "spot", 3, "")]


def test_a_want_can_end_by_a_clock_that_is_a_little_behind_the_one_by_which_it_began(context, clock):
    """Two replicas read the database's clock each for itself."""
    asked(context, clock, spot(2))
    clock.advance(-0.5)
    assert asked(context, clock, spot(0)) == [("a", "spot", 2, HAS_THEM)]


def test_a_pool_from_which_nothing_came_counts_as_empty_for_half_an_hour(context, clock):
    bought = PoolWant("a", "", Market.ON_DEMAND, 3.0, held=0, hold=1)
    asked(context, clock, spot(2), bought)
    clock.advance(5 * ACQUIRE_S)
    ended = asked(context, clock, spot(2), bought)
    assert ended == [("a", "spot", 2, NOTHING_CAME), ("a", "on_demand", 1, "")], "on demand is waited for"
    for minutes, short in ((0, {"a"}), (29, {"a"}), (2, set())):
        clock.advance(60 * minutes)
        with context.sessions() as session:
            assert short_pools(session, JOB_ID, {"a", "b"}, now=clock()) == short
            assert not short_pools(session, "another-job", {"a", "b"}, now=clock())


def test_machines_that_come_one_by_one_are_waited_for(context, clock):
    asked(context, clock, spot(3))
    for missing in (2, 1):
        clock.advance(4 * ACQUIRE_S)
        assert asked(context, clock, spot(missing)) == [("a", "spot", missing, "")]


def test_requests_that_ended_are_dropped_after_an_hour_unless_a_machine_came_from_them(fleet: Fleet):
    context, clock = fleet.context, fleet.clock
    first, other = fleet.submit(), fleet.submit(**another_job("other"))
    asked(context, clock, spot(1, "filled"), spot(1, "a"), job_id=first)
    fleet.add("a")
    fleet.agents["a"].sync()
    with context.sessions.begin() as session:
        machine = session.scalars(select(InstanceRow)).one()
        machine.request_id = session.scalars(select(RequestRow.request_id).where(RequestRow.pool == "filled")).one()
    asked(context, clock, job_id=first)
    asked(context, clock, spot(1, "b"), job_id=other)
    clock.advance(3_599)
    assert upkeep.tick(context) == 0
    clock.advance(2)
    assert upkeep.tick(context) == 1
    assert requests(context) == [("filled", HAS_THEM), ("b", "")], "that of a job that goes on is left alone"


@pytest.mark.parametrize("failed", [None, Reason("the loss is nan", "boundary", 1)], ids=["finished", "failed"])
def test_requests_of_a_job_that_ends_by_what_its_agents_report_end_at_the_next_look(fleet: Fleet, failed):
    wanting(fleet)
    assert requests(fleet.context) == [("spot-a", "")]
    done = JobFinished(job_id=fleet.job_id, generation=1, step=1_000, failed=failed)
    fleet.agents["a"].sync(finished=(done,))
    assert fleet.job()["state"] == ("finished" if failed is None else "failed")
    for _ in range(3):
        fleet.tick()
    upkeep.tick(fleet.context)
    assert requests(fleet.context) == [("spot-a", JOB_ENDED)]
    fleet.clock.advance(3_601)
    assert upkeep.tick(fleet.context) == 1 and requests(fleet.context) == []


def test_requests_of_a_job_that_was_deleted_end_and_go_too(fleet: Fleet):
    wanting(fleet)
    fleet.agents["a"].sync(finished=(JobFinished(job_id=fleet.job_id, generation=1, step=1_000),))
    assert fleet.client.delete(f"/api/v1/jobs/{fleet.job_id}").status_code == 204
    upkeep.tick(fleet.context)
    assert requests(fleet.context) == [("spot-a", JOB_ENDED)]
    fleet.clock.advance(3_601)
    assert upkeep.tick(fleet.context) == 1 and requests(fleet.context) == []


def test_a_job_with_a_policy_asks_for_what_it_misses_and_no_longer_when_it_is_stopped(fleet: Fleet):
    wanting(fleet)
    with fleet.context.sessions() as session:
        row = session.scalars(select(RequestRow).where(RequestRow.market.is_not(None))).one()
        assert (row.pool, row.provider, row.machines, row.ended_at) == ("spot-a", "aws", 2, None)
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/stop")
    fleet.round()
    assert requests(fleet.context) == [("spot-a", HAS_THEM)]
