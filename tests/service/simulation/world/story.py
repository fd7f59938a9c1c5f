"""A job on a few made-up nodes: each reports what the story has it say, and a planner takes the first that it may."""

from dataclasses import replace

from agent.protocol.values import HandoffState, Placement
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.layout import Member, ParallelLayout, Roster
from service.jobs.view import JobLimits
from service.planner.inputs import PlannerDecision, PlannerVerdict
from service.simulation.world.reports import AgentReport, Mirror, Planned, RankSays, SteadyHost, Taken
from service.simulation.world.service import Hooks, ServicePeriods, SimService
from service.simulation.world.virtual_time import VirtualTime

LIMITS = JobLimits()
REPORTS_EACH_S = 1.0
WANTED = 2
LAYOUT = ParallelLayout(dp=WANTED)
NOTHING_FITS = PlannerDecision(PlannerVerdict.SUSPEND, "too few nodes")


class Story:
    """`ranks`: what each node says of its ranks, again and again unless it is `cut_off`."""

    def __init__(self, nodes: str = "ab", *, limits: JobLimits = LIMITS, steady: SteadyHost | None = None) -> None:
        self.clock = VirtualTime()
        self.ranks: dict[str, tuple[RankSays, ...]] = {}
        self.cut_off: set[str] = set()
        self.started: list[tuple[float, int]] = []
        self.changes = 0
        self._wait = self._number = 0
        self.service = SimService(
            self.clock,
            self._plan,
            periods=ServicePeriods(limits=limits, usual_step_s=0.5),
            hooks=Hooks(changed=self._changed, started=lambda number: self.started.append((self.clock.now, number))),
            steady=steady,
        )
        for name in nodes:
            self.join(name)

    def join(self, name: str) -> None:
        """One more node; it reports from now on, unless the host is steady."""
        self.ranks[name] = ()
        self.service.node_came(name)
        if self.service.is_steady:
            return
        self.clock.after(0.0, self._report, name)

    def run(self, seconds: float) -> None:
        """Everything that is due within this time."""
        self.clock.run_until(self.clock.now + seconds)

    def tell(self, name: str, **more: object) -> Taken:
        """One more report of this node, sent now."""
        report = AgentReport(name, self.clock.now, ranks=self.ranks[name])
        return self.service.take_report(replace(report, **more))

    def train(self, step: int, roster: Roster | None = None) -> None:
        """All ranks of the world say that they have made this step."""
        roster = roster or self.roster
        for rank, member in enumerate(roster.members):
            self.ranks[member.node_id] = (RankSays(roster.generation, rank, RankStage.TRAINING, step),)
            if self.service.is_steady:
                self.tell(member.node_id)

    def trains(self, *, step: int = 5) -> None:
        """The job starts, and all of its ranks have made this step."""
        self.run(2.0)
        self.train(step)
        self.run(2.0)

    def keep_training(self, seconds: int) -> None:
        """One step a second, by the ranks of the world that are heard."""
        for _ in range(seconds):
            self.train(self.service.rows.job.last_step + 1)
            self.run(1.0)

    def fails(self, name: str, why: str) -> None:
        """The rank there has failed of an error of its own."""
        (rank,) = self.ranks[name]
        reason = Reason(why, "training", rank.rank)
        self.ranks[name] = (replace(rank, stage=RankStage.FAILED, reason=reason),)
        self.tell(name)

    def misses_a_peer(self, name: str) -> None:
        """The rank there has lost the others, and nobody knows more so far."""
        (rank,) = self.ranks[name]
        reason = Reason("a peer is gone", "training", rank.rank, cause=FailureCause(FailedPart.PEER))
        self.ranks[name] = (replace(rank, stage=RankStage.BROKEN, reason=reason),)
        self.tell(name)

    def mirror(self, state: HandoffState, seq: int, *, handoff_id: str, target: Roster, **more: object) -> Mirror:
        """A copy as the first node would have it."""
        parent = self.roster.generation
        known = Mirror(handoff_id, parent, target.generation, state, target, seq, "a", self.clock.now)
        return replace(known, **more)

    @property
    def roster(self) -> Roster:
        """Of the active generation."""
        found = self.service.roster
        assert found is not None, "a world was started"
        return found

    def _report(self, name: str) -> None:
        self.clock.after(REPORTS_EACH_S, self._report, name)
        if name not in self.cut_off:
            self.tell(name)

    def _changed(self) -> None:
        self.changes += 1

    def _plan(self) -> Planned:
        usable, world = self.service.usable(), self.service.roster
        target = _placed(usable)
        restart = PlannerDecision(PlannerVerdict.START, "start there", target) if target else NOTHING_FITS
        stays = world is not None and not set(world.node_ids()) & self.service.going()
        if stays:
            return Planned(PlannerDecision(PlannerVerdict.STAY, "nothing better"), restart)
        move = PlannerDecision(PlannerVerdict.MOVE, "some will go", target) if target else NOTHING_FITS
        return Planned(move, restart)


def world_of(generation: int, nodes: str) -> Roster:
    """One rank on each of these nodes."""
    return Roster("job", generation, ParallelLayout(dp=len(nodes)), tuple(Member(name, 0) for name in nodes))


def _placed(nodes: tuple[str, ...]) -> Placement | None:
    members = tuple(Member(name, 0) for name in nodes[:WANTED])
    return Placement(layout=LAYOUT, members=members) if len(members) == WANTED else None
