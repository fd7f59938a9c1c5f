"""What a proposer knows about the participants of its open handoff: the latest report of each, and which are lost.

Pure. Bounded by the number of participants. Every answer is computed from the latest reports, so a lost, repeated or
reordered report can make an answer late but never wrong.
"""

from dataclasses import replace

from liver_core.handoff.messages import (
    OUT_OF_TIME,
    Decision,
    FailedPart,
    FailureCause,
    Phase,
    Reason,
    Report,
    Rung,
    Stage,
)
from liver_core.handoff.proposer_events import Proposal
from liver_core.layout import Member

_SWITCHED = (Stage.ACTIVE, Stage.LEFT)
_BUILT = (Stage.STREAMING, Stage.READY)
_WAITED_FOR = (Stage.IDLE, Stage.PREPARING, Stage.STREAMING, Stage.CUTTING_OVER)
_DROPPED = (Stage.ABORTED, Stage.BROKEN, Stage.IDLE)
_WAITED = FailureCause(FailedPart.PEER)
"""Of a member for which all others wait. Only who saw why it is late knows whether it is the one that failed."""
_NOTHING_FAILED = (OUT_OF_TIME, "amend", "cancel", "superseded")
"""Phases of reasons for which a handoff is given up though nobody has failed."""
_PAST_BOUNDARY = (Stage.CUTTING_OVER, Stage.ACTIVE, Stage.LEFT, Stage.BROKEN)


class Tally:
    """The participants of one handoff: every member of source and target, sources first, each once."""

    def __init__(self, proposal: Proposal | None) -> None:
        self.proposal = proposal
        source = () if proposal is None else proposal.source.members
        target = () if proposal is None else proposal.members
        self.members: tuple[Member, ...] = tuple(dict.fromkeys((*source, *target)))
        self._targets = frozenset(target)
        self._source_ranks = {member: rank for rank, member in enumerate(source)}
        self._target_ranks = {member: rank for rank, member in enumerate(target)}
        # A rescue does not wait for newcomers: it needs them only after the leavers are released.
        rescues = proposal is not None and proposal.rung is Rung.RESCUE
        self._later = self._targets - frozenset(source) if rescues else frozenset()
        self._reports: dict[Member, Report] = {}
        self._lost: dict[Member, Reason] = {}
        self.hindrance: Reason | None = None
        """What kept the proposer's own host from hearing the others, if anything did."""

    def amended(self, proposal: Proposal) -> "Tally":
        """The tally of the next revision. Keeps what is known of the participants that stay."""
        tally = Tally(proposal)
        tally._reports = {member: report for member, report in self._reports.items() if member in tally.members}
        tally._lost = {member: reason for member, reason in self._lost.items() if member in tally.members}
        tally.hindrance = self.hindrance
        return tally

    def take(self, report: Report) -> bool:
        """Store a participant's report if it is newer than the last one. A participant that reports is not lost."""
        known = self._reports.get(report.member)
        if report.member not in self.members or (known is not None and known.order_key >= report.order_key):
            return False
        self._reports[report.member] = report
        self._lost.pop(report.member, None)
        return True

    def lose(self, member: Member, reason: Reason) -> bool:
        """The host reports that the member is lost."""
        if member not in self.members or member in self._lost:
            return False
        self._lost[member] = reason
        return True

    def waiting(self, phase: Phase, plan_revision: int) -> tuple[Member, ...]:
        """The participants that have not reported the wanted phase as accepted or done.

        Permission is withdrawn from the sources first. Until their tags are withdrawn the boundary may come, and then
        participants that are only targets must go along. An abort of a rescue has the same order: the rescue may have
        released its leavers before any report of it. In all other aborts the old world trains on without newcomers.
        """
        waiting = tuple(member for member in self.members if not self._shows(member, phase, plan_revision))
        if phase is Phase.WITHDRAW or (phase is Phase.ABORT and self._later):
            sources = tuple(member for member in waiting if member in self._source_ranks and member not in self._lost)
            return sources or waiting
        return waiting

    def all_ready(self, plan_revision: int) -> bool:
        """Every participant has promised this revision and is built and connected, except those that may come later."""
        waited_for = (member for member in self.members if member not in self._later)
        return all(self._is_ready(member, plan_revision) for member in waited_for)

    def any_builds(self, target_revision: int) -> bool:
        """A target has not built yet what it was told by this revision, as far as is known."""
        reports = (self._reports.get(member) for member in self._targets)
        return not all(
            report is not None and report.plan_revision >= target_revision and report.stage in _BUILT
            for report in reports
        )

    def failure(self, plan_revision: int) -> Reason | None:
        """Why the handoff cannot go on: a participant refused, aborted, broke or is lost."""
        for member in self.members:
            report = self._reports.get(member)
            if member in self._lost and not (report is not None and report.stage in _SWITCHED):
                return self._blame(member, self._lost[member])
            if report is None or report.plan_revision != plan_revision:
                continue
            aborting = report.promise is not None and report.promise.phase is Phase.ABORT and self._is_ours(report)
            if aborting or report.stage in _DROPPED:
                reason = report.reason or Reason("gave no reason", str(report.stage))
                return reason if reason.phase == OUT_OF_TIME else self._blame(member, reason)
        return None

    def boundary_passed(self) -> bool:
        """A participant is past the agreed boundary, so an abort is too late."""
        return any(report.stage in _PAST_BOUNDARY for report in self._reports.values())

    def goes(self) -> bool:
        """A participant has read GO."""
        return any(report.stage is Stage.ACTIVE or report.decision.goes for report in self._reports.values())

    def decision(self) -> Decision:
        """What was decided, as far as it is reported."""
        for report in self._reports.values():
            if report.decision is not Decision.UNDECIDED:
                return report.decision
        return Decision.GO if self.goes() else Decision.UNDECIDED

    def all_switched(self) -> bool:
        """Every target has done its first step. A leaver is not waited for: its machine may be gone without a word."""
        return all(self._has_switched(member) for member in self._targets)

    def broken_after_go(self) -> Reason | None:
        """Why the target world cannot go on: one of its ranks was lost after GO."""
        for member in self.members:
            report = self._reports.get(member)
            if member not in self._targets:
                continue
            if report is not None and report.stage in _DROPPED:
                return self._blame(member, report.reason or Reason("lost after GO", "active"))
            if member in self._lost:
                return self._blame(member, self._lost[member])
        return None

    def all_retired(self) -> bool:
        """No target is bound by the handoff any more. A leaver frees itself, by the decision."""
        return all(member in self._lost or self._is_free(member) for member in self._targets)

    def all_dropped(self) -> bool:
        """No participant has anything of the aborted handoff any more."""
        return all(member in self._lost or self._has_dropped(member) for member in self.members)

    def dropped_stage(self) -> Stage:
        """`broken` if a rank broke, unless the decision is NO-GO and all source ranks live. Otherwise `aborted`."""
        broken = {member for member, report in self._reports.items() if report.stage is Stage.BROKEN}
        if not broken:
            return Stage.ABORTED
        trains_on = self.decision() is Decision.NO_GO and not broken & self._source_ranks.keys()
        return Stage.ABORTED if trains_on else Stage.BROKEN

    def reason_of_the_end(self, stage: Stage, reason: Reason) -> Reason:
        """`reason`, for which the handoff was aborted. Where the old world ended too, it is what a rank says of itself
        that broke; where none does, and nothing had failed before, that of one that broke, or it names the one that
        has not said how it ended."""
        if stage is not Stage.BROKEN:
            return reason
        reports = ((member, self._reports.get(member)) for member in self.members)
        broke = [(member, it.reason or reason) for member, it in reports if it is not None and it.stage is Stage.BROKEN]
        own = [(member, why) for member, why in broke if why.cause is None or why.cause.what is not FailedPart.PEER]
        if own or (reason.phase in _NOTHING_FAILED and broke):
            return self._blame(*(own or broke)[0])
        if reason.phase not in _NOTHING_FAILED:
            return reason
        silent = next((member for member in self.members if not self._has_dropped(member)), self.members[0])
        return self._blame(silent, replace(reason, cause=_WAITED))

    def silent_reason(self, phase: str, text: str) -> Reason:
        """A reason that names the first participant that is lost, or else for which the others wait. Where the
        proposer's host did not hear the others for a while, it says that of those that are just silent. It names
        nobody where nobody is behind. Whom it waited for need not be who failed."""
        waited_for = (*_WAITED_FOR, Stage.READY) if self.boundary_passed() else _WAITED_FOR
        for member, lost in self._lost.items():
            return self._blame(member, Reason(f"{text}; {lost.text}", phase, cause=lost.cause))
        for member in self.members:
            report = self._reports.get(member)
            if report is None and self.hindrance is None:
                said = f"{member.node_id}/{member.slot} never reported"
                return self._blame(member, Reason(f"{text}; {said}", phase, cause=_WAITED))
            if report is not None and report.stage in waited_for:
                said = f"{member.node_id}/{member.slot} is {report.stage}"
                return self._blame(member, Reason(f"{text}; {said}", phase, cause=_WAITED))
        if self.hindrance is not None:
            own = next((member for member in self.members if member.node_id == self.hindrance.node), None)
            reason = replace(self.hindrance, text=f"{text}; {self.hindrance.text}", phase=phase)
            return reason if own is None else self._blame(own, reason)
        return Reason(text, OUT_OF_TIME)

    def _shows(self, member: Member, phase: Phase, plan_revision: int) -> bool:
        report = self._reports.get(member)
        if report is None or report.plan_revision != plan_revision:
            return False
        match phase:
            case Phase.PREPARE:
                return self._is_ready(member, plan_revision)
            case Phase.PERMIT:
                return report.stage in _SWITCHED
            case Phase.WITHDRAW:
                withdrawn = report.promise is not None and report.promise.phase is Phase.WITHDRAW
                return withdrawn and self._is_ready(member, plan_revision)
            case Phase.RETIRE:
                return self._is_free(member)
            case Phase.ABORT:
                return self._has_dropped(member)

    def _is_ready(self, member: Member, plan_revision: int) -> bool:
        report = self._reports.get(member)
        if report is None or report.stage is not Stage.READY or not self._is_ours(report):
            return False
        return report.plan_revision == plan_revision and member not in self._lost

    def _is_ours(self, report: Report) -> bool:
        return (
            report.promise is not None
            and self.proposal is not None
            and report.promise.handoff_id == self.proposal.handoff_id
        )

    def _has_switched(self, member: Member) -> bool:
        report = self._reports.get(member)
        return report is not None and report.stage in _SWITCHED

    def _has_dropped(self, member: Member) -> bool:
        report = self._reports.get(member)
        return report is not None and report.stage in _DROPPED and not self._is_ours(report)

    def _is_free(self, member: Member) -> bool:
        report = self._reports.get(member)
        return report is not None and not self._is_ours(report) and report.stage in (*_SWITCHED, Stage.BROKEN)

    def _blame(self, member: Member, reason: Reason) -> Reason:
        """The same reason with the member's node and rank, in the source world if it has one there."""
        own = self._source_ranks.get(member), self._target_ranks.get(member)
        rank = next((each for each in own if each is not None), None) if reason.rank is None else reason.rank
        # What it says of another rank does not tell where that one is.
        return replace(reason, rank=rank, node=reason.node or (member.node_id if rank in own else ""))
