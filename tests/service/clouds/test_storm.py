"""`make storm` at a size of seconds, and that its judge would see what it looks for."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("moto")

from service.clouds.aws.events import read_message
from tests.benchmarks.storm import Found, Told, judge, main
from tests.benchmarks.storm_messages import ANNOUNCES, FOREIGN, MALFORMED, REPEATED, body_of, machines_of, storm

NOW = datetime(2026, 1, 1, tzinfo=UTC)
COUNT = 200
NODES = [f"n{number}" for number in range(machines_of(COUNT))]
MESSAGES = storm(COUNT, [f"i-{node}" for node in NODES], seconds=4, seed=1)
SENT = {item.event: item.at_s for item in MESSAGES}


def as_it_must_be() -> tuple[Found, Told]:
    told = Told()
    for node in NODES:
        told.first[node] = told.members[node, node] = 100.0
        told.losses[node] = {("interruption", NOW)}
    found = Found(
        acts=dict.fromkeys(NODES, 1),
        occurrences=dict.fromkeys(NODES, 1),
        events=frozenset((item.event, item.machine) for item in MESSAGES if item.is_ours),
        unread=sum(not item.part for item in MESSAGES),
        counts={"foreign": sum(bool(item.part) and not item.is_ours for item in MESSAGES)},
        heard=dict.fromkeys(NODES, 50.0),
    )
    return found, told


def test_the_storm_has_its_shares_and_the_service_can_read_all_but_what_is_torn():
    assert len(MESSAGES) == COUNT and {item.machine[2:] for item in MESSAGES if item.is_ours} == set(NODES)
    strange = sum(bool(item.part) and not item.is_ours for item in MESSAGES)
    again = sum(item.is_repeated for item in MESSAGES)
    assert strange + again >= (FOREIGN + REPEATED) * COUNT and again == REPEATED * COUNT
    assert sum(not item.part for item in MESSAGES) == MALFORMED * COUNT
    for item in MESSAGES:
        reading = read_message(body_of(item, NOW), "m")
        assert (reading.unread is not None) == (not item.part), item
        if item.part:
            assert [fact.provider_id for fact in reading.facts] == [item.machine]
            assert reading.facts[0].message_id == item.event


def test_each_machine_is_first_announced_before_it_is_stopped():
    for node in NODES:
        of_node = [item for item in MESSAGES if item.machine == f"i-{node}" and not item.is_repeated]
        assert [item.part for item in of_node if item.part in ANNOUNCES] == list(ANNOUNCES)


def test_a_storm_of_which_nothing_is_lost_or_doubled_passes():
    found, told = as_it_must_be()
    report = judge(MESSAGES, SENT, found, told, left=0, dlq=0)
    assert (report["lost"], report["duplicates"], report["acted"], report["expected"]) == (0, 0, len(NODES), len(NODES))
    assert 0 < report["message_to_heard_ms"]["p50"] < report["message_to_order_ms"]["p50"]


@pytest.mark.parametrize("what", ["acts", "occurrences", "events", "unread", "counts"])
def test_what_is_missing_or_done_twice_is_found(what):
    found, told = as_it_must_be()
    changed = {
        "acts": {**found.acts, NODES[0]: 2},
        "occurrences": {**found.occurrences, NODES[0]: 2},
        "events": frozenset(sorted(found.events)[1:]),
        "unread": found.unread - 1,
        "counts": {"foreign": found.counts["foreign"] - 1},
    }
    report = judge(MESSAGES, SENT, replace(found, **{what: changed[what]}), told, left=0, dlq=0)
    is_twice = what in ("acts", "occurrences")
    assert (report["lost"], report["duplicates"]) == ((0, 1) if is_twice else (1, 0))


def test_a_machine_that_nobody_acted_on_or_was_told_of_is_lost():
    found, told = as_it_must_be()
    del told.first[NODES[0]]
    told.losses[NODES[1]] = {("interruption", NOW), ("interruption", NOW + timedelta(seconds=1)), ("maintenance", NOW)}
    found = replace(found, acts={node: 1 for node in NODES if node != NODES[2]})
    report = judge(MESSAGES, SENT, found, told, left=2, dlq=0)
    assert (report["lost"], report["duplicates"], report["told_with_other_times"]) == (4, 0, 1)


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.timeout(400)
def test_nothing_is_lost_or_done_twice_while_the_service_is_killed_and_the_database_away(tmp_path):
    path = tmp_path / "storm.json"
    size = ["--messages", str(COUNT), "--seconds", "3", "--kills", "1", "--away", "2", "--visibility", "5"]
    assert main([*size, "--period", "5", "--settle", "0", "--probes", "5", "--report", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["messages"], report["lost"], report["duplicates"], report["dlq"]) == (COUNT, 0, 0, 0)
    assert report["acted"] == report["expected"] == len(NODES)
    assert [item["what"] for item in report["faults"]] == ["service killed", "database away"]
    assert 0 < report["message_to_order_ms"]["p50"] <= report["message_to_order_ms"]["p99"]
