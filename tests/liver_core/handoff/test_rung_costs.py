"""What each rung costs in all: medians of what was measured, guesses that say so, and the choice by cost. Pure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.handoff import CostParts, LadderInputs, MeasuredCost, Prefer, Rung, RungChoice, choose_rung
from liver_core.handoff.ladder import weigh
from liver_core.handoff.rung_costs import NEWEST, choose_by, estimate_costs, newest, noise_s
from tests.liver_core.handoff.test_ladder import ROOMY, TWO_SIDED

CALM = replace(ROOMY, seconds_to_deadline=None)
LIVE = MeasuredCost(Rung.LIVE, CostParts(1.0, 2.0, 0.25, 0.5))
COPIED = MeasuredCost(Rung.STOP_AND_COPY, CostParts(1.0, 0.0, 1.5, 0.25))


def by_total(inputs: LadderInputs, *measured: MeasuredCost) -> RungChoice:
    return choose_by(Prefer.TOTAL, inputs, measured)[0]


def test_an_estimate_is_the_median_of_the_newest_eight_of_its_rung():
    old = [MeasuredCost(Rung.LIVE, CostParts(100.0, 100.0, 100.0, 100.0))] * 20
    recent = [MeasuredCost(Rung.LIVE, CostParts(float(number), 0.0, 0.5, 0.0)) for number in range(NEWEST)]
    live, copied, restart = estimate_costs(CALM, [*old, *recent, COPIED])
    assert (live.parts, live.measured, live.guessed) == (CostParts(3.5, 0.0, 0.5, 0.0), NEWEST, ())
    assert (copied.parts, copied.measured, copied.guessed) == (replace(COPIED.parts, after_s=0.0), 1, ())
    assert str(live) == "4.00 s in all, measured 8 times"
    # 20 s to start, 40 steps of 5 s are done again.
    assert (restart.rung, restart.total_s, restart.guessed) == (Rung.CHECKPOINT, 220.0, ("pause",))
    assert newest([COPIED, *old, *recent]) == (COPIED, *recent), "the rarer rung is not forgotten"


def test_what_was_not_measured_is_a_guess_and_says_which_part_is():
    live, copied, _ = estimate_costs(CALM, [])
    assert live.guessed == ("building", "streaming", "pause", "after") and live.measured == 0
    assert copied.guessed == ("building", "pause", "after")
    assert copied.parts.pause_s == CALM.bytes_to_move / CALM.bandwidth_bytes_per_s
    assert live.parts.pause_s == CALM.follow_s
    live, copied, _ = estimate_costs(CALM, [LIVE])
    assert (live.guessed, copied.guessed) == ((), ("pause",)), "the same world is built on both"
    assert copied.parts == CostParts(1.0, 0.0, 10.0, 0.5)
    assert str(copied) == "11.50 s in all, guessed: pause"
    no_checkpoint = replace(CALM, checkpoint_age_steps=None)
    assert [cost.rung for cost in estimate_costs(no_checkpoint, [])] == [Rung.LIVE, Rung.STOP_AND_COPY]


def test_the_noise_of_the_first_steps_does_not_decide_between_rungs_that_build_the_same_world():
    lucky = [MeasuredCost(Rung.LIVE, CostParts(1.0, 0.5, 0.25, -0.5)), MeasuredCost(Rung.LIVE, LIVE.parts)]
    unlucky = [MeasuredCost(Rung.STOP_AND_COPY, CostParts(1.0, 0.0, 0.5, after_s)) for after_s in (0.75, 0.25)]
    live, copied, _ = estimate_costs(CALM, [*lucky, *unlucky])
    assert live.parts.after_s == copied.parts.after_s == 0.375
    assert live.total_s - copied.total_s == 1.25 + 0.25 - 0.5, "what streaming costs more than the pause saves"
    assert by_total(CALM, *lucky, *unlucky).rung is Rung.STOP_AND_COPY


def test_noise_that_makes_a_cost_negative_leaves_the_order_of_the_rungs():
    early = MeasuredCost(Rung.LIVE, CostParts(0.0, 0.0, 12.0, -15.0))
    live, copied, _ = estimate_costs(CALM, [early])
    assert (live.total_s, copied.total_s) == (-3.0, -5.0)
    assert by_total(CALM, early).rung is Rung.STOP_AND_COPY


def test_the_rung_that_costs_least_in_all_is_taken_and_says_what_both_cost():
    choice = by_total(CALM, LIVE, COPIED)
    assert choice.rung is Rung.STOP_AND_COPY
    assert choice.estimate_s == weigh(Rung.STOP_AND_COPY, CALM).seconds
    assert choice.reason == (
        "live: costs 3.62 s in all, measured 1 times; stop_and_copy: costs 2.88 s in all, measured 1 times"
    )
    cheap = replace(LIVE, parts=CostParts(0.5, 0.5, 0.25, 0.5))
    choice = by_total(CALM, cheap, COPIED)
    assert choice.rung is Rung.LIVE and "stop_and_copy 2.88 s in all" in choice.reason
    assert choose_by(Prefer.PAUSE, CALM, (LIVE, COPIED))[0] == choose_rung(CALM), "the shortest pause by default"


def cost(rung: Rung, total_s: float, *, off_s: float = 0.0) -> MeasuredCost:
    """`off_s`: so much more before the cutover, and as much less after it, where both rungs are alike."""
    return MeasuredCost(rung, CostParts(1.0, off_s, total_s - 1.0, -off_s))


def test_a_rung_that_costs_less_by_no_more_than_noise_does_not_cost_less():
    """Which of two that cost the same is taken would be chance, and live takes more from training beside it."""
    near = (cost(Rung.STOP_AND_COPY, 2.0), cost(Rung.LIVE, 1.875))
    choice = by_total(replace(CALM, step_s=2.0), *near)
    assert choice.rung is Rung.STOP_AND_COPY
    assert "1.88 s in all, measured 1 times, less by no more than noise (0.20 s)" in choice.reason
    assert by_total(replace(CALM, step_s=1.25, follow_s=0.0), *near).rung is Rung.LIVE, "by a tenth of a step is less"


@pytest.mark.parametrize(("deviation_s", "taken"), [(0.0416, Rung.LIVE), (0.0418, Rung.STOP_AND_COPY)])
def test_where_steps_are_long_and_all_alike_little_is_noise(deviation_s: float, taken: Rung):
    """An eighth of a second, of steps of a minute: three times as far as steps lie from their median."""
    even = replace(CALM, step_s=60.0, follow_s=0.0, step_deviation_s=deviation_s)
    near = (cost(Rung.STOP_AND_COPY, 2.0), cost(Rung.LIVE, 1.875))
    assert by_total(even, *near).rung is taken
    assert by_total(replace(even, step_deviation_s=None), *near).rung is Rung.STOP_AND_COPY, "not known: a guess"


@pytest.mark.parametrize("noisy", [Rung.LIVE, Rung.STOP_AND_COPY])
def test_noise_is_how_far_costs_of_one_rung_lie_from_their_median_in_the_median(noisy: Rung):
    known, other = replace(CALM, step_s=1.25, follow_s=0.0), {Rung.LIVE: Rung.STOP_AND_COPY}.get(noisy, Rung.LIVE)
    totals = {Rung.STOP_AND_COPY: 3.0, Rung.LIVE: 2.5}
    scattered = [cost(noisy, totals[noisy], off_s=off_s) for off_s in (-9.0, -0.625, 0.0, 0.625, 9.0)]
    choice = by_total(known, *scattered, cost(other, totals[other]))
    assert choice.rung is Rung.STOP_AND_COPY and "noise (0.62 s)" in choice.reason
    totals[Rung.LIVE] = 2.375
    scattered = [cost(noisy, totals[noisy], off_s=off_s) for off_s in (-9.0, -0.625, 0.0, 0.625, 9.0)]
    assert by_total(known, *scattered, cost(other, totals[other])).rung is Rung.LIVE


def test_without_a_measurement_the_shortest_pause_is_taken_and_says_so():
    choice = by_total(replace(CALM, bytes_to_move=0))
    assert choice.rung is Rung.LIVE
    assert choice.reason.endswith("what rungs cost in all was not measured yet, so the shortest pause counts")


def test_a_copy_that_notice_or_memory_forbid_is_not_taken_however_little_it_costs():
    cheap = replace(COPIED, parts=CostParts(0.0, 0.0, 0.0, 0.0))
    late = replace(ROOMY, bytes_to_move=40_000_000_000, stream_share=1.0, follow_s=0.0, seconds_to_deadline=75.0)
    assert by_total(late, LIVE, cheap).rung is choose_rung(late).rung
    no_room = replace(CALM, memory_refusal="9 GB are missing")
    assert by_total(no_room, LIVE, cheap) == choose_rung(no_room)


parts = st.builds(CostParts, *[st.floats(-1.0, 30.0)] * 4)
costs = st.lists(st.builds(MeasuredCost, st.sampled_from((Rung.LIVE, Rung.STOP_AND_COPY)), parts), max_size=20)
inputs = st.builds(
    replace,
    st.just(ROOMY),
    bytes_to_move=st.integers(0, 10**11),
    prepare_s=st.floats(0.0, 60.0),
    step_s=st.floats(0.01, 60.0),
    step_deviation_s=st.none() | st.floats(0.0, 5.0),
    seconds_to_boundary=st.floats(0.0, 60.0),
    seconds_to_deadline=st.none() | st.floats(0.0, 200.0),
    sources_whole=st.booleans(),
    one_sided=st.booleans(),
    memory_refusal=st.sampled_from(("", "9 GB are missing")),
    replay_refusal=st.sampled_from(("", "fused AdamW")),
    nodes_left=st.integers(1, 3),
)


@given(inputs, costs)
def test_a_choice_by_cost_is_one_that_the_ladder_permits_and_costs_no_more_than_its_own(
    known: LadderInputs, measured: list[MeasuredCost]
):
    own, (choice, estimates) = choose_rung(known), choose_by(Prefer.TOTAL, known, measured)
    assert all(estimate.total_s == estimate.parts.total_s for estimate in estimates)
    if choice.rung is own.rung:
        assert choice.estimate_s == own.estimate_s
        return
    assert (own.rung, choice.rung) == (Rung.LIVE, Rung.STOP_AND_COPY)
    assert not weigh(choice.rung, known).refusal
    by_rung = {estimate.rung: estimate.total_s for estimate in estimates}
    assert measured and by_rung[choice.rung] < by_rung[own.rung] + noise_s(known, measured)


@pytest.mark.parametrize("known", [replace(ROOMY, seconds_to_deadline=1.0), TWO_SIDED, replace(ROOMY, nodes_left=1)])
def test_a_rung_is_weighed_as_the_ladder_weighs_it(known: LadderInputs):
    verdicts = [(rung, text) for rung, text in choose_rung(known).verdicts if rung in Rung and rung != Rung.SUSPEND]
    assert len(verdicts) >= 3
    for rung, text in verdicts:
        if rung is not Rung.CHECKPOINT:
            assert text.startswith(weigh(rung, known).refusal), rung
