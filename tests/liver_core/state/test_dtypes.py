"""Megatron's buffers of several dtypes are what the layout function says, and a mistake in it does not go unseen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks import run_ranks
from tests.cluster.real_ranks_model import small_gpt

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

NARROW = {"precision": "bf16", "grad_reduce_in_fp32": False, "norms_in_fp32": True}


def test_a_mistake_in_the_order_or_the_dtypes_of_buffers_is_refused_before_anything_moves(corpus: str):
    found = run_ranks(_adopted, 1, corpus, timeout_s=100)[0]
    assert found["as it is"] == ""
    for mistake in ("other order", "gradients in fp32", "norms in bf16"):
        assert "gradient bucket 0: Megatron has (" in found[mistake], found[mistake]
    assert found["pieces"] == {"master": 2, "exp_avg": 1, "exp_avg_sq": 1, "grad": 2}
    assert found["dtypes"] == {("torch.bfloat16", "torch.bfloat16"), ("torch.float32", "torch.float32")}
    assert found["masters"] == {"torch.float32"}
    assert found["account"] == found["bytes"]


def _adopted(rank: int, port: int, corpus: str) -> dict[str, Any]:
    from liver_core.handoff.messages import StoreAddress
    from liver_core.layout import BucketRule, Member, ParallelLayout, Roster, StateKind, shards
    from liver_core.memory.memory_placement import areas
    from liver_core.state import megatron_optimizer as megatron
    from liver_core.state.optimizer_chain import discover_kinds, optimizer_chain
    from liver_core.worlds.groups import connect_store
    from liver_core.worlds.megatron import activate, bring_up, building
    from tests.cluster.real_ranks_process import make_job

    job = make_job(RankSetup(small_gpt(corpus, num_layers=2, **NARROW)))
    store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
    layout = ParallelLayout.parse("TP1")
    world = bring_up(Roster("job", 1, layout, (Member("a", 0),)), 0, store, host="127.0.0.1", timeout_s=30)
    activate(world)
    with building(world):
        state = job.build(world)
    optimizer = optimizer_chain(state.optimizer)
    parts = [megatron.describe(state.model, world)]
    held = megatron.merge_manifest(parts, 2, discover_kinds(optimizer), BucketRule())

    def refusal(manifest: Any) -> str:
        try:
            megatron.adopt(state.model, state.optimizer, manifest, world)
        except megatron.StateMismatch as error:
            return str(error)
        return ""

    wide = (*held.kinds[:-1], StateKind("grad", "float32"))
    alike = tuple(replace(spec, dtype="bfloat16") for spec in held.parameters)
    found: dict[str, Any] = {
        "as it is": refusal(held),
        "gradients in fp32": refusal(replace(held, kinds=wide)),
        "norms in bf16": refusal(replace(held, parameters=alike)),
    }
    right = shards.stage_buckets
    shards.stage_buckets = lambda *asked: tuple(reversed(right(*asked)))
    found["other order"] = refusal(held)
    shards.stage_buckets = right
    live = megatron.adopt(state.model, state.optimizer, held, world)
    found["pieces"] = {kind: len(region.pieces) for kind, region in live.regions.items()}
    found["dtypes"] = {(str(each.param_dtype), str(each.grad_dtype)) for each in optimizer.buffers}
    found["masters"] = {str(tensor.dtype) for tensor in live.regions["master"].tensors}
    found["account"] = sum(area.device_bytes for area in areas(held, layout, 0))
    found["bytes"] = live.device_bytes
    return found
