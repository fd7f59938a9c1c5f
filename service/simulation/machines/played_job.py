"""The service of a replay: it looks at the job when something wakes it, and does what the product's rule says. Pure.

The rule is `service.jobs.rules.next_action`, and when to look again is the reconciler's; a node counts as silent and as
gone by `service.nodes.rules`. What is played is the database: facts are stored at once, and nothing is forgotten.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from agent.protocol.values import HandoffState, Placement
from liver_core.handoff import Reason, StoreAddress, start_order
from liver_core.handoff.generations import next_start
from liver_core.layout import Roster
from service.handoffs.rules import Declined, OpenHandoff, accepts_active
from service.handoffs.start_times import starts_of
from service.jobs.crashes import Crashes, RankError
from service.jobs.queries import OVERDUE_POLLS, OVERDUE_S
from service.jobs.rules import next_action
from service.jobs.tables import ENDED, JobState
from service.jobs.view import Action, Checkpoint, Do, JobLimits, JobView, Leaving, Loss
from service.nodes.rules import state_of
from service.nodes.tables import NodeState
from service.planner.inputs import World
from service.policy.types import Candidate
from service.reconcilers.calm_jobs import LOOK_AT_CALM_S, look_again_in_s
from service.settings import ServiceSettings
from service.simulation.cluster_replay import START_UTC
from service.simulation.machines.enacted import Enacted, handoff_id_of
from service.simulation.machines.meeting import Meeting, Planned, PlayedWorld
from service.simulation.machines.spent_time import Doing
from service.simulation.replay_ledger import JOB

STORE = StoreAddress("replay", 1)
HAS_RANKS = (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING, JobState.STOPPING)
START_WITHIN_S = 600.0


def _default_s(name: str) -> float:
    """Of a setting of the service. The environment of whoever replays changes nothing."""
    return float(ServiceSettings.model_fields[name].default)


SILENT_AFTER_S, GONE_AFTER_S = _default_s("silent_after_s"), _default_s("gone_after_s")
OVERDUE_AFTER_S = max(OVERDUE_S, OVERDUE_POLLS * _default_s("agent_poll_s"))


def utc(at_s: float) -> datetime:
    """Of a second of the replay."""
    return START_UTC + timedelta(seconds=at_s)


@dataclass(frozen=True, slots=True)
class Agents:
    """What the service asks of the agents: to see what is open, to end that, and to look at what is proposed."""

    mirror: Callable[[], OpenHandoff | None]
    drop: Callable[[str], None]
    consider: Callable[[], None]


class PlayedJob:
    """One job and its rows. `highest`: the greatest generation that was used."""

    def __init__(self, ground: Meeting) -> None:
        self.state, self.reason = JobState.PENDING, ""
        self.highest = self._ids = 0
        self.agents: Agents | None = None
        self.proposed: tuple[OpenHandoff, Placement, Candidate] | None = None
        self._starts: list[Enacted] = []
        self._ground = ground
        self._limits = JobLimits()
        self._changed_s = 0.0
        self._last_handoff_s: float | None = None
        self._world: Roster | None = None
        self._started: set[int] = set()
        self._declined: Declined | None = None
        self._opened: Placement | None = None
        self._errors: list[RankError] = []
        self._error_s = 0.0
        self._broken: list[Loss] = []
        self._dead: dict[str, float] = {}
        self._barred: frozenset[str] = frozenset()
        self._crashes = Crashes()
        self._failed_starts = 0
        self._because = ""
        self._suspends_at: datetime | None = None
        self._look_s = float("inf")

    # What it hears.

    def wake(self) -> None:
        """Something has changed: look now."""
        self._look_at(self._ground.time.now)

    def node_died(self, name: str, *, is_announced: bool) -> None:
        """It is not heard any more, which is noticed later. One of which a notice tells gets nothing new meanwhile."""
        now = self._ground.time.now
        self._dead[name] = now
        self._barred = (self._barred | {name}) if is_announced else self._barred
        for after_s in (OVERDUE_AFTER_S, SILENT_AFTER_S, GONE_AFTER_S):
            self._ground.time.at(now + after_s, self.wake)

    def node_came(self, name: str) -> None:
        """A node of this name is heard."""
        self._dead.pop(name, None)
        self._barred -= {name}

    def starts(self) -> list[Enacted]:
        """All so far; one that has not made its first step is open now."""
        now = self._ground.time.now
        return [replace(each, end_s=now) if each.ended == "open" else each for each in self._starts]

    def unseen(self) -> tuple[str, ...]:
        """Nodes that are gone, and count as ready all the same."""
        now = self._ground.time.now
        ready = (name for name, at in self._dead.items() if self._is(name, now - at) is NodeState.READY)
        return tuple(name for name in ready if name not in self._barred)

    def rank_failed(self, node: str, reason: Reason) -> None:
        """The agent of a rank reports that it cannot go on."""
        if self._world is None or node not in self._world.node_ids():
            return
        self._error_s = self._error_s if self._errors else self._ground.time.now
        shown = f"rank {reason.rank} on node {node} is broken: {reason.text}"
        self._errors.append(RankError(shown, reason.text, node=node, rank=reason.rank, said=reason.cause))
        self.wake()

    def first_step(self, world: PlayedWorld) -> None:
        """Ranks report the first step of a start; that of a handoff comes with the end of the handoff."""
        if self.state is JobState.STARTING and world.roster == self._world:
            self._set(JobState.RUNNING, "it trains")
            self._failed_starts = 0
            self.wake()

    def handoff_changed(self) -> None:
        """The agent that leads mirrors its handoff."""
        self._look_at(self._ground.time.now + 1.0)

    def handoff_opened(self, generation: int) -> None:
        self._opened = None if self.proposed is None else self.proposed[1]
        self.proposed, self.highest = None, max(self.highest, generation)
        self.wake()

    def handoff_ended(self, parent: int, roster: Roster | None, broken: Reason | None) -> None:
        """`roster`: of the next world, where it has become active; `broken`: why `parent` is lost. What a start has
        given up since then says nothing any more."""
        self._last_handoff_s = self._ground.time.now
        if broken is not None and self._world is not None and parent == self._world.generation:
            self._broken.append(Loss(str(broken), None))
        if roster is not None and self._world is not None:
            refusal = accepts_active(
                active=self._world.generation,
                parent=parent,
                generation=roster.generation,
                started_here=frozenset(self._started),
            )
            if refusal is None:
                self._world, self._failed_starts, self._declined = roster, 0, None
                self._suspends_at = None
                self._set(JobState.RUNNING, "handed over")
        self.wake()

    def aborted(self, reason: str) -> None:
        """What was proposed for more nodes came to nothing, though nobody had to go."""
        if self._opened is not None:
            past, at = self._declined, utc(self._ground.time.now)
            again = past is not None and past.target == self._opened
            self._declined = Declined(self._opened, (), at, reason, past.times + 1 if past and again else 1)

    def declined(self, reason: str) -> None:
        """An agent does not open what was proposed."""
        if self.proposed is not None:
            handoff, target, _ = self.proposed
            self._declined = Declined(target, handoff.leaving, utc(self._ground.time.now), reason)
            self.proposed, self._last_handoff_s = None, self._ground.time.now
            self.wake()

    def next_id(self) -> int:
        """Numbers all handoffs and starts, by whomever they are made."""
        self._ids += 1
        return self._ids

    def nodes_wanted(self) -> tuple[str, ...]:
        return () if self.proposed is None else self.proposed[1].node_ids()

    # What it does.

    def _look_at(self, at_s: float) -> None:
        if at_s < self._look_s:
            self._look_s = at_s
            self._ground.time.at(at_s, self._look, at_s)

    def _look(self, due_s: float) -> None:
        if due_s != self._look_s:
            return
        self._look_s = float("inf")
        if self.state in ENDED:
            return
        planned = self._ground.facts.plan()
        view = self._view(planned)
        action = next_action(view, self._limits)
        self.reason = action.reason
        state, again_s = self.state, look_again_in_s(self.state, action)
        self._apply(action, planned)
        if action.do is not Do.NOTHING:
            again_s = min(again_s, 0.05)
        waits = state in (JobState.PENDING, JobState.SUSPENDED) and action.do is Do.NOTHING
        if self.state not in ENDED and not waits and again_s < LOOK_AT_CALM_S:
            self._look_at(self._ground.time.now + again_s)

    def _apply(self, action: Action, planned: Planned) -> None:
        match action.do:
            case Do.NOTHING:
                return
            case Do.START:
                layout = planned.restart_layout
                assert action.target is not None and layout is not None
                self._start(action, action.target, layout)
            case Do.PROPOSE:
                assert action.target is not None and planned.layout is not None
                self._propose(action, action.target, planned.layout)
            case Do.DROP_HANDOFF:
                self._drop_handoff(action.reason)
            case Do.SUSPEND:
                self._drop_handoff(action.reason)
                self._because = action.suspended_because
                self._set(JobState.SUSPENDING, action.reason)
                self._ground.stop_world()
            case Do.SUSPEND_LATER:
                pass
            case Do.SETTLE:
                assert action.state is not None
                if action.state is JobState.FAILED:
                    self._ground.stop_world()
                self._set(action.state, action.reason)
        self._suspends_at = action.suspends_at
        self._failed_starts += action.failed_start
        self._crashes = action.crashes or self._crashes
        if action.save and self._ground.spent.doing is Doing.TRAINING:
            self._ground.spent.save(self._ground.time.now)

    def _start(self, action: Action, target: Placement, layout: Candidate) -> None:
        ground, now = self._ground, self._ground.time.now
        self._drop_handoff(f"the job starts again: {action.reason}")
        generation = self.highest = next_start(self.highest)
        self._started.add(generation)
        roster = self._world = Roster(JOB, generation, target.layout, target.members)
        self._errors, self._broken = [], []
        order = start_order(
            roster,
            STORE,
            handoff_id_of(self.next_id()),
            deadline_utc=now + START_WITHIN_S,
            issued_at=now,
            proposer_id="service",
            checkpoint="" if action.checkpoint is None else action.checkpoint.path,
        )
        is_first = not self._starts and action.checkpoint is None
        ground.spent.back_to_checkpoint(now)
        ground.begin_start(order, layout, Doing.STARTING if is_first else Doing.RESTARTING)
        self._set(JobState.STARTING, action.reason)
        how = "start" if is_first else "restart"
        self._starts.append(Enacted(now, generation, how, action.reason, end_s=now, ended="open"))

    def _propose(self, action: Action, target: Placement, layout: Candidate) -> None:
        now = utc(self._ground.time.now)
        handoff = OpenHandoff(
            handoff_id=UUID(handoff_id_of(self.next_id())),
            state=HandoffState.PROPOSED,
            leaving=tuple(item.node_id for item in action.leaving),
            target_nodes=target.node_ids(),
            opened_at=now,
            changed_at=now,
            deadline_at=None,
        )
        self.proposed = handoff, target, layout
        if self.agents is not None:
            self._ground.send(self.agents.consider)

    def _drop_handoff(self, reason: str) -> None:
        self.proposed = None
        if self.agents is not None:
            self.agents.drop(reason)

    def _set(self, state: JobState, reason: str) -> None:
        if self.state is JobState.STARTING:
            ended = "active" if state is JobState.RUNNING else "failed"
            self._starts[-1] = replace(self._starts[-1], end_s=self._ground.time.now, ended=ended)
        self.state, self.reason, self._changed_s = state, reason, self._ground.time.now

    # What it knows.

    def _is(self, name: str, silence_s: float) -> NodeState:
        return state_of(silence_s, silent_after_s=SILENT_AFTER_S, gone_after_s=GONE_AFTER_S)

    def _view(self, planned: Planned) -> JobView:
        ground, now_s = self._ground, self._ground.time.now
        world = self._world if self.state in HAS_RANKS else None
        members = () if world is None else world.node_ids()
        notices = ground.facts.notices()
        dead = {name: self._is(name, now_s - at) for name, at in self._dead.items()}
        handoff = self.proposed[0] if self.proposed is not None else self.agents.mirror() if self.agents else None
        targets = handoff.target_nodes if handoff is not None else ()
        self._forget(dead, {*members, *targets})
        layout = ground.spent.layout
        view = JobView(
            state=self.state,
            state_changed_at=utc(self._changed_s),
            now=utc(now_s),
            decision=planned.decision,
            restart=planned.restart,
            world=None if world is None else World(world.generation, world.layout, world.members),
            handoff=handoff,
            last_handoff_at=None if self._last_handoff_s is None else utc(self._last_handoff_s),
            declined=self._declined,
            leaving=tuple(
                Leaving(name, utc(heard_s), utc(gone_s))
                for name, (heard_s, gone_s) in sorted(notices.items())
                if name in members
            ),
            silent=tuple(name for name in members if dead.get(name) is NodeState.SILENT),
            gone=tuple(name for name in members if dead.get(name) is NodeState.GONE),
            absent=tuple(name for name in targets if dead.get(name, NodeState.READY) is not NodeState.READY),
            unheard=tuple(
                name
                for name, state in dead.items()
                if state is NodeState.READY and now_s - self._dead[name] >= OVERDUE_AFTER_S
            ),
            lost_sight_of=tuple((name, utc(self._dead[name])) for name in (*members, *targets) if name in dead),
            broken=tuple(self._broken),
            errors=tuple(self._errors),
            error_at=utc(self._error_s) if self._errors else None,
            crashes=self._crashes,
            ranks_left=ground.ranks_left() if self.state in (JobState.SUSPENDING, JobState.STOPPING) else 0,
            failed_starts=self._failed_starts,
            starts=starts_of((each.how, utc(each.at_s), self._stepped_at(each)) for each in reversed(self._starts)),
            saves_at_end=ground.times.writes_checkpoints,
            suspended_because=self._because,
            suspends_at=self._suspends_at,
        )
        return view if layout is None else replace(view, **self._steps(layout))

    def _forget(self, dead: dict[str, NodeState], needed: set[str]) -> None:
        """Those that count as gone, for which nothing waits: a replay may have thousands of them."""
        over = {name for name, state in dead.items() if state is NodeState.GONE} - needed
        self._dead = {name: at for name, at in self._dead.items() if name not in over}
        self._barred -= over

    @staticmethod
    def _stepped_at(start: Enacted) -> datetime | None:
        return utc(start.end_s) if start.ended == "active" else None

    def _steps(self, layout: Candidate) -> dict[str, Any]:
        """What ranks report of their steps, and of checkpoints."""
        spent, now_s = self._ground.spent, self._ground.time.now
        saved = spent.checkpoint_tokens
        return {
            "last_step": int(spent.tokens_at(now_s) / layout.tokens_per_step),
            "last_step_at": utc(spent.trained_until_s(now_s)),
            "step_s": layout.step_time_s,
            "checkpoint": None if saved is None else Checkpoint("newest", int(saved / layout.tokens_per_step), None),
        }
