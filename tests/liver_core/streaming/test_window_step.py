"""A replayed step is the step itself, bit for bit, on whatever part of the tensors is resident."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from liver_core.device.region import Region
from liver_core.streaming.header import StepHeader
from liver_core.streaming.window_step import Clip, GroupSpan, Replayer, ReplayError
from tests.liver_core.device.regions import cut_region
from tests.liver_core.streaming import optimizers
from tests.liver_core.streaming.optimizers import OPTIMIZERS, Whole, same_bits

SIZES = [700, 1, 333, 64, 2000]
STEPS = 5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("from_version", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_growing_resident_set_is_replayed_bit_for_bit(name: str, from_version: int, seed: int):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    source = Whole(name, torch.randn(sum(SIZES), generator=generator), SIZES)
    for version in range(1, from_version + 1):
        step(source, version, generator)
    regions = {kind: torch.full_like(region, torch.nan) for kind, region in source.regions.items()}
    places = [GroupSpan(start, stop, at % 2) for at, (start, stop) in enumerate(source.spans)]
    replayer = Replayer(source.rule, regions, places, window_elements=draw.choice([37, 500, 10_000]))
    todo, resident = cuts(draw, sum(SIZES)), []
    for version in range(from_version + 1, from_version + STEPS + 1):
        for _ in range(draw.randint(1, 3)):
            if todo:
                resident.append(todo.pop())
                copy(source, regions, resident[-1])
        header, gradients = step(source, version, generator)
        for start, stop in resident:
            regions["grad"][start:stop] = gradients[start:stop]
        replayer.replay(resident, header)
        for start, stop in resident:
            for kind in ("master", *source.rule.moments):
                assert same_bits(regions[kind][start:stop], source.regions[kind][start:stop]), (kind, version)
    for start, stop in todo:
        assert bool(regions["master"][start:stop].isnan().all()), "what is not resident is not touched"


@pytest.mark.parametrize("staged", [("master",), ("grad",), "moments", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_through_a_stage_are_the_steps_in_place_bit_for_bit(name: str, staged: str | tuple[str, ...]):
    """Also the first one, which makes the moments. What is staged is no window of the optimizer's any more."""
    generator = torch.Generator().manual_seed(5)
    source = Whole(name, torch.randn(sum(SIZES), generator=generator), SIZES)
    kinds = {"moments": source.rule.moments, "all": tuple(source.regions)}.get(str(staged), staged)
    regions = {kind: region.clone() for kind, region in source.regions.items()}
    places = [GroupSpan(start, stop, at % 2) for at, (start, stop) in enumerate(source.spans)]
    replayer = Replayer(source.rule, regions, places, window_elements=500, staged=kinds)
    for version in range(1, STEPS + 1):
        header, gradients = step(source, version, generator)
        regions["grad"].copy_(gradients)
        replayer.replay([(0, 701), (900, sum(SIZES))], header)
        for start, stop in ((0, 701), (900, sum(SIZES))):
            for kind in ("master", *source.rule.moments):
                assert same_bits(regions[kind][start:stop], source.regions[kind][start:stop]), (kind, version)
    for kind in kinds:
        assert replayer.stages[kind].numel() == 500
        spans = [window.fetched for part in replayer._parts for window in part.windows]
        assert sum(lies.numel() for span in spans for lies, _ in span) == (sum(SIZES) - 199) * len(kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_in_several_pieces_and_gradients_of_16_bits_are_stepped_as_the_source_steps(
    name: str, dtype: torch.dtype
):
    """A source makes fp32 of its gradients before it clips them."""
    step_in_pieces(name, dtype, optimizers.clip)


def test_that_a_gradient_is_clipped_before_it_is_fp32_would_be_seen():
    def clip_narrow(parameters: list[torch.nn.Parameter], limit: float, norm: float) -> None:
        optimizers.clip(parameters, limit, norm)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.bfloat16())

    with pytest.raises(AssertionError, match="'master', 1"):
        step_in_pieces("sgd", torch.bfloat16, clip_narrow)


def step_in_pieces(name: str, dtype: torch.dtype, clip: Clip) -> None:
    generator = torch.Generator().manual_seed(9)
    source = Whole(name, torch.randn(sum(SIZES), generator=generator), SIZES)
    ends = [stop for _, stop in source.spans]
    regions = {
        kind: cut_region(region, ends[number::2]) for number, (kind, region) in enumerate(source.regions.items())
    }
    regions["grad"] = Region(tensor.to(dtype) for tensor in regions["grad"].tensors)
    places = [GroupSpan(start, stop, at % 2) for at, (start, stop) in enumerate(source.spans)]
    replayer = Replayer(replace(source.rule, clip=clip), regions, places, window_elements=500)
    assert set(replayer.stages) == (set() if dtype == torch.float32 else {"grad"})
    for version in range(1, STEPS + 1):
        rounded = torch.randn(sum(SIZES), generator=generator).to(dtype).float()
        header, gradients = step(source, version, generator, gradients=rounded)
        regions["grad"].copy_(Region([gradients]))
        replayer.replay([(0, sum(SIZES))], header)
        for kind in ("master", *source.rule.moments):
            assert same_bits(torch.cat(regions[kind].tensors), source.regions[kind]), (kind, version)


@pytest.mark.parametrize("name", ["adamw for-loop", "adam", "sgd momentum", "lion"])
def test_rates_are_those_of_the_header_whatever_the_job_began_with(name: str):
    generator = torch.Generator().manual_seed(3)
    source = Whole(name, torch.randn(sum(SIZES), generator=generator), SIZES)
    regions = {kind: region.clone() for kind, region in source.regions.items()}
    places = [GroupSpan(start, stop, at % 2) for at, (start, stop) in enumerate(source.spans)]
    replayer = Replayer(source.rule, regions, places, window_elements=500)
    for version in range(1, STEPS + 1):
        for number, group in enumerate(source.optimizer.param_groups):
            group["weight_decay"] = 0.2 * (version + number)
        header, gradients = step(source, version, generator)
        regions["grad"].copy_(gradients)
        replayer.replay([(0, sum(SIZES))], header)
        for kind in ("master", *source.rule.moments):
            assert same_bits(regions[kind], source.regions[kind]), (kind, version)


def step(
    source: Whole, version: int, generator: torch.Generator, *, gradients: torch.Tensor | None = None
) -> tuple[StepHeader, torch.Tensor]:
    norm = 2.5 if version % 2 else 0.5
    if gradients is None:
        gradients = torch.randn(sum(SIZES), generator=generator)
    if version == 1:
        gradients[::3] = -0.0
    header = StepHeader.decode(source.header(version, norm).encode())
    source.regions["grad"].copy_(gradients)
    source.step(norm)
    return header, gradients


def cuts(draw: random.Random, total: int) -> list[tuple[int, int]]:
    at = sorted({0, total, *(draw.randrange(1, total) for _ in range(9))})
    found = list(pairwise(at))
    draw.shuffle(found)
    return found


def copy(source: Whole, regions: dict[str, torch.Tensor], span: tuple[int, int]) -> None:
    for kind in ("master", *source.rule.moments):
        regions[kind][span[0] : span[1]] = source.regions[kind][span[0] : span[1]]


def test_a_group_that_the_source_does_not_know_is_refused_by_name():
    source = Whole("adam", torch.ones(4), [2, 2])
    replayer = Replayer(source.rule, source.regions, [GroupSpan(0, 2, 0), GroupSpan(2, 4, 1)], window_elements=4)
    header = source.header(1, 1.0)
    with pytest.raises(ReplayError, match="not decayed"):
        replayer.replay([(0, 4)], StepHeader(1, 1.0, 1.0, header.groups[:1], {}, False))


def test_temporaries_are_bounded_by_the_window_also_in_the_first_step():
    source = Whole("adamw foreach", torch.ones(400), [400])
    replayer = Replayer(source.rule, source.regions, [GroupSpan(0, 400, 0)], window_elements=100)
    replayer.replay([(0, 400)], source.header(1, 1.0))
    parts = replayer._parts
    assert [sum(window.parameter.numel() for window in part.windows) for part in parts] == [100] * 4
    assert not any(part.optimizer.state for part in parts), "moments that the first step made are not kept beside"
