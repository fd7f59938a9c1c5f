"""The layout functions against Megatron-Core itself: rank groups, layer numbers, gradient buffers, optimizer ranges.

Nothing of Megatron runs here but its arithmetic: its buffers are built on the CPU with stand-ins for process groups.
"""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liver_core.layout import BucketRule, LocalParameter, ParallelLayout, local_parameters, shard_ranges
from tests.liver_core.layout.models import gpt, worlds

pytest.importorskip("torch", reason="torch is not installed: Megatron's own layout cannot be compared")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: its own layout cannot be compared")

AXES = ("tp", "pp", "dp", "cp", "dp-cp", "tp-pp", "tp-dp", "tp-cp", "tp-dp-cp", "tp-cp-dp-pp")
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
ORDER = "tp-cp-ep-dp-pp"


@settings(max_examples=60, deadline=None)
@given(tp=st.integers(1, 4), cp=st.integers(1, 3), dp=st.integers(1, 5), pp=st.integers(1, 4))
def test_groups_are_those_of_megatrons_rank_generator(tp, cp, dp, pp):
    from megatron.core.parallel_state import RankGenerator

    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp)
    theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    for axes in AXES:
        assert [list(group) for group in layout.groups(axes)] == theirs.get_ranks(axes)


@settings(max_examples=60, deadline=None)
@given(etp=st.integers(1, 3), ep=st.integers(2, 4), edp=st.integers(1, 3), pp=st.integers(1, 4))
def test_groups_of_experts_are_those_of_megatrons_rank_generator_for_experts(etp, ep, edp, pp):
    from megatron.core.parallel_state import RankGenerator

    layout = ParallelLayout(dp=etp * ep * edp, pp=pp, ep=ep, etp=etp)
    theirs = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=ORDER)
    for axes in ("tp", "ep", "dp", "tp-ep", "tp-ep-pp"):
        assert [list(group) for group in layout.expert_groups(axes)] == theirs.get_ranks(axes)


@pytest.mark.parametrize("layout", ["PP1", "PP2", "PP3", "PP6", "PP2xVPP2", "PP2xVPP3", "PP3xVPP2"])
def test_layers_are_numbered_as_megatron_numbers_them(layout):
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layout = ParallelLayout.parse(layout)
    config = SimpleNamespace(
        num_layers=12,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    for stage in range(layout.pp):
        held = local_parameters(gpt(layers=12), layout, stage)
        for chunk in range(layout.vpp):
            ours = min(local.spec.layer for local in held if local.chunk == chunk and local.spec.layer >= 0)
            vp_stage = chunk if layout.vpp > 1 else None
            assert ours == get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)  # type: ignore[arg-type]


class Group:
    """All that Megatron's buffers ask of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def megatron_ranges(held, *, rule: BucketRule, elements_max: int | None, shard: int, shards: int):
    """(buckets, parameter ranges) as Megatron's own buffer and optimizer compute them for one model chunk."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    parameters = {}
    for local, alone in held:
        parameter = torch.nn.Parameter(torch.empty(local.shape))
        parameter.shared_embedding = alone  # type: ignore[attr-defined]
        parameters[parameter] = local.name
    group = Group(shard, shards)
    collection = ProcessGroupCollection()
    collection.tp = Group(1, 2)  # type: ignore[assignment]
    collection.dp_cp = group  # type: ignore[assignment]
    buffer = _ParamAndGradBuffer(
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=rule.high_bandwidth_padding
        ),
        torch.float32,
        torch.float32,
        list(parameters),
        group,  # type: ignore[arg-type]
        elements_max,  # type: ignore[arg-type]
        parameters,
        1.0,
        list(range(len(parameters))),
        False,
        collection,
    )
    (per_bucket,) = DistributedOptimizer._build_gbuf_range_map(buffer).values()
    buckets = [(bucket.numel_unpadded, bucket.grad_data.numel()) for bucket in buffer.buckets]
    ranges = [
        {parameters[p]: (r["param"].start, r["param"].end, r["gbuf_local"].start) for p, r in each["param_map"].items()}
        for each in per_bucket
    ]
    return buckets, ranges


@pytest.fixture
def on_the_cpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)


@settings(max_examples=40, deadline=None, suppress_health_check=SUPPRESSED)
@given(world=worlds(1, ranks_max=12), high=st.booleans())
def test_shards_are_those_of_megatrons_gradient_buffer_and_distributed_optimizer(on_the_cpu, world, high):
    manifest, layout = world
    # Megatron has its alignment built in; ours is a field.
    limits = (manifest.bucket_rule.elements_max, manifest.bucket_rule.elements_max_per_dp)
    rule = BucketRule(elements_max=limits[0], elements_max_per_dp=limits[1], high_bandwidth_padding=high)
    manifest = type(manifest)(manifest.parameters, manifest.num_layers, manifest.kinds, rule)
    tied = {name for each in manifest.parameters if each.tied_to for name in (each.name, each.tied_to)}
    for rank in range(0, layout.world_size, layout.tp if layout.ep == 1 else 1):
        at = layout.coordinates(rank)
        ours = shard_ranges(manifest, layout, rank)
        found = {shard.name: (shard.param_start, shard.param_stop, shard.region_offset) for shard in ours.parameters}
        expected = {}
        # DistributedDataParallel: parameters of one chunk that share the dtypes of weight and gradient share a buffer,
        # and those of experts have others, with EP, which another optimizer steps that comes last in the chain.
        buffers: dict[tuple[str, int, str, str], list[tuple[LocalParameter, bool]]] = {}
        mine = local_parameters(manifest, layout, rank)
        for local in sorted(mine, key=lambda local: local.spec.expert >= 0 and layout.ep > 1):
            of = "expert" if local.spec.expert >= 0 and layout.ep > 1 else "dense"
            key = (of, local.chunk, local.spec.dtype, manifest.gradient_dtype(local.spec))
            buffers.setdefault(key, []).append((local, layout.pp > 1 and local.name in tied))
        assert [bucket.buffer for bucket in ours.buckets if bucket.index == 0] == list(buffers)
        for key, held in buffers.items():
            # DistributedDataParallel: "disable_bucketing or pp_rank > 0" means one bucket.
            elements_max = rule.elements_max_at(layout.dp) if at.pp == 0 and key[1] == 0 else None
            shard, shards = at.dp * layout.cp + at.cp, layout.dp * layout.cp
            if key[0] == "expert":
                shard, shards = at.edp, layout.expert_dp
            buckets, ranges = megatron_ranges(held, rule=rule, elements_max=elements_max, shard=shard, shards=shards)
            mine = [bucket for bucket in ours.buckets if bucket.buffer == key]
            assert [(bucket.numel, bucket.padded_numel) for bucket in mine] == buckets
            for bucket, owned in zip(mine, ranges, strict=True):
                for name, (start, stop, offset) in owned.items():
                    expected[name] = (start, stop, bucket.region_offset + offset)
        assert found == expected
