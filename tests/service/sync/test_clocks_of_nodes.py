"""Nodes whose clocks are off: known, shown, and their notices count all the same."""

from datetime import datetime, timedelta

import pytest

from agent.link.kept_orders import whole
from agent.protocol.notice_life import Notices, moved, withdraw
from agent.protocol.sync import SyncOrders
from agent.protocol.values import Placement
from liver_core.layout import Member, ParallelLayout
from service.cli.columns import Cell
from service.cli.nodes import _remark, _with_remark
from service.jobs.tables import JobRow
from service.jobs.view import Action, Do
from service.reconcilers.jobs import apply_action

OFF_S = [-300, 300]


def off(agent, clock, seconds: float) -> None:
    """From now on the agent's machine has another time."""
    agent.clock = lambda: clock() + timedelta(seconds=seconds)


def node(client, name: str) -> dict:
    return client.get(f"/api/v1/nodes/{name}").json()


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize("off_s", OFF_S)
def test_a_notice_counts_by_when_it_was_reported(running, client, clock, off_s):
    _, _, b = running
    off(b, clock, off_s)
    b.sync(notices=(b.notice(deadline_s=30),))
    shown = node(client, "b")
    assert shown["leaving"] and at(shown["deadline_at"]) == clock() + timedelta(seconds=30)
    assert shown["clock_ahead_s"] == off_s
    assert [item["state"] for item in client.get("/api/v1/notices").json()] == ["heard"]
    clock.advance(30 + 11)
    assert [item["state"] for item in client.get("/api/v1/notices").json()] == ["due"]


@pytest.mark.parametrize("off_s", OFF_S)
def test_each_node_gets_notices_by_its_own_clock(running, clock, off_s):
    _, a, b = running
    off(b, clock, off_s)
    said = b.notice(deadline_s=30)
    b.sync(notices=(said,))
    assert b.sync().jobs[0].notices == (said,), "as it said it"
    assert a.sync().jobs[0].notices == (moved(said, clock() - b.clock()),)


@pytest.mark.parametrize("off_s", OFF_S)
def test_ranks_of_a_start_beside_which_an_older_world_may_step_learn_by_their_own_clock_when_it_may_not(
    running, context, clock, off_s
):
    job_id, a, b = running
    assert a.job_order().steps_from_utc is None
    target = Placement(layout=ParallelLayout(dp=2), members=(Member("a", 0), Member("b", 0)))
    with context.sessions.begin() as session:
        start = Action(Do.START, "the key of c was revoked", target=target, steps_after_s=14.0)
        apply_action(session, session.get_one(JobRow, job_id), start, plan_digest="", now=clock())
    off(b, clock, off_s)
    for agent in (a, b):
        assert agent.sync().jobs[0].steps_from_utc == agent.clock() + timedelta(seconds=14)


def test_a_notice_that_is_said_again_is_one_and_can_be_withdrawn(running, client, clock):
    _, _, b = running
    off(b, clock, -300)
    said = b.notice(deadline_s=60)
    for way_s in (0.3, 0.0, 0.9, 0.1):
        report = b.report(notices=(said,))
        clock.advance(way_s)
        assert b.post(report).status_code == 200
    assert len(client.get("/api/v1/notices").json()) == 1
    b.sync(notices=(withdraw(said, b.clock()),))
    assert not node(client, "b")["leaving"]


def test_while_reports_are_slow_a_notice_stays_the_same_one_so_that_its_withdrawal_counts(running, client, clock):
    """A notice is told from the one before it by when it was first seen. Were that moved by what a service makes of
    slow reports, the agent would know a notice that nobody withdraws, and leave a node that stays."""
    _, a, b = running
    said, known, names = a.notice(deadline_s=300), Notices(), set()
    a.sync(notices=(said,))
    b.sync()

    def slow(way_s: float, ago_s: float) -> None:
        answer = {"answered_utc": b.orders.issued_utc, "answered_ago_s": ago_s}
        clock.advance(ago_s)
        report = b.report(**answer)
        clock.advance(way_s)
        response = b.post(report)
        b.orders = whole(SyncOrders.model_validate_json(response.content), b.orders)
        for fact in b.job_order().notices:
            names.add((fact.source, fact.first_seen_utc))
            known.take(fact)

    for way_s in (0.1, 4, 9, 12, 4, 9, 0.1, 6):
        slow(way_s, ago_s=1.0)
    assert len(names) == 1 and known.moving(clock())
    a.sync(notices=(withdraw(said, clock()),))
    for way_s in (14, 0.1):
        slow(way_s, ago_s=1.0)
        assert not known.moving(clock()), "it is withdrawn, however slow the report was"
    assert len(names) == 1 and node(client, "b")["clock_ahead_s"] == pytest.approx(0, abs=1)


def test_what_a_peer_passes_on_is_the_same_notice(running, client, clock):
    """It moved the times by its own clock, by a message that took a while."""
    _, a, b = running
    off(b, clock, -300)
    b.sync()
    said = b.notice(deadline_s=60)
    heard = moved(said, clock() - b.clock() + timedelta(seconds=0.7))
    a.sync(notices=(heard,))
    shown = node(client, "b")
    assert shown["leaving"] and abs((at(shown["deadline_at"]) - clock()).total_seconds() - 60) <= 1
    b.sync(notices=(said,))
    b.sync(notices=(withdraw(said, b.clock()),))
    a.sync(notices=(heard,))
    assert not node(client, "b")["leaving"]
    assert len({item["first_seen_at"] for item in client.get("/api/v1/notices").json()}) == 1


@pytest.mark.parametrize("extreme", ["2000-01-01T00:00:01Z", "2099-12-31T23:59:58Z"])
def test_a_clock_that_is_off_by_a_lifetime_hurts_nobody(running, client, clock, extreme):
    _, a, b = running
    b.clock = lambda: at(extreme)
    b.sync(notices=(b.notice(deadline_s=1),))
    assert node(client, "b")["leaving"]
    assert a.sync().jobs[0].notices and b.sync().jobs[0].notices
    assert len(client.get("/api/v1/notices").json()) == 1


QUIET = {"clock_ahead_s": 0.0, "excused_until": None, "state": "ready", "announced": False, "overdue": False}


def test_people_see_that_a_node_is_used_last_or_not_for_an_end_that_is_still_announced():
    assert _remark(QUIET | {"overdue": True}) == "its announced end is past: used after all other nodes"
    assert _remark(QUIET | {"announced": True}) == "its end is still announced, without a time: it gets no ranks"
    assert _remark(QUIET | {"announced": True, "overdue": True, "state": "gone"}) == ""


@pytest.mark.parametrize(
    ("ahead_s", "remark"),
    [(None, ""), (0.9, ""), (-1.4, "its clock is 1 s slow"), (301.0, "its clock is 5 min fast")],
)
def test_people_see_a_clock_that_is_off_by_more_than_a_second(ahead_s, remark):
    assert _remark(QUIET | {"clock_ahead_s": ahead_s}) == remark


def test_people_see_until_when_a_silence_may_be_the_services(clock):
    excused = QUIET | {"excused_until": "2090-01-01T12:34:56Z", "state": "silent"}
    assert _remark(excused) == "not lost before 12:34:56 UTC, for many fell silent together"
    assert _remark(excused | {"state": "ready"}) == ""
    assert _with_remark("watching", _remark(excused)) == Cell(*["watching; " + _remark(excused)] * 2)
    assert _with_remark("watching", "") == "watching"
