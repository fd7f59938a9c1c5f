"""The analytic step time: each part of it, alone and by hand."""

import pytest

from agent.protocol.jobfile import JobFile
from liver_core.layout import ParallelLayout
from service.planner.score import Prior, Score, predict, score
from tests.service.fake_agent import JOB

NEVER = 1e300
"""A rate at which a part of the step costs nothing."""


def job(**changes) -> JobFile:
    """Of 2 layers with 8 x 8 matrices, 16 tokens, 4 micro-batches in all."""
    model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "padded_vocab_size": 32, "seq_length": 16}
    shape = {"global_batch": 4, "micro_batch": 1, "layouts": {}, "model": model | changes.pop("model", {})}
    return JobFile.model_validate(JOB | shape | changes)


# A layer: 4 x 8^2 for attention, 3 x 8 x 32 for the feed-forward part.
LAYER = 4 * 64 + 3 * 8 * 32
# Six for each parameter and token: 16 tokens; attention scores cost 2 x 16 x 8 a token more.
LAYER_FLOPS = 6 * 16 * (LAYER + 256)
HEAD_FLOPS = 6 * 16 * 8 * 32
ACTIVATION_BYTES = 4 * 16 * 8


@pytest.mark.parametrize(
    ("layout", "flops"),
    [
        (ParallelLayout(), 4 * (2 * LAYER_FLOPS + HEAD_FLOPS)),
        (ParallelLayout(tp=2), 4 * (LAYER_FLOPS + HEAD_FLOPS / 2)),
        # Two stages: four micro-batches and one more for the pipeline to fill.
        (ParallelLayout(pp=2), 5 * LAYER_FLOPS + 4 * HEAD_FLOPS),
        (ParallelLayout(dp=2), 2 * (2 * LAYER_FLOPS + HEAD_FLOPS)),
        (ParallelLayout(tp=2, pp=2, dp=2), 3 * LAYER_FLOPS / 2 + 2 * HEAD_FLOPS / 2),
    ],
    ids=str,
)
def test_compute_is_shared_by_all_axes_and_a_pipeline_has_to_fill(layout: ParallelLayout, flops: float):
    assert predict(job(), layout, Prior(1.0, NEVER, 0.0)) == pytest.approx(flops)


@pytest.mark.parametrize(
    ("layout", "sent_bytes"),
    [
        (ParallelLayout(), 0.0),
        # Four all-reduces of a layer's activation forward and backward; each moves (TP - 1) / TP of it twice.
        (ParallelLayout(tp=2), 4 * 8 * 1 / 2 * ACTIVATION_BYTES * 2),
        # What passes from stage to stage, forward and backward.
        (ParallelLayout(pp=2), 2 * 5 * ACTIVATION_BYTES),
        # Gradients of fp32, all-reduced: 2 (DP - 1) / DP of them.
        (ParallelLayout(dp=2), 4 * 2 * LAYER * 2 * 1 / 2),
        (ParallelLayout(dp=4), 4 * 2 * LAYER * 2 * 3 / 4),
        (ParallelLayout(tp=2, dp=2), 2 * 8 / 2 * ACTIVATION_BYTES * 2 + 4 * LAYER * 2 / 2),
        (ParallelLayout(tp=2, pp=2), 5 * 8 / 2 * ACTIVATION_BYTES + 2 * 5 * ACTIVATION_BYTES),
        (ParallelLayout(pp=2, dp=2), 2 * 3 * ACTIVATION_BYTES + 4 * LAYER * 2 / 2),
    ],
    ids=str,
)
def test_what_is_sent_is_activations_within_and_between_stages_and_gradients(layout: ParallelLayout, sent_bytes: float):
    assert predict(job(), layout, Prior(NEVER, 1.0, 0.0)) == pytest.approx(sent_bytes)


@pytest.mark.parametrize(
    ("layout", "launches"),
    [
        (ParallelLayout(), 4 * 3),
        (ParallelLayout(pp=2), 5 * 2),
        (ParallelLayout(dp=2), 2 * 3),
        (ParallelLayout(dp=4), 3),
    ],
    ids=str,
)
def test_each_micro_batch_launches_each_layer_of_a_stage_and_once_more(layout: ParallelLayout, launches: int):
    assert predict(job(), layout, Prior(NEVER, NEVER, 1.0)) == pytest.approx(launches)


def test_a_feed_forward_part_of_another_width_and_larger_micro_batches_count():
    wide = job(model={"ffn_hidden_size": 16})
    flops = 4 * (2 * 6 * 16 * (4 * 64 + 3 * 8 * 16 + 256) + HEAD_FLOPS)
    assert predict(wide, ParallelLayout(), Prior(1.0, NEVER, 0.0)) == pytest.approx(flops)
    pairs = job(micro_batch=2)
    assert predict(pairs, ParallelLayout(), Prior(1.0, NEVER, 0.0)) == pytest.approx(4 * (2 * LAYER_FLOPS + HEAD_FLOPS))
    assert predict(pairs, ParallelLayout(), Prior(NEVER, NEVER, 1.0)) == pytest.approx(2 * 3)


def test_a_rank_has_at_least_one_micro_batch():
    assert predict(job(), ParallelLayout(dp=8), Prior(NEVER, NEVER, 1.0)) == pytest.approx(3)


def test_what_was_measured_counts_as_it_is_and_scales_what_was_not():
    layout, others = ParallelLayout(pp=2), (ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(dp=4))
    raw = predict(job(), layout)
    assert score(job(), layout, ()) == Score(raw, measured=False)
    assert score(job(), layout, ((str(layout), 0.5),)) == Score(0.5, measured=True)
    times = zip(others, (2.0, 3.0, 50.0), strict=True)
    measured = tuple((str(other), times_slower * predict(job(), other)) for other, times_slower in times)
    found = score(job(), layout, measured)
    assert (found.seconds, found.measured) == (pytest.approx(3.0 * raw), False), (
        "the median, so that one slow step is none"
    )
    assert score(job(), layout, ((str(others[0]), 0.0), measured[1])).seconds == pytest.approx(3.0 * raw)
