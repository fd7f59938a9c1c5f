"""A fleet in a real service without real ranks: agents that report over HTTP what a demo's agents would.

Everything that pages show comes from the service's own records of these reports.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from agent.protocol.sync import CheckpointFact, HandoffMeasures, HandoffMirror, LogChunk, MetricsRow
from agent.protocol.values import HandoffState
from agent.protocol.wires import WireFact, WireKind, WireSpeed
from liver_core.handoff import RankStage
from liver_core.layout import ParallelLayout, Roster
from tests.cluster.real_service import RealService
from tests.service.fake_agent import JOB, FakeAgent, mirror, roster, step_row

# Agents here report when a test wants them to, so nothing may count as lost meanwhile, and nobody acts for them.
SETTINGS = {
    "REQUESTS_PER_S": "100000",
    "AGENT_REQUESTS_PER_S": "100000",
    "SILENT_AFTER_S": "7200",
    "GONE_AFTER_S": "7200",
    "STUCK_AFTER_S": "7200",
    "START_WITHIN_S": "7200",
    "STALL_AFTER_S": "7200",
    "PROPOSE_AFTER_S": "7200",
    "HANDOFF_QUIET_S": "7200",
    "GROW_SETTLE_S": "7200",
}
WAIT_S = 60.0
STEP_S = 0.5
TRACE = 'Traceback (most recent call last):\n  File "job.py", line 7, in step\nRuntimeError: the data loader gave up\n'


def until(what: str, found: Callable[[], Any], *, within_s: float = WAIT_S) -> Any:
    """What `found` returns once it is true."""
    ends_at = time.monotonic() + within_s
    while time.monotonic() < ends_at:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {within_s:.0f} s")


@dataclass
class Story:
    """One job on four nodes. `step`: the last one that was reported."""

    service: RealService
    client: httpx.Client
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    job_id: str = ""
    step: int = 0
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    lock: Any = field(default_factory=threading.RLock)

    def get(self, path: str, **params: Any) -> Any:
        """GET as JSON."""
        return self.client.get(path, params=params).raise_for_status().json()

    def begin(self) -> None:
        """Prices, four nodes, a job that trains."""
        price = {"price_usd_per_hour": 3.6, "on_demand_usd_per_hour": 12.0, "egress_usd_per_gb": 0.02}
        for pool in ("spot-a", "spot-b"):
            self.client.put(f"/api/v1/pools/{pool}/price", json=price).raise_for_status()
        join = {"Authorization": f"Bearer {self.service.token('join')}"}
        for name in ("node-a", "node-b", "node-c", "node-d"):
            pool = "spot-a" if name < "node-c" else "spot-b"
            self.agents[name] = FakeAgent(name, self.client, join, lambda: datetime.now(UTC), pool=pool)
            self.agents[name].watch()
            self.agents[name].sync()
        spec = JOB | {"name": "gpt-1.5b"}
        self.job_id = self.client.post("/api/v1/jobs", json=spec).raise_for_status().json()["job_id"]
        until("the start of the job", self._ordered)
        self.train(12)
        self._measure_wires()

    def _measure_wires(self) -> None:
        """Each node has read the next one of the world; from one of them nothing can be streamed."""
        world = self.world().node_ids()
        far = "nixl: it is on another machine or in another container, and reads over TCP are not allowed"
        for place, name in enumerate(world):
            wire, refused = WireKind.RELAY, (far,)
            if place == 1:
                wire, refused = WireKind.GLOO, (far, "relay: no relay listens on this machine: Connection refused")
            speed = WireSpeed(wire=wire, bytes_per_s=1.1e9 / (1 + place), latency_s=2e-4, refused=refused)
            source = world[(place + 1) % len(world)]
            now = datetime.now(UTC)
            fact = WireFact(job_id=self.job_id, source=source, target=name, speed=speed, measured_utc=now)
            self.agents[name].sync(wires=(fact,))

    def _ordered(self) -> bool:
        for agent in self.agents.values():
            agent.sync()
        return all(agent.orders and agent.orders.jobs and agent.orders.jobs[0].roster for agent in self.agents.values())

    def world(self) -> Roster:
        """That the agents were told of last."""
        for agent in self.agents.values():
            agent.sync()
        rosters = [a.orders.jobs[0].roster for a in self.agents.values() if a.orders and a.orders.jobs]
        found = max((r for r in rosters if r is not None), key=lambda r: r.generation)
        return found

    def train(self, steps: int) -> None:
        """So many more steps, the last of which ends now."""
        with self.lock:
            world = self.world()
            now = datetime.now(UTC)
            first = max(self.at, now - timedelta(seconds=STEP_S * steps))
            width = (now - first) / steps
            numbers = range(self.step + 1, self.step + steps + 1)
            rows = tuple(
                step_row(
                    self.job_id, world.generation, number, first + width * (place + 1), loss=6.0 / (1 + number / 10),
                    tokens=24 * 128, seconds=max(0.01, width.total_seconds()),
                )
                for place, number in enumerate(numbers)
            )  # fmt: skip
            values = tuple(
                MetricsRow(job_id=self.job_id, generation=world.generation, step=row.step, at_utc=row.finished_utc,
                           values={"loss": row.loss, "learning_rate": 1e-3 / row.step, "gradient_norm": 1.5})
                for row in rows
            )  # fmt: skip
            self.step, self.at = numbers[-1], now
            for place, name in enumerate(world.node_ids()):
                agent = self.agents[name]
                rank = agent.rank(agent.job_order(), stage=RankStage.TRAINING, step=self.step, loss=1.0)
                agent.sync(
                    ranks=(rank,),
                    steps=rows if place == 0 else (),
                    metrics=values if place == 0 else (),
                    logs=(self._log(world, name, rank.rank),),
                )

    def _log(self, world: Roster, name: str, rank: int) -> LogChunk:
        text = f"step {self.step} on {name}\n"
        return LogChunk(job_id=self.job_id, generation=world.generation, rank=rank, offset=self.step * 100, text=text)

    def fail_in_log(self, name: str) -> None:
        """A rank writes a traceback."""
        world = self.world()
        rank = next(n for n, member in enumerate(world.members) if member.node_id == name)
        chunk = LogChunk(job_id=self.job_id, generation=world.generation, rank=rank, offset=0, text=TRACE)
        self.agents[name].sync(logs=(chunk,))

    def checkpoint(self) -> None:
        """One is complete."""
        world = self.world()
        fact = CheckpointFact(
            job_id=self.job_id, generation=world.generation, step=self.step, path=f"/checkpoints/step-{self.step}",
            finished_utc=datetime.now(UTC), size_bytes=3_000_000_000, seconds=4.2,
        )  # fmt: skip
        self.agents[world.node_ids()[0]].sync(checkpoints=(fact,))

    def notice(self, name: str, *, deadline_s: float = 120) -> int:
        """The node's cloud says that it goes. Returns the incident's number."""
        self.agents[name].sync(notices=(self.agents[name].notice(deadline_s=deadline_s).model_copy(
            update={"raw": '{"action": "terminate", "time": "soon"}'}),))  # fmt: skip
        return until("the incident", lambda: self.get("/api/v1/incidents", node_id=name))[0]["incident_id"]

    def stream(self, name: str, layout: ParallelLayout, *, moved: int = 400_000_000) -> HandoffMirror:
        """The handoff that answers is open, and moves state."""
        source = self.world()
        nodes = [node for node in source.node_ids() if node != name][: layout.world_size]
        target = roster(self.job_id, source.generation + 1, layout, *nodes)
        measures = HandoffMeasures(
            phases_s={"plan": 0.1, "stream": 1.1}, bytes_planned=1_600_000_000, bytes_moved=moved,
            bytes_lower_bound=1_500_000_000,
        )  # fmt: skip
        found = mirror(
            source, target, datetime.now(UTC), leaving=(name,), state=HandoffState.STREAMING, mirror_seq=1,
            measures=measures,
        )  # fmt: skip
        self.agents[nodes[0]].sync(handoffs=(found,))
        return found

    def say(self, handoff: HandoffMirror, state: HandoffState, seq: int, **measures: Any) -> HandoffMirror:
        """The handoff is further."""
        new = handoff.measures.model_copy(update=measures)
        found = handoff.model_copy(
            update={"state": state, "mirror_seq": seq, "changed_utc": datetime.now(UTC), "measures": new}
        )
        self.agents[handoff.target.node_ids()[0]].sync(handoffs=(found,))
        return found

    def commit(self, handoff: HandoffMirror) -> None:
        """It is done, and the node goes from the job."""
        phases = {"plan": 0.1, "connect": 0.3, "stream": 1.9, "verify": 0.2, "to_ready": 2.6, "to_boundary": 0.3,
                  "to_active": 0.5, "to_retired": 0.4}  # fmt: skip
        self.say(
            handoff, HandoffState.ACTIVE, 9, phases_s=phases, bytes_moved=1_600_000_000, bytes_reread=0,
            pause_s=0.42, pause_steps=0.8, lost_s=0.6, notice_to_safe_s=3.4, notice_to_active_s=3.9,
            notice_to_decided_s=0.2, bandwidth_bytes_per_s=8.4e8, certificate="sha256:5d41402a", cutover_step=self.step,
        )  # fmt: skip
        until("the new generation", lambda: self.world().generation >= handoff.target.generation)

    def play(self) -> None:
        """All of it once: training, an incident with its handoff, a checkpoint, more training, a log with an error."""
        self.begin()
        self.checkpoint()
        self.notice("node-b")
        self.commit(self.stream("node-b", ParallelLayout(pp=3)))
        self.train(20)
        self.fail_in_log("node-c")


@contextlib.contextmanager
def story_in(service: RealService) -> Iterator[Story]:
    """A story in this service, as its operator."""
    headers = {"Authorization": f"Bearer {service.token('operator')}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as client:
        yield Story(service, client)
