"""A job on the nodes of one pool, replayed on a virtual clock under any policy. Pure.

Notices go through the machine that agents and service share (`agent.protocol.notice_life`); what is lost is charged to
one cause, so that the causes sum to the distance from the free ideal; the spans become a ledger by the service's own
rules (`service.simulation.replay_ledger`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from math import inf
from random import Random

from agent.protocol.notice_life import Notices, key_of
from agent.protocol.sync import NoticeFact, NoticeKind
from service.ledger.tables import Cause
from service.policy.hazard import ChangeEvents
from service.policy.keeping import LatelyWanted
from service.policy.types import (
    Candidate,
    Goal,
    Market,
    Policy,
    PolicyDecision,
    PolicyInputs,
    PolicyKnobs,
    PoolView,
    StandingWorld,
)
from service.policy.utility import curve_of
from service.simulation.machines.enacted import Enacted
from service.simulation.replay_setup import GridStep, ReplaySetup, Victims, grid_of, likely_hit
from service.simulation.traces import CapacityTrace

START_UTC = datetime(2026, 1, 1, tzinfo=UTC)
PLACE, SOURCE = "here", "replay"
DIGITS_OF_LIFE = 2
LOST_BY = ("not_held", "layout", "pause", "lost_work", "waiting")
POINTS_MAX = 500


@dataclass(frozen=True, slots=True)
class WorldSpan:
    """A time in which these nodes were used for one thing."""

    begin_s: float
    end_s: float
    cause: Cause
    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseSpan:
    """A time in which a node was paid for."""

    node: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ProgressPoint:
    """How far the job was at a moment: nodes that could be had, that were paid for, that it used; tokens until then."""

    at_s: float
    offered: int
    held: int
    used: int
    tokens: float


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """How it went. `tokens_lost_by` sums to `ideal_tokens` - `tokens`. `progress`: at most POINTS_MAX points, evenly
    spread, the last one at the end. Where machines carried the changes: `enacted`, handoffs and starts; `refused`, when
    and why no handoff could be opened; `gave_up`, why the job ended before the trace."""

    policy: str
    tokens: float
    ideal_tokens: float
    usd: float
    changes: int
    tokens_lost_by: tuple[tuple[str, float], ...]
    layouts: tuple[tuple[float, str, int, int], ...]
    worlds: tuple[WorldSpan, ...] = field(repr=False)
    leases: tuple[LeaseSpan, ...] = field(repr=False)
    decisions: tuple[tuple[float, PolicyDecision], ...] = field(repr=False)
    progress: tuple[ProgressPoint, ...] = field(repr=False, default=())
    enacted: tuple[Enacted, ...] = field(repr=False, default=())
    refused: tuple[tuple[float, str], ...] = field(repr=False, default=())
    gave_up: str = ""

    @property
    def goodput(self) -> float:
        return self.tokens / self.ideal_tokens if self.ideal_tokens else 1.0

    @property
    def usd_per_mtok(self) -> float:
        return self.usd / self.tokens * 1e6 if self.tokens else inf


def replay_cluster(
    trace: CapacityTrace,
    candidates: Sequence[Candidate],
    policy: Policy,
    *,
    setup: ReplaySetup,
    knobs: PolicyKnobs | None = None,
    goal: Goal | None = None,
) -> ClusterRun:
    """Runs the job over the whole trace. The same arguments give the same run."""
    run = ClusterReplay(trace, tuple(candidates), policy, setup, knobs or PolicyKnobs())
    return run.run(goal or Goal())


class ClusterReplay:
    """One run: which nodes there are, which of them the job holds and uses, and what it has done so far. A change is
    done at once, and costs what its layout says; in `service.simulation.machines` the product's machines carry it."""

    def __init__(
        self,
        trace: CapacityTrace,
        candidates: tuple[Candidate, ...],
        policy: Policy,
        setup: ReplaySetup,
        knobs: PolicyKnobs,
    ) -> None:
        self._trace, self._candidates, self._policy, self._setup, self._knobs = trace, candidates, policy, setup, knobs
        self._by_layout = {each.layout: each for each in candidates}
        self._curve = curve_of(candidates)
        self._useful = max((each.nodes for each in candidates), default=0) + knobs.spares_max
        self._random = Random(setup.seed)
        self._silent = Random(setup.seed + 1)
        self._notices, self._losses, self._gains = Notices(), ChangeEvents(), ChangeEvents()
        self._wanted = LatelyWanted(knobs.keeps_s)
        self._offered: dict[str, None] = {}
        self._up: dict[str, float] = {}
        self._coming: dict[str, float] = {}
        self._leaving: frozenset[str] = frozenset()
        self._used: tuple[str, ...] = ()
        self._layout: Candidate | None = None
        self._generation = 0
        self._pause_s = self._stepped_s = self._since_checkpoint_s = 0.0
        self._is_hit = self._is_silent = False
        self._tokens = self._ideal = self._usd = 0.0
        self._lost_by = dict.fromkeys(LOST_BY, 0.0)
        self._layouts: list[tuple[float, str, int, int]] = []
        self._worlds: list[WorldSpan] = []
        self._leases: list[LeaseSpan] = []
        self._decisions: list[tuple[float, PolicyDecision]] = []
        self._victims: dict[int, tuple[str, ...]] = {}
        self._past = 0
        self._decided_s = -inf
        self._progress: list[ProgressPoint] = []

    def run(self, goal: Goal) -> ClusterRun:
        for step in grid_of(self._trace, self._setup):
            changed = self._observe(step)
            if changed or self._layout is None or step.begin_s - self._decided_s >= self._setup.decides_every_s:
                self._decide(step.begin_s, goal)
            self._spend(step)
            self._note(step)
        for node in list(self._up):
            self._release(node, self._trace.end_s)
        return ClusterRun(
            policy=self._policy.name,
            tokens=self._tokens,
            ideal_tokens=self._ideal,
            usd=self._usd,
            changes=len(self._layouts),
            tokens_lost_by=tuple(self._lost_by.items()),
            layouts=tuple(self._layouts),
            worlds=tuple(self._worlds),
            leases=tuple(self._leases),
            decisions=tuple(self._decisions),
            progress=tuple(self._progress),
        )

    # What happens.

    def _observe(self, step: GridStep) -> bool:
        """What the step begins with: losses, nodes that come, notices. Whether anything did."""
        changed = False
        if step.event >= 0:
            changed = True
            event = self._trace.events[step.event]
            self._lose(step)
            if event.added and step.begin_s > 0:
                self._gains.count(step.begin_s, len(event.added))
            for node in event.added:
                self._offered[node] = None
                self._up[node] = step.begin_s
        for node, ready_s in list(self._coming.items()):
            if ready_s <= step.begin_s:
                del self._coming[node]
                self._up[node], changed = step.begin_s, True
        return self._hear(step) or changed

    def _lose(self, step: GridStep) -> None:
        told = tuple(node for node in self._victims.pop(step.event, ()) if node in self._offered)
        victims = told + self._draw(step.event, step.lost - len(told), told)
        if not victims:
            return
        touched = set(victims) & set(self._used)
        if touched:
            self._is_hit = True
            self._is_silent |= bool(touched - self._leaving) and self._setup.unannounced_share > 0
        for node in victims:
            self._offered.pop(node, None)
            self._coming.pop(node, None)
            if node in self._up:
                self._release(node, step.begin_s)
        self._losses.count(step.begin_s, len(victims))
        for notice in self._notices.all():
            if notice.node_id in victims:
                self._notices.drop(key_of(notice))
        self._leaving -= set(victims)

    def _draw(self, index: int, count: int, besides: tuple[str, ...] = ()) -> tuple[str, ...]:
        """`count` nodes that an event takes, besides those of which it is known."""
        here = [node for node in self._offered if node not in besides]
        match self._setup.victims:
            case Victims.NAMED:
                return tuple(node for node in self._trace.events[index].lost if node not in besides)[:count]
            case Victims.DRAWN:
                return tuple(self._random.sample(here, min(count, len(here))))
            case Victims.COUNTED:
                used = [node for node in here if node in self._used]
                others = [node for node in here if node not in self._used]
                is_hit = likely_hit(len(used), len(here), count)
                return tuple([*used, *others][:count] if is_hit else [*others, *used][:count])

    def _hear(self, step: GridStep) -> bool:
        """Notices that come at the begin of this step, and which nodes leave as far as is known now."""
        setup, heard = self._setup, False
        if not setup.notice_s:
            return False
        now = START_UTC + timedelta(seconds=step.begin_s)
        events = self._trace.events
        while self._past < len(events) and events[self._past].at_s <= step.begin_s:
            self._past += 1
        for index in range(self._past, len(events)):
            event = events[index]
            if not event.lost or index in self._victims:
                continue
            if event.at_s - setup.notice_s > step.begin_s:
                break
            self._victims[index] = victims = self._draw(index, len(event.lost))
            if self._silent.random() < setup.unannounced_share:
                continue
            deadline = START_UTC + timedelta(seconds=event.at_s)
            for node in victims:
                self._notices.take(
                    NoticeFact(
                        node_id=node,
                        kind=NoticeKind.INTERRUPTION,
                        source=SOURCE,
                        first_seen_utc=now,
                        deadline_utc=deadline,
                        raw=SOURCE,
                    )
                )
            heard = True
        if heard:
            self._leaving = frozenset(notice.node_id for notice in self._notices.moving(now))
        return heard

    # What is decided.

    def _decide(self, at_s: float, goal: Goal) -> None:
        self._decided_s = at_s
        inputs = self._inputs(at_s, goal)
        decision = self._policy.decide(inputs)
        self._remember(at_s, decision)
        option = decision.option
        staying = [node for node in self._up if node not in self._leaving]
        if option is None or not 0 < option.nodes <= len(staying) or len(staying) < self._setup.gang:
            if self._is_broken():
                self._stop()
        else:
            candidate = self._by_layout[option.layout]
            if self._is_broken() or self._layout is None or self._layout.layout != option.layout:
                self._change(at_s, candidate, staying)
        self._hold(at_s, self._kept(at_s, decision, len(staying)), staying)
        self._is_hit = self._is_silent = False

    def _remember(self, at_s: float, decision: PolicyDecision) -> None:
        if not self._decisions or self._decisions[-1][1] != decision:
            self._decisions.append((at_s, decision))

    def _kept(self, at_s: float, decision: PolicyDecision, staying: int) -> int:
        """The nodes to hold: what is wanted, and of those that are there what was wanted a moment ago; none that the
        job could not use."""
        wanted = min(sum(count for _, count in decision.hold), self._useful)
        return max(wanted, min(self._wanted.count(at_s, wanted), staying + len(self._coming)))

    def _is_broken(self) -> bool:
        return self._is_hit or any(node in self._leaving for node in self._used)

    def _inputs(self, at_s: float, goal: Goal) -> PolicyInputs:
        setup = self._setup
        staying, coming = sum(node not in self._leaving for node in self._up), len(self._coming)
        more = sum(node not in self._up and node not in self._coming for node in self._offered)
        self._losses.watch(at_s)
        self._gains.watch(at_s)
        pool = PoolView(
            pool=setup.pool,
            place=PLACE,
            market=Market.SPOT,
            usd_per_hour=setup.usd_per_hour_at(at_s),
            held=staying,
            coming=coming,
            offered=min(more, max(0, self._useful - staying - coming)),
            acquire_s=setup.acquire_s,
            life_s=_rounded(self._losses.life_s()),
            grows_in_s=_rounded(self._gains.life_s()),
            group_sizes=self._losses.group_sizes(),
            at_risk=staying + coming + more,
        )
        standing = None
        if self._layout is not None:
            stays = sum(node not in self._leaving for node in self._used)
            standing = StandingWorld(
                self._layout.layout, self._layout.nodes, PLACE, ((setup.pool, stays),), is_whole=not self._is_broken()
            )
        done = replace(goal, tokens_left=goal.tokens_left - self._tokens, tokens_done=self._tokens, elapsed_s=at_s)
        if goal.deadline_in_s < inf:
            done = replace(done, deadline_in_s=goal.deadline_in_s - at_s)
        return PolicyInputs(
            pools=(pool,),
            candidates=self._candidates,
            usd_per_hour_on_demand=setup.usd_per_hour_on_demand,
            standing=standing,
            goal=done if goal.tokens_left < inf else replace(goal, tokens_done=0.0),
            knobs=self._knobs,
        )

    def _change(self, at_s: float, candidate: Candidate, staying: list[str]) -> None:
        """The world becomes another one: survivors keep their places, others come after them."""
        free = [node for node in staying if node not in self._used]
        kept = [node for node in self._used if node in self._up and node not in self._leaving]
        self._drop_work(self._layout, forced=self._is_broken())
        self._pause_s = candidate.change_s + (self._setup.detect_s if self._is_silent else 0.0)
        self._used = tuple([*kept, *free][: candidate.nodes])
        self._layout, self._stepped_s = candidate, 0.0
        self._generation += 1
        self._layouts.append((at_s, candidate.layout, candidate.nodes, len(self._up)))

    def _drop_work(self, layout: Candidate | None, *, forced: bool) -> None:
        """Work that the change throws away: what came after the last checkpoint, or the step that is not ended."""
        setup = self._setup
        if layout is None:
            return
        seconds = 0.0
        if setup.checkpoint_every_s:
            # A change that is chosen or announced begins with a checkpoint.
            seconds, self._since_checkpoint_s = self._since_checkpoint_s if forced and self._is_silent else 0.0, 0.0
        elif setup.counts_steps and forced:
            part_s = layout.step_time_s / (1 if self._is_silent else setup.step_parts)
            elapsed = self._stepped_s % part_s
            ends_in_time = part_s - elapsed <= setup.notice_s and not self._is_silent
            seconds = 0.0 if ends_in_time else elapsed
        self._tokens -= seconds * layout.tokens_per_s
        self._lost_by["lost_work"] += seconds * layout.tokens_per_s

    def _stop(self) -> None:
        self._drop_work(self._layout, forced=True)
        self._layout, self._used, self._pause_s = None, (), 0.0

    def _hold(self, at_s: float, wanted: int, staying: list[str]) -> None:
        """Give back what is held beyond `wanted`, the newest first; buy what is missing."""
        beyond = len(staying) + len(self._coming) - wanted
        for node in list(self._coming)[: max(0, beyond)]:
            del self._coming[node]
            beyond -= 1
        unused = [node for node in reversed(staying) if node not in self._used]
        for node in unused[: max(0, beyond)]:
            self._release(node, at_s)
        for node in [node for node in self._up if node in self._leaving and node not in self._used]:
            self._release(node, at_s)
        if beyond < 0:
            free = [node for node in self._offered if node not in self._up and node not in self._coming]
            for node in [node for node in free if node not in self._leaving][:-beyond]:
                self._coming[node] = at_s + self._setup.acquire_s

    # What it comes to.

    def _release(self, node: str, at_s: float) -> None:
        begin_s = self._up.pop(node)
        if at_s > begin_s:
            self._leases.append(LeaseSpan(node, begin_s, at_s))

    def _spend(self, step: GridStep) -> None:
        seconds, layout = step.seconds, self._layout
        ideal = self._curve.tokens_per_s(step.nodes)
        held = min(ideal, self._curve.tokens_per_s(len(self._up)))
        rate = layout.tokens_per_s if layout is not None else 0.0
        paused = min(self._pause_s, seconds) if layout is not None else 0.0
        self._pause_s -= paused
        works = seconds - paused if layout is not None else 0.0
        self._stepped_s += works
        if self._setup.checkpoint_every_s:
            self._since_checkpoint_s = (self._since_checkpoint_s + works) % self._setup.checkpoint_every_s
        self._tokens += rate * works
        self._ideal += ideal * seconds
        self._usd += len(self._up) * self._setup.usd_of_node(step.begin_s, step.end_s)
        self._lost_by["not_held"] += (ideal - held) * seconds
        self._lost_by["layout" if layout is not None else "waiting"] += (held - rate) * seconds
        self._lost_by["pause"] += rate * paused
        if layout is not None:
            self._span(step.begin_s, step.begin_s + paused, Cause.PAUSE)
            self._span(step.begin_s + paused, step.end_s, Cause.PRODUCTIVE)

    def _note(self, step: GridStep) -> None:
        """A point where none of the present part of the trace is there yet."""
        part_s = self._trace.end_s / (POINTS_MAX - 1)
        is_last = step.end_s >= self._trace.end_s
        if not is_last and self._progress and step.end_s < self._progress[-1].at_s + part_s:
            return
        used = len(self._used) if self._layout is not None else 0
        self._progress.append(ProgressPoint(step.end_s, step.nodes, len(self._up), used, self._tokens))

    def _span(self, begin_s: float, end_s: float, cause: Cause) -> None:
        last = self._worlds[-1] if self._worlds else None
        if end_s <= begin_s:
            return
        what = (cause, self._generation, self._used)
        if last is not None and last.end_s == begin_s and (last.cause, last.generation, last.nodes) == what:
            self._worlds[-1] = replace(last, end_s=end_s)
        else:
            self._worlds.append(WorldSpan(begin_s, end_s, *what))


def _rounded(seconds: float) -> float:
    """As much as an estimate means: decisions of the same inputs may be kept."""
    return float(f"{seconds:.{DIGITS_OF_LIFE}g}")
