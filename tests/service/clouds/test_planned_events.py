"""Planned events of one machine, each with the id that its cloud gave it: what is said of one says nothing of another,
and the newest word on each counts, in whatever order they come."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.notice_life import LEAD, event_id_of, moves_jobs
from agent.protocol.sync import NoticeKind
from service.clouds.aws.events import read_message
from service.clouds.cloud_facts import CloudFact, Disposition, FactKind
from service.clouds.rules import begun
from service.notices.operations import LeaseNotices
from service.reconcilers import planned_work
from tests.service.clouds.test_any_order import Known, fact

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR_S, DAY_S = 3_600, 86_400
NEAR_S = LEAD.total_seconds() / 2


def event(name: str, in_s: float | None, *, said_s: float = 0.0, closed: bool = False) -> CloudFact:
    found = fact("aws-queue", FactKind.MAINTENANCE, in_s or 0.0, takes_back=closed)
    at = None if in_s is None else found.deadline_at
    return replace(found, event_id=name, said_at=NOW + timedelta(seconds=said_s), deadline_at=at)


def after(*said: CloudFact, now: datetime = NOW + timedelta(seconds=100)) -> Known:
    known = Known(LeaseNotices())
    for item in said:
        known.take(item, now)
    return known


def counting(known: Known, now: datetime = NOW) -> list[tuple[str, NoticeKind, float | None]]:
    """Each notice that is not taken back: the event, what it is, and the seconds from noon to its time."""
    return sorted(
        (item.event_id, item.kind, item.deadline_utc and (item.deadline_utc - NOW).total_seconds())
        for item in known.notices.known(now)
        if item.withdrawn_utc is None
    )


def leaves(known: Known, now: datetime) -> bool:
    """Whether jobs leave the node, once what was planned for now has begun."""
    for notice in begun(known.notices.known(now), now):
        known.notices.add(notice, lease_id=1, now=now)
    return any(moves_jobs(item, now) for item in known.notices.known(now))


def test_the_end_of_one_event_says_nothing_of_another():
    for past_s in (-3 * HOUR_S, HOUR_S):
        known = after(event("b", NEAR_S), event("a", past_s, said_s=5, closed=True))
        assert leaves(known, NOW + timedelta(seconds=100))


def test_two_events_are_both_remembered_and_the_nearest_that_is_open_counts():
    known = after(event("a", 2 * HOUR_S), event("b", 3 * DAY_S))
    assert counting(known) == [("a", "rebalance", 2 * HOUR_S), ("b", "rebalance", 3 * DAY_S)]
    assert leaves(known, NOW + timedelta(seconds=2 * HOUR_S - 60))
    over = NOW + timedelta(hours=4)
    known.take(event("a", 2 * HOUR_S, said_s=4 * HOUR_S, closed=True), over)
    assert not leaves(known, over)
    assert leaves(known, NOW + timedelta(seconds=3 * DAY_S - 60))


def test_an_event_that_is_moved_to_later_takes_the_node_then():
    for first_s in (2 * HOUR_S, NEAR_S):
        known = after(event("a", first_s), event("a", 3 * DAY_S, said_s=50))
        assert counting(known) == [("a", "rebalance", 3 * DAY_S)]
        assert not leaves(known, NOW + timedelta(seconds=first_s - 60))
        assert leaves(known, NOW + timedelta(seconds=3 * DAY_S - 60))


def test_an_event_that_has_begun_and_is_moved_lets_the_node_work_until_the_new_time():
    known = after(event("a", 2 * HOUR_S))
    near = NOW + timedelta(seconds=2 * HOUR_S - 500)
    assert leaves(known, near)
    for later_s in (2 * HOUR_S + 100, DAY_S):
        moved = event("a", later_s, said_s=2 * HOUR_S - 500)
        assert known.take(moved, near) in (Disposition.ACTS, Disposition.ADVICE)
        near += timedelta(seconds=1)
        assert [at for _, _, at in counting(known, near)] == [later_s]
    assert not leaves(known, near) and leaves(known, NOW + timedelta(seconds=DAY_S - 60))
    assert len(known.occurrences()) == 4, "advice and what takes the node, for either day"


def test_an_event_that_is_moved_to_sooner_takes_the_node_then():
    known = after(event("a", 3 * DAY_S), event("a", NEAR_S, said_s=50))
    assert counting(known) == [("a", "maintenance", NEAR_S)] and leaves(known, NOW + timedelta(seconds=100))


def test_a_message_without_a_time_moves_nothing_and_a_later_end_of_a_spot_warning_is_no_news():
    known = after(event("a", 3 * DAY_S))
    assert known.take(event("a", None, said_s=50), NOW + timedelta(seconds=100)) is Disposition.REPEATED
    warning = fact("aws-queue", FactKind.INTERRUPTION, 120)
    known = after(warning)
    later = replace(warning, said_at=NOW + timedelta(seconds=50), deadline_at=NOW + timedelta(seconds=170))
    assert known.take(later, NOW + timedelta(seconds=100)) is Disposition.REPEATED


words = st.lists(st.sampled_from((NEAR_S, 2 * HOUR_S, 3 * DAY_S, None)), min_size=1, max_size=4)


@given(st.fixed_dictionaries({"a": words, "b": words}), st.data())
def test_of_each_event_the_newest_word_counts_in_any_order_of_messages(said, data):
    """None: it is closed."""
    messages = [
        event(name, 2 * HOUR_S if in_s is None else in_s, said_s=number, closed=in_s is None)
        for name, times in said.items()
        for number, in_s in enumerate(times)
    ]
    known = after(*data.draw(st.permutations(messages)), *data.draw(st.permutations(messages)))
    found = {name: at for name, _, at in counting(known)}
    assert len(found) == len(counting(known))
    assert found == {name: times[-1] for name, times in said.items() if times[-1] is not None}


def test_health_and_capacity_blocks_name_their_events():
    detail = {"service": "EC2", "eventTypeCategory": "scheduledChange", "affectedEntities": [{"entityValue": "i-0a1"}]}
    health = {"detail-type": "AWS Health Event", "time": "2026-01-01T00:00:00Z", "detail": detail}
    for arn, expected in (("arn:aws:health:us-east-1::event/EC2/X/1", None), (None, ""), (7, "")):
        (said,) = read_message(json.dumps(health | {"detail": detail | {"eventArn": arn}}), "m").facts
        assert said.event_id == (arn if expected is None else expected)
    block = {"capacity-reservation-id": "cr-0a1", "end-date": "2026-01-02T00:00:00Z"}
    ends = health | {"detail-type": "Capacity Block Reservation Expiration Warning", "detail": block}
    reservation = read_message(json.dumps(ends), "m").reservation
    assert reservation is not None and reservation.of_machine("i-0a1", "p5").event_id == "cr-0a1"


def test_an_id_that_a_notice_cannot_hold_is_told_from_another_one():
    long = "a" * 300
    assert len({event_id_of(long + end) for end in "xy"}) == 2 and event_id_of("arn:x") == "arn:x"
    assert all(len(event_id_of(name)) == 64 for name in (long, "a\0", "\ud800"))


def test_events_of_one_machine_lie_side_by_side_in_the_database(on_machines, tell, client, context, clock):
    _, a, b = on_machines
    planned = {"kind": FactKind.MAINTENANCE}
    for name, days in (("arn:a", 1), ("arn:b", 3)):
        assert tell(in_s=days * DAY_S, event_id=name, **planned).disposition is Disposition.ADVICE
    clock.advance(1)
    taken = tell(in_s=2 * DAY_S, event_id="arn:a", **planned)
    assert taken.disposition is Disposition.ADVICE and taken.reason.startswith("moved from 2026-")
    shown = client.get("/api/v1/notices").json()
    assert len(shown) == 2 and all(entry["open"] for entry in shown)
    assert len({entry["deadline_at"] for entry in shown}) == 2
    clock.advance(DAY_S)
    assert planned_work.tick(context) == 0, "it was moved"
    clock.advance(DAY_S - LEAD.total_seconds())
    assert planned_work.tick(context) == 1 and client.get("/api/v1/nodes/a").json()["leaving"]
    tell(in_s=0, event_id="arn:b", is_withdrawal=True, **planned)
    assert client.get("/api/v1/nodes/a").json()["leaving"], "that was another event"
    assert tell(in_s=5 * DAY_S, event_id="arn:a", **planned).disposition is Disposition.ADVICE
    assert not client.get("/api/v1/nodes/a").json()["leaving"]
    for agent in (a, b):
        agent.sync()
        assert not any(moves_jobs(said, clock()) for said in agent.job_order().notices)
