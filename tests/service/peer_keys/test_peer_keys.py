"""A job's peer key changes when a node that may know it has no part in the job any more, and nobody is cut off."""

import logging

import pytest
from sqlalchemy import select, text

from agent.protocol.joining import JOIN_PATH, JoinRequest
from agent.protocol.sync import PeerKeyKept
from service.audit.tables import AuditRow
from service.jobs.grants import GRACE_S
from service.jobs.operations import set_members, touch
from service.jobs.tables import JobRow, MemberRole
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow
from service.peer_keys.queries import ANSWERED_WITHIN
from service.peer_keys.rules import KeyStep, next_step
from service.reconcilers import keys
from tests.service.conftest import bearer
from tests.service.fake_agent import step_row

OVER_S = GRACE_S + ANSWERED_WITHIN.total_seconds() + 1
"""A node that has left may not know a newer key after so long."""


@pytest.fixture
def members(context, clock):
    """Sets the nodes that have a part in the job."""

    def change(job_id: str, *node_ids: str) -> None:
        with context.sessions.begin() as session:
            job = session.get_one(JobRow, job_id)
            set_members(session, job, dict.fromkeys(node_ids, MemberRole.MEMBER), now=clock())
            touch(session, job, now=clock())

    return change


def audited(context, job_id):
    """What was done with the job's keys: by whom, what, and the number of the key."""
    with context.sessions() as session:
        rows = session.scalars(select(AuditRow).where(AuditRow.target == job_id).order_by(AuditRow.audit_id)).all()
        return [(row.actor, row.action, row.detail["number"]) for row in rows if "job_key" in row.action]


def known(agent):
    order = agent.job_order()
    return order.peer_key, order.peer_key_before


@pytest.mark.parametrize(
    ("has_before", "ended", "waiting", "step"),
    [
        (False, (), (), KeyStep.KEEP),
        (False, (), ("a",), KeyStep.KEEP),
        (False, ("x",), (), KeyStep.ROTATE),
        (False, ("x",), ("a",), KeyStep.ROTATE),
        (True, (), ("a",), KeyStep.KEEP),
        (True, ("x",), ("a",), KeyStep.KEEP),
        (True, (), (), KeyStep.DROP),
        (True, ("x",), (), KeyStep.DROP),
    ],
)
def test_a_key_is_made_only_when_one_is_valid_and_dropped_only_when_nobody_waits(has_before, ended, waiting, step):
    assert next_step(has_before=has_before, ended=ended, waiting=waiting) is step


def test_a_key_changes_once_a_former_members_grant_has_ended_and_both_are_valid_until_all_keep_the_new_one(
    running, members, context, clock
):
    job_id, a, b = running
    first = known(a)[0]
    assert known(b) == (first, None) and keys.tick(context) == 0
    members(job_id, "b")
    clock.advance(GRACE_S + 1)
    b.sync()
    assert keys.tick(context) == 0, "an answer to a report of the former member may still be on its way"
    clock.advance(ANSWERED_WITHIN.total_seconds())
    assert keys.tick(context) == 1 and keys.tick(context) == 0
    b.sync()
    second, before = known(b)
    assert before == first and second != first
    assert keys.tick(context) == 0, "it has been sent the new key, and has not said that it keeps it"
    b.sync()
    assert keys.tick(context) == 1
    b.sync()
    assert known(b) == (second, None)
    assert audited(context, job_id) == [("service", "rotate_job_key", 2), ("service", "drop_job_key", 1)]
    clock.advance(OVER_S)
    assert keys.tick(context) == 0, "no other node has left"
    assert a.sync().jobs == ()


def test_a_member_that_is_cut_off_knows_a_valid_key_whoever_leaves_meanwhile(
    running, members, make_agent, context, clock
):
    """It hears nothing of two nodes that leave one after the other: the second change waits for it."""
    job_id, cut_off, b = running
    c, d = make_agent("c"), make_agent("d")
    for agent in (c, d):
        agent.sync()
    members(job_id, "a", "b", "c", "d")
    for agent in (c, d):
        agent.sync()
    first = known(cut_off)[0]
    for left in (("a", "b", "c"), ("a", "b")):
        members(job_id, *left)
        for _ in range(3):
            clock.advance(OVER_S / 2)
            b.sync()
            keys.tick(context)
            b.sync()
    second = known(b)[0]
    assert known(b) == (second, first) and audited(context, job_id) == [("service", "rotate_job_key", 2)]
    # It comes back: what waited for it goes on, and node d, which knew the second key, loses that as well.
    for _ in range(6):
        for agent in (cut_off, b):
            agent.sync()
        keys.tick(context)
    assert known(cut_off) == known(b) and not {first, second} & set(known(b))
    assert [what for _, what, _ in audited(context, job_id)] == ["rotate_job_key", "drop_job_key"] * 2


def test_a_member_that_is_cut_off_holds_up_a_key_only_as_long_as_it_has_a_part_in_the_job(
    running, members, client, context, clock
):
    job_id, cut_off, b = running
    first = known(cut_off)[0]
    assert client.post(f"/api/v1/jobs/{job_id}/rotate-key").status_code == 200
    members(job_id, "b")
    for _ in range(2):
        b.sync()
    clock.advance(GRACE_S - 1)
    assert keys.tick(context) == 0 and known(b)[1] == first
    clock.advance(2)
    assert keys.tick(context) == 1
    b.sync()
    assert known(b)[1] is None


def test_a_node_that_comes_back_before_its_grant_has_ended_changes_no_key(running, members, context, clock):
    job_id, *_ = running
    members(job_id, "b")
    clock.advance(GRACE_S - 1)
    members(job_id, "a", "b")
    clock.advance(10 * OVER_S)
    assert keys.tick(context) == 0


def test_a_key_changes_when_another_machine_has_the_name_of_a_member(running, make_agent, client, context, clock):
    _, former, b = running
    with context.sessions.begin() as session:
        mark_gone(session, session.get_one(NodeRow, "a"), reason="test", now=clock())
    wanted = JoinRequest(node_id="a", secret="0" * 64)
    assert client.post(JOIN_PATH, json=wanted.model_dump(), headers=former.join).status_code == 201
    clock.advance(ANSWERED_WITHIN.total_seconds() + 1)
    assert keys.tick(context) == 1
    b.sync()
    assert former.job_order().peer_key == known(b)[1]


def test_only_the_number_of_the_current_key_counts_and_only_from_nodes_of_the_job(
    running, members, make_agent, client, context, clock
):
    job_id, a, b = running
    stranger = make_agent("stranger", pool="elsewhere")
    stranger.sync()
    assert client.post(f"/api/v1/jobs/{job_id}/rotate-key").status_code == 200
    a.sync()
    a.sync()
    for number in (0, 1, 3, 2**40):
        b.sync(peer_keys=(PeerKeyKept(job_id=job_id, number=number),))
    refused = stranger.sync(peer_keys=(PeerKeyKept(job_id=job_id, number=2),)).refusals
    assert [(item.part, item.key) for item in refused] == [("jobs", job_id)]
    b.sync(peer_keys=(PeerKeyKept(job_id="no-such-job", number=2),))
    with context.sessions() as session:
        rows = session.execute(text("SELECT node_id, number FROM peer_key_holders")).all()
    assert [tuple(row) for row in rows] == [("a", 2)] and keys.tick(context) == 0
    b.sync()
    assert keys.tick(context) == 1


def test_a_key_named_by_a_report_that_says_nothing_else_is_stored(running, client, context, clock):
    job_id, a, b = running
    for agent in (a, b):
        agent.sync(ranks=(agent.rank(agent.job_order(), step=1),), steps=(step_row(job_id, 1, 1, clock()),))
    client.post(f"/api/v1/jobs/{job_id}/rotate-key")
    a.sync(ranks=(a.rank(a.job_order(), step=1),))
    clock.advance(1)
    report = a.report(ranks=(a.rank(a.job_order(), step=2),), steps=(step_row(job_id, 1, 2, clock()),))
    assert [item.number for item in report.peer_keys] == [2]
    assert a.post(report).status_code == 200
    with context.sessions() as session:
        rows = session.execute(text("SELECT node_id, number FROM peer_key_holders")).all()
    assert [tuple(row) for row in rows] == [("a", 2)]


def test_a_person_may_have_a_key_changed_at_once_and_is_told_whom_the_change_waits_for(
    running, client, context, settings, clock
):
    job_id, a, b = running
    path, first = f"/api/v1/jobs/{job_id}/rotate-key", known(a)[0]
    again = {"Idempotency-Key": "once"}
    for _ in range(2):
        assert client.post(path, headers=again).status_code == 200
    for _ in range(2):
        a.sync()
    second = known(a)[0]
    assert known(a) == (second, first)
    waits = client.post(path)
    assert waits.status_code == 409 and "node b may not have the new one" in waits.json()["detail"]
    assert "node a" not in waits.json()["detail"]
    for _ in range(2):
        b.sync()
    assert keys.tick(context) == 1
    with context.sessions() as session:
        asked = select(AuditRow.role, AuditRow.action).where(AuditRow.action.like("%job_key"))
        roles = session.execute(asked.order_by(AuditRow.audit_id)).all()
    assert [tuple(row) for row in roles] == [("operator", "rotate_job_key"), ("service", "drop_job_key")]
    viewer = client.post("/api/v1/tokens", json={"role": "viewer", "name": "v"}, headers=bearer(settings, "admin"))
    headers = {"Authorization": f"Bearer {viewer.json()['token']}"}
    assert client.post(path, headers=headers).status_code == 403
    assert client.post("/api/v1/jobs/nope/rotate-key").status_code == 404


def test_keys_of_a_job_that_has_ended_stay(running, members, client, context, clock):
    job_id, *_ = running
    with context.sessions.begin() as session:
        session.execute(text("UPDATE jobs SET state = 'stopped', due_at = NULL"))
    members(job_id)
    clock.advance(OVER_S)
    assert keys.tick(context) == 0
    refused = client.post(f"/api/v1/jobs/{job_id}/rotate-key")
    assert refused.status_code == 409 and "has ended: it is stopped" in refused.json()["detail"]


def test_a_key_is_shown_nowhere(running, client, context, settings, clock, caplog):
    job_id, a, b = running
    caplog.set_level(logging.DEBUG)
    said = [
        client.post(f"/api/v1/jobs/{job_id}/rotate-key").text,
        client.post(f"/api/v1/jobs/{job_id}/rotate-key").text,
    ]
    for _ in range(2):
        a.sync()
        b.sync()
    both = [key for key in known(a) if key is not None]
    assert len(both) == 2 and keys.tick(context) == 1
    for path in (f"jobs/{job_id}", "jobs", "audit", "nodes", f"jobs/{job_id}/decisions", "handoffs"):
        answer = client.get(f"/api/v1/{path}", headers=bearer(settings, "admin"))
        assert answer.status_code == 200, path
        said.append(answer.text)
    with context.sessions() as session:
        said.append(repr(session.get_one(JobRow, job_id)))
    said += [repr(a.orders), str(a.job_order()), caplog.text]
    for key in both:
        assert not any(key in text for text in said)
