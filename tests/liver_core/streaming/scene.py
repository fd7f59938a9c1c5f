"""A job on two ranks that goes on stepping while two other ranks, in the same processes, follow it.

Both source ranks are played in every process, since they are cheap and deterministic; a process registers only what is
its own. Over the in-memory transport both processes are this one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from liver_core.reshard import CopyRuns, RankPlan, Transfer
from liver_core.reshard.copy_runs import join_runs
from liver_core.streaming.follow import Follower, FollowLimits
from liver_core.streaming.reader import Following, StreamResult, TargetStream
from liver_core.streaming.ring import SourceRing
from liver_core.streaming.tiles import LOCAL, cut_tiles
from liver_core.streaming.window_step import GroupSpan, Replayer
from liver_core.transport.protocol import Transport
from tests.liver_core.streaming.optimizers import Whole
from tests.liver_core.transport.in_memory import InMemoryTransport, MemoryNetwork

CPU = torch.device("cpu")
LIMIT_S = 30.0
LONGER_STEPS = 0.005
PATIENT = FollowLimits(losses_max=10_000, torn_max=100_000)
Addresses = dict[int, bytes]


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


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of both ranks' streams."""

    depth: int
    tile_elements: int
    share: float = 1.0


class Scene:
    """The job, its rings, and the targets of those ranks that `endpoints` has."""

    def __init__(
        self,
        seed: int,
        optimizer: str,
        sizes: Sizes,
        endpoints: Mapping[int, Transport],
        *,
        share_addresses: Callable[[Addresses], Addresses] = lambda mine: mine,
    ) -> None:
        self.draw = random.Random(seed)
        self.job = Job(self.draw)
        self.sizes = sizes
        self.endpoints = endpoints
        self.generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(self.job.elements, generator=self.generator)
        self.sources = [
            Whole(optimizer, whole[torch.tensor(owned)], pieces)
            for owned, pieces in zip(self.job.owned[0], self.job.sizes[0], strict=True)
        ]
        self.version = 0
        for _ in range(self.draw.choice([0, 2])):
            self.step(())
        self.rings = [
            SourceRing(torch.zeros(len(owned)), sizes.depth, version=self.version) for owned in self.job.owned[0]
        ]
        for rank, endpoint in endpoints.items():
            endpoint.register(sources={**self.sources[rank].regions, **self.rings[rank].regions})
            endpoint.start_progress()
        addresses = share_addresses({rank: endpoint.address() for rank, endpoint in endpoints.items()})
        self.targets = {rank: self._target(rank, endpoint, addresses) for rank, endpoint in endpoints.items()}
        self.kept: dict[int, list[dict[str, torch.Tensor]]] = {}

    def _target(self, rank: int, endpoint: Transport, addresses: Addresses) -> Target:
        source, pieces, depth = self.sources[rank], self.job.sizes[1][rank], self.sizes.depth
        regions = {kind: torch.full((sum(pieces),), torch.nan) for kind in source.regions}
        spans = [(sum(pieces[:at]), sum(pieces[: at + 1])) for at in range(len(pieces))]
        tiles = cut_tiles(self.job.plan(rank), spans, self.sizes.tile_elements)
        local = {**source.regions, **self.rings[rank].regions}
        kinds = [kind for kind in regions if kind != "grad"]
        following = Following(tiles, {LOCAL: depth, 0: depth, 1: depth}, regions, kinds, local=local)
        endpoint.register(targets={**regions, **following.targets()})
        endpoint.connect(1 - rank, addresses[1 - rank], time.monotonic() + LIMIT_S)
        places = [GroupSpan(start, stop, at % 2) for at, (start, stop) in enumerate(spans)]
        replayer = Replayer(source.rule, regions, places, window_elements=self.sizes.tile_elements)
        follower = Follower(tiles, depth=depth, limits=PATIENT)

        def keep(version: int) -> None:
            made.hashed[version] = {kind: regions[kind].clone() for kind in kinds}

        stream = TargetStream(
            endpoint,
            following,
            follower,
            replayer.replay,
            on_converged=lambda version: made.converged.set(),
            on_hash=keep,
            on_hash_missed=lambda version, reason: made.missed.append(version),
            share=self.sizes.share,
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
            header = source.header(version, norm)
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

    def run(self, steps: int, *, wait_for_all: bool, everywhere: Callable[[bool], bool] = lambda here: here) -> None:
        """Step at least so often, until all have converged where that is wanted, then end at a boundary.

        `everywhere` is the all-reduce of the job: every process takes the same way through this.
        """
        deadline = time.monotonic() + LIMIT_S
        threads = [threading.Thread(target=self._follow, args=(target, deadline)) for target in self.targets.values()]
        for thread in threads:
            thread.start()
        first, announced = self.version, None
        while time.monotonic() < deadline:
            converged = everywhere(all(target.converged.is_set() for target in self.targets.values()))
            if self.version >= first + steps and (converged or not wait_for_all):
                break
            if converged and announced is None:
                announced = self.version + 2
                for target in self.targets.values():
                    target.stream.announce(announced)
            self.compute()
            # Steps grow longer, so that targets catch up also where the machine has other things to do.
            threading.Event().wait(LONGER_STEPS * (time.monotonic() + LIMIT_S - deadline))
            self.step(self.rings)
            if self.version == announced:
                self.kept[self.version] = self.state()
        for target in self.targets.values():
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


def in_one_process(seed: int, optimizer: str, sizes: Sizes) -> tuple[Scene, MemoryNetwork]:
    """Both ranks, over the in-memory transport."""
    network = MemoryNetwork()
    endpoints = {rank: InMemoryTransport(f"rank{rank}", network) for rank in range(2)}
    return Scene(seed, optimizer, sizes, endpoints), network
