"""What is said of a world that the service has not heard of waits for the handoff that made it, and is not lost."""

import pytest

from agent.protocol.sync import CheckpointFact, JobFinished, LogChunk, RankStatus
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage
from liver_core.layout import ParallelLayout
from service.jobs.grants import end_grants
from service.jobs.tables import JobMemberRow, MemberRole
from service.reconcilers import upkeep
from service.sync import held
from tests.service.fake_agent import mirror, roster, step_row

PP2 = ParallelLayout(pp=2)


@pytest.fixture
def apart(running, make_agent, grant, clock):
    """The job has gone from a and b to c and d while the service was away; nothing of it is reported yet."""
    job_id, a, b = running
    newcomers = make_agent("c"), make_agent("d")
    for agent in newcomers:
        agent.sync()
    grant(job_id, "c", "d")
    source, target = a.roster(), roster(job_id, 2, PP2, "c", "d")
    clock.advance(30)
    return job_id, (a, b), newcomers, source, target


def facts(job_id, generation, rank, at):
    return {
        "steps": (step_row(job_id, generation, 7, at, loss=2.0),),
        "logs": (LogChunk(job_id=job_id, generation=generation, rank=rank, offset=0, text=f"by \x00{rank}"),),
        "checkpoints": (
            CheckpointFact(job_id=job_id, generation=generation, step=7, path="/checkpoints/7", finished_utc=at),
        ),
        "ranks": (
            RankStatus(
                job_id=job_id, generation=generation, rank=rank, slot=0, pid=3, stage=RankStage.TRAINING, step=7
            ),
        ),
    }


def shown(client, job_id):
    job = client.get(f"/api/v1/jobs/{job_id}").json()
    steps = [(row["generation"], row["step"]) for row in client.get(f"/api/v1/jobs/{job_id}/steps").json()]
    logs = sorted(row["text"] for row in client.get(f"/api/v1/jobs/{job_id}/logs").json())
    return job["active_generation"], steps, logs, [item["step"] for item in job["checkpoints"]]


def test_facts_that_come_before_their_handoff_count_when_it_comes(apart, client, clock):
    job_id, _, (c, d), source, target = apart
    for rank, agent in enumerate((c, d)):
        assert agent.sync(**facts(job_id, 2, rank, clock())).refusals == ()
    assert shown(client, job_id) == (1, [], [], [])
    assert d.sync(handoffs=(mirror(source, target, clock(), proposer="c"),)).refusals == ()
    assert shown(client, job_id) == (2, [(2, 7)], ["by 0", "by 1"], [7])


def test_what_nodes_that_have_gone_passed_on_counts_when_the_world_of_those_that_came_is_known(
    apart, client, context, clock
):
    """The checkpoint is of generation 1, which the service knows; c has no rank in it, and tells its handoff later."""
    job_id, _, (c, _), source, target = apart
    with context.sessions.begin() as session:
        session.add(JobMemberRow(job_id=job_id, node_id="c", role=MemberRole.SPARE))
    passed_on = {part: facts(job_id, 1, 0, clock())[part] for part in ("steps", "checkpoints")}
    assert c.sync(**passed_on).refusals == ()
    assert shown(client, job_id) == (1, [], [], [])
    assert c.sync(handoffs=(mirror(source, target, clock(), proposer="c"),)).refusals == ()
    assert shown(client, job_id) == (2, [(1, 7)], [], [7])


def test_an_end_that_comes_before_its_handoff_ends_the_job_when_it_comes(apart, client, clock):
    job_id, _, (c, d), source, target = apart
    c.sync(finished=(JobFinished(job_id=job_id, generation=2, step=1000),))
    assert client.get(f"/api/v1/jobs/{job_id}").json()["state"] == "starting"
    d.sync(handoffs=(mirror(source, target, clock(), proposer="c"),))
    assert client.get(f"/api/v1/jobs/{job_id}").json()["state"] == "finished"


def test_facts_of_a_world_in_between_count_when_its_successor_is_reported(apart, client, clock):
    job_id, _, (c, d), _, target = apart
    c.sync(**{**facts(job_id, 2, 0, clock()), "ranks": ()})
    last = roster(job_id, 3, PP2, "d", "c")
    assert d.sync(handoffs=(mirror(target, last, clock(), proposer="c"),)).refusals == ()
    generation, steps, logs, _ = shown(client, job_id)
    assert (generation, steps, logs) == (3, [(2, 7)], ["by 0"])


def test_what_nobody_explains_is_dropped_after_a_while(apart, client, context, clock):
    job_id, _, (c, d), source, target = apart
    c.sync(**{**facts(job_id, 2, 0, clock()), "ranks": ()})
    clock.advance(held.HELD_FOR_S + 1)
    assert upkeep.tick(context) == 3
    d.sync(handoffs=(mirror(source, target, clock(), proposer="c"),))
    assert shown(client, job_id) == (2, [], [], [])


def test_a_handoff_that_is_told_again_after_its_nodes_have_left_is_no_news_and_is_not_refused(running, context, clock):
    """An agent that was started anew tells all that its journal kept."""
    job_id, a, _ = running
    told = mirror(a.roster(), roster(job_id, 2, ParallelLayout(), "a"), clock(), state=HandoffState.ACTIVE)
    assert a.sync(handoffs=(told,)).refusals == ()
    with context.sessions.begin() as session:
        end_grants(session, "b", now=clock())
    clock.advance(1)
    assert a.sync(handoffs=(told,)).refusals == ()
    newer = told.model_copy(update={"mirror_seq": told.mirror_seq + 1})
    (refusal,) = a.sync(handoffs=(newer,)).refusals
    assert refusal.reason == "node b has no part in this job"


def test_a_rank_of_another_node_is_still_refused_when_the_handoff_comes(apart, client, clock):
    job_id, _, (c, d), source, target = apart
    c.sync(logs=(LogChunk(job_id=job_id, generation=2, rank=1, offset=0, text="lies"),))
    d.sync(handoffs=(mirror(source, target, clock(), proposer="c"),))
    assert shown(client, job_id)[2] == []


def test_so_much_waits_and_no_more(apart, clock, monkeypatch):
    monkeypatch.setattr(held, "HELD_FACTS_MAX", 3)
    job_id, _, (c, d), *_ = apart
    rows = tuple(step_row(job_id, 2, step, clock()) for step in range(1, 6))
    refused = c.sync(steps=rows).refusals
    assert [(item.part, item.reason) for item in refused] == [
        ("steps", "too much waits already for the report of this handoff")
    ] * 2
    assert d.sync(steps=rows[:3]).refusals == ()


class TestANewcomerThatReportsTheHandoff:
    """Where every member goes, a node that comes may lead. A node that only waits could say the same."""

    def test_waits_while_a_member_says_that_it_still_trains(self, apart, client, clock):
        job_id, (a, b), (c, _), source, target = apart
        for agent in (a, b):
            agent.sync(ranks=(agent.rank(agent.job_order(), step=6),))
        c.sync(handoffs=(mirror(source, target, clock(), proposer="c"),))
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 1
        clock.advance(1)
        gone = [agent.rank(agent.job_order(), step=6, stage=RankStage.LEFT) for agent in (a, b)]
        a.sync(ranks=(gone[0],))
        c.sync()
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 1
        b.sync(ranks=(gone[1],))
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 2

    def test_counts_as_soon_as_the_members_say_nothing(self, apart, client, clock):
        job_id, (a, b), (c, _), source, target = apart
        for agent in (a, b):
            agent.sync(ranks=(agent.rank(agent.job_order(), step=6),))
        c.sync(handoffs=(mirror(source, target, clock(), proposer="c"),))
        clock.advance(5)
        c.sync()
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 1
        clock.advance(2)
        c.sync(ranks=facts(job_id, 2, 0, clock())["ranks"])
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 2

    def test_counts_at_once_where_every_member_was_announced_to_go(self, apart, client, clock):
        job_id, (a, b), (c, _), source, target = apart
        for agent in (a, b):
            agent.sync(ranks=(agent.rank(agent.job_order(), step=6),), notices=(agent.notice(),))
        c.sync(handoffs=(mirror(source, target, clock(), proposer="c"),))
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 2

    def test_is_refused_where_its_source_is_not_the_world_that_was(self, apart, client, clock):
        job_id, _, (c, _), _, target = apart
        forged = roster(job_id, 1, PP2, "c", "b")
        orders = c.sync(handoffs=(mirror(forged, target, clock(), state=HandoffState.PREPARING),))
        assert "its source is not the world of generation 1" in orders.refusals[0].reason
