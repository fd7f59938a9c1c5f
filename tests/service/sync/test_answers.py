"""Answers by digest: what has not changed is not sent again, whatever changes is sent at once, and all of it."""

import asyncio

import pytest
from sqlalchemy import event

from agent.link.kept_orders import known_of
from agent.protocol.sync import SyncOrders
from liver_core.handoff import RankStage
from service.reconcilers import jobs
from service.reconcilers.nodes import NodeWatch
from service.sync import orders
from service.sync.endpoints import WakeReader, wake
from tests.service.fake_agent import JOB, FakeAgent, step_row

UNCHANGED_BYTES_MAX = 600


def training(agent: FakeAgent, step: int, clock) -> dict:
    order = agent.job_order()
    assert order.generation is not None
    return {
        "ranks": (agent.rank(order, stage=RankStage.TRAINING, step=step),),
        "steps": (step_row(order.job_id, order.generation, step, clock(), loss=1.0),),
    }


def asked(agent: FakeAgent, **parts) -> dict:
    """The answer as it is sent."""
    response = agent.post(agent.report(**parts))
    assert response.status_code == 200, response.text
    return {**response.json(), "bytes": len(response.content)}


def test_an_answer_without_a_change_is_short_however_many_nodes_the_job_has(running, clock):
    _, agent, _ = running
    agent.sync(**training(agent, 1, clock))
    agent.sync(**training(agent, 2, clock))
    clock.advance(1)
    answer = asked(agent, **training(agent, 3, clock))
    assert answer["unchanged"]
    assert answer["jobs"] == []
    assert answer["orders_digest"] == agent.orders.orders_digest
    assert answer["bytes"] <= UNCHANGED_BYTES_MAX


def test_an_agent_that_has_started_again_gets_all_of_it(running, clock):
    _, agent, _ = running
    whole = agent.sync(**training(agent, 1, clock))
    agent.orders = None
    answer = SyncOrders.model_validate_json(agent.post(agent.report()).content)
    assert not answer.unchanged
    assert answer.jobs == whole.jobs


def test_another_order_comes_at_once_without_the_roster_that_the_agent_has(running, client, context, clock):
    job_id, agent, _ = running
    before = agent.sync(**training(agent, 1, clock))
    client.post(f"/api/v1/jobs/{job_id}/stop")
    jobs.tick(context)
    answer = asked(agent)
    (job,) = answer["jobs"]
    assert not answer["unchanged"]
    assert answer["orders_digest"] != before.orders_digest
    assert "roster" not in job and "peers" not in job
    stopping = agent.sync()
    assert stopping.jobs[0].roster == before.jobs[0].roster
    assert stopping.jobs[0].peers == before.jobs[0].peers


def test_a_node_that_is_reached_elsewhere_is_known_to_the_others_at_once(running, clock, monkeypatch):
    _, agent, other = running
    agent.sync(**training(agent, 1, clock))
    report = other.report()
    moved = report.node.model_copy(update={"peer_url": "http://elsewhere.test:1"})
    assert other.post(report.model_copy(update={"node": moved})).status_code == 200
    assert agent.sync().jobs[0].peers["b"] == "http://elsewhere.test:1"


def test_a_silent_node_that_is_heard_again_leads_again(running, context, clock):
    _, agent, other = running
    watch = NodeWatch(context)
    for _ in range(8):
        clock.advance(1)
        agent.sync(**training(agent, 1, clock))
        watch.tick()
    assert agent.sync().jobs[0].lead_order == ("a",)
    other.sync()
    assert agent.sync().jobs[0].lead_order == ("a", "b")


def test_the_nodes_of_a_job_share_what_is_made_for_one_of_them(client, context, make_agent, clock, monkeypatch):
    """And it is made again after half a minute, in case somebody changed a row and did not say so."""
    agents = [make_agent(name) for name in "abcd"]
    client.post("/api/v1/jobs", json=JOB)
    for agent in agents:
        agent.sync()
    clock.advance(3)
    jobs.tick(context)
    made = []
    make = orders.shared_orders

    def counted(session, job_ids, **more):
        made.extend(job_ids)
        return make(session, job_ids, **more)

    monkeypatch.setattr("service.sync.answers.shared_orders", counted)
    for agent in agents:
        agent.sync()
    assert len(made) == 1
    clock.advance(31)
    for agent in agents:
        agent.sync()
    # They were silent, as far as the service knew, and each is heard again.
    assert 1 < len(made) <= 1 + len(agents)


@pytest.mark.parametrize("known", [{"orders_known": "0" * 32}, {"neighbours_known": ("0" * 32,)}])
def test_a_digest_that_is_of_nothing_here_leaves_nothing_out(running, clock, known):
    _, agent, _ = running
    before = agent.sync(**training(agent, 1, clock))
    report = agent.report(**training(agent, 2, clock)).model_copy(
        update={"orders_known": "", "neighbours_known": (), **known}
    )
    answer = SyncOrders.model_validate_json(agent.post(report).content)
    assert answer.jobs == before.jobs
    assert known_of(answer) == known_of(before)


def test_an_idle_wake_stream_asks_the_database_nothing(client, context):
    seen = []

    def keep(_connection, _cursor, statement: str, *_) -> None:
        seen.append(statement)

    event.listen(context.database.engine, "before_cursor_execute", keep)
    try:

        async def first_events() -> list[str | None]:
            events = aiter(wake(context, WakeReader("a", is_known=lambda: True, is_over=lambda: False)))
            found = [(await anext(events)).id]
            context.hub.wake_all()
            found.append((await anext(events)).id)
            return found

        assert asyncio.run(first_events()) == ["0", "1"]
    finally:
        event.remove(context.database.engine, "before_cursor_execute", keep)
    assert seen == []
