"""When a node that sends no reports counts as silent, then as gone, and which node gets no rank."""

from datetime import UTC, datetime, timedelta

import pytest

from service.nodes.listening import Listening
from service.nodes.rules import (
    announces_its_end,
    answers,
    are_many,
    has_outlived_its_end,
    heard_until,
    state_of,
)
from service.nodes.tables import NodeState

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("silence_s", "listening_s", "state"),
    [
        (5.9, 999, NodeState.READY),
        (6, 999, NodeState.SILENT),
        (29.9, 999, NodeState.SILENT),
        (30, 999, NodeState.GONE),
        (3_600, 3, NodeState.READY),
        (3_600, 10, NodeState.SILENT),
    ],
)
def test_only_silence_while_the_service_was_listening_counts(silence_s, listening_s, state):
    listening = Listening(NOW - timedelta(seconds=listening_s))
    counted_s = listening.silence_s(NOW - timedelta(seconds=silence_s), NOW)
    assert state_of(counted_s, silent_after_s=6, gone_after_s=30) is state


@pytest.mark.parametrize(
    ("fallen", "heard", "are"),
    [(4, 4, True), (4, 5, False), (3, 0, False), (3, 1, False), (4, 0, True), (50, 50, True), (50, 51, False)],
)
def test_four_nodes_or_more_that_are_at_least_half_of_all_are_many(fallen, heard, are):
    assert are_many(fallen, heard=heard) is are


@pytest.mark.parametrize(
    ("newest_s", "nodes", "silence_s"),
    [
        (0.5, 3, 0.0),
        (3.0, 3, 0.0),
        (40.0, 3, 37.0),
        (119.0, 2, 116.0),
        (120.0, 2, 117.0),
        (121.0, 2, 0.0),
        (40.0, 1, 0.0),
    ],
)
def test_when_all_nodes_fall_silent_together_the_service_is_deaf_for_a_while(newest_s, nodes, silence_s):
    until = heard_until(NOW - timedelta(seconds=newest_s), nodes=nodes, now=NOW, silent_after_s=6)
    assert (NOW - until).total_seconds() == silence_s


def test_only_a_source_that_announces_a_loss_bars_its_node():
    assert announces_its_end({"announces": ["rebalance", "maintenance"]})
    assert not announces_its_end({"announces": ["rebalance"]})
    assert not announces_its_end(None)


def test_a_node_has_outlived_its_end_only_where_nothing_else_announces_it():
    assert has_outlived_its_end({"announces": ["rebalance"], "overdue": ["interruption"]})
    assert not has_outlived_its_end({"announces": ["maintenance"], "overdue": ["interruption"]})
    assert not has_outlived_its_end({"announces": [], "overdue": ["rebalance"]}) and not has_outlived_its_end(None)


def test_a_machine_that_answered_another_agent_six_seconds_ago_is_there():
    for ago_s, is_there in ((0.0, True), (6.0, True), (6.1, False)):
        assert answers(NOW - timedelta(seconds=ago_s), NOW) is is_there
    assert not answers(None, NOW)


def test_where_no_node_was_ever_heard_it_is_not_the_service_that_is_deaf():
    assert heard_until(None, nodes=3, now=NOW, silent_after_s=6) == NOW
