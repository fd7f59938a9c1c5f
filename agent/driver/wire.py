"""Between the wire contract's models and liver_core's dataclasses. Pure; loses nothing that both sides know."""

from datetime import UTC, datetime

from agent.protocol import values
from agent.protocol.rank import CutoverLimits
from agent.protocol.values import HandoffDecision
from liver_core.handoff import CutoverDeadlines, Decision, Reason, Rung, StoreAddress
from liver_core.handoff.participant_events import RankStage
from liver_core.layout import Member, ParallelLayout, Roster

_RANK_STAGES = {
    values.RankStage.PREPARING: RankStage.PREPARING,
    values.RankStage.STREAMING: RankStage.STREAMING,
    values.RankStage.PREPARED: RankStage.PREPARED,
    values.RankStage.READY: RankStage.READY,
    values.RankStage.CUTTING_OVER: RankStage.CUTTING_OVER,
    values.RankStage.ACTIVE: RankStage.ACTIVE,
    values.RankStage.LEFT: RankStage.LEFT,
    values.RankStage.ABORTED: RankStage.ABORTED,
    values.RankStage.BROKEN: RankStage.BROKEN,
}
"""Stages of a rank that are about a handoff; the others (starting, training, finished, failed) are about its world."""


def core_stage(stage: values.RankStage) -> RankStage | None:
    """The stage as the participant machine knows it, None for one that is not about a handoff."""
    return _RANK_STAGES.get(stage)


def core_layout(layout: values.Layout) -> ParallelLayout:
    """liver_core's form."""
    return ParallelLayout(**layout.model_dump())


def wire_layout(layout: ParallelLayout) -> values.Layout:
    """The wire's form."""
    return values.Layout(**layout.to_json())


def core_members(members: tuple[values.Member, ...]) -> tuple[Member, ...]:
    """liver_core's form."""
    return tuple(Member(member.node_id, member.slot) for member in members)


def core_roster(roster: values.Roster) -> Roster:
    """liver_core's form."""
    return Roster(roster.job_id, roster.generation, core_layout(roster.layout), core_members(roster.members))


def wire_roster(roster: Roster) -> values.Roster:
    """The wire's form."""
    return values.Roster(
        job_id=roster.job_id,
        generation=roster.generation,
        layout=wire_layout(roster.layout),
        members=tuple(values.Member(node_id=member.node_id, slot=member.slot) for member in roster.members),
    )


def wire_store(store: StoreAddress) -> values.StoreAddress:
    """The wire's form."""
    return values.StoreAddress(host=store.host, port=store.port)


def core_store(store: values.StoreAddress) -> StoreAddress:
    """liver_core's form."""
    return StoreAddress(store.host, store.port)


def wire_cutover(deadlines: CutoverDeadlines) -> CutoverLimits:
    """The wire's form."""
    return CutoverLimits(**deadlines.to_json())


def wire_reason(reason: Reason) -> values.Reason:
    """The wire's form."""
    return values.Reason(
        text=reason.text[: values.REASON_CHARS_MAX],
        rank=reason.rank,
        phase=reason.phase[:256] or None,
        tile=reason.tile[:256] or None,
    )


def core_reason(reason: values.Reason, phase: str) -> Reason:
    """liver_core's form; `phase` is where the reason arose, for one that does not say it itself."""
    return Reason(reason.text or "no reason given", reason.phase or phase, reason.rank, reason.tile or "")


def core_decision(decision: HandoffDecision | None) -> Decision:
    """An absent decision is an undecided one."""
    return Decision.UNDECIDED if decision is None else Decision(str(decision))


def wire_decision(decision: Decision) -> HandoffDecision | None:
    """An undecided one is absent."""
    return None if decision is Decision.UNDECIDED else HandoffDecision(str(decision))


def wire_rung(rung: Rung) -> values.Rung:
    """The wire's form; every rung of liver_core has its name there."""
    return values.Rung(str(rung))


def utc(seconds: float) -> datetime:
    """Seconds since 1970 as an aware time."""
    return datetime.fromtimestamp(seconds, UTC)
