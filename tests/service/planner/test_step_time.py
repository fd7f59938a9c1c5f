"""The step-time model: each term by hand, what observations make of it, and how far it says it may be off."""

import random
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.protocol.jobfile import JobFile
from liver_core.layout import ParallelLayout
from service.planner.least_squares import non_negative, predictor_leverages
from service.planner.step_time import (
    DeviceRates,
    ObservedStep,
    StepEstimate,
    StepShape,
    StepTimes,
    fitted,
    rates_of,
    terms,
)  # fmt: skip
from tests.service.fake_agent import JOB

SHAPE = StepShape(
    num_layers=2, hidden_size=8, ffn_hidden_size=32, padded_vocab_size=32, seq_length=16, micro_batch=1, global_batch=4
)
# A layer: 4 x 8^2 for attention, 3 x 8 x 32 for the feed-forward part.
LAYER = 4 * 64 + 3 * 8 * 32
# Six for each parameter and token: 16 tokens; attention scores cost 2 x 16 x 8 a token more.
LAYER_FLOPS = 6 * 16 * (LAYER + 256)
HEAD_FLOPS = 6 * 16 * 8 * 32
ACTIVATION_BYTES = 4 * 16 * 8
ONE = DeviceRates(1.0, 1.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # Flops; bytes between stages; bytes of gradients; launches; bytes all-reduced.
        (ParallelLayout(), (4 * (2 * LAYER_FLOPS + HEAD_FLOPS), 0, 0, 4 * 3, 0)),
        # Four all-reduces of a layer's activation forward and backward; each moves (TP - 1) / TP of it twice.
        (
            ParallelLayout(tp=2),
            (4 * (2 * LAYER_FLOPS + HEAD_FLOPS) / 2, 0, 0, 4 * 3, 8 / 2 * ACTIVATION_BYTES * 2 * 4),
        ),
        # Two stages, of which the last has the head; four micro-batches and one more for the pipeline to fill.
        (
            ParallelLayout(pp=2),
            (3 * (LAYER_FLOPS + HEAD_FLOPS) + 2 * LAYER_FLOPS + HEAD_FLOPS, 2 * 5 * ACTIVATION_BYTES, 0, 5 * 2, 0),
        ),
        # Gradients of fp32 with those of the embedding, all-reduced: 2 (DP - 1) / DP of them.
        (ParallelLayout(dp=2), (2 * (2 * LAYER_FLOPS + HEAD_FLOPS), 0, 4 * (2 * LAYER + 256) * 2 / 2, 2 * 3, 0)),
        (ParallelLayout(dp=4), (2 * LAYER_FLOPS + HEAD_FLOPS, 0, 4 * (2 * LAYER + 256) * 2 * 3 / 4, 3, 0)),
    ],
    ids=str,
)
def test_each_term_by_hand(layout, expected):
    compute, between, gradient, launches, reduces = expected
    found = terms(SHAPE, layout, ONE, True)
    assert found == pytest.approx((compute, between, gradient, launches, 1.0, reduces / 0.5))
    assert terms(SHAPE, layout, ONE, False)[5] == pytest.approx(reduces), "between nodes at the other rate"


def test_a_rank_has_at_least_one_micro_batch():
    assert terms(SHAPE, ParallelLayout(dp=8), ONE, True)[3] == 3


def test_a_job_without_a_feed_forward_size_has_four_times_the_hidden_one():
    shape = StepShape.of(JobFile.model_validate(JOB))
    assert (shape.ffn_hidden_size, shape.global_batch, shape.micro_batch) == (512, 24, 1)


def test_a_device_is_known_by_its_name_and_others_count_as_processors():
    assert rates_of("NVIDIA H100 80GB HBM3").flops_per_s > rates_of("cuda:0").flops_per_s > rates_of("cpu").flops_per_s
    assert rates_of("Tesla V100-SXM2-16GB") != rates_of("cuda") and rates_of("") == DeviceRates()


layouts = st.builds(
    ParallelLayout, tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]), dp=st.sampled_from([1, 2, 4])
)


@settings(deadline=None, max_examples=60)
@given(slower=st.floats(0.01, 100), seen=st.lists(layouts, min_size=1, max_size=8, unique=True), layout=layouts)
def test_a_machine_that_is_so_many_times_slower_is_learned_from_one_step(slower, seen, layout):
    """The data sheet may be wrong by any factor: the ratios of its terms stand until observations differ."""
    raw = fitted(SHAPE, (), DeviceRates())
    model = fitted(SHAPE, tuple(ObservedStep(item, slower * raw.predict(item)) for item in seen), DeviceRates())
    assert model.predict(layout) == pytest.approx(slower * raw.predict(layout), rel=1e-6)


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.lists(st.floats(0, 3), min_size=4, max_size=4), max_size=12),
    ties=st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
    data=st.data(),
)
def test_no_other_non_negative_weights_fit_better(rows, ties, data):
    wanted = data.draw(st.lists(st.floats(-3, 3), min_size=len(rows), max_size=len(rows)))
    found = non_negative(rows, wanted, ties=ties, toward=1.0)

    def cost(weights):
        missed = (
            sum(w * x for w, x in zip(weights, row, strict=True)) - y for row, y in zip(rows, wanted, strict=True)
        )
        return sum(miss**2 for miss in missed) + sum(tie * (w - 1) ** 2 for tie, w in zip(ties, weights, strict=True))

    assert all(weight >= 0 for weight in found)
    for at in range(4):
        for by in (-1e-3, 1e-3):
            other = [max(0.0, weight + by) if i == at else weight for i, weight in enumerate(found)]
            assert cost(other) >= cost(found) - 1e-9


def test_a_leverage_tells_what_a_row_would_miss_had_it_been_left_out():
    rows = [[1.0, 0.2], [0.5, 1.0], [0.3, 0.4], [0.9, 0.8]]
    wanted, ties = [1.0, 1.4, 0.9, 1.2], [0.1, 0.1]
    weights = non_negative(rows, wanted, ties=ties, toward=1.0)
    for at, held in enumerate(predictor_leverages(rows, weights, ties=ties)):
        others = [i for i in range(4) if i != at]
        without = non_negative([rows[i] for i in others], [wanted[i] for i in others], ties=ties, toward=1.0)
        missed = wanted[at] - sum(w * x for w, x in zip(without, rows[at], strict=True))
        here = wanted[at] - sum(w * x for w, x in zip(weights, rows[at], strict=True))
        assert here / (1 - held) == pytest.approx(missed)


def test_hidden_constants_are_found_again_from_noisy_steps_and_the_error_that_is_claimed_holds():
    """A machine whose terms weigh otherwise than the data sheet says: eight steps with 2 % noise tell the rest."""
    shape = StepShape(48, 1600, 4266, 50304, 1024, 1, 128)
    every = [ParallelLayout(tp=tp, pp=pp, dp=dp) for tp in (1, 2) for pp in (2, 4, 6, 8) for dp in (1, 2, 4)]
    chance, true = random.Random(3), (3.0, 0.5, 2.0, 4.0, 1.0, 1.5)
    rates = rates_of("V100")
    steps = {
        layout: sum(a * t for a, t in zip(true, terms(shape, layout, rates, True), strict=True)) for layout in every
    }
    off, claimed = [], []
    for _ in range(20):
        seen = chance.sample(every, 8)
        model = fitted(
            shape, tuple(ObservedStep(item, steps[item] * (1 + chance.gauss(0, 0.02))) for item in seen), rates
        )
        rest = [item for item in every if item not in seen]
        off.append(mean(abs(model.predict(item) / steps[item] - 1) for item in rest))
        claimed.append(model.error)
    assert median(off) < 0.05 and median(off) < 2 * median(claimed) < 0.2


def test_what_was_measured_stands_and_what_was_predicted_of_it_can_still_be_asked():
    job, here, there = JobFile.model_validate(JOB), ParallelLayout(pp=2), ParallelLayout(pp=4)
    times = StepTimes.of(job, ((str(here), 0.5), (str(there), 0.3)))
    assert times.of_layout(here) == StepEstimate(0.5, 0.0, measured=True)
    from_the_other = StepTimes.of(job, ((str(there), 0.3),)).of_layout(here)
    assert times.predicted(here) == from_the_other and not from_the_other.measured
    assert from_the_other.error > 0, "no prediction without its error"
    errors = [StepTimes.of(job, times.measured[:count]).of_layout(ParallelLayout(dp=2)).error for count in range(3)]
    assert errors == sorted(errors, reverse=True)


def test_a_step_that_took_no_time_is_no_observation():
    job, layout = JobFile.model_validate(JOB), ParallelLayout(pp=2)
    nothing = StepTimes.of(job, ((str(layout), 0.0),))
    assert not nothing.of_layout(layout).measured
    assert nothing.of_layout(ParallelLayout()) == StepTimes.of(job, ()).of_layout(ParallelLayout())
