"""The communicators of a world on GPUs, against a model of NCCL: one is made, the others are split from it, and none
before all ranks have agreed to. Nothing here says how NCCL itself behaves."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.cluster.real_ranks import RankDied, run_alone, run_ranks

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def test_one_communicator_is_made_and_all_others_are_split_from_it_at_once():
    found = run_ranks(_connect, 4, "TP2xPP2")
    for rank, (before, made, sums) in enumerate(found):
        assert before == [], "made while the world was prepared"
        assert [how for _, _, how in made] == ["world"] + ["split"] * (len(made) - 1)
        memberships = [ranks for _, ranks, _ in made]
        assert len(memberships) == len(set(memberships)), "two communicators of the same ranks"
        assert all(rank in ranks and len(ranks) > 1 for ranks in memberships)
        tensor_parallel, stages = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert set(memberships) == {(0, 1, 2, 3), tensor_parallel, stages}
        assert sums == {"host": 10.0}


def test_a_rank_that_is_in_none_of_the_groups_of_a_split_takes_part_in_it():
    """The middle stage shares no embedding. Without it the others would wait in NCCL for ever."""
    first, middle, last = ([ranks for _, ranks, _ in made] for _, made, _ in run_ranks(_connect, 3, "PP3"))
    assert first == last == [(0, 1, 2), (0, 2)]
    assert middle == [(0, 1, 2)]


def test_votes_and_objects_go_over_the_host_in_a_world_with_communicators():
    assert run_ranks(_decisions, 2, "DP2") == [["gloo", "cpu", True, True]] * 2


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_gpus_that_slots_share_are_used_over_gloo_and_make_no_communicator(layout: str):
    assert run_ranks(_shared, 2, layout) == [("cpu:gloo,cuda:gloo", "gloo", [])] * 2


def test_a_world_of_which_one_rank_has_no_gpu_names_it():
    with pytest.raises(RankDied, match="ranks 1 of 2 have no GPU"):
        run_ranks(_mixed, 2, "DP2")


def test_aborting_ends_each_communicator_once_and_that_of_the_world_last():
    found = run_ranks(_abort, 4, "TP2xDP2")
    for aborted, again, refused in found:
        assert aborted[-1].endswith("/0-1-2-3") and len(aborted) == len(set(aborted)) == 3
        assert again == aborted
        assert "aborted before they were made" in refused


def test_an_installed_torch_without_nccl_is_named_where_a_world_needs_it():
    assert "was built without NCCL" in run_alone(_torch_without_nccl)


def _world(layout: str, rank: int, port: int, gpu: str, library: Any, *, number: int = 1) -> Any:
    import torch

    from liver_core.handoff.messages import StoreAddress
    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.worlds.groups import connect_store
    from liver_core.worlds.megatron import bring_up
    from liver_core.worlds.nccl_groups import TrainsOn

    parallel = ParallelLayout.parse(layout)
    members = tuple(Member(str(index), 0) for index in range(parallel.world_size))
    store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
    roster = Roster("job", number, parallel, members)
    place = TrainsOn(gpu, torch.device("cpu"), library)
    return bring_up(roster, rank, store, host="127.0.0.1", timeout_s=30, place=place)


def _connect(rank: int, port: int, layout: str) -> tuple[list[Any], list[Any], dict[str, float]]:
    import torch
    import torch.distributed as dist

    from liver_core.worlds.megatron import connect, retire
    from tests.liver_core.worlds.nccl_model import ModelNccl

    library = ModelNccl()
    world = _world(layout, rank, port, f"GPU-{rank}", library)
    before = list(library.made)
    connect(world, 20.0, since=time.monotonic())
    connect(world, 20.0, since=time.monotonic())
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value, group=world.everyone)
    retire(world)
    return before, library.made, {"host": value.item()}


def _decisions(rank: int, port: int, layout: str) -> list[Any]:
    """Of the groups that decide: default backend, device of objects, whether votes have no communicator, and whether a
    limit on a vote leaves the communicators' limits alone."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    from liver_core.worlds.groups import limited
    from tests.liver_core.worlds.nccl_model import ModelNccl

    library = ModelNccl()
    world = _world(layout, rank, port, f"GPU-{rank}", library)
    limits = [backend.options._timeout for backend in library.backends]
    with limited(world.everyone, 1.0):
        kept = [backend.options._timeout for backend in library.backends] == limits
    votes = [torch.device("cuda") in group._device_types for group in (world.voting, world.background)]
    return [
        world.everyone._get_backend_name(),
        c10d._get_object_coll_device(world.everyone),
        votes == [False] * 2,
        kept,
    ]


def _shared(rank: int, port: int, layout: str) -> tuple[str, str, list[Any]]:
    import torch
    from torch.distributed import distributed_c10d as c10d

    from liver_core.worlds.megatron import connect
    from tests.liver_core.worlds.nccl_model import ModelNccl

    library = ModelNccl()
    world = _world(layout, rank, port, "GPU-0", library)
    connect(world, 20.0, since=time.monotonic())
    group = world.everyone
    return c10d._world.pg_backend_config[group], group._get_backend(torch.device("cuda")).name(), library.made


def _mixed(rank: int, port: int, layout: str) -> None:
    from tests.liver_core.worlds.nccl_model import ModelNccl

    _world(layout, rank, port, "GPU-0" if rank == 0 else "", ModelNccl())


def _abort(rank: int, port: int, layout: str) -> tuple[list[str], list[str], str]:
    from liver_core.worlds.megatron import connect, disconnect
    from tests.liver_core.worlds.nccl_model import ModelNccl

    library = ModelNccl()
    world = _world(layout, rank, port, f"GPU-{rank}", library)
    connect(world, 20.0, since=time.monotonic())
    disconnect(world)
    aborted = list(library.aborted)
    disconnect(world)
    other = _world(layout, rank, port, f"GPU-{rank}", ModelNccl(), number=2)
    disconnect(other)
    try:
        connect(other, 20.0, since=time.monotonic())
    except RuntimeError as error:
        return aborted, library.aborted, str(error)
    return aborted, library.aborted, "connected"


def _torch_without_nccl() -> str:
    from liver_core.worlds.nccl_groups import NcclMoved, TorchNccl

    try:
        TorchNccl().options()
    except NcclMoved as error:
        return str(error)
    return ""
