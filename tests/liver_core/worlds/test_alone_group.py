"""A group of one rank does for Megatron what gloo does in a group of one, without a connection or a thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cluster.real_ranks import run_alone

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_every_collective_gives_what_gloo_gives_in_a_group_of_one():
    differing, threads = run_alone(_compare)
    assert differing == []
    assert threads == 0


def test_a_sum_that_scales_its_values_is_refused_rather_than_returned_unscaled():
    assert run_alone(_scaled) == "NotImplementedError"


def _groups() -> tuple[Any, Any]:
    from torch.distributed import distributed_c10d as c10d

    from liver_core.worlds.groups import gloo_options, make_group

    store = dist.HashStore()
    before = set(Path("/proc/self/task").iterdir())
    alone = make_group(store, (5,), 5, name="alone", host="127.0.0.1", timeout_s=5, collective_s=5)
    started = len(set(Path("/proc/self/task").iterdir()) - before)
    from datetime import timedelta

    gloo = dist.ProcessGroup(dist.PrefixStore("gloo", store), 0, 1)
    backend = c10d.ProcessGroupGloo(store, 0, 1, gloo_options("127.0.0.1", timedelta(seconds=5)))
    gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    c10d._world.pg_map[gloo] = ("gloo", store)
    c10d._world.pg_group_ranks[gloo] = {5: 0}
    return alone, (gloo, started)


def _compare() -> tuple[list[str], int]:
    alone, (gloo, started) = _groups()
    differing = []
    for name, collective in COLLECTIVES.items():
        of_alone, of_gloo = collective(alone), collective(gloo)
        if not _equal(of_alone, of_gloo):
            differing.append(f"{name}: {of_alone} instead of {of_gloo}")
    return differing, started


def _scaled() -> str:
    alone, _ = _groups()
    try:
        scaled: Any = dist._make_nccl_premul_sum(2.0)
        dist.all_reduce(torch.ones(2), op=scaled, group=alone)
    except NotImplementedError as error:
        return type(error).__name__
    return "accepted"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def _values() -> torch.Tensor:
    return torch.arange(6.0) * 1.5 - 2.0


def _reduced(operation: Any, *, async_op: bool = False) -> Callable[[Any], Any]:
    def run(group: Any) -> torch.Tensor:
        tensor = _values()
        work = dist.all_reduce(tensor, op=operation, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        return tensor

    return run


def _into(collective: Callable[..., Any]) -> Callable[[Any], torch.Tensor]:
    """One that writes what it is given into another tensor."""

    def run(group: Any) -> torch.Tensor:
        output = torch.zeros(6)
        collective(output, group)
        return output

    return run


def _coalesced(collective: Callable[..., Any]) -> Callable[[Any], Any]:
    """As Megatron reduces and gathers its buckets."""

    def run(group: Any) -> torch.Tensor:
        outputs = [torch.zeros(6), torch.zeros(6)]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for factor, output in enumerate(outputs):
                collective(output, _values() * factor, group=group)
        manager.wait()
        return torch.cat(outputs)

    return run


def _objects(group: Any) -> list[Any]:
    gathered, sent = [None], ["sent"]
    dist.all_gather_object(gathered, {"a": 1}, group=group)
    dist.broadcast_object_list(sent, group_src=0, group=group)
    return [gathered, sent, dist.get_world_size(group), dist.get_backend(group)]


def _shard_in_place(group: Any) -> torch.Tensor:
    whole = _values()
    dist.reduce_scatter_tensor(whole[:], whole, group=group)
    return whole


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "sum": _reduced(dist.ReduceOp.SUM),
    "sum, waited for": _reduced(dist.ReduceOp.SUM, async_op=True),
    "minimum": _reduced(dist.ReduceOp.MIN),
    "broadcast": lambda group: dist.broadcast(tensor := _values(), group_src=0, group=group) or tensor,
    "reduce": lambda group: dist.reduce(tensor := _values(), group_dst=0, group=group) or tensor,
    "gather": _into(lambda output, group: dist.all_gather([output], _values(), group=group)),
    "gather into one": _into(lambda output, group: dist.all_gather_into_tensor(output, _values(), group=group)),
    "gather at one": _into(lambda output, group: dist.gather(_values(), [output], group_dst=0, group=group)),
    "scatter": _into(lambda output, group: dist.scatter(output, [_values()], group_src=0, group=group)),
    "reduce and scatter": _into(lambda output, group: dist.reduce_scatter_tensor(output, _values(), group=group)),
    "reduce and scatter a list": _into(lambda output, group: dist.reduce_scatter(output, [_values()], group=group)),
    "reduce and scatter in place": _shard_in_place,
    "all to all": _into(lambda output, group: dist.all_to_all_single(output, _values(), group=group)),
    "reduce and scatter at once": _coalesced(dist.reduce_scatter_tensor),
    "gather at once": _coalesced(dist.all_gather_into_tensor),
    "objects": _objects,
    "barrier": lambda group: dist.barrier(group=group),
}
