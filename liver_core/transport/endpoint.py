"""The endpoint a rank uses for one handoff, over every way that this machine has to read others.

Bound to the job's private address on all ways.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from liver_core.handoff.messages import StoreAddress
from liver_core.transport.efa import Efa, efa_devices, why_not_here
from liver_core.transport.gloo import TorchDistributedTransport
from liver_core.transport.mixed import MixedTransport
from liver_core.transport.protocol import Transport
from liver_core.transport.relay.local import LocalRelay
from liver_core.transport.relay.transport import RelayTransport
from liver_core.worlds.groups import STORE_ANSWER_S, connect_store, gloo_options

_STORE_S = 20.0


def make_endpoint(
    name: str, host: str, store: StoreAddress, relay: str = "", *, host_memory_only: bool | None = None
) -> MixedTransport:
    """A new endpoint. `name` is unique in the handoff, `host` the private address, `store` the target generation's,
    `relay` the local name of this machine's relay for the handoff, if there is one. `host_memory_only`: whether state
    lies in host memory alone, so that NIXL looks for no GPU and no RDMA; None: unless this process has a GPU.

    Raises ConnectionError when the store does not answer, ValueError when no network device has the address.
    """
    # A peer is read over the first of these that reaches it (docs/wires.md).
    ways: dict[str, Transport] = {}
    if importlib.util.find_spec("nixl") is not None:
        ways["nixl"] = _near(name, host, host_memory_only)
        if devices := efa_devices():
            ways["efa"] = _over_efa(name, devices)
    if relay:
        ways["relay"] = RelayTransport(name, LocalRelay(relay))
    ways["gloo"] = make_far(name, host, store)
    return MixedTransport(name, ways)


def make_far(name: str, host: str, store: StoreAddress) -> TorchDistributedTransport:
    """The half that reaches every machine: gloo, found through the store. Gives up a store that does not answer."""

    def connect() -> dist.Store:
        return connect_store(store, timeout_s=_STORE_S, answer_s=STORE_ANSWER_S)

    return TorchDistributedTransport(name, connect, make_pair=_PairOn(host))


def warm_up(host: str) -> None:
    """Do what the first endpoint of a process would do: load libraries and UCX, tenths of a second, and with EFA find
    out whether it can be used, seconds. For any thread."""
    if importlib.util.find_spec("nixl") is None:
        return
    endpoint = _near("warm-up", host)
    nothing = {"nothing": torch.zeros(1)}
    endpoint.register(sources=nothing, targets=nothing)
    endpoint.close()
    if efa_devices():
        why_not_here()


def _near(name: str, host: str, host_memory_only: bool | None = None) -> Transport:
    """NIXL bound to `host`. With a GPU the choice of wires is left to UCX, since state then lies in its memory."""
    from liver_core.transport.nixl import NixlTransport
    from liver_core.transport.ucx import Ucx, interface_of

    only_host = not torch.cuda.is_available() if host_memory_only is None else host_memory_only
    return NixlTransport(name, Ucx(interface_of(host), host_memory_only=only_host))


def _over_efa(name: str, devices: Mapping[str, str]) -> Transport:
    from liver_core.transport.nixl import NixlTransport

    return NixlTransport(name, Efa(devices))


class _PairOn:
    """Makes two-process gloo groups that bind to one local address."""

    def __init__(self, host: str) -> None:
        self._host = host

    def __call__(self, store: dist.Store, rank: int, seconds: float) -> Any:
        options = gloo_options(self._host, timedelta(seconds=max(seconds, 0.001)))
        return c10d.ProcessGroupGloo(store, rank, 2, options)
