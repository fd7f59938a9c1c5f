"""Simulated hosts: agents with a participant and its journal, and hosts of a proposer. Pure.

They crash between two effects; what was not journalled by then is gone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from liver_core.handoff import (
    Order,
    Participant,
    ParticipantRecord,
    Phase,
    Proposer,
    ProposerRecord,
    Reason,
    Report,
    Stage,
)
from liver_core.handoff.participant_events import (
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
    StopRank,
    Tick,
)
from liver_core.handoff.proposer_events import (
    HandoffEnded,
    MemberLost,
    PersistProposal,
    ProposerEffect,
    ProposerEvent,
    Refused,
    ReportReceived,
    SendOrder,
)
from liver_core.layout import Member
from tests.simulation import starts
from tests.simulation.listing import Mirrors
from tests.simulation.ranks import SimRank
from tests.simulation.truth import Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

PARTICIPANT_TICK_S = 2.0
PROPOSER_TICK_S = 1.0
NEVER = 1_000_000


class SimAgent:
    """One node with one slot: the participant, its journal and the rank process, which outlives the agent."""

    def __init__(self, simulation: Simulation, member: Member, record: ParticipantRecord) -> None:
        self.simulation = simulation
        self.member = member
        self.name = member.node_id
        self.journal = record
        self.incarnation = 1
        self.up = True
        self.node_up = True
        self.crash_after = NEVER
        self.ticking = False
        self.skew_s = simulation.skew_s()  # of this node's clock
        self.rank: SimRank | None = None
        self.given_up: list[SimRank] = []  # for starts
        self.orders: Order | None = None  # the newest start that it has heard of; on its disk
        self.heard_at = 0.0  # when the last report was sent that the service has answered
        self.there_at = -math.inf  # when it was there for others, by what they have told since then
        self.peers: set[Member] = set()  # whom that answer named
        self.asks_until = 0.0
        self.participant = self._new_participant()

    def _new_participant(self) -> Participant:
        sim = self.simulation
        return sim.machines.participant(
            job_id=sim.job_id, member=self.member, agent_incarnation=self.incarnation, record=self.journal
        )

    @property
    def now(self) -> float:
        """What the clock of this node says."""
        return self.simulation.clock.now + self.skew_s

    def receive(self, order: Order | Report) -> None:
        """An order arrived over the network."""
        assert isinstance(order, Order)
        if self.up:
            new = self.participant.record.promise is None and order.phase is Phase.PREPARE
            if new and self.simulation.takes_fault("order refused", self.member):
                order = replace(order, deadline_utc=self.now - 1.0)
            self.handle(OrderReceived(order))

    def handle(self, event: ParticipantEvent) -> None:
        if not self.up:
            return
        before, promise = self.participant.state, self.participant.record.promise
        effects = self.participant.handle(event, self.now)
        self.simulation.coverage.participant(before, promise, event, self.participant.state)
        self.carry_out(effects)

    def carry_out(self, effects: tuple[ParticipantEffect, ...]) -> None:
        for effect in effects:
            if self.crash_after <= 0:
                self.crash(0.2 + 3 * self.simulation.random.random())
                return
            self.crash_after -= 1
            self._carry_out(effect)
        if self.participant.wants_ticks and not self.ticking:
            self.ticking = True
            self.simulation.clock.after(PARTICIPANT_TICK_S, self._tick, self.incarnation)

    def _carry_out(self, effect: ParticipantEffect) -> None:
        sim = self.simulation
        match effect:
            case Persist(record=record):
                self.journal = record
                sim.truth.persisted(self.member, record, self.rank)
            case SendReport(to=to, report=report):
                sim.truth.report_spoken(report, self.journal, self.rank)
                sim.network.send(self.name, to, sim.hosts[to].receive, report)
            case PrepareRank(order=order):
                if self.rank is None or not self.rank.alive or (self.rank.world is None and self.rank.order != order):
                    self._spawn(order)
                self._command("prepare", order)
            case StartRank(order=order):
                sim.starts.launch(self, order)
            case SetReadyTag(handoff_id=handoff_id, plan_revision=revision, tag=tag):
                self._command("permit", handoff_id, revision, tag)
            case ClearReadyTag(handoff_id=handoff_id):
                self._command("withdraw", handoff_id)
            case AbortRank(handoff_id=handoff_id, reason=reason):
                if not self._command("abort", handoff_id, reason):
                    sim.clock.after(0.05, self._no_process)
            case RetireRank(handoff_id=handoff_id):
                self._command("retire", handoff_id)
            case StopRank(at_once=True):
                if sim.starts.crashes_now():
                    self.crash(0.2 + 2.0 * sim.starts.random.random())
                elif not self._command("exit"):
                    sim.clock.after(0.05, self._no_process)
            case StopRank():
                if sim.chance(0.5):
                    sim.repeat_old_orders(self)
                if not self._command("stop"):
                    sim.clock.after(0.05, self._no_process)
            case QueryRank():
                if sim.takes_fault("rank slow to answer", self.member):
                    return
                if not self._command("status"):
                    sim.clock.after(0.05, self._no_process)
            case _:
                assert_never(effect)

    def _spawn(self, order: Order) -> None:
        """A fresh process; one that was told to end before is killed and no longer counts."""
        if self.rank is not None and self.rank.alive:
            held = self.rank.order
            if held is not None and held.handoff_id == order.handoff_id:
                return  # The same newcomer takes a newer revision.
            self.rank.alive = False
        self.rank = SimRank(self.simulation, self.member)
        self.rank.belongs_to = order.generation

    def consider(self, orders: Order | None) -> None:
        """The newest start that the service tells of."""
        self.orders = orders or self.orders
        starts.consider(self, self.orders)

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

    def _command(self, name: str, *args: object) -> bool:
        """To the rank, in order, also when the agent dies meanwhile. False when there is no process."""
        rank = self.rank
        if rank is None or not rank.alive:
            return False
        clock = self.simulation.clock
        rank.commands_until = max(rank.commands_until, clock.now + 0.01 + 0.05 * self.simulation.random.random())
        clock.after(rank.commands_until - clock.now, self._deliver, rank, name, args)
        return True

    def _deliver(self, rank: SimRank, name: str, args: tuple[object, ...]) -> None:
        if rank.alive:
            getattr(rank, name)(*args)

    def _no_process(self) -> None:
        if self.rank is None or not self.rank.alive:
            self.handle(RankDied(Reason("there is no such process", "supervise", self._rank_number())))

    def rank_reported(self, rank: SimRank, event: RankReported) -> None:
        if rank is self.rank:
            self.handle(event)

    def rank_exited(self, rank: SimRank) -> None:
        if rank is self.rank:
            self.handle(RankDied(Reason("the process ended", "supervise", self._rank_number())))

    def _rank_number(self) -> int:
        active = self.journal.active
        number = None if active is None else active.rank_of(self.member)
        order = self.journal.order
        if number is None and order is not None:
            number = order.target.rank_of(self.member)
        return number or 0

    def _tick(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        self.ticking = False
        self.handle(Tick())  # Once more when it wants none: that must change nothing.

    def crash(self, restart_after_s: float) -> None:
        """The agent process dies; ranks go on. What was not journalled is gone."""
        if self.up:
            self.simulation.note(f"{self.name} agent down")
            self.up = False
            self.ticking = False
            self.crash_after = NEVER
            self.incarnation += 1
            self.there_at = -math.inf
            self.simulation.clock.after(restart_after_s, self.restart)

    def restart(self) -> None:
        if self.up or not self.node_up:
            return
        self.simulation.note(f"{self.name} agent up")
        self.up = True
        self.participant = self._new_participant()
        self.simulation.truth.agent_restored(self.member, self.participant.record)
        self.carry_out(self.participant.start(self.now))

    def node_dies(self) -> None:
        """The machine is gone; it may come back with its disk but without its processes."""
        self.crash(1e9)
        self.node_up = False
        if self.rank is not None and self.rank.alive:
            self.rank.alive = False
            self.rank.world = None

    def node_returns(self) -> None:
        if not self.node_up:
            self.node_up = True
            self.restart()


class ProposerHost:
    """Where a proposer lives: an agent that leads, or the service."""

    def __init__(self, simulation: Simulation, name: str, record: ProposerRecord) -> None:
        self.simulation = simulation
        self.name = name
        self.journal = record
        self.incarnation = 1
        self.up = True
        self.crash_after = NEVER
        self.ticking = False
        self.gone = False  # never comes back
        self.skew_s = simulation.skew_s()
        self.proposer = self._new_proposer()
        self.mirrors = Mirrors(simulation, name)

    def _new_proposer(self) -> Proposer:
        sim = self.simulation
        return sim.machines.proposer(
            job_id=sim.job_id, proposer_id=self.name, agent_incarnation=self.incarnation, record=self.journal
        )

    def receive(self, report: Order | Report) -> None:
        assert isinstance(report, Report)
        if self.up:
            self.handle(ReportReceived(report))

    def lose(self, member: Member, text: str) -> None:
        self.handle(MemberLost(member, Reason(text, "supervise")))

    def handle(self, event: ProposerEvent) -> None:
        if not self.up:
            return
        before = self.proposer.state
        effects = self.proposer.handle(event, self.simulation.clock.now + self.skew_s)
        self.simulation.coverage.proposer(before, event)
        for effect in effects:
            if self.crash_after <= 0:
                self.crash(0.2 + 4 * self.simulation.random.random())
                return
            self.crash_after -= 1
            self._carry_out(effect)
        self._arm()

    def _arm(self) -> None:
        if self.proposer.record.proposal is not None and not self.ticking:
            self.ticking = True
            self.simulation.clock.after(PROPOSER_TICK_S, self._tick, self.incarnation)

    def _carry_out(self, effect: ProposerEffect) -> None:
        sim = self.simulation
        match effect:
            case PersistProposal(record=record):
                opens = record.proposal is not None and record.proposal.handoff_id not in self.mirrors.kept
                if opens:
                    self.mirrors.say_record(record)  # First: one that is killed in between must still tell of it.
                    if sim.listing.crashes_now():
                        self.crash_after = -1
                        return
                    assert record.proposal is not None
                    sim.truth.attempts[record.proposal.handoff_id] = self.name
                if record.phase is not self.journal.phase or record.proposal is not self.journal.proposal:
                    sim.note(_about(self.name, record))
                self.journal = record
                if not opens:
                    self.mirrors.say_record(record)
            case SendOrder(member=member, order=order):
                sim.truth.order_spoken(order, self.journal)
                sim.remember(order)
                sim.network.send(self.name, member.node_id, sim.agents[member].receive, order)
            case HandoffEnded():
                sim.note(f"{effect.handoff_id} ended {effect.stage} ({effect.decision}) {effect.reason}")
                sim.truth.handoff_ended(effect)
                if sim.listing.crashes_now():
                    self.crash(0.2 + 4.0 * sim.listing.random.random())
                else:
                    self.mirrors.say_ended(effect)
            case Refused():
                sim.note(f"{self.name} refused: {effect.reason}")
                sim.refused += 1
            case _:
                assert_never(effect)

    def _tick(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        self.ticking = False
        self.handle(Tick())  # Once more after the end: that must change nothing.

    def crash(self, restart_after_s: float) -> None:
        if self.up:
            self.up = False
            self.ticking = False
            self.crash_after = NEVER
            self.incarnation += 1
            self.mirrors.lose_memory()
            self.simulation.clock.after(restart_after_s, self.restart)

    def restart(self) -> None:
        if not self.up:
            self.up = True
            self.proposer = self._new_proposer()
            self.mirrors.restore(self.journal)
            self._arm()

    @property
    def busy(self) -> bool:
        return not self.gone and (not self.up or self.proposer.record.proposal is not None)


def _about(name: str, record: ProposerRecord) -> str:
    if record.proposal is None:
        return f"{name} has no handoff open"
    why = "" if record.reason is None else f": {record.reason}"
    return f"{name}: {record.proposal.handoff_id} generation {record.generation} {record.phase}{why}"


def is_bound(agent: SimAgent) -> bool:
    """Whether the participant is bound by a handoff that is not over for it."""
    promise = agent.participant.record.promise
    return promise is not None and agent.participant.state.value != Stage.ACTIVE.value
