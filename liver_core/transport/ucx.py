"""NIXL over UCX: settings before the first agent, the right to read a peer. And an agent of NIXL with plain errors.

Nothing here knows of regions or reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil

from liver_core.transport.efa import efa_devices
from liver_core.transport.profile import PROGRESS_PERIOD_S
from liver_core.transport.protocol import Call, TransportError
from liver_core.transport.regions import Address

TOKEN_BYTES = 64
WIRE_UP_READS = 16
"""UCX sets up its lanes around the first reads, and until it has, a read may wait for the source to poll once more.

At one read a poll: after 4 of them one endpoint in 50 was not settled on a busy machine, after 16 none of 80.
"""
_PROTOCOLS = "get/bcopy,get/zcopy,reconfig"
"""Of UCX's some eighty ways to move bytes, those of one-sided reads, and the one that changes a connection's wires. UCX
weighs all that it may use for each agent and each peer, and each time looks TCP's devices up in /sys: that was most of
the CPU that agents and connections cost. A value in the environment wins here too."""


@dataclass(frozen=True, slots=True)
class Ucx:
    """The profile for peers of this machine, and for RDMA. `interface` is the network device that UCX may listen on,
    "lo" or the private one; empty means all of them. `host_memory_only`: see `ucx_environment`; False for regions on
    GPUs. Both count for the first endpoint of a process only, since UCX reads its settings once."""

    interface: str = ""
    host_memory_only: bool = True
    kind: ClassVar[str] = "nixl"
    backend: ClassVar[str] = "UCX"

    def environment(self) -> Mapping[str, str]:
        return ucx_environment(interface=self.interface, host_memory_only=self.host_memory_only)

    def check_here(self) -> None:
        """UCX is in NIXL's wheel, and TCP is everywhere."""

    def extra(self) -> Mapping[str, Any]:
        return {}

    def check_peer(self, peer: int, address: Address) -> None:
        if self.host_memory_only:
            check_attachable(peer, address)

    def prove(self, peer: int, read: Callable[[], None], deadline: float) -> None:
        """UCX refuses to emulate a read, so any read will do."""
        for attempt in range(WIRE_UP_READS):
            if attempt:
                time.sleep(PROGRESS_PERIOD_S)
            read()


def ucx_environment(*, interface: str, host_memory_only: bool) -> dict[str, str]:
    """Settings for UCX and NIXL that must be in the environment before the process makes its first agent.

    Never an emulated read: UCX refuses a peer that it cannot read without that peer's help (ADR 0015).

    For host memory: cross-memory attach for data, TCP for set-up, and no hooks in the allocator. The hooks keep a
    cache of registrations that neither of the two has, and installing them costs 0.4 s of CPU. With GPUs or RDMA the
    choice of wires and the hooks stay with UCX, reads between the GPUs of a machine are allowed also where UCX sees no
    NVLink, and `interface` is joined by all RDMA devices. Signals stay with the process in both cases.

    No keepalive: UCX's own (every 20 s) makes the next reads of a peer wait until that peer polls, which it need not do
    once all are connected. That a peer is gone shows in a read that fails, in a deadline, and to the agents.
    """
    settings = {
        "UCX_HANDLE_ERRORS": "none",
        "UCX_ERROR_SIGNALS": "",
        "UCX_DEBUG_SIGNO": "0",
        "UCX_LOG_LEVEL": "fatal",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_KEEPALIVE_INTERVAL": "inf",
        "UCX_PROTO_EMULATION_ENABLE": "n",
        "NIXL_LOG_LEVEL": "FATAL",
    }
    if host_memory_only:
        # NIXL's plugin refuses to load on a machine with GPUs where cuda_copy is not among the wires.
        wires = "tcp,cma,self,cuda_copy" if has_gpu() else "tcp,cma,self"
        settings |= {"UCX_TLS": wires, "UCX_MEM_EVENTS": "n"}
        if not has_gpu():
            settings["UCX_PROTOS"] = _PROTOCOLS
    else:
        settings["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    if interface:
        settings["UCX_NET_DEVICES"] = ",".join((interface, *(() if host_memory_only else rdma_devices())))
    return settings


def rdma_devices(folder: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """The ports of this machine's RDMA devices, as UCX names them: "mlx5_0:1". Without EFA's, which have `Efa`."""
    efa, ports = efa_devices(folder), sorted(folder.glob("*/ports/*"))
    return tuple(f"{port.parent.parent.name}:{port.name}" for port in ports if port.parent.parent.name not in efa)


def has_gpu(folder: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether a display or 3D controller of NVIDIA is on the PCI bus, with or without a driver."""
    for device in folder.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith("0x03"):
                return True
    return False


def interface_of(address: str) -> str:
    """Name of the network device that has this local address, "eth0" for example: what UCX wants to be told.

    Raises ValueError naming the addresses there are.
    """
    found = {each.address: device for device, ours in psutil.net_if_addrs().items() for each in ours}
    if address not in found:
        raise ValueError(f"no network device has the address {address}; there are {', '.join(sorted(found))}")
    return found[address]


@dataclass(frozen=True, slots=True)
class Where:
    """What an error should name."""

    phase: Call
    peer: int
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Memory of one end: "DRAM" or "VRAM", and uint64 rows of address, bytes, device."""

    memory: str
    table: np.ndarray


class NixlAgent:
    """One NIXL agent of one backend, without a progress thread; what NIXL raises becomes a TransportError that says
    where we were."""

    def __init__(self, api: Any, name: str, backend: str) -> None:
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=[backend], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._registered: list[Any] = []
        self._peers: set[str] = set()
        self._agent: Any = self._call(Call.REGISTER, api.nixl_agent, name, config)

    def register(self, memory: Any, kind: str | None = None) -> None:
        self._registered.append(self._call(Call.REGISTER, self._agent.register_memory, memory, kind=kind))

    def metadata(self) -> bytes:
        return self._call(Call.REGISTER, self._agent.get_agent_metadata)

    def add_peer(self, peer: int, metadata: bytes) -> str:
        name = self._call(Call.CONNECT, self._agent.add_remote_agent, metadata, peer=peer)
        name = name.decode() if isinstance(name, bytes) else name
        self._peers.add(name)
        return name

    def post(self, where: Where, peer_name: str, local: Descriptors, remote: Descriptors) -> Any:
        """Start reading the remote descriptors into the local ones; the handle keeps this agent alive."""
        handle = self.prepare(where, peer_name, local, remote)
        self.start(where, handle)
        return handle

    def prepare(self, where: Where, peer_name: str, local: Descriptors, remote: Descriptors) -> Any:
        """The handle of a read that can be started as often as it has landed; it keeps this agent alive."""
        agent = self._agent
        lists = [agent.get_xfer_descs(each.table, each.memory) for each in (local, remote)]
        return self._call(
            where.phase, agent.initialize_xfer, "READ", *lists, peer_name, peer=where.peer, kind=where.kind
        )

    def start(self, where: Where, handle: Any) -> None:
        """Start a read that is prepared, and not in flight."""
        if self._call(where.phase, self._agent.transfer, handle, peer=where.peer, kind=where.kind) == "ERR":
            raise TransportError(where.phase, "the read was refused", peer=where.peer, kind=where.kind)

    def landed(self, where: Where, handle: Any, *, keep: bool = False) -> bool:
        """Whether the read is complete. Once it is, the handle is released unless it is to `keep`; once it has failed,
        in any case."""
        state = self._call(where.phase, self._agent.check_xfer_state, handle, peer=where.peer, kind=where.kind)
        if state == "ERR" or (state == "DONE" and not keep):
            self._call(where.phase, self._agent.release_xfer_handle, handle, peer=where.peer, kind=where.kind)
        if state == "ERR":
            raise TransportError(where.phase, "the read failed", peer=where.peer, kind=where.kind)
        return state == "DONE"

    def progress(self) -> None:
        """Answer peers. One that went away while it was served is its own problem."""
        with contextlib.suppress(Exception):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Never raises. Nothing is written through this agent once its last handle is gone too."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for name in self._peers:
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(name)
        for memory in self._registered:
            with contextlib.suppress(Exception):
                agent.deregister_memory(memory)
        self._registered.clear()

    def _call(self, phase: Call, function: Any, *args: Any, peer: int | None = None, kind: str | None = None) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raise TransportError(phase, f"{function.__name__}: {error!r}", peer=peer, kind=kind) from error


def machine() -> str:
    """Equal for two processes exactly when each can name the other by its pid."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def check_attachable(peer: int, address: Address) -> None:
    """Raise unless the peer is on this machine and this process may read its memory in the host."""
    if address.extra.get("machine") != machine():
        text = f"{address.name!r} is on another machine or in another container, and reads over TCP are not allowed"
        raise TransportError(Call.CONNECT, text, peer=peer)
    try:
        pid, at = int(address.extra["pid"]), int(address.extra["token_at"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransportError(Call.CONNECT, f"not an address: {error!r}", peer=peer) from None
    landing = ctypes.create_string_buffer(TOKEN_BYTES)
    local, remote = _Vector(ctypes.addressof(landing), TOKEN_BYTES), _Vector(at, TOKEN_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    got = libc.process_vm_readv(pid, ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), 0)
    if got != TOKEN_BYTES:
        reason = os.strerror(ctypes.get_errno())
        text = f"{address.name!r} (pid {pid}) cannot be read by cross-memory attach: {reason}"
        raise TransportError(Call.CONNECT, text, peer=peer)
