"""The start-up check of replay: it passes what gives the same bits, and finds out by itself what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liver_core.device.region import Region
from liver_core.streaming.header import StepHeader
from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks import run_alone, run_ranks
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.streaming.optimizers import same_bits

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_only_an_optimizer_whose_parts_step_like_the_whole_may_be_replayed():
    found = run_alone(_checked)
    assert {name for name, text in found.items() if not text} == {
        *("adamw for-loop", "adamw foreach", "adam", "adam amsgrad", "sgd", "sgd momentum", "lion"),
        *("fused adam", "fused adam, decay in the gradient", "counts in the group"),
    }
    assert found["fused adamw"].startswith("optimizer AdamW with") and "'fused': True" in found["fused adamw"]
    assert "optimizer MeanScaled" in found["depends on the whole"] and "differs" in found["depends on the whole"]
    assert "a step changes steps of the optimizer itself" in found["counts on itself"]
    assert "a step changes step of the parameter group, a Tensor" in found["counts in a tensor of the group"]


def test_our_clip_in_tests_is_megatrons():
    assert run_alone(_same_clip) == [True, True, True]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_of_megatron_is_replayed_bit_for_bit_in_another_world(corpus: str, precision: str):
    """In part, from before the first step, and then in whole, with the rates of the schedule."""
    found = run_ranks(_replay_megatron, 1, corpus, precision, timeout_s=100)[0]
    assert found["different"] == []
    assert found["clipped"] == {True, False}, "both with and without clipping"
    assert found["groups"] >= 2 and found["rates"] == found["steps"]


def _replay_megatron(rank: int, port: int, corpus: str, precision: str) -> dict[str, Any]:
    from liver_core.state.replay_check import check_replay, replayer

    state, world, source, target = _two_worlds(port, corpus, precision)
    check_replay(target)
    replaying = replayer(target, window_elements=5_000)
    spans = [(part.region_offset, part.region_offset + part.numel) for part in target.shards.parameters]
    resident = [(start, start + (stop - start) // 3) for start, stop in spans if stop - start > 2]
    found: dict[str, Any] = {"different": [], "clipped": set(), "steps": 5, "groups": 0}
    rates = set()
    generator = torch.Generator().manual_seed(7)
    for version in range(1, found["steps"] + 1):
        if version == 3:
            resident = spans
        if version in (1, 3):
            for kind in ("master", *source.moments):
                target.regions[kind].copy_(source.regions[kind])
        header = _step(state, world, source, target.regions["grad"], version, generator)
        replaying.replay(resident, StepHeader.decode(header.encode()))
        for kind in ("master", *source.moments):
            for start, stop in resident:
                if not same_bits(target.regions[kind].window(start, stop), source.regions[kind].window(start, stop)):
                    found["different"].append((version, kind, start))
        found["clipped"].add(bool(header.clip / (header.norm + 1e-6) < 1.0))
        found["groups"] = len(header.groups)
        rates.add(header.groups[0]["lr"])
    found["rates"] = len(rates)
    return found


def _two_worlds(port: int, corpus: str, precision: str) -> tuple[Any, Any, Any, Any]:
    """One process with two worlds of one rank: state and world of the first, and the live states of both."""
    from liver_core.handoff.messages import StoreAddress
    from liver_core.layout import BucketRule, Member, ParallelLayout, Roster
    from liver_core.state import megatron_optimizer as megatron
    from liver_core.state.optimizer_chain import discover_kinds, optimizer_chain
    from liver_core.state.optimizer_step import refresh_weights
    from liver_core.worlds.groups import connect_store
    from liver_core.worlds.megatron import activate, bring_up, building
    from tests.cluster.real_ranks_process import make_job

    job = make_job(RankSetup(small_gpt(corpus, precision=precision, num_layers=2)))
    made = []
    for number in (1, 2):
        store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
        roster = Roster("job", number, ParallelLayout.parse("TP1"), (Member("a", 0),))
        world = bring_up(roster, 0, store, host="127.0.0.1", timeout_s=30)
        if number == 1:
            activate(world)
        with building(world):
            state = job.build(world)
        kinds = discover_kinds(optimizer_chain(state.optimizer))
        parts = [megatron.describe(state.model, world)]
        manifest = megatron.merge_manifest(parts, state.config.num_layers, kinds, BucketRule())
        made.append((state, world, megatron.adopt(state.model, state.optimizer, manifest, world)))
    (state, world, source), (_, _, target) = made
    megatron.fill_initial(source, job.initial_parameter, job.seed)
    refresh_weights(state)
    return state, world, source, target


def _step(state: Any, world: Any, source: Any, landing: Region, version: int, generator: torch.Generator) -> StepHeader:
    """One real step of the first world; its gradients, as they were before it clipped them, go to `landing`."""
    from liver_core.state import megatron_optimizer as megatron
    from liver_core.state.optimizer_chain import optimizer_chain
    from liver_core.state.optimizer_step import apply_step, hyper_parameters, measure_gradients

    scale = 1.0 if version % 2 else 1e-5
    for part in source.shards.parameters:
        drawn = torch.randn(part.numel, generator=generator) * scale
        source.regions["grad"].window(part.region_offset, part.region_offset + part.numel).copy_(drawn)
    landing.copy_(source.regions["grad"])
    norm, clip = measure_gradients(state), optimizer_chain(state.optimizer).config.clip_grad
    header = StepHeader(
        version,
        norm=norm,
        clip=clip,
        groups=tuple(hyper_parameters(state)),
        scalars=megatron.element_scalars(source),
        stepped=source.optimizer.has_stepped,
    )
    apply_step(state, norm)
    megatron.settle_moments(source)
    return header


def _checked() -> dict[str, str]:
    import torch

    from liver_core.worlds import cpu_compat

    cpu_compat.apply()
    from liver_core.state.replay_check import check_rule, step_rule
    from liver_core.state.step_counts import UnsupportedState, form_of
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

    class CountsOnItself(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1

    class CountsInTensor(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group.setdefault("step", torch.zeros(1)).add_(1)

    cases = {
        **OPTIMIZERS,
        "fused adamw": (torch.optim.AdamW, {"fused": True}, ("exp_avg", "exp_avg_sq")),
        "depends on the whole": (MeanScaled, {}, ()),
        "counts in the group": (CountsInGroup, {}, ()),
        "counts on itself": (CountsOnItself, {}, ()),
        "counts in a tensor of the group": (CountsInTensor, {}, ()),
    }
    found = {}
    for name, (kind, settings, moments) in cases.items():
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **settings})
        try:
            check_rule(step_rule([optimizer], form_of(optimizer), moments), torch.device("cpu"))
            found[name] = ""
        except UnsupportedState as refused:
            found[name] = str(refused)
    return found


def _same_clip() -> list[bool]:
    import torch

    from liver_core.worlds import cpu_compat

    cpu_compat.apply()
    from liver_core.state import replay_check as replay
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
