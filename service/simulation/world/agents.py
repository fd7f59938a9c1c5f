"""The agent of a node with one slot: participant, leader, their journals, and the rank process. Pure.

An agent crashes between two effects; what was not journalled by then is gone. Its rank process outlives it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar, TypeVarTuple, assert_never

from agent.protocol.sync import NoticeFact
from liver_core.handoff import Order, Participant, ParticipantRecord, Phase, RankStage, Reason, Report, Stage
from liver_core.handoff.participant_events import (
    BEFORE_BOUNDARY,
    ENDED_UNSEEN,
    AbortRank,
    ClearReadyTag,
    OrderReceived,
    ParticipantEffect,
    ParticipantEvent,
    Persist,
    PrepareRank,
    QueryRank,
    RankDied,
    RankReported,
    RetireRank,
    SendReport,
    SetReadyTag,
    StartRank,
    StartReceived,
    StopRank,
    Tick,
    WorldReplaced,
)
from liver_core.layout import Member
from service.simulation.world.leading import Leading
from service.simulation.world.link import ServiceLink
from service.simulation.world.mirrors import Mirrors
from service.simulation.world.observer import Violation
from service.simulation.world.parts import Rank
from service.simulation.world.ranks import SimRank
from service.simulation.world.reports import Mirror
from service.simulation.world.whole import Whole

Ts = TypeVarTuple("Ts")
Effect = TypeVar("Effect")
TICK_S = 0.5
RARELY_S, LATE_S = 10.0, 0.05
ADOPTED_S = 0.5  # until an agent that is back has seen which processes have ended
"""Where no message is lost nothing has to be done again more often; deadlines are looked at when they are over."""
NEVER = 1_000_000


class SimAgent:
    """`journal` and what `link`, `leading` and `mirrors` keep are on its disk."""

    def __init__(self, simulation: Whole, member: Member, record: ParticipantRecord, *, incarnation: int = 1) -> None:
        self.simulation = simulation
        self.member = member
        self.name = member.node_id
        self.journal = record
        self.incarnation = incarnation
        self.up = True
        self.node_up = True
        self.stands_until = -math.inf
        self._waiting: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self.crash_after = NEVER
        self._due_s = math.inf  # its next tick
        self._is_stirred = False
        self.skew_s = simulation.conditions.skew_s()  # of this node's clock
        self.rank: SimRank | None = None
        self.given_up: list[SimRank] = []  # for starts
        self._ends_unseen: tuple[Rank, Reason] | None = None  # a process that has ended, and how
        self.ticked_for: ParticipantRecord | None = None
        self.participant = self._new_participant()
        self.mirrors = Mirrors(self, simulation)
        self.link = ServiceLink(self, simulation, self.mirrors)
        self.leading = Leading(self, simulation, self.mirrors, self.link)

    def begin(self) -> None:
        """It works from now on."""
        self._tick_at(self.simulation.clock.now + TICK_S * self.simulation.draw())
        self.link.begin()

    def _new_participant(self) -> Participant:
        sim = self.simulation
        return sim.machines.participant(
            job_id=sim.job_id, member=self.member, agent_incarnation=self.incarnation, record=self.journal
        )

    # What can be asked.

    @property
    def now(self) -> float:
        """What the clock of this node says."""
        return self.simulation.clock.now + self.skew_s

    @property
    def is_going(self) -> bool:
        """Whether its process is there, and is not stopped."""
        return self.up and self.simulation.clock.now >= self.stands_until

    def newest_world(self) -> int:
        """The highest generation that a rank of this node has stepped in, 0 if none has."""
        active, ended = self.journal.active, self.journal.ended
        worlds = (each.generation for each in ended if each.stage is Stage.ACTIVE)
        return max((*worlds, 0 if active is None else active.generation))

    def highest_known(self) -> int:
        """The greatest number that it knows as used."""
        own = self.leading.leader.own.used
        return max(own, self.participant.record.highest_generation, self.link.next_generation - 1)

    def take_notices(self, facts: tuple[NoticeFact, ...], asked_to_lead: bool = False) -> None:
        """Nodes will go, or stay, as another agent says."""
        self.does(self.leading.take_notices, facts, asked_to_lead)

    # What comes in.

    def take_relayed(self, mirrors: tuple[Mirror, ...]) -> None:
        """Another node, which will go, has led these."""
        self.does(self.mirrors.take_relayed, mirrors)
        self.does(self.link.sync_soon)

    def receive(self, message: Order | Report) -> None:
        """An order of a proposer, or a report for one."""
        self.does(self._receive, message)

    def _receive(self, message: Order | Report) -> None:
        if isinstance(message, Report):
            self.leading.take_report(message)
            return
        new = self.participant.record.promise is None and message.phase is Phase.PREPARE
        if new and self.simulation.conditions.takes_fault("order refused", self.member):
            message = replace(message, deadline_utc=self.now - 1.0)
        self.handle(OrderReceived(message))

    def does(self, action: Callable[[*Ts], None], *args: *Ts) -> None:
        """What its process does when it has its turn: not while it is gone, later while it is stopped, and in the order
        in which it came."""
        if not self.up:
            return
        if self.is_going and not self._waiting:
            action(*args)
            return
        if not self._waiting:
            self.simulation.clock.at(self.stands_until, self._does_what_waits, self.incarnation)
        self._waiting.append((action, args))

    def _does_what_waits(self, incarnation: int) -> None:
        if incarnation == self.incarnation and not self.is_going:
            self.simulation.clock.at(self.stands_until, self._does_what_waits, incarnation)
        while self._waiting and incarnation == self.incarnation and self.is_going:
            action, args = self._waiting.popleft()
            action(*args)

    def handle(self, event: ParticipantEvent) -> None:
        """One event for the participant."""
        if not self.up:
            return
        before, promise = self.participant.state, self.participant.record.promise
        effects = self.participant.handle(event, self.now)
        self.simulation.observer.participant(before, promise, event, self.participant.state)
        self.carry_out(effects, self._carry_out)
        self.stir()

    def carry_out(self, effects: Iterable[Effect], do: Callable[[Effect], None]) -> None:
        """One after the other, until the process is gone."""
        incarnation = self.incarnation
        for effect in effects:
            if self.crash_after <= 0:
                self.crash(0.2 + 3 * self.simulation.draw())
            if self.incarnation != incarnation:
                return
            self.crash_after -= 1
            do(effect)

    def _carry_out(self, effect: ParticipantEffect) -> None:
        sim = self.simulation
        match effect:
            case Persist(record=record):
                self.journal = record
                sim.observer.persisted(self.member, record, self.rank)
            case SendReport(to=to, report=report):
                sim.observer.report_spoken(report, self.journal, self.rank)
                sim.network.send(self.name, to, sim.agent(to).receive, report)
            case PrepareRank(order=order):
                rank = self.rank
                is_of_another = rank is not None and rank.alive and rank.world is None and rank.order != order
                if is_of_another or not self._is_busy():
                    self._spawn(order)
                self._command(SimRank.prepare, order)
            case StartRank(order=order):
                sim.launch(self, order)
            case SetReadyTag(handoff_id=handoff_id, plan_revision=revision, tag=tag):
                self._command(SimRank.permit, handoff_id, revision, tag)
            case ClearReadyTag(handoff_id=handoff_id):
                self._command(SimRank.withdraw, handoff_id)
            case AbortRank(handoff_id=handoff_id, reason=reason):
                if not self._command(SimRank.abort, handoff_id, reason):
                    sim.clock.after(0.05, self._no_process)
            case RetireRank(handoff_id=handoff_id):
                self._command(SimRank.retire, handoff_id)
            case StopRank(at_once=True):
                self._condemn()
                if (down_s := sim.conditions.dies_for_s("rank to be ended")) is not None:
                    self.crash(down_s)
                elif not self._command(SimRank.exit):
                    sim.clock.after(0.05, self._no_process)
            case StopRank():
                self._condemn()
                if sim.conditions.chance(0.5):
                    sim.repeat_old_orders(self)
                if not self._command(SimRank.stop):
                    sim.clock.after(0.05, self._no_process)
            case QueryRank():
                if sim.conditions.takes_fault("rank slow to answer", self.member):
                    return
                if not self._command(SimRank.status):
                    sim.clock.after(0.05, self._no_process)
            case _:
                assert_never(effect)

    def _is_busy(self) -> bool:
        """Whether there is a process, as far as it has seen."""
        return self.rank is not None and (self.rank.alive or self._has_ended_unseen(self.rank))

    def _has_ended_unseen(self, rank: Rank) -> bool:
        return self._ends_unseen is not None and self._ends_unseen[0] is rank

    def _spawn(self, order: Order) -> None:
        """A fresh process; one that was told to end before is killed and no longer counts."""
        if self.rank is not None and self.rank.alive:
            held = self.rank.order
            if held is not None and held.handoff_id == order.handoff_id:
                return  # The same newcomer takes a newer revision.
            self.rank.alive = False
        self.rank = SimRank(self.simulation, self.member)
        self.rank.belongs_to = order.generation

    def give_up(self, generation: int) -> None:
        """The service has started `generation`: what is older is over here."""
        self.handle(WorldReplaced(generation))
        if self.up:  # Else it died before that was on its disk.
            self.simulation.observer.start_heard(self.member, generation)
            self.leading.give_way(generation)

    def take_start(self, order: Order) -> None:
        """A start in which this node has a part."""
        self.handle(StartReceived(order))

    def start_process(self, order: Order) -> SimRank:
        """The process of a start. One that lingers is killed; it must not step any more."""
        before = self.rank
        if before is not None and before.alive and before.world is not None:
            raise Violation(f"H3: generation {order.generation} starts on {self.member} while its older rank steps")
        if before is not None:
            before.alive = False
            self.given_up.append(before)
        self.rank = SimRank(self.simulation, self.member)
        self.rank.belongs_to = order.generation
        return self.rank

    def _command(self, command: Callable[[SimRank, *Ts], None], *args: *Ts) -> bool:
        """To the rank, in order, also when the agent dies meanwhile. False when there is no process."""
        rank = self.rank
        if rank is None or not rank.alive:
            return False
        clock = self.simulation.clock
        rank.commands_until = max(rank.commands_until, clock.now + 0.01 + 0.05 * self.simulation.draw())
        clock.after(rank.commands_until - clock.now, self._deliver, rank, command, *args)
        return True

    def _deliver(self, rank: SimRank, command: Callable[[SimRank, *Ts], None], *args: *Ts) -> None:
        if rank.alive:
            command(rank, *args)

    def _no_process(self) -> None:
        if not self._is_busy():
            self.handle(RankDied(Reason("there is no such process", "adopt", self._rank_number(), cause=ENDED_UNSEEN)))

    def rank_reported(self, rank: Rank, event: RankReported) -> None:
        """Its rank has said where it stands."""
        if rank is self.rank:
            self.does(self._hears, rank, event)

    def _hears(self, rank: Rank, event: RankReported) -> None:
        gives_up = event.stage is RankStage.ABORTED and self.participant.is_awaited(event.reason)
        if event.stage is RankStage.BROKEN or gives_up:
            self._tell_death(rank, None)  # Taking the stage forgets which worlds it is of.
        self.handle(event)
        self.link.tell_rank()

    def rank_exits(self, rank: Rank, reason: Reason, seen_in_s: float) -> None:
        """A process has ended, which its agent sees after a while. One that is down sees it when it is back."""
        if rank is self.rank:
            self._ends_unseen = rank, reason
        self.simulation.clock.after(seen_in_s, self._rank_exited, rank, reason)

    def _rank_exited(self, rank: Rank, reason: Reason) -> None:
        if rank is self.rank:
            self.does(self._sees_end, rank, reason)

    def _sees_end(self, rank: Rank, reason: Reason) -> None:
        if rank is self.rank and self._has_ended_unseen(rank):
            self._ends_unseen = None
            self._tell_death(rank, reason)
            self.handle(RankDied(reason))
            self.link.sync_soon()

    def _condemn(self) -> None:
        if self.rank is not None:
            self.rank.is_condemned = True

    def end_rank(self) -> None:
        """The job is stopped or suspended: the rank ends at a boundary, with the others of its world."""
        self._condemn()
        self._command(SimRank.end_after_step)

    def _tell_death(self, rank: Rank, reason: Reason | None) -> None:
        """As `agent.peer.deaths`: agents say of their own ranks that they are dead, and tell the service too."""
        record = self.participant.record
        if (rank.is_condemned and not self.participant.is_awaited()) or rank.stage is RankStage.LEFT:
            return
        if record.active is not None and reason is not None:
            self.link.lose_rank(rank, record.active, reason)
        sim = self.simulation
        for roster, names in record.worlds_without(self.member):
            for name in names:
                if name != self.name:
                    sim.network.tell(self.name, name, sim.agent(name).hear_of_death, roster.generation, self.member)

    def hear_of_death(self, generation: int, member: Member) -> None:
        """Another agent has seen that its rank of this world is dead: the rank here is told."""
        if self.is_going:
            self._command(SimRank.hear_of_death, generation, member)

    def _rank_number(self) -> int:
        active = self.journal.active
        number = None if active is None else active.rank_of(self.member)
        order = self.journal.order
        if number is None and order is not None:
            number = order.target.rank_of(self.member)
        return number or 0

    def _tick(self, incarnation: int, due_s: float) -> None:
        """As the driver of a job, twice a second; or when something is due."""
        if incarnation != self.incarnation or due_s != self._due_s:
            return
        self._due_s = math.inf
        if self.simulation.conditions.polls:
            self._tick_at(self.simulation.clock.now + TICK_S * (0.9 + 0.2 * self.simulation.draw()))
        leading = self.leading
        parts = (self._tick_participant, leading.tick, self.link.consider, leading.consider, leading.relay)
        for part in parts if self.is_going else ():
            if self.incarnation == incarnation:
                part()
        if self.incarnation == incarnation:
            self.stir()

    def _tick_at(self, due_s: float) -> None:
        self._due_s = due_s
        self.simulation.clock.at(due_s, self._tick, self.incarnation, due_s)

    def stir(self) -> None:
        """Something has happened here: one that does not tick all the time does so when the next thing is due."""
        if not (self.simulation.conditions.polls or self._is_stirred):
            self._is_stirred = True
            self.simulation.clock.after(0.0, self._look_when_due)

    def _look_when_due(self) -> None:
        self._is_stirred = False
        if not self.up:
            return
        due_s = min(self._participant_due_s(), self.leading.due_s(), self.link.due_s())
        if due_s < self._due_s:
            self._tick_at(max(due_s, self.simulation.clock.now) + LATE_S)

    def _participant_due_s(self) -> float:
        order, state, now = self.participant.record.order, self.participant.state, self.simulation.clock.now
        if not self.participant.wants_ticks:
            return math.inf
        if state not in BEFORE_BOUNDARY or order is None or order.boundary_by(self.member) < now:
            return now + RARELY_S
        return min(now + RARELY_S, order.boundary_by(self.member) - self.skew_s)

    def _tick_participant(self) -> None:
        if self.participant.wants_ticks or self.ticked_for is not self.participant.record:
            self.ticked_for = self.participant.record  # Once more when it wants none: that must change nothing.
            self.handle(Tick())

    # How it ends and comes back.

    def stand_still(self, seconds: float) -> None:
        """Its process is stopped for so long."""
        self.simulation.note(f"{self.name} agent stands still")
        self.stands_until = max(self.stands_until, self.simulation.clock.now + seconds)

    def crash(self, restart_after_s: float) -> None:
        """The agent process dies; ranks go on. What was not journalled is gone."""
        if self.up:
            self.simulation.note(f"{self.name} agent down")
            self.up = False
            self.crash_after = NEVER
            self.incarnation += 1
            self.stands_until = -math.inf
            self._waiting.clear()
            self.link.lose_memory()
            self.simulation.clock.after(restart_after_s, self.restart)

    def restart(self) -> None:
        """The process is there again, with what its disk has."""
        if self.up or not self.node_up:
            return
        self.simulation.note(f"{self.name} agent up")
        self.up = True
        self.participant = self._new_participant()
        self.simulation.observer.agent_restored(self.member, self.participant.record)
        self.leading.restart()
        self.begin()
        if self._ends_unseen is not None:  # Its journal knows of the process.
            self.rank_exits(*self._ends_unseen, ADOPTED_S * self.simulation.draw())
        if (fact := self.simulation.announced.get(self.name)) is not None:
            self.take_notices((fact,))  # Its cloud still says so.
        self.carry_out(self.participant.start(self.now), self._carry_out)

    def node_dies(self) -> None:
        """The machine is gone; it may come back with its disk but without its processes."""
        self.crash(math.inf)
        self.node_up = False
        if self.rank is not None and self.rank.alive:
            world, self.rank.alive, self.rank.world = self.rank.world, False, None
            self._ends_unseen = self.rank, Reason("the machine has started again", "adopt", cause=ENDED_UNSEEN)
            if world is not None:
                world.misses_rank()

    def node_returns(self) -> None:
        """With its disk, and without its processes."""
        if not self.node_up:
            self.node_up = True
            self.restart()


def is_bound(agent: SimAgent) -> bool:
    """Whether the participant is bound by a handoff that is not over for it."""
    promise = agent.participant.record.promise
    return promise is not None and agent.participant.state.value != Stage.ACTIVE.value
