"""The leader of one agent: what it hears, and how what it decides is carried out. Pure.

As `agent.driver.lead` and `agent.driver.notice_response`. Who leads, when again, and what another notice does to what
is open is decided by the product's machine; the plan comes from the planner of the world.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVarTuple, assert_never

from agent.protocol.notice_life import Notices, heard_until
from agent.protocol.sync import NoticeFact
from liver_core.handoff import ProposerRecord, Reason, Report, StoreAddress
from liver_core.handoff.leader_events import (
    AskedToLead,
    AskPace,
    AskPeers,
    CallOffSuspension,
    Decline,
    Forwarded,
    ForwardNotices,
    HandoffAmended,
    HandoffOpened,
    HandoffSuperseded,
    LeaderEffect,
    LeaderEvent,
    Loss,
    LossesKnown,
    OwnNoticeWithdrawn,
    PeersAnswered,
    PeersUnreachable,
    Promised,
    Purpose,
    Say,
    StartStore,
    StoreDied,
    StoreFailed,
    StoreReady,
    SuspendAlone,
    TellWithdrawal,
    WorldStarted,
)
from liver_core.handoff.own_handoffs import Led
from liver_core.handoff.participant_events import ParticipantState
from liver_core.handoff.proposer_events import (
    Cancel,
    HandoffEnded,
    Open,
    PersistProposal,
    Proposal,
    Refused,
    ReportReceived,
    SendOrder,
    Tick,
)
from liver_core.layout import Roster
from service.simulation.world.link import ServiceLink
from service.simulation.world.mirrors import Mirrors
from service.simulation.world.moments import seconds_at, utc
from service.simulation.world.parts import Agent
from service.simulation.world.whole import Whole

Ts = TypeVarTuple("Ts")

STORE_S, ASK_S, MISSED_S = 0.1, 0.05, 1.0
"""Until a store listens; until others have answered; until an agent that is not reached counts as missed."""
LOOK_S, RARELY_S = 1.0, 10.0
"""How often it looks while nodes go or are not reached, and while it leads, where it does not look all the time."""
UNREACHED_TRIES_S = 1.0
"""An agent that does not answer for so long is not reached: it is tried about twice a second."""


class Leading:
    """Of one agent. `proposer_record` is on its disk; all else is gone when its process is."""

    def __init__(self, agent: Agent, simulation: Whole, mirrors: Mirrors, link: ServiceLink) -> None:
        self._agent, self._sim, self._mirrors, self._link = agent, simulation, mirrors, link
        self.proposer_record = ProposerRecord()
        self._begin(None)

    def _begin(self, led: Led | None) -> None:
        agent, sim = self._agent, self._sim
        self.leader = sim.machines.leader(
            job_id=sim.job_id,
            node_id=agent.name,
            agent_incarnation=agent.incarnation,
            planner=sim.planner(agent),
            new_id=sim.new_handoff_id,
            record=self.proposer_record,
            led=led,
        )
        sim.observer.leader_begins(agent, self.leader)
        self.notices = Notices()
        self._is_news = self._knew_nothing = False
        self._paces: set[int] = set()
        self._unreached: dict[str, float] = {}
        self._unkept: HandoffOpened | None = None
        self._passed = False

    def restart(self) -> None:
        """Only what the disk has is left."""
        self._mirrors.restart(self.proposer_record)
        self._begin(self._mirrors.led(self.proposer_record))

    @property
    def is_idle(self) -> bool:
        """Whether no handoff is open or being opened here."""
        return self.leader.own.is_idle

    # What it hears.

    def take_report(self, report: Report) -> None:
        """A participant reported. What that changes for the service is told at once."""
        self.hear(ReportReceived(report))
        tally = self.leader.own.proposer.tally
        if self.proposer_record.proposal is not None and tally.boundary_passed() and not self._passed:
            self._passed = True
            self._say_open()

    def take_notice(self, fact: NoticeFact, *, asked_to_lead: bool = False) -> None:
        """A node will go, or stays. `asked_to_lead`: another agent says so since it is this one's turn."""
        if asked_to_lead and fact.withdrawn_utc is None:
            self.hear(AskedToLead())
        notice = self.notices.take(fact)
        if notice is None:
            return
        self._is_news = True
        self._link.note(notice)
        if notice.withdrawn_utc is not None and notice.node_id == self._agent.name:
            self.hear(OwnNoticeWithdrawn())

    def take_notices(self, facts: tuple[NoticeFact, ...], asked_to_lead: bool = False) -> None:
        """The same of several, answered as soon as they are heard."""
        for fact in facts:
            self.take_notice(fact, asked_to_lead=asked_to_lead)
        self.consider()

    def tick(self) -> None:
        """About twice a second."""
        if self.leader.own.proposer.record.proposal is None:
            self._unreached.clear()
            return
        self._mirrors.say_stale(self.leader.own)
        self.hear(PeersUnreachable(self._look_for_peers()))
        self.hear(Tick())

    def due_s(self) -> float:
        """When time alone may change what it does: it leads, tries again after a while, or is not bound while a node of
        the job's world will go."""
        agent, now = self._agent, self._sim.clock.now
        if not self.is_idle:
            return self._lead_due_s()
        due_s = self.leader.next_deadline - agent.skew_s
        due_s = due_s if due_s > now else math.inf
        if agent.participant.record.promise is not None or not self.notices.all():
            return due_s
        going, world = {fact.node_id for fact in self.notices.moving(utc(agent.now))}, self.world()
        is_touched = world is not None and not going.isdisjoint(world.node_ids())
        return min(due_s, now + LOOK_S) if is_touched else due_s

    def _lead_due_s(self) -> float:
        """Peers are asked all the time, but nothing comes of it while all are reached."""
        sim, now, proposal = self._sim, self._sim.clock.now, self.leader.own.proposer.record.proposal
        if proposal is None:
            return now + LOOK_S
        names = {member.node_id for member in (*proposal.source.members, *proposal.members)}
        away = {name for name in names if not sim.network.reaches(self._agent.name, name)}
        if away:
            return now + LOOK_S if away <= self._unreached.keys() else now
        deadline_s = proposal.deadline_utc - self._agent.skew_s
        return min(now + RARELY_S, deadline_s) if deadline_s > now else now + RARELY_S

    def relay(self) -> None:
        """What waits for the service is told to those that stay."""
        if not self._mirrors.waiting:
            return
        rosters = [mirror.target for mirror in self._mirrors.waiting.values()]
        rosters += [each for each in (self._link.roster, self.world()) if each is not None]
        going = {fact.node_id for fact in self.notices.moving(utc(self._agent.now))}
        names = dict.fromkeys(name for roster in rosters for name in roster.node_ids() if name not in going)
        self._mirrors.relay(names)

    def give_way(self, started: int) -> None:
        """The service has started this world."""
        self.hear(WorldStarted(started))

    def cancel(self, reason: Reason) -> None:
        """No handoff is wanted any more."""
        self.hear(Cancel(reason))

    def store_died(self, generation: int) -> None:
        """The store that this node keeps of a generation died."""
        self.hear(StoreDied(generation))

    def consider(self) -> None:
        """What is due now, given what is known."""
        agent = self._agent
        if not agent.is_going or not self._link.runs or self._knows_nothing():
            return
        self.notices.drop_ended(utc(agent.now))
        world = self.world()
        if world is None:
            return
        known, self._is_news = self._known(world), False
        self.hear(known)
        wanted = self._link.wanted
        if wanted is not None and agent.is_going:
            self.hear(wanted)

    def _knows_nothing(self) -> bool:
        """Whether there is nothing to look at, nor was there when it looked last: that would change nothing."""
        idle = self.is_idle and not self._is_news and self._link.wanted is None
        nothing = idle and not self.notices.all()
        knew_nothing, self._knew_nothing = self._knew_nothing, nothing
        return nothing and knew_nothing

    def world(self) -> Roster | None:
        """The job's world, as this node knows it: where every member goes, a node without a rank leads."""
        agent = self._agent
        active, told = agent.journal.active, self._link.roster
        if active is None and told is not None and agent.name not in told.node_ids():
            return told if agent.newest_world() <= told.generation else None
        return active

    def _known(self, world: Roster) -> LossesKnown:
        agent = self._agent
        now, record = utc(agent.now), agent.participant.record
        promised = record.order if agent.participant.state is not ParticipantState.ACTIVE else None
        moving: dict[str, list[NoticeFact]] = {}
        for fact in self.notices.moving(now):
            moving.setdefault(fact.node_id, []).append(fact)
        return LossesKnown(
            world=world,
            losses=tuple(self._loss(name, facts) for name, facts in moving.items()),
            barred=self.notices.barred(now),
            promised=promised and Promised(promised.proposer_id, frozenset(promised.target.node_ids())),
            is_starting=self._is_starting(),
            knows_pace=agent.rank is not None or world.generation in self._paces,
            used=max(self._link.next_generation - 1, record.highest_generation),
            news=self._is_news,
        )

    def _loss(self, name: str, facts: list[NoticeFact]) -> Loss:
        """When it was heard first, and what its notices leave of time."""
        ends = [(seconds_at(fact.first_seen_utc), fact.deadline_utc) for fact in facts]
        spans = [(heard, seconds_at(at)) for heard, at in ends if at is not None]
        return Loss(
            name,
            heard_at=min(heard for heard, _ in spans),
            safe_by=min(self._sim.conditions.safe_by(heard, ends) for heard, ends in spans),
            ends_at=min(ends for _, ends in spans),
            late_until=seconds_at(min(map(heard_until, facts))),
        )

    def _is_starting(self) -> bool:
        """Whether its rank has yet to make the first step of the world that it was started for."""
        agent = self._agent
        if agent.journal.active is None or agent.rank is None:
            return False
        world = self._sim.worlds.get(agent.journal.active.generation)
        return world is None or not world.is_begun

    # The machine.

    def hear(self, event: LeaderEvent) -> None:
        """One event, unless the process is gone."""
        agent = self._agent
        if not agent.is_going:
            return
        own = self.leader.own
        phase, led = own.proposer.record.phase, own.led
        effects = self.leader.handle(event, agent.now)
        self._sim.observer.leader(agent, event, effects)
        agent.carry_out(effects, self.carry_out_one)
        news = own.proposer.record.phase is not phase or (led is not None and own.led != led)
        if news and agent.is_going and own.proposer.record.proposal is not None:
            self._say_open()
        agent.stir()

    def _say_open(self) -> None:
        self._mirrors.say_open(self.leader.own)

    def carry_out_one(self, effect: LeaderEffect) -> None:
        agent, sim = self._agent, self._sim
        match effect:
            case AskPeers(generation=generation, nodes=nodes):
                self._after(ASK_S + sim.network.hop_s(), self._asked, generation, nodes)
            case StartStore(generation=generation):
                self._after(STORE_S + sim.network.hop_s(), self._store_is_up, generation)
            case HandoffOpened():
                self._unkept, self._passed = effect, False
            case HandoffAmended() | HandoffSuperseded():
                pass  # What follows from it is told by the next mirror.
            case PersistProposal(record=record):
                self._keep(record)
            case SendOrder(member=member, order=order):
                sim.observer.order_spoken(order, self.proposer_record)
                sim.remember(order)
                sim.network.send(agent.name, member.node_id, sim.agents[member].receive, order)
            case HandoffEnded():
                sim.note(f"{effect.handoff_id} ended {effect.stage} ({effect.decision}) {effect.reason}")
                sim.observer.handoff_ended(effect)
                if (down_s := sim.conditions.dies_for_s("end kept")) is not None:
                    agent.crash(down_s)
                    return
                self._mirrors.say_ended(effect)
                self._link.sync_soon()
            case Decline(handoff_id=handoff_id, reason=reason):
                sim.note(f"{agent.name} declines {handoff_id}: {reason}")
                self._link.decline(handoff_id, reason)
            case Say(text=text, about=about):
                sim.observer.said(agent, text, about)
            case Refused(reason=reason):
                sim.note(f"{agent.name} refused: {reason}")
            case ForwardNotices(to=to, about=about):
                self._forward(to, about)
            case TellWithdrawal(to=to):
                facts = tuple(fact for fact in self.notices.all() if fact.node_id == agent.name)
                for name in to:
                    sim.network.tell(agent.name, name, sim.agent(name).take_notices, facts)
            case AskPace(world=world):
                self._paces.add(world.generation)
            case SuspendAlone() | CallOffSuspension():
                pass  # Here only the service suspends a job: LossesKnown.may_suspend is never set.
            case _:
                assert_never(effect)

    def _keep(self, record: ProposerRecord) -> None:
        """Write the record, together with the first mirror of a handoff that is opened."""
        agent, sim, opened = self._agent, self._sim, self._unkept
        self._unkept = None
        if opened is not None:
            sim.observer.opened(opened.proposal.handoff_id, agent.name)
            self._mirrors.opens(opened.proposal, opened.generation, opened.purpose)
            self._link.sync_soon()
            if (down_s := sim.conditions.dies_for_s("handoff opened")) is not None:
                agent.crash(down_s)
                return
        if record.phase is not self.proposer_record.phase or record.proposal is not self.proposer_record.proposal:
            sim.note(_about(agent.name, record))
        self.proposer_record = record

    def open_anyway(self, proposal: Proposal) -> None:
        """Open it, whatever the leader would say: an agent with old knowledge, or a person who plays one."""
        own = self.leader.own
        highest = max(own.used, self._agent.highest_known())
        own.proposer.record = replace(own.proposer.record, highest_generation=highest)
        effects = own.proposer.handle(Open(proposal), self._agent.now)
        if own.proposer.record.proposal == proposal:
            leaving = frozenset(proposal.source.node_ids()) - {member.node_id for member in proposal.members}
            own.led = Led(leaving, self._agent.now)
            opened = HandoffOpened(proposal, own.proposer.record.generation, Purpose(leaving, None, "it was asked for"))
            effects = (opened, *effects)
        self._agent.carry_out(effects, self.carry_out_one)

    # Other agents.

    def _asked(self, generation: int, nodes: tuple[str, ...]) -> None:
        """Who of these is reached has told which numbers it knows. As `agent.peer.asking`: whoever hears more than half
        of the others is not cut off alone."""
        agent, sim = self._agent, self._sim
        others = sorted(set(nodes) - {agent.name})
        heard = [name for name in others if sim.network.reaches(agent.name, name)]
        highest = max((sim.agent(name).highest_known() for name in heard), default=0)
        few = len(others) >= 2 and len(heard) < (len(others) + 1) // 2
        too_few = f"{agent.name} may be cut off" if few else ""
        answered = PeersAnswered(generation, too_few, highest if len(others) > 1 else 0)
        if few:
            self._after(MISSED_S, self.hear, answered)
        else:
            self.hear(answered)

    def _after(self, seconds: float, answer: Callable[[*Ts], None], *args: *Ts) -> None:
        """What it has asked for comes so much later, when it has its turn; never, if it was started anew meanwhile."""
        agent = self._agent
        asked_by = agent.incarnation

        def come() -> None:
            if agent.incarnation == asked_by:
                answer(*args)

        self._sim.clock.after(seconds, agent.does, come)

    def _store_is_up(self, generation: int) -> None:
        agent, sim = self._agent, self._sim
        if sim.conditions.takes_fault("store fails", agent.member):
            self.hear(StoreFailed(generation, "the store could not be started"))
        else:
            self.hear(StoreReady(generation, StoreAddress("127.0.0.1", 1024 + generation % 60_000)))

    def _look_for_peers(self) -> dict[str, float]:
        """Since when each node of the open handoff has not been reached. While one is open they are asked all the
        time."""
        agent, sim = self._agent, self._sim
        proposal = self.leader.own.proposer.record.proposal
        if proposal is None:
            self._unreached.clear()
            return {}
        names = {member.node_id for member in (*proposal.source.members, *proposal.members)} - {agent.name}
        for name in names:
            if sim.network.reaches(agent.name, name):
                self._unreached.pop(name, None)
            else:
                self._unreached.setdefault(name, agent.now)
        return {name: since for name, since in self._unreached.items() if agent.now - since >= UNREACHED_TRIES_S}

    def _forward(self, to: tuple[str, ...], about: frozenset[str]) -> None:
        """The first of these that is reached hears that it is its turn. Each that is not costs time."""
        agent, sim = self._agent, self._sim
        facts = tuple(fact for fact in self.notices.moving(utc(agent.now)) if fact.node_id in about)
        told = next((name for name in to if sim.network.reaches(agent.name, name)), "")
        missed = to[: to.index(told)] if told else to
        after_s = MISSED_S * len(missed)
        if told:
            sim.clock.after(after_s, sim.network.tell, agent.name, told, sim.agent(told).take_notices, facts, True)
        forwarded = Forwarded(told, tuple(missed))
        self._after(after_s + sim.network.hop_s(), self.hear, forwarded)


def _about(name: str, record: ProposerRecord) -> str:
    if record.proposal is None:
        return f"{name} has no handoff open"
    why = "" if record.reason is None else f": {record.reason}"
    return f"{name}: {record.proposal.handoff_id} generation {record.generation} {record.phase}{why}"
