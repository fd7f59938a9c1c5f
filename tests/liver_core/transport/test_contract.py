"""The contract of `Transport`, run by every implementation: in-memory on threads, NIXL and gloo on real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch

from liver_core.device.region import AnyRegion, Region
from liver_core.transport.protocol import (
    Call,
    Guard,
    GuardedRead,
    Read,
    ReadReport,
    Transport,
    TransportError,
    TransportTimeout,
)
from tests.liver_core.device.regions import cut_region
from tests.liver_core.transport.ranks import KINDS, RELAYS, Rank, Run, run_ranks
from tests.tiers import sample

pytestmark = pytest.mark.timeout(120)
every_kind = pytest.mark.parametrize("kind", KINDS)

NUMEL = 50_000
GRACE_S = 3.0
"""How late an answer may be on a machine that others use too."""


@every_kind
@pytest.mark.parametrize("ranks", sample([2, 3, 5], 3))
def test_everybody_reads_random_strided_runs_from_everybody_at_once(kind: str, ranks: int):
    assert run_ranks(kind, ranks, read_from_everybody) == [True] * ranks


@every_kind
def test_a_rank_alone_and_an_empty_read_move_nothing(kind: str):
    assert run_ranks(kind, 1, read_nothing) == [0]


@every_kind
def test_a_survivor_has_the_same_kind_as_source_and_as_target(kind: str):
    assert run_ranks(kind, 2, swap_masters) == [True, True]


@every_kind
def test_a_guard_that_does_not_hold_is_said_and_costs_no_bytes_where_it_is_looked_at(kind: str):
    assert run_ranks(kind, 2, read_guarded) == [kind in RELAYS] * 2


@every_kind
def test_regions_of_other_dtypes_arrive_bitwise(kind: str):
    assert run_ranks(kind, 2, read_other_dtypes) == [True, True]


@every_kind
def test_regions_in_several_pieces_arrive_as_if_each_were_one(kind: str):
    assert run_ranks(kind, 2, read_pieces) == [True, True]


@every_kind
def test_a_region_much_larger_than_one_batch_arrives_whole(kind: str):
    assert run_ranks(kind, 2, read_large) == [True, True]


@every_kind
def test_a_bad_read_is_refused_before_a_byte_moves(kind: str):
    assert run_ranks(kind, 2, refuse_bad_reads) == [True, True]


@every_kind
def test_bad_registrations_and_addresses_are_refused_with_a_reason(kind: str):
    assert run_ranks(kind, 2, refuse_bad_setup) == [True, True]


@every_kind
def test_a_dead_peer_is_an_error_that_names_it_well_before_the_deadline(kind: str):
    assert run_ranks(kind, 3, read_from_the_dead) == [True, None, True]


@every_kind
def test_a_stalled_peer_costs_no_more_than_the_deadline(kind: str):
    assert run_ranks(kind, 2, read_from_the_stalled) == [True, None]


@every_kind
def test_connecting_to_an_endpoint_that_is_gone_ends_by_the_deadline(kind: str):
    assert run_ranks(kind, 2, connect_to_the_gone) == [True, True]


@every_kind
def test_a_deadline_in_the_past_moves_nothing(kind: str):
    assert run_ranks(kind, 2, read_too_late) == [True, True]


@every_kind
def test_a_calm_source_is_read_as_before(kind: str):
    assert run_ranks(kind, 2, read_from_the_calm) == [True, True]


@every_kind
def test_closing_twice_is_closing_once_and_ends_everything_else(kind: str):
    assert run_ranks(kind, 2, close_twice) == [True, True]


@pytest.mark.thorough
@every_kind
def test_twenty_handoffs_leave_no_descriptor_and_no_thread_behind(kind: str):
    for growth in run_ranks(kind, 2, many_cycles, limit_s=100):
        assert max(growth) <= 0


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def numbers(rank: int, numel: int = NUMEL) -> torch.Tensor:
    """Random bits as float32: NaN payloads, infinities and denormals must survive like everything else."""
    bits = np.random.default_rng(rank).integers(0, 2**32, numel, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def connected(rank: Rank, sources: Mapping[str, AnyRegion], targets: Mapping[str, AnyRegion]) -> Transport:
    """An endpoint that is connected to every other rank; all ranks must call it together."""
    endpoint = rank.endpoint()
    endpoint.register(sources=sources)
    endpoint.start_progress()
    for peer, address in enumerate(rank.exchange(endpoint.address())):
        if peer != rank.rank and address is not None:
            endpoint.connect(peer, address, soon())
    endpoint.register(targets=targets)
    rank.exchange()
    return endpoint


def leave(rank: Rank, endpoint: Transport) -> None:
    rank.exchange()
    endpoint.stop_progress()
    endpoint.close()


def random_runs(random: np.random.Generator, start: int, stop: int, numel: int) -> Iterable[Run]:
    """Runs that write disjoint pieces of [start, stop) of the target, from anywhere in the source."""
    while start < stop:
        length = int(random.integers(1, 40))
        count = int(random.integers(1, 9))
        source_stride = length + int(random.integers(0, 30))
        target_stride = length + int(random.integers(0, 5))
        span = max(count * source_stride, count * target_stride)
        if start + span > stop:
            return
        yield Run(int(random.integers(0, numel - span)), start, length, count, source_stride, target_stride)
        start += count * target_stride + int(random.integers(0, 20))


def replay(runs: Iterable[Run], source: torch.Tensor, target: torch.Tensor) -> int:
    moved = 0
    for run in runs:
        for step in range(run.count):
            at = run.source_offset + step * run.source_stride
            to = run.target_offset + step * run.target_stride
            target[to : to + run.length] = source[at : at + run.length]
            moved += run.length
    return moved * target.element_size()


def error_of(endpoint: Transport, reads: list[Read], deadline: float) -> TransportError:
    with pytest.raises(TransportError) as caught:
        endpoint.read(reads, deadline)
    return caught.value


def read_from_everybody(rank: Rank) -> bool:
    sources = {"master": numbers(rank.rank), "exp_avg": numbers(rank.rank + 100)}
    targets = {kind: torch.zeros(NUMEL) for kind in sources}
    expected = {kind: torch.zeros(NUMEL) for kind in sources}
    endpoint = connected(rank, sources, targets)
    random = np.random.default_rng(rank.rank + 1000)
    for _ in range(3):
        reads, planned = [], {}
        share = NUMEL // rank.size
        for peer in range(rank.size):
            if peer == rank.rank:
                continue
            for kind, seed in (("master", peer), ("exp_avg", peer + 100)):
                runs = tuple(random_runs(random, peer * share, (peer + 1) * share, NUMEL))
                reads.append(Read(peer, kind, runs))
                planned[peer] = planned.get(peer, 0) + replay(runs, numbers(seed), expected[kind])
        report = endpoint.read(reads, soon())
        assert {each.peer: each.bytes for each in report.peers} == planned
        assert report.bytes == sum(planned.values())
        assert report.seconds >= max(each.seconds for each in report.peers) > 0
        assert all(same_bits(targets[kind], expected[kind]) for kind in sources)
    leave(rank, endpoint)
    return same_bits(sources["master"], numbers(rank.rank)) and same_bits(sources["exp_avg"], numbers(rank.rank + 100))


def read_nothing(rank: Rank) -> int:
    endpoint = connected(rank, {"master": numbers(0)}, {})
    assert endpoint.read([], soon()) == ReadReport(0, 0.0, ()) or endpoint.read([], soon()).peers == ()
    moved = endpoint.read([], soon()).bytes
    leave(rank, endpoint)
    return moved


def swap_masters(rank: Rank) -> bool:
    source, target = numbers(rank.rank), torch.zeros(NUMEL)
    endpoint = connected(rank, {"master": source}, {"master": target})
    other = 1 - rank.rank
    assert endpoint.read([Read(other, "master", ())], soon()).peers == ()
    endpoint.read([Read(other, "master", (Run(0, 0, NUMEL),))], soon())
    leave(rank, endpoint)
    return same_bits(target, numbers(other)) and same_bits(source, numbers(rank.rank))


def read_guarded(rank: Rank) -> bool:
    """The second and fourth of four reads have a guard that does not hold."""
    counter, source, target = torch.tensor([3, 8]), numbers(rank.rank), torch.zeros(NUMEL)
    endpoint = connected(rank, {"counter": counter, "master": source}, {"master": target})
    other, quarter = 1 - rank.rank, NUMEL // 4
    guards = (Guard("counter", 1, 8), Guard("counter", 1, 6), None, Guard("counter", 0, 4))
    reads = [
        Read(other, "master", (Run(at * quarter, at * quarter, quarter),), guard) for at, guard in enumerate(guards)
    ]
    report = endpoint.read(reads, soon())
    is_guarded = endpoint.guards(other)
    leave(rank, endpoint)
    expected = numbers(other)[: 4 * quarter]
    if is_guarded:
        expected = expected.clone()
        expected[quarter : 2 * quarter] = expected[3 * quarter :] = 0
        whole, moved = GuardedRead(True, 4 * quarter), GuardedRead(False, 0)
        assert report.guarded == {0: whole, 1: moved, 3: moved}
    else:
        assert report.guarded == {}
    assert report.bytes == 4 * quarter * (2 if is_guarded else 4)
    assert same_bits(target[: 4 * quarter], expected)
    return is_guarded


def read_other_dtypes(rank: Rank) -> bool:
    dtypes = (torch.bfloat16, torch.int64, torch.uint8)
    sources = {str(dtype): (torch.arange(501) * 7 + rank.rank).to(dtype) for dtype in dtypes}
    targets = {str(dtype): torch.zeros(501, dtype=dtype) for dtype in dtypes}
    endpoint = connected(rank, sources, targets)
    other = 1 - rank.rank
    report = endpoint.read([Read(other, kind, (Run(1, 0, 3, 100, 5, 5),)) for kind in sources], soon())
    assert report.bytes == 300 * (2 + 8 + 1)
    leave(rank, endpoint)
    for dtype in dtypes:
        expected = torch.zeros(501, dtype=dtype)
        replay([Run(1, 0, 3, 100, 5, 5)], (torch.arange(501) * 7 + other).to(dtype), expected)
        assert torch.equal(targets[str(dtype)], expected)
    return True


def read_pieces(rank: Rank) -> bool:
    """Two dtypes in memory here and there: the ends of pieces are others at the two ends, and inside runs."""
    other = 1 - rank.rank
    theirs = numbers(other, 300), numbers(other + 7, 200).bfloat16()
    source = Region([*cut_region(numbers(rank.rank, 300), [90, 91]).tensors, numbers(rank.rank + 7, 200).bfloat16()])
    target = Region(
        [*cut_region(torch.zeros(300), [150]).tensors, *cut_region(torch.zeros(200).bfloat16(), [77]).tensors]
    )
    endpoint = connected(rank, {"grad": source}, {"grad": target})
    report = endpoint.read([Read(other, "grad", (Run(10, 10, 400), Run(450, 450, 5, 3, 9, 9)))], soon())
    assert report.bytes == 290 * 4 + (110 + 15) * 2
    leave(rank, endpoint)
    expected = torch.zeros(300), torch.zeros(200, dtype=torch.bfloat16)
    expected[0][10:] = theirs[0][10:]
    for start, stop in ((0, 110), (150, 155), (159, 164), (168, 173)):
        expected[1][start:stop] = theirs[1][start:stop]
    found = torch.cat(target.tensors[:2]), torch.cat(target.tensors[2:])
    return same_bits(found[0], expected[0]) and same_bits(found[1], expected[1])


def read_large(rank: Rank) -> bool:
    numel = 6_000_000
    source, target = numbers(rank.rank, numel), torch.zeros(numel)
    endpoint = connected(rank, {"master": source}, {"master": target})
    other = 1 - rank.rank
    runs = (Run(0, 0, 100, 10_000, 200, 200), Run(2_000_000, 2_000_000, 4_000_000))
    report = endpoint.read([Read(other, "master", runs)], soon(30))
    assert report.bytes == 4 * (1_000_000 + 4_000_000)
    leave(rank, endpoint)
    expected = torch.zeros(numel)
    whole = numbers(other, numel)
    expected[:2_000_000].view(-1, 200)[:, :100] = whole[:2_000_000].view(-1, 200)[:, :100]
    expected[2_000_000:] = whole[2_000_000:]
    return same_bits(target, expected)


def refuse_bad_reads(rank: Rank) -> bool:
    target = torch.zeros(NUMEL - 10)
    sources = {"master": numbers(rank.rank), "steps": torch.zeros(4, dtype=torch.int64), "here": torch.zeros(4)}
    endpoint = connected(rank, sources, {"master": target, "steps": torch.zeros(4), "there": torch.zeros(4)})
    other = 1 - rank.rank
    good = Read(other, "master", (Run(0, 0, 100),))
    bad = {
        "past the end of the source": Read(other, "master", (Run(NUMEL - 99, 0, 100),)),
        "last stride past the end of the source": Read(other, "master", (Run(0, 0, 100, 1000, 50, 100),)),
        "past the end of the target": Read(other, "master", (Run(0, NUMEL - 10, 1),)),
        "before the start": Read(other, "master", (Run(-1, 0, 100),)),
        "before the start of the target": Read(other, "master", (Run(0, -1, 100),)),
        "empty run": Read(other, "master", (Run(0, 0, 0),)),
        "runs over each other in the target": Read(other, "master", (Run(0, 0, 100, 2, 100, 99),)),
        "dtypes differ": Read(other, "steps", (Run(0, 0, 1),)),
        "no target": Read(other, "here", (Run(0, 0, 1),)),
        "no source": Read(other, "there", (Run(0, 0, 1),)),
        "unknown peer": Read(7, "master", (Run(0, 0, 1),)),
    }
    for why, read in bad.items():
        error = error_of(endpoint, [good, read], soon())
        assert (error.phase, error.peer) == (Call.READ, read.peer), why
        assert not isinstance(error, TransportTimeout), why
        assert why == "unknown peer" or error.kind == read.kind, why
    assert not target.any(), "a good read beside a bad one was posted"
    assert endpoint.read([good], soon()).bytes == 400
    leave(rank, endpoint)
    return True


def refuse_bad_setup(rank: Rank) -> bool:
    endpoint = rank.endpoint()
    released = torch.zeros(8)
    released.untyped_storage().resize_(0)
    for tensor in (torch.zeros(2, 2), torch.zeros(8)[::2], released):
        with pytest.raises(TransportError, match=r"flat and contiguous|released"):
            endpoint.register(sources={"bad": tensor})
    endpoint.register(sources={"master": torch.zeros(8)}, targets={"master": torch.zeros(8)})
    with pytest.raises(TransportError, match="registered before"):
        endpoint.register(targets={"master": torch.zeros(8)})
    addresses = rank.exchange(endpoint.address())
    with pytest.raises(TransportError, match="after the address"):
        endpoint.register(sources={"late": torch.zeros(8)})
    for nonsense in (b"", b"{}", b"[1]", b"\xff", b'{"transport": "pigeon", "name": "p", "regions": {}, "extra": {}}'):
        with pytest.raises(TransportError) as caught:
            endpoint.connect(1 - rank.rank, nonsense, soon(2))
        assert (caught.value.phase, caught.value.peer) == (Call.CONNECT, 1 - rank.rank)
    endpoint.start_progress()
    rank.exchange()
    other = addresses[1 - rank.rank]
    assert other is not None
    endpoint.connect(1 - rank.rank, other, soon())
    endpoint.connect(1 - rank.rank, other, soon())
    second = rank.endpoint()
    second.register(sources={"master": torch.zeros(8)})
    with pytest.raises(TransportError, match="taken"):
        endpoint.connect(1 - rank.rank, second.address(), soon(2))
    leave(rank, endpoint)
    return True


def read_from_the_dead(rank: Rank) -> bool:
    source, target = numbers(rank.rank), torch.zeros(2 * NUMEL)
    endpoint = connected(rank, {"master": source}, {"master": target})
    if rank.rank == 1:
        rank.die()
    assert rank.exchange()[1] is None
    alive = 2 - rank.rank
    start = time.monotonic()
    reads = [Read(alive, "master", (Run(0, NUMEL, NUMEL),)), Read(1, "master", (Run(0, 0, NUMEL),))]
    error = error_of(endpoint, reads, soon(10))
    assert time.monotonic() - start < 5
    assert (error.phase, error.peer) == (Call.READ, 1)
    assert not isinstance(error, TransportTimeout)
    rank.exchange()
    endpoint.read(reads[:1], soon(10))
    assert same_bits(target[NUMEL:], numbers(alive))
    leave(rank, endpoint)
    return same_bits(source, numbers(rank.rank))


def read_from_the_stalled(rank: Rank) -> bool:
    target = torch.zeros(NUMEL)
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
    if rank.rank == 1:
        rank.stall()
    assert rank.exchange()[1] is None
    start = time.monotonic()
    try:
        endpoint.read([Read(1, "master", (Run(0, 0, NUMEL),))], start + 0.5)
    except TransportTimeout as error:
        assert (error.phase, error.peer) == (Call.READ, 1)
    else:  # One-sided over shared memory: a stopped process is still readable.
        assert endpoint.one_sided
        assert same_bits(target, numbers(1))
    assert time.monotonic() - start < 0.5 + GRACE_S
    endpoint.close()
    return True


def connect_to_the_gone(rank: Rank) -> bool:
    endpoint = rank.endpoint()
    endpoint.register(sources={"master": numbers(rank.rank)})
    endpoint.start_progress()
    addresses = rank.exchange(endpoint.address())
    if rank.rank == 1:
        endpoint.close()
        rank.exchange()
        return True
    rank.exchange()
    start = time.monotonic()
    assert addresses[1] is not None
    with pytest.raises(TransportError) as caught:
        endpoint.connect(1, addresses[1], start + 0.7)
    assert (caught.value.phase, caught.value.peer) == (Call.CONNECT, 1)
    assert time.monotonic() - start < 0.7 + GRACE_S
    endpoint.close()
    return True


def read_too_late(rank: Rank) -> bool:
    target = torch.zeros(NUMEL)
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
    with pytest.raises(TransportTimeout) as caught:
        endpoint.read([Read(1 - rank.rank, "master", (Run(0, 0, NUMEL),))], time.monotonic() - 1)
    assert (caught.value.phase, caught.value.peer) == (Call.READ, 1 - rank.rank)
    leave(rank, endpoint)
    return not target.any()


def read_from_the_calm(rank: Rank) -> bool:
    target = torch.zeros(NUMEL)
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
    endpoint.calm()
    endpoint.calm()
    rank.exchange()
    endpoint.read([Read(1 - rank.rank, "master", (Run(0, 0, NUMEL),))], soon())
    leave(rank, endpoint)
    return same_bits(target, numbers(1 - rank.rank))


def close_twice(rank: Rank) -> bool:
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": torch.zeros(NUMEL)})
    endpoint.start_progress()
    rank.exchange()
    endpoint.stop_progress()
    endpoint.stop_progress()
    endpoint.close()
    endpoint.close()
    endpoint.stop_progress()
    for action in (
        lambda: endpoint.read([], soon()),
        lambda: endpoint.connect(1 - rank.rank, b"", soon()),
        lambda: endpoint.register(targets={"more": torch.zeros(1)}),
        endpoint.address,
        endpoint.start_progress,
    ):
        with pytest.raises(TransportError, match="closed"):
            action()
    return True


def many_cycles(rank: Rank) -> tuple[int, int]:
    counts = []
    for _ in range(20):
        target = torch.zeros(NUMEL)
        endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
        endpoint.read([Read(1 - rank.rank, "master", (Run(0, 0, NUMEL),))], soon())
        leave(rank, endpoint)
        for turn in range(2):
            rank.exchange()
            # One after the other: where ranks are threads, a listing is a descriptor that the other one would count.
            if turn == rank.rank:
                counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        rank.exchange()
    settled, last = counts[4], counts[-1]
    return last[0] - settled[0], last[1] - settled[1]
