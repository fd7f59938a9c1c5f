"""The database's clock: how wrong it may be, and that a replica whose own clock is wrong judges nobody by it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from service.context import utc_now
from service.db.clock import DRIFT, ROUND_TRIP_S_MAX, DatabaseClock
from service.settings import ServiceSettings
from tests.chaos.clocks import Clocks, compiler
from tests.service.conftest import bearer
from tests.service.fake_agent import FakeAgent

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class World:
    """A database whose clock stands on its own, and how long it takes to answer; in place of an engine."""

    def __init__(self) -> None:
        self.s, self.set_s, self.way_s, self.away = 1_000.0, 0.0, 0.001, False

    def monotonic(self) -> float:
        return self.s

    def connect(self) -> "World":
        if self.away:
            raise DBAPIError("connect", None, OSError("away"))
        return self

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_) -> None:
        return None

    def execute(self, _statement) -> "World":
        return self

    def scalar_one(self) -> datetime:
        # The slowest way there, and none back: the worst case.
        self.s += self.way_s
        return self.now()

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.s + self.set_s)

    def clock(self) -> DatabaseClock:
        return DatabaseClock(self, monotonic=self.monotonic)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


def wrong_s(clock: DatabaseClock, world: World) -> float:
    return abs((clock() - world.now()).total_seconds())


def test_it_is_wrong_by_half_a_round_trip_at_most(world):
    world.way_s = 0.2
    clock = world.clock()
    assert wrong_s(clock, world) == pytest.approx(0.1)
    assert clock.error_s == pytest.approx(0.1, rel=0.01)


def test_slow_readings_do_not_make_it_worse(world):
    clock = world.clock()
    world.way_s = 0.5
    for _ in range(20):
        world.s += 10
        clock.look()
        assert wrong_s(clock, world) <= 0.001
        assert clock.error_s <= 0.001 + 20 * 10.5 * DRIFT


def test_once_only_slow_readings_are_to_be_had_the_better_of_both_counts(world):
    clock = world.clock()
    world.way_s = 0.02
    world.s += 100
    clock.look()
    assert clock.error_s == pytest.approx(0.01, rel=0.01)
    world.way_s = 2 * ROUND_TRIP_S_MAX
    world.s += 100_000
    clock.look()
    assert clock.error_s > ROUND_TRIP_S_MAX, "it says how wrong it may be"


def test_where_the_databases_clock_is_set_it_follows(world):
    clock = world.clock()
    for set_s in (60.0, -3_600.0, 0.0):
        world.set_s = set_s
        clock.look()
        assert wrong_s(clock, world) < 0.001


def test_while_the_database_is_away_it_goes_on(world):
    clock = world.clock()
    world.away = True
    world.s += 3_600
    with pytest.raises(DBAPIError):
        clock.look()
    assert wrong_s(clock, world) < 0.001 and clock.error_s == pytest.approx(3_600 * DRIFT, rel=0.01)


def test_a_real_one_says_what_the_database_says(database):
    clock = DatabaseClock(database.engine)
    with database.engine.connect() as connection:
        before = clock()
        said = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        after = clock()
    allowed = timedelta(seconds=clock.error_s)
    assert before - allowed <= said <= after + allowed


@contextmanager
def replica(folder, database_url, clock: dict[str, str]) -> Iterator[str]:
    """`liver serve` with its own wall clock; what it logs stands in the folder."""
    folder.mkdir()
    environment = os.environ | clock | {
        "LIVER_SERVICE_DATABASE_URL": database_url.set(drivername="postgresql").render_as_string(hide_password=False),
        "LIVER_SERVICE_SILENT_AFTER_S": "6",
        "LIVER_SERVICE_GONE_AFTER_S": "9",
    }  # fmt: skip
    command = [sys.executable, "-m", "service.cli.main", "serve", "--data-dir", str(folder), "--port", "0"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("service: http"), (folder / "log").read_text()
        yield line.split()[1]
    finally:
        running.terminate()
        running.wait(30)


@pytest.mark.thorough
@pytest.mark.skipif(compiler() is None, reason="a clock that is off needs a C compiler")
@pytest.mark.parametrize("off_s", [300, -300])
def test_replicas_whose_own_clocks_differ_by_minutes_take_nobody_for_silent(tmp_path, database_url, off_s):
    clocks = Clocks(tmp_path / "clocks")
    clocks.build()
    clocks.shift("other", off_s)
    with (
        replica(tmp_path / "one", database_url, {}) as url,
        replica(tmp_path / "other", database_url, clocks.environment("other")) as other,
        httpx.Client(base_url=url, timeout=20) as client,
        httpx.Client(base_url=other, timeout=20) as its,
    ):
        settings = ServiceSettings(data_dir=tmp_path / "one")
        agents = [FakeAgent("a", client, bearer(settings, "join"), utc_now)]
        agents += [FakeAgent("b", its, bearer(settings, "join"), utc_now)]
        until = time.monotonic() + 14
        while time.monotonic() < until:
            for agent in agents:
                agent.sync()
        nodes = client.get("/api/v1/nodes", headers=bearer(settings, "operator")).json()
    assert [(node["node_id"], node["state"]) for node in nodes] == [("a", "ready"), ("b", "ready")]
    logs = [(tmp_path / name / "log").read_text() for name in ("one", "other")]
    assert not any(" is silent" in log or " is gone" in log for log in logs), logs
