"""Orders that come with a wake-up: what the next answer would say, and only to whom an answer would say it."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest
from sqlalchemy.exc import OperationalError
from starlette.requests import Request

from agent.link.kept_orders import brought
from agent.protocol.wake_up import WakeEvent, WakeOrders
from service.jobs.operations import end_part
from service.sync import answers, news
from service.sync.endpoints import WakeReader, listener_of, wake
from tests.service.fake_agent import FakeAgent


@pytest.fixture
def noticed(training):
    """What the last answer to another member was, and then the notice of a node."""
    agents, parts = training
    agents["b"].sync(**parts("b", 6))
    agents["a"].sync(**parts("a", 6), notices=(agents["a"].notice(),))
    return agents, parts


def news_of(context, node_id: str) -> WakeOrders | None:
    found = asyncio.run(context.news.of(node_id))
    return None if found is None else WakeOrders.model_validate_json(found)


def test_a_wake_up_brings_what_the_next_answer_says(noticed, context):
    agents, parts = noticed
    told, found = agents["b"].orders, news_of(context, "b")
    assert found is not None and found.jobs[0].roster is None, "which the node has"
    by_event = brought(found, told)
    assert by_event is not None and [fact.node_id for fact in by_event.jobs[0].notices] == ["a"]
    answer = agents["b"].sync(**parts("b", 8))
    assert (answer.jobs, answer.orders_digest, answer.orders_seq) == (
        by_event.jobs,
        by_event.orders_digest,
        by_event.orders_seq,
    )


def test_what_was_brought_is_not_brought_again_and_nothing_is_where_nothing_is_new(noticed, context):
    assert news_of(context, "b") is not None
    assert news_of(context, "b") is None
    assert news_of(context, "a") is None, "its answer said it"
    assert news_of(context, "nobody") is None


def test_all_members_of_a_job_are_brought_orders_that_are_looked_up_and_made_once(noticed, context, monkeypatch):
    looks: list[str] = []
    find = news.standing_nodes
    monkeypatch.setattr(news, "standing_nodes", lambda *asked: looks.append("look") or find(*asked))
    monkeypatch.setattr(answers, "shared_orders", lambda *_, **__: pytest.fail("the node's own answer had them made"))

    async def all_at_once() -> list[str | None]:
        return list(await asyncio.gather(*(context.news.of(name) for name in "bcd")))

    assert None not in asyncio.run(all_at_once())
    assert looks == ["look"]


def test_a_node_whose_part_has_ended_is_brought_nothing_nor_is_a_later_machine_with_its_name(noticed, context, clock):
    """What was told to the one before is still known here, and its name still stands in the job's roster."""
    with context.sessions.begin() as session:
        end_part(session, "b", now=clock())
    assert context.told.of("b") is not None
    assert news_of(context, "b") is None
    found = news_of(context, "c")
    assert found is not None


def test_orders_that_are_large_are_left_to_the_answer(noticed, context, monkeypatch):
    monkeypatch.setattr(answers, "WAKE_CHARS_MAX", 100)
    assert news_of(context, "b") is None


def test_without_the_database_an_agent_is_woken_all_the_same(noticed, context, monkeypatch):
    def away(*_: object) -> None:
        raise OperationalError("select", {}, Exception("the server is gone"))

    monkeypatch.setattr(news, "standing_nodes", away)
    assert news_of(context, "b") is None


def woken(context, agent: FakeAgent, is_known: Callable[[], bool]) -> WakeEvent:
    """The event of a change, as the agent's stream has it."""

    async def second() -> str | None:
        listener = WakeReader(agent.node_id, is_known=is_known, is_over=lambda: False)
        async with aclosing(wake(context, listener)) as events:  # type: ignore[type-var]
            await anext(events)
            context.hub.wake_all()
            return (await anext(events)).raw_data

    return WakeEvent.model_validate_json(asyncio.run(second()) or "")


def test_a_stream_whose_token_may_be_revoked_is_woken_and_told_nothing(noticed, context):
    agents, _ = noticed
    assert woken(context, agents["b"], lambda: False) == WakeEvent(number=1)
    assert woken(context, agents["b"], lambda: True).orders is not None


def test_a_stream_is_known_by_its_own_token_until_keys_are_revoked_and_over_once_it_expires(noticed, context, clock):
    """A later machine with the name of a node does not make the stream of the one before any better."""
    agents, _ = noticed
    token = agents["b"].token
    caller = context.recent_nodes.find(token, now=clock())
    request = Request({"type": "http", "headers": [(b"authorization", f"Bearer {token}".encode())]})
    listener = asyncio.run(listener_of(request, context, caller, "b"))
    assert listener.is_known() and not listener.is_over()
    context.recent_nodes.forget()
    agents["c"].sync()
    assert not listener.is_known()
    clock.advance(context.settings.node_token_s)
    assert listener.is_over()


def test_a_stream_ends_with_its_token(context, monkeypatch):
    monkeypatch.setattr("service.sync.endpoints.END_LOOK_S", 0.01)

    async def numbers() -> list[str | None]:
        listener = WakeReader("b", is_known=lambda: True, is_over=lambda: True)
        return [event.id async for event in wake(context, listener)]

    assert asyncio.run(numbers()) == ["0"]
