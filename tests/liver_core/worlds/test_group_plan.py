"""The groups of a world and how its communicators come from one: the same on every rank, and as few as can be."""

from __future__ import annotations

from itertools import product

import pytest

from liver_core.layout import ParallelLayout
from liver_core.worlds.group_plan import DeviceBackend, GroupPlan, GroupsRefused, backend_for, plan_groups

LAYOUTS = [ParallelLayout(tp=tp, pp=pp, dp=dp) for tp, pp, dp in product((1, 2, 4), (1, 2, 3), (1, 2, 3))]


def _plan(layout: ParallelLayout, device: DeviceBackend) -> GroupPlan:
    wanted = [tuple(ranks) for axes in ("tp", "pp", "dp", "dp-cp", "tp-pp", "cp") for ranks in layout.groups(axes)]
    return plan_groups(wanted, layout.world_size, device)


def test_the_backend_follows_from_the_gpus_that_the_ranks_train_on():
    assert backend_for(["", "", ""]) is DeviceBackend.NONE
    assert backend_for(["GPU-a", "GPU-b", "GPU-c"]) is DeviceBackend.NCCL
    assert backend_for(["GPU-a", "GPU-b", "GPU-a"]) is DeviceBackend.GLOO
    assert backend_for(["GPU-a"]) is DeviceBackend.NCCL


def test_a_world_of_which_some_ranks_have_no_gpu_is_refused_and_names_them():
    with pytest.raises(GroupsRefused, match=r"device: ranks 1, 3 of 4 have no GPU"):
        backend_for(["GPU-a", "", "GPU-b", ""])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_group_of_several_ranks_gets_its_communicator_in_exactly_one_split(layout: ParallelLayout):
    plan = _plan(layout, DeviceBackend.NCCL)
    split_off = [ranks for split in plan.splits for ranks in split]
    assert sorted(split_off) == sorted(ranks for ranks in plan.groups if len(ranks) > 1 and ranks != plan.world)
    for split in plan.splits:
        ranks = [rank for group in split for rank in group]
        assert len(ranks) == len(set(ranks)), "a rank cannot be in two groups of one split"


def test_groups_of_one_axis_are_split_off_together():
    """Eight calls of the whole world, one for each group, would be as right and four times as slow."""
    plan = _plan(ParallelLayout.parse("TP2xPP2xDP2"), DeviceBackend.NCCL)
    assert [len(split) for split in plan.splits] == [4, 4, 4, 2]


def test_only_groups_that_need_it_have_a_backend_on_the_device():
    layout = ParallelLayout.parse("TP2xDP2")
    shared, own, host = (
        _plan(layout, device) for device in (DeviceBackend.GLOO, DeviceBackend.NCCL, DeviceBackend.NONE)
    )
    assert shared.backends((0, 1)) == "cpu:gloo,cuda:gloo"
    assert own.backends((0, 1)) == "cpu:gloo,cuda:nccl"
    assert own.backends((0,)) == shared.backends((0,)) == host.backends((0, 1)) == "cpu:gloo"
    assert shared.splits == host.splits == ()
