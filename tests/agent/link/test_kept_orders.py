"""Orders by digest: what is left out is put back from what the agent has, and never from anything else."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from agent.link.kept_orders import brought, known_of, whole
from agent.protocol.sync import JobOrder, SyncOrders
from agent.protocol.wake_up import WakeOrders
from tests.agent.stub_service import StubService
from tests.service.fake_agent import JOB


def orders(digest: str, *jobs: JobOrder, unchanged: bool = False) -> SyncOrders:
    return SyncOrders(
        orders_seq=1,
        issued_utc=datetime(2026, 1, 1, tzinfo=UTC),
        accepted_incarnation=UUID(int=1),
        accepted_report_seq=1,
        orders_digest=digest,
        unchanged=unchanged,
        jobs=jobs,
    )


@pytest.fixture
def order() -> JobOrder:
    from agent.protocol.jobfile import JobFile

    stub = StubService(JobFile.model_validate(JOB), ("a", "b"))
    stub.peers = {"a": "http://a:1", "b": "http://b:1"}
    return stub.order().model_copy(update={"neighbours": "n1"})


def test_a_first_report_names_nothing_and_a_later_one_what_the_agent_has(order):
    assert known_of(None) == {}
    assert known_of(orders("d1", order)) == {"orders_known": "d1", "neighbours_known": ("n1",)}


def test_unchanged_orders_are_those_of_the_answer_before(order):
    had = orders("d1", order)
    assert whole(orders("d1", unchanged=True), had).jobs == (order,)


@pytest.mark.parametrize("had", [None, "d0"])
def test_orders_that_are_left_out_and_that_the_agent_does_not_have_are_an_error(order, had):
    with pytest.raises(ValueError, match="leaves out orders d1, which this agent does not have"):
        whole(orders("d1", unchanged=True), None if had is None else orders(had, order))


def test_a_roster_that_is_left_out_is_put_back_with_the_addresses(order):
    changed = order.model_copy(update={"roster": None, "peers": {}, "reason": "something else"})
    (found,) = whole(orders("d2", changed), orders("d1", order)).jobs
    assert (found.roster, found.peers, found.reason) == (order.roster, order.peers, "something else")


def test_a_roster_that_is_left_out_and_that_the_agent_does_not_have_is_an_error(order):
    changed = order.model_copy(update={"roster": None, "peers": {}, "neighbours": "n2"})
    with pytest.raises(ValueError, match="leaves out the roster of job fake-job, which this agent does not have"):
        whole(orders("d2", changed), orders("d1", order))


def news(*jobs: JobOrder, orders_seq: int = 2, later_s: float = 1.0) -> WakeOrders:
    issued = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=later_s)
    return WakeOrders(orders_seq=orders_seq, issued_utc=issued, orders_digest="d2", jobs=jobs)


def test_orders_that_a_wake_up_brings_take_the_place_of_those_before_with_the_roster_that_the_agent_has(order):
    had = orders("d1", order)
    changed = order.model_copy(update={"roster": None, "peers": {}, "reason": "a node will go"})
    found = brought(news(changed), had)
    assert found is not None
    assert (found.orders_seq, found.jobs[0].reason, found.jobs[0].roster) == (2, "a node will go", order.roster)
    assert known_of(found) == {"orders_known": "d2", "neighbours_known": ("n1",)}
    # What the service has stored of the agent's reports is said by answers only.
    assert (found.accepted_incarnation, found.accepted_report_seq) == (had.accepted_incarnation, 1)


def test_orders_that_a_wake_up_brings_are_left_where_only_the_next_answer_says_what_counts(order):
    had, other = orders("d1", order), order.model_copy(update={"job_id": "other"})
    unknown = order.model_copy(update={"roster": None, "peers": {}, "neighbours": "n2"})
    assert brought(news(order), None) is None, "the agent has none to which they are news"
    assert brought(news(order, orders_seq=1), had) is None, "they are no newer"
    assert brought(news(order, later_s=-1), had) is None, "the last answer is newer"
    assert brought(news(other), had) is None, "they are of another job"
    assert brought(news(order, other), had) is None, "and of another one besides"
    assert brought(news(unknown), had) is None, "they leave out a roster that the agent does not have"
