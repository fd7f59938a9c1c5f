"""Which layouts the job could run on at all. Pure.

The divisibility rules are Megatron's: layers over pipeline stages; heads, query groups and the padded vocabulary over
tensor parallel ranks; the global batch over micro-batch x data parallel; experts over expert parallel, and the inner
size of each over expert tensor parallel ranks.
"""

from collections.abc import Iterator
from itertools import product

from agent.protocol.jobfile import JobFile
from liver_core.layout import LayoutError, ParallelLayout
from liver_core.layout.fit import AXES_THAT_RUN, check_experts, further_axes
from service.planner.inputs import LayoutUse, Violation
from service.planner.memory_fit import too_large

TENSOR_PARALLEL_MAX = 64
CANDIDATES_MAX = 4_096
FURTHER_SIZES = {"context_parallel_size": "CP", "virtual_pipeline_model_parallel_size": "VPP"}
"""Axes that no layout of this version has, by Megatron's names, which a job file may have under `args`."""
EXPERT_SIZES = {"expert_model_parallel_size": "EP", "expert_tensor_parallel_size": "ETP"}
"""Axes that layouts have, by the same names."""


def violations(job: JobFile, layout: ParallelLayout) -> tuple[Violation, ...]:
    """Every rule that `layout` breaks for this job; empty if it can run."""
    if further := further_axes(layout):
        return (Violation(f"layout with {further}", AXES_THAT_RUN),)
    model = job.model
    if model.share_embeddings_and_output_weights and layout.pp > 1:
        field = "model.share_embeddings_and_output_weights"
        return (Violation(field, f"tied embeddings run with PP1 only, layout {layout} has PP{layout.pp}"),)
    if of_experts := tuple(_expert_violations(job, layout)):
        return of_experts
    checks = [
        ("model.num_layers", model.num_layers, layout.pp, "PP"),
        ("model.num_attention_heads", model.num_attention_heads, layout.tp, "TP"),
        ("model.num_query_groups", model.num_query_groups or 0, layout.tp, "TP"),
        ("model.ffn_hidden_size", model.ffn_hidden_size or 0, layout.tp, "TP"),
        ("model.padded_vocab_size", model.padded_vocab_size, layout.tp, "TP"),
        ("global_batch", job.global_batch // job.micro_batch, layout.dp, "micro_batch x DP"),
    ]
    if experts := model.experts():
        checks += [
            ("model.moe_ffn_hidden_size", experts.ffn, layout.expert_tp, "ETP"),
            ("model.moe_shared_expert_intermediate_size", experts.shared_ffn, layout.tp, "TP"),
            ("model.seq_length", model.seq_length, layout.tp, "TP"),
        ]
    uneven = tuple(
        Violation(field, f"{value} must be divisible by {by} {size} of layout {layout}")
        for field, value, size, by in checks
        if value % size
    )
    if not uneven and (why := too_large(job, layout)):
        return (Violation("device_bytes", why),)
    return uneven


def _expert_violations(job: JobFile, layout: ParallelLayout) -> Iterator[Violation]:
    """What keeps the model's experts, or its having none, out of a layout."""
    try:
        check_experts(layout, job.model.num_experts or 0)
    except LayoutError as error:
        yield Violation("model.num_experts", error.rule)
    if job.model.num_experts is not None and layout.tp > 1 and job.args.get("sequence_parallel") is False:
        rule = f"must not be false with model.num_experts in layout {layout}"
        yield Violation("args.sequence_parallel", f"{rule}: with TP Megatron trains experts on cut sequences only")


def rule_violations(job: JobFile) -> tuple[Violation, ...]:
    """What no layout of this version supports, and the rules that the layouts named in the job file break. A job with
    any is rejected."""
    named = [(f"layouts.allowed.{i}", text, None) for i, text in enumerate(job.layouts.allowed)]
    named += [(f"layouts.pinned.{i}.layout", pin.layout, pin.nodes) for i, pin in enumerate(job.layouts.pinned)]
    found = [*_unsupported(job), *_limits(job)]
    for field, text, nodes in named:
        layout = ParallelLayout.parse(text)
        found += [Violation(field, f"{item.field}: {item.rule}") for item in violations(job, layout)]
        if nodes is not None and not job.nodes.min <= nodes <= job.nodes.max:
            found.append(Violation(field, f"nodes {nodes} must be within nodes {job.nodes.min}..{job.nodes.max}"))
        if nodes is not None and layout.world_size < nodes:
            found.append(Violation(field, f"{layout} has {layout.world_size} ranks, too few to use {nodes} nodes"))
    if job.policy is not None and job.policy.keep_tp:
        sizes = sorted({ParallelLayout.parse(text).tp for _, text, _ in named})
        if len(sizes) > 1:
            several = " and ".join(f"TP{size}" for size in sizes)
            found.append(Violation("policy.keep_tp", f"all layouts named must have one TP, layouts have {several}"))
    return tuple(found)


def _unsupported(job: JobFile) -> list[Violation]:
    """Fields that ask for what this version has not, whatever the layout."""
    found = []
    for name, axis in (FURTHER_SIZES | EXPERT_SIZES).items():
        size = job.args.get(name)
        if isinstance(size, int) and size > 1:
            where = f"belongs to layouts, as {axis}{size} in layouts.allowed" if name in EXPERT_SIZES else ""
            found.append(Violation(f"args.{name}", where or f"{axis}{size} is not supported: {AXES_THAT_RUN}"))
    return found


def _limits(job: JobFile) -> Iterator[Violation]:
    """Sizes that no layout of the model can have."""
    limits, experts = job.layouts.limits, job.model.experts()
    for name, sizes, field, size in (
        ("expert_model_parallel", limits.expert_model_parallel, "num_experts", experts and experts.count),
        ("expert_tensor_parallel", limits.expert_tensor_parallel, "moe_ffn_hidden_size", experts and experts.ffn),
    ):
        if sizes and size is None:
            yield Violation(f"layouts.limits.{name}", "needs model.num_experts")
            continue
        for at, by in enumerate(sizes):
            if size is not None and size % by:
                yield Violation(f"layouts.limits.{name}.{at}", f"{by} must divide model.{field}, {size}")
    most = job.layouts.tensor_parallel_max
    for at, by in enumerate(limits.expert_tensor_parallel):
        if most and by > most:
            rule = f"{by} must be at most layouts.tensor_parallel_max, {most}"
            yield Violation(f"layouts.limits.expert_tensor_parallel.{at}", rule)


def candidates(
    job: JobFile, *, nodes: int, slots: int, history: tuple[LayoutUse, ...], in_use: ParallelLayout | None = None
) -> tuple[ParallelLayout, ...]:
    """The layouts to choose from with `slots` slots on `nodes` nodes: pinned, else allowed, else all that divide.
    `in_use`: the one that the job has or had last, whose EP and ETP stay where the job file has no limits for them."""
    if job.layouts.pinned:
        pinned = _pinned(job, nodes=nodes, history=history)
        return (pinned,) if pinned is not None and fits(job, pinned, slots=slots) else ()
    if job.layouts.allowed:
        return tuple(
            layout for text in job.layouts.allowed if fits(job, layout := ParallelLayout.parse(text), slots=slots)
        )
    return tuple(layout for layout in _enumerated(job, slots, in_use) if fits(job, layout, slots=slots))


def fits(job: JobFile, layout: ParallelLayout, *, slots: int) -> bool:
    """Whether the layout can run and has a slot for every rank."""
    return layout.world_size <= slots and not violations(job, layout)


def _pinned(job: JobFile, *, nodes: int, history: tuple[LayoutUse, ...]) -> ParallelLayout | None:
    """The layout pinned for this many nodes; with `prefer_change` the next one in turn."""
    choices = [pin.layout for pin in job.layouts.pinned if pin.nodes == nodes]
    if not choices:
        return None
    if not job.layouts.prefer_change:
        return ParallelLayout.parse(choices[0])
    names = [str(ParallelLayout.parse(choice)) for choice in choices]
    used = [names.index(use.layout) for use in history if use.nodes == nodes and use.layout in names]
    return ParallelLayout.parse(choices[(used[-1] + 1) % len(choices)] if used else choices[0])


def _enumerated(job: JobFile, slots: int, in_use: ParallelLayout | None) -> Iterator[ParallelLayout]:
    """TP x PP x DP over at most `slots` ranks, and how experts are cut over these; larger worlds first, bounded."""
    tensor_max = min(slots, job.layouts.tensor_parallel_max or TENSOR_PARALLEL_MAX, job.model.num_attention_heads)
    found = [
        ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp)
        for tp in _divisors(job.model.num_attention_heads, most=tensor_max)
        for pp in _divisors(job.model.num_layers, most=slots // tp)
        for dp in _divisors(job.global_batch // job.micro_batch, most=slots // (tp * pp))
        for ep, etp in _cuts_of_experts(job, in_use or ParallelLayout(), tp, dp)
    ]
    yield from sorted(found, key=lambda layout: -layout.world_size)[:CANDIDATES_MAX]


def _cuts_of_experts(job: JobFile, in_use: ParallelLayout, tp: int, dp: int) -> list[tuple[int, int]]:
    """EP and ETP: each that the limits name, else those in use, as far as they divide the ranks of a stage."""
    if job.model.num_experts is None:
        return [(1, tp)]
    limits = job.layouts.limits
    tensor = limits.expert_tensor_parallel or (in_use.etp or tp,)
    cuts = product(dict.fromkeys(limits.expert_model_parallel or (in_use.ep,)), dict.fromkeys(tensor))
    return [(ep, etp) for ep, etp in cuts if tp * dp % (ep * etp) == 0 and (etp == tp or (ep > 1 and etp < tp))]


def _divisors(value: int, *, most: int) -> list[int]:
    return [size for size in range(1, min(value, most) + 1) if value % size == 0]
