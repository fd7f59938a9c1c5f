"""Orders by digest: what is left out is put back from what the agent has, and never from anything else."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from agent.link.kept_orders import known_of, whole
from agent.protocol.sync import JobOrder, SyncOrders
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
