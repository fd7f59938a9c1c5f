"""How a job goes from world g to world g+1: five sans-IO machines and the two messages between them.

Pure: no threads, no clock, no randomness, no input or output. `README.md` beside this file shows the API and which
process hosts which machine. Events and effects that share a name live in the modules of their machines.
"""

from liver_core.handoff.cutover import Cutover
from liver_core.handoff.ladder import LadderInputs, RungChoice, choose_rung
from liver_core.handoff.messages import (
    OUT_OF_TIME,
    PROTOCOL_VERSION,
    CutoverDeadlines,
    Decision,
    FailedPart,
    FailureCause,
    HandoffId,
    LaterCheckpoints,
    Order,
    Phase,
    PreparePhase,
    Promise,
    RankStage,
    Reason,
    Report,
    Rung,
    Stage,
    StoreAddress,
    WorldStage,
    start_order,
)
from liver_core.handoff.participant import Participant
from liver_core.handoff.participant_events import ParticipantRecord
from liver_core.handoff.proposer import Proposer
from liver_core.handoff.proposer_events import Proposal, ProposerRecord
from liver_core.handoff.ready_tag import (
    Agreement,
    BoundaryPhase,
    agreed,
    boundary_pair,
    connect_word,
    drop_word,
    pack,
    ready_tag,
)
from liver_core.handoff.rung_costs import CostParts, MeasuredCost, Prefer, RungCost
from liver_core.layout import MessageError

__all__ = [
    "OUT_OF_TIME",
    "PROTOCOL_VERSION",
    "Agreement",
    "BoundaryPhase",
    "CostParts",
    "Cutover",
    "CutoverDeadlines",
    "Decision",
    "FailedPart",
    "FailureCause",
    "HandoffId",
    "LadderInputs",
    "LaterCheckpoints",
    "MeasuredCost",
    "MessageError",
    "Order",
    "Participant",
    "ParticipantRecord",
    "Phase",
    "Prefer",
    "PreparePhase",
    "Promise",
    "Proposal",
    "Proposer",
    "ProposerRecord",
    "RankStage",
    "Reason",
    "Report",
    "Rung",
    "RungChoice",
    "RungCost",
    "Stage",
    "StoreAddress",
    "WorldStage",
    "agreed",
    "boundary_pair",
    "choose_rung",
    "connect_word",
    "drop_word",
    "pack",
    "ready_tag",
    "start_order",
]
