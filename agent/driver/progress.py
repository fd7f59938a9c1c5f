"""What the agent that leads a handoff knows about it, kept as the mirror that goes to the service.

Pure: moments come in as seconds since 1970. Every change makes a new mirror with a higher number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from uuid import UUID

from agent.driver.handoff_measures import merge_measures
from agent.driver.planning import Learned
from agent.protocol.handoff_ends import state_of_open
from agent.protocol.peer import RankMeasures
from agent.protocol.sync import HandoffMeasures, HandoffMirror
from agent.protocol.values import HandoffCause, HandoffState, utc
from liver_core.handoff import (
    CostParts,
    Decision,
    MeasuredCost,
    Phase,
    PreparePhase,
    Proposal,
    ProposerRecord,
    Reason,
    Report,
    Rung,
    RungCost,
    Stage,
)
from liver_core.handoff.leader_events import Purpose
from liver_core.handoff.proposer_events import HandoffEnded
from liver_core.layout import Member, Roster

STEPS_AFTER = 5
"""`lost_s` is taken this many steps after the cutover."""
SETTLED_STEPS = 5
NEWS_AFTER_S = 60.0
"""The service gives up an open handoff of which it hears nothing: one that takes long is told of again."""
LATE_KEPT = 8
"""So many handoffs say how far their estimates can be trusted."""
GIVE_GRADIENTS = frozenset((Rung.LIVE, Rung.STOP_AND_COPY))
"""Rungs that hand over a step whose gradients are there; the others do it again by design."""
STREAMED = frozenset(rung for rung in Rung if rung.streams)
ENDS_KEPT = 4_096
"""Of more steps of the old world every second end is kept, so that a stream of a day takes no room."""


@dataclass(slots=True)
class LostTime:
    """Wall time from the opening to five steps after the cutover, less what those steps take undisturbed.

    Steps of either world count with the median step of their own layout: the old world's before the opening, the new
    world's over SETTLED_STEPS after the five (or what there is of them when the next world begins). `since` is the end
    of `step`, the last whole step before the opening.
    """

    since: float
    step: int
    median_step_s: float
    cutover_step: int | None = None
    lost_s: float | None = None
    known: bool = True  # False after a restart: the step at which the handoff was opened is forgotten
    ends: list[float] = field(default_factory=list)  # of the cutover step and of each step after it
    old_ends: list[tuple[float, int]] = field(default_factory=list)  # of the old world's steps, and which they were

    def stepped(self, generation: int, target_generation: int, step: int, now: float) -> bool:
        """Take one step of a rank of this node; whether something became known."""
        if generation < target_generation or self.lost_s is not None:
            self._old_step(generation, target_generation, step, now)
            return False
        if generation > target_generation:
            return self._conclude()
        if self.cutover_step is None:
            self.cutover_step, self.ends = step, [now]
            return True
        # Several ranks of a node report the same step; the first counts.
        if self.known and step == self.cutover_step + len(self.ends):
            self.ends.append(now)
        return len(self.ends) > STEPS_AFTER + SETTLED_STEPS and self._conclude()

    def parts(self, streaming_since: float | None, pause_s: float | None) -> CostParts | None:
        """What `lost_s` consists of, once it is known. `streaming_since`: None where nothing streamed. `pause_s` None:
        whatever the step of the cutover took longer than usual."""
        if self.lost_s is None or not self.known or self.cutover_step is None or not self.ends:
            return None
        before = [(at, at - self.since - (step - self.step) * self.median_step_s) for at, step in self.old_ends]
        late = [(self.since, 0.0), *before]
        cutover_s = self.ends[0] - self.since - (self.cutover_step - self.step) * self.median_step_s
        pause_s = max(0.0, cutover_s - late[-1][1]) if pause_s is None else pause_s
        late.append((self.ends[0] - pause_s, cutover_s - pause_s))
        built = late[-1][1] if streaming_since is None else _between(late, streaming_since)
        return CostParts(built, late[-1][1] - built, pause_s, self.lost_s - cutover_s)

    def _old_step(self, generation: int, target_generation: int, step: int, now: float) -> None:
        if generation >= target_generation or self.cutover_step is not None or step <= self.step:
            return
        if not self.old_ends or step > self.old_ends[-1][1]:
            self.old_ends.append((now, step))
        if len(self.old_ends) > ENDS_KEPT:
            del self.old_ends[::2]

    def _conclude(self) -> bool:
        settled = [late - early for early, late in pairwise(self.ends[STEPS_AFTER:])]
        if not settled or self.cutover_step is None:
            return False
        before, after = (self.cutover_step - self.step) * self.median_step_s, STEPS_AFTER * median(settled)
        self.lost_s = (self.ends[STEPS_AFTER] - self.since) - before - after
        return True


def _between(late: list[tuple[float, float]], moment: float) -> float:
    """How late the steps were at a moment, between the moments at which that is known, in order."""
    for (early, early_s), (end, end_s) in pairwise(late):
        if moment < end:
            share = max(0.0, moment - early) / (end - early)
            return early_s + share * (end_s - early_s)
    return late[-1][1]


@dataclass(slots=True)
class Progress:
    """One handoff. `marks`: first moment of decided (on disk), first order (at a rank), ready, boundary, active, safe
    and retired. `estimate_s`: what its rung was expected to need; `costs`: what each rung was expected to cost.
    `amendment`: what the next plan revision is for, from the moment it is wanted until it is taken."""

    mirror: HandoffMirror
    lost_time: LostTime
    notice_at: float | None
    leavers: frozenset[Member] = frozenset()
    marks: dict[str, float] = field(default_factory=dict)
    stages: dict[Member, Stage] = field(default_factory=dict)
    measures: dict[Member, Mapping[str, float]] = field(default_factory=dict)
    certificates: dict[Member, str] = field(default_factory=dict)
    superseded: bool = False
    estimate_s: float | None = None
    costs: tuple[RungCost, ...] = ()
    lost_parts: CostParts | None = None
    amendment: Purpose | None = None
    fallback: Reason | None = None  # why the ranks copied what was to stream
    redone: Reason | None = None  # why a batch was done again that was to be handed over
    decision: Decision = Decision.UNDECIDED
    reason: Reason | None = None
    is_stale: bool = False  # something is known that the mirror does not have yet

    @property
    def leaving(self) -> frozenset[str]:
        """The nodes whose notices this handoff answers."""
        return frozenset(self.mirror.leaving)

    def is_old(self, now: float) -> bool:
        """Whether the service should hear again that this handoff is led."""
        return now - self.mirror.changed_utc.timestamp() > NEWS_AFTER_S

    def take_report(self, report: Report, measured: RankMeasures | None, now: float) -> None:
        """What a participant says, and what its rank has measured."""
        before = self.stages.get(report.member), len(self.marks), self.measures.get(report.member), self.reason
        if measured is not None:
            self.measures[report.member] = {**self.measures.get(report.member, {}), **measured.measures}
            if measured.certificate:
                self.certificates[report.member] = measured.certificate
            ordered_at = measured.measures.get("ordered_at_utc", math.inf)
            if ordered_at < self.marks.get("first_order", math.inf):
                self.marks["first_order"] = ordered_at
        self.stages[report.member] = report.stage
        if report.decision is not Decision.UNDECIDED:
            self.decision = report.decision
        fell = report.reason if report.stage is Stage.READY else None
        if fell is not None and self.fallback is None and report.plan_revision == self.mirror.plan_revision:
            self.fallback, self.reason = fell, replace(fell, text=_fell_text(fell))
        if report.stage is Stage.ACTIVE and self.mirror.source is not None and self.mirror.rung in GIVE_GRADIENTS:
            self.redone = self.redone or report.reason
        if report.stage in (Stage.CUTTING_OVER, Stage.ACTIVE, Stage.LEFT):
            self.marks.setdefault("boundary", now)
        if self.leavers and all(self.stages.get(member) is Stage.LEFT for member in self.leavers):
            self.marks.setdefault("safe", now)
        after = self.stages[report.member], len(self.marks), self.measures.get(report.member), self.reason
        self.is_stale = self.is_stale or after != before

    def _take_revision(self, record: ProposerRecord) -> None:
        """The plan has a newer revision. What was reported of the older one is void."""
        proposal, amendment = record.proposal, self.amendment or Purpose(frozenset(), None, "amended")
        assert proposal is not None
        self.amendment = None
        target = Roster(proposal.job_id, record.generation, proposal.layout, proposal.members)
        self.mirror = self.mirror.model_copy(
            update={
                "plan_revision": record.plan_revision,
                "plan_digest": proposal.plan_digest,
                "target": target,
                "leaving": tuple(sorted(self.leaving | amendment.leaving)),
                "rung": proposal.rung,
                "deadline_utc": utc(proposal.deadline_utc),
            }
        )
        self.notice_at = min((at for at in (self.notice_at, amendment.notice_at) if at is not None), default=None)
        self.leavers = frozenset(proposal.source.members) - frozenset(proposal.members)
        self.reason, self.fallback = Reason(amendment.reason, "amend"), None
        self.costs, self.estimate_s = amendment.costs, amendment.estimate_s
        self.stages.clear()
        self.marks.pop("ready", None)

    def take_record(self, record: ProposerRecord, now: float) -> None:
        """What the proposer decided."""
        if record.proposal is None or record.proposal.handoff_id != str(self.mirror.handoff_id):
            return
        if record.plan_revision > self.mirror.plan_revision:
            self._take_revision(record)
        self.marks.setdefault("decided", now)
        self.reason = record.reason or self.reason
        match record.phase:
            case Phase.PREPARE | Phase.WITHDRAW | Phase.ABORT:
                pass
            case Phase.PERMIT:
                self.marks.setdefault("ready", now)
            case Phase.RETIRE:
                self.marks.setdefault("active", now)

    def take_end(self, ended: HandoffEnded) -> None:
        """How the handoff ended; that it fell to another rung on the way, or redid a batch, is still said."""
        said = [ended.reason.text]
        if self.fallback is not None:
            said.append(_fell_text(self.fallback))
        if self.redone is not None:
            said.append(f"a batch was done again: {self.redone}")
        self.decision, self.reason = ended.decision, replace(ended.reason, text="; ".join(said))

    def next_mirror(self, state: HandoffState, stage: str, now: float) -> HandoffMirror:
        """The mirror as of now."""
        self.is_stale = False
        self.mirror = self.mirror.model_copy(
            update={
                "mirror_seq": self.mirror.mirror_seq + 1,
                "state": state,
                "stage": stage[:256],
                "decision": None if self.decision is Decision.UNDECIDED else self.decision,
                "reason": self.reason if self.reason is not None else self.mirror.reason,
                "changed_utc": utc(now),
                "superseded": self.superseded,
                "rung": self.mirror.rung if self.fallback is None else Rung.STOP_AND_COPY,
                "measures": self._measures(),
            }
        )
        return self.mirror

    def state_of(self, record: ProposerRecord) -> HandoffState:
        """The state of the open handoff, by phase and by how far the furthest participant is."""
        return state_of_open(
            record.phase, is_past="boundary" in self.marks, streams=Stage.STREAMING in self.stages.values()
        )

    def _measures(self) -> HandoffMeasures:
        opened = self.mirror.opened_utc.timestamp()
        phases: dict[str, float] = {}
        before = opened
        for name, mark in (("to_ready", "ready"), ("to_boundary", "boundary"), ("to_active", "active")):
            if mark in self.marks:
                phases[name] = max(0.0, self.marks[mark] - before)
                before = self.marks[mark]
        if "retired" in self.marks and "active" in self.marks:
            phases["to_retired"] = max(0.0, self.marks["retired"] - self.marks["active"])
        certificates = set(self.certificates.values())
        driver = HandoffMeasures(
            phases_s=phases,
            lost_s=self.lost_time.lost_s,
            rung_costs=self.costs,
            notice_to_decided_s=self._since_notice("decided"),
            notice_to_first_order_s=self._since_notice("first_order"),
            notice_to_safe_s=self._since_notice("safe"),
            notice_to_active_s=self._since_notice("active"),
            certificate="; ".join(sorted(certificates))[:256] or None,
            cutover_step=self.lost_time.cutover_step,
        )
        merged = merge_measures(self.measures.values(), driver)
        streamed_s, ready = merged.phases_s.get(PreparePhase.STREAM), self.marks.get("ready")
        since = None if streamed_s is None or ready is None else ready - streamed_s
        self.lost_parts = self.lost_parts or self.lost_time.parts(since, merged.pause_s)
        return merged.model_copy(update={"lost_parts": self.lost_parts})

    def _since_notice(self, mark: str) -> float | None:
        if self.notice_at is None or mark not in self.marks:
            return None
        return max(0.0, self.marks[mark] - self.notice_at)


ENDS = frozenset(str(stage) for stage in (Stage.ACTIVE, Stage.ABORTED, Stage.BROKEN))
"""What the newest mirror of a handoff that has ended has as its stage."""


def first_mirror(proposal: Proposal, purpose: Purpose, generation: int, node_id: str, now: float) -> HandoffMirror:
    """The mirror of a handoff that was just opened by the agent of `node_id`, which hosts its store as well."""
    return HandoffMirror(
        handoff_id=UUID(proposal.handoff_id),
        job_id=proposal.job_id,
        parent=proposal.parent,
        generation=generation,
        plan_digest=proposal.plan_digest,
        proposer=node_id,
        cause=HandoffCause(proposal.cause),
        state=HandoffState.PREPARING,
        stage=str(Phase.PREPARE),
        rung=proposal.rung,
        source=proposal.source,
        target=Roster(proposal.job_id, generation, proposal.layout, proposal.members),
        leaving=tuple(sorted(purpose.leaving)),
        store=proposal.store,
        store_node=node_id,
        reason=Reason(purpose.reason, "open"),
        opened_utc=utc(now),
        deadline_utc=utc(proposal.deadline_utc),
        changed_utc=utc(now),
    )


def _fell_text(why: Reason) -> str:
    return f"fell to {Rung.STOP_AND_COPY}: {why}"


def learned_from(progress: Progress, learned: Learned, ended: HandoffEnded) -> Learned:
    """What the next ladder knows after this handoff."""
    if ended.stage is Stage.ACTIVE:
        learned = _measured(progress, learned)
    target = progress.mirror.target
    if ended.reason.phase == PreparePhase.ESTIMATE_MEMORY and target is not None:
        refused = {"refused_in": progress.mirror.parent, "refused_layout": str(target.layout)}
        return replace(learned, memory_refusal=ended.reason.text, **refused)
    if ended.stage is not Stage.ACTIVE and ended.reason.phase == PreparePhase.PLAN_THE_RESCUE:
        return replace(learned, rescue_failure=ended.reason.text, rescue_failed_in=progress.mirror.parent)
    why = progress.fallback or (ended.reason if progress.mirror.rung in STREAMED else None)
    match why:
        case Reason(phase=PreparePhase.REPLAY, text=text):
            return replace(learned, replay_refusal=text)
        case Reason(phase=PreparePhase.STREAM, text=text):
            return replace(learned, stream_failure=text, failed_in=progress.mirror.parent)
        case _:
            return learned


def _measured(progress: Progress, learned: Learned) -> Learned:
    measures, streamed = progress.mirror.measures, progress.mirror.rung in STREAMED
    if measures.bandwidth_bytes_per_s and not streamed:  # What streams beside training tells nothing of the link.
        learned = replace(learned, bandwidth_bytes_per_s=measures.bandwidth_bytes_per_s)
    ready_s = measures.phases_s.get("to_ready")
    if ready_s is not None and math.isfinite(ready_s) and progress.mirror.rung is Rung.RESCUE:
        learned = replace(learned, endpoints_s=ready_s)  # A rescue is ready before anything is built.
    elif ready_s is not None and math.isfinite(ready_s):
        learned = replace(learned, prepare_s=max(0.0, ready_s - measures.phases_s.get(PreparePhase.STREAM, 0.0)))
    if progress.estimate_s is not None and "safe" in progress.marks and progress.mirror.plan_revision == 1:
        took_s = progress.marks["safe"] - progress.mirror.opened_utc.timestamp()
        learned = replace(learned, late_s=(*learned.late_s, took_s - progress.estimate_s)[-LATE_KEPT:])
    follow_s = [said["follow_s"] for said in progress.measures.values() if "follow_s" in said]
    return replace(learned, follow_s=max(follow_s)) if follow_s else learned


def from_mirror(mirror: HandoffMirror) -> Progress:
    """After a restart of the agent: what the journal kept. Times that only the old process knew are not made up."""
    measures = mirror.measures
    lost_time = LostTime(mirror.opened_utc.timestamp(), 0, 0.0, measures.cutover_step, measures.lost_s, known=False)
    source = mirror.source.members if mirror.source is not None else ()
    staying = set(mirror.target.members)
    kept = {"costs": measures.rung_costs, "lost_parts": measures.lost_parts}
    return Progress(mirror, lost_time, None, frozenset(source) - staying, **kept)


def cost_of(mirror: HandoffMirror) -> MeasuredCost | None:
    """What a handoff tells of the cost of its rung; None where it is not known, or where more than the rung cost: the
    plan was amended, a batch was done again, or what was to stream was copied."""
    parts, fell = mirror.measures.lost_parts, PreparePhase.STREAM in mirror.measures.phases_s
    if parts is None or mirror.plan_revision != 1 or mirror.decision is not Decision.GO:
        return None
    return None if fell and not mirror.rung.streams else MeasuredCost(mirror.rung, parts)
