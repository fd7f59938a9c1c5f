"""What a node tries that is a member of a job: it hurts its own job at most, neither for ever nor without a trace."""

from datetime import UTC, datetime, timedelta

import pytest

from agent.protocol.sync import JobFinished, NoticeFact
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.layout.limits import COUNT_MAX
from service.notices.rules import PEERS_WORDS_MAX
from tests.service.conftest import bearer
from tests.service.fake_agent import step_row


def test_no_number_inside_a_cause_keeps_the_members_from_their_orders(running):
    """It would be burned, and the number after it is above any that an order can carry."""
    _, a, b = running
    cause = FailureCause(FailedPart.START, newer_start=COUNT_MAX)
    reason = Reason("a newer one writes there", "training", 0, cause=cause)
    failed = a.rank(a.job_order(), stage=RankStage.FAILED, reason=reason)
    (refusal,) = a.sync(ranks=(failed,)).refusals
    assert refusal.part == "ranks" and refusal.reason.startswith(f"newer_start {COUNT_MAX} is beyond")
    assert a.sync().jobs[0].next_generation == b.sync().jobs[0].next_generation == 2


def test_a_report_of_progress_brings_a_job_no_further_than_its_end(training, client, context, clock):
    agents, parts = training
    (job_id,) = {order.job_id for order in agents["a"].orders.jobs}
    clock.advance(1)
    far = parts("a", 5) | {"steps": (step_row(job_id, 1, COUNT_MAX, clock()),)}
    (refusal,) = agents["a"].sync(**far).refusals
    assert (refusal.part, refusal.reason) == ("steps", f"step {COUNT_MAX} is after the last step, 1000")
    assert client.get(f"/api/v1/jobs/{job_id}").json()["last_step"] == 5


FAR = datetime(2099, 12, 31, tzinfo=UTC)


def word_on(agent, **changes) -> NoticeFact:
    """What a peer makes up about the node."""
    return agent.notice().model_copy(update={"source": "made-up", "deadline_utc": FAR} | changes)


@pytest.fixture
def leaving(client):
    return lambda: client.get("/api/v1/nodes/b").json()["leaving"]


def test_a_peers_word_about_a_node_counts_for_five_minutes(running, leaving, clock):
    _, a, b = running
    fact = word_on(b)
    assert a.sync(notices=(fact,)).refusals == ()
    clock.advance(299)
    a.sync(notices=(fact,))
    assert leaving() and b.sync().jobs[0].notices == (fact,)
    clock.advance(2)
    a.sync(notices=(fact,))
    assert not leaving() and b.sync().jobs[0].notices == ()


def test_a_peers_word_ends_with_the_job_that_it_shares_with_the_node(running, leaving, client, context, clock):
    job_id, a, b = running
    a.sync(notices=(word_on(b),))
    assert leaving()
    b.sync(finished=(JobFinished(job_id=job_id, generation=1, step=1000),))
    assert client.get(f"/api/v1/jobs/{job_id}").json()["state"] == "finished"
    assert not leaving()


@pytest.mark.parametrize("same", [True, False])
def test_what_the_node_itself_says_takes_the_place_of_a_peers_word(running, leaving, client, clock, same):
    _, a, b = running
    own = b.notice(deadline_s=3_600)
    told = own if same else own.model_copy(update={"deadline_utc": clock() + timedelta(seconds=30)})
    a.sync(notices=(told,))
    b.sync(notices=(own,))
    assert b.sync().jobs[0].notices == (own,)
    clock.advance(1_800)
    b.sync()
    assert leaving()
    assert len(client.get("/api/v1/notices?node_id=b").json()) == 1


def test_a_peer_hides_nothing_that_the_node_itself_has_said(running, leaving, clock):
    _, a, b = running
    own = b.notice(deadline_s=3_600)
    b.sync(notices=(own,))
    clock.advance(1)
    a.sync(notices=(own.model_copy(update={"first_seen_utc": clock(), "deadline_utc": FAR}),))
    others = tuple(word_on(b, source=f"other-{number}", deadline_utc=clock()) for number in range(60))
    refusals = a.sync(notices=others).refusals
    assert len(refusals) == 60 - PEERS_WORDS_MAX and {item.part for item in refusals} == {"notices"}
    assert own in b.sync().jobs[0].notices
    clock.advance(301)
    assert b.sync().jobs[0].notices == (own,) and leaving()


def test_an_operator_ends_any_notice_and_it_is_noted(running, leaving, client, settings, clock):
    _, a, b = running
    a.sync(notices=(word_on(b),))
    b.sync(notices=(b.notice(deadline_s=3_600),))
    for notice in client.get("/api/v1/notices?node_id=b").json():
        answer = client.post(f"/api/v1/notices/{notice['notice_id']}/end")
        assert (answer.status_code, answer.json()["state"]) == (200, "withdrawn"), answer.text
        assert client.post(f"/api/v1/notices/{notice['notice_id']}/end").status_code == 409
    assert not leaving()
    assert all(fact.withdrawn_utc == clock() for fact in b.sync().jobs[0].notices)
    assert client.post("/api/v1/notices/999/end").status_code == 404
    rows = client.get("/api/v1/audit?action=end_notice", headers=bearer(settings, "admin")).json()
    assert {(row["target"], *row["detail"]["sources"]) for row in rows if row["action"] == "end_notice"} == {
        ("b", "made-up"),
        ("b", "aws-imds"),
    }


def test_a_node_that_makes_up_names_stands_in_the_audit_log_once(running, client, settings):
    _, a, _ = running
    for report in range(3):
        a.sync(notices=tuple(word_on(a, node_id=f"no-{report}-{number}") for number in range(64)))
    rows = client.get("/api/v1/audit", headers=bearer(settings, "admin")).json()
    assert [row["target"] for row in rows if row["action"] == "sync"] == ["a"]
