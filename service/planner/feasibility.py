"""Which layouts the job could run on at all. Pure.

The divisibility rules are Megatron's: layers over pipeline stages; heads, query groups and the padded vocabulary over
tensor parallel ranks; the global batch over micro-batch x data parallel.
"""

from collections.abc import Iterator

from agent.protocol.jobfile import JobFile, parse_layout
from liver_core.layout import ParallelLayout
from service.planner.inputs import LayoutUse, Violation
from service.planner.memory_fit import too_large

TENSOR_PARALLEL_MAX = 64
CANDIDATES_MAX = 4_096
FURTHER_AXES = ("cp", "ep", "etp", "vpp")
"""Megatron has these as well; no job of this version can run on them."""
FURTHER_SIZES = {
    "context_parallel_size": "CP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
"""Megatron's names of these, which a job file may have under `args`."""


def violations(job: JobFile, layout: ParallelLayout) -> tuple[Violation, ...]:
    """Every rule that `layout` breaks for this job; empty if it can run."""
    if further := [f"{axis.upper()}{size}" for axis in FURTHER_AXES if (size := getattr(layout, axis)) > 1]:
        return (Violation(f"layout with {', '.join(further)}", "this version runs TP, PP and DP only"),)
    model = job.model
    if model.share_embeddings_and_output_weights and layout.pp > 1:
        field = "model.share_embeddings_and_output_weights"
        return (Violation(field, f"tied embeddings run with PP1 only, layout {layout} has PP{layout.pp}"),)
    checks = (
        ("model.num_layers", model.num_layers, layout.pp, "PP"),
        ("model.num_attention_heads", model.num_attention_heads, layout.tp, "TP"),
        ("model.num_query_groups", model.num_query_groups or 0, layout.tp, "TP"),
        ("model.ffn_hidden_size", model.ffn_hidden_size or 0, layout.tp, "TP"),
        ("model.padded_vocab_size", model.padded_vocab_size, layout.tp, "TP"),
        ("global_batch", job.global_batch // job.micro_batch, layout.dp, "micro_batch x DP"),
    )
    uneven = tuple(
        Violation(field, f"{value} must be divisible by {by} {size} of layout {layout}")
        for field, value, size, by in checks
        if value % size
    )
    if not uneven and (why := too_large(job, layout)):
        return (Violation("device_bytes", why),)
    return uneven


def rule_violations(job: JobFile) -> tuple[Violation, ...]:
    """What no layout of this version supports, and the rules that the layouts named in the job file break. A job with
    any is rejected."""
    named = [(f"layouts.allowed.{i}", text, None) for i, text in enumerate(job.layouts.allowed)]
    named += [(f"layouts.pinned.{i}.layout", pin.layout, pin.nodes) for i, pin in enumerate(job.layouts.pinned)]
    found = _unsupported(job)
    for field, text, nodes in named:
        layout = parse_layout(text)
        found += [Violation(field, f"{item.field}: {item.rule}") for item in violations(job, layout)]
        if nodes is not None and not job.nodes.min <= nodes <= job.nodes.max:
            found.append(Violation(field, f"nodes {nodes} must be within nodes {job.nodes.min}..{job.nodes.max}"))
        if nodes is not None and layout.world_size < nodes:
            found.append(Violation(field, f"{layout} has {layout.world_size} ranks, too few to use {nodes} nodes"))
    if job.policy is not None and job.policy.keep_tp:
        sizes = sorted({parse_layout(text).tp for _, text, _ in named})
        if len(sizes) > 1:
            several = " and ".join(f"TP{size}" for size in sizes)
            found.append(Violation("policy.keep_tp", f"all layouts named must have one TP, layouts have {several}"))
    return tuple(found)


def _unsupported(job: JobFile) -> list[Violation]:
    """Fields that ask for what this version has not, whatever the layout."""
    found = []
    if job.model.num_experts is not None:
        found.append(Violation("model.num_experts", "this version runs dense models only; leave it out"))
    for name, axis in FURTHER_SIZES.items():
        size = job.args.get(name)
        if isinstance(size, int) and size > 1:
            found.append(
                Violation(f"args.{name}", f"{axis}{size} is not supported: this version runs TP, PP and DP only")
            )
    return found


def candidates(job: JobFile, *, nodes: int, slots: int, history: tuple[LayoutUse, ...]) -> tuple[ParallelLayout, ...]:
    """The layouts to choose from with `slots` slots on `nodes` nodes: pinned, else allowed, else all that divide."""
    if job.layouts.pinned:
        pinned = _pinned(job, nodes=nodes, history=history)
        return (pinned,) if pinned is not None and fits(job, pinned, slots=slots) else ()
    if job.layouts.allowed:
        return tuple(layout for text in job.layouts.allowed if fits(job, layout := parse_layout(text), slots=slots))
    return tuple(layout for layout in _enumerated(job, slots=slots) if fits(job, layout, slots=slots))


def fits(job: JobFile, layout: ParallelLayout, *, slots: int) -> bool:
    """Whether the layout can run and has a slot for every rank."""
    return layout.world_size <= slots and not violations(job, layout)


def _pinned(job: JobFile, *, nodes: int, history: tuple[LayoutUse, ...]) -> ParallelLayout | None:
    """The layout pinned for this many nodes; with `prefer_change` the next one in turn."""
    choices = [pin.layout for pin in job.layouts.pinned if pin.nodes == nodes]
    if not choices:
        return None
    if not job.layouts.prefer_change:
        return parse_layout(choices[0])
    names = [str(parse_layout(choice)) for choice in choices]
    used = [names.index(use.layout) for use in history if use.nodes == nodes and use.layout in names]
    return parse_layout(choices[(used[-1] + 1) % len(choices)] if used else choices[0])


def _enumerated(job: JobFile, *, slots: int) -> Iterator[ParallelLayout]:
    """TP x PP x DP over at most `slots` ranks, larger worlds first, bounded."""
    tensor_max = min(slots, job.layouts.tensor_parallel_max or TENSOR_PARALLEL_MAX, job.model.num_attention_heads)
    found = [
        ParallelLayout(tp=tp, pp=pp, dp=dp)
        for tp in _divisors(job.model.num_attention_heads, most=tensor_max)
        for pp in _divisors(job.model.num_layers, most=slots // tp)
        for dp in _divisors(job.global_batch // job.micro_batch, most=slots // (tp * pp))
    ]
    yield from sorted(found, key=lambda layout: -layout.world_size)[:CANDIDATES_MAX]


def _divisors(value: int, *, most: int) -> list[int]:
    return [size for size in range(1, min(value, most) + 1) if value % size == 0]
