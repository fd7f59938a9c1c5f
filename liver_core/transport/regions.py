"""Named flat tensors of one endpoint, what is known of a peer's, and the checks that run before a byte moves.

Shared by all transports, so that a bad read fails the same way on each. Opens no connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from liver_core.reshard.plan import CopyRuns
from liver_core.transport.protocol import Call, Read, TransportError

REGIONS_MAX = 256
RUNS_MAX = 1 << 22
"""Runs of one batch from one peer after expansion: 4 Mi runs are 96 MiB of offsets, more is a planning error."""

_GATHERED_ELEMENTS = 1 << 16

Table: TypeAlias = np.ndarray
"""int64 array of shape (runs, 3): source offset, target offset, length. In bytes unless said otherwise."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """What a reader must know of a region to check a read: elements, dtype name, bytes per element."""

    numel: int
    dtype: str
    itemsize: int

    @staticmethod
    def of(tensor: torch.Tensor) -> RegionSpec:
        return RegionSpec(tensor.numel(), str(tensor.dtype).removeprefix("torch."), tensor.element_size())

    def to_json(self) -> list[int | str]:
        return [self.numel, self.dtype, self.itemsize]

    @staticmethod
    def from_json(value: Sequence[int | str]) -> RegionSpec:
        numel, dtype, itemsize = value
        return RegionSpec(int(numel), str(dtype), int(itemsize))


@dataclass(frozen=True, slots=True)
class Address:
    """What an endpoint publishes. `extra` is the part that only its own kind of transport reads: JSON values."""

    transport: str
    name: str
    regions: Mapping[str, RegionSpec]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        regions = {kind: spec.to_json() for kind, spec in self.regions.items()}
        return json.dumps(
            {"transport": self.transport, "name": self.name, "regions": regions, "extra": dict(self.extra)}
        ).encode()

    @staticmethod
    def decode(data: bytes, transport: str, peer: int) -> Address:
        """Raise TransportError in the connect phase for bytes that are not an address of this kind of transport."""
        try:
            value = json.loads(data)
            regions = {str(kind): RegionSpec.from_json(spec) for kind, spec in value["regions"].items()}
            address = Address(str(value["transport"]), str(value["name"]), regions, dict(value["extra"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TransportError(Call.CONNECT, f"not an address: {error!r}", peer=peer) from None
        if address.transport != transport:
            raise TransportError(Call.CONNECT, f"address is of {address.transport!r}, not {transport!r}", peer=peer)
        return address


@dataclass(slots=True)
class Regions:
    """The tensors of one endpoint. Sources and targets are two namespaces: a survivor has a "master" in both."""

    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    published: bool = False

    def check_new(self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        if sources and self.published:
            raise TransportError(Call.REGISTER, f"sources {sorted(sources)} come after the address was published")
        for known, new in ((self.sources, sources), (self.targets, targets)):
            if len(known) + len(new) > REGIONS_MAX:
                raise TransportError(Call.REGISTER, f"more than {REGIONS_MAX} regions")
            for kind, tensor in new.items():
                _check_tensor(kind, tensor, known)

    def add(self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        self.sources.update(sources)
        self.targets.update(targets)

    def source_specs(self) -> dict[str, RegionSpec]:
        return {kind: RegionSpec.of(tensor) for kind, tensor in self.sources.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a flat uint8 tensor; works for dtypes that numpy lacks."""
    return tensor.detach().view(torch.uint8)


def check_reads(
    reads: Sequence[Read], peers: Mapping[int, Mapping[str, RegionSpec]], targets: Mapping[str, torch.Tensor]
) -> list[Table]:
    """Raise TransportError for the first read that cannot be right; posting starts only after this.

    Returns the runs of each read one by one, in bytes. Kinds that share one tuple of runs share the work on it, since
    this is inside the pause.
    """
    columns: dict[int, np.ndarray] = {}
    expanded: dict[int, Table] = {}
    tables = []
    for read in reads:
        if read.peer not in peers:
            raise TransportError(Call.READ, f"not connected; connected are {sorted(peers)}", peer=read.peer)
        source = peers[read.peer].get(read.kind)
        target = targets.get(read.kind)
        if source is None or target is None:
            where = "at the peer" if source is None else "as a target here"
            raise TransportError(Call.READ, f"no such region {where}", peer=read.peer, kind=read.kind)
        spec = RegionSpec.of(target)
        if source.dtype != spec.dtype:
            text = f"peer has {source.dtype}, target is {spec.dtype}"
            raise TransportError(Call.READ, text, peer=read.peer, kind=read.kind)
        key = id(read.runs)
        if key not in columns:
            columns[key] = _columns(read.runs)
        _check_runs(read, columns[key], source.numel, spec.numel)
        if key not in expanded:
            expanded[key] = _expand(columns[key])
        tables.append(expanded[key] * spec.itemsize)
    return tables


def copy_runs(read: Read, source: torch.Tensor, target: torch.Tensor) -> int:
    """Copy inside one process, one strided copy for each entry of `runs`; returns bytes. Bounds must be checked.

    Between host and device torch first gathers what is strided: there, only so many rows at a time.
    """
    elements, near = 0, source.device == target.device
    with torch.no_grad():
        for r in read.runs:
            at_once = r.count if near else max(1, _GATHERED_ELEMENTS // r.length)
            for row in range(0, r.count, at_once):
                shape = (min(at_once, r.count - row), r.length)
                source_at = source.storage_offset() + r.source_offset + row * r.source_stride
                target_at = target.storage_offset() + r.target_offset + row * r.target_stride
                block = source.as_strided(shape, (r.source_stride, 1), source_at)
                target.as_strided(shape, (r.target_stride, 1), target_at).copy_(block)
            elements += r.count * r.length
    return elements * target.element_size()


def batches(table: Table, bytes_max: int, runs_max: int) -> list[Table]:
    """Cut a byte table into consecutive batches: at most `runs_max` runs and less than twice `bytes_max` bytes each.

    Runs longer than `bytes_max` are split, so that one huge run cannot hold up deadlines or staging.
    """
    if len(table) <= runs_max and table[:, 2].sum() <= bytes_max:
        return [table]
    table = _split_long(table, bytes_max)
    ends = np.cumsum(table[:, 2])
    group = (ends - table[:, 2]) // bytes_max
    cuts = np.flatnonzero(np.diff(group)) + 1
    return [part[start : start + runs_max] for part in np.split(table, cuts) for start in range(0, len(part), runs_max)]


def _split_long(table: Table, bytes_max: int) -> Table:
    pieces = -(-table[:, 2] // bytes_max)
    row = np.repeat(np.arange(len(table)), pieces)
    step = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * bytes_max
    cut = table[row]
    cut[:, 0] += step
    cut[:, 1] += step
    cut[:, 2] = np.minimum(cut[:, 2] - step, bytes_max)
    return cut


def _check_tensor(kind: str, tensor: torch.Tensor, known: Mapping[str, torch.Tensor]) -> None:
    if kind in known:
        raise TransportError(Call.REGISTER, "registered before", kind=kind)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        text = f"must be flat and contiguous, has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise TransportError(Call.REGISTER, text, kind=kind)
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + tensor.numel()) * tensor.element_size():
        raise TransportError(Call.REGISTER, "its storage is released", kind=kind)


def _columns(runs: Sequence[CopyRuns]) -> np.ndarray:
    """int64 (runs, 6): source offset, target offset, length, count, source stride, target stride."""
    rows = [(r.source_offset, r.target_offset, r.length, r.count, r.source_stride, r.target_stride) for r in runs]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def _expand(columns: np.ndarray) -> Table:
    """All runs one by one, in elements, in the given order."""
    count = columns[:, 3]
    if (count == 1).all():
        return columns[:, :3]
    row = np.repeat(np.arange(len(columns)), count)
    step = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    table = columns[row, :3]
    table[:, :2] += step[:, None] * columns[row, 4:]
    return table


def _check_runs(read: Read, columns: np.ndarray, source_numel: int, target_numel: int) -> None:
    source, target, length, count, source_stride, target_stride = columns.T
    source_end = source + (count - 1) * source_stride + length
    target_end = target + (count - 1) * target_stride + length
    problems = {
        "lengths and counts start at 1, offsets and strides at 0": (
            (np.minimum(length, count) < 1) | (np.minimum(np.minimum(source, target), source_stride) < 0)
        ),
        "runs overlap in the target": (count > 1) & (target_stride < length),
        f"ends after the peer's last element, {source_numel}": source_end > source_numel,
        f"ends after the target's last element, {target_numel}": target_end > target_numel,
    }
    for problem, where in problems.items():
        if where.any():
            run = read.runs[int(np.argmax(where))]
            raise TransportError(Call.READ, f"{run}: {problem}", peer=read.peer, kind=read.kind)
    if count.sum() > RUNS_MAX:
        text = f"{count.sum()} runs, at most {RUNS_MAX}"
        raise TransportError(Call.READ, text, peer=read.peer, kind=read.kind)
