"""The proposer's half of a handoff: one machine per job, hosted by the agent that leads or by the service.

Pure, sans-IO: `handle(event, now)` returns the effects to carry out, in order. It has at most one handoff open. Every
handoff uses up a generation number, even if it is aborted. It writes its journal before it sends orders.
"""

from dataclasses import replace
from enum import StrEnum
from typing import assert_never

from liver_core.handoff.generations import next_handoff
from liver_core.handoff.messages import HandoffId, Order, Phase, Reason, Report, Rung, Stage
from liver_core.handoff.proposer_events import (
    ENDED_MAX,
    Amend,
    Cancel,
    HandoffEnded,
    Hindered,
    MemberLost,
    Open,
    PersistProposal,
    Proposal,
    ProposerEffect,
    ProposerEvent,
    ProposerRecord,
    Refused,
    ReportReceived,
    SendOrder,
    Tick,
)
from liver_core.handoff.tally import Tally
from liver_core.layout import Member, Roster

RESEND_S = 1.0
"""An order is sent again this often until its effect is reported."""
GIVE_UP_S = 30.0
"""If a participant is silent this long after all deadlines, the proposer names it and stops waiting."""

Effects = tuple[ProposerEffect, ...]


class ProposerState(StrEnum):
    """What the proposer is doing. The record stores it as a phase, so it survives a restart."""

    IDLE = "idle"
    PREPARING = "preparing"
    PERMITTED = "permitted"
    WITHDRAWING = "withdrawing"
    RETIRING = "retiring"
    ABORTING = "aborting"


AMENDABLE = (ProposerState.PREPARING, ProposerState.PERMITTED)
"""States in which a host may amend the plan."""
PEER_LOST_S = 20.0
"""A member that a host has not reached for so long is lost."""
SILENT_IS_LOST = (ProposerState.PREPARING, ProposerState.ABORTING)
"""States in which a host feeds MemberLost for a member that it cannot reach. In the others, ranks have limits of their
own and may go on without their agent; an abort after which all others have dropped what they had needs no word of it.
"""

_STATE_OF_PHASE = {
    Phase.PREPARE: ProposerState.PREPARING,
    Phase.PERMIT: ProposerState.PERMITTED,
    Phase.WITHDRAW: ProposerState.WITHDRAWING,
    Phase.RETIRE: ProposerState.RETIRING,
    Phase.ABORT: ProposerState.ABORTING,
}


class Proposer:
    """Opens handoffs of one job and drives each to its end.

    `proposer_id`: where reports go (a node id, or the service). `record`: the journalled one after a restart; the first
    Tick then sends the open handoff's orders again. `agent_incarnation` grows with every start of the host.
    """

    def __init__(self, *, job_id: str, proposer_id: str, agent_incarnation: int, record: ProposerRecord) -> None:
        self.job_id = job_id
        self.proposer_id = proposer_id
        self.agent_incarnation = agent_incarnation
        self.record = record
        self.tally = Tally(record.proposal)
        self._highest_seen = 0
        self._order_seq = 0
        self._phase_since: float | None = None  # None: not known yet after a restart
        self._sent_at = float("-inf")
        self._cancelled: Reason | None = None

    @property
    def state(self) -> ProposerState:
        """What it is doing."""
        return ProposerState.IDLE if self.record.proposal is None else _STATE_OF_PHASE[self.record.phase]

    @property
    def used(self) -> int:
        """The highest number that was burned here, or that a report has named."""
        return max(self.record.highest_generation, self._highest_seen)

    def handle(self, event: ProposerEvent, now: float) -> Effects:
        """Take one event; `now` is seconds since 1970, UTC."""
        if self._phase_since is None:
            self._phase_since = now
        match event:
            case Open(proposal=proposal):
                return self._on_open(proposal, now)
            case Amend(proposal=proposal):
                return self._on_amend(proposal, now)
            case Cancel(reason=reason):
                return self._on_cancel(reason, now)
            case MemberLost(member=member, reason=reason):
                return self._progress(now) if self.tally.lose(member, reason) else ()
            case Hindered(reason=reason):
                self.tally.hindrance = reason
                return ()
            case ReportReceived(report=report):
                return self._on_report(report, now)
            case Tick():
                return self._on_tick(now)
            case _:
                assert_never(event)

    # Opening, amending, cancelling.

    def _on_open(self, proposal: Proposal, now: float) -> Effects:
        refusal = self._open_refusal(proposal, now)
        if refusal is not None:
            return (Refused(proposal.handoff_id, Reason(refusal, "open")),)
        generation = self._next_generation(proposal)
        if generation is None:
            text = f"generation: the start of {proposal.parent} has no number left, or a newer one has been heard of"
            return (Refused(proposal.handoff_id, Reason(text, "open")),)
        self.record = replace(
            self.record,
            highest_generation=generation,
            proposal=proposal,
            generation=generation,
            plan_revision=1,
            target_revision=1,
            phase=Phase.PREPARE,
            reason=None,
        )
        self.tally, self._cancelled = Tally(proposal), None
        return (*self._enter(now), *self._orders(now))

    def _next_generation(self, proposal: Proposal) -> int | None:
        return next_handoff(max(self.used, proposal.parent), proposal.parent)

    def _open_refusal(self, proposal: Proposal, now: float) -> str | None:
        if self.record.proposal is not None:
            return f"handoff {self.record.proposal.handoff_id} is open"
        if any(ended.handoff_id == proposal.handoff_id for ended in self.record.ended):
            return "handoff_id: was used before"
        return self._proposal_refusal(proposal, now)

    def _proposal_refusal(self, proposal: Proposal, now: float) -> str | None:
        if proposal.job_id != self.job_id:
            return f"job_id: this proposer belongs to {self.job_id}, not to {proposal.job_id}"
        if proposal.rung is Rung.CHECKPOINT:
            return "rung: a restart from a checkpoint is the service's"
        if proposal.source.generation != proposal.parent:
            return f"source: is of generation {proposal.source.generation}, the parent is {proposal.parent}"
        if len(proposal.members) != proposal.layout.world_size:
            return f"members: {proposal.layout} needs {proposal.layout.world_size}, {len(proposal.members)} given"
        if now >= proposal.deadline_utc:
            return "deadline_utc: has passed"
        return None

    def _on_amend(self, proposal: Proposal, now: float) -> Effects:
        refusal = self._amend_refusal(proposal, now)
        if refusal is not None:
            return (Refused(proposal.handoff_id, Reason(refusal, "amend")),)
        if self.record.phase is Phase.PREPARE:
            return self._revise(proposal, now)
        self.record = replace(self.record, phase=Phase.WITHDRAW, pending=proposal)
        return (*self._enter(now), *self._orders(now))

    def _revise(self, proposal: Proposal, now: float) -> Effects:
        """Make the next plan revision. No participant has permission for the previous one."""
        assert self.record.proposal is not None
        dropped = [member for member in self.tally.members if member not in _members(proposal)]
        reason = Reason("this member has no part in the amended plan", "amend")
        goodbyes = tuple(
            SendOrder(member, replace(self._order(now), phase=Phase.ABORT, reason=reason)) for member in dropped
        )
        revision, target_revision = self.record.plan_revision + 1, self.record.target_revision
        if _wanted_of_ranks(proposal) != _wanted_of_ranks(self.record.proposal):
            target_revision = revision
        self.record = replace(
            self.record,
            proposal=proposal,
            plan_revision=revision,
            target_revision=target_revision,
            phase=Phase.PREPARE,
            pending=None,
        )
        self.tally = self.tally.amended(proposal)
        return (*self._enter(now), *goodbyes, *self._orders(now))

    def _amend_refusal(self, proposal: Proposal, now: float) -> str | None:
        current = self.record.proposal
        if current is None or current.handoff_id != proposal.handoff_id:
            return "handoff_id: no such handoff is open"
        if self.record.phase in (Phase.RETIRE, Phase.ABORT) or self.tally.boundary_passed():
            return f"the handoff is {self.state}: the notice becomes the next handoff"
        kept = (current.parent, current.source, current.store, current.cutover)
        if (proposal.parent, proposal.source, proposal.store, proposal.cutover) != kept:
            return "source: a revision must keep parent, source, store and cutover deadlines"
        if proposal.deadline_utc > current.deadline_utc:
            late_s = proposal.deadline_utc - current.deadline_utc
            return f"deadline_utc: a revision can only make it earlier, this one is {late_s:.1f} s later"
        return self._proposal_refusal(proposal, now)

    def _on_cancel(self, reason: Reason, now: float) -> Effects:
        proposal = self.record.proposal
        if proposal is None:
            return (Refused(HandoffId(""), Reason("no handoff is open", "cancel")),)
        if self.record.phase in (Phase.RETIRE, Phase.ABORT) or self.tally.boundary_passed():
            return (Refused(proposal.handoff_id, Reason(f"too late: the handoff is {self.state}", "cancel")),)
        if proposal.rung is Rung.RESCUE and self.record.phase is not Phase.PREPARE:
            # Leavers may be released already, unreported. Then the next world needs its newcomers: abort none of them.
            self._cancelled = reason
            return (Refused(proposal.handoff_id, Reason("too late: the rescue has permission", "cancel")),)
        return self._abort(reason, now)

    # Progress.

    def _on_report(self, report: Report, now: float) -> Effects:
        if report.job_id != self.job_id:
            return ()
        self._highest_seen = max(self._highest_seen, report.highest_generation)
        proposal = self.record.proposal
        is_ours = proposal is not None and report.handoff_id == proposal.handoff_id
        # Another agent may have opened the same proposal of the service, under a number of its own.
        if not is_ours or report.generation != self.record.generation or not self.tally.take(report):
            return ()
        return self._progress(now)

    def _on_tick(self, now: float) -> Effects:
        if self.record.proposal is None:
            return ()
        effects = self._progress(now)
        if self.record.proposal is None or now - self._sent_at < RESEND_S:
            return effects
        return (*effects, *self._orders(now))

    def _progress(self, now: float) -> Effects:
        """What follows from the reports and the time, whichever event brought them."""
        match self.state:
            case ProposerState.IDLE:
                return ()
            case ProposerState.PREPARING:
                return self._progress_preparing(now)
            case ProposerState.PERMITTED:
                return self._progress_permitted(now)
            case ProposerState.WITHDRAWING:
                return self._progress_withdrawing(now)
            case ProposerState.RETIRING:
                return self._progress_retiring(now)
            case ProposerState.ABORTING:
                return self._progress_aborting(now)
            case _:
                assert_never(self.state)

    def _progress_preparing(self, now: float) -> Effects:
        failure = self.tally.failure(self.record.plan_revision)
        if failure is not None:
            return self._abort(failure, now)
        if now > self._deadline:
            return self._abort(self.tally.silent_reason("prepare", "the deadline passed before all were ready"), now)
        if not self.tally.all_ready(self.record.plan_revision):
            return ()
        self.record = replace(self.record, phase=Phase.PERMIT)
        return (*self._enter(now), *self._orders(now))

    def _progress_permitted(self, now: float) -> Effects:
        if self.tally.goes():
            return self._progress_switched(now)
        failure = self.tally.failure(self.record.plan_revision)
        if failure is not None:
            return self._abort(failure, now)
        if now > self._deadline and not self.tally.boundary_passed():
            return self._abort(self.tally.silent_reason("ready", "the deadline passed before the boundary"), now)
        if now > self._last_moment:
            reason = self.tally.silent_reason("cutover", "no decision was reported")
            return self._finish(Stage.BROKEN, reason, now)
        return ()

    def _progress_withdrawing(self, now: float) -> Effects:
        """Once every tag is withdrawn, amend the plan. If the boundary came first, keep the plan."""
        pending = self.record.pending
        assert pending is not None
        if self.tally.goes() or self.tally.boundary_passed():
            self.record = replace(self.record, phase=Phase.PERMIT, pending=None)
            return (*self._enter(now), *self._progress_permitted(now))
        failure = self.tally.failure(self.record.plan_revision)
        if failure is not None:
            return self._abort(failure, now)
        if now > min(self._deadline, pending.deadline_utc):
            return self._abort(
                self.tally.silent_reason("withdraw", "the deadline passed before all tags were withdrawn"), now
            )
        if not self.tally.waiting(Phase.WITHDRAW, self.record.plan_revision):
            # What came too late for the revision that had permission is in time now.
            return self._revise(pending, now) if self._cancelled is None else self._abort(self._cancelled, now)
        return ()

    def _progress_switched(self, now: float) -> Effects:
        """GO is known: wait until every target is active."""
        broken = self.tally.broken_after_go()
        if broken is not None:
            return self._finish(Stage.BROKEN, broken, now)
        if self.tally.all_switched():
            self.record = replace(self.record, phase=Phase.RETIRE)
            return (*self._enter(now), *self._orders(now))
        if now > self._last_moment:
            return self._finish(Stage.BROKEN, self.tally.silent_reason("first step", "no first step was reported"), now)
        return ()

    def _progress_retiring(self, now: float) -> Effects:
        if self.tally.all_retired():
            return self._finish(Stage.ACTIVE, Reason("every rank did its first step", "retire"), now)
        if now > self._since + GIVE_UP_S:
            reason = self.tally.silent_reason("retire", "active; not every participant reported that it retired")
            return self._finish(Stage.ACTIVE, reason, now)
        return ()

    def _progress_aborting(self, now: float) -> Effects:
        if self.tally.goes():
            # The boundary came before the abort, and the decision is GO.
            self.record = replace(self.record, phase=Phase.PERMIT, reason=None)
            return (*self._enter(now), *self._progress_switched(now))
        reason = self.record.reason or Reason("aborted", "abort")
        if self.tally.all_dropped():
            stage = self.tally.dropped_stage()
            return self._finish(stage, self.tally.reason_of_the_end(stage, reason), now)
        if now > max(self._since, self._last_moment if self.tally.boundary_passed() else 0.0) + GIVE_UP_S:
            stage = Stage.BROKEN if self.tally.boundary_passed() else self.tally.dropped_stage()
            silent = self.tally.silent_reason("abort", reason.text)
            told = replace(self.tally.reason_of_the_end(stage, reason), text=silent.text)
            return self._finish(stage, told, now)
        return ()

    def _abort(self, reason: Reason, now: float) -> Effects:
        self.record = replace(self.record, phase=Phase.ABORT, reason=reason, pending=None)
        effects = (*self._enter(now), *self._orders(now))
        return (*effects, *self._progress_aborting(now))

    def _finish(self, stage: Stage, reason: Reason, now: float) -> Effects:
        proposal = self.record.proposal
        assert proposal is not None
        ended = HandoffEnded(proposal.handoff_id, self.record.generation, stage, self.tally.decision(), reason)
        self.record = replace(
            self.record,
            proposal=None,
            phase=Phase.PREPARE,
            reason=None,
            ended=(*self.record.ended[-(ENDED_MAX - 1) :], ended),
        )
        self.tally = Tally(None)
        return (*self._enter(now), ended)

    # Orders.

    def _enter(self, now: float) -> tuple[PersistProposal]:
        """The phase changed. Write it to disk before sending anything."""
        self._phase_since = now
        return (PersistProposal(self.record),)

    def _orders(self, now: float) -> tuple[SendOrder, ...]:
        """The current order, for every participant whose report does not show it done."""
        self._sent_at = now
        members = self.tally.waiting(self.record.phase, self.record.plan_revision)
        if not members:
            return ()
        order = self._order(now)
        return tuple(SendOrder(member, order) for member in members)

    def _order(self, now: float) -> Order:
        proposal = self.record.proposal
        assert proposal is not None
        self._order_seq += 1
        return Order(
            job_id=self.job_id,
            handoff_id=proposal.handoff_id,
            parent=proposal.parent,
            generation=self.record.generation,
            plan_revision=self.record.plan_revision,
            plan_digest=proposal.plan_digest,
            phase=self.record.phase,
            source=proposal.source,
            target=Roster(self.job_id, self.record.generation, proposal.layout, proposal.members),
            target_revision=self.record.target_revision,
            store=proposal.store,
            cause=proposal.cause,
            rung=proposal.rung,
            deadline_utc=proposal.deadline_utc,
            cutover=proposal.cutover,
            proposer_id=self.proposer_id,
            agent_incarnation=self.agent_incarnation,
            report_seq=self._order_seq,
            issued_at=now,
            reason=self.record.reason,
        )

    @property
    def _since(self) -> float:
        assert self._phase_since is not None
        return self._phase_since

    @property
    def _deadline(self) -> float:
        assert self.record.proposal is not None
        return self.record.proposal.deadline_utc

    @property
    def _last_moment(self) -> float:
        """By then, every rank that reached the boundary has a decision or has fallen, and had time to report it."""
        assert self.record.proposal is not None
        proposal = self.record.proposal
        return proposal.deadline_utc + proposal.cutover.over_s(proposal.rung) + GIVE_UP_S


def _wanted_of_ranks(proposal: Proposal) -> tuple[object, ...]:
    """If this changes, ranks must build again. Parent, source and store are the same in all revisions."""
    return (proposal.layout, proposal.members, proposal.rung)


def _members(proposal: Proposal) -> tuple[Member, ...]:
    return tuple(dict.fromkeys((*proposal.source.members, *proposal.members)))
