"""The agent that leads: it hosts the product's proposer, on the first node of the world that stays. Pure.

Which rung, with which limits, and what becomes of an open handoff is decided by the product's ladder and proposer. What
is played is their host (`agent.driver.lead`): whose turn it is, when it tries again, that a notice amends what is open.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from agent.protocol.values import HandoffCause, HandoffState
from liver_core.handoff import Proposal, Proposer, ProposerRecord, Reason, Report, Rung, Stage, StoreAddress
from liver_core.handoff.ladder import choose_rung, cutover_deadlines, rung_for_nearer_deadline
from liver_core.handoff.messages import HandoffId
from liver_core.handoff.proposer import ProposerState
from liver_core.handoff.proposer_events import (
    Amend,
    Cancel,
    HandoffEnded,
    MemberLost,
    Open,
    PersistProposal,
    ProposerEffect,
    ProposerEvent,
    Refused,
    ReportReceived,
    SendOrder,
    Tick,
)
from liver_core.layout import Member, ParallelLayout
from service.handoffs.rules import OpenHandoff
from service.policy.types import Candidate
from service.simulation.machines.enacted import Enacted, handoff_id_of
from service.simulation.machines.meeting import Meeting, PlayedWorld
from service.simulation.machines.played_job import Agents, PlayedJob, utc
from service.simulation.replay_ledger import JOB

LIVE_RUNGS = (Rung.LIVE, Rung.DROP_STEP, Rung.STOP_AND_COPY, Rung.RESCUE)
AMENDABLE = (ProposerState.PREPARING, ProposerState.PERMITTED)
UNHURRIED_LEAST_S, UNHURRIED_MOST_S, UNHURRIED_TIMES = 180.0, 3_600.0, 3.0
RETRY_FIRST_S, RETRY_MAX_S, PEER_LOST_S, SOONER_LEAST_S = 0.5, 10.0, 20.0, 1.0
TICK_S, LATE_S = 10.0, 0.05
"""No message is lost, so that nothing has to be sent again each second; deadlines are looked at when they are due."""


@dataclass(slots=True)
class OpenOne:
    """The handoff that is open here."""

    opened_s: float
    leaving: frozenset[str]
    target: tuple[str, ...]
    rung: Rung
    parent: int
    changed_s: float
    superseded: bool = False
    dropped: bool = False


class PlayedLead:
    """`enacted`: every handoff that was opened, once it has ended."""

    def __init__(self, ground: Meeting, job: PlayedJob) -> None:
        self.enacted: list[Enacted] = []
        self.refused: list[tuple[float, str]] = []
        self._ground, self._job = ground, job
        job.agents = Agents(self.mirror, self._drop, self.consider)
        self._proposer: Proposer | None = None
        self._open: OpenOne | None = None
        self._failures = 0
        self._retry_s = 0.0

    # What it hears.

    def receive(self, to: str, report: Report) -> None:
        if self._proposer is not None and self._proposer.proposer_id == to:
            self._feed(ReportReceived(report))

    def boundary_passed(self) -> None:
        """A rank says so to its agent, which leads."""
        if self._open is not None:
            self._open.changed_s = self._ground.time.now

    def node_died(self, name: str) -> None:
        """What was led from there is led no more; a member that cannot be reached counts as lost after a while."""
        proposer = self._proposer
        if proposer is None or self._open is None:
            return
        if proposer.proposer_id == name:
            self._note_end(Stage.ABORTED, "the node that led is gone", "")
            self._proposer = self._open = None
        else:
            self._ground.time.after(PEER_LOST_S, self._lose, proposer.record.generation, name)

    def _lose(self, generation: int, name: str) -> None:
        """Later than in preparation its ranks have limits of their own."""
        proposer = self._proposer
        if (
            proposer is None
            or proposer.record.generation != generation
            or proposer.state is not ProposerState.PREPARING
        ):
            return
        self._feed(MemberLost(Member(name, 0), Reason(f"{name} has not been reached", "prepare")))

    def _drop(self, reason: str) -> None:
        """The service wants it no more, and shows it no more."""
        if self._open is not None:
            self._open.dropped = True
            self._feed(Cancel(Reason(reason, "dropped")))

    def nodes_wanted(self) -> tuple[str, ...]:
        return () if self._open is None else self._open.target

    def mirror(self) -> OpenHandoff | None:
        """What the service sees of the open handoff."""
        proposer, opened = self._proposer, self._open
        if proposer is None or opened is None or opened.dropped or proposer.record.proposal is None:
            return None
        passed = proposer.tally.boundary_passed()
        state = HandoffState.CUTTING_OVER if passed else HandoffState.PREPARING
        return OpenHandoff(
            handoff_id=UUID(proposer.record.proposal.handoff_id),
            state=state,
            leaving=tuple(sorted(opened.leaving)),
            target_nodes=opened.target,
            opened_at=utc(opened.opened_s),
            changed_at=utc(opened.changed_s),
            deadline_at=utc(proposer.record.proposal.deadline_utc),
            may_lose_leavers=proposer.tally.goes() or (passed and opened.rung is Rung.RESCUE),
        )

    # What it does.

    def consider(self) -> None:
        """What is due now: after every notice, every proposal of the service, and every end of a handoff."""
        ground, world = self._ground, self._ground.world
        if world is None or world.is_lost or not world.begun:
            return
        leaving = self._leaving(world)
        if self._open is not None:
            if leaving:
                self._answer_another(leaving)
        elif leaving and ground.time.now < self._retry_s:
            ground.time.at(self._retry_s, self.consider)
        elif leaving:
            planned = ground.facts.plan()
            target, layout = planned.decision.target, planned.layout
            if target is not None and layout is not None:
                self._try(world, target.node_ids(), layout, leaving)
        elif self._job.proposed is not None:
            handoff, target, layout = self._job.proposed
            if refusal := self._try(world, target.node_ids(), layout, {}, str(handoff.handoff_id)):
                self._job.declined(refusal)

    def _leaving(self, world: PlayedWorld) -> dict[str, float]:
        """Each member that will go, and by when its state must be elsewhere. One whose time has run out does not take
        their time from the others."""
        now, share, members = self._ground.time.now, self._ground.times.usable_share, world.roster.node_ids()
        notices = self._ground.facts.notices()
        found = {
            name: heard_s + share * (gone_s - heard_s) for name, (heard_s, gone_s) in notices.items() if name in members
        }
        in_time = min((safe_s for safe_s in found.values() if safe_s > now), default=None)
        return {name: safe_s if safe_s > now or in_time is None else in_time for name, safe_s in found.items()}

    def _try(
        self,
        world: PlayedWorld,
        target: Sequence[str],
        layout: Candidate,
        leaving: dict[str, float],
        handoff_id: str = "",
    ) -> str:
        """Choose the rung, and open the handoff if it is a live one. Returns why not, empty if so."""
        ground, now = self._ground, self._ground.time.now
        safe_s = min(leaving.values()) if leaving else None
        inputs = ground.ladder(world.roster.node_ids(), target, None if safe_s is None else safe_s - now)
        choice = choose_rung(inputs)
        if choice.rung not in LIVE_RUNGS:
            self.refused.append((now, choice.reason))
            return f"no live handoff: {choice.reason}"
        unhurried_s = min(UNHURRIED_MOST_S, max(UNHURRIED_LEAST_S, UNHURRIED_TIMES * choice.estimate_s))
        proposal = Proposal(
            handoff_id=HandoffId(handoff_id or handoff_id_of(self._job.next_id())),
            job_id=JOB,
            parent=world.roster.generation,
            source=world.roster,
            layout=ParallelLayout(dp=len(target)),
            members=tuple(Member(name, 0) for name in target),
            plan_digest=ground.digest_of(layout),
            store=StoreAddress("replay", 1),
            cause=str(HandoffCause.NOTICE if leaving else HandoffCause.GROW),
            rung=choice.rung,
            deadline_utc=now + unhurried_s if safe_s is None else safe_s,
            cutover=cutover_deadlines(inputs),
        )
        return self._open_one(world, proposal, frozenset(leaving), choice.reason)

    def _open_one(self, world: PlayedWorld, proposal: Proposal, leaving: frozenset[str], reason: str) -> str:
        now, target = self._ground.time.now, tuple(member.node_id for member in proposal.members)
        leads = next((name for name in (*world.roster.node_ids(), *target) if self._may_lead(name, leaving)), None)
        if leads is None:
            return "nobody is there to lead"
        record = ProposerRecord(highest_generation=self._job.highest)
        self._proposer = Proposer(job_id=JOB, proposer_id=leads, agent_incarnation=1, record=record)
        self._open = OpenOne(now, leaving, target, proposal.rung, proposal.parent, now)
        effects = self._proposer.handle(Open(proposal), now)
        if self._proposer.record.proposal is None:
            self._proposer = self._open = None
            refusal = next((str(effect.reason) for effect in effects if isinstance(effect, Refused)), reason)
            self.refused.append((now, refusal))
            return refusal
        generation = self._proposer.record.generation
        self._job.handoff_opened(generation)
        self._ground.time.at(proposal.deadline_utc + LATE_S, self._tick, generation, False)
        self._ground.time.after(TICK_S, self._tick, generation, True)
        for name in target:
            if not self._ground.is_up(name):
                self._ground.time.after(PEER_LOST_S, self._lose, generation, name)
        self._carry_out(effects)
        return ""

    def _may_lead(self, name: str, leaving: frozenset[str]) -> bool:
        return name not in leaving and self._ground.is_up(name)

    # Another notice.

    def _answer_another(self, leaving: dict[str, float]) -> None:
        """A nearer deadline, or more nodes than the open handoff answers: amend it, else end it and make another."""
        proposer, opened = self._proposer, self._open
        assert proposer is not None and opened is not None
        more = leaving.keys() - opened.leaving
        if not more:
            if proposer.state is ProposerState.PREPARING and opened.leaving:
                self._amend_deadline(proposer, min(leaving.values()))
            return
        if proposer.tally.boundary_passed() or proposer.state is ProposerState.WITHDRAWING:
            return
        amended = proposer.state in AMENDABLE and self._amend(proposer, leaving)
        if not amended and not opened.superseded:
            opened.superseded = True
            text = f"superseded: {', '.join(sorted(more))} will go too, one plan is made for all"
            self._feed(Cancel(Reason(text, "superseded")))

    def _amend_deadline(self, proposer: Proposer, safe_s: float) -> None:
        current, opened, now = proposer.record.proposal, self._open, self._ground.time.now
        assert current is not None and opened is not None and current.source is not None
        if not now < safe_s < current.deadline_utc - SOONER_LEAST_S:
            return
        inputs = self._ground.ladder(current.source.node_ids(), opened.target, safe_s - now)
        rung, _ = rung_for_nearer_deadline(inputs, current.rung, spent_s=now - opened.opened_s)
        self._revise(proposer, replace(current, deadline_utc=safe_s, rung=rung), opened.leaving)

    def _amend(self, proposer: Proposer, leaving: dict[str, float]) -> bool:
        current, ground = proposer.record.proposal, self._ground
        planned = ground.facts.plan()
        target, layout = planned.decision.target, planned.layout
        if current is None or current.source is None or target is None or layout is None:
            return False
        safe_s = min(*leaving.values(), current.deadline_utc)
        inputs = ground.ladder(current.source.node_ids(), target.node_ids(), safe_s - ground.time.now)
        choice = choose_rung(inputs)
        if choice.rung not in LIVE_RUNGS:
            return False
        amended = replace(
            current,
            layout=target.layout,
            members=target.members,
            plan_digest=ground.digest_of(layout),
            cause=str(HandoffCause.NOTICE),
            rung=current.rung if target.members == current.members else choice.rung,
            deadline_utc=safe_s,
        )
        return self._revise(proposer, amended, frozenset(leaving))

    def _revise(self, proposer: Proposer, amended: Proposal, leaving: frozenset[str]) -> bool:
        assert self._open is not None
        effects = proposer.handle(Amend(amended), self._ground.time.now)
        taken = amended in (proposer.record.proposal, proposer.record.pending)
        if taken:
            target = tuple(member.node_id for member in amended.members)
            self._open.leaving, self._open.rung = leaving, amended.rung
            self._open.target = tuple(dict.fromkeys((*self._open.target, *target)))
            generation = proposer.record.generation
            self._ground.time.at(amended.deadline_utc + LATE_S, self._tick, generation, False)
        self._carry_out(effects)
        return taken

    # The machine.

    def _tick(self, generation: int, again: bool) -> None:
        proposer = self._proposer
        if proposer is None or proposer.record.proposal is None or proposer.record.generation != generation:
            return
        if again:
            self._ground.time.after(TICK_S, self._tick, generation, True)
        self._feed(Tick())

    def _feed(self, event: ProposerEvent) -> None:
        if self._proposer is not None:
            self._carry_out(self._proposer.handle(event, self._ground.time.now))

    def _carry_out(self, effects: Sequence[ProposerEffect]) -> None:
        ground = self._ground
        for effect in effects:
            match effect:
                case PersistProposal():
                    if self._open is not None:
                        self._open.changed_s = ground.time.now
                        self._job.handoff_changed()
                case SendOrder(member=member, order=order):
                    ground.send_order(member, order)
                case HandoffEnded():
                    self._ended(effect)
                case Refused(reason=reason):
                    self.refused.append((ground.time.now, str(reason)))

    def _ended(self, ended: HandoffEnded) -> None:
        opened, ground = self._open, self._ground
        assert opened is not None
        self._note_end(ended.stage, str(ended.reason), str(ended.decision))
        self._open, is_active = None, ended.stage is Stage.ACTIVE
        self._failures = 0 if is_active or opened.superseded else self._failures + 1
        if self._failures:
            self._retry_s = ground.time.now + min(RETRY_MAX_S, RETRY_FIRST_S * 2.0**self._failures)
        world = ground.world
        roster = world.roster if is_active and world is not None else None
        roster = roster if roster is not None and roster.generation == ended.generation else None
        self._job.handoff_ended(opened.parent, roster, ended.reason if ended.stage is Stage.BROKEN else None)
        ground.send(self.consider)

    def _note_end(self, stage: Stage, reason: str, decision: str) -> None:
        proposer, opened = self._proposer, self._open
        assert proposer is not None and opened is not None
        record, now = proposer.record, self._ground.time.now
        if stage is not Stage.ACTIVE:
            self._ground.charge_building(now - opened.opened_s)
        how = str(opened.rung), reason, now
        self.enacted.append(
            Enacted(opened.opened_s, record.generation, *how, str(stage), decision, max(1, record.plan_revision))
        )
