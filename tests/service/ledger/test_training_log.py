"""What a training log says of the productive time, beside what the ledger has."""

import pytest

from service.ledger.training_log import ALLOWED, WorldAccount, compare, difference, read_log

FOUR = frozenset((node, 0) for node in "abcd")
THREE = frozenset((node, 0) for node in "abe")


def lines(*steps: tuple[int, int, float, str]) -> list[str]:
    return [
        f"step {step} generation {generation} loss 0.691234 {seconds:.3f} s at 2026-01-01T12:{at}+00:00\n"
        for step, generation, seconds, at in steps
    ]


TEN = [(number, 1, 0.4, f"00:{number:02d}.000000") for number in range(1, 11)]


def test_a_world_is_productive_from_the_begin_of_its_first_step_to_the_end_of_its_last():
    """What lies between two of its steps, such as a checkpoint, is too."""
    found = compare(read_log(lines(*TEN)), [WorldAccount(1, FOUR, None, 4 * 9.4)])
    assert [(item.steps, item.ranks, round(item.log_s, 6)) for item in found] == [(10, 4, 37.6)]
    assert difference(found) < 1e-6


def test_ranks_that_stay_in_a_handoff_work_for_the_next_world_at_once_but_for_the_pause():
    handed_over = lines(*TEN, (11, 2, 0.05, "00:11.000000"), (12, 2, 0.4, "00:12.000000"))
    worlds = [WorldAccount(1, FOUR, None, 4 * 9.4), WorldAccount(2, THREE, 0.25, 3 * 1.05 + 2 * 0.7)]
    found = compare(read_log(handed_over), worlds)
    assert [round(item.log_s, 6) for item in found] == [37.6, 4.55]
    assert difference(found) < 1e-6


def test_a_handoff_amid_steps_that_are_made_again_is_productive_from_the_first_new_one_on():
    again = [(number, 11, 0.4, f"01:{number:02d}.000000") for number in (8, 9)]
    after = [(number, 12, 0.4, f"01:{number:02d}.000000") for number in (10, 11)]
    worlds = [WorldAccount(1, FOUR, None, 37.6), WorldAccount(11, FOUR, None, 0.0), WorldAccount(12, THREE, 0.25, 3.0)]
    found = compare(read_log(lines(*TEN, *again, *after)), worlds)
    assert [round(item.log_s, 6) for item in found] == [37.6, 0.0, 3.0]


def test_a_pause_that_took_no_time_at_all_is_no_pause():
    handed_over = lines(*TEN, (11, 2, 0.05, "00:11.000000"), (12, 2, 0.4, "00:12.000000"))
    worlds = [WorldAccount(1, FOUR, None, 4 * 9.4), WorldAccount(2, THREE, 0.0, 3 * 1.05 + 2 * 0.95)]
    assert [round(item.log_s, 6) for item in compare(read_log(handed_over), worlds)] == [37.6, 5.05]


def test_steps_that_are_made_again_are_not_productive():
    again = [(number, 11, 0.4, f"01:{number:02d}.000000") for number in range(8, 13)]
    found = compare(
        read_log(lines(*TEN, *again)), [WorldAccount(1, FOUR, None, 37.6), WorldAccount(11, FOUR, None, 8.0)]
    )
    assert [round(item.log_s, 6) for item in found] == [37.6, 8.0], "of steps 8 to 12 only the last two are new"


def test_work_that_only_one_of_them_knows_makes_a_difference():
    worlds = [WorldAccount(1, FOUR, None, 37.6), WorldAccount(11, FOUR, None, 5.0)]
    found = compare(read_log(lines(*TEN)), worlds)
    assert [(item.generation, item.log_s, item.ledger_s) for item in found] == [
        (1, pytest.approx(37.6), 37.6), (11, 0.0, 5.0),
    ]  # fmt: skip
    assert difference(found) == pytest.approx(5.0 / 37.6)
    assert difference(compare([], worlds)) == 1.0
    unknown = compare(read_log(lines(*TEN)), [])
    assert [(item.generation, item.ranks, item.ledger_s) for item in unknown] == [(1, 0, 0.0)]


def test_only_lines_of_steps_are_read_and_each_step_once():
    text = ["rank 0 | " + lines(TEN[0])[0], lines(TEN[0])[0], "step 9 of 10\n", "handoff x to generation 2: active\n"]
    assert len(read_log(text)) == 1
    assert read_log(["step 7 generation 2 loss 1.5 0.3 s\n"]) == [], "written by a release that gave no time"


def test_the_half_percent_that_is_allowed_is_half_a_percent():
    found = compare(read_log(lines(*TEN)), [WorldAccount(1, FOUR, None, 37.6 * 1.0049)])
    assert difference(found) < ALLOWED
    found = compare(read_log(lines(*TEN)), [WorldAccount(1, FOUR, None, 37.6 * 1.0051)])
    assert difference(found) > ALLOWED
