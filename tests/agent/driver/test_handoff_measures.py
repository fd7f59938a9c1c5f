"""What the ranks measured, put together: seconds by their maximum, bytes by their sum, the pause over all of them."""

import pytest

from agent.driver.handoff_measures import EXTRA_MAX, PHASES_MAX, merge_measures
from agent.protocol.sync import HandoffMeasures


def test_measures_take_the_longest_phase_the_sum_of_bytes_and_the_pause_over_all_ranks() -> None:
    first = {"build_s": 2.0, "bytes_moved": 10.0, "reduced_at_utc": 100.0, "optimizer_s": 0.1, "median_step_s": 0.5}
    second = {"build_s": 3.0, "bytes_moved": 5.0, "read_s": 0.5, "first_forward_at_utc": 101.1, "peak_rss": 7.0}
    second["optimizer_s"] = 0.4  # waited for the other rank in it, which is no optimizer time
    merged = merge_measures([first, second], HandoffMeasures(phases_s={"to_ready": 4.0}))
    assert merged.phases_s == {"build": 3.0, "read": 0.5, "to_ready": 4.0}
    assert (merged.bytes_moved, merged.bandwidth_bytes_per_s) == (15, 30.0)
    assert merged.pause_s == pytest.approx(1.0)
    assert merged.pause_steps == pytest.approx(2.0)
    assert merged.extra == {"peak_rss": 7.0}


def test_bytes_that_were_rescued_are_told_as_a_sum() -> None:
    merged = merge_measures([{"bytes_rescued": 8.0, "bytes_moved": 1.0}, {"bytes_rescued": 4.0}], HandoffMeasures())
    assert (merged.extra, merged.bytes_moved) == ({"bytes_rescued": 12.0}, 1)


def test_seconds_of_one_step_are_no_phase_and_are_shown_apart() -> None:
    merged = merge_measures([{"follow_s": 0.2, "stream_s": 3.0}, {"follow_s": 0.3}], HandoffMeasures())
    assert merged.phases_s == {"stream": 3.0}
    assert merged.extra == {"follow_s": 0.3}


def test_where_nothing_was_measured_nothing_is_known() -> None:
    driver = HandoffMeasures(phases_s={"to_ready": 4.0}, lost_s=1.5, cutover_step=7)
    assert merge_measures([], driver) == merge_measures([{}], driver) == driver


def test_every_count_of_bytes_is_summed_and_memory_is_that_of_the_fullest_rank() -> None:
    names = ("planned", "moved", "reread", "replayed", "lower_bound")
    ranks = [{f"bytes_{name}": 10.0 * at for at, name in enumerate(names)}, {"bytes_reread": 0.5, "bytes_planned": 3.0}]
    ranks[0] |= {"extra_bytes_peak": 5.0, "extra_bytes_budget": 9.0}
    ranks[1] |= {"extra_bytes_peak": 7.0, "extra_bytes_budget": -1.0}
    merged = merge_measures(ranks, HandoffMeasures())
    found = [getattr(merged, f"bytes_{name}") for name in names]
    assert found == [3, 10, 20, 30, 40]
    assert (merged.extra_bytes_peak, merged.extra_bytes_budget) == (7, 9)
    assert merged.extra == {}
    assert merge_measures([{"extra_bytes_peak": -3.0}], HandoffMeasures()).extra_bytes_peak == 0


@pytest.mark.parametrize(
    ("ranks", "pause_s", "pause_steps"),
    [
        ([{"first_forward_at_utc": 10.0, "reduced_at_utc": 9.0}], 1.0, None),
        ([{"first_forward_at_utc": 10.0, "reduced_at_utc": 9.9, "optimizer_s": 0.5, "median_step_s": 2.0}], 0.0, 0.0),
        ([{"reduced_at_utc": 9.0, "pause_s": 4.0, "median_step_s": 2.0}], 4.0, 2.0),
        ([{"first_forward_at_utc": 9.0, "pause_s": 4.0, "median_step_s": 0.0}, {"pause_s": 3.0}], 4.0, None),
        ([{"median_step_s": 2.0}], None, None),
    ],
)
def test_a_pause_is_that_of_all_ranks_else_the_longest_that_one_measured(
    ranks: list[dict[str, float]], pause_s: float | None, pause_steps: float | None
) -> None:
    merged = merge_measures(ranks, HandoffMeasures())
    assert merged.pause_s == (None if pause_s is None else pytest.approx(pause_s))
    assert merged.pause_steps == (None if pause_steps is None else pytest.approx(pause_steps))
    assert (merged.phases_s, merged.extra) == ({}, {}), "neither phases nor anything else"


@pytest.mark.parametrize(("ranks", "speed"), [
    ([{"bytes_moved": 8.0, "read_s": 2.0}, {"bytes_moved": 4.0, "read_s": 3.0}], 4.0),
    ([{"bytes_moved": 8.0, "read_s": 0.0}], None), ([{"bytes_moved": 0.0, "read_s": 1.0}], None),
    ([{"bytes_moved": 8.0}], None), ([{"read_s": 2.0}], None),
])  # fmt: skip
def test_the_bandwidth_is_all_bytes_in_the_longest_read(ranks: list[dict[str, float]], speed: float | None) -> None:
    assert merge_measures(ranks, HandoffMeasures()).bandwidth_bytes_per_s == speed


def test_moments_are_no_measures_and_a_clock_that_went_back_is_no_time() -> None:
    merged = merge_measures([{"ordered_at_utc": 9.0, "build_s": -0.5}], HandoffMeasures(extra={"own": 1.0}))
    assert (merged.phases_s, merged.extra) == ({"build": 0.0}, {"own": 1.0})


def test_what_the_leader_measured_itself_counts_and_there_is_room_for_so_many_names_only() -> None:
    ranks = [{**{f"phase{at:03}_s": 1.0 for at in range(70)}, **{f"other{at:03}": 2.0 for at in range(70)}}]
    merged = merge_measures(ranks, HandoffMeasures(phases_s={"phase000": 5.0}, extra={"other000": 6.0}))
    assert (len(merged.phases_s), len(merged.extra)) == (PHASES_MAX, EXTRA_MAX)
    assert (merged.phases_s["phase000"], merged.extra["other000"]) == (5.0, 6.0)
