"""The manifest that is made from sizes is the one that a rank describes after Megatron has built the model."""

from __future__ import annotations

from typing import Any

import pytest

from liver_core.layout.experts import ExpertShape
from liver_core.memory.transformer_shape import TransformerShape, manifest_of
from tests.cluster.real_ranks import run_alone

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "padded_vocab_size": 64, "seq_length": 16}
MODELS: dict[str, tuple[dict[str, Any], ExpertShape | None]] = {
    "dense": ({}, None),
    "experts": ({"num_experts": 3}, ExpertShape(3, 128, 2, (True,) * 4)),
    "some layers, shared": (
        {
            "num_experts": 4,
            "moe_ffn_hidden_size": 48,
            "moe_layer_freq": [0, 1, 1, 0],
            "moe_shared_expert_intermediate_size": 24,
        },
        ExpertShape(4, 48, 2, (False, True, True, False), shared_ffn=24),
    ),
}


def test_a_manifest_by_sizes_is_the_one_of_the_model_that_megatron_builds():
    found = run_alone(_described, {name: SIZES | more for name, (more, _) in MODELS.items()}, timeout_s=100.0)
    for name, (_, experts) in MODELS.items():
        shape = TransformerShape(4, 32, 4, 4, 128, 64, 16, "float32", experts=experts)
        assert found[name] == [_known(spec) for spec in manifest_of(shape).parameters], name


def _known(spec: Any) -> tuple[object, ...]:
    """All but the unit of attention weights, which only a built module tells."""
    where = (spec.place, spec.layer, spec.order, spec.expert, spec.slot)
    return spec.name, spec.shape, spec.dtype, spec.tp_dim, spec.blocks, *where


def _described(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    import torch.distributed as dist

    from liver_core.layout import ParallelLayout
    from liver_core.training.gpt import GptJob
    from liver_core.trial.trial_world import TrialWorld

    def described(name: str, arguments: dict[str, Any]) -> list[tuple[object, ...]]:
        job = GptJob({**arguments, "data_prefix": "/none"}, global_batch=2, micro_batch=1, seed=1)
        world = TrialWorld(job, ParallelLayout(), 0, dist.HashStore(), name)
        world.build()
        return [_known(spec) for spec in world.describe().parameters]

    return {name: described(name, arguments) for name, arguments in models.items()}
