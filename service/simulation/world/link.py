"""How one agent and the service hear each other: reports, orders, and what answers are worth as step leases. Pure.

As `agent.link.sync`: one report at a time, again when there is news, and the answer waits until there is something new.
"""

from __future__ import annotations

import math

from agent.protocol.process_end import ProcessEnd
from agent.protocol.step_leases import ASK_SHARE, HIGHEST_FIELD, answered_ago, lease_for, may_go_on
from agent.protocol.sync import DesiredState, NoticeFact
from agent.protocol.values import HandoffCause
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason, Stage
from liver_core.handoff.generations import first_of
from liver_core.handoff.leader_events import HandoffWanted, Plan
from liver_core.layout import Roster
from service.ledger.rules import OVER
from service.simulation.world.mirrors import Mirrors
from service.simulation.world.moments import seconds_at
from service.simulation.world.parts import Agent, Rank
from service.simulation.world.reports import AgentReport, DeclinedProposal, Orders, RankSays, Taken
from service.simulation.world.whole import Whole

SYNC_S, ANSWER_S = 1.0, 4.0
"""How often an agent reports, and how long it waits for an answer."""
EXTENDED_S = 1.5
"""A lease of an agent that takes the service for away."""
DECLINED_MAX = 16
MISSING_RANK_S = 5.0


class ServiceLink:
    """Of one agent. `orders` are on its disk, and what it has to tell; all else is gone with its process."""

    def __init__(self, agent: Agent, simulation: Whole, mirrors: Mirrors) -> None:
        self._agent, self._sim, self._mirrors = agent, simulation, mirrors
        self.orders: Orders | None = None
        self._declined: dict[str, str] = {}
        self._lost: RankSays | None = None
        self._notices: dict[str, NoticeFact] = {}
        self.heard_at = 0.0  # when the last report was sent that the service has answered
        self._there_at = -math.inf  # when it was there for others, by what they have told since then
        self._asks_until = 0.0
        self._is_behind = False  # there was news while a report was under way
        self._told: object = None  # of the rank
        self._missing_since: float | None = None
        self._considered: object = None

    def begin(self) -> None:
        """It reports from now on: all the time, or news only."""
        self._is_behind = False
        if self._sim.service.is_steady:
            return
        self._sim.clock.after(SYNC_S * self._sim.draw(), self._sync, self._agent.incarnation)

    def lose_memory(self) -> None:
        """The process is gone."""
        self._there_at, self._asks_until = -math.inf, 0.0
        self._lost = self._missing_since = self._considered = None

    # What the service has told.

    @property
    def runs(self) -> bool:
        """Whether the job is to have ranks. A suspension whose time has come leaves a handoff alone."""
        orders, agent = self.orders, self._agent
        if orders is None or orders.desired is not DesiredState.RUN:
            return orders is not None and orders.desired is DesiredState.RUN
        is_due = orders.suspends_at is not None and agent.now >= orders.suspends_at
        is_free = agent.leading.is_idle and agent.participant.record.promise is None
        return not (is_due and is_free)

    @property
    def wanted(self) -> HandoffWanted | None:
        """What the service proposes: until the deadline of its notices, where there are any."""
        proposal = None if self.orders is None else self.orders.proposal
        if proposal is None:
            return None
        agent = self._agent
        leaving, now = frozenset(proposal.leaving), agent.now
        heard = [fact for fact in agent.leading.notices.all() if fact.node_id in leaving]
        notice_at = min((seconds_at(fact.first_seen_utc) for fact in heard), default=now)
        deadline_s = now + self._sim.conditions.unhurried_s
        if proposal.deadline_s is not None:
            deadline_s = self._sim.conditions.safe_by(notice_at, proposal.deadline_s)
        return HandoffWanted(
            handoff_id=proposal.handoff_id,
            parent=proposal.parent,
            cause=str(proposal.cause),
            plan=Plan(proposal.target.layout, proposal.target.members, self._sim.digest_of(proposal), proposal.why),
            leaving=leaving,
            deadline_utc=deadline_s,
            notice_at=notice_at if proposal.cause is HandoffCause.NOTICE else None,
            is_heard=bool(heard),
            has_ended=proposal.handoff_id in self._mirrors.told_late
            or any(ended.handoff_id == proposal.handoff_id for ended in agent.participant.record.ended),
        )

    @property
    def roster(self) -> Roster | None:
        """The world that the service takes for the job's."""
        return None if self.orders is None else self.orders.roster

    @property
    def lead_order(self) -> tuple[str, ...]:
        """Who may lead, first choice first, as the service says."""
        return () if self.orders is None else self.orders.lead_order

    @property
    def next_generation(self) -> int:
        """The lowest number that the service does not know as used."""
        return 1 if self.orders is None else self.orders.next_generation

    @property
    def is_answered(self) -> bool:
        """Whether the service was there a moment ago."""
        return self._sim.clock.now - self.heard_at <= ANSWER_S

    def due_s(self) -> float:
        """When time alone may change what it does."""
        orders, rank, now = self.orders, self._agent.rank, self._sim.clock.now
        lacks = rank is not None and rank.alive and not (rank.has_lease and (self.runs or rank.is_condemned))
        if lacks or self._missing_since is not None or (orders is not None and orders.proposal is not None):
            return now + SYNC_S
        suspends_at = None if orders is None else orders.suspends_at
        return math.inf if suspends_at is None or suspends_at < now else suspends_at

    # What it has to tell.

    def note(self, notice: NoticeFact) -> None:
        """A notice that the service may not have heard."""
        self._notices[f"{notice.node_id} {notice.source}"] = notice
        self.sync_soon()

    def decline(self, handoff_id: str, reason: str) -> None:
        """What the service proposed is not opened."""
        self._declined[handoff_id] = reason
        while len(self._declined) > DECLINED_MAX:
            del self._declined[next(iter(self._declined))]
        self.sync_soon()

    def lose_rank(self, rank: Rank, world: Roster, reason: Reason) -> None:
        """The agent has seen that its rank of this world has ended, and nobody had told it to."""
        number, killed = world.rank_of(rank.member) or 0, reason.cause is not None and reason.cause.signal is not None
        signal = reason.cause.signal if killed and reason.cause is not None else None
        ended = ProcessEnd(1, signal, None if killed else 1, rank.version, "" if killed else reason.text)
        self._lost = RankSays(world.generation, number, RankStage.FAILED, rank.version, reason, ended)
        self.sync_soon()

    def tell_rank(self) -> None:
        """The same of the rank: whether it prepares, trains or is over. The service asks no more of its stage."""
        says = self._rank_says()
        trains = says is not None and says.stage in (RankStage.TRAINING, RankStage.ACTIVE)
        over = says.stage if says is not None and says.stage in OVER else None
        told = says and (says.generation, says.rank, trains, over)
        if told != self._told:
            self._told = told
            self.tell_news()

    def tell_news(self) -> None:
        """What the next report tells anyhow; but an agent that reports news only does so now."""
        if self._sim.service.is_steady:
            self.sync_soon()

    def sync_soon(self) -> None:
        """There is news."""
        self._sim.clock.after(self._sim.network.hop_s(), self._report, self._agent.incarnation)

    def _sync(self, incarnation: int) -> None:
        if incarnation != self._agent.incarnation:
            return
        sim = self._sim
        sim.clock.after(SYNC_S * (0.8 + 0.4 * sim.draw()), self._sync, incarnation)
        self._report(incarnation)

    def _report(self, incarnation: int) -> None:
        agent, sim = self._agent, self._sim
        if incarnation != agent.incarnation or not agent.is_going or sim.clock.now < self._asks_until:
            self._is_behind = True
            return
        if not sim.network.reaches_service(agent.name):
            return
        self._asks_until = sim.clock.now + ANSWER_S
        ranks = tuple(rank for rank in (self._rank_says(),) if rank is not None)
        report = AgentReport(
            agent.name,
            sim.clock.now,
            incarnation,
            ranks,
            tuple(self._mirrors.waiting.values()),
            tuple(DeclinedProposal(name, reason) for name, reason in self._declined.items()),
            tuple(self._notices.values()),
        )
        sim.clock.after(sim.network.hop_s(), self._arrives, report)

    def _rank_says(self) -> RankSays | None:
        """The process that is there, or the one that was lost."""
        agent, rank = self._agent, self._agent.rank
        active = agent.journal.active
        if rank is None or not rank.alive:
            return self._lost
        world = active if rank.world is None else rank.world.roster
        if world is None or agent.member not in world.members:
            order = rank.order
            generation = rank.belongs_to if order is None else order.generation
            number = 0 if order is None else order.target.rank_of(agent.member) or 0
            return RankSays(generation, number, rank.stage, 0, rank.reason if rank.stage is RankStage.BROKEN else None)
        reason = rank.reason if rank.stage is RankStage.BROKEN else None
        number, layout = world.rank_of(agent.member) or 0, str(world.layout)
        return RankSays(world.generation, number, rank.stage, rank.version, reason, layout=layout)

    def _arrives(self, report: AgentReport) -> None:
        sim, name = self._sim, self._agent.name
        if not sim.network.reaches_service(name):
            return
        taken = sim.service.take_report(report)
        sim.clock.after(sim.network.hop_s(), self._answered, report, taken)

    def _answered(self, report: AgentReport, taken: Taken) -> None:
        agent, sim = self._agent, self._sim
        if agent.incarnation != report.incarnation or not sim.network.reaches_service(agent.name):
            return
        if not agent.is_going:
            agent.does(self._answered, report, taken)
            return
        self._asks_until = 0.0
        self.heard_at, self._there_at = max(self.heard_at, report.sent_at), -math.inf
        self._mirrors.take_answer(taken.acknowledged)
        if taken.is_news:
            for declined in report.declined:
                self._declined.pop(declined.handoff_id, None)
            self._notices = {key: fact for key, fact in self._notices.items() if fact not in report.notices}
        self.take_orders(sim.service.orders())
        if self._is_behind and sim.service.is_steady:
            self._is_behind = False
            self._report(report.incarnation)

    def wake(self) -> None:
        """The service has news: whoever is heard gets them at once."""
        if self._sim.network.reaches_service(self._agent.name):
            self._agent.does(self.take_orders, self._sim.service.orders())

    def take_orders(self, orders: Orders) -> None:
        """What the service wants. Older orders than those that are known change nothing."""
        if self.orders is not None and orders.seq <= self.orders.seq:
            return
        self.orders = orders
        agent = self._agent
        for fact in orders.notices:
            agent.leading.take_notice(fact)
        if self._lost is not None and orders.generation is not None and self._lost.generation < orders.generation:
            self._lost = None
        self.consider()
        agent.leading.consider()
        agent.stir()

    def consider(self) -> None:
        """Bring the rank to what the service wants, and give it its lease. Idempotent."""
        agent, orders = self._agent, self.orders
        if not agent.is_going or orders is None:
            return
        known = (orders.seq, agent.participant.record, agent.rank is not None and agent.rank.alive)
        if not self.runs:
            self._wind_down()
        elif orders.generation is not None and (known != self._considered or self._missing_since is not None):
            self._considered = known  # The same once more would change nothing.
            self._run(orders, orders.generation)
        self._renew()

    def _run(self, orders: Orders, generation: int) -> None:
        """Older worlds are given up; who was away while the service started one hears only of a handoff since then."""
        agent, start = self._agent, orders.start
        self._note_missing(orders)
        agent.give_up(first_of(generation))
        if start is None or start.generation != generation or not agent.is_going:
            return
        if agent.member in start.target.members and self._is_new(generation):
            agent.take_start(start)

    def _is_new(self, generation: int) -> bool:
        """Whether no rank has been here of this world, or of a later one."""
        return generation > self._agent.journal.highest_generation

    def _note_missing(self, orders: Orders) -> None:
        """The service believes in a rank that this node does not have: say so, never start it again."""
        agent, now, roster = self._agent, self._agent.now, orders.roster
        record = agent.participant.record
        is_missing = roster is not None and agent.member in roster.members and record.active is None
        if not is_missing or roster is None or record.promise is not None or not self._has_ended(orders, roster):
            self._missing_since = None
            return
        self._missing_since = now if self._missing_since is None else self._missing_since
        if now - self._missing_since >= MISSING_RANK_S and self._lost is None:
            reason = Reason("no process of this rank runs on its node", "adopt", cause=FailureCause(FailedPart.PEER))
            number = roster.rank_of(agent.member) or 0
            self._lost = RankSays(roster.generation, number, RankStage.FAILED, 0, reason)
            self.sync_soon()

    def _has_ended(self, orders: Orders, roster: Roster) -> bool:
        """Whether no rank of this world lives here, nor is still to be started."""
        agent = self._agent
        if agent.rank is not None and agent.rank.alive:
            return False
        record = agent.participant.record
        if any(ended.stage is Stage.LEFT and ended.generation > roster.generation for ended in record.ended):
            return False  # It has left by a handoff that the service has not seen become active yet.
        is_start = orders.start is not None and orders.start.generation == roster.generation
        return not is_start or record.highest_generation >= roster.generation

    def _wind_down(self) -> None:
        """The job is stopped or suspended: the rank ends after its step."""
        agent = self._agent
        agent.leading.cancel(Reason("the job is suspended", "cancel"))
        if agent.is_going and agent.rank is not None and agent.rank.alive and not agent.rank.is_condemned:
            agent.end_rank()

    # Step leases: as StepLeases.renew.

    def _renew(self) -> None:
        agent, sim = self._agent, self._sim
        now, lost_after_s = sim.clock.now, sim.service.limits.lost_after_s
        wanted = 0 if self.orders is None else self.orders.generation or 0
        recent_s = ASK_SHARE * lost_after_s
        until = math.inf if sim.service.is_steady else self.heard_at + sim.service.limits.lease_s
        if now - self.heard_at > recent_s and until < math.inf:
            asked = [other for other in sim.agents.values() if other is not agent]
            there = [other for other in asked if sim.network.reaches(agent.name, other.name)]
            known = [answered_ago(other.link.status(), wanted=wanted) for other in there]
            reaches = bool(known) or not sim.network.cut_off.get(agent.name, False)
            self._there_at = max(self._there_at, *(now - ago for ago in known), -math.inf)
            if may_go_on(is_there=now - self._there_at <= recent_s, reaches_anybody=reaches):
                until = now + EXTENDED_S
        rank = agent.rank
        if rank is None or not rank.alive:
            return
        steps_from = None if self.orders is None else self.orders.steps_from_at
        lease = lease_for(rank.belongs_to, wanted=wanted, steps_from=steps_from, until=until, at=now, now=now)
        if lease is not None:
            rank.leased_until = lease

    def status(self) -> dict[str, float | int]:
        """What it tells others of itself."""
        return {
            "service_heard_s": self._sim.clock.now - self.heard_at,
            HIGHEST_FIELD: self._agent.participant.record.highest_generation,
        }
