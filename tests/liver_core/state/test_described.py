"""A parameter that is cut over tensor-parallel ranks otherwise than its marks say is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from liver_core.state.described import check_cut
from liver_core.state.step_counts import UnsupportedState
from tests.cluster.real_ranks import run_alone

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Part:
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    key: str = "weight"
    prepend_axis_num: int = 0


ACCEPTED = {
    "whole": ((4, 6), None, 2, [Part((4, 6), (4, 6), (0, 0))]),
    "rows": ((4, 6), 0, 2, [Part((4, 6), (8, 6), (4, 0))]),
    "columns of a layer": ((4, 6), 1, 2, [Part((4, 6), (3, 4, 12), (1, 0, 6), prepend_axis_num=1)]),
    "gate and up, one tensor": ((4, 6), 0, 2, [Part((2, 6), (8, 6), (2, 0)), Part((2, 6), (8, 6), (6, 0))]),
    "gate and up, apart": ((4, 6), 0, 2, [Part((2, 6), (4, 6), (2, 0), "w"), Part((2, 6), (4, 6), (2, 0), "v")]),
    "a number": ((), None, 2, [Part((), (), ())]),
}
REFUSED = {
    "cut and not marked": ((2,), None, 2, [Part((2,), (4,), (2,))], "not marked as tensor parallel.*partition_dim=0"),
    "marked and not cut": ((2,), 0, 2, [Part((2,), (2,), (0,))], "marked as cut along dim 0"),
    "cut along another dim": ((4, 6), 0, 2, [Part((4, 6), (4, 12), (0, 6))], "partition_dim=0|partition_dim=1"),
    "parts of unequal sizes": ((3,), 0, 1, [Part((2,), (2,), (0,), "a"), Part((1,), (1,), (0,), "b")], "unequal sizes"),
    "a part is missing": ((4,), 0, 1, [Part((2,), (4,), (0,))], "describes 1 parts"),
    "other way round": ((4,), 0, 1, [Part((2,), (4,), (2,)), Part((2,), (4,), (0,))], "part 0 of 2 begins at 2"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_megatron_describes_as_it_is_marked_is_accepted(name: str):
    shape, tp_dim, tp, parts = ACCEPTED[name]
    check_cut("weight", shape, parts, tp_dim, tp)


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_describes_otherwise_is_refused_by_name(name: str):
    shape, tp_dim, tp, parts, text = REFUSED[name]
    with pytest.raises(UnsupportedState, match=f"^parameter weight: .*({text})"):
        check_cut("weight", shape, parts, tp_dim, tp)


def test_models_of_megatron_that_cannot_be_moved_are_refused_when_they_are_built():
    said = run_alone(_described, timeout_s=100)
    assert said["plain, TP1"] == said["plain, TP2"] == said["softmax offset, TP1"] == ""
    assert "self_attention.core_attention.softmax_offset: sharded_state_dict says" in said["softmax offset, TP2"]
    assert "mlp.linear_fc1.weight: is described in parts of unequal sizes" in said["packed, TP1"]
    assert "mlp.linear_fc1.weight: is described in parts of unequal sizes" in said["packed, TP2"]
    assert "embedding.word_embeddings.weight: is frozen (requires_grad=False), one of 1 such" in said["frozen, TP1"]


def _described() -> dict[str, str]:
    from liver_core.worlds import cpu_compat

    cpu_compat.apply()
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory

    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.state.built_state import check_built
    from liver_core.state.megatron_optimizer import describe
    from liver_core.training import gpt
    from liver_core.training.megatron_job import finish_build
    from liver_core.worlds.megatron import building, outline, prepare_process
    from tests.cluster.real_ranks_model import small_gpt

    prepare_process()

    class Odd(gpt.GptJob):
        how = "plain"

        def _transformer_config(self, world: Any) -> Any:
            config = super()._transformer_config(world)
            config.softmax_type = "learnable" if self.how == "softmax offset" else config.softmax_type
            config.gated_linear_unit = config.gated_linear_unit and self.how != "packed"
            return config

    def finish(world: Any, config: Any, model: Any, **settings: Any) -> Any:
        rows = 128 // world.layout.tp
        for layer in model.decoder.layers if Odd.how == "packed" else ():
            plain = layer.mlp.sharded_state_dict

            def sharded(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, plain: Any = plain):
                found, key = plain(prefix, sharded_offsets, metadata), f"{prefix}linear_fc1.weight"
                found[key] = _split_tensor_factory(found[key], [rows // 2, rows // 4, rows // 4], ["a", "b", "c"], 0)
                return found

            layer.mlp.sharded_state_dict = sharded
        if Odd.how == "frozen":
            model.embedding.word_embeddings.weight.requires_grad_(False)
        return finish_build(world, config, model, **settings)

    gpt.finish_build = finish

    def said(how: str, text: str) -> str:
        Odd.how, layout = how, ParallelLayout.parse(text)
        members = tuple(Member(node, 0) for node in "ab"[: layout.world_size])
        world = outline(Roster("job", 1, layout, members), 0, name=f"{how}-{text}")
        job = Odd(small_gpt("none", num_layers=2), global_batch=8, micro_batch=1, seed=1)
        with building(world):
            try:
                describe(check_built(job.build(world), world).model, world)
            except UnsupportedState as refused:
                return str(refused)
        return ""

    ways = ["plain, TP1", "plain, TP2", "softmax offset, TP1", "softmax offset, TP2"]
    ways += ["packed, TP1", "packed, TP2", "frozen, TP1"]
    return {way: said(*way.split(", ")) for way in ways}
