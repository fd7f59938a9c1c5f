"""A model in Megatron's own arguments: as a command line, and compared with those of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from liver_core.state.megatron_checkpoint import model_refusal
from liver_core.state.megatron_export import flags_of

pytestmark = pytest.mark.thorough


def test_a_list_is_a_word_each_where_megatron_takes_several_and_one_word_where_it_takes_one():
    said = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.01, 0.02]}
    flags = flags_of({"num_experts": 4, "moe_layer_freq": [0, 1], **said})
    assert {
        "--moe-router-load-balancing-type aux_loss seq_aux_loss",
        "--moe-aux-loss-coeff 0.01 0.02",
        "--moe-layer-freq [0,1]",
    } <= set(flags)


def test_all_that_changes_what_experts_compute_is_said():
    said = {"moe_expert_capacity_factor": 1.5, "moe_token_drop_policy": "position", "moe_input_jitter_eps": 0.1}
    switches = {"moe_shared_expert_gate": True, "moe_pad_expert_input_to_capacity": True}
    flags = flags_of({"num_experts": 4, **said, **switches})
    assert {
        "--moe-expert-capacity-factor 1.5",
        "--moe-token-drop-policy position",
        "--moe-input-jitter-eps 0.1",
        "--moe-shared-expert-gate",
        "--moe-pad-expert-input-to-capacity",
    } <= set(flags)
    assert not any("moe" in flag for flag in flags_of(said)), "a dense model has none of it"


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({"moe_layer_freq": [1, 1]}, {"moe_layer_freq": 1}, ""),
        ({"moe_layer_freq": 2}, {"moe_layer_freq": [1, 0]}, ""),
        ({"moe_layer_freq": [0, 1]}, {"moe_layer_freq": 1}, "moe_layer_freq is [0, 1] there and 1 in the job's model"),
        ({"moe_expert_capacity_factor": None}, {}, ""),
        ({"moe_expert_capacity_factor": 1.0}, {}, "moe_expert_capacity_factor is 1.0 there and None in the job's"),
    ],
)
def test_the_same_layers_may_be_named_in_two_ways_and_another_model_is_refused(
    theirs: dict[str, Any], ours: dict[str, Any], said: str
):
    shape = {"num_layers": 2, "num_experts": 4}
    refusal = model_refusal(shape | theirs, shape | ours)
    assert refusal.startswith(said) if said else not refusal
