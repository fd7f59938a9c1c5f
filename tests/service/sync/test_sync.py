"""The agents' surface: what is stored once, what is refused, what is answered."""

from datetime import timedelta
from itertools import pairwise
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import URL, func, select

from agent.protocol.notice_life import ends_utc, withdraw
from agent.protocol.process_end import ProcessEnd
from agent.protocol.sync import (
    CheckpointFact,
    HandoffMeasures,
    JobFinished,
    LogChunk,
    NoticeKind,
    RankStatus,
    SourceState,
    StoreHosted,
    SyncOrders,
)
from agent.protocol.values import HandoffState
from liver_core.handoff import CostParts, FailureCause, RankStage, Reason, Rung, RungCost
from liver_core.layout import ParallelLayout
from service.db.wake import CHANNEL
from service.jobs.causes import FailedPart, FirstCause
from service.jobs.operations import close_generation
from service.jobs.tables import JobRow, JobStepRow, RankLogRow
from service.ledger.tables import IntervalRow
from service.nodes.tables import NodeRow
from service.notices.tables import NoticeRow
from service.reconcilers import jobs
from service.reconcilers.nodes import NodeWatch
from service.sync import endpoints
from service.sync.reading import Reading
from service.tokens.operations import Caller
from service.tokens.tables import Role
from service.turns import LostTurn
from tests.service.conftest import bearer
from tests.service.fake_agent import MISSES_A_PEER, mirror, roster, step_row

LOST_STORE = Reason("no answer: reset", "decision", cause=FailureCause(FailedPart.STORE))


def connect(url: URL) -> psycopg.Connection:
    conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(conninfo, autocommit=True)


def test_a_report_without_a_token_is_401_and_with_a_persons_token_403(make_agent, client, settings):
    agent = make_agent("a")
    report = agent.report()
    assert (
        client.post("/agent/v1/sync", content=report.model_dump_json(), headers={"Authorization": ""}).status_code
        == 401
    )
    answer = client.post("/agent/v1/sync", content=report.model_dump_json(), headers=bearer(settings, "operator"))
    assert answer.status_code == 403
    assert answer.json()["detail"] == "token 'first-operator' has role operator; this needs node"


def test_tokens_of_agents_cannot_read_jobs(client, settings, make_agent):
    for headers in (bearer(settings, "join"), make_agent("a").headers):
        assert client.get("/api/v1/jobs", headers=headers).status_code == 403


def test_another_protocol_version_is_409_before_anything_else_is_looked_at(client, make_agent):
    answer = client.post("/agent/v1/sync", json={"protocol_version": 99, "new": []}, headers=make_agent("a").headers)
    assert answer.status_code == 409
    body = answer.json()
    assert body["code"] == "protocol-version"
    assert body["errors"] == [{"field": "protocol_version", "rule": "must be 5"}]
    assert "install the same liver release on both" in body["detail"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"report_seq": "1"}, "report_seq"),
        ({"unknown": 1}, "unknown"),
        ({"node": {"node_id": "a b"}}, "node.node_id"),
        ({"node": {"node_id": "a", "slots": 0}}, "node.slots"),
    ],
)  # fmt: skip
def test_a_malformed_report_names_the_field_and_stores_nothing(make_agent, client, context, settings, change, field):
    agent = make_agent("a")
    body = agent.report().model_dump(mode="json") | change
    answer = client.post("/agent/v1/sync", json=body, headers=agent.headers)
    assert answer.status_code == 422
    assert field in [error["field"] for error in answer.json()["errors"]]
    with context.sessions() as session:
        assert session.scalar(select(func.count()).select_from(NodeRow)) == 0


def test_a_report_whose_agent_has_gone_before_its_transaction_is_dropped(running, context):
    _, a, _ = running
    with pytest.raises(LostTurn, match="the agent of node a has gone before its report was stored"):
        endpoints._sync(context, Reading(a.report()), Caller("1", Role.NODE, "node a", node_id="a"), lambda: True)
    with context.sessions() as session:
        assert session.get_one(NodeRow, "a").report_seq == a.seq - 1


def test_a_report_that_is_sent_twice_is_applied_once_and_answered_twice(running, context, clock):
    job_id, agent, _ = running
    report = agent.report(notices=(agent.notice(),), steps=(step_row(job_id, 1, 1, clock(), loss=5.0),))
    first = agent.post(report)
    again = agent.post(report)
    assert first.status_code == again.status_code == 200
    assert SyncOrders.model_validate_json(again.content).accepted_report_seq == report.report_seq
    with context.sessions() as session:
        assert session.scalar(select(func.count()).select_from(NoticeRow)) == 1
        assert session.scalar(select(func.count()).select_from(JobStepRow)) == 1


def test_the_same_facts_in_a_later_report_change_nothing(running, context, clock):
    job_id, agent, _ = running
    facts = {
        "notices": (agent.notice(),),
        "steps": (step_row(job_id, 1, 1, clock()),),
        "logs": (LogChunk(job_id=job_id, generation=1, rank=0, offset=0, text="hello\n"),),
    }
    agent.sync(**facts)
    agent.sync(**facts)
    with context.sessions() as session:
        for table in (NoticeRow, JobStepRow, RankLogRow):
            assert session.scalar(select(func.count()).select_from(table)) == 1


def test_a_notice_is_deduplicated_by_kind_and_a_changed_deadline_is_another_fact(running, client):
    _, agent, _ = running
    agent.sync(notices=(agent.notice(deadline_s=120),))
    agent.sync(notices=(agent.notice(deadline_s=120),))
    agent.sync(notices=(agent.notice(deadline_s=60),))
    agent.sync(notices=(agent.notice(deadline_s=None, kind=NoticeKind.REBALANCE),))
    kinds = [notice["kind"] for notice in client.get("/api/v1/notices").json()]
    assert sorted(kinds) == ["interruption", "rebalance"], "each is one entry, however often it has changed"
    node = client.get("/api/v1/nodes/a").json()
    assert node["leaving"] and node["deadline_at"] == "2026-01-01T12:01:04Z"


def test_a_withdrawn_notice_does_not_count_any_more_and_orders_say_so_until_it_is_over(running, client, clock):
    _, agent, other = running
    fact = agent.notice(deadline_s=120)
    agent.sync(notices=(fact,))
    assert client.get("/api/v1/nodes/a").json()["leaving"]
    clock.advance(10)
    withdrawn = withdraw(fact, clock())
    agent.sync(notices=(withdrawn,))
    agent.sync(notices=(fact,))
    assert not client.get("/api/v1/nodes/a").json()["leaving"]
    assert [notice["state"] for notice in client.get("/api/v1/notices").json()] == ["withdrawn"]
    assert other.sync().jobs[0].notices == (withdrawn,)
    assert other.sync().jobs[0].lead_order == ("a", "b")
    clock.advance((ends_utc(fact) - clock()).total_seconds())
    assert other.sync().jobs[0].notices == ()


def test_a_notice_after_a_withdrawn_or_past_one_is_another_notice(running, client, clock):
    _, agent, other = running
    first = agent.notice(deadline_s=120)
    agent.sync(notices=(first,))
    agent.sync(notices=(withdraw(first, clock()),))
    clock.advance(10)
    second = agent.notice(deadline_s=110)
    agent.sync(notices=(second,))
    assert client.get("/api/v1/nodes/a").json()["leaving"]
    assert other.sync().jobs[0].notices == (second,)
    clock.advance(400)
    agent.sync()
    assert not client.get("/api/v1/nodes/a").json()["leaving"]
    third = agent.notice(deadline_s=60)
    agent.sync(notices=(third,))
    assert other.sync().jobs[0].notices == (third,)
    assert [notice["open"] for notice in client.get("/api/v1/notices").json()] == [True, False, False]


def test_a_source_that_no_longer_announces_a_notice_withdraws_it_also_where_the_agent_forgot_it(
    running, client, clock, make_agent
):
    _, agent, other = running
    agent.watch(NoticeKind.INTERRUPTION)
    agent.sync(notices=(agent.notice(),))
    clock.advance(1)
    fresh = make_agent("a")
    fresh.watch(state=SourceState.STARTING, reason="not read yet")
    fresh.sync()
    assert client.get("/api/v1/nodes/a").json()["leaving"], "it has not been read yet"
    fresh.watch()
    fresh.sync()
    assert not client.get("/api/v1/nodes/a").json()["leaving"]
    (told,) = other.sync().jobs[0].notices
    assert told.withdrawn_utc == clock()


def test_the_health_of_a_notice_source_is_shown(running, client, clock):
    _, agent, _ = running
    assert client.get("/api/v1/nodes/a").json()["notice_source"] is None
    agent.watch(state=SourceState.UNKNOWN, reason="/latest/api/token answered 500")
    agent.sync()
    shown = client.get("/api/v1/nodes/a").json()["notice_source"]
    assert shown == {
        "source": "aws-imds", "state": "unknown", "reason": "/latest/api/token answered 500",
        "since_at": "2026-01-01T12:00:04Z", "announces": [],
    }  # fmt: skip


def test_an_agent_may_not_report_the_notice_of_a_node_with_which_it_has_no_job(running, make_agent, client):
    _, agent, _ = running
    stranger = make_agent("s")
    stranger.sync()
    for reporter, fact in ((stranger, agent.notice()), (agent, stranger.notice())):
        orders = reporter.sync(notices=(fact,))
        assert [(item.part, item.key) for item in orders.refusals] == [("notices", fact.node_id)]
        assert not client.get(f"/api/v1/nodes/{fact.node_id}").json()["leaving"]


def test_a_notice_that_only_peers_could_pass_on_is_recorded_once_and_moves_the_job(running, client, clock, context):
    _, agent, other = running
    clock.advance(1)
    fact = other.notice()
    other.sync()
    assert agent.sync(notices=(fact,)).refusals == ()
    assert client.get("/api/v1/nodes/b").json()["leaving"]
    assert agent.sync().jobs[0].notices == (fact,)
    other.sync(notices=(fact,))
    agent.sync(notices=(fact,))
    with context.sessions() as session:
        assert session.scalar(select(func.count()).select_from(NoticeRow)) == 1


def test_peers_neither_withdraw_a_notice_nor_bring_back_that_of_an_earlier_machine(running, client, clock):
    _, agent, other = running
    fact = other.notice()
    other.sync(notices=(fact,))
    (refusal,) = agent.sync(notices=(withdraw(fact, clock()),)).refusals
    assert refusal.reason == "a withdrawal is reported by b itself"
    assert client.get("/api/v1/nodes/b").json()["leaving"]
    other.sync(notices=(withdraw(fact, clock()),))
    old = fact.model_copy(update={"source": "gcp", "first_seen_utc": fact.first_seen_utc - timedelta(hours=1)})
    assert agent.sync(notices=(old,)).refusals == ()
    assert not client.get("/api/v1/nodes/b").json()["leaving"]


def test_two_agent_starts_under_one_name_end_with_the_older_one_refused(running, make_agent):
    _, old, _ = running
    new = make_agent("a")
    new.sync()
    answer = old.post(old.report())
    assert answer.status_code == 409
    assert answer.json()["errors"][0]["field"] == "agent_incarnation"
    new.sync()


def test_what_one_rank_does_not_know_of_a_step_another_fills_in(running, client, clock):
    job_id, first, last = running
    first.sync(steps=(step_row(job_id, 1, 7, clock(), sample_digest="abc", consumed_samples=168),))
    last.sync(steps=(step_row(job_id, 1, 7, clock(), loss=4.25, tokens=3072),))
    (step,) = client.get(f"/api/v1/jobs/{job_id}/steps").json()
    assert (step["sample_digest"], step["consumed_samples"], step["loss"], step["tokens"]) == ("abc", 168, 4.25, 3072)
    job = client.get(f"/api/v1/jobs/{job_id}").json()
    assert (job["state"], job["last_step"]) == ("running", 7)


def test_logs_come_back_in_order_by_rank(running, client):
    job_id, agent, other = running
    agent.sync(logs=tuple(LogChunk(job_id=job_id, generation=1, rank=0, offset=i, text=str(i)) for i in range(3)))
    other.sync(logs=(LogChunk(job_id=job_id, generation=1, rank=1, offset=0, text="\x00other"),))
    chunks = client.get(f"/api/v1/jobs/{job_id}/logs", params={"rank": 0}).json()
    assert "".join(chunk["text"] for chunk in chunks) == "012"
    later = client.get(f"/api/v1/jobs/{job_id}/logs", params={"after": chunks[-1]["log_id"]}).json()
    assert [chunk["text"] for chunk in later] == ["other"]


def test_a_store_that_an_agent_hosts_reaches_the_other_members(running):
    job_id, agent, other = running
    agent.sync(stores=(StoreHosted(job_id=job_id, generation=1, host="10.0.0.1", port=29500),))
    order = other.sync().jobs[0]
    assert order.store is not None
    assert (order.store_node, order.store.host, order.store.port) == ("a", "10.0.0.1", 29500)


def test_only_the_newest_checkpoints_are_kept_in_mind(running, client, clock):
    job_id, agent, _ = running
    for step in (10, 20, 30):
        fact = CheckpointFact(job_id=job_id, generation=1, step=step, path=f"/checkpoints/{step}", finished_utc=clock())
        agent.sync(checkpoints=(fact,))
    assert [item["step"] for item in client.get(f"/api/v1/jobs/{job_id}").json()["checkpoints"]] == [20, 30]


def test_a_checkpoint_of_which_two_nodes_tell_is_one_and_what_only_one_of_them_could_see_of_it_stays(
    running, client, clock
):
    job_id, agent, other = running
    fact = CheckpointFact(
        job_id=job_id, generation=1, step=10, path="/checkpoints/10", finished_utc=clock(), size_bytes=7
    )
    agent.sync(checkpoints=(fact,))
    clock.advance(1)
    other.sync(checkpoints=(fact.model_copy(update={"size_bytes": None, "finished_utc": clock()}),))
    (found,) = client.get(f"/api/v1/jobs/{job_id}").json()["checkpoints"]
    assert (found["step"], found["size_bytes"]) == (10, 7)


def test_a_finished_job_ends_and_its_nodes_are_told_to_stop(running, client):
    job_id, agent, _ = running
    rank = agent.rank(agent.job_order(), stage=RankStage.TRAINING, step=1000)
    orders = agent.sync(ranks=(rank,), finished=(JobFinished(job_id=job_id, generation=1, step=1000),))
    assert orders.jobs[0].desired == "stop"
    job = client.get(f"/api/v1/jobs/{job_id}").json()
    assert (job["state"], job["reason"]) == ("finished", "stop condition met at step 1000")


def test_ranks_of_a_job_that_is_not_known_are_to_be_ended(make_agent):
    agent = make_agent("a")
    orders = agent.sync(logs=(LogChunk(job_id="gone-1", generation=1, rank=0, offset=0, text="x"),))
    assert orders.refusals[0].reason == "there is no job 'gone-1' for node a here; end its ranks"


PARTS = CostParts(1.0, 0.5, 0.25, 0.0)


class TestHandoffsMadeWithoutTheService:
    def test_an_active_one_becomes_the_jobs_generation_under_its_own_id(self, running, client, clock):
        job_id, agent, other = running
        source = agent.job_order().roster
        done = mirror(
            source, roster(job_id, 2, ParallelLayout(pp=2), "b", "a"), clock(), measures=HandoffMeasures(
                phases_s={"prepare": 4.5, "cutover": 0.3}, pause_s=0.25, bytes_moved=1000, certificate="equal",
                lost_parts=PARTS, rung_costs=(RungCost(Rung.LIVE, PARTS, 1.75, 3, ()),),
            ),
        )  # fmt: skip
        assert agent.sync(handoffs=(done,)).refusals == ()
        job = client.get(f"/api/v1/jobs/{job_id}").json()
        assert (job["active_generation"], job["layout"]) == (2, "TP1xPP2xDP1")
        assert job["generations"][-1]["origin_id"] == str(done.handoff_id)
        shown = client.get(f"/api/v1/handoffs/{done.handoff_id}").json()
        assert (shown["from"], shown["to"], shown["state"]) == ("TP2xPP1xDP1", "TP1xPP2xDP1", "active")
        assert (shown["pause_s"], shown["phases_s"]["prepare"], shown["certificate"]) == (0.25, 4.5, "equal")
        parts = {"building_s": 1.0, "streaming_s": 0.5, "pause_s": 0.25, "after_s": 0.0}
        assert shown["lost_parts"] == parts
        assert shown["rung_costs"] == [{"rung": "live", "parts": parts, "total_s": 1.75, "measured": 3, "guessed": []}]
        order = other.sync().jobs[0]
        assert order.generation == 2 and order.source.handoff_id == done.handoff_id and order.next_generation == 3

    def test_several_in_one_report_are_taken_in_order(self, running, client, clock):
        job_id, agent, _ = running
        rosters = [agent.job_order().roster] + [roster(job_id, n, ParallelLayout(pp=2), "a", "b") for n in (2, 3, 4)]
        made = [mirror(rosters[i], rosters[i + 1], clock()) for i in range(3)]
        assert agent.sync(handoffs=tuple(reversed(made))).refusals == ()
        job = client.get(f"/api/v1/jobs/{job_id}").json()
        assert [item["generation"] for item in job["generations"]] == [1, 2, 3, 4]

    def test_the_last_of_several_is_enough_when_the_others_leads_are_gone(self, running, client, clock):
        job_id, agent, _ = running
        lost = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
        last = mirror(lost, roster(job_id, 3, ParallelLayout(dp=2), "a", "b"), clock())
        assert agent.sync(handoffs=(last,)).refusals == ()
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 3

    def test_one_that_led_to_the_active_generation_is_recorded_also_when_it_comes_last(self, running, client, clock):
        job_id, agent, other = running
        rosters = [agent.job_order().roster] + [roster(job_id, n, ParallelLayout(pp=2), "a", "b") for n in (2, 3, 4)]
        second, third, fourth = (mirror(rosters[i], rosters[i + 1], clock()) for i in range(3))
        assert agent.sync(handoffs=(fourth,)).refusals == ()
        clock.advance(2)
        assert other.sync(handoffs=(second,)).refusals == (), "the third, which is its child, is not known yet"
        assert agent.sync(handoffs=(third,)).refusals == ()
        job = client.get(f"/api/v1/jobs/{job_id}").json()
        assert job["active_generation"] == 4
        assert [(item["generation"], item["parent"]) for item in job["generations"]] == [
            (1, None),
            (2, 1),
            (3, 2),
            (4, 3),
        ]
        at = [item["created_at"] for item in job["generations"]]
        assert at == sorted(at)
        shown = client.get(f"/api/v1/handoffs/{second.handoff_id}").json()
        assert (shown["state"], shown["reason"]) == ("active", "spot notice")

    def test_an_aborted_one_uses_its_number_up_and_changes_nothing_else(self, running, client, clock):
        job_id, agent, _ = running
        target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
        aborted = mirror(
            agent.job_order().roster, target, clock(), state=HandoffState.ABORTED,
            reason=Reason(text="target rank 1 died", rank=1, phase="prepare"),
        )  # fmt: skip
        orders = agent.sync(handoffs=(aborted,))
        assert orders.jobs[0].next_generation == 3 and orders.jobs[0].generation == 1
        shown = client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()
        assert shown["reason_detail"] == {
            "text": "target rank 1 died",
            "rank": 1,
            "phase": "prepare",
            "tile": None,
            "node": None,
        }

    def test_a_generation_that_is_already_active_is_refused_with_the_reason(self, running, clock):
        job_id, agent, other = running
        source = agent.job_order().roster
        agent.sync(handoffs=(mirror(source, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock()),))
        rival = mirror(source, roster(job_id, 2, ParallelLayout(dp=2), "b", "a"), clock())
        (refusal,) = other.sync(handoffs=(rival,)).refusals
        assert refusal.part == "handoffs" and refusal.key == str(rival.handoff_id)
        assert refusal.reason.startswith("generation 2 of this job was made by ")

    def test_an_aborted_attempt_whose_number_went_to_another_is_recorded_without_it(self, running, client, clock):
        job_id, agent, other = running
        source = agent.job_order().roster
        agent.sync(handoffs=(mirror(source, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock()),))
        target = roster(job_id, 2, ParallelLayout(dp=2), "b", "a")
        attempt = mirror(source, target, clock(), state=HandoffState.ABORTED, reason=Reason("rank 1 died", "prepare"))
        assert other.sync(handoffs=(attempt,)).refusals == ()
        shown = client.get(f"/api/v1/handoffs/{attempt.handoff_id}").json()
        assert (shown["state"], shown["generation"], shown["reason"]) == ("aborted", None, "rank 1 died")
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 2

    def test_an_attempt_keeps_the_cause_of_its_end_when_its_number_goes_to_another(self, running, client, clock):
        job_id, agent, _ = running
        source, target = agent.job_order().roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
        why = Reason("promised to another handoff", "prepare", 1)
        first = mirror(source, target, clock(), state=HandoffState.ABORTED, reason=why, mirror_seq=3)
        assert agent.sync(handoffs=(first,)).refusals == ()
        late = mirror(source, target, clock(), state=HandoffState.PREPARING, mirror_seq=2, handoff_id=first.handoff_id)
        second = mirror(source, target, clock(), state=HandoffState.READY)
        assert agent.sync(handoffs=(second, late)).refusals == ()
        shown = client.get(f"/api/v1/handoffs/{first.handoff_id}").json()
        assert (shown["state"], shown["reason"]) == ("aborted", "promised to another handoff")
        assert client.get(f"/api/v1/handoffs/{second.handoff_id}").json()["generation"] == 2

    def test_an_attempt_that_failed_keeps_its_first_cause(self, running, client, clock):
        job_id, agent, other = running
        target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
        other.sync(ranks=(other.dead(other.job_order(), ProcessEnd(7, signal="SIGKILL", step=7), step=7),))
        aborted = mirror(
            agent.job_order().roster, target, clock(), state=HandoffState.ABORTED, mirror_seq=1,
            reason=MISSES_A_PEER,
        )  # fmt: skip
        agent.sync(handoffs=(aborted,))

        def shown() -> dict:
            return client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()

        first = {"what": "rank", "node": "b", "rank": 1, "signal": "SIGKILL", "exit_code": None, "step": 7}
        assert shown()["ended_by"] == first
        broken = {"state": HandoffState.BROKEN, "mirror_seq": 2, "reason": Reason("no step for 67 s", "training", 0)}
        agent.sync(handoffs=(aborted.model_copy(update=broken),))
        assert (shown()["state"], shown()["ended_by"]) == ("broken", first)

    def test_an_end_that_is_reported_just_after_an_attempt_failed_of_it_is_its_cause(self, running, client, clock):
        job_id, agent, other = running
        target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
        aborted = mirror(
            agent.job_order().roster, target, clock(), state=HandoffState.ABORTED,
            reason=MISSES_A_PEER,
        )  # fmt: skip
        agent.sync(handoffs=(aborted,))

        def cause() -> dict:
            return client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()["ended_by"]

        assert cause()["what"] == "peer"
        for after_s, pid in ((1.0, 7), (1.0, 8)):
            clock.advance(after_s)
            end = ProcessEnd(pid, signal="SIGKILL", step=pid)
            other.sync(ranks=(other.dead(other.job_order(), end, step=pid),))
            other.sync()
            assert (cause()["what"], cause()["node"], cause()["step"]) == ("rank", "b", 7)

    def test_an_attempt_that_is_reported_after_its_world_ended_has_the_cause_of_that(
        self, running, client, context, clock
    ):
        job_id, agent, _ = running
        first = FirstCause(FailedPart.RANK, "b", 1, signal="SIGKILL", step=7)
        with context.sessions.begin() as session:
            close_generation(session, session.get_one(JobRow, job_id), first)
        late = mirror(
            agent.job_order().roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock(),
            state=HandoffState.ABORTED, reason=MISSES_A_PEER,
        )  # fmt: skip
        agent.sync(handoffs=(late,))
        assert client.get(f"/api/v1/handoffs/{late.handoff_id}").json()["ended_by"] == first.as_json()

    def test_an_attempt_in_which_ranks_only_missed_a_peer_names_the_node_that_was_not_heard(
        self, running, client, context, clock
    ):
        job_id, agent, _ = running
        watch = NodeWatch(context)
        for _ in range(8):
            clock.advance(1)
            agent.sync()
            watch.tick()
        aborted = mirror(
            agent.job_order().roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock(),
            state=HandoffState.ABORTED, reason=MISSES_A_PEER,
        )  # fmt: skip
        agent.sync(handoffs=(aborted,))
        cause = client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()["ended_by"]
        assert (cause["what"], cause["node"]) == ("node", "b")

    def test_an_aborted_attempt_is_not_broken_by_a_report_that_comes_after_the_job_has_gone_on(
        self, running, client, context, clock
    ):
        job_id, agent, other = running
        aborted = mirror(
            agent.job_order().roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock(), mirror_seq=1,
            state=HandoffState.ABORTED, reason=LOST_STORE,
        )  # fmt: skip
        aborted = aborted.model_copy(update={"store_node": "a"})
        agent.sync(handoffs=(aborted,))
        other.sync(ranks=(other.rank(other.job_order(), stage=RankStage.FAILED, step=7),))
        jobs.tick(context)
        assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] > 2
        clock.advance(120)
        broken = {"state": HandoffState.BROKEN, "mirror_seq": 2, "reason": Reason("no step for 67 s", "training", 0)}
        assert agent.sync(handoffs=(aborted.model_copy(update=broken),)).refusals == ()
        shown = client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()
        assert (shown["state"], shown["reason"]) == ("aborted", "no answer: reset")
        assert (shown["ended_by"]["what"], shown["ended_by"]["node"]) == ("store", "a")

    def test_a_late_copy_does_not_undo_a_newer_one(self, running, client, clock):
        job_id, agent, other = running
        target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
        active = mirror(agent.job_order().roster, target, clock(), mirror_seq=5)
        agent.sync(handoffs=(active,))
        late = active.model_copy(update={"state": HandoffState.PREPARING, "mirror_seq": 9})
        assert other.sync(handoffs=(late,)).refusals == ()
        assert client.get(f"/api/v1/handoffs/{active.handoff_id}").json()["state"] == "active"

    def test_measures_that_come_later_are_filled_in(self, running, client, clock):
        job_id, agent, _ = running
        target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
        active = mirror(agent.job_order().roster, target, clock(), mirror_seq=5)
        agent.sync(handoffs=(active,))
        agent.sync(handoffs=(active.model_copy(update={"mirror_seq": 6, "measures": HandoffMeasures(lost_s=2.5)}),))
        assert client.get(f"/api/v1/handoffs/{active.handoff_id}").json()["lost_s"] == 2.5

    def test_the_handoff_of_a_job_nobody_knows_is_refused(self, make_agent, clock):
        agent = make_agent("a")
        unknown = mirror(
            roster("j-1", 1, ParallelLayout(), "a"),
            roster("j-1", 2, ParallelLayout(), "b"),
            clock(),
            handoff_id=uuid4(),
        )
        assert agent.sync(handoffs=(unknown,)).refusals[0].part == "jobs"


class TestLedger:
    def test_slot_time_is_chained_without_gaps_and_by_cause(self, running, context, clock, client):
        job_id, agent, _ = running
        order = agent.job_order()
        agent.sync(ranks=(agent.rank(order, stage=RankStage.STARTING),))
        clock.advance(2)
        agent.sync(ranks=(agent.rank(order, stage=RankStage.STARTING),))
        for step in (1, 2, 3):
            clock.advance(1)
            agent.sync(ranks=(agent.rank(order, step=step),), steps=(step_row(job_id, 1, step, clock()),))
        with context.sessions() as session:
            rows = session.scalars(select(IntervalRow).order_by(IntervalRow.lease_id, IntervalRow.starts_at)).all()
        mine = [row for row in rows if row.lease_id == rows[0].lease_id]
        assert [(row.cause, (row.ends_at - row.starts_at).total_seconds()) for row in mine] == [
            ("idle", 3.0), ("bootstrap", 3.0), ("bootstrap", 0.5), ("productive", 2.5),
        ]  # fmt: skip
        assert all(after.starts_at == before.ends_at for before, after in pairwise(mine))
        ledger = client.get("/api/v1/ledger", params={"job_id": job_id}).json()
        assert ledger["goodput"] == pytest.approx(2.5 / 6), "the first step took half a second"

    def test_a_measured_pause_is_charged_once_to_every_slot_of_the_new_world(self, running, client, clock):
        job_id, agent, other = running
        for step in (1, 2):
            clock.advance(5)
            for each in (agent, other):
                each.sync(ranks=(each.rank(each.job_order(), step=step),))
        source = agent.job_order().roster
        target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
        done = mirror(source, target, clock(), mirror_seq=1, measures=HandoffMeasures(pause_s=0.5))
        agent.sync(handoffs=(done,), ranks=(agent.rank(agent.job_order(), step=2),))
        agent.sync(handoffs=(done.model_copy(update={"mirror_seq": 2}),))
        causes = client.get("/api/v1/ledger", params={"job_id": job_id}).json()["causes"]
        assert {item["cause"]: item["slot_seconds"] for item in causes}["pause"] == 1.0

    def test_a_pause_is_charged_in_full_also_to_newcomers_and_to_nodes_that_report_often(
        self, running, make_agent, grant, client, clock
    ):
        job_id, agent, other = running
        newcomer = make_agent("c")
        newcomer.sync()
        grant(job_id, "c")
        for step in range(1, 30):
            clock.advance(0.1)
            for each in (agent, other):
                each.sync(ranks=(each.rank(each.job_order(), step=step),))
        source = agent.job_order().roster
        target = roster(job_id, 2, ParallelLayout(pp=3), "a", "b", "c")
        starting = RankStatus(job_id=job_id, generation=2, rank=2, slot=0, pid=7, stage=RankStage.PREPARING, step=0)
        clock.advance(1)
        newcomer.sync(ranks=(starting,))
        done = mirror(source, target, clock(), measures=HandoffMeasures(pause_s=0.75))
        other.sync(handoffs=(done,))
        causes = {
            item["cause"]: item for item in client.get("/api/v1/ledger", params={"job_id": job_id}).json()["causes"]
        }
        assert causes["pause"]["slot_seconds"] == pytest.approx(3 * 0.75)

    def test_a_rank_whose_report_is_a_step_behind_repeats_nothing(self, running, client, clock):
        job_id, agent, other = running
        for step in range(1, 11):
            clock.advance(0.5)
            agent.sync(ranks=(agent.rank(agent.job_order(), step=step),))
            clock.advance(0.5)
            other.sync(ranks=(other.rank(other.job_order(), step=step - 1),))
        causes = client.get("/api/v1/ledger", params={"job_id": job_id}).json()["causes"]
        assert "recompute" not in {item["cause"] for item in causes}

    def test_a_handoff_in_the_midst_of_repeated_steps_does_not_make_them_new(self, running, client, context, clock):
        job_id, agent, _ = running
        order = agent.job_order()
        checkpoint = CheckpointFact(job_id=job_id, generation=1, step=5, path="/checkpoints/5", finished_utc=clock())
        agent.sync(ranks=(agent.rank(order, step=9),), checkpoints=(checkpoint,))
        agent.sync(ranks=(agent.rank(order, stage=RankStage.FAILED, step=9),))
        jobs.tick(context)
        order = agent.sync().jobs[0]
        source, started = agent.roster(), order.generation
        assert started is not None
        agent.sync(ranks=(agent.rank(order, step=6),))
        target = roster(job_id, started + 1, ParallelLayout(pp=2), "a", "b")
        agent.sync(ranks=(agent.rank(order, step=6),), handoffs=(mirror(source, target, clock()),))
        order = agent.sync().jobs[0]
        for step in (7, 8, 9):
            clock.advance(1)
            agent.sync(ranks=(agent.rank(order, step=step),))
        causes = client.get("/api/v1/ledger", params={"job_id": job_id}).json()["causes"]
        assert {item["cause"]: item["slot_seconds"] for item in causes}["recompute"] == 2.0

    def test_dollars_follow_the_price_of_the_pool_at_the_time(self, running, client, clock):
        job_id, agent, _ = running
        assert client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 3600}).status_code == 200
        order = agent.job_order()
        agent.sync(ranks=(agent.rank(order, step=1),))
        clock.advance(10)
        agent.sync(ranks=(agent.rank(order, step=2),))
        before = client.get("/api/v1/ledger", params={"job_id": job_id}).json()["dollars"]
        client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 7200})
        assert client.get("/api/v1/ledger", params={"job_id": job_id}).json()["dollars"] == before == 11.0

    def test_steps_made_again_after_a_checkpoint_are_recomputation(self, running, client, context, clock):
        job_id, agent, _ = running
        order = agent.job_order()
        checkpoint = CheckpointFact(job_id=job_id, generation=1, step=5, path="/checkpoints/5", finished_utc=clock())
        agent.sync(ranks=(agent.rank(order, step=9),), checkpoints=(checkpoint,))
        agent.sync(ranks=(agent.rank(order, stage=RankStage.FAILED, step=9),))
        jobs.tick(context)
        order = agent.sync().jobs[0]
        assert order.source.kind == "checkpoint"
        for stage, step in ((RankStage.STARTING, 0), (RankStage.TRAINING, 6), (RankStage.TRAINING, 10)):
            clock.advance(1)
            agent.sync(ranks=(agent.rank(order, stage=stage, step=step),))
        causes = client.get("/api/v1/ledger", params={"job_id": job_id}).json()["causes"]
        seconds = {item["cause"]: item["slot_seconds"] for item in causes}
        assert (seconds["fallback_restart"], seconds["recompute"]) == (1.0, 1.0)


def test_how_far_a_handoff_is_wakes_its_watchers_and_no_agent(running, context, clock):
    job_id, agent, other = running
    source = agent.roster()
    target = roster(job_id, 2, ParallelLayout(tp=1, pp=1, dp=1), "b")
    handoff_id = uuid4()

    def said(state: HandoffState, seq: int) -> tuple[int, set[str]]:
        topics = []
        with connect(context.database.engine.url) as listening:
            listening.execute(f"LISTEN {CHANNEL}")
            copy = mirror(source, target, clock(), handoff_id=handoff_id, state=state, mirror_seq=seq)
            orders = other.sync(handoffs=(copy,))
            for notification in listening.notifies(timeout=0.2):
                topics += notification.payload.split(",")
        return orders.orders_seq, set(topics)

    opened, topics = said(HandoffState.PREPARING, 1)
    # The answer to its own report tells b.
    assert topics == {f"job/{job_id}", "node/a"}
    for seq, state in enumerate((HandoffState.STREAMING, HandoffState.READY, HandoffState.CUTTING_OVER), start=2):
        assert said(state, seq) == (opened, {f"job/{job_id}"})
    active, topics = said(HandoffState.ACTIVE, 5)
    assert active > opened and topics == {f"job/{job_id}", "node/a"}
    assert said(HandoffState.ACTIVE, 6) == (active, {f"job/{job_id}"})
