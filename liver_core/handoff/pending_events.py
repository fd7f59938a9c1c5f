"""What a rank's pending handoff takes and gives: the events and effects of `pending`. Pure."""

from dataclasses import dataclass

from liver_core.handoff.messages import Order, RankStage, Reason, Tick
from liver_core.handoff.ready_tag import Agreement


@dataclass(frozen=True, slots=True)
class BuiltWorld:
    """What decides of a world that is built. `streams`: its state streams, so that only the last gradients move in the
    pause. `lacks_communicators`: the ranks have to make those of their GPUs at a boundary of their own, before the
    cutover. `fell`: why the state is copied although the order asked to stream it."""

    streams: bool = False
    lacks_communicators: bool = False
    fell: Reason | None = None


# Events. `build` is the number of a BuildWorld effect.


@dataclass(frozen=True, slots=True)
class OrderCame:
    """An order to prepare: a new handoff, or a newer revision of the pending one."""

    order: Order


@dataclass(frozen=True, slots=True)
class Entered:
    """A newcomer's main thread is ready to build. Orders that came before wait for this."""

    order: Order


@dataclass(frozen=True, slots=True)
class Permitted:
    """Show the ready tag from the next boundary on. It may come before a first world is built."""

    handoff_id: str
    plan_revision: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Stop showing the ready tag."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """Drop the next world. It may come before the order that it is about."""

    handoff_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class StreamBegan:
    """The world is built, and its state streams from now on."""

    build: int


@dataclass(frozen=True, slots=True)
class Built:
    """The build has ended well."""

    build: int
    world: BuiltWorld


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """The build has ended, and left nothing behind."""

    build: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class BoundaryOver:
    """What all ranks agreed on at the boundary for which `show` was asked; None if on nothing."""

    agreement: Agreement | None


@dataclass(frozen=True, slots=True)
class BoundaryFound:
    """A newcomer: the source world has passed the boundary, or there is none."""

    build: int


@dataclass(frozen=True, slots=True)
class BoundaryMissed:
    """A newcomer: it cannot hear of the boundary any more."""

    build: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class BetweenSteps:
    """The main thread is between two steps, or a newcomer's is awake: it may connect or drop now."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The communicators of the next world are made; with a reason, they cannot be."""

    build: int
    problem: Reason | None = None


@dataclass(frozen=True, slots=True)
class CutoverEnded:
    """The cutover is over: the next world is the active one; with a reason, it is dropped. `beside`: beside training,
    since this rank goes on in the source world."""

    dropped: Reason | None = None
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """The world is dropped, and its memory free."""

    build: int


@dataclass(frozen=True, slots=True)
class RankEnds:
    """This process ends now, whatever is still being dropped."""


PendingEvent = (
    OrderCame
    | Entered
    | Permitted
    | Withdrawn
    | Aborted
    | StreamBegan
    | Built
    | BuildFailed
    | BoundaryOver
    | BoundaryFound
    | BoundaryMissed
    | BetweenSteps
    | Connected
    | CutoverEnded
    | Dropped
    | RankEnds
    | Tick
)


# Effects.


@dataclass(frozen=True, slots=True)
class BuildWorld:
    """Build the next world, after the older one `gives_way`, if that is still there. Answer with Built or BuildFailed;
    with StreamBegan on the way."""

    build: int
    order: Order
    gives_way: int | None = None


@dataclass(frozen=True, slots=True)
class Amend:
    """The order is a newer revision of the same target: what is built and has arrived is kept."""

    build: int
    order: Order


@dataclass(frozen=True, slots=True)
class Say:
    """Report this stage to the agent, with what this build measured."""

    order: Order
    stage: RankStage
    reason: Reason | None = None
    build: int | None = None


@dataclass(frozen=True, slots=True)
class Connect:
    """Make the communicators of the next world. Answer with Connected."""

    build: int


@dataclass(frozen=True, slots=True)
class CutOver:
    """Cut over to the next world. Answer with CutoverEnded, unless the process ends."""

    build: int


@dataclass(frozen=True, slots=True)
class DropWorld:
    """Free the world. Answer with Dropped. `beside`: in a thread, while this rank trains."""

    build: int
    reason: Reason
    beside: bool


@dataclass(frozen=True, slots=True)
class EndNewcomer:
    """This newcomer has no next world any more, so it ends."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Warn:
    """For the log: what was asked and is not done."""

    text: str


PendingEffect = BuildWorld | Amend | Say | Connect | CutOver | DropWorld | EndNewcomer | Warn
PendingEffects = tuple[PendingEffect, ...]
