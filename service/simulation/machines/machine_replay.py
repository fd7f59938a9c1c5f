"""A replay in which the product's machines carry every change, instead of its being done at once. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from agent.protocol.values import Placement
from liver_core.layout import Member, ParallelLayout
from service.jobs.tables import ENDED, JobState
from service.ledger.tables import Cause
from service.planner.inputs import PlannerDecision, PlannerVerdict
from service.policy.types import Candidate, Goal, Policy, PolicyDecision, PolicyInputs, PolicyKnobs, StandingWorld
from service.simulation.cluster_replay import PLACE, ClusterReplay, ClusterRun
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.machines.replayed_world import ReplayedWorld
from service.simulation.machines.spent_time import Doing, Stretch
from service.simulation.replay_setup import GridStep, ReplaySetup
from service.simulation.traces import CapacityTrace
from service.simulation.world.moments import seconds_at, utc
from service.simulation.world.reports import Planned

CAUSES = {
    Doing.TRAINING: Cause.PRODUCTIVE,
    Doing.PAUSED: Cause.PAUSE,
    Doing.STARTING: Cause.BOOTSTRAP,
    Doing.RESTARTING: Cause.FALLBACK_RESTART,
    Doing.STANDING: Cause.LOST,
}


def replay_by_machines(
    trace: CapacityTrace,
    candidates: Sequence[Candidate],
    policy: Policy,
    *,
    setup: ReplaySetup,
    times: ChangeTimes,
    knobs: PolicyKnobs | None = None,
    goal: Goal | None = None,
) -> ClusterRun:
    """As `replay_cluster`. Without `notice_s` all losses are unannounced. Raises ValueError for a setup that says
    itself how the job comes back from a loss."""
    if setup.checkpoint_every_s:
        raise ValueError("setup: checkpoint_every_s is of times where machines carry the changes")
    if setup.step_parts > 1:
        raise ValueError("setup: step_parts is parts_of_step of times where machines carry the changes")
    run = MachineReplay(trace, tuple(candidates), policy, setup, knobs or PolicyKnobs(), times=times)
    return run.run(goal or Goal())


class MachineReplay(ClusterReplay):
    """Capacity, notices, prices and the policy are as in any replay; what becomes of the job is up to the machines."""

    def __init__(
        self,
        trace: CapacityTrace,
        candidates: tuple[Candidate, ...],
        policy: Policy,
        setup: ReplaySetup,
        knobs: PolicyKnobs,
        *,
        times: ChangeTimes,
    ) -> None:
        super().__init__(trace, candidates, policy, setup, knobs)
        self._world = ReplayedWorld(times, setup, candidates, self._plan)
        self._goal = Goal()
        self._unseen = frozenset[str]()
        self._planned: tuple[object, Planned] | None = None

    def run(self, goal: Goal) -> ClusterRun:
        self._goal = goal
        done = super().run(goal)
        service, books = self._world.service, self._world.books
        gave_up = service.reason if service.state is JobState.FAILED else ""
        return replace(done, enacted=books.enacted(), refused=tuple(books.refused), gave_up=gave_up)

    # What happens.

    def _observe(self, step: GridStep) -> bool:
        self._take_state()
        before = set(self._up)
        changed = super()._observe(step)
        for name in [name for name in self._up if name not in before]:
            self._world.node_comes(name)
        self._announce()
        return changed

    def _announce(self) -> None:
        """Who will go is known to the service and to all agents at once."""
        for fact in self._notices.moving(utc(self._world.clock.now)):
            if fact.deadline_utc is not None and fact.node_id in self._up and fact.node_id not in self._world.announced:
                self._world.announce(fact.node_id, seconds_at(fact.deadline_utc), by_node=False)

    def _lose(self, step: GridStep) -> None:
        before = tuple(self._up)
        super()._lose(step)
        for name in before:
            if name not in self._up:
                self._world.node_dies(name)

    def _release(self, node: str, at_s: float) -> None:
        super()._release(node, at_s)
        if node not in self._world_nodes():
            self._world.node_given_back(node)

    def _decide(self, at_s: float, goal: Goal) -> None:
        """What to hold: nothing once the job has ended. What to run on, the service asks when it looks at the job."""
        self._decided_s, self._planned = at_s, None
        self._take_state()
        if self._world.service.state in ENDED:
            self._used = tuple(self._world.nodes_in_use())
            self._hold(at_s, 0, [node for node in self._up if node not in self._leaving])
            self._take_state()
            return
        decision = self._policy.decide(self._inputs(at_s, goal))
        self._remember(at_s, decision)
        staying = [node for node in self._up if node not in self._leaving]
        self._used = tuple(self._world.nodes_in_use())
        self._hold(at_s, self._kept(at_s, decision, len(staying)), staying)
        self._take_state()
        self._world.service.wake()

    # What the machines ask for.

    def _plan(self) -> Planned:
        """What the policy wants at this moment; asked once for the same facts between two ticks."""
        self._take_state()
        world, unseen = self._world.books.standing, self._world.unseen()
        generation = None if world is None else (world.roster.generation, world.is_lost)
        self._unseen = frozenset(unseen)
        key = tuple(self._up), self._leaving, unseen, generation
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._planned_now(unseen)
        return self._planned[1]

    def _planned_now(self, unseen: tuple[str, ...]) -> Planned:
        inputs = self._inputs(self._world.clock.now, self._goal)
        staying = [node for node in (*self._up, *unseen) if node not in self._leaving]
        found = self._policy.decide(inputs)
        decision, layout = self._as_planned(found, staying, self._world.books.standing is not None)
        world = self._world.books.standing
        is_whole = world is not None and not world.is_lost and not self._is_broken()
        if inputs.standing is not None and not is_whole:
            found = self._policy.decide(replace(inputs, standing=None))
        if layout is None and world is not None and world.begun and is_whole:
            return Planned(decision, decision, None, None)
        restart, restart_layout = self._as_planned(found, staying, False)
        return Planned(decision, restart, layout, restart_layout)

    def _as_planned(
        self, found: PolicyDecision, staying: Sequence[str], has_world: bool
    ) -> tuple[PlannerDecision, Candidate | None]:
        option, is_whole = found.option, has_world and not self._is_broken()
        if option is None or not 0 < option.nodes <= len(staying) or len(staying) < self._setup.gang:
            verdict = PlannerVerdict.STAY if is_whole else PlannerVerdict.SUSPEND
            return PlannerDecision(verdict, found.reason or "the policy has no layout for what is there"), None
        layout = self._by_layout[option.layout]
        if is_whole and self._layout is not None and layout.layout == self._layout.layout:
            return PlannerDecision(PlannerVerdict.STAY, found.reason), None
        kept = [node for node in self._world_nodes() if node in staying]
        names = [*kept, *(node for node in staying if node not in kept)][: layout.nodes]
        members = tuple(Member(name, 0) for name in names)
        target = Placement.model_construct(layout=ParallelLayout(dp=layout.nodes), members=members)
        verdict = PlannerVerdict.MOVE if has_world else PlannerVerdict.START
        return PlannerDecision(verdict, found.reason, target), layout

    # What the policy is told.

    def _world_nodes(self) -> tuple[str, ...]:
        world = self._world.books.standing
        return () if world is None else world.roster.node_ids()

    def _take_state(self) -> None:
        world = self._world.books.standing
        self._used, self._layout = self._world_nodes(), None if world is None else world.layout
        self._tokens = self._world.books.spent.tokens_at(self._world.clock.now)

    def _is_broken(self) -> bool:
        """As far as anybody knows: a node that is gone counts as ready until it is missed."""
        return any(node in self._leaving or node not in self._up for node in self._used if node not in self._unseen)

    def _inputs(self, at_s: float, goal: Goal) -> PolicyInputs:
        """With nodes that are gone and count as ready, until they are missed."""
        unseen = self._world.unseen()
        self._unseen = frozenset(unseen)
        inputs = super()._inputs(at_s, goal)
        if not unseen:
            return inputs
        pool = inputs.pools[0]
        standing = inputs.standing
        if standing is not None:
            stays = sum(node not in self._leaving for node in self._used)
            use = ((pool.pool, stays),)
            standing = StandingWorld(standing.layout, standing.nodes, PLACE, use, is_whole=standing.is_whole)
        more = sum(name not in self._leaving for name in unseen)
        pool = replace(pool, held=pool.held + more, at_risk=pool.exposed + more)
        return replace(inputs, pools=(pool,), standing=standing)

    # What it comes to.

    def _spend(self, step: GridStep) -> None:
        self._world.clock.run_until(step.end_s)
        ideal = self._curve.tokens_per_s(step.nodes)
        held = min(ideal, self._curve.tokens_per_s(len(self._up)))
        for part in self._world.books.spent.until(step.end_s):
            self._charge(part, ideal, held)
        self._usd += len(self._up) * self._setup.usd_of_node(step.begin_s, step.end_s)
        self._lost_by["lost_work"] = self._world.books.spent.lost_tokens
        self._take_state()

    def _charge(self, part: Stretch, ideal: float, held: float) -> None:
        rate = part.layout.tokens_per_s if part.layout is not None else 0.0
        self._ideal += ideal * part.seconds
        self._lost_by["not_held"] += (ideal - held) * part.seconds
        if part.doing is Doing.NOTHING:
            self._lost_by["waiting"] += held * part.seconds
            return
        if part.doing is Doing.TRAINING:
            self._lost_by["layout"] += (held - rate) * part.seconds
        else:
            paused = min(rate, held)
            self._lost_by["pause"] += paused * part.seconds
            self._lost_by["layout"] += (held - paused) * part.seconds
        if part.doing is Doing.TRAINING and part.generation != self._generation and part.layout is not None:
            self._layouts.append((part.begin_s, part.layout.layout, part.layout.nodes, len(self._up)))
            self._generation = part.generation
        redone_until_s = part.begin_s + part.redone_s
        self._world_span(part, part.begin_s, redone_until_s, Cause.RECOMPUTE)
        self._world_span(part, redone_until_s, part.end_s, CAUSES[part.doing])

    def _world_span(self, part: Stretch, begin_s: float, end_s: float, cause: Cause) -> None:
        kept = self._generation, self._used
        self._generation, self._used = part.generation, part.nodes
        self._span(begin_s, end_s, cause)
        self._generation, self._used = kept
