"""The leader of a job on one node, with a planner that finds what a test says, and ranks that do what it says. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from liver_core.handoff import (
    LadderInputs,
    Order,
    Participant,
    ParticipantRecord,
    Proposal,
    ProposerRecord,
    RankStage,
    Reason,
    StoreAddress,
)
from liver_core.handoff.leader import Leader
from liver_core.handoff.leader_events import (
    AskPeers,
    HandoffOpened,
    HandoffWanted,
    LeaderEffect,
    LeaderEvent,
    Loss,
    LossesKnown,
    NoPlan,
    PeersAnswered,
    Plan,
    RungBasis,
    StartStore,
    StoreReady,
    Wait,
)
from liver_core.handoff.own_handoffs import Led
from liver_core.handoff.participant_events import OrderReceived, ParticipantEvent, RankReported, SendReport
from liver_core.handoff.proposer_events import HandoffEnded, PersistProposal, ReportReceived, SendOrder
from liver_core.layout import Member, ParallelLayout, Roster

E = TypeVar("E")
FOUR = ("a", "b", "c", "d")
STORE = StoreAddress("127.0.0.1", 4_000)
ROOMY = LadderInputs(
    bytes_to_move=1_000_000_000,
    bandwidth_bytes_per_s=1e9,
    prepare_s=2.0,
    step_s=0.5,
    seconds_to_boundary=0.3,
    seconds_to_deadline=None,
    margin_s=1.0,
    sources_whole=True,
    nodes_left=3,
    nodes_least=1,
    checkpoint_age_steps=40,
    stream_share=0.5,
    follow_s=0.1,
    one_sided=True,
    replay_refusal="",
    stream_failure="",
    bytes_only_leaving=400_000_000,
    endpoints_s=1.0,
    ranks_staying=3,
    rescue_failure="",
)
"""Every rung fits where half a minute is left."""


def world_of(generation: int, *nodes: str) -> Roster:
    members = tuple(Member(name, 0) for name in nodes)
    return Roster("job", generation, ParallelLayout(dp=len(nodes)), members)


ACTIVE = world_of(1, *FOUR)


def plan_of(*nodes: str, reason: str = "as planned") -> Plan:
    world = world_of(1, *nodes)
    return Plan(world.layout, tuple(world.members), "digest", reason)


class Plans:
    """`order`: who may lead; where all of them go, `spares`. `finds`: None for what is left and the spares."""

    def __init__(self) -> None:
        self.order: tuple[str, ...] = FOUR
        self.spares: tuple[str, ...] = ()
        self.finds: Plan | Wait | NoPlan | None = None
        self.inputs = ROOMY
        self.asked: list[tuple[frozenset[str], frozenset[str], float]] = []

    def candidates(self, source: Roster, leaving: Iterable[str]) -> tuple[str, ...]:
        gone = set(leaving)
        staying = tuple(name for name in self.order if name in source.node_ids() and name not in gone)
        return staying or tuple(name for name in self.spares if name not in gone)

    def plan(
        self, source: Roster, leaving: frozenset[str], *, barred: frozenset[str], left_s: float, waited_s: float
    ) -> Plan | Wait | NoPlan:
        self.asked.append((leaving, barred, waited_s))
        if self.finds is not None:
            return self.finds
        come = [name for name in self.spares if name not in barred | leaving | set(source.node_ids())]
        nodes = [name for name in source.node_ids() if name not in leaving] + come
        return plan_of(*nodes) if nodes else NoPlan("nobody stays")

    def ladder(self, wanted: Proposal, leaving: frozenset[str], left_s: float | None) -> RungBasis:
        return RungBasis(replace(self.inputs, seconds_to_deadline=left_s))


class Scene:
    """`effects`: all that came out so far. `known`: what is known beside losses and time."""

    def __init__(self, node_id: str = "a", record: ProposerRecord | None = None) -> None:
        self.plans, self.now = Plans(), 1_000.0
        self.ids, self.incarnation = 0, 0
        self.leader = self._started(node_id, record)
        self.known = LossesKnown(world=ACTIVE)
        self.effects: list[LeaderEffect] = []
        self.orders: list[tuple[Member, Order]] = []
        self.participants: dict[Member, Participant] = {}
        for member in ACTIVE.members:
            self._join(member)

    def restart(self, led: Led | None = None) -> None:
        """Only what was persisted is left."""
        persisted = self.persisted()
        self.leader = self._started(self.leader.node_id, persisted[-1] if persisted else None, led)

    def _started(self, node_id: str, record: ProposerRecord | None, led: Led | None = None) -> Leader:
        self.incarnation += 1
        return Leader(
            job_id="job",
            node_id=node_id,
            agent_incarnation=self.incarnation,
            planner=self.plans,
            new_id=self._new_id,
            record=record,
            led=led,
        )

    def _new_id(self) -> str:
        self.ids += 1
        return f"h{self.ids}"

    def hear(self, event: LeaderEvent) -> tuple[LeaderEffect, ...]:
        effects = self.leader.handle(event, self.now)
        self.effects += effects
        self.orders += [(effect.member, effect.order) for effect in effects if isinstance(effect, SendOrder)]
        return effects

    def look(self, *losses: Loss, **known: object) -> tuple[LeaderEffect, ...]:
        """These nodes will go, as far as is known."""
        event = replace(self.known, losses=losses, **known)  # type: ignore[arg-type]
        return self.hear(event)

    def goes(self, name: str, in_s: float = 60.0) -> Loss:
        """Heard now."""
        at = self.now + in_s
        return Loss(name, self.now, at, at, at)

    def opens(self, effects: Iterable[LeaderEffect]) -> int | None:
        """The number of what is being opened by these effects."""
        found = [effect.generation for effect in effects if isinstance(effect, AskPeers | StartStore)]
        return found[0] if found else None

    def open(self, *losses: Loss) -> HandoffOpened:
        """All goes well until the handoff without these nodes is open."""
        return self.comes_up(self.look(*losses))

    def comes_up(self, effects: Sequence[LeaderEffect]) -> HandoffOpened:
        generation = self.opens(effects)
        assert generation is not None, effects
        if any(isinstance(effect, AskPeers) for effect in effects):
            assert self.hear(PeersAnswered(generation)) == (StartStore(generation),)
        return only(self.hear(StoreReady(generation, STORE)), HandoffOpened)

    # Ranks.

    def say(self, *stages: RankStage, reason: Reason | None = None) -> None:
        """All orders arrive; then every rank of the newest revision gets so far."""
        self.deliver()
        for stage in stages:
            for member in tuple(self.participants):
                self._say(member, stage, reason)

    def deliver(self) -> None:
        orders, self.orders = self.orders, []
        for member, order in orders:
            self._join(member)
            self._feed(member, OrderReceived(order))

    def fail(self) -> HandoffEnded:
        """Every rank drops what is open."""
        self.say(RankStage.PREPARING)
        self.say(RankStage.ABORTED, reason=Reason("it broke", "prepare"))
        return self.ended()[-1]

    def succeed(self) -> HandoffEnded:
        self.say(RankStage.PREPARED)
        self.say(RankStage.READY, RankStage.CUTTING_OVER, RankStage.ACTIVE)
        self.deliver()
        return self.ended()[-1]

    def ended(self) -> list[HandoffEnded]:
        return [effect for effect in self.effects if isinstance(effect, HandoffEnded)]

    def persisted(self) -> list[ProposerRecord]:
        return [effect.record for effect in self.effects if isinstance(effect, PersistProposal)]

    def _join(self, member: Member) -> None:
        if member not in self.participants:
            world = ACTIVE if member in ACTIVE.members else None
            record = ParticipantRecord(active=world, highest_generation=1 if world else 0)
            self.participants[member] = Participant(job_id="job", member=member, agent_incarnation=1, record=record)

    def _say(self, member: Member, stage: RankStage, reason: Reason | None) -> None:
        record = self.participants[member].record
        promise, order = record.promise, record.order
        if promise is None or order is None:
            return
        leaves = stage is RankStage.ACTIVE and member not in order.target.members
        said = RankStage.LEFT if leaves else stage
        self._feed(
            member,
            RankReported(promise.handoff_id, order.parent, said, reason=reason, plan_revision=promise.plan_revision),
        )

    def _feed(self, member: Member, event: ParticipantEvent) -> None:
        for effect in self.participants[member].handle(event, self.now):
            if isinstance(effect, SendReport):
                self.hear(ReportReceived(effect.report))


def only(effects: Iterable[LeaderEffect], kind: type[E]) -> E:
    """The one effect of this kind."""
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, found
    return found[0]


def wanted(handoff_id: str = "s1", *, cause: str = "grow", to: tuple[str, ...] = (*FOUR, "e")) -> HandoffWanted:
    """What the service proposes: capacity that appeared, if nothing else is said."""
    return HandoffWanted(
        handoff_id=handoff_id,
        parent=1,
        cause=cause,
        plan=plan_of(*to, reason="more nodes"),
        leaving=frozenset(),
        deadline_utc=1_200.0,
        notice_at=None,
    )
