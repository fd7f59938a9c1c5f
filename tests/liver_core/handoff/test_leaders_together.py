"""The leaders of all nodes of a job against the participants' own machines: messages take long and get lost, agents
stand still, and nodes go at the end of their notices. Ranks do what they are told, in no time but to build."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.handoff import Order, Participant, ParticipantRecord, RankStage, Reason
from liver_core.handoff.leader import Leader
from liver_core.handoff.leader_events import (
    AskedToLead,
    AskPeers,
    Forwarded,
    ForwardNotices,
    HandoffOpened,
    LeaderEvent,
    Loss,
    LossesKnown,
    PeersAnswered,
    PeersUnreachable,
    Promised,
    StartStore,
    StoreReady,
)
from liver_core.handoff.participant import ParticipantState
from liver_core.handoff.participant_events import (
    AbortRank,
    ClearReadyTag,
    OrderReceived,
    ParticipantEvent,
    PrepareRank,
    RankDied,
    RankReported,
    SendReport,
    SetReadyTag,
    StopRank,
    Tick,
)
from liver_core.handoff.proposer_events import ReportReceived, SendOrder
from liver_core.handoff.proposer_events import Tick as ProposerTick
from liver_core.layout import Member, Roster
from tests.liver_core.handoff.leader_scene import ACTIVE, FOUR, STORE, Plans

LOOK_S, BUILD_S, STORE_S = 0.5, 1.0, 0.2
START_S = 1_000.0


@dataclass
class Node:
    """Agent and rank. `tag`: what the rank shows at boundaries; `stands_until`: when the agent goes on."""

    name: str
    leader: Leader
    participant: Participant
    tag: tuple[str, int] | None = None
    is_past: bool = False
    stands_until: float = 0.0
    notices: dict[str, Loss] = field(default_factory=dict)


class Job:
    """`opened`: generation and parent of each handoff that was opened; `worlds`: those that the job stepped in.
    `goes_early`: machines that have left are taken at once, with all that their agents lead."""

    def __init__(self, seed: int, *, slow_s: float = 0.05, lost: float = 0.0) -> None:
        self.random, self.slow_s, self.lost = Random(seed), slow_s, lost
        self.now, self.count = START_S, 0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.nodes: dict[str, Node] = {}
        self.opened: list[tuple[int, int]] = []
        self.worlds: list[Roster] = [ACTIVE]
        self.ids = 0
        self.goes_early = bool(seed % 2)
        for name in (*FOUR, "e", "f"):
            self.nodes[name] = self._node(name)
            self.at(self.random.uniform(0.0, LOOK_S), lambda name=name: self._tick(name))

    def _node(self, name: str) -> Node:
        member, plans = Member(name, 0), Plans()
        plans.spares = ("e",)
        world = ACTIVE if member in ACTIVE.members else None
        record = ParticipantRecord(active=world, highest_generation=1 if world else 0)
        participant = Participant(job_id="job", member=member, agent_incarnation=1, record=record)
        leader = Leader(job_id="job", node_id=name, agent_incarnation=1, planner=plans, new_id=self._new_id)
        return Node(name, leader, participant)

    def _new_id(self) -> str:
        self.ids += 1
        return f"h{self.ids}"

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.due, (self.now + after_s, self.count, action))

    def run(self, until_s: float) -> None:
        while self.due and self.due[0][0] < START_S + until_s:
            self.now, _, action = heapq.heappop(self.due)
            action()
        self.now = START_S + until_s

    def send(self, to: str, action: Callable[[Node], None]) -> None:
        """A message to the agent of a node. What comes while it stands still is read when it goes on."""
        if self.random.random() < self.lost:
            return
        self.at(self.random.uniform(0.2, 1.0) * self.slow_s, lambda: self._arrives(to, action))

    def _arrives(self, to: str, action: Callable[[Node], None]) -> None:
        node = self.nodes.get(to)
        if node is not None and node.stands_until > self.now:
            self.at(node.stands_until - self.now, lambda: self._arrives(to, action))
        elif node is not None:
            action(node)

    # What happens.

    def notice(self, name: str, in_s: float) -> None:
        """The node hears of its end, after which it is gone; the others hear of it from the service, a moment later."""
        at = self.now + in_s
        loss = Loss(name, self.now, at - 1.0, at, at)
        for each in tuple(self.nodes):
            self.send(each, lambda node: self._hears(node, loss)) if each != name else self._hears(
                self.nodes[name], loss
            )
        self.at(in_s, lambda: self._goes(name))

    def _goes(self, name: str) -> None:
        self.nodes.pop(name, None)

    def _hears(self, node: Node, loss: Loss) -> None:
        node.notices[loss.node_id] = loss
        self._look(node)

    def _tick(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is None:
            return
        self.at(LOOK_S, lambda: self._tick(name))
        if node.stands_until <= self.now:
            self._tell(node, Tick())
            gone = {each: self.now - 60.0 for each in (*FOUR, "e", "f") if each not in self.nodes}
            self._lead(node, PeersUnreachable(gone))
            self._lead(node, ProposerTick())
            self._look(node)

    def _look(self, node: Node) -> None:
        world = node.participant.record.active
        if world is None:
            return
        order = node.participant.record.order
        bound = order is not None and node.participant.state is not ParticipantState.ACTIVE
        losses = tuple(loss for loss in node.notices.values() if loss.late_until > self.now)
        promised = Promised(order.proposer_id, frozenset(order.target.node_ids())) if order and bound else None
        used = node.participant.record.highest_generation
        barred = frozenset(node.notices)
        self._lead(node, LossesKnown(world=world, losses=losses, barred=barred, promised=promised, used=used))

    # The leaders.

    def _lead(self, node: Node, event: LeaderEvent) -> None:
        for effect in node.leader.handle(event, self.now):
            match effect:
                case AskPeers(generation=generation):
                    used = max(each.leader.own.used for each in self.nodes.values() if each is not node)
                    seen = max(each.participant.record.highest_generation for each in self.nodes.values())
                    self._later(node, self.slow_s, PeersAnswered(generation, highest=max(used, seen)))
                case StartStore(generation=generation):
                    self._later(node, STORE_S, StoreReady(generation, STORE))
                case HandoffOpened(generation=generation, proposal=proposal):
                    self.opened.append((generation, proposal.parent))
                case SendOrder(member=member, order=order):
                    self.send(member.node_id, lambda to, order=order: self._tell(to, OrderReceived(order)))
                case ForwardNotices(to=to):
                    told = next((name for name in to if name in self.nodes), "")
                    self.send(told, self._is_asked)
                    self._later(node, self.slow_s, Forwarded(told, to[: to.index(told)] if told else to))
                case _:
                    pass

    def _is_asked(self, node: Node) -> None:
        self._lead(node, AskedToLead())
        self._look(node)

    def _later(self, node: Node, after_s: float, event: LeaderEvent) -> None:
        self.at(after_s, lambda: self._arrives(node.name, lambda node: self._lead(node, event)))

    # Participants and ranks.

    def _tell(self, node: Node, event: ParticipantEvent) -> None:
        for effect in node.participant.handle(event, self.now):
            match effect:
                case SendReport(to=to, report=report):
                    self.send(to, lambda node, report=report: self._lead(node, ReportReceived(report)))
                case PrepareRank(order=order):
                    node.tag = None
                    self.at(BUILD_S, lambda order=order: self._built(node, order))
                case SetReadyTag(handoff_id=handoff_id, plan_revision=revision):
                    node.tag = handoff_id, revision
                    self._say(node, RankStage.READY)
                    self._look_for_boundary()
                case ClearReadyTag() if not node.is_past:
                    node.tag = None
                    self._say(node, RankStage.PREPARED)
                case AbortRank(reason=reason) if not node.is_past:
                    node.tag = None
                    self._say(node, RankStage.ABORTED, reason)
                case StopRank():
                    self.at(0.0, lambda: self._tell(node, RankDied(Reason("it has ended", "stop"))))
                case _:
                    pass

    def _built(self, node: Node, order: Order) -> None:
        current = node.participant.record.order
        is_same = current is not None and current.handoff_id == order.handoff_id
        if current is not None and is_same and current.plan_revision == order.plan_revision and not node.is_past:
            self._say(node, RankStage.PREPARED)

    def _say(self, node: Node, stage: RankStage, reason: Reason | None = None) -> None:
        promise, world = node.participant.record.promise, self.worlds[-1]
        if promise is not None:
            said = RankReported(promise.handoff_id, world.generation, stage, reason=reason)
            revision = promise.plan_revision
            self.at(
                0.0,
                lambda: self._tell(
                    node, RankReported(said.handoff_id, said.generation, stage, reason=reason, plan_revision=revision)
                ),
            )

    def _look_for_boundary(self) -> None:
        source = self.worlds[-1]
        tags = {self.nodes[name].tag for name in source.node_ids() if name in self.nodes}
        orders = [self.nodes[name].participant.record.order for name in source.node_ids() if name in self.nodes]
        order = orders[0] if orders else None
        if len(tags) != 1 or None in tags or order is None or len(orders) < len(source.members):
            return
        members = [self.nodes.get(name) for name in {*source.node_ids(), *order.target.node_ids()}]
        if any(each is None or each.tag not in tags for each in members):
            return
        assert order.source == source, "what is handed over is the world that steps"
        self.worlds.append(order.target)
        for each in members:
            assert each is not None
            each.is_past = True
            self._say(each, RankStage.CUTTING_OVER)
            self.at(0.3, lambda each=each: self._switches(each, order))

    def _switches(self, node: Node, order: Order) -> None:
        node.tag, node.is_past = None, False
        stays = node.name in order.target.node_ids()
        self._say(node, RankStage.ACTIVE if stays else RankStage.LEFT)
        if not stays and self.goes_early:
            self.at(2 * self.slow_s, lambda: self._goes(node.name))


notices = st.lists(
    st.tuples(st.sampled_from((*FOUR, "e")), st.floats(0.0, 40.0), st.floats(15.0, 60.0)),
    max_size=3,
    unique_by=lambda each: each[0],
)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1_000), notices)
def test_whoever_goes_has_left_before_its_end_where_all_messages_arrive(
    seed: int, found: list[tuple[str, float, float]]
):
    job = Job(seed)
    for name, after_s, in_s in found:
        job.at(after_s, lambda name=name, in_s=in_s: job.notice(name, in_s))
        job.at(after_s + in_s - 0.01, lambda name=name: has_left(job, name))
    job.run(120.0)
    once(job)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 1_000),
    notices,
    st.sampled_from((0.05, 0.5)),
    st.sampled_from((0.0, 0.1, 0.3)),
    st.lists(st.tuples(st.sampled_from((*FOUR, "e")), st.floats(0.0, 60.0), st.floats(1.0, 12.0)), max_size=3),
)
def test_no_number_is_used_twice_whatever_gets_lost_and_whoever_stands_still(seed, found, slow_s, lost, still):
    job = Job(seed, slow_s=slow_s, lost=lost)
    for name, after_s, in_s in found:
        job.at(after_s, lambda name=name, in_s=in_s: job.notice(name, in_s))
    for name, after_s, for_s in still:
        job.at(after_s, lambda name=name, for_s=for_s: stands(job, name, for_s))
    job.run(150.0)
    once(job)


def stands(job: Job, name: str, for_s: float) -> None:
    if (node := job.nodes.get(name)) is not None:
        node.stands_until = job.now + for_s


def has_left(job: Job, name: str) -> None:
    assert name not in job.worlds[-1].node_ids(), f"{name} goes, and nobody acted: {job.opened}"


def once(job: Job) -> None:
    numbers = [generation for generation, _ in job.opened]
    assert len(numbers) == len(set(numbers)), "a number is never used twice"
    made = [world.generation for world in job.worlds]
    assert made == sorted(set(made)), "worlds follow each other"


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_one_notice_makes_one_world(lost: float):
    job = Job(1, lost=lost)
    job.run(1.0)
    job.notice("d", 60.0)
    job.run(90.0)
    assert job.worlds[-1].node_ids() == ("a", "b", "c", "e") and len(job.worlds) == 2
