"""How the journal keeps what the handoff machines must not forget. Pure; strict on the way back."""

from dataclasses import dataclass, field
from typing import Any

from liver_core.handoff import (
    CutoverDeadlines,
    Decision,
    HandoffId,
    Order,
    ParticipantRecord,
    Phase,
    Promise,
    Proposal,
    ProposerRecord,
    Reason,
    Rung,
    Stage,
    StoreAddress,
)
from liver_core.handoff.participant_events import EndedHandoff
from liver_core.handoff.proposer_events import HandoffEnded
from liver_core.layout import Member, ParallelLayout, Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMemory:
    """One slot: the participant's record, and which birth its world had (origin and store), which the record lacks."""

    record: ParticipantRecord = field(default_factory=ParticipantRecord)
    origin: str = ""
    store: StoreAddress | None = None


def slot_to_json(memory: SlotMemory) -> dict[str, Any]:
    """For the journal."""
    record = memory.record
    return {
        "origin": memory.origin,
        "store": _optional(memory.store),
        "active": _optional(record.active),
        "highest_generation": record.highest_generation,
        "promise": _optional(record.promise),
        "order": _optional(record.order),
        "decision": str(record.decision),
        "reason": _optional(record.reason),
        "ended": [
            {
                "handoff_id": ended.handoff_id,
                "generation": ended.generation,
                "plan_revision": ended.plan_revision,
                "stage": str(ended.stage),
                "decision": str(ended.decision),
                "reason": _optional(ended.reason),
            }
            for ended in record.ended
        ],
    }


def slot_from_json(data: dict[str, Any]) -> SlotMemory:
    """The inverse. Raises KeyError or ValueError."""
    record = ParticipantRecord(
        active=None if data["active"] is None else Roster.from_json(data["active"]),
        highest_generation=data["highest_generation"],
        promise=None if data["promise"] is None else Promise.from_json(data["promise"]),
        order=None if data["order"] is None else Order.from_json(data["order"]),
        decision=Decision(data["decision"]),
        reason=_reason(data["reason"]),
        ended=tuple(
            EndedHandoff(
                HandoffId(ended["handoff_id"]),
                ended["generation"],
                ended["plan_revision"],
                Stage(ended["stage"]),
                Decision(ended["decision"]),
                _reason(ended["reason"]),
            )
            for ended in data["ended"]
        ),
    )
    store = None if data["store"] is None else StoreAddress.from_json(data["store"])
    return SlotMemory(record=record, origin=data["origin"], store=store)


def proposer_to_json(record: ProposerRecord) -> dict[str, Any]:
    """For the journal."""
    return {
        "highest_generation": record.highest_generation,
        "proposal": None if record.proposal is None else _proposal_to_json(record.proposal),
        "generation": record.generation,
        "plan_revision": record.plan_revision,
        "target_revision": record.target_revision,
        "pending": None if record.pending is None else _proposal_to_json(record.pending),
        "phase": str(record.phase),
        "reason": _optional(record.reason),
        "ended": [
            {
                "handoff_id": ended.handoff_id,
                "generation": ended.generation,
                "stage": str(ended.stage),
                "decision": str(ended.decision),
                "reason": ended.reason.to_json(),
            }
            for ended in record.ended
        ],
    }


def proposer_from_json(data: dict[str, Any]) -> ProposerRecord:
    """The inverse. Raises KeyError or ValueError."""
    return ProposerRecord(
        highest_generation=data["highest_generation"],
        proposal=None if data["proposal"] is None else _proposal_from_json(data["proposal"]),
        generation=data["generation"],
        plan_revision=data["plan_revision"],
        target_revision=data["target_revision"],
        pending=None if data["pending"] is None else _proposal_from_json(data["pending"]),
        phase=Phase(data["phase"]),
        reason=_reason(data["reason"]),
        ended=tuple(
            HandoffEnded(
                HandoffId(ended["handoff_id"]),
                ended["generation"],
                Stage(ended["stage"]),
                Decision(ended["decision"]),
                Reason.from_json(ended["reason"]),
            )
            for ended in data["ended"]
        ),
    )


def _proposal_to_json(proposal: Proposal) -> dict[str, Any]:
    return {
        "handoff_id": proposal.handoff_id,
        "job_id": proposal.job_id,
        "parent": proposal.parent,
        "source": _optional(proposal.source),
        "layout": proposal.layout.to_json(),
        "members": [member.to_json() for member in proposal.members],
        "plan_digest": proposal.plan_digest,
        "store": proposal.store.to_json(),
        "cause": proposal.cause,
        "rung": str(proposal.rung),
        "deadline_utc": proposal.deadline_utc,
        "cutover": proposal.cutover.to_json(),
    }


def _proposal_from_json(data: dict[str, Any]) -> Proposal:
    return Proposal(
        handoff_id=HandoffId(data["handoff_id"]),
        job_id=data["job_id"],
        parent=data["parent"],
        source=None if data["source"] is None else Roster.from_json(data["source"]),
        layout=ParallelLayout.from_json(data["layout"]),
        members=tuple(Member.from_json(member) for member in data["members"]),
        plan_digest=data["plan_digest"],
        store=StoreAddress.from_json(data["store"]),
        cause=data["cause"],
        rung=Rung(data["rung"]),
        deadline_utc=data["deadline_utc"],
        cutover=CutoverDeadlines.from_json(data["cutover"]),
    )


def _optional(value: Any) -> Any:
    return None if value is None else value.to_json()


def _reason(data: Any) -> Reason | None:
    return None if data is None else Reason.from_json(data)
