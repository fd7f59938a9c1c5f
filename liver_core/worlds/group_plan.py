"""Which backends the groups of a world have, and how its communicators on GPUs are split from one. Pure.

The same on every rank, since all of it is made of what all ranks know: the layout, and on which GPU each rank trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from liver_core.layout.limits import listed

Ranks = tuple[int, ...]


class GroupsRefused(RuntimeError):
    """This world cannot have the groups that its layout needs. The text says what to change."""


class DeviceBackend(StrEnum):
    """What a world's groups do with tensors of a GPU. With those of the host they always go over gloo."""

    NONE = ""
    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The groups of one world.

    groups: each once, in the order in which all ranks make them. splits: how the communicators of those groups that
    have one come from the world's. Each is one collective call of the whole world, in which every rank is in one group
    at most. Empty unless the backend is NCCL, and the world itself is in none of them.
    """

    world: Ranks
    device: DeviceBackend
    groups: tuple[Ranks, ...]
    splits: tuple[tuple[Ranks, ...], ...]

    def on_device(self, ranks: Ranks) -> DeviceBackend:
        """What the group of `ranks` needs for tensors of a GPU: nothing where it has one rank."""
        return DeviceBackend.NONE if len(ranks) == 1 else self.device

    def backends(self, ranks: Ranks) -> str:
        """As torch writes them, for example cpu:gloo,cuda:nccl."""
        on_device = self.on_device(ranks)
        return f"cpu:gloo,cuda:{on_device}" if on_device else "cpu:gloo"


def backend_for(gpus: Sequence[str]) -> DeviceBackend:
    """`gpus`: for each rank which GPU it trains on, by a name that no other GPU of any machine has; empty for the CPU.

    NCCL wants a GPU for each rank. Raises GroupsRefused where only some ranks have one.
    """
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    if len(without) == len(gpus):
        return DeviceBackend.NONE
    if without:
        raise GroupsRefused(
            f"device: ranks {listed(map(str, without))} of {len(gpus)} have no GPU and the others have one; all nodes "
            "of a job must offer the same. Start their agents with CUDA_VISIBLE_DEVICES naming a GPU, or all of them "
            "with it empty"
        )
    return DeviceBackend.NCCL if len(set(gpus)) == len(gpus) else DeviceBackend.GLOO


def plan_groups(wanted: Sequence[Ranks], world_size: int, device: DeviceBackend) -> GroupPlan:
    """`wanted`: memberships in an order that all ranks agree on. Equal ones share a group."""
    whole = tuple(range(world_size))
    groups = tuple(dict.fromkeys((whole, *wanted)))
    communicators = [ranks for ranks in groups if len(ranks) > 1 and ranks != whole]
    return GroupPlan(whole, device, groups, _splits(communicators) if device is DeviceBackend.NCCL else ())


def _splits(communicators: Sequence[Ranks]) -> tuple[tuple[Ranks, ...], ...]:
    """As few calls as a first fit finds: groups that share no rank are split off together."""
    splits: list[list[Ranks]] = []
    for ranks in communicators:
        free = (split for split in splits if not any(set(ranks) & set(other) for other in split))
        found = next(free, None)
        if found is None:
            splits.append([ranks])
        else:
            found.append(ranks)
    return tuple(tuple(split) for split in splits)
