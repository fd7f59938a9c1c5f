"""The service on PostgreSQL and the simulated one: both are told the same at the same moments, and are compared.

Reports go to the real one over its API. Each does by its own code what its rule says. Plans are made by the real one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from uuid import UUID, uuid4

from fastapi.testclient import TestClient
from sqlalchemy import select, update

from agent.protocol.rank_status import RankStatus
from agent.protocol.sync import CheckpointFact, HandoffDeclined, HandoffMirror
from agent.protocol.values import HandoffCause
from service.context import Context
from service.handoffs.rules import is_open
from service.handoffs.tables import HandoffRow
from service.jobs.grants import granted_nodes
from service.jobs.queries import situation
from service.jobs.rules import next_action
from service.jobs.tables import JobRow
from service.jobs.view import Action, JobView
from service.reconcilers import jobs
from service.reconcilers.nodes import NodeWatch
from service.simulation.world.moments import seconds_at, utc, utc_or_none
from service.simulation.world.reports import AgentReport, Mirror, Planned, RankSays
from service.simulation.world.service import ServicePeriods, SimJob, SimService
from service.tokens.operations import revoke_token
from service.tokens.tables import Role, TokenRow
from tests.service.conftest import FakeClock
from tests.service.fake_agent import JOB, FakeAgent

LEFT_OUT = {
    "decision": "the planner makes it of nodes, pools and prices, and the simulated service is given it",
    "restart": "the same of a restart",
    "answering": "agents of a simulated world do not say which machines answer them",
    "step_s": "the real service measures it by rows of steps, a host of a simulated world says it",
    "longest_s": "the same of the longest step",
    "hang_restart_s": "a job file says it, and a simulated job has none",
    "hook_s_max": "the same",
    "overspent": "the same of a budget",
    "paused_because": "nobody asks for a pause of a simulated job",
    "damaged": "no checkpoint of a simulated job is damaged",
    "finished": "neither service sets it: a job that has met its stop condition is told by its agents",
}
"""Fields that a simulated world does not have, with the reasons."""
COMPARED = tuple(each.name for each in fields(JobView) if each.name not in LEFT_OUT)


@dataclass(slots=True)
class VirtualClock:
    """The tests' clock in seconds. What is asked for waits until `run`."""

    clock: FakeClock
    _asked: list[tuple[float, Callable[..., None], tuple[object, ...]]] = field(default_factory=list)

    @property
    def now(self) -> float:
        """The second of the simulated world."""
        return seconds_at(self.clock())

    def at(self, when_s: float, action: Callable[..., None], *args: object) -> None:
        """Keep it."""
        self._asked.append((when_s, action, args))

    def run(self) -> None:
        """Do what is due by now. What that asks for waits."""
        due = [each for each in self._asked if each[0] <= self.now]
        self._asked = [each for each in self._asked if each[0] > self.now]
        for _, action, args in due:
            action(*args)


class Drift(AssertionError):
    """The two services differ."""


class Undecided(Exception):
    """Two handoffs ended at one moment, and the real service takes either for the last one."""


class TwoServices:
    """One job. `agents`: of the nodes that have come."""

    def __init__(
        self, client: TestClient, context: Context, clock: FakeClock, make_agent: Callable[..., FakeAgent]
    ) -> None:
        self._client, self._context, self._clock, self._make_agent = client, context, clock, make_agent
        self.agents: dict[str, FakeAgent] = {}
        self._watch = NodeWatch(context)
        answer = client.post("/api/v1/jobs", json=JOB)
        assert answer.status_code == 201, answer.text
        self.job_id: str = answer.json()["job_id"]
        self._virtual, self._planned, self._next_id = VirtualClock(clock), None, ""
        self._limits = jobs.limits_of(context.settings)
        job = SimJob(self.job_id, ids=iter(lambda: self._next_id, None))
        periods = ServicePeriods(limits=self._limits)
        self.simulated = SimService(self._virtual, self._plan, job=job, periods=periods)

    @property
    def now_s(self) -> float:
        """The second of the simulated world."""
        return self._virtual.now

    # Facts.

    def comes(self, name: str, *, incarnation: int, is_machine: bool) -> None:
        """Another start of a node's agent, and perhaps on another machine."""
        if is_machine:
            self.simulated.node_came(name, incarnation=incarnation)
            pool = f"spot-{incarnation}"  # As a new machine has a new address, else orders keep the old one's notices.
            self.agents[name] = self._make_agent(name, provider_id=f"i-{name}-{incarnation}", pool=pool)
        else:
            self.agents[name].incarnation, self.agents[name].seq = uuid4(), 0

    def report(self, said: AgentReport) -> None:
        """An agent reports, once to each."""
        self.simulated.take_report(said)
        agent = self.agents[said.node]
        agent.sync(
            ranks=tuple(self._rank(rank) for rank in said.ranks),
            handoffs=tuple(self._mirror(mirror) for mirror in said.mirrors),
            declined=tuple(
                HandoffDeclined(handoff_id=UUID(each.handoff_id), job_id=self.job_id, reason=each.reason)
                for each in said.declined
            ),
            notices=said.notices,
        )

    def report_again(self, said: AgentReport, *, back: int) -> None:
        """A report of the same start that was sent before, as the `back`th of the last ones."""
        agent = self.agents[said.node]
        self.simulated.take_report(said)
        last, agent.seq = agent.seq, agent.seq - back - 1
        agent.sync(ranks=tuple(self._rank(rank) for rank in said.ranks))
        agent.seq = last

    def checkpoint(self, by: AgentReport, generation: int, step: int, *, seconds: float | None, asked: int) -> None:
        """One is complete, which a node reports."""
        path = f"/checkpoints/step_{step}"
        fact = CheckpointFact(
            job_id=self.job_id,
            generation=generation,
            step=step,
            path=path,
            finished_utc=self._clock(),
            seconds=seconds,
            asked=asked,
        )
        self.simulated.take_report(by)
        self.simulated.checkpoint_published(generation, step, self.now_s, path=path, seconds=seconds, asked=asked)
        self.agents[by.node].sync(ranks=tuple(self._rank(rank) for rank in by.ranks), checkpoints=(fact,))

    def stop(self) -> None:
        """A person asks for it."""
        answer = self._client.post(f"/api/v1/jobs/{self.job_id}/stop")
        assert answer.status_code == 200, answer.text
        self.simulated.stop()

    def revoke(self, name: str) -> None:
        """A person takes its key from a node."""
        with self._context.sessions() as session:
            is_key = (TokenRow.role == Role.NODE_KEY) & (TokenRow.node_id == name)
            token = session.scalars(select(TokenRow.token_id).where(is_key, TokenRow.revoked_at.is_(None))).one()
        with self._context.sessions.begin() as session:
            revoke_token(session, str(token), now=self._clock())
        self.simulated.revoke(name)

    def goes_away(self) -> None:
        """The service hears nothing, and does nothing."""
        self.simulated.stop_listening()

    def is_back(self, said: AgentReport) -> None:
        """It listens again, and this is the first report: as long as it hears nobody, the real one takes itself for
        deaf."""
        self.simulated.listen_again()
        self.report(said)
        self._watch.tick()

    def granted(self, names: set[str]) -> set[str]:
        """Those of these nodes that have a part in the job: handoffs are of no others."""
        with self._context.sessions() as session:
            return set(granted_nodes(session, self.job_id, names, now=self._clock()))

    # What is made of them.

    def compare(self) -> Action:
        """Look at both at this moment; what is to do is the same too. Raises Drift, or Undecided."""
        self._watch.tick()
        now = self._clock()
        with self._context.sessions() as session:
            job = session.get_one(JobRow, self.job_id)
            view = situation(session, job, poll_s=self._context.settings.agent_poll_s, now=now).view
            numbers = (job.active_generation, job.next_generation)
        real = replace(view, listening_since=self._context.listening.since)
        self._planned = Planned(real.decision, real.restart)
        simulated = self.simulated.rows.view(self._planned, now, None)
        known = self.simulated.rows.generations
        pairs = {name: (getattr(real, name), getattr(simulated, name)) for name in COMPARED}
        pairs["numbers"] = (numbers, (known.active, known.next_number))
        pairs["action"] = (next_action(real, self._limits), next_action(simulated, self._limits))
        differing = [f"{name}: {one}\n    simulated: {other}" for name, (one, other) in pairs.items() if one != other]
        if real.declined != simulated.declined and self._ended_together():
            raise Undecided
        if differing:
            raise Drift("\n".join(differing))
        return next_action(real, self._limits)

    def look(self) -> Action:
        """Both look at the job, and do what is to do."""
        due, now = self.compare(), self._clock()
        known = self._handoff_ids()
        with self._context.sessions.begin() as session:
            session.execute(update(JobRow).where(JobRow.due_at.is_not(None)).values(due_at=now))
        jobs.tick(self._context)
        self._next_id = str(next(iter(self._handoff_ids() - known), uuid4()))
        self.simulated.wake()
        self._virtual.run()
        self.compare()
        return due

    def _ended_together(self) -> bool:
        ended = [row.recorded_at for row in self.simulated.rows.handoffs.rows.values() if not is_open(row.state)]
        return ended.count(max(ended)) > 1

    def _plan(self) -> Planned:
        assert self._planned is not None
        return self._planned

    def _handoff_ids(self) -> set[UUID]:
        with self._context.sessions() as session:
            return set(session.scalars(select(HandoffRow.handoff_id).where(HandoffRow.job_id == self.job_id)))

    # What agents say, as it goes over the wire.

    def _rank(self, says: RankSays) -> RankStatus:
        return RankStatus(
            job_id=self.job_id,
            generation=says.generation,
            rank=says.rank,
            slot=0,
            pid=1_000 + says.rank,
            stage=says.stage,
            step=says.step,
            reason=says.reason,
            ended=says.ended,
        )

    def _mirror(self, mirror: Mirror) -> HandoffMirror:
        return HandoffMirror(
            handoff_id=UUID(mirror.handoff_id),
            job_id=self.job_id,
            parent=mirror.parent,
            generation=mirror.generation,
            plan_revision=mirror.plan_revision,
            mirror_seq=mirror.mirror_seq,
            proposer=mirror.proposer,
            cause=HandoffCause(mirror.cause),
            state=mirror.state,
            rung=mirror.rung,
            source=mirror.source,
            target=mirror.target,
            leaving=mirror.leaving,
            store_node=mirror.store_node,
            decision=mirror.decision,
            reason=mirror.reason,
            opened_utc=utc(mirror.opened_s),
            deadline_utc=utc_or_none(mirror.deadline_s),
            changed_utc=self._clock(),
            superseded=mirror.superseded,
        )
