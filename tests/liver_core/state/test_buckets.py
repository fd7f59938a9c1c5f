"""A rank's pieces of the gradient buckets, and the rule of a live optimizer's buckets for worlds of other layouts."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: there are no buffers")

from liver_core.device.region import Region  # noqa: E402
from liver_core.layout import BucketRule, Manifest, ParallelLayout, shard_ranges  # noqa: E402
from liver_core.state.buckets import bucket_rule, owned_parts  # noqa: E402
from liver_core.state.optimizer_chain import OptimizerChain  # noqa: E402
from tests.liver_core.layout.models import KINDS, spec  # noqa: E402


def manifest(elements_max: int | None, sizes: tuple[int, ...] = (100,) * 5) -> Manifest:
    """Of parameters of 100 elements a limit of 150 makes buckets of 256, 256 and 128, padding included."""
    parameters = tuple(spec(f"p{i}", (size,), layer=0, order=i) for i, size in enumerate(sizes))
    return Manifest(parameters, 1, KINDS, BucketRule(elements_max=elements_max))


def chain(**part: Any) -> OptimizerChain:
    made: Any = SimpleNamespace(**part)
    return OptimizerChain(None, (made,))


def world(dp: int, rank: int, held: Manifest) -> list[Any]:
    """A rank's parts of a buffer whose elements are numbered."""
    shards = shard_ranges(held, ParallelLayout(dp=dp), rank)
    buffer, buckets, start = torch.arange(float(sum(b.padded_numel for b in shards.buckets))), [], 0
    for bucket in shards.buckets:
        buckets.append(SimpleNamespace(grad_data=buffer[start : start + bucket.padded_numel]))
        start += bucket.padded_numel
    return owned_parts(chain(buffers=[SimpleNamespace(buckets=buckets)]), "grad_data", shards)


def test_a_rank_owns_its_share_of_every_bucket():
    assert [part.tolist() for part in world(2, 1, manifest(150))] == [
        list(range(128, 256)),
        list(range(384, 512)),
        list(range(576, 640)),
    ]


@pytest.mark.parametrize(("dp", "elements_max", "count"), [(1, 150, 1), (2, None, 1), (2, 150, 3), (4, 150, 3)])
def test_parts_that_follow_each_other_in_memory_are_one_piece(dp: int, elements_max: int | None, count: int):
    parts = world(dp, dp - 1, manifest(elements_max))
    region = Region(parts)
    assert len(region.pieces) == count
    assert torch.equal(torch.cat(region.tensors), torch.cat(parts))


@pytest.mark.parametrize(
    ("size", "dp", "expected"),
    [
        (None, 4, BucketRule()),
        (20_000, 4, BucketRule(elements_max=20_000)),
        (40_000_000, 4, BucketRule(elements_max=40_000_000, elements_max_per_dp=1_000_000)),
        (64_000_000, 64, BucketRule(elements_max=40_000_000, elements_max_per_dp=1_000_000)),
        (40_000_000, 64, BucketRule(elements_max=40_000_000)),
    ],
)
def test_the_rule_of_a_live_optimizer_holds_for_other_layouts_too(size: int | None, dp: int, expected: BucketRule):
    config = SimpleNamespace(bucket_size=size, pad_buckets_for_high_nccl_busbw=False)
    chunk = SimpleNamespace(dp_group=SimpleNamespace(size=lambda: dp))
    rule = bucket_rule(chain(ddp_config=config, model_chunks=[chunk]))
    assert rule == expected
    assert rule.elements_max_at(dp) == size
