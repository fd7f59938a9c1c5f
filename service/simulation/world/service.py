"""The service of one simulated job: it takes reports, looks at the job, and does what the product's rules say. Pure.

Its rows are in memory and every decision is one of `service.jobs.rules`, `service.handoffs.rules` and their like. It
draws no numbers and reads no clock: hosts decide when a report arrives.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol
from uuid import UUID

from agent.protocol.sync import NoticeFact, NoticeKind
from agent.protocol.values import HandoffState
from liver_core.handoff import StoreAddress, start_order
from liver_core.handoff.generations import next_start
from liver_core.layout import Roster
from service.jobs import reported
from service.jobs.causes import FirstCause, at_store
from service.jobs.queries import OVERDUE_POLLS, OVERDUE_S
from service.jobs.rules import next_action
from service.jobs.tables import ENDED, JobState, SourceKind
from service.jobs.view import Action, Checkpoint, Do, JobLimits
from service.nodes.listening import Listening
from service.nodes.tables import NodeState
from service.reconcilers.calm_jobs import LOOK_AT_CALM_S, SOONEST_S, look_again_in_s
from service.settings import ServiceSettings
from service.simulation.world.generation_rows import GenerationRow, GenerationRows
from service.simulation.world.handoff_rows import HandoffRows
from service.simulation.world.intake import Intake
from service.simulation.world.job_rows import ENDING, JobRows, new_job
from service.simulation.world.moments import seconds_at, utc
from service.simulation.world.node_rows import NodeRows
from service.simulation.world.reports import AgentReport, Orders, Planned, SteadyHost, Taken
from service.sync.orders import DESIRED

NODES_KEPT = 64
"""Of more nodes those that are gone, and for which nothing waits, are forgotten."""


def setting_s(name: str) -> float:
    """What the product waits unless somebody sets it. The environment of whoever runs this changes nothing."""
    return float(ServiceSettings.model_fields[name].default)


class Clock(Protocol):
    """A virtual clock, in seconds."""

    @property
    def now(self) -> float: ...

    def at(self, when_s: float, action: Callable[..., None], *args: object) -> None:
        """Do it then, in the order in which it was asked for."""
        ...


@dataclass(frozen=True, slots=True)
class ServicePeriods:
    """In seconds. `limits`: of the rule for jobs, among them what a step lease is worth, and for how long an open
    handoff may be quiet. `start_order_s`: the deadline in the order of a start. `usual_step_s`: of a step."""

    limits: JobLimits = field(default_factory=JobLimits)
    silent_after_s: float = field(default_factory=lambda: setting_s("silent_after_s"))
    gone_after_s: float = field(default_factory=lambda: setting_s("gone_after_s"))
    overdue_after_s: float = field(default_factory=lambda: max(OVERDUE_S, OVERDUE_POLLS * setting_s("agent_poll_s")))
    start_order_s: float = 600.0
    usual_step_s: float = 0.0


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whom the service tells of what it does. `changed`: its orders are other ones; `lost`: the job's
    world cannot go on, and another one is started; `started`: a world with this number
    is about to be started; `note`: what happens, for people."""

    changed: Callable[[], None] = _nothing
    lost: Callable[[FirstCause | None, str], None] = _nothing
    started: Callable[[int], None] = _nothing
    note: Callable[[str], None] = _nothing


@dataclass(frozen=True, slots=True)
class SimJob:
    """What is simulated. `ids`: of the handoffs and starts that the service makes, each given once."""

    job_id: str = "job"
    saves_at_end: bool = True
    store: StoreAddress = field(default_factory=lambda: StoreAddress("127.0.0.1", 4_000))
    ids: Iterator[str] = field(default_factory=lambda: (str(UUID(int=number)) for number in count(1)))


class SimService:
    """`plan`: what the planner wants now, of whatever nodes the host has; asked at each look. `steady`: where agents
    report news only. `last_action`: of the newest look, with its reason."""

    def __init__(
        self,
        clock: Clock,
        plan: Callable[[], Planned],
        *,
        job: SimJob | None = None,
        periods: ServicePeriods | None = None,
        hooks: Hooks | None = None,
        steady: SteadyHost | None = None,
    ) -> None:
        self._clock, self._plan, self._steady = clock, plan, steady
        self._job, self._periods, self._hooks = job or SimJob(), periods or ServicePeriods(), hooks or Hooks()
        listening = Listening(utc(clock.now))
        nodes = NodeRows(
            self._job.job_id,
            listening,
            silent_after_s=self._periods.silent_after_s,
            gone_after_s=self._periods.gone_after_s,
            heard_at=None if steady is None else steady.heard_at,
        )
        self.rows = JobRows(
            self._job.job_id,
            new_job(clock.now),
            nodes,
            GenerationRows(),
            HandoffRows(),
            listening,
            overdue_after_s=self._periods.overdue_after_s,
            usual_step_s=self._periods.usual_step_s,
            saves_at_end=self._job.saves_at_end,
        )
        self.last_action = Action(Do.NOTHING, "it has not been looked at yet")
        self._is_away = False
        self._look_s = self._watch_s = float("inf")
        self._states: dict[str, NodeState] = {}
        self._orders: tuple[float, Orders] | None = None

    # What agents tell it and ask of it.

    def take_report(self, report: AgentReport) -> Taken:
        """A report arrives, perhaps after one that was sent later."""
        if self._is_away:
            return Taken(is_news=False)
        intake = Intake(self.rows, report, utc(self._clock.now))
        taken = intake.take()
        self._watch()
        if intake.restated:
            self._touch()
        elif intake.is_due:
            self.wake()
        return taken

    def orders(self) -> Orders:
        """What an answer says now."""
        now_s = self._clock.now
        if self._orders is None or self._orders[1].seq != self.rows.job.orders_seq or self._orders[0] <= now_s:
            over_s = self.rows.nodes.notice_over_at(utc(now_s))
            self._orders = float("inf") if over_s is None else over_s, self._made_orders()
        return self._orders[1]

    # Facts from outside.

    def node_came(self, node: str, *, incarnation: int = 0) -> None:
        """A new machine of this name is there, and has said nothing yet. `incarnation`: of its agent's first start."""
        self.rows.nodes.came(node, utc(self._clock.now), incarnation=incarnation)
        self._watch()
        self._touch()

    def node_went(self, node: str) -> None:
        """It is not heard any more. Only a host whose agents report news only says so: else its silence does."""
        assert self._steady is not None, "agents that report all the time are not heard, nobody tells"
        for after_s in (self._periods.overdue_after_s, self._periods.silent_after_s, self._periods.gone_after_s):
            self._clock.at(self._steady.heard_at(node) + after_s, self.wake)

    def node_left(self, node: str) -> None:
        """It was given back: nobody waits for it."""
        self.rows.nodes.forget(node)

    def hear_notice(self, node: str, first_seen_s: float, deadline_s: float | None) -> None:
        """The cloud says that a node will go."""
        fact = NoticeFact(
            node_id=node,
            kind=NoticeKind.INTERRUPTION,
            source="cloud",
            deadline_utc=None if deadline_s is None else utc(deadline_s),
            first_seen_utc=utc(first_seen_s),
        )
        if self.rows.nodes.hear_notice(fact, utc(self._clock.now)):
            self._touch()

    def withdraw_notice(self, node: str) -> None:
        """The cloud says that it stays."""
        if self.rows.nodes.withdraw_notices(node, utc(self._clock.now)):
            self._touch()

    def checkpoint_published(
        self, generation: int, step: int, at_s: float, *, path: str = "", seconds: float | None = None, asked: int = 0
    ) -> None:
        """One is complete since `at_s`; writing took so many `seconds`. `asked`: the number under which the service
        had asked for it, if it had."""
        job, given = self.rows.job, Checkpoint(path or str(step), step, utc(at_s), seconds)
        known = job.checkpoint
        if known is not None and known.path == given.path and seconds is None:
            given = replace(given, seconds=known.seconds)  # It is written anew, and nobody says how long that took.
        if generation not in self.rows.generations and not self.rows.handoffs.has_generation(generation):
            return
        if known is None or known.finished_at is None or (step, utc(at_s)) > (known.step, known.finished_at):
            job.checkpoint = given
        if asked > job.answered:
            job.answered = asked
            self._touch()

    def stop_listening(self) -> None:
        """The service is away: it hears nothing, and does nothing."""
        self._is_away = True
        self._hooks.note("the service is away")

    def listen_again(self) -> None:
        """It is back, and remembers what it has stored."""
        self._is_away = False
        self.rows.listening.begins(utc(self._clock.now))
        self._hooks.note("the service is back")
        self._watch()
        self.wake()

    def revoke(self, node: str) -> None:
        """A person takes its key from a member: the job has to do without it, at once."""
        now = utc(self._clock.now)
        self.rows.job.revoked[node] = now
        self.rows.nodes.end(node, now)
        self._change_orders()
        self.wake()

    def start_again(self, node: str) -> None:
        """A start that nobody needs: it counts as if this member's key was revoked, and the node stays as it is."""
        self.rows.job.revoked[node] = utc(self._clock.now)
        self.wake()

    def begin_with(self, roster: Roster) -> None:
        """The job trains in this world already."""
        now = utc(self._clock.now)
        self.rows.generations.add(GenerationRow(roster, None, SourceKind.INIT, now, "", first_step_at=now))
        self.rows.generations.active = roster.generation
        self.rows.job.set_state(JobState.RUNNING, "it trains", now)
        self._touch()

    def stop(self) -> None:
        """A person wants the job to end."""
        self.rows.job.stop_requested = True
        self.wake()

    def wake(self) -> None:
        """Something has changed: look now."""
        self._look_at(self._clock.now)

    # What its hosts may read.

    @property
    def limits(self) -> JobLimits:
        """For how long it waits for what."""
        return self._periods.limits

    @property
    def is_settled(self) -> bool:
        """Whether the job trains, and no handoff is open."""
        return self.state is JobState.RUNNING and self.rows.handoffs.open_row() is None

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return self.state in ENDED

    @property
    def is_steady(self) -> bool:
        """Whether agents report news only."""
        return self._steady is not None

    @property
    def state(self) -> JobState:
        """Of the job."""
        return self.rows.job.state

    @property
    def reason(self) -> str:
        """Why the job stands as it does."""
        return self.rows.job.reason

    @property
    def roster(self) -> Roster | None:
        """Of the active generation, also where its ranks have ended."""
        row = self.rows.generations.active_row
        return None if row is None else row.roster

    def going(self) -> frozenset[str]:
        """Nodes that the job must leave."""
        return frozenset(item.node_id for item in self.rows.nodes.noticed(utc(self._clock.now)))

    def usable(self) -> tuple[str, ...]:
        """Nodes that may get a new rank: ready ones that will not go, in the order in which they came."""
        now = utc(self._clock.now)
        barred, seen = self.rows.nodes.barred(now), self.rows.nodes.seen(now)
        return tuple(node.node_id for node in seen if node.state is NodeState.READY and node.node_id not in barred)

    # Looks.

    def _look_at(self, at_s: float) -> None:
        if at_s < self._look_s:
            self._look_s = at_s
            self._clock.at(at_s, self._look, at_s)

    def _look(self, due_s: float) -> None:
        if due_s != self._look_s:
            return
        self._look_s = float("inf")
        if self._is_away or self.state in ENDED:
            return
        now_s, planned = self._clock.now, self._plan()
        self._note_states()
        steps = None if self._steady is None else self._steady.steps()
        action = self.last_action = next_action(self.rows.view(planned, utc(now_s), steps), self._periods.limits)
        again_s, waits = look_again_in_s(self.state, action), self._waits_for_news(action)
        self._apply(action, planned)
        if action.do is not Do.NOTHING:
            again_s = SOONEST_S
        if self.state not in ENDED and not (waits and action.do is Do.NOTHING):
            self._look_at(now_s + again_s)
        self._forget_nodes()

    def _waits_for_news(self, action: Action) -> bool:
        """Whether time alone changes nothing: a host whose agents report news only wakes the service then."""
        if self._steady is None or action.look_again_s is not None:
            return False
        stands = self.state in (JobState.PENDING, JobState.SUSPENDED)
        return stands or look_again_in_s(self.state, action) >= LOOK_AT_CALM_S

    def _note_states(self) -> None:
        """Who leads depends on who is heard, so that agents are told."""
        states = {node.node_id: node.state for node in self.rows.nodes.seen(utc(self._clock.now))}
        fallen = [name for name, state in states.items() if state is not self._states.get(name, NodeState.READY)]
        self._states = states
        if fallen:
            self._change_orders()

    def _watch(self) -> None:
        """Look when the first node counts as silent or gone."""
        if self._steady is not None or self._watch_s < float("inf"):
            return
        change_at = self.rows.nodes.next_change_at(utc(self._clock.now))
        if change_at is not None:
            self._watch_s = seconds_at(change_at) + SOONEST_S
            self._clock.at(self._watch_s, self._watched)

    def _watched(self) -> None:
        self._watch_s = float("inf")
        if self._is_away:
            return  # Whoever listens again watches again.
        states = {node.node_id: node.state for node in self.rows.nodes.seen(utc(self._clock.now))}
        if states != self._states:
            self.wake()
        self._watch()

    def _forget_nodes(self) -> None:
        names = self.rows.nodes.names()
        if len(names) <= NODES_KEPT:
            return
        row, handoff = self.rows.generations.active_row, self.rows.handoffs.open_row()
        needed = set(row.roster.node_ids() if row is not None else ())
        needed |= set(handoff.target.node_ids() if handoff is not None else ())
        for name in names:
            if name not in needed and self.rows.nodes.state_of(name) is NodeState.GONE:
                self.rows.nodes.forget(name)

    # What it does.

    def _apply(self, action: Action, planned: Planned) -> None:
        job, now = self.rows.job, utc(self._clock.now)
        if action.do is Do.NOTHING:
            if job.state in (JobState.PENDING, JobState.SUSPENDED):
                job.reason = action.reason
            return
        self._hooks.note(f"the service: {action.do}: {action.reason}")
        cause = self._close_generation(action)
        if action.do is Do.START and job.state in (JobState.STARTING, JobState.RUNNING):
            self._hooks.lost(action.cause, action.reason)
        match action.do:
            case Do.START:
                self._start(action, planned, cause)
            case Do.PROPOSE:
                self._propose(action, planned)
            case Do.DROP_HANDOFF:
                self.rows.handoffs.drop_open(action.reason, now, cause)
            case Do.ADOPT_WORLD:
                assert action.generation is not None
                world = reported.world_of(self.rows.nodes.seen(now), self.rows.job_id, action.generation)
                if world is not None:
                    self.rows.adopt_world(world, action.reason, now)
            case Do.SUSPEND:
                self.rows.handoffs.drop_open(action.reason, now, cause)
                job.set_state(JobState.SUSPENDING, action.reason, now)
                job.suspended_because = action.suspended_because
            case Do.SUSPEND_LATER:
                pass
            case Do.SETTLE:
                assert action.state is not None
                if action.state in ENDED or action.state is JobState.STOPPING:
                    self.rows.handoffs.drop_open(action.reason, now, cause)
                job.set_state(action.state, action.reason, now)
        # Whatever else is done calls a planned suspension off.
        job.suspends_at = action.suspends_at
        job.failed_starts += action.failed_start
        job.asked += action.save
        job.crashes = action.crashes or job.crashes
        self._change_orders()

    def _close_generation(self, action: Action) -> FirstCause | None:
        row = self.rows.generations.active_row
        if action.cause is None or row is None:
            return None
        if row.ended_by is None:
            row.ended_by = at_store(action.cause, row.store_node)
        return row.ended_by

    def _start(self, action: Action, planned: Planned, cause: FirstCause | None) -> None:
        assert action.target is not None
        job, generations, now_s = self.rows.job, self.rows.generations, self._clock.now
        self.rows.handoffs.drop_open(f"the job starts again: {action.reason}", utc(now_s), cause)
        number, target, given = next_start(generations.next_number - 1), action.target, action.checkpoint
        self._hooks.started(number)
        roster = Roster(self._job.job_id, number, target.layout, target.members)
        order = start_order(
            roster,
            self._job.store,
            next(self._job.ids),
            deadline_utc=now_s + self._periods.start_order_s,
            issued_at=now_s,
            proposer_id="service",
            cause="checkpoint" if given is not None else "start",
            checkpoint="" if given is None else given.path,
        )
        row = GenerationRow(
            roster,
            generations.active,
            SourceKind.INIT if given is None else SourceKind.CHECKPOINT,
            utc(now_s),
            action.reason,
            checkpoint_step=0 if given is None else given.step,
            store_node=roster.node_ids()[0],
            steps_from_at=utc(now_s + action.steps_after_s) if action.steps_after_s else None,
            order=order,
            layout=planned.restart_layout,
        )
        generations.add(row)
        generations.active = number
        job.last_step, job.last_step_at, job.error_at = row.checkpoint_step, None, None
        job.suspended_because = ""
        job.revoked.clear()
        job.set_state(JobState.STARTING, action.reason, utc(now_s))
        job.state_changed_at = utc(now_s)

    def _propose(self, action: Action, planned: Planned) -> None:
        active = self.rows.generations.active
        assert active is not None
        if self.rows.handoffs.open_row() is None:
            now, handoff_id = utc(self._clock.now), next(self._job.ids)
            self.rows.handoffs.propose(handoff_id, active, action, now=now, layout=planned.layout)

    # What it tells.

    def _touch(self) -> None:
        """The orders have changed: agents are woken, and the job is looked at."""
        self._change_orders()
        if self.state not in ENDED:
            self.wake()

    def _change_orders(self) -> None:
        self.rows.job.orders_seq += 1
        self._hooks.changed()

    def _made_orders(self) -> Orders:
        rows, now = self.rows, utc(self._clock.now)
        job, active, start = rows.job, rows.generations.active_row, rows.generations.newest_start
        handoff = rows.handoffs.open_row()
        ready = {node.node_id for node in rows.nodes.seen(now) if node.state is NodeState.READY}
        members = active.roster.node_ids() if active is not None else ()
        waits_until = None if start is None else start.steps_from_at
        return Orders(
            seq=job.orders_seq,
            desired=DESIRED[job.state],
            generation=rows.generations.active,
            roster=None if active is None else active.roster,
            start=None if start is None else start.order,
            start_layout=None if start is None else start.layout,
            steps_from_at=None if waits_until is None else seconds_at(waits_until),
            suspends_at=None if job.suspends_at is None else seconds_at(job.suspends_at),
            proposal=handoff.proposal if handoff is not None and handoff.state is HandoffState.PROPOSED else None,
            notices=rows.nodes.notices(now),
            next_generation=rows.generations.next_number,
            lead_order=reported.lead_order(members, ready=ready, going=rows.nodes.barred(now)),
            checkpoint_asked=job.asked if job.asked > job.answered else 0,
            saves_at_end=rows.saves_at_end and (job.state in ENDING or job.suspends_at is not None),
        )
