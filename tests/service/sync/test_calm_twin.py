"""Two services get the same reports, of any kind and in any order: one stores calm ones together, one each alone. What
is stored and what is answered is the same."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, text

from agent.protocol.sync import LogChunk, MetricsRow, SourceState, SyncOrders
from liver_core.handoff import RankStage, Reason
from service.app import create_app
from service.db.engine import connect
from service.jobs.tables import GenerationRow, HeldFactRow, JobRow, JobStepRow, RankLogRow
from service.ledger.tables import IntervalRow
from service.metrics.tables import StepMetricsRow
from service.nodes.tables import NodeRow
from service.reconcilers import jobs
from service.settings import ServiceSettings
from service.sync import calm as calm_reports
from tests.service.conftest import FakeClock, bearer, fresh_database
from tests.service.fake_agent import JOB, FakeAgent, step_row

NODES = "abcd"
REPORTS = 70
CALM_LEAST = 15
LEFT_OUT = {
    JobRow: {"job_id", "peer_key", "spec"},
    GenerationRow: {"origin_id"},
    RankLogRow: {"log_id"},
    IntervalRow: {"interval_id"},
    HeldFactRow: {"held_id"},
    NodeRow: set(),
    JobStepRow: set(),
    StepMetricsRow: set(),
}
"""What is drawn at random, or counted as rows come."""


class Scene:
    """One service, its four nodes and their job; `play` does one thing, by a generator of random numbers."""

    def __init__(self, client: TestClient, settings: ServiceSettings, clock: FakeClock) -> None:
        self.client, self.clock = client, clock
        self.context = client.app.state.context  # type: ignore[attr-defined]
        joins = bearer(settings, "join")
        self.agents = {
            name: FakeAgent(name, client, joins, clock, incarnation=UUID(int=number))
            for number, name in enumerate(NODES, 1)
        }
        self.job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
        for agent in self.agents.values():
            agent.sync()
        clock.advance(3)
        jobs.tick(self.context)
        for agent in self.agents.values():
            agent.sync()
        self.orders = {name: agent.job_order() for name, agent in self.agents.items()}
        self.step, self.answers = 2, list[Any]()

    def parts(self, name: str, draw: random.Random) -> dict[str, Any]:
        """What a rank at work says, more or less of it, or something that it should not."""
        order, agent, now = self.orders[name], self.agents[name], self.clock()
        step = max(1, self.step - draw.choice((0, 0, 0, 1, 3)))
        stage = draw.choice(10 * (RankStage.TRAINING,) + (RankStage.STARTING, RankStage.ACTIVE))
        rank = agent.rank(order, stage=stage, step=step, loss=draw.choice((None, 1.0)))
        generation = draw.choice(14 * (1,) + (2,))
        about: dict[str, Any] = {"job_id": order.job_id, "generation": generation}
        at = now - timedelta(seconds=draw.choice((0, 0, 0, 1, 8, 40)))
        known: dict[str, Any] = draw.choice(
            ({}, {"loss": 1.5}, {"tokens": 7}, {"loss": 2.5, "consumed_samples": 8 * step})
        )
        rows = [step_row(**about, step=each, at=at, **known) for each in (step - 1, step) if each]
        log = LogChunk(**about, rank=rank.rank, offset=draw.choice((step, 3)), text=f"step {step}\n")
        numbers = MetricsRow(**about, step=step, at_utc=at, values={"grad": float(step)})
        parts = {"ranks": [rank], "steps": rows, "logs": [log], "metrics": [numbers]}
        for part in draw.sample(sorted(parts), draw.choice((0, 0, 1, 2))):
            parts[part] = []
        match draw.randrange(30):
            case 0:
                parts["ranks"] = [rank.model_copy(update={"rank": (rank.rank + 1) % len(NODES)})]
            case 1:
                parts["logs"] = [log.model_copy(update={"rank": (rank.rank + 1) % len(NODES)})]
            case 2:
                parts["steps"] = [*rows, step_row("demo-ffffffff", 1, 9, at)]
            case 3:
                parts["ranks"] = [rank.model_copy(update={"generation": 2})]
            case 4:
                reason = Reason("Connection closed by peer", "training", rank.rank)
                parts["ranks"] = [rank.model_copy(update={"stage": RankStage.FAILED, "reason": reason})]
            case _:
                pass
        return {part: tuple(rows) for part, rows in parts.items()}

    def play(self, draw: random.Random) -> None:
        """Send a report, mostly of a world at work, and note the answer; or let time pass."""
        name = draw.choice(NODES)
        agent = self.agents[name]
        match draw.randrange(24):
            case 0 | 1 | 2 | 3:
                self.step += draw.choice((1, 2))
                self.clock.advance(draw.choice((0.3, 1, 2)))
            case 4:
                jobs.tick(self.context)
            case 5:
                agent.watch(state=draw.choice(tuple(SourceState)))
            case 6 if draw.random() < 0.2:
                agent.slots = 2
            case 7:
                agent.incarnation, agent.seq = UUID(int=agent.incarnation.int + 16), 0
            case 8 if draw.random() < 0.2:
                with self.context.sessions.begin() as session:
                    session.execute(text("UPDATE jobs SET highest_step = highest_step + 4"))
            case _:
                pass
        report = agent.report(**self.parts(name, draw))
        match draw.randrange(16):
            case 0:
                report = report.model_copy(update={"report_seq": max(1, agent.seq - draw.choice((1, 2)))})
            case 1 if agent.incarnation.int > 16:
                report = report.model_copy(update={"agent_incarnation": UUID(int=agent.incarnation.int - 16)})
            case 2:
                skewed = self.clock() + timedelta(seconds=draw.choice((-300, 300)))
                report = report.model_copy(update={"issued_utc": skewed})
            case _:
                pass
        content = report.model_dump_json()
        if draw.randrange(12) == 0:
            content = content.replace('"loss":1.0', '"loss":1e999').replace('"loss":1.5', '"loss":1e999')
        answer = self.client.post("/agent/v1/sync", content=content, headers=agent.headers)
        self.answers.append((name, answer.status_code, self._told(answer)))

    def _told(self, answer: Any) -> Any:
        if answer.status_code != 200:
            return answer.json()["code"]
        orders = SyncOrders.model_validate_json(answer.content)
        refused = [(item.part, item.key, item.reason) for item in orders.refusals]
        return orders.accepted_report_seq, refused, [(job.desired, job.generation, job.notices) for job in orders.jobs]

    def shown(self) -> dict[str, list[str]]:
        """The answers, and each row of the tables that reports change."""
        shown = {"answers": [repr(answer) for answer in self.answers]}
        with self.context.sessions() as session:
            for table, left_out in LEFT_OUT.items():
                columns = [column for column in table.__table__.columns if column.name not in left_out]
                rows = session.execute(select(*columns)).mappings()
                shown[table.__tablename__] = sorted(repr(dict(row)) for row in rows)
        return {name: [line.replace(self.job_id, "JOB") for line in lines] for name, lines in shown.items()}


@pytest.fixture
def served(server_url, tmp_path):
    @contextmanager
    def serve(folder: str) -> Iterator[Scene]:
        clock, settings = FakeClock(), ServiceSettings(data_dir=Path(tmp_path / folder), reconcilers=False)
        settings.data_dir.mkdir()
        with fresh_database(server_url) as url:
            database = connect(url, pool_size=5)
            with TestClient(create_app(settings, clock=clock, database=database)) as client:
                client.headers.update(bearer(settings, "operator"))
                yield Scene(client, settings, clock)
            database.close()

    return serve


@pytest.mark.parametrize("seed", range(3))
def test_what_calm_reports_store_is_what_each_alone_would(served, monkeypatch, seed):
    tries: list[bool] = []
    store_calm = calm_reports.store_calm

    def noted(*arguments, **named):
        found = store_calm(*arguments, **named)
        tries.extend(not isinstance(item, calm_reports.Left) for item in found)
        return found

    monkeypatch.setattr(calm_reports, "store_calm", noted)
    shown = []
    for folder in ("together", "alone"):
        if folder == "alone":
            monkeypatch.setattr(calm_reports, "may_be_calm", lambda _: False)
        draw = random.Random(seed)
        with served(folder) as scene:
            for _ in range(REPORTS):
                scene.play(draw)
            shown.append(scene.shown())
    assert tries.count(True) >= CALM_LEAST and False in tries
    for name, alone in shown[1].items():
        assert shown[0][name] == alone, name
