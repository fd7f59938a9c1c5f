"""What a job file says of memory: the model by its sizes, and what a layout that is too large is refused with."""

import pytest

from agent.protocol.jobfile import JobFile
from liver_core.layout import BucketRule, ParallelLayout
from liver_core.layout.experts import ExpertShape
from liver_core.memory.device_memory import TrainingShape, rank_memory
from liver_core.memory.overheads import DeviceOverheads
from liver_core.memory.transformer_shape import TransformerShape
from service.planner.memory_fit import too_large, training_shape
from tests.service.planner.test_decision import JOB, job

OTHER = "mine.training:Job"


def test_the_reference_job_has_no_fused_attention_no_sequence_parallelism_and_full_precision():
    shape = TransformerShape(
        12, 128, 4, 4, 512, 264, 128, "float32", keeps_scores=True, is_sequence_parallel=False, buckets=BucketRule()
    )
    assert training_shape(job()) == TrainingShape(shape, 1, 24)
    half = training_shape(job(args={"precision": "bf16", "sequence_parallel": True})).model
    assert (half.dtype, half.is_sequence_parallel, half.keeps_scores) == ("bfloat16", True, True)


def test_other_jobs_are_expected_to_have_both_and_half_precision_and_say_their_own_sizes():
    sizes = {"num_query_groups": 2, "ffn_hidden_size": 96, "share_embeddings_and_output_weights": True}
    found = training_shape(job(entrypoint=OTHER, micro_batch=2, model=JOB["model"] | sizes))
    assert found == TrainingShape(TransformerShape(12, 128, 4, 2, 96, 264, 128, "bfloat16", is_tied=True), 2, 24)
    assert not found.model.keeps_scores and found.model.is_sequence_parallel
    said = training_shape(job(entrypoint=OTHER, args={"precision": "fp32", "sequence_parallel": False})).model
    assert (said.dtype, said.is_sequence_parallel, said.keeps_scores) == ("float32", False, False)


def test_a_model_with_experts_is_counted_with_them_and_with_sequence_parallelism():
    model = JOB["model"] | {"num_experts": 4, "moe_ffn_hidden_size": 96, "moe_layer_freq": [0, 1] * 6}
    found = training_shape(job(model=model)).model
    assert found.experts == ExpertShape(4, 96, 2, (False, True) * 6)
    assert found.is_sequence_parallel and not training_shape(job()).model.is_sequence_parallel


@pytest.mark.parametrize(
    ("ddp", "rule"),
    [
        (None, BucketRule()),
        ({"overlap_grad_reduce": False}, BucketRule()),
        # Megatron's own size, and a million more for each data-parallel rank beyond forty.
        ({"overlap_grad_reduce": True}, BucketRule(elements_max=40_000_000, elements_max_per_dp=1_000_000)),
        ({"overlap_grad_reduce": True, "bucket_size": 5_000}, BucketRule(elements_max=5_000)),
    ],
)
def test_the_buckets_of_a_job_are_as_its_gradients_travel(ddp, rule):
    file = JobFile.model_validate(JOB | ({} if ddp is None else {"ddp": ddp}))
    assert training_shape(file).model.buckets == rule


def test_a_layout_of_which_a_rank_does_not_fit_is_refused_with_what_it_needs():
    layout = ParallelLayout(tp=2, dp=2)
    needed = rank_memory(training_shape(job()), layout, DeviceOverheads())
    assert too_large(job(), layout) == ""
    assert too_large(job(device_bytes=needed.total), layout) == ""
    assert too_large(job(device_bytes=needed.total - 1), layout) != ""
    large = job(model=JOB["model"] | {"hidden_size": 4_096, "seq_length": 2_048, "padded_vocab_size": 50_000})
    needed = rank_memory(training_shape(large), ParallelLayout(), DeviceOverheads())
    sizes = [round(each / 1e9, 1) for each in (needed.total, needed.state, needed.activations)]
    assert len(set(sizes)) == 3 and min(sizes) > 1
    # Exactly between two figures: 2.75 is shown as 2.8, and what is less as 2.7.
    for device, shown in ((2_750_000_000, "2.8"), (2_250_000_000, "2.2"), (2_749_999_999, "2.7")):
        assert too_large(large.model_copy(update={"device_bytes": device}), ParallelLayout()) == (
            f"a rank of layout TP1xPP1xDP1 needs about {sizes[0]} GB (state {sizes[1]}, activations {sizes[2]}), "
            f"a device has {shown} GB"
        )
