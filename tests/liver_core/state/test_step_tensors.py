"""Tensors that a step changes beside parameters: both versions of them, and what is said of them to another world."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: what it holds cannot be looked at")

import torch

from liver_core.layout import BucketRule, Manifest, WholeSpec
from liver_core.state.step_tensors import (
    StepTensors,
    StepTensorsMissing,
    is_step_tensor,
    step_buffers,
    taken,
    version_sums,
)
from tests.liver_core.layout.models import KINDS, spec

NAME = "decoder.layers.0.mlp.router.expert_bias"


class Router(torch.nn.Module):
    """As Megatron's, which counts the tokens of each expert and keeps its bias in fp32."""

    expert_bias: torch.Tensor
    local_tokens_per_expert: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("local_tokens_per_expert", torch.zeros(4), persistent=False)
        self.register_buffer("expert_bias", torch.zeros(4))

    def _maintain_float32_expert_bias(self) -> None:
        self.expert_bias.data = self.expert_bias.data.float()


def made() -> tuple[Router, StepTensors]:
    router = Router()
    return router, StepTensors(router, {NAME: router.expert_bias})


def test_it_gives_a_step_again_what_it_began_with_and_forgets_the_tokens_that_were_counted():
    router, tensors = made()
    tensors.begin()
    router.expert_bias.add_(1.0)
    router.local_tokens_per_expert.add_(7.0)
    tensors.put_back()
    assert not router.expert_bias.any() and not router.local_tokens_per_expert.any()


def test_what_is_due_after_the_step_before_sees_that_step():
    router, tensors = made()
    router.expert_bias.fill_(1.0)
    tensors.begin()
    router.expert_bias.fill_(2.0)
    with tensors.as_before():
        assert router.expert_bias.tolist() == [1.0] * 4
    assert router.expert_bias.tolist() == [2.0] * 4


def test_another_world_installs_either_version_bit_for_bit():
    router, tensors = made()
    router.expert_bias.copy_(torch.tensor([0.1, -0.0, 1e-45, 3.0]))
    tensors.begin()
    router.expert_bias.mul_(3.0)
    both = tensors.encoded()
    other, installed = made()
    for version, wanted in ((both.before, [0.1, -0.0, 1e-45, 3.0]), (both.after, None)):
        installed.install(version)
        expected = router.expert_bias if wanted is None else torch.tensor(wanted)
        assert torch.equal(other.expert_bias.view(torch.int32), expected.view(torch.int32))


def test_what_is_missing_or_of_another_size_is_refused_by_name():
    wanted = [WholeSpec(NAME, (4,), "float32", 0)]
    with pytest.raises(StepTensorsMissing, match=rf"^{NAME}: is not given by the world before, must have 16"):
        taken(wanted, {"other": ""})
    with pytest.raises(StepTensorsMissing, match=rf"^{NAME}: has 3 bytes by the world before, must have 16"):
        taken(wanted, {NAME: "AAAA"})
    _, tensors = made()
    assert taken(wanted, tensors.encoded().before) == tensors.encoded().before


def test_sums_of_one_holder_times_those_of_the_next_world_are_theirs_and_each_bit_counts():
    manifest = Manifest((spec("w", (4,), layer=0),), 1, KINDS, BucketRule(), (WholeSpec(NAME, (4,), "float32", 0),))
    router, tensors = made()
    tensors.begin()
    router.expert_bias.fill_(1.0)
    both = tensors.encoded()
    (once,), (thrice,) = version_sums(manifest, both, 1), version_sums(manifest, both, 3)
    assert thrice == 3 * once % 2**64
    router.expert_bias[2] = torch.nextafter(router.expert_bias[2], torch.tensor(2.0))
    assert version_sums(manifest, tensors.encoded(), 1) != [once]
    assert version_sums(manifest, type(both)({}, {}), 1) == [0]


def test_a_bias_that_was_cast_with_its_model_is_fp32_before_it_is_looked_at():
    router = Router().bfloat16()
    ((name, tensor),) = step_buffers(torch.nn.ModuleDict({"router": router}))
    assert (name, tensor.dtype) == ("router.expert_bias", torch.float32)
    assert is_step_tensor(router, "expert_bias") and not is_step_tensor(router, "local_tokens_per_expert")
