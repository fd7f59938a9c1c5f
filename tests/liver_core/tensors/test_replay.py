"""The start-up check of replay: it passes what gives the same bits, and finds out by itself what does not."""

from __future__ import annotations

import pytest

from tests.real_ranks import run_alone

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_only_an_optimizer_whose_parts_step_like_the_whole_may_be_replayed():
    found = run_alone(_checked)
    assert {name for name, text in found.items() if not text} == {
        *("adamw for-loop", "adamw foreach", "adam", "adam amsgrad", "sgd", "sgd momentum", "lion")
    }
    assert found["fused adamw"].startswith("optimizer AdamW with") and "'fused': True" in found["fused adamw"]
    assert "optimizer MeanScaled" in found["depends on the whole"] and "differs" in found["depends on the whole"]
    assert "optimizer CountsInGroup" in found["state in the group"]


def test_our_clip_in_tests_is_megatrons():
    assert run_alone(_same_clip) == [True, True, True]


def _checked() -> dict[str, str]:
    import torch

    from liver_core.worlds import cpu_compat

    cpu_compat.apply()
    from liver_core.tensors.megatron import UnsupportedState
    from liver_core.tensors.replay import check_rule, step_rule
    from tests.liver_core.streaming.optimizers import OPTIMIZERS

    class MeanScaled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad * parameter.abs().mean(), alpha=-group["lr"])

    class CountsInGroup(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for parameter in group["params"]:
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["count"])

    cases = {
        **OPTIMIZERS,
        "fused adamw": (torch.optim.AdamW, {"fused": True}, ("exp_avg", "exp_avg_sq")),
        "depends on the whole": (MeanScaled, {}, ()),
        "state in the group": (CountsInGroup, {}, ()),
    }
    found = {}
    for name, (kind, settings, moments) in cases.items():
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **settings})
        try:
            check_rule(step_rule(optimizer, moments), torch.device("cpu"))
            found[name] = ""
        except UnsupportedState as refused:
            found[name] = str(refused)
    return found


def _same_clip() -> list[bool]:
    import torch

    from liver_core.worlds import cpu_compat

    cpu_compat.apply()
    from liver_core.tensors import replay
    from tests.liver_core.streaming import optimizers

    same = []
    for norm in (0.3, 1.0, 7.9):
        pairs = [[torch.nn.Parameter(torch.zeros(101)) for _ in range(2)] for _ in range(2)]
        for mine, theirs in zip(*pairs, strict=True):
            mine.grad = torch.randn(101)
            theirs.grad = mine.grad.clone()
        optimizers.clip(pairs[0], 1.0, norm)
        replay.clip(pairs[1], 1.0, norm)
        same.append(all(optimizers.same_bits(a.grad, b.grad) for a, b in zip(*pairs, strict=True)))
    return same
