"""Worlds that the service starts, beside handoffs: its row of the job, what its agents tell it, and step leases. Pure.

The participant machine gives up the older world and starts the rank; when a start has to wait is decided by
`generations.unfenced`, who may step on by `agent.link.step_leases`, as in the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from agent.link.step_leases import ASK_SHARE, lease_for, may_go_on
from agent.peer.asking import HIGHEST_FIELD, answered_ago
from agent.protocol.sync import LEASE_SHARE
from liver_core.handoff import Order, ParticipantRecord, Reason, StoreAddress, generations, start_order
from liver_core.handoff.generations import StartWait
from liver_core.handoff.participant_events import StartReceived, WorldReplaced
from liver_core.layout import Member, ParallelLayout, Roster
from tests.simulation.truth import NOT_BEGUN

if TYPE_CHECKING:
    from tests.simulation.agents import SimAgent
    from tests.simulation.ranks import SimRank
    from tests.simulation.simulation import Simulation

LOST_AFTER_S = 16.0
"""The service may start the job elsewhere when a node is not heard for so long."""
LEASE_S = LEASE_SHARE * LOST_AFTER_S
SYNC_S, ANSWER_S = 0.5, 4.0
OVERDUE_S = 3.0
"""The service counts a node as not heard when its report is so late (`service.jobs.queries.OVERDUE_S`)."""
EXTENDED_S = 1.5
"""A lease of an agent that takes the service for away."""
START_WITHIN_S, GATHER_S, WANTED_S = 20.0, 12.0, 18.0
SHARE_OF_RUNS = 0.5


@dataclass(frozen=True, slots=True)
class Said:
    """What an agent reports: sent when, and from which record."""

    sent_at: float
    record: ParticipantRecord


class Starts:
    """The service, as far as it starts worlds."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.random = Random(f"starts of {simulation.seed}")
        self.newest: Order | None = None
        self.begun_at = 0.0
        self.wanted: tuple[Member, ...] | None = None
        self.wanted_at = 0.0
        self.said: dict[Member, Said] = {}
        self.worlds: dict[
            Roster, None
        ] = {}  # the newest that it has heard of or started, and handoffs' targets above it
        self.steps_from: dict[int, float] = {}  # of each start: before, its ranks step nowhere; a part of its orders
        self.row_waits_until = 0.0  # `steps_from_at` of the newest start's row
        self.listening_since = 0.0
        self.cut_off: dict[Member, bool] = {}  # from the service, and whether from everybody else too
        self.gatherings: dict[str, Gathering] = {}

    def begin(self) -> None:
        """Agents report from now on. In half of the runs a start that nobody needs comes, or nodes are cut off."""
        sim = self.simulation
        for member, agent in sim.agents.items():
            agent.peers = set(sim.plan.first)
            self.said[member] = Said(0.0, agent.journal)
            self._learn(agent.journal)
            sim.clock.after(SYNC_S * self.random.random(), self._sync, agent)
        if not sim.plan.intents or self.random.random() > SHARE_OF_RUNS:
            return
        if self.random.random() < 0.6:
            members = tuple(self.random.sample(sim.plan.members, 2))
            sim.clock.after(1.0 + 14.0 * self.random.random(), self.want, members)
        if self.random.random() < 0.4:
            sim.clock.after(14.0 * self.random.random(), self._cut_off, (self.random.choice(sim.plan.members),))
        if self.random.random() < 0.4:
            sim.clock.after(1.0 + 9.0 * self.random.random(), self._cut_off_world)

    def calm(self) -> None:
        """Everybody is heard again."""
        self.cut_off.clear()

    # The service.

    def want(self, members: tuple[Member, ...]) -> None:
        """The world of `members` is to start as soon as no older one may step any more. If that takes too long, it is
        decided anew: the older one is heard."""
        if self.wanted is None:
            self.simulation.note(f"the service wants to start on {' '.join(member.node_id for member in members)}")
            self.wanted, self.wanted_at = members, self.simulation.clock.now
            self._start_if_fenced()

    @property
    def is_busy(self) -> bool:
        """Whether a start waits, or is under way for not too long."""
        if self.wanted is not None:
            return True
        if self.newest is None or self.newest.generation in self.simulation.worlds:
            return False
        generation, members = self.newest.generation, self.newest.target.members
        lost = any(_has_lost(self.said[member].record, generation) for member in members)
        return not lost and self.simulation.clock.now < self.begun_at + START_WITHIN_S

    def _start_if_fenced(self) -> None:
        sim = self.simulation
        if self.wanted is None:
            return
        wait = self._wait(self.wanted)
        waits = wait.leased
        if waits and sim.clock.now > self.wanted_at + WANTED_S:
            sim.note(f"the start is not wanted any more, for {waits[0]} is heard")
            self.wanted = None
            return
        if sim.network.service_away or waits:
            sim.clock.after(SYNC_S, self._start_if_fenced)
            return
        members, self.wanted = self.wanted, None
        generation = generations.next_start(sim.job_row)
        sim.truth.started(generation)
        sim.job_row, self.begun_at = max(sim.job_row, generation), sim.clock.now
        sim.note(f"the service starts generation {generation}")
        sim.listing.drop_open(f"the job starts again as generation {generation}")
        self.newest = start_order(
            Roster(sim.job_id, generation, ParallelLayout(dp=len(members)), members),
            StoreAddress("127.0.0.1", 4_000),
            f"start-{generation}",
            deadline_utc=sim.clock.now + START_WITHIN_S,
            issued_at=sim.clock.now,
            proposer_id="service",
            cause="checkpoint",
            checkpoint=str(sim.truth.checkpoint_version),
        )
        self.steps_from[generation] = self.row_waits_until = sim.clock.now + wait.steps_after_s
        self.worlds = {self.newest.target: None}  # As the service's row of the job, it says nothing of older ones.
        for agent in sim.agents.values():
            sim.clock.after(self._delay_s(), self._wake, agent, self.newest)

    def _wait(self, target: tuple[Member, ...]) -> StartWait:
        """What a start on `target` waits for, by the product's rule."""
        said = self.said
        older = [
            world.members
            for world in self.worlds
            if not any(_is_over(said[member].record, world) for member in world.members)
        ]
        ages = [(member.node_id, self.simulation.clock.now - self._heard_at(member)) for member in said]
        lost_sight_of = [(name, ago_s) for name, ago_s in ages if ago_s >= OVERDUE_S]
        sim, until = self.simulation, self.row_waits_until
        if self.newest is not None and not self._has_stepped(self.newest.generation):
            until = max(until, self.begun_at + LEASE_S)
        waits_s = max(0.0, until - sim.clock.now)
        return generations.start_wait(
            older, target=target, lost_sight_of=lost_sight_of, lease_s=LEASE_S, waits_s=waits_s
        )

    def _has_stepped(self, generation: int) -> bool:
        """Then all of its ranks live, and each has begun after the older one on its node had ended."""
        worlds = self.simulation.worlds
        return generation in worlds and worlds[generation].era != NOT_BEGUN

    def _heard_at(self, member: Member) -> float:
        return max(self.said[member].sent_at, self.listening_since)

    def _learn(self, record: ParticipantRecord) -> None:
        """A handoff that was under way may have gone on unheard, so that its target stays known."""
        active, known = record.active, [world.generation for world in self.worlds]
        if active is not None and active.generation >= max(known, default=0):
            self.worlds = {active: None}
        target = None if record.order is None else record.order.target
        if target is not None and target.generation > min(known, default=0):
            self.worlds[target] = None

    # Reports and answers.

    def _sync(self, agent: SimAgent) -> None:
        """One exchange, over TCP: what gets lost comes late. Besides, what an agent does twice a second in any case: it
        considers its orders and renews its lease."""
        sim = self.simulation
        sim.clock.after(SYNC_S * (0.8 + 0.4 * self.random.random()), self._sync, agent)
        if not agent.up:
            return
        agent.consider(agent.orders)
        self._renew(agent)
        if sim.clock.now < agent.asks_until or not self._passes(agent.member):
            return
        agent.asks_until = sim.clock.now + ANSWER_S
        sent = Said(sim.clock.now, agent.journal)
        sim.clock.after(self._delay_s(), self._take_report, agent, sent, agent.incarnation)

    def _take_report(self, agent: SimAgent, said: Said, incarnation: int) -> None:
        if not self._passes(agent.member):
            return
        if said.sent_at >= self.said[agent.member].sent_at:
            self.said[agent.member] = said
        self._learn(said.record)
        self.simulation.clock.after(self._delay_s(), self._take_answer, agent, said, incarnation, self.newest)

    def _take_answer(self, agent: SimAgent, said: Said, incarnation: int, newest: Order | None) -> None:
        if not agent.up or agent.incarnation != incarnation or not self._passes(agent.member):
            return
        agent.asks_until = 0.0
        agent.heard_at, agent.there_at = max(agent.heard_at, said.sent_at), -math.inf
        agent.peers = {member for world in self.worlds for member in world.members}
        agent.consider(newest)
        self._renew(agent)

    def _wake(self, agent: SimAgent, newest: Order) -> None:
        """Agents wait for news with a request open: a start is told at once to those that are heard."""
        if agent.up and self._passes(agent.member):
            agent.consider(newest)

    def _passes(self, member: Member) -> bool:
        network = self.simulation.network
        if network.service_away:
            self.listening_since = self.simulation.clock.now
            return False
        return member not in self.cut_off

    def _delay_s(self) -> float:
        return 0.01 + self.simulation.network.delay_s * self.random.random()

    def _cut_off(self, members: tuple[Member, ...]) -> None:
        if not self.simulation.chaos:
            return
        everybody, lasts_s = self.random.random() < 0.5, 6.0 + 18.0 * self.random.random()
        for member in members:
            self.cut(member, everybody=everybody)
            self.simulation.clock.after(lasts_s, self._heard_again, member)

    def cut(self, member: Member, *, everybody: bool) -> None:
        """Until further notice the service does not hear this node, nor, if `everybody`, do other agents."""
        self.simulation.note(f"{member.node_id} is cut off from {'everybody' if everybody else 'the service'}")
        self.cut_off[member] = everybody

    def _cut_off_world(self) -> None:
        """All nodes of the newest world, which steps on; the service starts the job on others as soon as it may."""
        sim = self.simulation
        world = sim.worlds[max(sim.worlds)].roster.members
        others = tuple(member for member in sim.plan.members if member not in world)
        self._cut_off(world)
        if len(others) >= 2:
            sim.clock.after(3.0 * self.random.random(), self.want, others[:2])

    def crashes_now(self) -> bool:
        """Whether an agent dies where it was to end a rank for a start."""
        return self.simulation.chaos and self.random.random() < 0.1

    def _heard_again(self, member: Member) -> None:
        self.cut_off.pop(member, None)

    # Step leases: as StepLeases.renew.

    def _renew(self, agent: SimAgent) -> None:
        sim = self.simulation
        now, recent_s = sim.clock.now, ASK_SHARE * LOST_AFTER_S
        until = agent.heard_at + LEASE_S
        if now - agent.heard_at > recent_s:
            own = 0 if agent.orders is None else agent.orders.generation
            asked = [other for other in sim.agents.values() if self._answers(other, agent)]
            known = [answered_ago(_status(other, now), wanted=own) for other in asked]
            reaches = bool(known) or not self.cut_off.get(agent.member, False)
            agent.there_at = max(agent.there_at, *(now - ago for ago in known), -math.inf)
            if may_go_on(is_there=now - agent.there_at <= recent_s, reaches_anybody=reaches):
                until = now + EXTENDED_S
        rank = agent.rank
        if rank is None or not rank.alive:
            return
        wanted = 0 if agent.orders is None else agent.orders.generation
        steps_from = self.steps_from.get(wanted)
        lease = lease_for(rank.belongs_to, wanted=wanted, steps_from=steps_from, until=until, at=now, now=now)
        if lease is not None:
            rank.leased_until = lease

    def _answers(self, other: SimAgent, asking: SimAgent) -> bool:
        alone = self.cut_off.get(other.member, False) or self.cut_off.get(asking.member, False)
        return other is not asking and other.up and not alone

    # Ranks.

    def launch(self, agent: SimAgent, order: Order) -> None:
        """The rank of a start builds, and meets the others."""
        rank = agent.start_process(order)
        rank.leased_until = 0.0  # It has a lease when its agent gives it one.
        self.simulation.checkpoints.announced.append(order.generation)
        self.simulation.truth.rank_starts(agent.member, order.generation, agent.journal)
        self.simulation.clock.after(self.simulation.build_s(agent.member), self._meet, rank, order)

    def _meet(self, rank: SimRank, order: Order) -> None:
        if rank.alive:
            self.gatherings.setdefault(order.handoff_id, Gathering(self, order)).enter(rank)


class Gathering:
    """Where the ranks of one start meet, in its store: all of them go on together or nobody does."""

    def __init__(self, starts: Starts, order: Order) -> None:
        self.starts = starts
        self.order = order
        self.ranks: dict[Member, SimRank] = {}
        starts.simulation.clock.after(GATHER_S, self._give_up)
        self.is_over = False

    def enter(self, rank: SimRank) -> None:
        """All have come when the last has, and lives."""
        self.ranks[rank.member] = rank
        complete = len(self.ranks) == len(self.order.target.members)
        if self.is_over or not complete or not all(each.alive for each in self.ranks.values()):
            return
        self.is_over = True
        world = self.starts.simulation.begin_world(self.order.target)
        for each in self.ranks.values():
            each.begin_training(world, int(self.order.checkpoint))

    def _give_up(self) -> None:
        if not self.is_over:
            self.is_over = True
            for each in self.ranks.values():
                each.break_down(Reason("not all ranks of the start came", "start", 0))


def _is_over(record: ParticipantRecord, world: Roster) -> bool:
    """Whether the record shows that its member's rank of `world` has ended, or will never begin."""
    if record.highest_generation < world.generation:
        return False
    bound = record.promise is not None and record.promise.generation <= world.generation
    steps = record.active is not None and record.active.generation <= world.generation
    begins = record.start is not None and record.start.generation <= world.generation
    return not bound and not steps and not begins


def _has_lost(record: ParticipantRecord, generation: int) -> bool:
    """Whether the record shows that its member's rank of this start is gone."""
    return record.highest_generation >= generation and record.active is None


def _status(agent: SimAgent, now: float) -> dict[str, float | int]:
    """What an agent tells others of itself."""
    return {"service_heard_s": now - agent.heard_at, HIGHEST_FIELD: agent.participant.record.highest_generation}


def consider(agent: SimAgent, order: Order | None) -> None:
    """What the product's `Births` does twice a second with the orders that the agent has."""
    if order is None:
        return
    agent.handle(WorldReplaced(order.generation))
    if agent.up:  # Else it died before that was on its disk.
        agent.simulation.truth.start_heard(agent.member, order.generation)
    if agent.member in order.target.members:
        agent.handle(StartReceived(order))
