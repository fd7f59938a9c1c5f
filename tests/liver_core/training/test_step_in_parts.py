"""A step in parts weighs auxiliary losses as the whole step does: they take a way of their own through Megatron, past
the loss that a job returns. Dense steps in parts are tested with handoffs, in tests.liver_core.rank.test_drop_step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.real_ranks import run_alone
from tests.cluster.real_ranks_model import small_gpt

pytestmark = pytest.mark.timeout(120)
MICRO_BATCHES = 8
EVERY = (1, 2, 3)
"""Micro-batches of a part; the last part of three has two."""


def test_parts_of_a_step_with_experts_give_bit_for_bit_the_gradients_and_the_loss_of_the_whole_step(corpus: str):
    said = run_alone(_compare, corpus)
    assert said["whole"]["auxiliary losses count"], "else this test could not fail"
    for every in EVERY:
        assert said[f"parts of {every}"] == {"gradients": True, "loss": True, "config": True}
    assert said["per token"]["refused by name"], "it would add gradients up over DP"


def _compare(corpus: str) -> dict[str, dict[str, bool]]:
    from liver_core.worlds import cpu_compat

    cpu_compat.apply()
    import torch
    from megatron.core.transformer.moe import moe_utils

    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.training import megatron_job
    from liver_core.training.cursor import DataCursor
    from liver_core.worlds.megatron import activate, bring_up, building, prepare_process, seed_streams

    moe_utils.te_general_gemm = None  # Named without a guard where Transformer Engine is absent.
    megatron_job.refusals = lambda *_: {}
    prepare_process()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    roster = Roster("job", 1, ParallelLayout.parse("TP1"), (Member("a", 0),))
    world = bring_up(roster, 0, store, host="127.0.0.1", timeout_s=20)
    activate(world)
    seed_streams(world, seed=1, step=0)
    batches = DataCursor(0, MICRO_BATCHES, 1).batches(0, 1)

    def built(**settings: float) -> tuple[Any, Any]:
        job = _with_experts(corpus, **settings)
        with building(world):
            state = job.build(world)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return job, state

    def whole(job: Any, state: Any) -> tuple[torch.Tensor, float]:
        result = job.step(state, world, batches)
        return state.model.buffers[0].grad_data.clone(), float(result.loss_sum)

    def parts(job: Any, state: Any, every: int) -> tuple[torch.Tensor, float]:
        steps = job.step_in_parts(state, world, batches, every)
        while True:
            try:
                next(steps)
            except StopIteration as stopped:
                return state.model.buffers[0].grad_data.clone(), float(stopped.value.loss_sum)

    without, _ = whole(*built(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0))
    job, state = built(moe_aux_loss_coeff=1e-2, moe_z_loss_coeff=1e-3)
    config = state.model.config
    gradients, loss = whole(job, state)
    said = {"whole": {"auxiliary losses count": not torch.equal(without, gradients)}}
    for every in EVERY:
        found, found_loss = parts(job, state, every)
        said[f"parts of {every}"] = {
            "gradients": torch.equal(found, gradients),
            "loss": found_loss == loss,
            "config": state.model.config is config and not config.calculate_per_token_loss,
        }
    config.calculate_per_token_loss = True
    with pytest.raises(ValueError, match=r"^calculate_per_token_loss: must be False"):
        whole(job, state)
    return said | {"per token": {"refused by name": True}}


def _with_experts(corpus: str, **settings: float) -> Any:
    from dataclasses import replace

    from megatron.core.models.gpt import gpt_layer_specs

    from liver_core.training import gpt

    class Experts(gpt.GptJob):
        def _transformer_config(self, world: Any) -> Any:
            routed = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
            made = super()._transformer_config(world)
            return replace(made, **routed, moe_router_load_balancing_type="aux_loss", **settings)

    gpt.get_gpt_layer_local_spec = lambda **named: gpt_layer_specs.get_gpt_layer_local_spec(num_experts=4, **named)
    return Experts(small_gpt(corpus, num_layers=2), global_batch=MICRO_BATCHES, micro_batch=1, seed=7)
