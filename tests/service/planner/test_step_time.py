"""The step-time model: each term by hand, what observations make of it, and how far it says it may be off."""

import random
from dataclasses import replace
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.protocol.jobfile import JobFile
from liver_core.layout import ParallelLayout
from liver_core.layout.experts import ExpertShape
from service.planner.least_squares import non_negative, predictor_leverages
from service.planner.step_time import (
    DeviceRates,
    ObservedStep,
    StepEstimate,
    StepShape,
    StepTimeModel,
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
ROUND = DeviceRates(flops_per_s=2.0, bytes_per_s=4.0, near_bytes_per_s=0.5, launch_s=3.0)


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
    found = terms(SHAPE, layout, ROUND)
    assert found == pytest.approx((compute / 2, between / 4, gradient / 4, 3 * launches, 3.0, reduces / 0.5, 0))
    assert terms(SHAPE, layout, ROUND, 1)[5] == pytest.approx(reduces / 4), "between nodes at the other rate"


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        # Three layers on two stages: the slower one has two of them, and the head; so has the gradient.
        (
            replace(SHAPE, num_layers=3),
            ParallelLayout(pp=2, dp=2),
            (
                (2 * LAYER_FLOPS + HEAD_FLOPS) + 3 * LAYER_FLOPS + HEAD_FLOPS,
                2 * 3 * ACTIVATION_BYTES,
                4 * (2 * LAYER + 256),
                3 * 3,
                0,
            ),
        ),
        # Cut with the head as a layer: three and the head are two and two.
        (
            replace(SHAPE, num_layers=3, cuts_head=True),
            ParallelLayout(pp=2),
            (3 * 2 * LAYER_FLOPS + 3 * LAYER_FLOPS + HEAD_FLOPS, 2 * 5 * ACTIVATION_BYTES, 0, 5 * 3, 0),
        ),
        # Four and the head: three on one stage.
        (
            replace(SHAPE, num_layers=4, cuts_head=True),
            ParallelLayout(pp=2),
            (3 * 3 * LAYER_FLOPS + 4 * LAYER_FLOPS + HEAD_FLOPS, 2 * 5 * ACTIVATION_BYTES, 0, 5 * 4, 0),
        ),
        # Of half the sequence each rank computes half, and sends half.
        (
            SHAPE,
            ParallelLayout(pp=2, cp=2),
            (
                (3 * (LAYER_FLOPS + HEAD_FLOPS) + 2 * LAYER_FLOPS + HEAD_FLOPS) / 2,
                2 * 5 * ACTIVATION_BYTES / 2,
                0,
                5 * 2,
                0,
            ),
        ),
        # Each of four ranks has a quarter of the layers' gradients, and reduces three quarters of the activations
        # twice: in one layer of its stage, in each of five passes.
        (
            SHAPE,
            ParallelLayout(tp=4, pp=2),
            (
                (3 * (LAYER_FLOPS + HEAD_FLOPS) + 2 * LAYER_FLOPS + HEAD_FLOPS) / 4,
                2 * 5 * ACTIVATION_BYTES,
                0,
                5 * 2,
                8 * 3 / 4 * ACTIVATION_BYTES * 5,
            ),
        ),
        (
            SHAPE,
            ParallelLayout(tp=2, dp=4),
            (
                (2 * LAYER_FLOPS + HEAD_FLOPS) / 2,
                0,
                4 * (2 * LAYER + 256) / 2 * 2 * 3 / 4,
                3,
                8 / 2 * ACTIVATION_BYTES * 2,
            ),
        ),
        # Seven samples are three micro-batches of two, each of twice the positions.
        (
            replace(SHAPE, micro_batch=2, global_batch=7),
            ParallelLayout(pp=2),
            (
                2 * (2 * (LAYER_FLOPS + HEAD_FLOPS) + 2 * LAYER_FLOPS + HEAD_FLOPS),
                2 * 4 * 2 * ACTIVATION_BYTES,
                0,
                4 * 2,
                0,
            ),
        ),
    ],
)
def test_each_term_of_uneven_stages_and_of_other_axes_by_hand(shape, layout, expected):
    compute, between, gradient, launches, reduces = expected
    wanted = (compute / 2, between / 4, gradient / 4, 3 * launches, 3.0, reduces / 0.5, 0)
    assert terms(shape, layout, ROUND) == pytest.approx(wanted)


# The second of two layers has four experts of 8 x 12, a token goes to two; a shared one of 8 x 4 and the router.
EXPERTS = ExpertShape(count=4, ffn=12, topk=2, layers=(False, True), shared_ffn=4)
SPARSE = replace(SHAPE, experts=EXPERTS)
BESIDE = 4 * 64 + 4 * 8 + 3 * 8 * 4
ONE_EXPERT = 3 * 8 * 12
SPARSE_FLOPS = 6 * 16 * (BESIDE + 2 * ONE_EXPERT + 256)
# Sixteen tokens to two experts each and back, forward and backward, two bytes for each of eight channels.
ALL_TO_ALL = 4 * 16 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # Flops are those of the experts that a token goes to.
        (ParallelLayout(), (4 * (LAYER_FLOPS + SPARSE_FLOPS + HEAD_FLOPS), 0, 0, 0)),
        # The dense layer is the slower of two stages, and the only one without experts.
        (
            ParallelLayout(pp=2),
            (3 * (LAYER_FLOPS + HEAD_FLOPS) + LAYER_FLOPS + SPARSE_FLOPS + HEAD_FLOPS, 0, 0, 0),
        ),
        # Without EP all gradients are summed over DP.
        (
            ParallelLayout(dp=2),
            (2 * (LAYER_FLOPS + SPARSE_FLOPS + HEAD_FLOPS), 4 * (LAYER + BESIDE + 4 * ONE_EXPERT + 256), 0, 0),
        ),
        # EP2: each rank has two experts and sums no gradients of theirs; half of what it sends stays, in two passes.
        (
            ParallelLayout(dp=2, ep=2),
            (2 * (LAYER_FLOPS + SPARSE_FLOPS + HEAD_FLOPS), 4 * (LAYER + BESIDE + 256), 0, 2 * ALL_TO_ALL / 2),
        ),
        # EP2 over four ranks: gradients of two experts over two of them.
        (
            ParallelLayout(dp=4, ep=2),
            (
                LAYER_FLOPS + SPARSE_FLOPS + HEAD_FLOPS,
                4 * (LAYER + BESIDE + 256) * 2 * 3 / 4 + 4 * 2 * ONE_EXPERT,
                0,
                ALL_TO_ALL / 2,
            ),
        ),
        # ETP2: half of each matrix, and what comes to one of two ranks goes to both; half of the tokens are a rank's.
        (
            ParallelLayout(tp=2),
            (
                4 * (LAYER_FLOPS + SPARSE_FLOPS + HEAD_FLOPS) / 2,
                0,
                8 / 2 * ACTIVATION_BYTES * 2 * 4,
                4 * ALL_TO_ALL / 2,
            ),
        ),
        # EP2 over two TP ranks: no matrix is cut.
        (
            ParallelLayout(tp=2, ep=2, etp=1),
            (
                4 * (LAYER_FLOPS + SPARSE_FLOPS + HEAD_FLOPS) / 2,
                0,
                8 / 2 * ACTIVATION_BYTES * 2 * 4,
                4 * ALL_TO_ALL / 2 / 2,
            ),
        ),
    ],
    ids=str,
)
def test_the_terms_of_a_model_with_experts_by_hand(layout, expected):
    compute, gradient, reduces, exchanged = expected
    found = terms(SPARSE, layout, ROUND)
    assert (found[0], found[2], found[5], found[6]) == pytest.approx(
        (compute / 2, gradient / 4, reduces / 0.5, exchanged / 0.5)
    )
    unit = layout.expert_tp * layout.ep
    assert terms(SPARSE, layout, ROUND, unit)[6] == found[6], "an EP x ETP group lies on one node"
    if unit > 1:
        assert terms(SPARSE, layout, ROUND, 1)[6] == pytest.approx(exchanged / 4)


def test_only_attention_is_summed_over_tp_where_a_layer_has_experts_and_no_shared_ones():
    bare = replace(SPARSE, experts=replace(EXPERTS, shared_ffn=0))
    assert terms(bare, ParallelLayout(tp=2), ROUND)[5] == terms(SPARSE, ParallelLayout(tp=2), ROUND)[5] * 3 / 4


def test_the_shape_of_a_job_has_its_experts():
    model = JOB["model"] | {"num_experts": 4, "moe_layer_freq": 5, "moe_ffn_hidden_size": 96, "moe_router_topk": 1}
    layers = tuple(layer in (0, 5, 10) for layer in range(12))
    assert StepShape.of(JobFile.model_validate(JOB | {"model": model})).experts == ExpertShape(4, 96, 1, layers)


def test_a_rank_has_at_least_one_micro_batch():
    assert terms(SHAPE, ParallelLayout(dp=8), ROUND)[3] == 3 * 3


def test_a_prediction_weighs_the_terms_one_by_one():
    model = StepTimeModel(SHAPE, ROUND, (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 1.0), 0.1)
    layout = ParallelLayout(tp=2, dp=2)
    # Two micro-batches, on half of each layer; half of a gradient of 2 x 1024 + 256 elements; two passes of two layers.
    compute, gradient, launches = 2 * (2 * LAYER_FLOPS + HEAD_FLOPS) / 2 / 2, 4 * (2 * LAYER + 256) / 2 / 4, 2 * 3 * 3
    reduces = 8 / 2 * ACTIVATION_BYTES * 2 * 2
    beside = compute + 100 * gradient + 1_000 * launches + 10_000 * 3
    assert model.predict(layout) == pytest.approx(beside + 100_000 * reduces / 0.5)
    assert model.predict(layout, near=1) == pytest.approx(beside + 100_000 * reduces / 4)


def test_a_job_without_a_feed_forward_size_has_four_times_the_hidden_one():
    assert StepShape.of(JobFile.model_validate(JOB)) == StepShape(12, 128, 512, 264, 128, 1, 24)
    other = JOB | {"micro_batch": 2, "model": JOB["model"] | {"ffn_hidden_size": 96}}
    assert StepShape.of(JobFile.model_validate(other)) == StepShape(12, 128, 96, 264, 128, 2, 24)


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


def test_a_weight_that_nothing_speaks_for_is_zero() -> None:
    assert non_negative([[1.0]], [0.0], ties=[1.0], toward=0.0) == [0.0]


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.lists(st.floats(0, 3), min_size=4, max_size=4), max_size=12),
    ties=st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
    toward=st.sampled_from([1.0, 0.25, 2.0]),
    data=st.data(),
)
def test_no_other_non_negative_weights_fit_better(rows, ties, toward, data):
    wanted = data.draw(st.lists(st.floats(-3, 3), min_size=len(rows), max_size=len(rows)))
    found = non_negative(rows, wanted, ties=ties, toward=toward)

    def cost(weights):
        missed = (
            sum(w * x for w, x in zip(weights, row, strict=True)) - y for row, y in zip(rows, wanted, strict=True)
        )
        return sum(miss**2 for miss in missed) + sum(
            tie * (w - toward) ** 2 for tie, w in zip(ties, weights, strict=True)
        )

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


def test_weights_of_a_few_rows_by_hand():
    """Each row has one term, so that w = (row x wanted + tie x toward) / (row^2 + tie), and none below zero."""
    assert non_negative([], [], ties=[0.5, 2.0], toward=3.0) == pytest.approx([3.0, 3.0])
    found = non_negative([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [3.0, -9.0], ties=[1.0, 0.5, 0.1], toward=4.0)
    assert found == pytest.approx([(6.0 + 4.0) / 5.0, 0.0, 4.0])
    # Both terms in one row: the normal equations are 1.5 a + b = 4.5, a + 1.5 b = 4.5.
    assert non_negative([[1.0, 1.0]], [4.0], ties=[0.5, 0.5], toward=1.0) == pytest.approx([1.8, 1.8])
    # 5 a + 2 b = 3 and 2 a + 3 b = 0 without a bound: b would be -6/11, so that it is 0, and a is 3/5.
    assert non_negative([[2.0, 1.0], [0.0, 1.0]], [1.0, -2.0], ties=[1.0, 1.0], toward=1.0) == pytest.approx([0.6, 0])


def test_a_leverage_by_hand_leaves_out_terms_without_weight():
    assert predictor_leverages([[2.0, 5.0]], [1.0, 0.0], ties=[1.0, 1.0]) == pytest.approx([4 / 5])
    assert predictor_leverages([[1.0, 1.0]], [0.5, 0.5], ties=[0.5, 0.5]) == pytest.approx([2 / 2.5])
    assert predictor_leverages([[2.0, 5.0]], [0.0, 0.0], ties=[1.0, 1.0]) == [0.0]


# A step whose gradients, activations or all-reduces are everything, as the layout has it.
ONE_TERM = DeviceRates(flops_per_s=1e30, bytes_per_s=1.0, near_bytes_per_s=1.0, launch_s=1e-30)
ALONE = (
    (ParallelLayout(dp=2), 4 * (2 * LAYER + 256)),
    (ParallelLayout(pp=2), 2 * 5 * ACTIVATION_BYTES),
    (ParallelLayout(tp=2), 8 / 2 * ACTIVATION_BYTES * 2 * 4),
)


@pytest.mark.parametrize("slower", [0.001, 1.0, 7.0])
@pytest.mark.parametrize(("times", "weight", "missed"), [
    # All as it was guessed.
    (1.0, 1.0, 0.0),
    # A third step of twice the time has x = 1/2: w = (0.5 + 0.03) / (0.25 + 0.03). Left out it is missed by half.
    (2.0, 0.53 / 0.28, 0.5),
    # One of half the time has x = 2: w = 2.03 / 4.03, and is off by 0.03 / 4.03. Its leverage of 4 / 4.03 counts as
    # 0.95 at most.
    (0.5, 2.03 / 4.03, 0.03 / 4.03 / 0.05),
])  # fmt: skip
def test_the_weights_after_three_steps_and_their_error_by_hand(slower, times, weight, missed):
    observed = [
        ObservedStep(layout, slower * seconds * by)
        for (layout, seconds), by in zip(ALONE, (1.0, 1.0, times), strict=True)
    ]
    model = fitted(SHAPE, tuple(observed), ONE_TERM)
    assert model.weights == pytest.approx([slower] * 5 + [slower * weight, slower])
    # A miss of 0.1 is added to those of the three.
    assert model.error == pytest.approx((0.1 + missed) / 4)


def test_the_error_of_a_prediction_is_given_for_less_than_three_steps_and_falls_with_each_that_fits():
    raw = fitted(SHAPE, (), DeviceRates())
    every = [ParallelLayout(), *(layout for layout, _ in ALONE), ParallelLayout(dp=4)]
    steps = [ObservedStep(layout, 3 * raw.predict(layout)) for layout in every]
    errors = [fitted(SHAPE, tuple(steps[:count]), DeviceRates()).error for count in range(6)]
    assert errors == pytest.approx([2.0, 0.3, 0.15, 0.1 / 4, 0.1 / 5, 0.1 / 6])


def test_only_the_newest_64_steps_count_and_none_that_took_no_time():
    odd, usual = ObservedStep(ParallelLayout(tp=2), 50.0), (ObservedStep(ParallelLayout(pp=2), 0.5),)
    alone = fitted(SHAPE, usual * 64, DeviceRates())
    assert fitted(SHAPE, (odd, *usual * 64), DeviceRates()) == alone
    assert fitted(SHAPE, (odd, *usual * 63), DeviceRates()).weights != pytest.approx(alone.weights)
    for seconds in (0.0, -50.0):
        assert fitted(SHAPE, (replace(odd, seconds=seconds), *usual), DeviceRates()) == fitted(
            SHAPE, usual, DeviceRates()
        )


def test_a_step_whose_groups_are_spread_is_learned_from_as_such():
    layout, rates = ParallelLayout(tp=2), replace(ONE_TERM, near_bytes_per_s=8.0)
    spread = fitted(SHAPE, (ObservedStep(layout, ALONE[2][1], near=1),), rates)
    assert spread.predict(layout, near=1) == pytest.approx(ALONE[2][1])
    assert spread.predict(layout) == pytest.approx(ALONE[2][1] / 8)


def test_hidden_constants_are_found_again_from_noisy_steps_and_the_error_that_is_claimed_holds():
    """A machine whose terms weigh otherwise than the data sheet says: eight steps with 2 % noise tell the rest."""
    shape = StepShape(48, 1600, 4266, 50304, 1024, 1, 128)
    every = [ParallelLayout(tp=tp, pp=pp, dp=dp) for tp in (1, 2) for pp in (2, 4, 6, 8) for dp in (1, 2, 4)]
    chance, true = random.Random(3), (3.0, 0.5, 2.0, 4.0, 1.0, 1.5, 1.0)
    rates = rates_of("V100")
    steps = {layout: sum(a * t for a, t in zip(true, terms(shape, layout, rates), strict=True)) for layout in every}
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
    known = StepTimes.of(job, times.measured, errors=((str(here), 0.07),))
    assert known.of_layout(here) == StepEstimate(0.5, 0.07, measured=True)
    assert known.of_layout(there) == StepEstimate(0.3, 0.0, measured=True), "no error is named"
    assert times.predicted(here) == from_the_other and not from_the_other.measured
    assert from_the_other.error > 0, "no prediction without its error"
    errors = [StepTimes.of(job, times.measured[:count]).of_layout(ParallelLayout(dp=2)).error for count in range(3)]
    assert errors == sorted(errors, reverse=True)


def test_a_step_that_took_no_time_is_no_observation():
    job, layout = JobFile.model_validate(JOB), ParallelLayout(pp=2)
    for seconds in (0.0, -1.0):
        nothing = StepTimes.of(job, ((str(layout), seconds),))
        assert not nothing.of_layout(layout).measured
        assert nothing.of_layout(ParallelLayout()) == StepTimes.of(job, ()).of_layout(ParallelLayout())


def test_the_device_and_how_a_layout_lies_are_part_of_a_prediction():
    job, layout = JobFile.model_validate(JOB), ParallelLayout(tp=2)
    shape, rates = StepShape(12, 128, 512, 264, 128, 1, 24), rates_of("A100")
    assert rates != DeviceRates()
    for near in (2, 1):
        predicted = StepTimes.of(job, (), "NVIDIA A100").of_layout(layout, near=near)
        assert predicted.seconds == pytest.approx(sum(terms(shape, layout, rates, near)))
        assert (predicted.error, predicted.measured) == (2.0, False)
