"""A rank's pieces of the gradient buckets, and the rule of a live optimizer's buckets for worlds of other layouts."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: there are no buffers")

from liver_core.layout import BucketRule, Manifest, ParallelLayout, shard_ranges  # noqa: E402
from liver_core.state.buckets import (  # noqa: E402
    bucket_rule,
    collect_gradients,
    one_view,
    pieces,
    region_over,
    return_gradients,
)
from tests.liver_core.layout.models import KINDS, spec  # noqa: E402


def manifest(elements_max: int | None, sizes: tuple[int, ...] = (100,) * 5) -> Manifest:
    """Of parameters of 100 elements a limit of 150 makes buckets of 256, 256 and 128, padding included."""
    parameters = tuple(spec(f"p{i}", (size,), layer=0, order=i) for i, size in enumerate(sizes))
    return Manifest(parameters, 1, KINDS, BucketRule(elements_max=elements_max))


def world(dp: int, rank: int, held: Manifest) -> Any:
    """What the functions look at of a live world, over a buffer whose elements are numbered."""
    shards = shard_ranges(held, ParallelLayout(dp=dp), rank)
    buffer, buckets, start = torch.arange(float(sum(b.padded_numel for b in shards.buckets))), [], 0
    for bucket in shards.buckets:
        buckets.append(SimpleNamespace(grad_data=buffer[start : start + bucket.padded_numel]))
        start += bucket.padded_numel
    optimizer = SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets)])
    parts = pieces(optimizer, "grad_data", shards)
    regions = {"grad": region_over(buffer, parts)}
    return SimpleNamespace(gradients=parts, buffer=buffer, regions=regions, collected=False)


def test_a_rank_owns_its_share_of_every_bucket():
    assert [part.tolist() for part in world(2, 1, manifest(150)).gradients] == [
        list(range(128, 256)),
        list(range(384, 512)),
        list(range(576, 640)),
    ]


@pytest.mark.parametrize(
    ("dp", "elements_max", "joined"), [(1, 150, True), (2, None, True), (2, 150, False), (4, 150, False)]
)
def test_pieces_are_one_view_only_where_they_follow_each_other(dp: int, elements_max: int | None, joined: bool):
    live = world(dp, dp - 1, manifest(elements_max))
    whole = one_view(live.gradients)
    assert (whole is not None) == joined
    if whole is not None:
        assert torch.equal(whole, torch.cat(live.gradients))
    region = live.regions["grad"]
    assert region.untyped_storage().data_ptr() == live.buffer.untyped_storage().data_ptr(), "no memory of its own"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_gradients_that_are_collected_and_returned_are_what_they_were(data: st.DataObject):
    dp = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
    held = manifest(data.draw(st.none() | st.integers(1, 4000)), tuple(sizes))
    live = world(dp, data.draw(st.integers(0, dp - 1)), held)
    expected = torch.cat(live.gradients)
    return_gradients(live)
    assert torch.equal(torch.cat(live.gradients), expected), "nothing was collected, nothing is moved"
    collect_gradients(live)
    assert torch.equal(live.regions["grad"], expected)
    return_gradients(live)
    assert torch.equal(torch.cat(live.gradients), expected)


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
    rule = bucket_rule(SimpleNamespace(ddp_config=config, model_chunks=[chunk]))
    assert rule == expected
    assert rule.elements_max_at(dp) == size
