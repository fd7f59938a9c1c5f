"""A fleet of fake agents with one job on it, driven tick by tick."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from fastapi.testclient import TestClient

from agent.protocol.process_end import ProcessEnd
from agent.protocol.sync import CheckpointFact
from liver_core.handoff import RankStage
from service.context import Context
from service.reconcilers import jobs
from service.reconcilers.nodes import NodeWatch
from tests.service.conftest import FakeClock
from tests.service.fake_agent import JOB, FakeAgent, mirror, step_row


@dataclass
class Fleet:
    """`round`: every living agent reports what its ranks do, then every reconciler ticks once, a second passes."""

    client: TestClient
    context: Context
    clock: FakeClock
    make_agent: Callable[..., FakeAgent]
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    job_id: str = ""
    step: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    watch: NodeWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = NodeWatch(self.context)

    def add(self, *names: str) -> None:
        for name in names:
            self.agents[name] = self.make_agent(name)

    def submit(self, **changes) -> str:
        response = self.client.post("/api/v1/jobs", json=JOB | changes)
        assert response.status_code == 201, response.text
        self.job_id = response.json()["job_id"]
        return self.job_id

    def job(self) -> dict:
        return self.client.get(f"/api/v1/jobs/{self.job_id}").json()

    def handoffs(self) -> list[dict]:
        return self.client.get("/api/v1/handoffs").json()

    def tick(self) -> None:
        self.watch.tick()
        for _ in range(3):
            if not jobs.tick(self.context):
                break

    def round(self, *, seconds: float = 1.0, trains: bool = True, parts: dict[str, dict] | None = None) -> None:
        for name, agent in self.agents.items():
            agent.sync(**(self.state_of(agent, trains) | (parts or {}).get(name, {})))
        self.steps = {generation: step + trains for generation, step in self.steps.items()}
        self.step = max(self.steps.values(), default=self.step)
        self.tick()
        self.clock.advance(seconds)

    def state_of(self, agent: FakeAgent, trains: bool) -> dict:
        """What a well-behaved agent says: a training rank where the orders want one, nothing elsewhere."""
        order = agent.orders.jobs[0] if agent.orders and agent.orders.jobs else None
        if order is None or order.roster is None or order.desired != "run" or order.generation is None:
            return {}
        if agent.node_id not in order.roster.node_ids():
            return {}
        if not trains:
            return {"ranks": (agent.rank(order, stage=RankStage.STARTING),)}
        begun = order.source.step if order.source is not None and order.source.kind == "checkpoint" else self.step
        step = self.steps.setdefault(order.generation, begun) + 1
        row = step_row(order.job_id, order.generation, step, self.clock())
        return {"ranks": (agent.rank(order, step=step),), "steps": (row,)}

    def run(self) -> dict:
        """Four nodes and a job that trains on them."""
        self.add("a", "b", "c", "d")
        self.submit()
        for _ in range(4):
            self.round()
        job = self.job()
        assert job["state"] == "running", job
        return job

    def jump(self, step: int) -> None:
        """Training goes on from `step`."""
        self.steps = dict.fromkeys(self.steps, step)

    def checkpoint(self, step: int) -> CheckpointFact:
        return CheckpointFact(
            job_id=self.job_id, generation=1, step=step, path=f"/checkpoints/{step}", finished_utc=self.clock()
        )

    def hand_over(self, proposed: dict, **more) -> None:
        """The agents carry a handoff that the service proposed through to the end."""
        lead = next(agent for agent in self.agents.values() if agent.node_id in proposed["target_nodes"])
        order = lead.job_order()
        assert order.handoff is not None and order.roster is not None
        target = replace(
            order.roster,
            generation=order.next_generation,
            layout=order.handoff.target.layout,
            members=order.handoff.target.members,
        )
        lead.sync(handoffs=(mirror(order.roster, target, self.clock(), handoff_id=order.handoff.handoff_id, **more),))

    def stopped(self, *, step: int = 30) -> str:
        """A job that was stopped, with a checkpoint of its last step; its path in the API."""
        self.run()
        self.jump(step)
        self.round(parts={"a": {"checkpoints": (self.checkpoint(step),)}})
        path = f"/api/v1/jobs/{self.job_id}"
        self.client.post(f"{path}/stop")
        for _ in range(3):
            self.round()
        assert self.job()["state"] == "stopped"
        return path

    def crash(self, end: ProcessEnd, *, step: int, on: str = "b") -> None:
        """The job gets to `step`, and one rank dies of an error."""
        for _ in range(4):
            self.round()
        assert self.job()["state"] == "running"
        self.jump(step - 1)
        self.round()
        agent = self.agents[on]
        dead = agent.dead(agent.job_order(), end, step=step)
        self.round(trains=False, parts={on: {"ranks": (dead,)}})


@pytest.fixture
def fleet(client: TestClient, context: Context, clock: FakeClock, make_agent) -> Fleet:
    return Fleet(client, context, clock, make_agent)
