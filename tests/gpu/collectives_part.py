"""Part 3: each collective that Megatron uses, alone, on tensors of the device, over a group that ranks make."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.cluster.real_ranks import run_ranks
from tests.gpu.check import Finding, Verdict

RANKS, TIMEOUT_S = 2, 10.0
NO_GROUP = "none for this device"
Group = dist.ProcessGroup
Check = Callable[[Group, torch.device, int], bool]
"""Whether every element is what it must be. Arguments: group, device, rank of two."""


def run(device: str) -> Finding:
    return finding_of(run_ranks(check_all, RANKS, timeout_s=35))


def finding_of(by_rank: Sequence[Mapping[str, str]]) -> Finding:
    """What the ranks say together. Where their groups take no tensor of the device at all, that is said once."""
    said = {name: next((text for rank in by_rank if (text := rank[name])), "") for name in (*NEEDED, *OF_SOME)}
    found = {name: text or "right" for name, text in said.items()}
    found["kind of group"] = by_rank[0]["kind of group"]
    bad = [name for name in NEEDED if said[name]]
    if bad and found["kind of group"] == NO_GROUP:
        return Finding(Verdict.FAILED, f"groups of this torch take no tensors of the device: {said[bad[0]]}", found)
    absent = [name for name in OF_SOME if said[name]]
    if bad:
        return Finding(Verdict.FAILED, f"{', '.join(bad)}: {said[bad[0]]}", found)
    text = f"{len(NEEDED)} that every layout needs are right"
    text += (
        f"; not to be had: {', '.join(absent)} ({said[absent[0]]})" if absent else f", and {len(OF_SOME)} that some do"
    )
    return Finding(Verdict.PASSED, text, found)


def check_all(rank: int, port: int) -> dict[str, str]:
    """Name -> empty, or what was wrong. Each in a group of its own, since one that failed is of no use any more."""
    from liver_core.device.rank_device import own_device
    from liver_core.handoff.messages import StoreAddress
    from liver_core.worlds.groups import OnDevice, connect_store, destroy_groups, make_group

    store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=20)
    device, found = own_device(), {"kind of group": NO_GROUP}
    for name, check in (NEEDED | OF_SOME).items():
        group = None
        try:
            # As slots that share a GPU have it: gloo for its tensors too.
            limits = {"timeout_s": TIMEOUT_S, "collective_s": TIMEOUT_S}
            group = make_group(store, range(RANKS), rank, name=name, host="127.0.0.1", on_device=OnDevice(), **limits)
            found["kind of group"] = group._get_backend(device).name()
            found[name] = "" if check(group, device, rank) else "other numbers than it must give"
        except Exception as error:
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        finally:
            destroy_groups([] if group is None else [group])
    return found


def _reduced(operation: Any, dtype: torch.dtype, expected: float) -> Check:
    def check(group: Group, device: torch.device, rank: int) -> bool:
        tensor = torch.full((1024,), float(rank + 1), dtype=dtype, device=device)
        dist.all_reduce(tensor, op=operation, group=group)
        return bool((tensor == expected).all())

    return check


def _gathered(dtype: torch.dtype) -> Check:
    def check(group: Group, device: torch.device, rank: int) -> bool:
        whole = torch.zeros(2048, dtype=dtype, device=device)
        dist.all_gather_into_tensor(whole, torch.full((1024,), rank + 1, dtype=dtype, device=device), group=group)
        return bool((whole[:1024] == 1).all() and (whole[1024:] == 2).all())

    return check


def _scattered(group: Group, device: torch.device, rank: int) -> bool:
    part = torch.zeros(1024, device=device)
    dist.reduce_scatter_tensor(part, torch.full((2048,), rank + 1.0, device=device), group=group)
    return bool((part == 3).all())


def _scattered_at_once(group: Group, device: torch.device, rank: int) -> bool:
    """As Megatron reduces gradient buckets."""
    parts = [torch.zeros(512, device=device) for _ in range(2)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for at, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, torch.full((1024,), rank + at + 1.0, device=device), group=group)
    manager.wait()
    return bool((parts[0] == 3).all() and (parts[1] == 5).all())


def _gathered_at_once(group: Group, device: torch.device, rank: int) -> bool:
    """As Megatron gathers the weights of its buckets after a step."""
    wholes = [torch.zeros(1024, dtype=torch.bfloat16, device=device) for _ in range(2)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for at, whole in enumerate(wholes):
            part = torch.full((512,), rank + at + 1.0, dtype=torch.bfloat16, device=device)
            dist.all_gather_into_tensor(whole, part, group=group)
    manager.wait()
    halves = [(whole[:512], whole[512:]) for whole in wholes]
    return all(bool((mine == at + 1).all() and (other == at + 2).all()) for at, (mine, other) in enumerate(halves))


def _broadcast(group: Group, device: torch.device, rank: int) -> bool:
    tensor = torch.full((1024,), float(rank), device=device)
    dist.broadcast(tensor, group_src=1, group=group)
    return bool((tensor == 1).all())


def _gathered_as_list(group: Group, device: torch.device, rank: int) -> bool:
    parts = [torch.zeros(16, device=device) for _ in range(RANKS)]
    dist.all_gather(parts, torch.full((16,), float(rank), device=device), group=group)
    return all(bool((part == at).all()) for at, part in enumerate(parts))


def _objects(group: Group, device: torch.device, rank: int) -> bool:
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, f"rank {rank}", group=group)
    return parts == ["rank 0", "rank 1"]


def _barrier(group: Group, device: torch.device, rank: int) -> bool:
    dist.barrier(group=group)
    return True


def _sent(group: Group, device: torch.device, rank: int) -> bool:
    """As pipeline stages exchange activations."""
    theirs = torch.zeros(1024, device=device)
    sends = dist.P2POp(dist.isend, torch.full((1024,), float(rank), device=device), group=group, group_peer=1 - rank)
    receives = dist.P2POp(dist.irecv, theirs, group=group, group_peer=1 - rank)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return bool((theirs == 1 - rank).all())


def _exchanged(group: Group, device: torch.device, rank: int) -> bool:
    """As experts exchange tokens."""
    theirs = torch.zeros(2, device=device)
    dist.all_to_all_single(theirs, torch.full((2,), float(rank), device=device), group=group)
    return theirs.tolist() == [0.0, 1.0]


NEEDED: dict[str, Check] = {
    "sum": _reduced(dist.ReduceOp.SUM, torch.float32, 3),
    "sum of bf16": _reduced(dist.ReduceOp.SUM, torch.bfloat16, 3),
    "maximum": _reduced(dist.ReduceOp.MAX, torch.float32, 2),
    "minimum": _reduced(dist.ReduceOp.MIN, torch.float32, 1),
    "gather": _gathered(torch.float32),
    "gather of bf16": _gathered(torch.bfloat16),
    "reduce and scatter": _scattered,
    "reduce and scatter at once": _scattered_at_once,
    "gather at once": _gathered_at_once,
    "broadcast": _broadcast,
    "gather as a list": _gathered_as_list,
    "objects": _objects,
    "barrier": _barrier,
    "send and receive": _sent,
}
OF_SOME: dict[str, Check] = {"all to all (EP)": _exchanged}
