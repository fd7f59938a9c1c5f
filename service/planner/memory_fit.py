"""What a job file says of memory: the sizes that `liver_core.memory` counts with, and whether a layout fits. Pure."""

from agent.protocol.jobfile import DEFAULT_ENTRYPOINT, JobFile
from liver_core.layout import BucketRule, ParallelLayout
from liver_core.memory.device_memory import TrainingShape, rank_memory
from liver_core.memory.overheads import DeviceOverheads
from liver_core.memory.transformer_shape import TransformerShape

BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_DP = 40_000_000, 1_000_000
"""Megatron's own size of a bucket, where gradients are reduced during the backward pass."""


def training_shape(job: JobFile) -> TrainingShape:
    """The model and the batch of a job file. The reference job has no fused attention and no sequence parallelism; of
    other jobs both are expected, unless their `args` say `sequence_parallel: false`. With experts and TP Megatron wants
    sequence parallelism of any job."""
    args, is_reference = job.job_args(), job.entrypoint == DEFAULT_ENTRYPOINT
    precision = args.get("precision", "fp32" if is_reference else "bf16")
    model, experts = job.model, job.model.experts()
    shape = TransformerShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        ffn_hidden_size=model.ffn,
        padded_vocab_size=model.padded_vocab_size,
        seq_length=model.seq_length,
        dtype="float32" if precision == "fp32" else "bfloat16",
        is_tied=bool(model.share_embeddings_and_output_weights),
        keeps_scores=is_reference,
        is_sequence_parallel=experts is not None or args.get("sequence_parallel", not is_reference) is True,
        gradients_fp32=args.get("grad_reduce_in_fp32") is not False,
        buckets=_buckets(args),
        experts=experts,
    )
    return TrainingShape(shape, job.micro_batch, job.global_batch)


def _buckets(args: dict[str, object]) -> BucketRule:
    if args.get("overlap_grad_reduce") is not True:
        return BucketRule()
    size = args.get("ddp_bucket_size")
    if isinstance(size, int) and size > 0:
        return BucketRule(elements_max=size)
    return BucketRule(elements_max=BUCKET_ELEMENTS, elements_max_per_dp=BUCKET_ELEMENTS_PER_DP)


def too_large(job: JobFile, layout: ParallelLayout) -> str:
    """Why a rank of this layout does not fit the job's devices; empty if it does, or if the job file does not say how
    large they are. The caller has checked that the layout divides the model."""
    if job.device_bytes is None:
        return ""
    needed = rank_memory(training_shape(job), layout, DeviceOverheads())
    if needed.total <= job.device_bytes:
        return ""
    return (
        f"a rank of layout {layout} needs about {needed.total / 1e9:.1f} GB (state {needed.state / 1e9:.1f}, "
        f"activations {needed.activations / 1e9:.1f}), a device has {job.device_bytes / 1e9:.1f} GB"
    )
