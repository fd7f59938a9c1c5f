"""From end to end: sources go on stepping, targets are cut otherwise, and every bit is equal at the version agreed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import pytest
import torch

from liver_core.reshard import CopyRuns, RankPlan, Transfer
from liver_core.reshard.runs import join_runs
from liver_core.streaming.follow import Follower, FollowLimits
from liver_core.streaming.replay import Place, Replayer
from liver_core.streaming.ring import SourceRing
from liver_core.streaming.target import Following, StreamEnd, StreamResult, TargetStream
from liver_core.streaming.tiles import LOCAL, cut_tiles
from liver_core.transport.memory import Fault, FaultKind, InMemoryTransport, MemoryNetwork
from tests.liver_core.streaming.optimizers import OPTIMIZERS, Whole, same_bits

CPU = torch.device("cpu")
LIMIT_S = 30.0
PATIENT = FollowLimits(losses_max=10_000, torn_max=100_000)


class Job:
    """A model of some matrices in two layouts of two ranks: each matrix is split by rows in one, by columns in the
    other. `owned[layout][rank]` are global element numbers in region order, `sizes[layout][rank]` those of pieces."""

    def __init__(self, draw: random.Random) -> None:
        self.owned: list[list[list[int]]] = [[[], []], [[], []]]
        self.sizes: list[list[list[int]]] = [[[], []], [[], []]]
        at = 0
        for _ in range(draw.randint(2, 5)):
            rows, columns, turned = draw.randint(2, 60), draw.randint(2, 60), draw.randrange(2)
            cut = (draw.randrange(1, rows), draw.randrange(1, columns))
            for layout in range(2):
                by_rows = layout == turned
                for rank in range(2):
                    part = [
                        at + row * columns + column
                        for row in range(rows)
                        for column in range(columns)
                        if (row >= cut[0] if by_rows else column >= cut[1]) == bool(rank)
                    ]
                    self.owned[layout][rank] += part
                    self.sizes[layout][rank].append(len(part))
            at += rows * columns
        self.elements = at

    def plan(self, target: int) -> RankPlan:
        """Of a target whose process is the source of the same number."""
        place = {element: at for at, element in enumerate(self.owned[1][target])}
        parts = {}
        for source in range(2):
            pairs = [(s, place[element]) for s, element in enumerate(self.owned[0][source]) if element in place]
            if pairs:
                parts[source] = Transfer(source, join_runs(CopyRuns(s, t, 1) for s, t in pairs), len(pairs))
        local = parts.pop(target, None)
        return RankPlan(target, local, tuple(parts.values()), "test")


@dataclass(slots=True)
class Target:
    stream: TargetStream
    regions: dict[str, torch.Tensor]
    converged: threading.Event = field(default_factory=threading.Event)
    hashed: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    missed: list[int] = field(default_factory=list)
    results: list[StreamResult] = field(default_factory=list)


class Scene:
    """Two processes in one, each a source and a target, over the in-memory transport."""

    def __init__(self, seed: int, name: str, *, depth: int, tile_elements: int, share: float) -> None:
        self.draw = random.Random(seed)
        self.job = Job(self.draw)
        self.generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(self.job.elements, generator=self.generator)
        self.sources = [
            Whole(name, whole[torch.tensor(owned)], sizes)
            for owned, sizes in zip(self.job.owned[0], self.job.sizes[0], strict=True)
        ]
        self.version = 0
        for _ in range(self.draw.choice([0, 2])):
            self.step(())
        self.rings = [SourceRing(len(owned), depth, 1, version=self.version, device=CPU) for owned in self.job.owned[0]]
        self.network = MemoryNetwork()
        self.endpoints = [InMemoryTransport(f"rank{rank}", self.network) for rank in range(2)]
        for endpoint, source, ring in zip(self.endpoints, self.sources, self.rings, strict=True):
            endpoint.register(sources={**source.regions, **ring.regions})
        self.targets = [self._target(rank, depth, tile_elements, share) for rank in range(2)]
        self.kept: dict[int, list[dict[str, torch.Tensor]]] = {}

    def _target(self, rank: int, depth: int, tile_elements: int, share: float) -> Target:
        source, endpoint = self.sources[rank], self.endpoints[rank]
        sizes = self.job.sizes[1][rank]
        regions = {kind: torch.full((sum(sizes),), torch.nan) for kind in source.regions}
        spans = [(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]
        tiles = cut_tiles(self.job.plan(rank), spans, tile_elements)
        local = {**source.regions, **self.rings[rank].regions}
        kinds = [kind for kind in regions if kind != "grad"]
        following = Following(tiles, {LOCAL: depth, 0: depth, 1: depth}, regions, kinds, local=local)
        endpoint.register(targets={**regions, **following.targets()})
        endpoint.connect(1 - rank, self.endpoints[1 - rank].address(), time.monotonic() + LIMIT_S)
        places = [Place(start, stop, at % 2) for at, (start, stop) in enumerate(spans)]
        replayer = Replayer(source.rule, regions, places, window_elements=tile_elements)
        follower = Follower(tiles, plan_revision=1, depth=depth, limits=PATIENT)

        def keep(version: int) -> None:
            made.hashed[version] = {kind: regions[kind].clone() for kind in kinds}

        stream = TargetStream(
            endpoint,
            following,
            follower,
            replayer,
            on_converged=lambda version: made.converged.set(),
            on_hash=keep,
            on_hash_missed=lambda version, reason: made.missed.append(version),
            share=share,
            read_s=5.0,
        )
        made = Target(stream, regions)
        return made

    def step(self, rings: Sequence[SourceRing]) -> None:
        """One step of the source world: published where there are rings."""
        version, norm = self.version + 1, self.draw.choice([0.4, 3.0])
        gradients = torch.randn(self.job.elements, generator=self.generator)
        for rank, source in enumerate(self.sources):
            source.regions["grad"].copy_(gradients[torch.tensor(self.job.owned[0][rank])])
            header = source.header(version, 1, norm)
            if rings:
                rings[rank].publish(source.regions["grad"], header)
                rings[rank].stepping(self.version)
        for source in self.sources:
            source.step(norm)
        for ring in rings:
            ring.stepped(version)
        self.version = version

    def state(self) -> list[dict[str, torch.Tensor]]:
        """What every target must hold now: masters and moments."""
        kinds = [kind for kind in self.sources[0].regions if kind != "grad"]
        whole = {kind: torch.zeros(self.job.elements) for kind in kinds}
        for source, owned in zip(self.sources, self.job.owned[0], strict=True):
            for kind in kinds:
                whole[kind][torch.tensor(owned)] = source.regions[kind]
        return [{kind: whole[kind][torch.tensor(owned)] for kind in kinds} for owned in self.job.owned[1]]

    def run(self, steps: int, *, wait_for_all: bool) -> None:
        """Step at least so often, until all have converged where that is wanted, then end at a boundary."""
        deadline = time.monotonic() + LIMIT_S
        threads = [threading.Thread(target=self._follow, args=(target, deadline)) for target in self.targets]
        for thread in threads:
            thread.start()
        first, announced = self.version, None
        while time.monotonic() < deadline:
            converged = all(target.converged.is_set() for target in self.targets)
            if self.version >= first + steps and (converged or not wait_for_all):
                break
            if converged and announced is None:
                announced = self.version + 2
                for target in self.targets:
                    target.stream.announce(announced)
            self.compute()
            self.step(self.rings)
            if self.version == announced:
                self.kept[self.version] = self.state()
        for target in self.targets:
            target.stream.finish(self.version)
        for thread in threads:
            thread.join(max(0.0, deadline + 5 - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads)

    def compute(self) -> None:
        """Forward and backward: takes a while and holds no lock."""
        side = self.draw.choice([100, 300, 600])
        torch.mm(torch.ones(side, side), torch.ones(side, side))

    def _follow(self, target: Target, deadline: float) -> None:
        target.results.append(target.stream.run(deadline))


SEEDS = 28


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_streams_beside_training_equals_it_bit_for_bit(seed: int):
    draw = random.Random(seed)
    scene = Scene(
        seed,
        list(OPTIMIZERS)[seed % len(OPTIMIZERS)],
        depth=draw.choice([1, 2, 3, 8]),
        tile_elements=draw.choice([64, 300, 2000]),
        share=draw.choice([1.0, 1.0, 0.7, 0.3]),
    )
    scene.run(draw.randint(3, 25), wait_for_all=seed % 4 != 3)
    expected = scene.state()
    for rank, target in enumerate(scene.targets):
        (result,) = target.results
        assert (result.end, result.version, result.whole) == (StreamEnd.DONE, scene.version, True), result.reason
        for kind, tensor in expected[rank].items():
            assert same_bits(target.regions[kind], tensor), f"{kind} of target {rank}"
        elements = target.regions["master"].numel() * 4 * len(expected[rank])
        assert result.counts.read_bytes == elements, "every byte once, what was read again is counted apart"
        for version, hashed in target.hashed.items():
            for kind, tensor in scene.kept[version][rank].items():
                assert same_bits(hashed[kind], tensor), f"{kind} at the announced version {version}"


def test_with_a_deep_ring_the_targets_converge_and_hash_at_the_announced_version():
    scene = Scene(5, "adamw for-loop", depth=64, tile_elements=2000, share=1.0)
    scene.run(40, wait_for_all=True)
    for target in scene.targets:
        assert target.converged.is_set()
        assert list(target.hashed) == list(scene.kept) and not target.missed
        assert target.results[0].counts.replays > 0
    assert scene.targets[0].stream.status().estimate_s == 0.0


def test_a_ring_that_is_overtaken_is_copied_again_and_ends_equal():
    scene = Scene(2, "sgd momentum", depth=1, tile_elements=64, share=0.05)
    scene.run(60, wait_for_all=False)
    assert any(target.results[0].counts.losses or target.results[0].counts.torn for target in scene.targets)
    for target, expected in zip(scene.targets, scene.state(), strict=True):
        assert target.results[0].end is StreamEnd.DONE
        assert all(same_bits(target.regions[kind], tensor) for kind, tensor in expected.items())


def test_a_source_that_dies_ends_the_stream_and_is_named():
    scene = Scene(1, "adam", depth=2, tile_elements=300, share=1.0)
    scene.network.inject("rank1", Fault(FaultKind.DIE))
    result = scene.targets[0].stream.run(time.monotonic() + LIMIT_S)
    assert (result.end, result.peer, result.whole) == (StreamEnd.LOST, 1, False)
    assert "rank1" in result.reason


def test_a_stream_ends_at_its_deadline_and_when_it_is_told_to():
    scene = Scene(1, "adam", depth=2, tile_elements=300, share=1.0)
    result = scene.targets[0].stream.run(time.monotonic() + 0.1)
    assert result.end is StreamEnd.TIMED_OUT and result.whole
    scene.targets[1].stream.stop()
    result = scene.targets[1].stream.run(inf)
    assert (result.end, result.whole) == (StreamEnd.STOPPED, False)


def test_a_replay_that_fails_leaves_nothing_that_could_be_used():
    scene = Scene(1, "adam", depth=8, tile_elements=300, share=1.0)
    stream = scene.targets[0].stream

    def broken(spans, header) -> None:
        raise KeyError("no such group")

    stream._replayer.replay = broken
    thread = threading.Thread(target=scene._follow, args=(scene.targets[0], time.monotonic() + LIMIT_S))
    thread.start()
    assert scene.targets[0].converged.wait(LIMIT_S)
    scene.step(scene.rings)
    thread.join(LIMIT_S)
    (result,) = scene.targets[0].results
    assert (result.end, result.whole) == (StreamEnd.FAILED, False) and "no such group" in result.reason


def test_a_share_bounds_the_part_of_the_time_that_is_worked():
    scene = Scene(3, "adam", depth=2, tile_elements=300, share=1.0)
    stream, waited = scene.targets[0].stream, []
    stream._changed.wait = lambda timeout=None: waited.append(timeout) or False
    stream.set_share(0.25)
    stream._deadline = inf
    stream._throttle(0.1)
    assert waited == [pytest.approx(0.3)]
    scene.targets[0].stream.finish(scene.version)
    stream._throttle(0.1)
    assert len(waited) == 1, "training waits now"
    with pytest.raises(ValueError, match="share"):
        stream.set_share(0.0)


def test_tiles_of_a_peer_without_a_ring_are_refused_at_once():
    scene = Scene(3, "adam", depth=2, tile_elements=300, share=1.0)
    tiles = cut_tiles(scene.job.plan(0), [(0, len(scene.job.owned[1][0]))], 300)
    with pytest.raises(ValueError, match=r"peers \[-1, 1\]"):
        Following(tiles, {}, scene.targets[0].regions, ("master",))
    with pytest.raises(ValueError, match="no source regions"):
        Following(tiles, {LOCAL: 2, 1: 2}, scene.targets[0].regions, ("master",))
