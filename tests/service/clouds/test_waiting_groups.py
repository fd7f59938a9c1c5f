"""What an Auto Scaling group that waits with the end of a machine is told, and when. Pure."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.clouds.aws.hooks import BEAT_EVERY, HEARTBEATS_MAX, LOOK_EVERY, HookDo, HookView, next_step

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SHORTEST_HOOK = timedelta(seconds=30)
"""A group cannot be set to wait for less."""


def view(
    *, has_lease: bool = True, has_ranks: bool = True, heartbeats: int = 0, ago_s: float | None = None
) -> HookView:
    beat_at = None if ago_s is None else NOON - timedelta(seconds=ago_s)
    return HookView(has_lease=has_lease, has_ranks=has_ranks, heartbeats=heartbeats, beat_at=beat_at)


@pytest.mark.parametrize("found, why", [
    (view(has_ranks=False), "no job has a rank on the node"),
    (view(has_ranks=False, heartbeats=HEARTBEATS_MAX, ago_s=1), "no job has a rank on the node"),
    (view(has_lease=False), "the node is gone"),
])  # fmt: skip
def test_a_group_goes_on_as_soon_as_the_machine_is_empty_or_gone(found, why):
    assert next_step(found, NOON) == (HookDo.COMPLETE, why)


def test_a_group_is_asked_to_wait_at_once_and_again_before_the_shortest_hook_ends():
    assert next_step(view(), NOON)[0] is HookDo.BEAT
    assert next_step(view(ago_s=BEAT_EVERY.total_seconds() - 1), NOON)[0] is HookDo.WAIT
    assert next_step(view(ago_s=BEAT_EVERY.total_seconds()), NOON)[0] is HookDo.BEAT
    assert BEAT_EVERY + LOOK_EVERY < SHORTEST_HOOK


def test_more_heartbeats_than_auto_scaling_takes_are_not_sent_and_the_reason_says_so():
    do, why = next_step(view(heartbeats=HEARTBEATS_MAX, ago_s=60), NOON)
    assert do is HookDo.WAIT and str(HEARTBEATS_MAX) in why


@given(st.booleans(), st.integers(0, HEARTBEATS_MAX + 1), st.none() | st.floats(0, 600))
def test_while_a_rank_is_on_a_living_node_no_group_is_told_to_go_on(has_lease, heartbeats, ago_s):
    """And a machine that is empty is never kept."""
    at_work = view(has_lease=has_lease, heartbeats=heartbeats, ago_s=ago_s)
    assert (next_step(at_work, NOON)[0] is HookDo.COMPLETE) == (not has_lease)
    empty = view(has_lease=has_lease, has_ranks=False, heartbeats=heartbeats, ago_s=ago_s)
    assert next_step(empty, NOON)[0] is HookDo.COMPLETE
