"""Checkpoints that worlds write in the background while they train on. Pure.

One is complete some time after its step, when all ranks of its world still live. It is published once one of them holds
a step lease, where no newer start has announced itself, as `liver_core.state` does it.
"""

from __future__ import annotations

from collections.abc import Iterable

from liver_core.handoff.generations import replacing
from liver_core.handoff.participant_events import RankStage
from service.simulation.world.parts import Rank, World
from service.simulation.world.surroundings import Surroundings

AGAIN_S = 0.2
USUAL_S, SLOW_S = 1.0, 25.0
SHARE_OF_SLOW = 0.5
STALLS_S, SHARE_THAT_STALLS = 20.0, 0.1
"""Now and then the disk stands still between the last look at the lease and the end."""


class Checkpoints:
    """Of all worlds of one run. One world writes one at a time."""

    def __init__(self, simulation: Surroundings) -> None:
        self.simulation = simulation
        self.random, self._disk = simulation.draws("checkpoints"), simulation.draws("disks that stand still")
        self.under_way: set[int] = set()
        self.published = 0
        self.version = 0  # of the newest
        self.announced: list[int] = []  # starts whose ranks have begun

    def announce(self, start: int) -> None:
        """A rank of this start has begun."""
        self.announced.append(start)

    def begin(self, world: World, ranks: list[Rank]) -> None:
        """A snapshot of the version that all ranks have just reached."""
        if world.generation in self.under_way:
            return
        self.under_way.add(world.generation)
        most_s = SLOW_S if self.random.random() < SHARE_OF_SLOW else USUAL_S
        self.simulation.clock.after(most_s * self.random.random(), self._publish, world, ranks, ranks[0].version)

    def publish_now(self, world: World, version: int) -> None:
        """Of a world that ends."""
        if not replacing(self.announced, world.generation):
            self._published(world, version)

    def _publish(self, world: World, ranks: list[Rank], version: int) -> None:
        sim = self.simulation
        if not all(rank.alive or rank.stage is RankStage.LEFT for rank in ranks):
            self.under_way.discard(world.generation)
        elif not may_publish(ranks):
            sim.clock.after(AGAIN_S, self._publish, world, ranks, version)
        else:
            stalls = self._disk.random() < SHARE_THAT_STALLS and sim.conditions.chance(1.0)
            sim.clock.after(STALLS_S * self._disk.random() if stalls else 0.0, self._rename, world, ranks[0], version)

    def _rename(self, world: World, first: Rank, version: int) -> None:
        """The first rank does it, after all have seen the lease."""
        self.under_way.discard(world.generation)
        if first.alive and not replacing(self.announced, world.generation):
            self._published(world, version)

    def _published(self, world: World, version: int) -> None:
        sim = self.simulation
        self.published += 1
        self.version = max(self.version, version)
        sim.observer.checkpoint_published(world.generation, version)
        sim.clock.after(sim.network.hop_s(), sim.service.checkpoint_published, world.generation, version, sim.clock.now)
        sim.note(f"generation {world.generation} publishes the checkpoint of version {version}")


def may_publish(ranks: Iterable[Rank]) -> bool:
    """Whether the job cannot have been started elsewhere."""
    return any(rank.has_lease for rank in ranks)
