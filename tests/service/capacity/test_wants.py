"""What a policy wants is asked for in requests that end when it is there, is wanted no longer, or does not come."""

from sqlalchemy import select

from service.capacity.tables import RequestRow
from service.capacity.wants import HAS_THEM, NOTHING_CAME, short_pools, store_wants
from service.context import Context
from service.planner.weighing.wanted import PoolWant
from service.policy.types import Market
from tests.service.conftest import FakeClock
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


def test_a_want_is_one_open_request_however_often_it_is_said_and_ends_when_the_machines_are_there(context, clock):
    for _ in range(3):
        assert asked(context, clock, spot(2)) == [("a", "spot", 2, "")]
    clock.advance(60)
    assert asked(context, clock, spot(1)) == [("a", "spot", 1, "")]
    assert asked(context, clock, spot(0)) == [("a", "spot", 1, HAS_THEM)]
    assert asked(context, clock, spot(3))[1:] == [("a", "spot", 3, "")]


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


def test_requests_that_ended_are_dropped_after_an_hour_and_those_of_other_jobs_are_left_alone(context, clock):
    asked(context, clock, spot(1))
    asked(context, clock, spot(1, "b"), job_id="another-job")
    asked(context, clock)
    clock.advance(3_601)
    assert asked(context, clock) == [("b", "spot", 1, "")]


def test_a_job_with_a_policy_asks_for_what_it_misses_and_no_longer_when_it_is_stopped(fleet: Fleet):
    fleet.add("a", "b")
    fleet.client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 2.0})
    fleet.submit(policy={"usd_per_mtok": 1e4, "spares_max": 0}, layouts={"allowed": ["TP2xPP2", "TP2"]})
    for _ in range(10):
        fleet.round(seconds=5.0)

    def requests() -> list[tuple]:
        with fleet.context.sessions() as session:
            rows = session.scalars(select(RequestRow).where(RequestRow.market.is_not(None))).all()
            return [(row.pool, row.provider, row.machines, row.ended_at is None) for row in rows]

    assert requests() == [("spot-a", "aws", 2, True)]
    fleet.client.post(f"/api/v1/jobs/{fleet.job_id}/stop")
    fleet.round()
    assert requests() == [("spot-a", "aws", 2, False)]
