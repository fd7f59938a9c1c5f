"""A rank's pieces of the gradient buckets, and the rule of a live optimizer's buckets for worlds of other layouts."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: there are no buffers")

from liver_core.layout import BucketRule, Manifest, ParallelLayout, shard_ranges  # noqa: E402
from liver_core.tensors.buckets import bucket_rule, collect_gradients, one_view, pieces, spread_gradients  # noqa: E402
from tests.liver_core.layout.models import KINDS, spec  # noqa: E402


def manifest(elements_max: int | None) -> Manifest:
    """Five parameters of 100 elements; with a limit of 150 buckets of 256, 256 and 128, padding included."""
    parameters = tuple(spec(f"p{i}", (100,), layer=0, order=i) for i in range(5))
    return Manifest(parameters, 1, KINDS, BucketRule(elements_max=elements_max))


def world(dp: int, rank: int, elements_max: int | None = 150) -> Any:
    """What the functions look at of a live world: shards, pieces of a numbered buffer, a region of its own."""
    shards = shard_ranges(manifest(elements_max), ParallelLayout(dp=dp), rank)
    buffer, buckets, start = torch.arange(float(sum(b.padded_numel for b in shards.buckets))), [], 0
    for bucket in shards.buckets:
        buckets.append(SimpleNamespace(grad_data=buffer[start : start + bucket.padded_numel]))
        start += bucket.padded_numel
    optimizer = SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets)])
    parts = pieces(optimizer, "grad_data", shards)
    return SimpleNamespace(gradients=parts, buffer=buffer, regions={"grad": torch.zeros(shards.region_numel)})


def test_a_rank_owns_its_share_of_every_bucket():
    assert [part.tolist() for part in world(2, 1).gradients] == [
        list(range(128, 256)),
        list(range(384, 512)),
        list(range(576, 640)),
    ]


@pytest.mark.parametrize(
    ("dp", "elements_max", "joined"), [(1, 150, True), (2, None, True), (2, 150, False), (4, 150, False)]
)
def test_pieces_are_one_view_only_where_they_follow_each_other(dp: int, elements_max: int | None, joined: bool):
    live = world(dp, dp - 1, elements_max)
    whole = one_view(live.gradients)
    assert (whole is not None) == joined
    if whole is not None:
        assert torch.equal(whole, torch.cat(live.gradients))
        assert whole.untyped_storage().data_ptr() == live.buffer.untyped_storage().data_ptr()


def test_gradients_go_to_the_region_and_back_in_the_order_of_the_buckets():
    live = world(2, 0)
    before = live.buffer.clone()
    collect_gradients(live)
    assert torch.equal(live.regions["grad"], torch.cat(live.gradients))
    live.regions["grad"].neg_()
    spread_gradients(live)
    owned = torch.zeros(640, dtype=torch.bool)
    for start, stop in ((0, 128), (256, 384), (512, 576)):
        owned[start:stop] = True
    assert torch.equal(live.buffer, torch.where(owned, -before, before)), "and nothing of other ranks is touched"


def test_where_the_region_is_a_view_nothing_is_copied(monkeypatch: pytest.MonkeyPatch):
    live = world(1, 0)
    live.regions["grad"] = one_view(live.gradients)
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    collect_gradients(live)
    spread_gradients(live)


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
