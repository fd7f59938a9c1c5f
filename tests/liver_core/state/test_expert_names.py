"""The numbers of experts in the names of Megatron's parameters."""

from __future__ import annotations

import pytest

from liver_core.state.expert_names import expert_name

MLP = "decoder.layers.3.mlp."


@pytest.mark.parametrize(
    ("name", "experts", "number", "of_nine"),
    [
        (
            f"{MLP}experts.local_experts.1.linear_fc1.weight",
            f"{MLP}experts.local_experts",
            1,
            f"{MLP}experts.local_experts.9.linear_fc1.weight",
        ),
        (f"{MLP}experts.linear_fc1.weight12", f"{MLP}experts.linear_fc1", 12, f"{MLP}experts.linear_fc1.weight9"),
        (f"{MLP}experts.linear_fc2.bias0", f"{MLP}experts.linear_fc2", 0, f"{MLP}experts.linear_fc2.bias9"),
    ],
)
def test_one_by_one_and_grouped_experts_are_found(name: str, experts: str, number: int, of_nine: str):
    found = expert_name(name)
    assert found is not None
    assert (found.experts, found.number, found.name(9)) == (experts, number, of_nine)
    assert found.name(number) == name


@pytest.mark.parametrize(
    "name", [f"{MLP}router.weight", f"{MLP}shared_experts.linear_fc1.weight", f"{MLP}linear_fc1.weight", "w1"]
)
def test_routers_shared_experts_and_dense_layers_are_none(name: str):
    assert expert_name(name) is None
