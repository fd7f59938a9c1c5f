"""A world that is built with released storage has structure and no memory, and is given it when it is wanted."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks import run_alone, run_ranks
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.worlds.memory import measured_handoff

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

BIG = {"hidden_size": 512, "ffn_hidden_size": 1024}
MIB = 1 << 20


@pytest.fixture(scope="module")
def builds(corpus: str) -> dict[str, Any]:
    """How much the process grows by when one world after the other is built, hollow and then full, and kept."""
    return run_ranks(_build_again_and_again, 1, corpus, timeout_s=120)[0]


def test_a_full_world_takes_its_memory_and_a_hollow_one_nearly_none(builds: dict[str, Any]):
    # The first build of a process pays for code that is used for the first time.
    _, *hollow = builds["hollow"]
    assert min(builds["full"]) > 0.75 * builds["buffers"], "the measure does not see memory"
    assert max(hollow) < 0.03 * builds["buffers"]


def test_the_peak_of_a_hollow_build_is_one_tensor_and_it_is_reported(builds: dict[str, Any]):
    assert builds["peak"] <= builds["buffers"] // 2


def test_a_hollow_world_that_is_given_memory_takes_all_of_it_and_gives_all_back(builds: dict[str, Any]):
    assert builds["given"] == pytest.approx(builds["buffers"], rel=0.01)
    assert builds["grown"] > 0.9 * builds["buffers"]
    assert builds["left"] < 0.1 * builds["buffers"]


def test_memory_that_numpy_has_seen_is_given_back_all_the_same():
    grown, left = run_ranks(_discard_what_numpy_saw, 1)[0]
    assert grown > 60 * MIB
    assert left < 16 * MIB  # code that ran for the first time


def test_discarding_a_part_of_an_array_leaves_its_neighbours_on_the_same_pages():
    import numpy as np
    import torch

    from liver_core.worlds.released_storage import discard

    pages, page = 6, mmap.PAGESIZE
    with mmap.mmap(-1, pages * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        whole = np.frombuffer(memory, dtype=np.uint8)
        whole[:] = 7
        part = torch.from_numpy(whole[page + 100 : 4 * page + 100])
        discard([part])
        before, after = whole[: page + 100].copy(), whole[4 * page + 100 :].copy()
        gone = whole[2 * page : 4 * page].copy()
        del part, whole
    assert (before == 7).all() and (after == 7).all()
    assert not gone.any(), "whole pages of the part go back to the system"


def test_discarding_a_world_leaves_the_process_what_its_next_step_uses_again():
    taken, faults = run_alone(_free_beside_a_discard)
    assert faults < 0.1 * taken / mmap.PAGESIZE


@pytest.mark.parametrize(
    "use",
    [
        lambda old: old[None],
        lambda old: old.detach(),
        lambda old: old.view(-1, 2),
        lambda old: old.add_(1.0),
        lambda old: old.split(100),
    ],
    ids=["index", "detach", "view", "in place", "split"],
)
def test_a_build_that_touches_a_tensor_of_the_world_that_trains_leaves_it_its_memory(use: Callable[[Any], Any]):
    import torch

    from liver_core.worlds.released_storage import released, storage_is_released

    old = torch.ones(4 * MIB)
    with released():
        use(old)
        fresh = [torch.ones(4 * MIB), torch.empty(0).resize_(4 * MIB), torch.tensor([0.0] * 5000)]
    assert old.untyped_storage().nbytes() == 16 * MIB
    assert bool((old >= 1.0).all())
    assert all(storage_is_released(tensor) for tensor in fresh)


@pytest.mark.parametrize(
    "use",
    [
        lambda whole: whole.view(-1, 2),
        lambda whole: whole.detach(),
        lambda whole: whole[4096:8192].view(64, 64),
        lambda whole: whole[4096:8192].view(64, 64).t()[3:, 1::2],
        lambda whole: whole.view(2, -1).expand(2, -1)[1],
        lambda whole: whole.view(1, -1).expand(3, -1),
        lambda whole: whole[8:24].view(dtype=_half()),
        lambda whole: whole.as_strided((5, 7), (100, 2), 11),
    ],
)
def test_a_view_of_what_has_no_memory_lies_where_one_of_what_has_would(use: Callable[[Any], Any]):
    import torch

    from liver_core.worlds.released_storage import released, storage_is_released

    with released():
        whole = torch.empty(MIB)
        hollow = use(whole)
    full = use(torch.empty(MIB))
    lies = [(view.shape, view.stride(), view.storage_offset(), view.dtype) for view in (hollow, full)]
    assert lies[0] == lies[1] and storage_is_released(hollow)
    assert hollow.untyped_storage()._cdata == whole.untyped_storage()._cdata, "given memory together"


def _half() -> Any:
    import torch

    return torch.bfloat16


@pytest.mark.thorough
def test_a_survivor_grows_by_no_state_while_it_builds_and_trains(corpus: str):
    with Cluster(RankSetup(small_gpt(corpus, **BIG), memory=True)) as cluster:
        roster = cluster.launch("PP2", "ab")
        cluster.await_step(roster.members[0], 3)
        _, growth = measured_handoff(cluster, "TP2", "ba")
    for grown in growth.values():
        assert grown.build < 0.25 * grown.reported
        assert grown.memory > 0.5 * grown.reported


def _build_again_and_again(rank: int, port: int, corpus: str) -> dict[str, Any]:
    import contextlib

    from liver_core.handoff.messages import StoreAddress
    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.state.optimizer_chain import optimizer_chain
    from liver_core.worlds.groups import connect_store
    from liver_core.worlds.megatron import activate, bring_up, building
    from liver_core.worlds.released_storage import discard, released, restore
    from tests.cluster.real_ranks_process import make_job, resident_bytes, trim

    job = make_job(RankSetup(small_gpt(corpus, **BIG)))
    store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
    found: dict[str, Any] = {"hollow": [], "full": []}
    kept = []
    for number, how in enumerate(("hollow", "hollow", "hollow", "full", "full"), start=1):
        roster = Roster("job", number, ParallelLayout.parse("TP1"), (Member("a", 0),))
        world = bring_up(roster, 0, store, host="127.0.0.1", timeout_s=30)
        if number == 1:
            activate(world)
        trim()
        before = resident_bytes()
        with building(world), released() if how == "hollow" else contextlib.nullcontext() as mode:
            kept.append(job.build(world))
        trim()
        found[how].append(resident_bytes() - before)
        if mode is not None:
            found["peak"] = mode.peak_bytes
    buffer = optimizer_chain(kept[2].optimizer).buffers[0]
    wanted = [buffer.param_data, buffer.grad_data]
    found["buffers"] = sum(tensor.numel() * tensor.element_size() for tensor in wanted)
    before = resident_bytes()
    found["given"] = restore(wanted)
    for tensor in wanted:
        tensor.zero_()
    found["grown"] = resident_bytes() - before
    discard(wanted)
    found["left"] = resident_bytes() - before
    return found


def _discard_what_numpy_saw(rank: int, port: int) -> tuple[int, int]:
    import torch

    from liver_core.worlds.released_storage import discard
    from tests.cluster.real_ranks_process import resident_bytes

    before = resident_bytes()
    tensor = torch.ones(16 * MIB)
    seen = tensor.numpy()
    grown = resident_bytes() - before
    discard([tensor])
    left = resident_bytes() - before
    assert seen[len(seen) // 2] == 0.0
    return grown, left


def _free_beside_a_discard() -> tuple[int, int]:
    """Bytes that a step takes and frees, and page faults of the next step, with a world discarded in between."""
    import resource

    import torch

    from liver_core.worlds.released_storage import collect, discard

    # Small enough to come from the heap of the C library, which hands them out again.
    elements, count = 16 << 10, 400

    def step() -> list[torch.Tensor]:
        return [torch.ones(elements) for _ in range(count)]

    activations = step()
    keeps_the_heap = torch.ones(elements)
    activations.clear()
    discard([torch.ones(16 * MIB)])
    collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert len(activations) == count and keeps_the_heap[0] == 1.0
    return 4 * elements * count, faults
