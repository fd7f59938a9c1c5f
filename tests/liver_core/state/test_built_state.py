"""Settings of Megatron that no handoff can carry are refused by name when a job is built, with what to set instead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.real_ranks import run_alone

pytestmark = pytest.mark.timeout(120)


def test_every_setting_that_is_refused_exists_and_is_named_with_what_to_set():
    found = run_alone(_refused)
    assert found.pop("plain") == ""
    assert found.pop("fp8 with current scaling") == ""
    assert len(found) == 25
    for name, said in found.items():
        assert said.startswith(f"{name}: is "), (name, said)
        assert any(words in said for words in ("set it to", "use fp8_recipe", "use 'alltoall'")), said


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return run_alone(_said)


def test_what_a_module_keeps_beside_its_parameters_is_refused_by_name_unless_each_build_makes_it(said: dict[str, str]):
    assert said["made by build"] == ""
    assert said["kept"].startswith("buffer decoder.seen: is persistent, of shape (3,);")
    assert "persistent=False" in said["kept"] and "small_state" in said["kept"]


def test_experts_with_tp_and_without_sequence_parallelism_are_refused_when_they_are_built(said: dict[str, str]):
    assert said["experts in TP2"].startswith("sequence_parallel: is off") and "TP2" in said["experts in TP2"]
    for name in ("experts in TP2, cut by sequence", "experts in DP2xEP2", "dense in TP2"):
        assert said[name] == "", name


def _said() -> dict[str, str]:
    import torch

    from liver_core.layout import ParallelLayout
    from liver_core.state import built_state
    from liver_core.state.step_counts import UnsupportedState

    def refusal(check: Callable[..., None], *arguments: Any) -> str:
        try:
            check(*arguments)
        except UnsupportedState as refused:
            return str(refused)
        return ""

    def keeping(*, persistent: bool) -> torch.nn.Module:
        model = torch.nn.Module()
        model.decoder = torch.nn.Linear(2, 2)
        model.decoder.register_buffer("seen", torch.zeros(3), persistent=persistent)
        return model

    def sequence(experts: int | None, layout: str, *, cut: bool) -> str:
        config = SimpleNamespace(num_moe_experts=experts, sequence_parallel=cut)
        return refusal(built_state.check_sequence, config, ParallelLayout.parse(layout))

    return {
        "kept": refusal(built_state._check_buffers, keeping(persistent=True)),
        "made by build": refusal(built_state._check_buffers, keeping(persistent=False)),
        "experts in TP2": sequence(4, "TP2", cut=False),
        "experts in TP2, cut by sequence": sequence(4, "TP2", cut=True),
        "experts in DP2xEP2": sequence(4, "DP2xEP2", cut=False),
        "dense in TP2": sequence(None, "TP2", cut=False),
    }


def _refused() -> dict[str, str]:
    from dataclasses import fields

    from liver_core.worlds import cpu_compat

    cpu_compat.apply()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.enums import Fp8Recipe
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from liver_core.state import built_state
    from liver_core.state.step_counts import UnsupportedState
    from liver_core.training import unsupported_settings as unsupported

    def said(optimizer: dict, ddp: dict, model: dict) -> str:
        parts = (
            OptimizerConfig(),
            DistributedDataParallelConfig(),
            TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4),
        )
        for part, changes in zip(parts, (optimizer, ddp, model), strict=True):
            for name, value in changes.items():
                assert name in {field.name for field in fields(part)}, f"Megatron has no {name}"
                setattr(part, name, value)
        state = SimpleNamespace(
            optimizer=SimpleNamespace(config=parts[0]), model=SimpleNamespace(ddp_config=parts[1]), config=parts[2]
        )
        try:
            built_state._check_settings(state)  # type: ignore[arg-type]
        except UnsupportedState as refused:
            return str(refused)
        return ""

    found = {"plain": said({}, {}, {})}
    values = {"cuda_graph_impl": "local", "num_distributed_optimizer_instances": 2, "mtp_num_layers": 1}
    of_all = (unsupported._OPTIMIZER, unsupported._DDP, unsupported._MODEL, unsupported._STAGES)
    for place, refused in enumerate(of_all):
        for name in refused:
            changes: list[dict] = [{}, {}, {}]
            value = values.get(name, 2 if name.endswith("_size") or name.startswith("num_") else True)
            stages = {"pipeline_model_parallel_size": 2} if refused is unsupported._STAGES else {}
            changes[min(place, 2)] = {name: value, **stages}
            found[name] = said(*changes)
    found["fp8_recipe"] = said({}, {}, {"fp8": "hybrid", "fp8_recipe": Fp8Recipe.delayed})
    found["moe_token_dispatcher_type"] = said({}, {}, {"moe_token_dispatcher_type": "flex"})
    found["fp8 with current scaling"] = said({}, {}, {"fp8": "hybrid", "fp8_recipe": Fp8Recipe.tensorwise})
    return found
