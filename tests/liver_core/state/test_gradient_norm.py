"""The gradient norm without a wait of the host: Megatron's, bit for bit, read together with the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.cluster.real_ranks import run_alone, run_ranks
from tests.liver_core.rank.cutover.test_experts import moe

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
SHAPES = {
    "one": [(1,)],
    "a few": [(7, 5), (3,), (64, 64)],
    "many": [(index % 13 + 1, index % 7 + 1) for index in range(403)],
    "large": [(1_000, 257), (99,)],
}


@pytest.mark.parametrize("on_last", [True, False], ids=["on all ranks", "none on the last rank"])
def test_the_norm_over_all_ranks_has_the_bits_of_megatrons(on_last: bool) -> None:
    first, second = run_ranks(_norms, 2, SHAPES, on_last)
    assert first == second
    for ours, megatrons in first.values():
        assert ours.hex() == megatrons.hex()
        assert ours > 0


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", [False, True], ids=["right", "without experts"])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("DP2xEP2", {}),
        ("TP2xEP2xETP1", {}),
        ("TP2xDP2xEP2", {}),
        ("PP2xDP2xEP2", {"moe_layer_freq": [0, 0, 1, 1]}),
    ],
)
def test_over_dense_parameters_and_experts_it_is_that_of_megatrons_chain(
    corpus: str, layout: str, changes: dict[str, Any], mistake: bool
) -> None:
    ranks = 4 if "TP2xDP2" in layout or "PP2" in layout else 2
    norms = run_ranks(_norms_of_chain, ranks, layout, {**moe(corpus), **changes}, mistake)
    assert len({ours for ours, _ in norms}) == 1
    assert all((ours.hex() == megatrons.hex()) is not mistake for ours, megatrons in norms)


def _norms_of_chain(rank: int, port: int, layout: str, arguments: dict[str, Any], mistake: bool) -> tuple[float, float]:
    """Ours and Megatron's after the first pass; with the mistake, ours leaves the second optimizer out."""
    from dataclasses import replace

    from liver_core.state import optimizer_step
    from liver_core.training.cursor import DataCursor
    from liver_core.training.gpt import GptJob
    from liver_core.worlds.megatron import retire, seed_streams
    from tests.liver_core.state.megatron_folder import initialise, world_of

    world = world_of(rank, port, layout)
    job = GptJob(arguments, global_batch=4, micro_batch=1, seed=7)
    state = job.build(world)
    initialise(state)
    seed_streams(world, seed=7, step=0)
    job.step(state, world, DataCursor(0, 4, 1).batches(world.coordinates.dp, world.layout.dp))
    chain = optimizer_step.optimizer_chain(state.optimizer)
    held = replace(chain, parts=chain.parts[:1]) if mistake else chain
    with mock.patch.object(optimizer_step, "optimizer_chain", lambda made: held):
        ours = optimizer_step.measure_gradients(state)
    for part in chain.parts:
        part.prepare_grads()
    theirs = float(state.optimizer.get_grad_norm())
    retire(world)
    return ours, theirs


def test_loss_and_norm_are_read_at_once_and_the_loss_keeps_every_bit() -> None:
    reads, loss, plain, norm = run_alone(_read)
    assert reads == [2, 1], "one read a step, of two numbers, or of one where the job has read its loss"
    assert loss == 0.1 + 0.2 + 0.3 == plain
    assert norm == 2.5**0.5


def _norms(rank: int, port: int, shapes: dict[str, list[tuple[int, ...]]], on_last: bool) -> dict[str, Any]:
    import torch
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    from liver_core.device import read
    from liver_core.handoff.messages import StoreAddress
    from liver_core.state import optimizer_step
    from liver_core.state.optimizer_chain import OptimizerChain
    from liver_core.worlds.groups import connect_store, make_group

    store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
    group = make_group(store, (0, 1), rank, name="both", host="127.0.0.1", timeout_s=30, collective_s=30)
    found = {}
    for name, each in shapes.items():
        generator = torch.Generator().manual_seed(rank)
        gradients = [torch.randn(shape, generator=generator) * 1e-3 for shape in each] if on_last or rank == 0 else []
        parts: list[Any] = [
            SimpleNamespace(
                prepare_grads=lambda: False,
                get_main_grads_for_grad_norm=lambda found=of_part: found,
                get_grad_stats_parallel_group=lambda: group,
                buffers=[SimpleNamespace(grad_data=torch.zeros(1))],
            )
            for of_part in (gradients[:1], gradients[1:])
        ]
        chain = OptimizerChain(None, tuple(parts))
        with mock.patch.object(optimizer_step, "optimizer_chain", lambda made: made):
            (squared,) = read(optimizer_step.start_norm(SimpleNamespace(optimizer=chain)))  # type: ignore[arg-type]
        found[name] = (optimizer_step.norm_of(squared), get_grad_norm_fp32(gradients, grad_stats_parallel_group=group))
    return found


def _read() -> tuple[list[int], float, float, float]:
    import torch

    from liver_core.rank import step_boundary
    from liver_core.training.job import StepResult

    reads: list[int] = []

    def read(numbers: torch.Tensor) -> list[Any]:
        reads.append(numbers.numel())
        return numbers.tolist()

    losses = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    with mock.patch.object(step_boundary, "read", read):
        there = step_boundary.read_numbers(StepResult(losses.cumsum(0)[2], 3, 1), torch.tensor([2.5]))
        here = step_boundary.read_numbers(StepResult(0.1 + 0.2 + 0.3, 3, 1), torch.tensor([2.5]))
    assert there.norm == here.norm
    return reads, float(there.result.loss_sum), float(here.result.loss_sum), there.norm
