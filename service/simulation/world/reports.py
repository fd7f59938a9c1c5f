"""What the agents of a simulated world tell its service, and what it tells them. Pure.

All times are seconds of the virtual clock, but for those in a `NoticeFact`, which are moments (`moments.utc`).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from agent.protocol.process_end import ProcessEnd
from agent.protocol.sync import DesiredState, NoticeFact
from agent.protocol.values import HandoffCause, HandoffState, Placement
from liver_core.handoff import Decision, Order, RankStage, Reason, Rung
from liver_core.layout import Roster
from service.planner.inputs import PlannerDecision


@dataclass(frozen=True, slots=True)
class RankSays:
    """One rank process, as its agent reports it. `step`: the last one that it made. `ended`: how its process ended,
    where the agent saw it end. `layout`: of its world."""

    generation: int
    rank: int
    stage: RankStage
    step: int = 0
    reason: Reason | None = None
    ended: ProcessEnd | None = None
    layout: str = ""

    def as_reported(self, job_id: str) -> dict[str, Any]:
        """As the service keeps what an agent reports of a rank."""
        return {
            "job_id": job_id,
            "generation": self.generation,
            "rank": self.rank,
            "slot": 0,
            "layout": self.layout,
            "stage": self.stage,
            "step": self.step,
            "reason": None if self.reason is None else asdict(self.reason),
            "ended": None if self.ended is None else asdict(self.ended),
        }


@dataclass(frozen=True, slots=True)
class Mirror:
    """One copy of a handoff, as the agent that leads it has it. `mirror_seq` grows with each copy that one agent makes.
    `deadline_s`: when the first node that leaves goes, None where none does. `layout`: means something to the host."""

    handoff_id: str
    parent: int
    generation: int
    state: HandoffState
    target: Roster
    mirror_seq: int
    proposer: str
    opened_s: float
    plan_revision: int = 1
    source: Roster | None = None
    leaving: tuple[str, ...] = ()
    deadline_s: float | None = None
    rung: Rung = Rung.STOP_AND_COPY
    decision: Decision = Decision.UNDECIDED
    reason: Reason | None = None
    superseded: bool = False
    cause: str = ""
    store_node: str | None = None
    layout: object = None


@dataclass(frozen=True, slots=True)
class DeclinedProposal:
    """A handoff that the service proposes and that this agent, whose turn it is, does not open."""

    handoff_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What an agent says at one moment. Of two of one `incarnation` the one sent later counts. `ranks`: all processes
    that it knows; `notices`: about its own node, or told by other agents."""

    node: str
    sent_at: float
    incarnation: int = 0
    ranks: tuple[RankSays, ...] = ()
    mirrors: tuple[Mirror, ...] = ()
    declined: tuple[DeclinedProposal, ...] = ()
    notices: tuple[NoticeFact, ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a report. `is_news`: the service has it, so that nothing of it need be sent again; else it is
    older than one taken before, or the service was away. `refused`: handoffs that did not become the job's world, with
    the reasons."""

    is_news: bool
    acknowledged: tuple[Mirror, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    """What the planner wants now, of the running world and of a restart. The layouts mean something to the host."""

    decision: PlannerDecision
    restart: PlannerDecision
    layout: object = None
    restart_layout: object = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A handoff for the agents to open."""

    handoff_id: str
    parent: int
    target: Placement
    leaving: tuple[str, ...]
    deadline_s: float | None
    cause: HandoffCause
    why: str
    layout: object = None


@dataclass(frozen=True, slots=True)
class Orders:
    """What all agents of the job are told. `seq` grows with every change. `start`: the newest of the service, whether
    or not handoffs have followed, and `start_layout` what the host said of it; before `steps_from_at` its ranks make no
    step. `suspends_at`: when agents end the ranks, since nothing fits what will be left. `checkpoint_asked`: the number
    of a checkpoint that is asked for, 0: none is."""

    seq: int
    desired: DesiredState
    generation: int | None
    roster: Roster | None
    start: Order | None
    start_layout: object
    steps_from_at: float | None
    suspends_at: float | None
    proposal: Proposal | None
    notices: tuple[NoticeFact, ...]
    next_generation: int
    lead_order: tuple[str, ...]
    checkpoint_asked: int
    saves_at_end: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """What ranks would have reported of their steps by now. `at`: when the last one was made, None: none was yet.
    `usual_s`: of a step, 0 where it is not known."""

    last: int
    at: float | None
    usual_s: float


@dataclass(frozen=True, slots=True)
class SteadyHost:
    """A host whose agents report news only. `heard_at`: when a node would have reported last, which is now while it is
    up; `steps`: of the job's world, None while it has none."""

    heard_at: Callable[[str], float]
    steps: Callable[[], Steps | None]
