"""Where the ranks of one cutover meet: the decision record, the barrier, and after a rescue the building. Pure."""

from abc import abstractmethod

from liver_core.handoff import Cutover, Decision, Order, Reason
from liver_core.handoff.cutover import (
    BarrierFailed,
    BarrierPassed,
    BoundaryAgreed,
    CutoverEvent,
    DecisionRead,
    Level,
    StoreUnreachable,
    TargetBuilt,
)
from liver_core.layout import Member
from service.simulation.machines.meeting import Meeting, PlayedWorld, Process


class Voter(Process):
    """A rank in a cutover. `decision`: what it has read of the record."""

    decision = Decision.UNDECIDED

    @abstractmethod
    def answer(self, scene: "CutoverScene", machine: Cutover, event: CutoverEvent) -> None:
        """What `machine` asked for; one that was given up hears nothing any more."""


class CutoverScene:
    """One per agreed boundary. `read_s`: until a target has read what it needs; `store_node`: where its store is."""

    def __init__(self, ground: Meeting, order: Order, boundary: BoundaryAgreed, *, read_s: float) -> None:
        self.order, self.boundary, self.read_s = order, boundary, read_s
        self.began_s = ground.time.now
        self.target: PlayedWorld | None = None
        self.stays = False
        self._ground = ground
        self._record = Decision.UNDECIDED
        self._levels: dict[Member, Level] = {}
        self._voted: list[tuple[Voter, Cutover]] = []
        self._builders: dict[Member, tuple[Voter, Cutover]] = {}
        self._built: set[Member] = set()

    def sources_live(self) -> bool:
        assert self.order.source is not None
        return all(self._ground.is_up(member.node_id) for member in self.order.source.members)

    # The store.

    def ask(self, rank: Voter, machine: Cutover, wish: Decision) -> None:
        """Compare-and-set from undecided; a wish of undecided only reads. The store is on the node that leads."""
        if not self._ground.is_up(self.order.proposer_id):
            lost = StoreUnreachable(Reason("the store does not answer", "decision", rank=machine.rank))
            self._ground.time.after(1.0, rank.answer, self, machine, lost)
            return
        if self._record is Decision.UNDECIDED:
            self._record = wish
        self._ground.send(self._told, rank, machine, self._record)

    def _told(self, rank: Voter, machine: Cutover, record: Decision) -> None:
        if record is not Decision.UNDECIDED:
            rank.decision = record
        rank.answer(self, machine, DecisionRead(record))

    # The barrier.

    def enter_barrier(self, rank: Voter, machine: Cutover, level: Level, until: float) -> None:
        """Passed once all have come that vote; each rank gives up for itself."""
        self._levels[rank.member] = level
        self._voted.append((rank, machine))
        failed = BarrierFailed(Reason("not all came", "barrier", machine.rank))
        self._ground.time.at(until, rank.answer, self, machine, failed)
        voters = {member for member in self.order.target.members if self._votes(member)}
        if voters <= self._levels.keys():
            least = min(self._levels.values())
            for each, its_machine in self._voted:
                self._ground.send(each.answer, self, its_machine, BarrierPassed(least))

    def _votes(self, member: Member) -> bool:
        assert self.order.source is not None
        return not self.order.rescues or member in self.order.source.members

    # What follows from the decision.

    def build(self, rank: Voter, machine: Cutover, until: float) -> None:
        """After a rescue: all ranks of the next world build it, or the limit ends it for each."""
        self._builders[rank.member] = rank, machine
        self._ground.time.after(self._ground.times.build_s, self._has_built, rank, until)

    def _has_built(self, rank: Voter, until: float) -> None:
        if rank.alive and self._ground.time.now <= until:
            self._built.add(rank.member)
        if set(self.order.target.members) <= self._built:
            for each, machine in self._builders.values():
                self._ground.send(each.answer, self, machine, TargetBuilt())

    def switch(self, rank: Voter, *, again: bool) -> None:
        """GO: this rank is in the next world from now on. `again`: the batch at the boundary is done once more."""
        if self.target is None:
            drops = again and not self.boundary.dropped
            self.target = self._ground.begin_target(self.order, boundary_s=self.began_s, drops_step=drops)
        rank.world = self.target
        self._ground.joins(self.target)

    def stay(self, rank: Voter) -> None:
        """NO-GO: the running world goes on, if all of its ranks live."""
        if not self.stays and rank.world is not None:
            self.stays = True
            self._ground.source_goes_on(rank.world)
