"""What the played parts of a replay share, and what each of them may ask of the others. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from liver_core.handoff import LadderInputs, Order, Reason, Report
from liver_core.handoff.participant_events import RankReported
from liver_core.handoff.rung_costs import BUILD_GUESS_SHARE
from liver_core.layout import Member, Roster
from service.planner.inputs import PlannerDecision
from service.policy.types import Candidate
from service.simulation.machines.change_times import ChangeTimes, LadderCase, ladder_of
from service.simulation.machines.spent_time import Doing, SpentTime
from service.simulation.machines.virtual_time import VirtualTime
from service.simulation.replay_setup import ReplaySetup

HOP_S = 0.02
"""Of a message or a command. None is lost."""


@dataclass(slots=True)
class PlayedWorld:
    """The ranks of one generation. `begun`: it has made its first step; `is_lost`: one of its ranks is gone."""

    roster: Roster
    layout: Candidate
    begun: bool = False
    is_lost: bool = False


class Process:
    """A rank process. `world`: what it steps in, None for a newcomer."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.alive = True
        self.world: PlayedWorld | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """What the policy wants now, as the rules of the service take it: of the running world, and of a restart."""

    decision: PlannerDecision
    restart: PlannerDecision
    layout: Candidate | None
    restart_layout: Candidate | None


@dataclass(frozen=True, slots=True)
class ReplayFacts:
    """What the replay knows and the played parts ask for. `notices`: when each node that will go was announced, and
    when it goes; `nodes`: those that are up. `plan` may be asked at any moment."""

    plan: Callable[[], Planned]
    notices: Callable[[], dict[str, tuple[float, float]]]
    nodes: Callable[[], Sequence[str]]


class Meeting(ABC):
    """`world`: what steps, or is to step, last."""

    def __init__(
        self, times: ChangeTimes, setup: ReplaySetup, layouts: Sequence[Candidate], facts: ReplayFacts
    ) -> None:
        self.times, self.setup, self.layouts, self.facts = times, setup, tuple(layouts), facts
        self.time = VirtualTime()
        self.spent = SpentTime(checkpoint_every_s=times.checkpoint_every_s)
        self.world: PlayedWorld | None = None

    def send(self, action: Callable[..., None], *args: object) -> None:
        """A message or a command; those to one receiver keep their order."""
        self.time.after(HOP_S, action, *args)

    def layout_of(self, digest: str) -> Candidate:
        """Plans of a replay are named by the place of their layout among all."""
        return self.layouts[int(digest)]

    def digest_of(self, layout: Candidate) -> str:
        return str(self.layouts.index(layout))

    def step_s(self, layout: Candidate) -> float:
        """0 where steps do not count: then there is a boundary at every moment."""
        return layout.step_time_s if self.setup.counts_steps else 0.0

    def part_s(self, layout: Candidate) -> float | None:
        """Of the parts of a step after which it can be dropped; None where it has none."""
        share = self.times.part_of_step(layout.layout)
        return None if share is None or not self.step_s(layout) else share * self.step_s(layout)

    def to_boundary_s(self) -> float:
        """Until the next end of a step."""
        world = self.world
        step_s = 0.0 if world is None else self.step_s(world.layout)
        return step_s - self.spent.stepped_s(self.time.now) % step_s if step_s else 0.0

    def to_part_end_s(self) -> float:
        """Until the next end of a part of a step. The last part may be shorter."""
        left_s = self.to_boundary_s()
        part_s = None if self.world is None else self.part_s(self.world.layout)
        if self.world is None or part_s is None:
            return left_s
        return min(left_s, part_s - (self.step_s(self.world.layout) - left_s) % part_s)

    def ladder(self, source: Sequence[str], target: Sequence[str], left_s: float | None) -> LadderInputs:
        """What the ladder is told of a handoff from the world that steps to the next one."""
        world = self.world
        step_s = 0.0 if world is None else self.step_s(world.layout)
        moment = LadderCase(
            source=source,
            target=target,
            step_s=step_s,
            to_boundary_s=self.to_boundary_s(),
            left_s=left_s,
            nodes_least=min(each.nodes for each in self.layouts),
            checkpoint_age_steps=self._checkpoint_age_steps(),
            part_s=None if world is None else self.part_s(world.layout),
        )
        return ladder_of(self.times, moment)

    def charge_building(self, seconds: float) -> None:
        """What was built for so long beside training came to nothing. A change that is done is charged in its pause."""
        world, now = self.world, self.time.now
        if world is not None and self.spent.doing is Doing.TRAINING:
            self.spent.drop(now, min(world.layout.change_s, BUILD_GUESS_SHARE * seconds))

    def _checkpoint_age_steps(self) -> int | None:
        saved, layout = self.spent.checkpoint_tokens, self.spent.layout
        if saved is None or layout is None:
            return None
        return max(0, int((self.spent.tokens_at(self.time.now) - saved) / layout.tokens_per_step))

    # Nodes and their ranks.

    @abstractmethod
    def is_up(self, name: str) -> bool: ...

    @abstractmethod
    def send_order(self, member: Member, order: Order) -> None:
        """To the agent of a member, if it is there."""

    @abstractmethod
    def send_report(self, to: str, report: Report) -> None:
        """To the agent that leads."""

    @abstractmethod
    def rank_said(self, rank: Process, event: RankReported) -> None: ...

    @abstractmethod
    def rank_exited(self, rank: Process) -> None: ...

    @abstractmethod
    def rank_failed(self, rank: Process, reason: Reason) -> None: ...

    @abstractmethod
    def prepared_in_s(self, order: Order) -> float: ...

    @abstractmethod
    def start_rank(self, rank: Process, order: Order) -> None:
        """Of a start of the service."""

    # The world.

    @abstractmethod
    def look_for_boundary(self) -> None:
        """Where all ranks show one tag, the next boundary is theirs."""

    @abstractmethod
    def begin_target(self, order: Order, *, boundary_s: float, drops_step: bool) -> PlayedWorld:
        """The first rank has read GO of a cutover whose boundary was then."""

    @abstractmethod
    def joins(self, world: PlayedWorld) -> None:
        """One more rank is in this world."""

    @abstractmethod
    def source_goes_on(self, world: PlayedWorld) -> None:
        """The decision is NO-GO."""

    # What the service does.

    @abstractmethod
    def begin_start(self, order: Order, layout: Candidate, doing: Doing) -> None:
        """The older world is given up for this one."""

    @abstractmethod
    def stop_world(self) -> None:
        """Its ranks end at the next boundary, and write a checkpoint if they all live."""

    @abstractmethod
    def ranks_left(self) -> int:
        """Processes of the job."""
