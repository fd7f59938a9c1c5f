"""The books of a replay: what the job does at every moment, and what became of every handoff and start. Pure.

It hears what happens in the simulated world as any observer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from liver_core.handoff import Decision, Order, Phase, Stage
from liver_core.handoff.leader_events import HandoffOpened, LeaderEffect, LeaderEvent
from liver_core.handoff.proposer_events import HandoffEnded, PersistProposal, ProposerRecord
from liver_core.handoff.rung_costs import BUILD_GUESS_SHARE
from liver_core.layout import Roster
from service.jobs.tables import ENDED, JobState
from service.policy.types import Candidate
from service.simulation.machines.enacted import Enacted
from service.simulation.machines.spent_time import Doing, SpentTime
from service.simulation.world.observer import Attempt, Observer, attempt_of

if TYPE_CHECKING:
    from service.simulation.world.parts import Agent, RankInPause, World
    from service.simulation.world.service import SimService
    from service.simulation.world.virtual_time import VirtualTime

REFUSED_MAX = 10_000


@dataclass(slots=True)
class Standing:
    """The ranks of one generation. `begun`: they train, or have trained; `is_lost`: one of them is gone."""

    roster: Roster
    layout: Candidate
    begun: bool = False
    is_lost: bool = False


@dataclass(slots=True)
class _Led:
    """An open handoff. `target`: the nodes of all its revisions; `ending_s`: since when it can only end."""

    opened_s: float
    generation: int
    rung: str
    target: tuple[str, ...] = ()
    revisions: int = 1
    ending_s: float = float("inf")

    def take(self, record: ProposerRecord, now_s: float) -> None:
        """What its proposer has decided."""
        for proposal in (record.proposal, record.pending):
            if proposal is not None:
                self.target = tuple(dict.fromkeys((*self.target, *(each.node_id for each in proposal.members))))
        if record.proposal is None:
            return
        self.rung, self.revisions = str(record.proposal.rung), record.plan_revision
        if record.phase is Phase.ABORT:
            self.ending_s = min(self.ending_s, now_s)

    def over(self, now_s: float, ended: str, reason: str, decision: str) -> Enacted:
        """How far it was."""
        return Enacted(
            self.opened_s, self.generation, self.rung, reason, now_s, ended, decision, revisions=self.revisions
        )


@dataclass(slots=True)
class _Pause:
    """From the boundary of an attempt on. `ends_s`: inf until somebody has read GO."""

    began_s: float
    dropped: bool
    ends_s: float = float("inf")


class Books(Observer):
    """`standing`: what steps, or is to step, last. `refused`: when and why no handoff could be opened, as many as are
    kept. `layouts`: of generations."""

    def __init__(
        self,
        clock: VirtualTime,
        spent: SpentTime,
        *,
        candidates: Sequence[Candidate],
        step_s: Callable[[Candidate], float],
        is_up: Callable[[str], bool],
    ) -> None:
        self.spent = spent
        self.standing: Standing | None = None
        self.refused: list[tuple[float, str]] = []
        self.layouts: dict[int, Candidate] = {}
        self._clock, self._candidates, self._step_s, self._is_up = clock, candidates, step_s, is_up
        self._over: list[Enacted] = []
        self._starts: list[Enacted] = []
        self._open: dict[str, _Led] = {}
        self._pauses: dict[Attempt, _Pause] = {}
        self._about: dict[str, str] = {}

    # What is asked of them.

    def enacted(self) -> tuple[Enacted, ...]:
        """All until now; what is open is open until now."""
        now = self._clock.now
        led = [each.over(now, "open", "the trace has ended", "") for each in self._open.values()]
        starts = [replace(each, end_s=now) if each.ended == "open" else each for each in self._starts]
        return tuple(sorted((*starts, *self._over, *led), key=lambda each: each.generation))

    def nodes_wanted(self) -> tuple[str, ...]:
        """Those of the newest open handoff."""
        newest = max(self._open.values(), key=lambda each: each.opened_s, default=None)
        return () if newest is None else newest.target

    def is_first_start(self, generation: int) -> bool:
        """Whether the job begins with it."""
        return bool(self._starts) and self._starts[0].generation == generation and self._starts[0].how == "start"

    def pause_ends_s(self, attempt: Attempt) -> float:
        """When ranks may make their first step in the world of an attempt that goes."""
        pause = self._pauses.get(attempt)
        return self._clock.now if pause is None else pause.ends_s

    # What the service does.

    def take_service(self, service: SimService) -> None:
        """Its orders are other ones."""
        newest, is_new = service.rows.generations.newest_start, False
        if newest is not None:
            is_new = not self._starts or newest.generation > self._starts[-1].generation
        if self._starts and self._starts[-1].ended == "open" and (is_new or service.state is not JobState.STARTING):
            is_active = service.state is JobState.RUNNING and not is_new
            ended = "active" if is_active else "failed"
            self._starts[-1] = replace(self._starts[-1], end_s=self._clock.now, ended=ended)
        if newest is not None and is_new:
            assert isinstance(newest.layout, Candidate)
            has_checkpoint = newest.order is not None and bool(newest.order.checkpoint)
            self._begin_start(newest.roster, newest.layout, newest.reason, has_checkpoint=has_checkpoint)
        rests = service.state in (JobState.PENDING, JobState.SUSPENDED, *ENDED)
        if rests and self.standing is not None and (self.standing.is_lost or not self.standing.begun):
            self._does_nothing()

    def _begin_start(self, roster: Roster, layout: Candidate, reason: str, *, has_checkpoint: bool) -> None:
        """The older world is given up for this one."""
        now, is_first = self._clock.now, not self._starts and not has_checkpoint
        self.spent.back_to_checkpoint(now)
        self.layouts[roster.generation] = layout
        self.standing = Standing(roster, layout)
        self._does(Doing.STARTING if is_first else Doing.RESTARTING)
        how = "start" if is_first else "restart"
        self._starts.append(Enacted(now, roster.generation, how, reason, end_s=now, ended="open"))
        for name in roster.node_ids():
            if not self._is_up(name):
                self.loses_node(name)

    # What becomes of worlds.

    def loses_node(self, name: str) -> None:
        """The machine is gone, with all that ran on it."""
        if self.standing is not None and name in self.standing.roster.node_ids():
            self._loses_rank()

    def world_lost(self, world: World) -> None:
        """Whoever is in a collective of it hangs, until that is felt."""
        if self._is_standing(world.generation):
            self._loses_rank()

    def _loses_rank(self) -> None:
        standing = self.standing
        assert standing is not None
        if standing.is_lost:
            return
        standing.is_lost = True
        if self.spent.doing is Doing.TRAINING or not standing.begun:
            self._does(Doing.STANDING)

    def world_begins(self, world: World) -> None:
        """It trains from now on, or again."""
        if self._is_standing(world.generation) and self.standing is not None and not self.standing.is_lost:
            self.standing.begun = True
            self._does(Doing.TRAINING)

    def world_ends(self, world: World) -> None:
        """Its ranks end at a boundary."""
        if self._is_standing(world.generation):
            self._does_nothing()

    def checkpoint_published(self, generation: int, version: int) -> None:
        """Of a world that ends: nothing of what it made is lost."""
        self.spent.save(self._clock.now)

    def _is_standing(self, generation: int) -> bool:
        return self.standing is not None and self.standing.roster.generation == generation

    def _does(self, doing: Doing) -> None:
        standing = self.standing
        assert standing is not None
        roster = standing.roster
        self.spent.change(
            self._clock.now, doing, standing.layout, generation=roster.generation, nodes=roster.node_ids()
        )

    def _does_nothing(self) -> None:
        self.standing = None
        self.spent.change(self._clock.now, Doing.NOTHING)

    # Cutovers.

    def boundary_passed(self, rank: RankInPause, order: Order, *, dropped: bool) -> None:
        """The first rank learns that the pause has begun."""
        now, standing = self._clock.now, self.standing
        if attempt_of(order) in self._pauses or standing is None or not self._is_standing(order.parent):
            return
        self._pauses[attempt_of(order)] = _Pause(now, dropped)
        if dropped and (step_s := self._step_s(standing.layout)):
            self.spent.drop(now, self.spent.stepped_s(now) % step_s)
        self._does(Doing.PAUSED)

    def goes(self, rank: RankInPause, order: Order, *, again: bool) -> None:
        """The first rank has read GO. What a rescue builds comes before what the change loses."""
        now, pause, source = self._clock.now, self._pauses.get(attempt_of(order)), self.standing
        if pause is None or source is None or not self._is_standing(order.parent):
            return
        if again and not pause.dropped:
            self.spent.drop(now, self._step_s(source.layout))
        layout = self.layouts[order.generation] = self._candidates[int(order.plan_digest)]
        pause.ends_s = (now if order.rescues else pause.began_s) + layout.change_s
        self.standing = Standing(order.target, layout)
        self._does(Doing.PAUSED)
        for name in order.target.node_ids():
            if not self._is_up(name):
                self.loses_node(name)

    def step_after_boundary(self, rank: RankInPause, handoff_id: str, record: Decision, *, in_target: bool) -> None:
        """NO-GO: a world that goes on, but has lost a rank, stands."""
        standing = self.standing
        is_back = not in_target and rank.world is not None and self._is_standing(rank.world.generation)
        if is_back and standing is not None and standing.is_lost and self.spent.doing is Doing.PAUSED:
            self._does(Doing.STANDING)

    # Handoffs.

    def leader(self, agent: Agent, event: LeaderEvent, effects: tuple[LeaderEffect, ...]) -> None:
        """What follows from it for the handoff that this agent leads."""
        now = self._clock.now
        for effect in effects:
            match effect:
                case HandoffOpened(proposal=proposal, generation=generation):
                    self._open[agent.name] = _Led(now, generation, str(proposal.rung))
                case PersistProposal(record=record) if agent.name in self._open:
                    self._open[agent.name].take(record, now)
                case HandoffEnded() if agent.name in self._open:
                    self._ends(agent.name, effect.stage, str(effect.reason), str(effect.decision))
                case _:
                    pass

    def lead_died(self, name: str) -> None:
        """What was led from there is led no more."""
        self._about.pop(name, None)
        if name in self._open:
            self._ends(name, Stage.ABORTED, "the node that led is gone", "")

    def _ends(self, name: str, stage: Stage, reason: str, decision: str) -> None:
        led, now = self._open.pop(name), self._clock.now
        if stage is not Stage.ACTIVE:
            self._charge_building(min(now, led.ending_s) - led.opened_s)
        self._over.append(led.over(now, str(stage), reason, decision))

    def _charge_building(self, seconds: float) -> None:
        """What was built for so long beside training came to nothing. A change that is done is charged in its pause."""
        if self.standing is not None and self.spent.doing is Doing.TRAINING:
            change_s = self.standing.layout.change_s
            self.spent.drop(self._clock.now, min(change_s, BUILD_GUESS_SHARE * seconds))

    def said(self, agent: Agent, text: str, about: str) -> None:
        """What can be opened is said as well, but is about nothing in particular."""
        if about and about != self._about.get(agent.name) and len(self.refused) < REFUSED_MAX:
            self.refused.append((self._clock.now, text))
        self._about[agent.name] = about
