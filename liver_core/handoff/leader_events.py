"""What goes into a `Leader` and what comes out of it, and what it asks its planner. Pure.

The events of the proposer that it hosts (`ReportReceived`, `Cancel`, `Tick`) and that one's effects go through it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from liver_core.handoff.ladder import LadderInputs
from liver_core.handoff.messages import HandoffId, Rung, StoreAddress, Tick
from liver_core.handoff.proposer_events import (
    Cancel,
    HandoffEnded,
    PersistProposal,
    Proposal,
    Refused,
    ReportReceived,
    SendOrder,
)
from liver_core.handoff.rung_costs import MeasuredCost, Prefer, RungCost
from liver_core.layout import Member, ParallelLayout, Roster

NOTICE = "notice"
"""The cause of a handoff that answers notices."""
LIVE_RUNGS = (Rung.LIVE, Rung.DROP_STEP, Rung.STOP_AND_COPY, Rung.RESCUE)
"""Rungs on which the job goes on without a restart; the others are the service's to take."""

# What a planner says.


@dataclass(frozen=True, slots=True)
class Plan:
    """The world to go to, and why. `digest` is that of the service's plan, empty for one made elsewhere."""

    layout: ParallelLayout
    members: tuple[Member, ...]
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again in a moment."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoPlan:
    """There is no world to go to live; what is left, checkpoint rung or suspension, the service decides."""

    reason: str


@dataclass(frozen=True, slots=True)
class RungBasis:
    """What the rung of a handoff is chosen by. `measured`: what earlier ones cost, newest last."""

    inputs: LadderInputs
    prefer: Prefer = Prefer.PAUSE
    measured: tuple[MeasuredCost, ...] = ()


class Planner(Protocol):
    """What depends on the job: its order, its plans, its pace, what its handoffs measured."""

    def candidates(self, source: Roster, leaving: Iterable[str]) -> tuple[str, ...]:
        """Who may lead, first choice first; never a node that will go."""
        ...

    def plan(
        self, source: Roster, leaving: frozenset[str], *, barred: frozenset[str], left_s: float, waited_s: float
    ) -> Plan | Wait | NoPlan:
        """The world without these nodes, which takes none of the `barred`. `waited_s`: for how long no plan was found
        so far; `left_s`: until the first state must be safe."""
        ...

    def ladder(self, wanted: Proposal, leaving: frozenset[str], left_s: float | None) -> RungBasis:
        """What speaks for which rung; `left_s` None: nothing presses."""
        ...


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a proposal, or a newer revision of one, is for, beside what it asks of ranks. `leaving`: the nodes that it
    answers, of a revision those that it answers more. `notice_at`: when the first of their notices was heard.
    `estimate_s`: what its rung is expected to need; `costs`: what each is expected to cost. Not known for a revision
    that this agent's process did not make."""

    leaving: frozenset[str]
    notice_at: float | None
    reason: str
    costs: tuple[RungCost, ...] = ()
    estimate_s: float | None = None


# Events.


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that will go. Seconds since 1970: when that was heard, by when its state must be elsewhere, when the node
    is said to be gone, and until when it may be there all the same."""

    node_id: str
    heard_at: float
    safe_by: float
    ends_at: float
    late_until: float


def with_time_left(losses: Iterable[Loss], now: float) -> dict[str, Loss]:
    """By node. One whose time has run out is left behind too, but does not take their time from the others. Where all
    have only what is reserved for delays, that is used, and then the time for which a machine may go late: a loss is
    certain without it."""
    found = {loss.node_id: loss for loss in losses}
    for ends in ("safe_by", "ends_at", "late_until"):
        in_time = min((at for loss in found.values() if (at := getattr(loss, ends)) > now), default=None)
        if in_time is not None:
            late = {name: replace(loss, safe_by=in_time) for name, loss in found.items() if loss.safe_by <= now}
            return found | late
    return found


@dataclass(frozen=True, slots=True)
class Promised:
    """A handoff that ranks of this node are promised to, and whose world they do not step in yet: who leads it, and the
    nodes of its target."""

    proposer_id: str
    target: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossesKnown:
    """All that is known now, again and again. `world`: the one that the job steps in.

    `losses`: every node that will go, once each, also one that is no member. `barred`: nodes that must not get a rank.
    `promised`: None where the ranks here are free for another handoff. `is_starting`: a rank here has not made
    the first step of the world yet. `knows_pace`: how long a step takes is known here. `may_suspend`: agents may
    suspend the job by themselves. `used`: the greatest number that the service or the ranks here know as used. `news`:
    something was heard since the last time.
    """

    world: Roster
    losses: tuple[Loss, ...] = ()
    barred: frozenset[str] = frozenset()
    promised: Promised | None = None
    is_starting: bool = False
    knows_pace: bool = True
    may_suspend: bool = False
    used: int = 0
    news: bool = False

    @property
    def gets_no_rank(self) -> frozenset[str]:
        """The nodes that no plan may take: a member keeps the rank that it has until it goes."""
        return self.barred - set(self.world.node_ids())


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffWanted:
    """The service proposes it, again and again. After LossesKnown. `notice_at`: None where nothing presses.
    `is_heard`: a notice of one of its leavers is known here, whether it still counts or not. `has_ended`: a rank here
    took part in it, and it is over."""

    handoff_id: str
    parent: int
    cause: str
    plan: Plan
    leaving: frozenset[str]
    deadline_utc: float
    notice_at: float | None
    is_heard: bool = False
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class AskedToLead:
    """Another node says that it is this one's turn."""


@dataclass(frozen=True, slots=True)
class OwnNoticeWithdrawn:
    """This node stays."""


@dataclass(frozen=True, slots=True)
class PeersAnswered:
    """To AskPeers. `too_few`: why this node may be the one that is cut off, empty if enough answered; `highest`: the
    greatest number that those who answered know as used."""

    generation: int
    too_few: str = ""
    highest: int = 0


@dataclass(frozen=True, slots=True)
class StoreReady:
    """To StartStore: it listens."""

    generation: int
    store: StoreAddress


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """To StartStore. It may have been up for a moment, so its number is used."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StoreDied:
    """The store that this node keeps of a generation died."""

    generation: int


@dataclass(frozen=True, slots=True)
class WorldStarted:
    """The service has started this generation. Said again and again."""

    generation: int


@dataclass(frozen=True, slots=True)
class PeersUnreachable:
    """Since when each node's agent has not been reached. Said again and again, with none as well."""

    since: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """To ForwardNotices: who was told, empty if nobody was, and who was tried before in vain."""

    told: str
    missed: tuple[str, ...] = ()


LeaderEvent = (
    LossesKnown
    | HandoffWanted
    | AskedToLead
    | OwnNoticeWithdrawn
    | PeersAnswered
    | StoreReady
    | StoreFailed
    | StoreDied
    | WorldStarted
    | PeersUnreachable
    | Forwarded
    | ReportReceived
    | Cancel
    | Tick
)


# Effects.


@dataclass(frozen=True, slots=True)
class AskPeers:
    """Hear whether these nodes are there, and which numbers they know. Answer with PeersAnswered."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartStore:
    """Have a store for this generation. Answer with StoreReady or StoreFailed."""

    generation: int


@dataclass(frozen=True, slots=True)
class HandoffOpened:
    """What PersistProposal keeps next is a new handoff: keep what it is for together with it."""

    proposal: Proposal
    generation: int
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class HandoffAmended:
    """The open handoff gets a newer revision, now or when its permission is taken back."""

    purpose: Purpose


@dataclass(frozen=True, slots=True)
class HandoffSuperseded:
    """The open handoff is given up for another one, which answers more."""


@dataclass(frozen=True, slots=True)
class Decline:
    """Tell the service why its proposal is not opened."""

    handoff_id: HandoffId
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """People see it. `about`: what must differ for it to be news, where numbers in the text always do."""

    text: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class ForwardNotices:
    """Tell the first of these agents that can be reached of the notices of these nodes. Answer with Forwarded."""

    to: tuple[str, ...]
    about: frozenset[str]


@dataclass(frozen=True, slots=True)
class TellWithdrawal:
    """Tell these agents, who were told that this node goes, that it stays."""

    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SuspendAlone:
    """Nothing fits without these nodes. Where the service is away agents suspend the job."""

    world: Roster
    leaving: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True)
class CallOffSuspension:
    """There is another way by now, or no need."""


@dataclass(frozen=True, slots=True)
class AskPace:
    """Ask the members of this world how long a step takes."""

    world: Roster


HandoffEffect = (
    AskPeers
    | StartStore
    | HandoffOpened
    | HandoffAmended
    | HandoffSuperseded
    | Decline
    | Say
    | PersistProposal
    | SendOrder
    | HandoffEnded
    | Refused
)
"""About the handoff that is led here."""
NoticeEffect = ForwardNotices | TellWithdrawal | SuspendAlone | CallOffSuspension | AskPace
"""About notices."""
LeaderEffect = HandoffEffect | NoticeEffect
