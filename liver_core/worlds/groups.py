"""Process groups of one world, made directly on a store. A process may have the groups of several worlds at once.

This module uses private torch.distributed names. `check_private_names` runs before the first group is made and raises a
clear error if torch has changed them. Not here: which groups Megatron wants (worlds.megatron), and communicators on
GPUs (worlds.nccl_groups).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from liver_core.handoff.messages import StoreAddress
from liver_core.worlds.absent_group import AbsentGroup
from liver_core.worlds.alone_group import AloneGroup
from liver_core.worlds.group_plan import DeviceBackend, GroupPlan
from liver_core.worlds.nccl_groups import NcclGroups
from liver_core.worlds.shared_gpu_group import SharedGpuGroup

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName
else:
    # A NewType of str that older torch versions lack.
    GroupName = str

_C10D_NAMES = (
    "_world",
    "_World",
    "_register_process_group",
    "_unregister_process_group",
    "_update_default_pg",
    "ProcessGroupGloo",
)
_GROUP_NAMES = ("_get_backend", "_device_types", "_register_backend", "_set_default_backend", "_set_group_name")
_GLOO_NAMES = ("_Options", "create_device", "_set_default_timeout", "_set_sequence_number_for_group")
STORE_ANSWER_S = 3.0
STORE_PATIENCE_S = 10.0
"""A store that does not answer for so long counts as gone: it stalls, or the network to it is cut. While training goes
on, nobody waits for a handoff that is prepared, so a store on a busy machine gets the longer time."""
_CONNECTS_S = 1.0
_CUDA = torch.device("cuda")
_OF_A_PEER = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout")
"""Words of torch, gloo and the transports about a connection to another rank. They raise no types of their own."""
_WORLD_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")


class NoStore(ConnectionError):
    """The store of a generation cannot be reached, or does not answer; the text names its address."""


class PrivateApiMoved(RuntimeError):
    """A private torch or Megatron name that we rely on is missing or behaves differently in the installed version."""


class BringUpFailed(RuntimeError):
    """A process group could not be made before its deadline; the text names the group and its members."""


def check_private_names() -> None:
    """Raise PrivateApiMoved unless every private name used here exists with the shape we rely on."""
    missing = [name for name in _C10D_NAMES if not hasattr(c10d, name)]
    missing += [f"ProcessGroup.{name}" for name in _GROUP_NAMES if not hasattr(dist.ProcessGroup, name)]
    gloo = getattr(c10d, "ProcessGroupGloo", None)
    missing += [f"ProcessGroupGloo.{name}" for name in _GLOO_NAMES if gloo and not hasattr(gloo, name)]
    missing += [f"_world.{name}" for name in _WORLD_MAPS if not hasattr(c10d._world, name)]
    if not isinstance(getattr(type(c10d._world), "default_pg", None), property):
        missing.append("_World.default_pg (a property)")
    if missing:
        raise PrivateApiMoved(
            f"torch {torch.__version__} lacks the private names {', '.join(missing)}; "
            "liver_core.worlds.groups supports torch 2.6 to 2.13: pin one of these"
        )


class _ThreadWorld(c10d._World):
    """A `_World` in which one thread can override the default group. All other threads keep the active one.

    Megatron's optimizer constructor gathers objects on the default group (megatron/core/optimizer/__init__.py,
    `_get_param_groups`). In a background thread it would join the training world's collectives and hang that world.
    Only the override is per thread: autograd runs backward hooks on its own threads, which must see the active world.
    """

    @property
    def default_pg(self):
        group = getattr(_override, "group", None)
        return None if group is _NO_GROUP else group or self._default_pg

    @default_pg.setter
    def default_pg(self, value) -> None:
        self._default_pg = value


_override = threading.local()
_NO_GROUP = object()


def install_thread_world() -> None:
    """Make the default group overridable per thread. Idempotent. Existing groups stay as they are."""
    if not isinstance(c10d._world, _ThreadWorld):
        check_private_names()
        c10d._world.__class__ = _ThreadWorld


@contextmanager
def default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Let this thread, and only this thread, see `group` as the default group."""
    install_thread_world()
    previous = getattr(_override, "group", None)
    _override.group = group
    try:
        yield
    finally:
        _override.group = previous


@contextmanager
def alone() -> Iterator[None]:
    """Let this thread see no default group. Library code that leaves work to rank 0 then does it in this process."""
    install_thread_world()
    previous = getattr(_override, "group", None)
    _override.group = _NO_GROUP
    try:
        yield
    finally:
        _override.group = previous


def activate_default_group(group: dist.ProcessGroup | None) -> None:
    """Make `group` the process-wide default group (a pointer flip; call while the main thread is at a boundary)."""
    c10d._update_default_pg(group)


def connect_store(address: StoreAddress, *, timeout_s: float, answer_s: float | None = None) -> dist.TCPStore:
    """Open a client connection to the generation's store.

    Every thread needs its own client. A client is one mutex: if the preparing thread waits on a shared client, the
    training thread stalls. Raises NoStore naming the address.

    `timeout_s` is for a store that does not listen yet. With `answer_s`, one that listens must answer within that time,
    and so must it at each operation (otherwise dist.DistNetworkError). The client is then unusable. Without `answer_s`,
    torch waits for ever for a store that stalls or whose machine disappeared.
    """
    if answer_s is None:
        return _open_store(address, timeout_s)
    # The constructor already sends a request and may wait for ever. So it runs in a thread that nobody has to join.
    made: list[dist.TCPStore | NoStore] = []

    def make() -> None:
        try:
            made.append(_open_store(address, timeout_s))
        except NoStore as error:
            made.append(error)

    thread = threading.Thread(target=make, name="connect-store", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    thread.join(_CONNECTS_S)
    while thread.is_alive() and time.monotonic() < deadline and not _takes_connections(address):
        thread.join(_CONNECTS_S)
    # What listens must answer soon. What does not may still be starting.
    thread.join(answer_s)
    found = made[0] if made else NoStore(f"the store at {address.host}:{address.port} does not answer")
    if isinstance(found, NoStore):
        raise found
    _bound_answers(address.port, answer_s, all_of_them=False)
    return found


def expect_quick_answers(address: StoreAddress) -> None:
    """Training will soon wait: from now on every client of this process gives up the store after STORE_ANSWER_S."""
    _bound_answers(address.port, STORE_ANSWER_S, all_of_them=True)


def _open_store(address: StoreAddress, timeout_s: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError) as error:
        raise NoStore(f"no store at {address.host}:{address.port} within {timeout_s:.1f} s: {error}") from error


def _takes_connections(address: StoreAddress) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=_CONNECTS_S).close()
    except OSError:
        return False
    return True


def nothing_listens_at(address: StoreAddress) -> bool:
    """Whether the machine of `address` says that no process listens there. False if it says nothing within a second."""
    try:
        socket.create_connection((address.host, address.port), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _bound_answers(port: int, answer_s: float, *, all_of_them: bool) -> None:
    """Set a timeout of `answer_s` on the sockets of this process that connect to `port` and have none yet, or on all of
    them. c10d has no such setting.

    This may include connections of other threads to the same store. That is safe: c10d waits in poll(2) and reads only
    when an answer has arrived, so a read returns at once or never.
    """
    limit = struct.pack("ll", int(answer_s), int(answer_s % 1 * 1e6))
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                _limit_waits(connection, port, limit, also_limited=all_of_them)


def _limit_waits(connection: socket.socket, port: int, limit: bytes, *, also_limited: bool) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getpeername()[1] != port:
        return
    has_limit = any(connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, len(limit)))
    if also_limited or not has_limit:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What a group does with tensors of a GPU. `nccl`: None where gloo takes those too."""

    nccl: NcclGroups | None = None


def make_group(
    store: dist.Store,
    ranks: Sequence[int],
    rank: int,
    *,
    name: str,
    host: str,
    timeout_s: float,
    collective_s: float,
    on_device: OnDevice | None = None,
) -> dist.ProcessGroup:
    """Make the group of the world ranks `ranks`, of which `rank` is this process, and register it with torch. Over gloo
    for tensors of the host, and as `on_device` says for those of a GPU; a group of one needs neither.

    `name` must be new in this process (torch's registry of names is process-wide). `host` is the local address that
    gloo binds to. Blocks until all members have joined, at most `timeout_s` (then BringUpFailed). A collective of the
    group fails after `collective_s`.
    """
    group_rank, size = tuple(ranks).index(rank), len(ranks)
    prefix = dist.PrefixStore(f"{name}/", store)
    if size == 1:
        alone = AloneGroup(name)
        _register(alone, prefix, GroupName(name), ranks, backends="cpu:gloo")
        return alone
    shares_gpu = on_device is not None and on_device.nccl is None
    group = SharedGpuGroup(group_rank, size) if shares_gpu else dist.ProcessGroup(prefix, group_rank, size)
    # What is asked of no device, a barrier or objects, goes over the host: every decision does.
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    try:
        prefix.set(_came(group_rank), "")
        backend = _gloo(dist.PrefixStore("cpu/", prefix), group_rank, size, host, timeout_s, collective_s)
    except (RuntimeError, dist.DistError) as error:
        raise BringUpFailed(
            f"group {name} of ranks {list(ranks)} was not complete within {timeout_s:.1f} s on rank {rank}: "
            f"{absent_from(prefix, {each: _came(at) for at, each in enumerate(ranks)})}{error}"
        ) from error
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    backends = "cpu:gloo"
    if shares_gpu:
        group._register_backend(_CUDA, dist.ProcessGroup.BackendType.GLOO, backend)
        backends = "cpu:gloo,cuda:gloo"
    elif on_device is not None and on_device.nccl is not None:
        communicator = on_device.nccl.make(dist.PrefixStore("cuda/", prefix), tuple(ranks), name)
        group._register_backend(_CUDA, dist.ProcessGroup.BackendType.NCCL, communicator)
        backends = "cpu:gloo,cuda:nccl"
    group._set_group_name(GroupName(name))
    _register(group, prefix, GroupName(name), ranks, backends=backends)
    return group


def make_absent_group(ranks: Sequence[int], rank: int, *, name: str) -> dist.ProcessGroup:
    """The group of the world ranks `ranks` as `rank` sees it while the others are not there. `name` must be new in this
    process."""
    group = AbsentGroup(name, tuple(ranks).index(rank), len(ranks)) if len(ranks) > 1 else AloneGroup(name)
    _register(group, dist.HashStore(), GroupName(name), ranks, backends="cpu:gloo")
    return group


def _came(group_rank: int) -> str:
    return f"came/{group_rank}"


def absent_from(store: dist.Store, keys: Mapping[int, str]) -> str:
    """Names the ranks whose key, by world rank, is not in the store, as far as that can still say: text to put before
    an error, empty where none is missing."""
    try:
        absent = [rank for rank, key in keys.items() if not store.check([key])]
    except (RuntimeError, dist.DistError):
        return ""
    return f"{', '.join(f'rank {rank}' for rank in absent)} did not come: " if absent else ""


def gloo_options(host: str, timeout: timedelta):
    """Options of a gloo backend that binds to the local address `host`; `timeout` is for bring-up and for collectives.

    One thread runs its collectives one after the other. Torch's default is two threads. Concurrent collectives on the
    same connections then sometimes corrupt the heap: one thread frees the guard of the other's buffer a second time
    (torch 2.13: a job with overlapped reduction and gather died once in about 1500 steps).
    """
    options = c10d.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [_device(host)]
    options._timeout = timeout
    options._threads = 1
    return options


def _gloo(store: dist.Store, rank: int, size: int, host: str, timeout_s: float, collective_s: float):
    backend = c10d.ProcessGroupGloo(store, rank, size, gloo_options(host, timedelta(seconds=timeout_s)))
    backend._set_sequence_number_for_group()
    # Bring-up is quick or fails. A collective may have to wait for a slow step of a peer, so it gets another timeout.
    backend._set_default_timeout(timedelta(seconds=collective_s))
    return backend


@cache
def _device(host: str):
    """One gloo device for all groups of the process. Each device runs an event loop: one thread and its descriptors."""
    return c10d.ProcessGroupGloo.create_device(hostname=host)


def _register(
    group: dist.ProcessGroup, store: dist.Store, name: GroupName, ranks: Sequence[int], *, backends: str
) -> None:
    """Register the group in torch's maps with the rank numbers of its own world. P2POp and rank look-ups need it."""
    world = c10d._world
    world.pg_map[group] = ("gloo" if backends == "cpu:gloo" else backends, store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    world.pg_backend_config[group] = backends
    tag = f"ptd:{name}"
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.tags_to_pg.setdefault("", []).append(group)
    c10d._register_process_group(name, group)


@contextmanager
def limited(group: dist.ProcessGroup, seconds: float) -> Iterator[None]:
    """Within this block a collective of `group` on the host raises RuntimeError after `seconds`. The group is then
    unusable. NCCL keeps its timeout: it would end the process instead of raising.

    The timeout closes the connections, so a late peer gets an error too. It cannot join the next collective by mistake.
    Use it where waiting for the group's own timeout would be too long.
    """
    backends = [] if isinstance(group, AloneGroup) else [group._get_backend(torch.device("cpu"))]
    before = [backend.options._timeout for backend in backends]
    for backend in backends:
        backend._set_default_timeout(timedelta(seconds=max(seconds, 0.05)))
    try:
        yield
    finally:
        for backend, timeout in zip(backends, before, strict=True):
            backend._set_default_timeout(timeout)


def make_groups(
    store: dist.Store,
    plan: GroupPlan,
    rank: int,
    *,
    prefix: str,
    host: str,
    timeout_s: float,
    collective_s: float,
    nccl: NcclGroups | None = None,
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make each group of `plan` that contains `rank`, in its order, which is the same on all ranks. `nccl`: where the
    communicators of a world with NCCL are collected.

    Returns membership -> group. On failure it destroys the groups that it has made, then raises BringUpFailed.
    """
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    on_device = None if plan.device is DeviceBackend.NONE else OnDevice(nccl)
    try:
        for ranks in plan.groups:
            if rank in ranks:
                name = f"{prefix}/{'-'.join(map(str, ranks))}"
                made[ranks] = make_group(
                    store,
                    ranks,
                    rank,
                    name=name,
                    host=host,
                    timeout_s=timeout_s,
                    collective_s=collective_s,
                    on_device=on_device,
                )
    except BaseException:
        destroy_groups(made.values())
        raise
    return made


def destroy_groups(groups) -> None:
    """Shut each group down and remove it from torch's maps, one by one. Destroying the default world in one call would
    unregister the names of every other world too."""
    world = c10d._world
    for group in list(groups):
        if group not in world.pg_map:
            continue
        name = world.pg_names[group]
        tag = world.pg_to_tag.get(group)
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
            table.pop(group, None)
        for key in (tag, ""):
            members = world.tags_to_pg.get(key) if key is not None else None
            if members and group in members:
                members.remove(group)
            if members == [] and key:
                del world.tags_to_pg[key]
        c10d._unregister_process_group(name)
        group.shutdown()


def plainly(error: BaseException) -> str:
    """The first line of an error's text. For a gloo error: its first sentence, without the source location."""
    first = str(error).strip().partition("\n")[0]
    gloo = re.match(r"\[[^\]]*\]\s*(.*?)(\. |$)", first)
    return (gloo.group(1) if gloo else first)[:500]


def misses_a_peer(error: BaseException) -> bool:
    """Whether an error of torch or a transport only says that another rank is gone or late."""
    return any(sign in str(error).lower() for sign in _OF_A_PEER)
