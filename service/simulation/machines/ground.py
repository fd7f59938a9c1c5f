"""Where the played parts of a replay meet: nodes, the world that steps, its boundaries, what becomes of it. Pure."""

from collections.abc import Sequence

from liver_core.handoff import (
    BoundaryPhase,
    FailedPart,
    FailureCause,
    LadderInputs,
    Order,
    Reason,
    Report,
    Rung,
    agreed,
)
from liver_core.handoff.cutover import BoundaryAgreed
from liver_core.handoff.participant_events import ParticipantState, RankDied, RankReported
from liver_core.layout import Member
from service.policy.types import Candidate
from service.simulation.machines.change_times import ChangeTimes, prepared_in_s, read_in_s
from service.simulation.machines.cutover_scene import CutoverScene
from service.simulation.machines.meeting import Meeting, PlayedWorld, Process, ReplayFacts
from service.simulation.machines.played_job import PlayedJob
from service.simulation.machines.played_lead import PlayedLead
from service.simulation.machines.played_node import PlayedNode
from service.simulation.machines.played_rank import PlayedRank
from service.simulation.machines.spent_time import Doing
from service.simulation.replay_setup import ReplaySetup

AGAIN_S = 0.1


class Ground(Meeting):
    """Everything that is there at a moment."""

    def __init__(
        self, times: ChangeTimes, setup: ReplaySetup, layouts: Sequence[Candidate], facts: ReplayFacts
    ) -> None:
        super().__init__(times, setup, layouts, facts)
        self.job = PlayedJob(self)
        self._nodes: dict[str, PlayedNode] = {}
        self.lead = PlayedLead(self, self.job, self._promised)
        self._boundary_of: PlayedWorld | None = None
        self._ladder_for: tuple[str, int] | None = None
        self._ladder_is: LadderInputs | None = None

    # What happens outside.

    def node_dies(self, name: str, *, is_announced: bool) -> None:
        """The machine is taken, with all that runs on it."""
        self.node_given_back(name)
        if self.world is not None and name in self.world.roster.node_ids():
            self._loses_a_rank(self.world)
        self.lead.node_died(name)
        self.job.node_died(name, is_announced=is_announced)

    def node_given_back(self, name: str) -> None:
        """Nothing of the job runs there."""
        if (node := self._nodes.pop(name, None)) is not None:
            node.die()

    def notices_heard(self) -> None:
        """The agents know them at once, and the service too."""
        self.send(self.lead.consider)
        self.job.wake()

    def nodes_in_use(self) -> frozenset[str]:
        """Those that must not be given back: of the world, and of the next one."""
        used = {*self.lead.nodes_wanted(), *self.job.nodes_wanted()}
        return frozenset(used | set(self.world.roster.node_ids() if self.world is not None else ()))

    # Nodes and their ranks.

    def is_up(self, name: str) -> bool:
        return self._node(name) is not None

    def _node(self, name: str) -> PlayedNode | None:
        """With an agent from the first time on that somebody asks for it; None if it is not there."""
        if name not in self._nodes and name in self.facts.nodes():
            self._nodes[name] = PlayedNode(self, name)
        return self._nodes.get(name)

    def _promised(self, name: str) -> Order | None:
        node = self._nodes.get(name)
        is_bound = node is not None and node.participant.state is not ParticipantState.ACTIVE
        return node.participant.record.order if node is not None and is_bound else None

    def send_order(self, member: Member, order: Order) -> None:
        if (node := self._node(member.node_id)) is not None:
            self.send(node.receive, order)

    def send_report(self, to: str, report: Report) -> None:
        self.send(self.lead.receive, to, report)

    def rank_said(self, rank: Process, event: RankReported) -> None:
        if (node := self._nodes.get(rank.member.node_id)) is not None:
            self.send(node.take_report, rank, event)

    def rank_exited(self, rank: Process) -> None:
        if (node := self._nodes.get(rank.member.node_id)) is not None:
            self.send(node.take_report, rank, RankDied(Reason("the process ended", "supervise")))
            self.send(self.job.wake)

    def rank_failed(self, rank: Process, reason: Reason) -> None:
        """Its agent tells the service; the others of its world cannot go on without it."""
        self.send(self.job.rank_failed, rank.member.node_id, reason)
        if self.world is not None and rank.member in self.world.roster.members:
            self._loses_a_rank(self.world)

    def prepared_in_s(self, order: Order) -> float:
        return prepared_in_s(order.rung, self._ladder_of(order))

    def _ladder_of(self, order: Order) -> LadderInputs:
        key = order.handoff_id, order.target_revision
        if self._ladder_is is None or key != self._ladder_for:
            assert order.source is not None
            self._ladder_for = key
            self._ladder_is = self.ladder(order.source.node_ids(), order.target.node_ids(), None)
        return self._ladder_is

    def _ranks(self, world: PlayedWorld) -> list[PlayedRank]:
        """Those of its members that live."""
        nodes = (self._nodes.get(member.node_id) for member in world.roster.members)
        return [node.rank for node in nodes if node is not None and node.rank is not None and node.rank.alive]

    # Boundaries.

    def look_for_boundary(self) -> None:
        world = self.world
        if world is None or self._boundary_of is world or self._agreement(world) is None:
            return
        self._boundary_of = world
        may_drop = self._agreement(world, between_parts=True) is not None
        self.time.after(self.to_part_end_s() if may_drop else self.to_boundary_s(), self._boundary, world)

    def _agreement(self, world: PlayedWorld, *, between_parts: bool = False) -> BoundaryPhase | None:
        if world.is_lost or self.spent.doing is not Doing.TRAINING:
            return None
        words = [rank.word(between_parts=between_parts) for rank in self._ranks(world)]
        found = agreed(min(words, default=0), max(words, default=0))
        return None if found is None else found.phase

    def _boundary(self, world: PlayedWorld) -> None:
        """Of the world that steps, if all still want it: from here on the decision record rules."""
        self._boundary_of, now = None, self.time.now
        if world is not self.world or self._agreement(world) is None:
            return
        order = self._ranks(world)[0].order
        assert order is not None
        step_s = self.step_s(world.layout)
        into_s = self.spent.stepped_s(now) % step_s if step_s else 0.0
        drops = order.rung is Rung.DROP_STEP and AGAIN_S < into_s < step_s - AGAIN_S
        if drops:
            self.spent.drop(now, into_s)
        self._does(Doing.PAUSED, world)
        boundary = BoundaryAgreed(int(self.spent.tokens / world.layout.tokens_per_step), drops)
        scene = CutoverScene(self, order, boundary, read_s=read_in_s(order.rung, self._ladder_of(order)))
        for member in dict.fromkeys((*world.roster.members, *order.target.members)):
            node = self._nodes.get(member.node_id)
            if node is not None and node.rank is not None:
                self.time.after(0.0, node.rank.begin_cutover, scene)

    # What becomes of the world.

    def begin_target(self, order: Order, *, boundary_s: float, drops_step: bool) -> PlayedWorld:
        """The pause ends when the change has lost what its layout says; what a rescue builds in it comes before."""
        source, now = self.world, self.time.now
        assert source is not None and source.roster == order.source, "two worlds step"
        if drops_step:
            self.spent.drop(now, self.step_s(source.layout))
        world = self.world = PlayedWorld(order.target, self.layout_of(order.plan_digest))
        self._does(Doing.PAUSED, world)
        self.time.at((now if order.rescues else boundary_s) + world.layout.change_s, self._first_step, world)
        if any(not self.is_up(name) for name in world.roster.node_ids()):
            self._loses_a_rank(world)
        return world

    def joins(self, world: PlayedWorld) -> None:
        """If another rank of it is gone already, it finds that out."""
        if world.is_lost:
            self.time.after(self.setup.detect_s, self._felt, world)

    def source_goes_on(self, world: PlayedWorld) -> None:
        assert world is self.world, "two worlds step"
        self._does(Doing.STANDING if world.is_lost else Doing.TRAINING, world)
        self.joins(world)

    def _first_step(self, world: PlayedWorld) -> None:
        """All ranks of a world do it together."""
        if world is not self.world or world.is_lost or world.begun:
            return
        ranks = self._ranks(world)
        if any(rank.world is not world for rank in ranks):
            self.time.after(AGAIN_S, self._first_step, world)
            return
        if len(ranks) < len(world.roster.members):
            self._loses_a_rank(world)
            return
        world.begun = True
        self._does(Doing.TRAINING, world)
        for rank in ranks:
            rank.step_in(world)
        self.job.first_step(world)
        self.send(self.lead.consider)

    def _does(self, doing: Doing, world: PlayedWorld) -> None:
        nodes = world.roster.node_ids()
        self.spent.change(self.time.now, doing, world.layout, generation=world.roster.generation, nodes=nodes)

    def _loses_a_rank(self, world: PlayedWorld) -> None:
        """Whoever is in a collective of this world hangs, until it is felt."""
        if world.is_lost:
            return
        world.is_lost = True
        if self.spent.doing is Doing.TRAINING or not world.begun:
            self._does(Doing.STANDING, world)
        self.time.after(self.setup.detect_s, self._felt, world)

    def _felt(self, world: PlayedWorld) -> None:
        """Ranks in a cutover have limits of their own; those that come back from it feel it then."""
        peer = FailureCause(FailedPart.PEER)
        for rank in self._ranks(world):
            if rank.world is world and rank.cutover_is_over:
                number = world.roster.rank_of(rank.member)
                rank.break_down(Reason("a peer is gone", "train", number, node=rank.member.node_id, cause=peer))

    # What the service does.

    def begin_start(self, order: Order, layout: Candidate, doing: Doing) -> None:
        """Every agent of the job hears of it: members have a part in it, all others give up what is older."""
        world = self.world = PlayedWorld(order.target, layout)
        self._does(doing, world)
        missing = [name for name in order.target.node_ids() if not self.is_up(name)]
        if missing:
            self._loses_a_rank(world)
        for node in self._nodes.values():
            self.send(node.hear_start, order)
        self.send(self.lead.world_started, order.generation)

    def start_rank(self, rank: Process, order: Order) -> None:
        """It waits for the others; then they load together."""
        world = self.world
        if world is None or world.roster != order.target:
            return
        rank.world = world
        self.joins(world)
        ranks = self._ranks(world)
        if not world.is_lost and len(ranks) == len(world.roster.members) and all(each.world is world for each in ranks):
            least_s = 0.0 if self.spent.doing is Doing.STARTING else self.times.restart_s
            self.time.after(max(least_s, world.layout.change_s), self._first_step, world)

    def stop_world(self) -> None:
        world = self.world
        if world is not None:
            self.time.after(0.0 if world.is_lost else self.to_boundary_s(), self._stopped, world)

    def _stopped(self, world: PlayedWorld) -> None:
        if world is not self.world:
            return
        if world.begun and not world.is_lost and self.times.writes_checkpoints:
            self.spent.save(self.time.now)
        self.world = None
        self.spent.change(self.time.now, Doing.NOTHING)
        for rank in self._ranks(world):
            rank.exit()

    def ranks_left(self) -> int:
        return sum(node.rank is not None and node.rank.alive for node in self._nodes.values())
