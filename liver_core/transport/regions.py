"""Named regions of one endpoint, what is known of a peer's, and the checks that run before a byte moves.

Shared by all transports, so that a bad read fails the same way on each. Opens no connection.

A region may lie in several pieces of memory, of several dtypes. Transports see one range of bytes for each region,
piece after piece without gaps, and ask `RegionBytes` which memory a byte lies in. No run of a table lies in two pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from liver_core.device import is_host
from liver_core.device.region import AnyRegion, Region, RegionError, as_region, dtype_name
from liver_core.reshard.plan import CopyRuns
from liver_core.transport.protocol import Call, Read, TransportError

REGIONS_MAX = 256
PIECES_MAX = 1 << 16
RUNS_MAX = 1 << 22
"""Runs of one batch from one peer after expansion: 4 Mi runs are 96 MiB of offsets, more is a planning error."""

_GATHERED_ELEMENTS = 1 << 16

Table: TypeAlias = np.ndarray
"""int64 array of shape (runs, 3): source offset, target offset, length. In bytes unless said otherwise."""


class PieceSpec(NamedTuple):
    """One past its last element, dtype name, bytes per element."""

    stop: int
    dtype: str
    itemsize: int


@dataclass(frozen=True)
class RegionSpec:
    """What a reader must know of a region to check a read. Raises ValueError for pieces that are no region's."""

    pieces: tuple[PieceSpec, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.pieces) <= PIECES_MAX:
            raise ValueError(f"a region has 1 to {PIECES_MAX} pieces, this one {len(self.pieces)}")
        if (np.diff(self.stops) < 1).any() or self.stops[0] < 0 or (self.itemsizes < 1).any():
            raise ValueError("ends of pieces must ascend, elements must have bytes")

    @staticmethod
    def of(memory: AnyRegion) -> RegionSpec:
        return RegionSpec(
            tuple(
                PieceSpec(piece.stop, dtype_name(piece.tensor.dtype), piece.tensor.element_size())
                for piece in as_region(memory).pieces
            )
        )

    @property
    def numel(self) -> int:
        return self.pieces[-1].stop

    @cached_property
    def stops(self) -> np.ndarray:
        """int64: one past the last element of each piece."""
        return np.array([piece.stop for piece in self.pieces], dtype=np.int64)

    @cached_property
    def starts(self) -> np.ndarray:
        """int64: the first element of each piece."""
        return np.append(0, self.stops[:-1])

    @cached_property
    def itemsizes(self) -> np.ndarray:
        """int64: bytes per element of each piece."""
        return np.array([piece.itemsize for piece in self.pieces], dtype=np.int64)

    @cached_property
    def byte_starts(self) -> np.ndarray:
        """int64: where each piece begins in the region's bytes."""
        return _running((self.stops - self.starts) * self.itemsizes)

    def pieces_of(self, elements: np.ndarray) -> np.ndarray:
        """The number of the piece that each element lies in."""
        return np.searchsorted(self.stops, elements, side="right")

    def to_json(self) -> list[list[int | str]]:
        return [list(piece) for piece in self.pieces]

    @staticmethod
    def from_json(value: Sequence[Sequence[int | str]]) -> RegionSpec:
        return RegionSpec(tuple(PieceSpec(int(stop), str(dtype), int(size)) for stop, dtype, size in value))


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
        except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TransportError(Call.CONNECT, f"not an address: {error!r}", peer=peer) from None
        if address.transport != transport:
            raise TransportError(Call.CONNECT, f"address is of {address.transport!r}, not {transport!r}", peer=peer)
        return address


class RegionBytes:
    """The memory behind a region's bytes. `views`: flat uint8, one for each piece, also of dtypes that numpy lacks."""

    def __init__(self, region: Region) -> None:
        self.views = tuple(tensor.view(torch.uint8) for tensor in region.tensors)
        self.starts = _running(np.array([len(view) for view in self.views], dtype=np.int64))
        self.size = sum(len(view) for view in self.views)

    @property
    def device(self) -> torch.device:
        return self.views[0].device

    def located(self, runs: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """As `placed`, run by run."""
        if len(runs) == len(self.views) == 1 and 0 <= runs[0, 0] <= self.size - runs[0, 1] and runs[0, 1] > 0:
            return iter(((0, int(runs[0, 0]), int(runs[0, 1])),))
        return zip(*(column.tolist() for column in self.placed(runs)), strict=True)

    def placed(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of runs (offset, length): number of the piece, offset in it, length. Raises ValueError where one is not in
        one piece."""
        offsets, lengths = runs.T
        if len(runs) and (offsets.min() < 0 or lengths.min() < 1):
            raise ValueError("a run begins before the region or is empty")
        pieces = np.searchsorted(self.starts, offsets, side="right") - 1
        ends = np.append(self.starts[1:], self.size)[pieces]
        if (offsets + lengths > ends).any():
            raise ValueError("a run ends after its piece")
        return pieces, offsets - self.starts[pieces], lengths


@dataclass(frozen=True, slots=True)
class Registered:
    """A region that peers read, or that reads land in: what is known of it and the memory behind its bytes."""

    region: Region
    spec: RegionSpec
    memory: RegionBytes

    @staticmethod
    def of(region: Region) -> Registered:
        return Registered(region, RegionSpec.of(region), RegionBytes(region))


@dataclass(slots=True)
class Regions:
    """What one endpoint has. Sources and targets are two namespaces: a survivor has a "master" in both."""

    sources: dict[str, Registered] = field(default_factory=dict)
    targets: dict[str, Registered] = field(default_factory=dict)
    published: bool = False

    def added(
        self, sources: Mapping[str, AnyRegion] | None, targets: Mapping[str, AnyRegion] | None
    ) -> tuple[dict[str, Registered], dict[str, Registered]]:
        """The new ones, which `add` takes; nothing is changed yet. Raises TransportError for one that cannot be had."""
        if sources and self.published:
            raise TransportError(Call.REGISTER, f"sources {sorted(sources)} come after the address was published")
        fresh: list[dict[str, Registered]] = []
        for known, new in ((self.sources, sources or {}), (self.targets, targets or {})):
            if len(known) + len(new) > REGIONS_MAX:
                raise TransportError(Call.REGISTER, f"more than {REGIONS_MAX} regions")
            fresh.append({kind: _checked(kind, memory, known) for kind, memory in new.items()})
        return fresh[0], fresh[1]

    def add(self, sources: Mapping[str, Registered], targets: Mapping[str, Registered]) -> None:
        self.sources.update(sources)
        self.targets.update(targets)

    def source_specs(self) -> dict[str, RegionSpec]:
        return {kind: each.spec for kind, each in self.sources.items()}


def addresses(starts: np.ndarray, bases: Sequence[int], offsets: np.ndarray) -> np.ndarray:
    """uint64: where bytes of a region lie whose pieces begin at `starts` of it and at `bases` in memory."""
    pieces = np.searchsorted(starts, offsets, side="right") - 1
    return np.array(bases, dtype=np.uint64)[pieces] + (offsets - starts[pieces]).astype(np.uint64)


def check_reads(
    reads: Sequence[Read], peers: Mapping[int, Mapping[str, RegionSpec]], targets: Mapping[str, Registered]
) -> list[Table]:
    """Raise TransportError for the first read that cannot be right; posting starts only after this.

    Returns the runs of each read one by one, in bytes, cut where pieces end. Kinds that share one tuple of runs and lie
    alike share the work on it, since this is inside the pause.
    """
    columns: dict[int, np.ndarray] = {}
    expanded: dict[int, Table] = {}
    cut: dict[tuple[int, RegionSpec, RegionSpec], Table] = {}
    tables = []
    for read in reads:
        if read.peer not in peers:
            raise TransportError(Call.READ, f"not connected; connected are {sorted(peers)}", peer=read.peer)
        source, landing = peers[read.peer].get(read.kind), targets.get(read.kind)
        if source is None or landing is None:
            where = "at the peer" if source is None else "as a target here"
            raise TransportError(Call.READ, f"no such region {where}", peer=read.peer, kind=read.kind)
        key, target = id(read.runs), landing.spec
        if key not in columns:
            columns[key] = _columns(read.runs)
        _check_runs(read, columns[key], source.numel, target.numel)
        if key not in expanded:
            expanded[key] = _expand(columns[key])
        if (key, source, target) not in cut:
            cut[key, source, target] = _in_bytes(read, expanded[key], source, target)
        tables.append(cut[key, source, target])
    return tables


def landing_bytes(runs: Sequence[CopyRuns], memory: AnyRegion) -> int:
    """Bytes that such runs write into a target region. Bounds must be checked."""
    spec, table = RegionSpec.of(memory), _expand(_columns(runs))
    table = _cut_at(table, 1, spec.stops)
    return int((table[:, 2] * spec.itemsizes[spec.pieces_of(table[:, 1])]).sum())


def copy_runs(read: Read, source: AnyRegion, target: AnyRegion) -> int:
    """Copy inside one process, one strided copy for each entry of `runs` as far as pieces reach; returns bytes. Bounds
    must be checked.

    Between host and device torch first gathers what is strided: there, only so many rows at a time.
    """
    moved, theirs, ours = 0, as_region(source), as_region(target)
    near = theirs.device == ours.device
    with torch.no_grad():
        for r in _within_pieces(read.runs, theirs, ours):
            at_once = r.count if near else max(1, _GATHERED_ELEMENTS // r.length)
            there, here = theirs.piece_at(r.source_offset), ours.piece_at(r.target_offset)
            source_at = there.tensor.storage_offset() + r.source_offset - there.start
            target_at = here.tensor.storage_offset() + r.target_offset - here.start
            for row in range(0, r.count, at_once):
                shape = (min(at_once, r.count - row), r.length)
                block = there.tensor.as_strided(shape, (r.source_stride, 1), source_at + row * r.source_stride)
                here.tensor.as_strided(shape, (r.target_stride, 1), target_at + row * r.target_stride).copy_(block)
            moved += r.elements * here.tensor.element_size()
    return moved


def _within_pieces(runs: Iterable[CopyRuns], source: Region, target: Region) -> Iterator[CopyRuns]:
    """The same copies; none crosses the end of a piece at either end."""
    if len(source.pieces) == len(target.pieces) == 1:
        yield from runs
        return
    for r in runs:
        count, s, t = r.count, r.source_offset, r.target_offset
        while count:
            s_stop, t_stop = source.piece_at(s).stop, target.piece_at(t).stop
            rows = min(count, _rows_before(s_stop, s, r.length, r.source_stride))
            rows = min(rows, _rows_before(t_stop, t, r.length, r.target_stride))
            if rows:
                strides = (r.source_stride, r.target_stride) if rows > 1 else (0, 0)
                yield CopyRuns(s, t, r.length, rows, *strides)
            else:
                yield from _cut_row(s, t, r.length, source, target)
            done = rows or 1
            count, s, t = count - done, s + done * r.source_stride, t + done * r.target_stride


def _rows_before(stop: int, at: int, length: int, stride: int) -> int:
    """How many rows from `at` on end by `stop`; any number where a row follows at the same place, which is one row."""
    if at + length > stop:
        return 0
    return (stop - at - length) // stride + 1 if stride else 1


def _cut_row(s: int, t: int, length: int, source: Region, target: Region) -> Iterator[CopyRuns]:
    while length:
        part = min(length, source.piece_at(s).stop - s, target.piece_at(t).stop - t)
        yield CopyRuns(s, t, part)
        s, t, length = s + part, t + part, length - part


def sliceable(region: RegionBytes, staging: torch.Tensor) -> tuple[Sequence[Any], Any]:
    """As numpy arrays where all are in host memory: slicing and copying those costs a tenth of torch's."""
    if is_host(region.device):
        return [view.numpy() for view in region.views], staging.numpy()
    return region.views, staging


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


def _checked(kind: str, memory: AnyRegion, known: Mapping[str, Registered]) -> Registered:
    if kind in known:
        raise TransportError(Call.REGISTER, "registered before", kind=kind)
    try:
        region = as_region(memory)
    except RegionError as error:
        raise TransportError(Call.REGISTER, str(error), kind=kind) from None
    if len(region.pieces) > PIECES_MAX:
        raise TransportError(Call.REGISTER, f"has {len(region.pieces)} pieces, at most {PIECES_MAX}", kind=kind)
    for tensor in region.tensors:
        if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + tensor.numel()) * tensor.element_size():
            raise TransportError(Call.REGISTER, "its storage is released", kind=kind)
    return Registered.of(region)


def _running(sizes: np.ndarray) -> np.ndarray:
    """Where each begins if all lie one behind the other."""
    return np.cumsum(sizes) - sizes


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


def _in_bytes(read: Read, table: Table, source: RegionSpec, target: RegionSpec) -> Table:
    """Runs in elements as runs in bytes. Raises TransportError where the two ends have other dtypes."""
    if len(source.pieces) == len(target.pieces) == 1:
        _check_dtypes(read, source.pieces[0], target.pieces[0])
        return table * target.pieces[0].itemsize
    table = _cut_at(_cut_at(table, 0, source.stops), 1, target.stops)
    theirs, ours = source.pieces_of(table[:, 0]), target.pieces_of(table[:, 1])
    for pair in np.unique(theirs * len(target.pieces) + ours).tolist():
        there, here = divmod(pair, len(target.pieces))
        _check_dtypes(read, source.pieces[there], target.pieces[here])
    size, found = target.itemsizes[ours], np.empty_like(table)
    for column, spec, pieces in ((0, source, theirs), (1, target, ours)):
        found[:, column] = spec.byte_starts[pieces] + (table[:, column] - spec.starts[pieces]) * size
    found[:, 2] = table[:, 2] * size
    return found


def _check_dtypes(read: Read, source: PieceSpec, target: PieceSpec) -> None:
    if source.dtype != target.dtype:
        text = f"peer has {source.dtype}, target is {target.dtype}"
        raise TransportError(Call.READ, text, peer=read.peer, kind=read.kind)


def _cut_at(table: Table, column: int, stops: np.ndarray) -> Table:
    """The same runs, cut where one crosses a stop in that column."""
    first = np.searchsorted(stops, table[:, column], side="right")
    last = np.searchsorted(stops, table[:, column] + table[:, 2], side="left")
    parts = last - first + 1
    if (parts == 1).all():
        return table
    row = np.repeat(np.arange(len(table)), parts)
    part = np.arange(len(row)) - np.repeat(_running(parts), parts)
    begin, length = table[row, column], table[row, 2]
    low = np.where(part == 0, begin, stops[np.maximum(first[row] + part - 1, 0)])
    high = np.minimum(begin + length, stops[first[row] + part])
    cut = table[row]
    cut[:, :2] += (low - begin)[:, None]
    cut[:, 2] = high - low
    return cut


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
