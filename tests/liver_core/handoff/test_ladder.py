"""The first rung that fits is taken, and it is said of every rung above it why it is not. Pure."""

from dataclasses import replace

import pytest

from liver_core.handoff import LadderInputs, Rung, choose_rung
from liver_core.handoff.ladder import RungChoice, cutover_deadlines, rung_for_nearer_deadline, unhurried_s

ROOMY = LadderInputs(
    bytes_to_move=10_000_000_000,
    bandwidth_bytes_per_s=1e9,
    prepare_s=20.0,
    step_s=5.0,
    seconds_to_boundary=3.0,
    seconds_to_deadline=105.0,
    margin_s=10.0,
    sources_whole=True,
    nodes_left=3,
    nodes_least=2,
    checkpoint_age_steps=40,
    stream_share=0.5,
    follow_s=1.0,
    one_sided=True,
    replay_refusal="",
    stream_failure="",
    bytes_only_leaving=4_000_000_000,
    endpoints_s=2.0,
    ranks_staying=3,
    rescue_failure="",
)
TWO_SIDED = replace(ROOMY, one_sided=False)
LONG_STEPS = replace(ROOMY, step_s=300.0, seconds_to_boundary=200.0)
IN_PARTS = replace(LONG_STEPS, part_s=10.0)
HUGE = replace(
    ROOMY, bytes_to_move=133_000_000_000, bytes_only_leaving=33_000_000_000, follow_s=5.0, seconds_to_deadline=600.0
)
"""It cannot follow the steps, and a copy in the pause takes 133 s."""


def test_with_time_enough_the_state_streams_while_the_job_trains():
    choice = choose_rung(ROOMY)
    assert choice.rung is Rung.LIVE
    # 20 s to build, 20 s to copy at half the bandwidth, 5 of them more for the steps done meanwhile, two steps to the
    # certificate, one to the boundary, and its gradients.
    assert choice.estimate_s == 20.0 + 20.0 / (1 - 1 / 5) + 3 * 5.0 + 1.0
    assert choice.reason == "live: needs 61.0 s of the 105.0 s left, margin 10.0 s"


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (replace(ROOMY, seconds_to_deadline=71.0), Rung.LIVE),
        (replace(ROOMY, seconds_to_deadline=70.9), Rung.STOP_AND_COPY),
        (replace(ROOMY, seconds_to_deadline=45.0), Rung.STOP_AND_COPY),
        (replace(ROOMY, seconds_to_deadline=44.9), Rung.RESCUE),
        (replace(ROOMY, seconds_to_boundary=94.0), Rung.LIVE),
        (replace(TWO_SIDED, seconds_to_boundary=85.0), Rung.STOP_AND_COPY),
        (replace(TWO_SIDED, seconds_to_boundary=85.1), Rung.RESCUE),
        # Nothing fits with margin: what is quickest is tried, and a rescue whatever it takes.
        (replace(ROOMY, seconds_to_boundary=94.1), Rung.LIVE),
        (replace(TWO_SIDED, seconds_to_boundary=91.1), Rung.RESCUE),
        (replace(TWO_SIDED, seconds_to_boundary=200.0), Rung.RESCUE),
        (replace(TWO_SIDED, seconds_to_boundary=94.0, ranks_staying=0), Rung.STOP_AND_COPY),
        (replace(TWO_SIDED, seconds_to_boundary=95.1, ranks_staying=0), Rung.CHECKPOINT),
        (replace(ROOMY, stream_share=0.25), Rung.LIVE),
        (replace(ROOMY, stream_share=0.2), Rung.STOP_AND_COPY),
        (replace(ROOMY, stream_share=0.0), Rung.STOP_AND_COPY),
        (replace(ROOMY, follow_s=4.9), Rung.STOP_AND_COPY),
        (replace(ROOMY, follow_s=5.0, seconds_to_deadline=None), Rung.STOP_AND_COPY),
        (replace(ROOMY, step_s=0.0, follow_s=0.1), Rung.STOP_AND_COPY),
        (replace(ROOMY, seconds_to_deadline=None), Rung.LIVE),
        (replace(ROOMY, seconds_to_deadline=None, bytes_to_move=0, bandwidth_bytes_per_s=0.0, follow_s=0.0), Rung.LIVE),
        (replace(TWO_SIDED, seconds_to_deadline=None), Rung.STOP_AND_COPY),
        (replace(ROOMY, replay_refusal="fused AdamW"), Rung.STOP_AND_COPY),
        (replace(ROOMY, stream_failure="fell out of the ring"), Rung.STOP_AND_COPY),
        (replace(ROOMY, memory_refusal="too large"), Rung.CHECKPOINT),
        (replace(ROOMY, sources_whole=False), Rung.CHECKPOINT),
        (replace(ROOMY, bandwidth_bytes_per_s=0.0), Rung.CHECKPOINT),
        (replace(ROOMY, nodes_left=1), Rung.SUSPEND),
        (replace(ROOMY, nodes_left=1, sources_whole=False, checkpoint_age_steps=None), Rung.SUSPEND),
        (LONG_STEPS, Rung.RESCUE),
        (replace(LONG_STEPS, ranks_staying=0), Rung.CHECKPOINT),
        (IN_PARTS, Rung.DROP_STEP),
        (replace(IN_PARTS, one_sided=False), Rung.RESCUE),
        (replace(IN_PARTS, one_sided=False, seconds_to_boundary=90.0), Rung.RESCUE),
        # The next boundary comes before endpoints are connected, and the one after it too late.
        (replace(IN_PARTS, one_sided=False, seconds_to_boundary=1.9), Rung.RESCUE),
        (replace(LONG_STEPS, one_sided=False, step_s=89.0, seconds_to_boundary=1.9), Rung.RESCUE),
        (replace(IN_PARTS, seconds_to_deadline=None), Rung.LIVE),
        (replace(IN_PARTS, part_s=22.5), Rung.DROP_STEP),
        (replace(IN_PARTS, part_s=27.6), Rung.DROP_STEP),
        (replace(IN_PARTS, part_s=32.6, ranks_staying=0), Rung.CHECKPOINT),
        (replace(IN_PARTS, seconds_to_deadline=70.0), Rung.DROP_STEP),
        (replace(IN_PARTS, seconds_to_deadline=69.9), Rung.DROP_STEP),
        (replace(IN_PARTS, seconds_to_deadline=59.9), Rung.RESCUE),
        # A boundary that is near does not help where the copy after it comes too late.
        (replace(IN_PARTS, step_s=70.0, seconds_to_boundary=1.0), Rung.DROP_STEP),
        (replace(IN_PARTS, step_s=65.0, seconds_to_boundary=1.0), Rung.STOP_AND_COPY),
        (replace(ROOMY, seconds_to_deadline=25.0), Rung.RESCUE),
        (replace(ROOMY, seconds_to_deadline=17.0), Rung.RESCUE),
        (replace(ROOMY, seconds_to_deadline=16.9), Rung.RESCUE),
        (replace(ROOMY, seconds_to_deadline=0.1), Rung.RESCUE),
        (replace(ROOMY, seconds_to_deadline=0.0), Rung.CHECKPOINT),
        (replace(ROOMY, seconds_to_deadline=-201.7), Rung.CHECKPOINT),
        (replace(ROOMY, seconds_to_deadline=25.0, endpoints_s=9.0), Rung.RESCUE),
        (replace(ROOMY, seconds_to_deadline=25.0, endpoints_s=8.0), Rung.RESCUE),
        (replace(ROOMY, seconds_to_deadline=25.0, ranks_staying=0), Rung.CHECKPOINT),
        (replace(ROOMY, seconds_to_deadline=25.0, rescue_failure="budget"), Rung.CHECKPOINT),
    ],
)
def test_the_first_rung_that_fits_is_taken_and_all_above_it_are_named(inputs: LadderInputs, expected: Rung):
    choice = choose_rung(inputs)
    assert choice.rung is expected, choice.reason
    rungs = list(Rung)
    assert [rung for rung, _ in choice.verdicts] == rungs[: rungs.index(expected) + 1]
    assert all(text for _, text in choice.verdicts)


@pytest.mark.parametrize(
    ("inputs", "rung", "text"),
    [
        (TWO_SIDED, Rung.LIVE, "the transport has no one-sided reads"),
        (replace(ROOMY, replay_refusal="fused AdamW"), Rung.LIVE, "steps cannot be replayed: fused AdamW"),
        (replace(ROOMY, memory_refusal="9 of 8"), Rung.STOP_AND_COPY, "the next world was refused: 9 of 8"),
        (replace(ROOMY, stream_failure="ring"), Rung.LIVE, "it failed before in this world: ring"),
        (
            replace(ROOMY, follow_s=6.0),
            Rung.LIVE,
            "following a step takes 6.00 s, a step 5.00 s: it never converges",
        ),
        (
            replace(ROOMY, seconds_to_deadline=50.0),
            Rung.LIVE,
            "needs 61.0 s and 10.0 s of margin, 50.0 s are left",
        ),
        (TWO_SIDED, Rung.DROP_STEP, "the transport has no one-sided reads"),
        (
            replace(ROOMY, seconds_to_deadline=50.0),
            Rung.DROP_STEP,
            "the job's steps are not done in parts",
        ),
        (
            replace(ROOMY, seconds_to_deadline=50.0, part_s=1.0),
            Rung.DROP_STEP,
            "a copy at the boundary ends in 35.0 s: no step needs to be dropped",
        ),
        (
            replace(ROOMY, seconds_to_deadline=None, replay_refusal="", follow_s=5.0),
            Rung.DROP_STEP,
            "following a step takes 5.00 s, a step 5.00 s: it never converges",
        ),
        (IN_PARTS, Rung.DROP_STEP, "needs 60.0 s of the 105.0 s left, margin 10.0 s"),
        (
            replace(IN_PARTS, part_s=33.0),
            Rung.DROP_STEP,
            "needs 106.0 s and 10.0 s of margin, 105.0 s are left",
        ),
        (
            replace(ROOMY, seconds_to_deadline=25.0),
            Rung.STOP_AND_COPY,
            "needs 35.0 s and 10.0 s of margin, 25.0 s are left",
        ),
        (
            replace(ROOMY, seconds_to_deadline=25.0),
            Rung.RESCUE,
            "needs 7.0 s of the 25.0 s left, margin 10.0 s",
        ),
        (
            replace(ROOMY, seconds_to_deadline=25.0, ranks_staying=0),
            Rung.RESCUE,
            "no rank of the running world stays",
        ),
        (
            replace(ROOMY, seconds_to_deadline=25.0, rescue_failure="budget"),
            Rung.RESCUE,
            "it failed before in this world: budget",
        ),
        (replace(ROOMY, seconds_to_deadline=-1.0), Rung.CHECKPOINT, "40 steps (200.0 s) are done again"),
        (replace(ROOMY, seconds_to_deadline=-1.0), Rung.RESCUE, "needs 7.0 s, the deadline was 1.0 s ago"),
        (
            replace(ROOMY, seconds_to_deadline=16.0),
            Rung.RESCUE,
            "needs 7.0 s and 10.0 s of margin, 16.0 s are left; tried all the same, since nothing else fits",
        ),
        (
            replace(ROOMY, sources_whole=False, checkpoint_age_steps=None),
            Rung.CHECKPOINT,
            "none was written, the job starts from its first step",
        ),
        (replace(ROOMY, sources_whole=False), Rung.RESCUE, "a rank of the running world is lost"),
        (replace(ROOMY, bandwidth_bytes_per_s=0.0), Rung.STOP_AND_COPY, "no bandwidth was measured"),
        (replace(ROOMY, nodes_left=1), Rung.CHECKPOINT, "1 nodes are left, the job needs 2"),
        (HUGE, Rung.STOP_AND_COPY, "copying takes 133.0 s, and the pause ends 120.0 s after the boundary"),
        (
            replace(HUGE, bytes_only_leaving=121_000_000_000),
            Rung.RESCUE,
            "copying takes 121.0 s, and the pause ends 120.0 s after the boundary",
        ),
        (
            replace(HUGE, seconds_to_deadline=None),
            Rung.RESCUE,
            "no deadline: the running world need not end before the next one stands",
        ),
        (replace(ROOMY, seconds_to_deadline=None), Rung.LIVE, "needs 61.0 s, no deadline"),
    ],
)
def test_what_is_said_of_a_rung_names_its_numbers(inputs: LadderInputs, rung: Rung, text: str):
    assert dict(choose_rung(inputs).verdicts)[rung] == text


@pytest.mark.parametrize(
    ("boundary_s", "endpoints_s", "step_s", "needs_s"),
    [
        (3.0, 2.0, 5.0, 7.0), (2.0, 2.0, 5.0, 6.0), (1.0, 2.0, 5.0, 10.0), (1.0, 6.0, 5.0, 10.0),
        (1.0, 6.1, 5.0, 15.0), (1.0, 2.0, 0.0, 6.0),
    ],
)  # fmt: skip
def test_a_rescue_copies_at_the_first_boundary_at_which_endpoints_are_connected(
    boundary_s: float, endpoints_s: float, step_s: float, needs_s: float
):
    found = replace(ROOMY, seconds_to_boundary=boundary_s, endpoints_s=endpoints_s, step_s=step_s)
    choice = choose_rung(replace(found, seconds_to_deadline=26.0))
    assert (choice.rung, choice.estimate_s) == (Rung.RESCUE, pytest.approx(needs_s))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (HUGE, Rung.RESCUE),
        (replace(HUGE, bytes_to_move=120_000_000_000), Rung.STOP_AND_COPY),
        (replace(HUGE, bytes_only_leaving=120_000_000_000), Rung.RESCUE),
        (replace(HUGE, bytes_only_leaving=121_000_000_000), Rung.CHECKPOINT),
        (replace(HUGE, bytes_only_leaving=121_000_000_000, seconds_to_deadline=130.0), Rung.CHECKPOINT),
        (replace(HUGE, seconds_to_deadline=None), Rung.CHECKPOINT),
        (replace(HUGE, seconds_to_deadline=None, follow_s=1.0), Rung.LIVE),
        # Live is too late, so is a copy in the pause too long; with the state beside the step only that is lost.
        (replace(HUGE, follow_s=4.0, seconds_to_deadline=900.0, part_s=1.0), Rung.DROP_STEP),
    ],
)
def test_no_rung_is_taken_whose_copy_outlasts_the_pause(inputs: LadderInputs, expected: Rung):
    choice = choose_rung(inputs)
    assert choice.rung is expected, choice.reason
    copied = {Rung.STOP_AND_COPY: inputs.bytes_to_move, Rung.RESCUE: inputs.bytes_only_leaving}.get(choice.rung, 0)
    assert copied / inputs.bandwidth_bytes_per_s <= cutover_deadlines(inputs).target_s


def test_the_time_that_is_left_decides_between_the_rungs():
    assert {choose_rung(replace(LONG_STEPS, seconds_to_deadline=left)).rung for left in (None, 900.0, 60.0, -1.0)} == {
        Rung.LIVE,
        Rung.STOP_AND_COPY,
        Rung.RESCUE,
        Rung.CHECKPOINT,
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        *(
            ({name: -0.1}, f"^{name}: must not be negative, is -0.1$")
            for name in (
                "bytes_to_move",
                "bandwidth_bytes_per_s",
                "prepare_s",
                "step_s",
                "seconds_to_boundary",
                "margin_s",
                "stream_share",
                "follow_s",
                "bytes_only_leaving",
                "endpoints_s",
                "ranks_staying",
                "part_s",
            )
        ),
        ({"stream_share": 1.5}, "stream_share: must not exceed 1"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_name(changes: dict, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        choose_rung(replace(ROOMY, **changes))
    choose_rung(replace(ROOMY, **dict.fromkeys(changes, 0)))


@pytest.mark.parametrize(
    ("left_s", "rung", "spent_s", "expected"),
    [
        # Whatever else would be chosen now, what was begun goes on.
        (105.0, Rung.STOP_AND_COPY, 0.0, Rung.STOP_AND_COPY),
        (None, Rung.STOP_AND_COPY, 0.0, Rung.STOP_AND_COPY),
        (45.0, Rung.LIVE, 0.0, Rung.LIVE),
        # A copy needs 20 s of preparation, 10 s and a step of 5 s, and 10 s of margin.
        (44.9, Rung.LIVE, 0.0, Rung.RESCUE),
        (44.9, Rung.LIVE, 1.0, Rung.LIVE),
        (25.0, Rung.LIVE, 20.0, Rung.LIVE),
        # No more than 20 s can have been spent to any use.
        (24.9, Rung.LIVE, 25.0, Rung.RESCUE),
        (24.9, Rung.RESCUE, 25.0, Rung.RESCUE),
        (0.0, Rung.LIVE, 0.0, Rung.LIVE),
    ],
)
def test_a_nearer_deadline_makes_a_rescue_of_an_open_handoff_where_only_that_is_in_time(
    left_s, rung, spent_s, expected
):
    taken, why = rung_for_nearer_deadline(replace(ROOMY, seconds_to_deadline=left_s), rung, spent_s=spent_s)
    assert taken is expected
    if expected is rung:
        assert why == ""
    else:
        assert why.startswith("; live: ") and f"; rescue: needs 7.0 s of the {left_s} s left" in why


def test_a_handoff_that_nothing_presses_has_three_times_its_estimate_and_an_hour_at_most():
    for estimate_s, limit_s in ((0.0, 0.0), (61.0, 183.0), (1_199.0, 3_597.0), (1_201.0, 3_600.0)):
        assert unhurried_s(RungChoice(Rung.LIVE, estimate_s, ())) == limit_s
