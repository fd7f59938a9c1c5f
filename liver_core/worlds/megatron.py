"""One world of a Megatron-Core job: its roster, its process groups, and the globals to swap when it becomes active.

One of the few places that import Megatron-Core (see tests/test_tidy.py). It uses private Megatron names;
`check_private_names` checks them at start-up.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from liver_core.layout import Coordinates, ParallelLayout, Roster
from liver_core.worlds.agreed_work import first_rank
from liver_core.worlds.group_plan import DeviceBackend, backend_for, plan_groups
from liver_core.worlds.groups import (
    BringUpFailed,
    PrivateApiMoved,
    absent_from,
    activate_default_group,
    default_group,
    destroy_groups,
    install_thread_world,
    make_absent_group,
    make_group,
    make_groups,
)
from liver_core.worlds.nccl_groups import NcclGroups, TrainsOn, own_place

_log = logging.getLogger(__name__)

# parallel_state global -> field of ProcessGroupCollection. Megatron 0.16 still reads a few of these globals although it
# gets a collection: vocab-parallel cross entropy reads the tensor-parallel group. `activate` alone sets them.
_GLOBAL_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
}
RENEWS_WITHIN_S = 10.0
SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread keeps the interpreter from another one that waits for it. Torch gives the interpreter up
in each operation of a step. Beside a thread that builds the next world, which is Python mostly, each operation would
wait for Python's usual 5 ms to get it back, and a step of a hundred operations for half a second."""


@dataclass(slots=True)
class MegatronWorld:
    """The groups of one generation as this rank sees them.

    `everyone`, `background` and `voting` span the world. The main thread uses `everyone`, background work (checkpoints)
    uses `background`, so their collectives never mix; `another` makes one more group like it, by its name, on all ranks
    at once. The cutover into this world uses `voting`: a collective that
    times out closes its connections, and the world may begin all the same. `collection` is Megatron's. `nccl`: the
    communicators of these groups, where each rank has a GPU of its own.
    """

    roster: Roster
    rank: int
    store: dist.Store
    everyone: dist.ProcessGroup
    background: dist.ProcessGroup
    voting: dist.ProcessGroup
    collection: ProcessGroupCollection
    groups: tuple[dist.ProcessGroup, ...]
    nccl: NcclGroups | None = None
    another: Callable[[str], dist.ProcessGroup] | None = None
    renewals: int = 0
    retired: bool = field(default=False)

    @property
    def layout(self) -> ParallelLayout:
        return self.roster.layout

    @property
    def coordinates(self) -> Coordinates:
        return self.roster.layout.coordinates(self.rank)

    @property
    def generation(self) -> int:
        return self.roster.generation


def check_private_names() -> None:
    """Raise PrivateApiMoved unless Megatron has every private name used here."""
    missing = [name for name in (*_GLOBAL_GROUPS, "_set_global_memory_buffer") if not hasattr(parallel_state, name)]
    if missing:
        raise PrivateApiMoved(
            f"megatron-core {megatron.core.__version__} lacks parallel_state names {', '.join(missing)}; "
            "liver_core.worlds.megatron is tested with megatron-core 0.16.1"
        )


def prepare_process() -> None:
    """Call once, before the first world of a process: checks, per-thread default group, Megatron's scratch buffer, and
    how the threads of the process take turns."""
    check_private_names()
    install_thread_world()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    # Half a million objects of torch and Megatron live as long as the process. The garbage collector can skip them.
    gc.freeze()
    sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))


def bring_up(
    roster: Roster,
    rank: int,
    store: dist.Store,
    *,
    host: str,
    timeout_s: float,
    collective_s: float = 600.0,
    name: str = "",
    place: TrainsOn | None = None,
) -> MegatronWorld:
    """Make all groups of `roster` that contain `rank`, without communicators on GPUs: those are made by `connect`. The
    active world is not touched.

    `name` prefixes the names of the groups and must be new in this process; the default is job and generation. `place`:
    where this rank trains, by default where this process does. Every rank of the roster must call this concurrently.
    Raises BringUpFailed naming the group that did not complete, GroupsRefused where these GPUs cannot have this layout.
    """
    layout = roster.layout
    name, place = name or f"{roster.job_id}/{roster.generation}", place or own_place()
    backend = backend_for(_gpus_of_all(store, name, rank, layout.world_size, place.gpu))
    plan = plan_groups(_bring_up_order(layout), layout.world_size, backend)
    nccl = None
    if backend is DeviceBackend.NCCL and layout.world_size > 1:
        nccl = NcclGroups(plan, rank, place, timeout_s=collective_s)
    limits = {"host": host, "timeout_s": timeout_s, "collective_s": collective_s}
    made = make_groups(store, plan, rank, prefix=name, nccl=nccl, **limits)
    collection = _collection(layout, rank, made)
    more: list[dist.ProcessGroup] = []

    def another(use: str, **other: float) -> dist.ProcessGroup:
        return make_group(store, plan.world, rank, name=f"{name}/{use}", **{**limits, **other})

    try:
        for use in ("background", "voting"):
            more.append(another(use))
    except BaseException:
        destroy_groups((*made.values(), *more))
        raise
    background, voting = more
    groups = (*made.values(), *more)
    again = partial(another, timeout_s=RENEWS_WITHIN_S)
    return MegatronWorld(roster, rank, store, made[plan.world], background, voting, collection, groups, nccl, again)


def renew_background(world: MegatronWorld) -> None:
    """Make another `background` group for a world whose ranks can use the one they have no more: on all ranks, or on
    none. A collective of the world. Training waits for it, for RENEWS_WITHIN_S at most."""
    world.renewals += 1
    made, failed = None, ""
    try:
        assert world.another is not None
        made = world.another(f"background-{world.renewals}")
    except BringUpFailed as error:
        failed = str(error)
    if first_rank(bool(failed), world.everyone) is not None:
        _log.warning("there is no group to write checkpoints in: %s", failed or "another rank could not join one")
        destroy_groups([made] if made is not None else [])
        return
    assert made is not None
    destroy_groups([world.background])
    world.groups = (*(group for group in world.groups if group is not world.background), made)
    world.background = made


def outline(roster: Roster, rank: int, *, name: str) -> MegatronWorld:
    """The world of `roster` as `rank` sees it while the other ranks are not there: enough to build in, not to step.
    `name` prefixes the names of the groups and must be new in this process."""
    plan = plan_groups(_bring_up_order(roster.layout), roster.layout.world_size, DeviceBackend.NONE)
    made = {
        ranks: make_absent_group(ranks, rank, name=f"{name}/{'-'.join(map(str, ranks))}")
        for ranks in plan.groups
        if rank in ranks
    }
    collection, everyone = _collection(roster.layout, rank, made), made[plan.world]
    return MegatronWorld(roster, rank, dist.HashStore(), everyone, everyone, everyone, collection, (*made.values(),))


def _gpus_of_all(store: dist.Store, name: str, rank: int, size: int, gpu: str) -> list[str]:
    """On which GPU each rank of the world trains."""
    keys = [f"{name}/gpu/{each}" for each in range(size)]
    try:
        store.set(keys[rank], gpu)
        return [value.decode() for value in store.multi_get(keys)]
    except (RuntimeError, dist.DistError) as error:
        silent = absent_from(store, dict(enumerate(keys)))
        raise BringUpFailed(
            f"world {name}: not all of its {size} ranks said on which GPU they train: {silent}{error}"
        ) from error


def _bring_up_order(layout: ParallelLayout) -> list[tuple[int, ...]]:
    """All memberships of the world in one order that every rank agrees on; equal memberships share one group."""
    wanted = [tuple(range(layout.world_size))]
    for axes in ("tp", "pp", "dp", "cp", "dp-cp", "tp-cp", "tp-pp", "tp-dp-cp"):
        wanted += [tuple(ranks) for ranks in layout.groups(axes)]
    for axes in ("tp", "ep", "tp-ep", "tp-ep-pp", "dp"):
        wanted += [tuple(ranks) for ranks in layout.expert_groups(axes)]
    for ranks in layout.groups("pp"):
        wanted += [_ends(tuple(ranks)), (ranks[0],)]
    wanted += [(rank,) for rank in range(layout.world_size)]
    return list(dict.fromkeys(wanted))


def _collection(
    layout: ParallelLayout, rank: int, made: Mapping[tuple[int, ...], dist.ProcessGroup]
) -> ProcessGroupCollection:
    """Megatron's, of the groups that were made by their members."""
    memberships = _memberships(layout, rank)
    return ProcessGroupCollection(**{name: made.get(ranks) if ranks else None for name, ranks in memberships.items()})


def _memberships(layout: ParallelLayout, rank: int) -> dict[str, tuple[int, ...] | None]:
    """ProcessGroupCollection field -> the ranks of this rank's group, None where the rank is in no such group."""

    def mine(groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        return next(ranks for ranks in groups if rank in ranks)

    stages = mine(layout.groups("pp"))
    embedding = _ends(stages)
    return {
        "tp": mine(layout.groups("tp")),
        "pp": stages,
        "mp": mine(layout.groups("tp-pp")),
        "cp": mine(layout.groups("cp")),
        "tp_cp": mine(layout.groups("tp-cp")),
        "dp": mine(layout.groups("dp")),
        "dp_cp": mine(layout.groups("dp-cp")),
        "tp_dp_cp": mine(layout.groups("tp-dp-cp")),
        "intra_dp_cp": mine(layout.groups("dp-cp")),
        "embd": embedding if rank in embedding else None,
        "pos_embd": (stages[0],) if rank == stages[0] else None,
        "ep": mine(layout.expert_groups("ep")),
        "expt_tp": mine(layout.expert_groups("tp")),
        "tp_ep": mine(layout.expert_groups("tp-ep")),
        "tp_ep_pp": mine(layout.expert_groups("tp-ep-pp")),
        "expt_dp": mine(layout.expert_groups("dp")),
        "intra_expt_dp": mine(layout.expert_groups("dp")),
        "intra_dist_opt": tuple(range(layout.world_size)),
    }


def _ends(stages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((stages[0], stages[-1])))


@contextmanager
def building(world: MegatronWorld) -> Iterator[None]:
    """Within this block this thread builds parts of `world`. Its collectives on the default group go to that world.

    The active world, its parallel_state globals and its random state stay as they are. Other threads are not affected.
    """
    with default_group(world.everyone):
        yield


def activate(world: MegatronWorld) -> None:
    """Make `world` the one that this process trains in. Only pointers change. Call it at a step boundary."""
    activate_default_group(world.everyone)
    for name, attribute in _GLOBAL_GROUPS.items():
        setattr(parallel_state, name, getattr(world.collection, attribute, None))
    parallel_state._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE = None
    parallel_state._MPU_TENSOR_MODEL_PARALLEL_RANK = None


def connect(world: MegatronWorld, limit_s: float, *, since: float) -> None:
    """Make the communicators of `world` on its GPUs, if it has any. Every rank of it must call this at the same time,
    at a boundary, with an idle device, and training waits. Raises RuntimeError if a rank is gone or a communicator is
    not there `limit_s` seconds after `since` (time.monotonic seconds)."""
    if world.nccl is not None:
        world.nccl.connect(limit_s, since=since)


def disconnect(world: MegatronWorld) -> None:
    """Free the communicators of a world that is no longer active, without its peers. Freeing waits for the device."""
    if world.nccl is not None:
        world.nccl.abort()


def abandon(world: MegatronWorld, why: str) -> None:
    """A rank of `world` is gone: end what this rank waits for on its device, from any thread and without waiting.
    Nothing without NCCL: gloo notices by itself."""
    if world.nccl is not None:
        world.nccl.abandon(why)


def retire(world: MegatronWorld) -> None:
    """Destroy the groups of a world that is no longer active. This frees their threads and descriptors. Idempotent."""
    if not world.retired:
        world.retired = True
        disconnect(world)
        destroy_groups(world.groups)
        _forget_modules()


def _forget_modules() -> None:
    """Empty Megatron's caches of method results. Their keys are modules, which keep a world's groups alive."""
    for method in vars(RotaryEmbedding).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def mark_tensor_parallel(module: torch.nn.Module) -> None:
    """Set the tensor-parallel attributes that Megatron omits with `perform_initialization=False`.

    Without them the gradient norm counts tensor-parallel rank 0 only, and training is wrong from the second step on.
    """
    for _, parameter, dim in split_parameters(module):
        if not getattr(parameter, "tensor_model_parallel", False):
            for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                if hasattr(parameter, attribute):
                    delattr(parameter, attribute)
            set_tensor_model_parallel_attributes(tensor=parameter, is_parallel=True, dim=dim, stride=1)


def split_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, int]]:
    """Name, parameter and split dim of all that Megatron's layers split over tensor-parallel ranks."""
    split_dims: tuple[tuple[type, str, int], ...] = (
        (ColumnParallelLinear, "weight", 0),
        (ColumnParallelLinear, "bias", 0),
        (VocabParallelEmbedding, "weight", 0),
        (RowParallelLinear, "weight", 1),
    )
    for place, part in module.named_modules():
        for kind, name, dim in split_dims:
            parameter = getattr(part, name, None)
            if isinstance(part, kind) and parameter is not None:
                yield f"{place}.{name}", parameter, dim
        # Transformer Engine's experts, which it marks with ETP above 1 only. With TP above 1 and ETP1 each rank has
        # other experts all the same, and each must count.
        grouped = next((_GROUPED[kind.__name__] for kind in type(part).__mro__ if kind.__name__ in _GROUPED), None)
        if grouped is not None:
            for name, parameter in part.named_parameters(recurse=False):
                if name.startswith("weight") or grouped == 0:
                    yield f"{place}.{name}", parameter, grouped


_GROUPED = {"TEColumnParallelGroupedLinear": 0, "TERowParallelGroupedLinear": 1}
"""By the name of the class, which is there with Transformer Engine only: the dim that it splits."""


def seed_streams(world: MegatronWorld, *, seed: int, step: int) -> None:
    """Seed torch's generator and Megatron's tracker streams for this rank's coordinates and this step."""
    here = world.coordinates
    place = (seed * 1_000_003 + step) * 1_000_003 + here.dp * 65_536 + here.pp * 256
    model_parallel_cuda_manual_seed(place % 2**31, tp_rank=here.tp, ep_rank=here.ep, etp_rank=here.etp)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the random streams that `seed_streams` seeds. `device` is None without a GPU."""

    host: torch.Tensor
    device: torch.Tensor | None
    tracked: Mapping[str, Any]


def random_state() -> RandomState:
    """A copy of this process's random streams, for `restore_random_state`."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return RandomState(torch.get_rng_state(), device, _tracker().get_states())


def restore_random_state(state: RandomState) -> None:
    """Set the streams back to `state`, so that they repeat the numbers drawn since then."""
    torch.set_rng_state(state.host)
    if state.device is not None:
        torch.cuda.set_rng_state(state.device)
    _tracker().set_states(dict(state.tracked))


def _tracker() -> Any:
    """Megatron's tracker. Megatron makes it on demand; its annotation wrongly says None."""
    return get_cuda_rng_tracker()
