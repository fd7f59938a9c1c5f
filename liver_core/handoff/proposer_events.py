"""What goes into a `Proposer` and what comes out of it: events, effects and the record that its host journals.

Pure. Effects are executed in order; `PersistProposal` is confirmed on disk before any effect after it is carried out.
"""

from dataclasses import dataclass
from typing import Annotated

from liver_core.handoff.messages import (
    AnyGeneration,
    CutoverDeadlines,
    Decision,
    HandoffId,
    HandoffName,
    Order,
    Phase,
    Reason,
    Report,
    Rung,
    Stage,
    StoreAddress,
    Tick,
)
from liver_core.layout import Member, Members, ParallelLayout, Roster
from liver_core.layout.limits import STRICT, Bound, Count, Digest, JobId, Name, UtcSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What somebody wants to happen. It has no generation: the proposer burns one when the handoff is opened.

    `source` is the roster of the parent generation. `store` is the store of the target generation; it listens already.
    `deadline_utc` is the last moment for the agreed boundary.
    """

    handoff_id: HandoffName
    job_id: JobId
    parent: AnyGeneration
    source: Roster
    layout: ParallelLayout
    members: Members
    plan_digest: Digest
    store: StoreAddress
    cause: Name
    rung: Rung
    deadline_utc: UtcSeconds
    cutover: CutoverDeadlines


# Events.


@dataclass(frozen=True, slots=True)
class Open:
    """Open a handoff. Refused while another one is open."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Amend:
    """Another notice: a new plan under the same `handoff_id` and generation, as the next plan revision.

    It keeps parent, source, store and cutover deadlines; target, cause and rung (live or stop-and-copy) may change, and
    the deadline may only come nearer. Refused after permission: cancel and open again, or, past the boundary, open the
    next handoff in the next world. Capacity that appears is no reason to amend.
    """

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Cancel:
    """Abort the open handoff (superseded, or a person said so). Too late once the boundary was agreed."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The host knows that this member's node or rank is gone."""

    member: Member
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """A Report arrived from a participant."""

    report: Report


@dataclass(frozen=True, slots=True)
class Hindered:
    """The host itself could not hear participants for a while: that some are silent says nothing about them."""

    reason: Reason


ProposerEvent = Open | Amend | Cancel | MemberLost | Hindered | ReportReceived | Tick


# Effects.

ENDED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerRecord:
    """All that must survive a restart of the host. `proposal` is the open handoff (None: none), `phase` what it wants.

    `highest_generation` is the highest number burned here, `target_revision` the plan revision in which the target and
    the rung became what they are, `pending` the plan for which permission is being taken back. At most ENDED_MAX
    `ended` are kept.
    """

    __pydantic_config__ = STRICT

    highest_generation: AnyGeneration = 0
    proposal: Proposal | None = None
    generation: AnyGeneration = 0
    plan_revision: Count = 0
    target_revision: Count = 0
    pending: Proposal | None = None
    phase: Phase = Phase.PREPARE
    reason: Reason | None = None
    ended: Annotated[tuple["HandoffEnded", ...], Bound(max_length=ENDED_MAX)] = ()


@dataclass(frozen=True, slots=True)
class PersistProposal:
    """Journal the record, wait until it is on disk, and only then go on to the next effect."""

    record: ProposerRecord


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Send the order to the participant `member`; it may get lost."""

    member: Member
    order: Order


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """The handoff is over: `active`, `aborted`, or `broken` (only the checkpoint rung is left), and why."""

    handoff_id: HandoffName
    generation: AnyGeneration
    stage: Stage
    decision: Decision
    reason: Reason


@dataclass(frozen=True, slots=True)
class Refused:
    """The event asked for something that cannot be; nothing was changed."""

    handoff_id: HandoffId
    reason: Reason


ProposerEffect = PersistProposal | SendOrder | HandoffEnded | Refused
