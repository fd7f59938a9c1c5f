"""Readers of the API must not keep agents from reporting: each kind of callers has its own threads and connections."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from service.context import utc_now
from service.db.outage import Outage
from service.lanes import FOR_MANY, Lane
from service.problems import ProblemError
from service.settings import ServiceSettings
from tests.service.conftest import bearer
from tests.service.fake_agent import FakeAgent
from tests.service.test_serve import served

READERS = 120
TOKENS = 15
"""Each for as many readers as may wait with one token."""
QUICKLY_S = 4.0
"""A sync takes milliseconds; a reader is refused after about a second. The rest is for busy machines, and far less
than the eight seconds for which a statement waits for a lock."""


def test_readers_that_hold_every_connection_they_may_have_do_not_keep_agents_waiting(tmp_path, database):
    settings = ServiceSettings(data_dir=tmp_path, reconcilers=False, requests_per_s=1_000)
    with served(settings, database) as url, httpx.Client(base_url=url, timeout=30) as client:
        agents = [FakeAgent(name, client, bearer(settings, "join"), utc_now) for name in ("a", "b", "c")]
        for agent in agents:
            agent.sync()
        reader = httpx.Client(base_url=url, timeout=30, limits=httpx.Limits())
        begun = threading.Barrier(READERS + 1)
        admin, viewer = bearer(settings, "admin"), {"role": "viewer", "name": "a reader"}
        made = [client.post("/api/v1/tokens", json=viewer, headers=admin).json() for _ in range(TOKENS)]

        def read(number: int) -> tuple[int, str, float]:
            begun.wait(20)
            asked = time.monotonic()
            token = made[number % TOKENS]["token"]
            answer = reader.get("/api/v1/pools/prices", headers={"Authorization": f"Bearer {token}"})
            return answer.status_code, answer.headers.get("Retry-After", ""), time.monotonic() - asked

        with reader, ThreadPoolExecutor(READERS) as pool, database.engine.connect() as holder:
            # What readers want is locked. So every one of them that begins keeps its connection.
            holder.execute(text("LOCK TABLE pool_prices IN ACCESS EXCLUSIVE MODE"))
            reads = [pool.submit(read, number) for number in range(READERS)]
            begun.wait(20)
            while sum(read.done() for read in reads) < READERS / 2:
                for agent in agents:
                    asked = time.monotonic()
                    agent.sync()
                    assert time.monotonic() - asked < QUICKLY_S, "an agent waits for readers"
            holder.rollback()
            answers = [read.result(30) for read in reads]
    refused = [(after, waited_s) for status, after, waited_s in answers if status != 200]
    assert {status for status, _, _ in answers} == {200, 503}
    assert len(refused) >= READERS / 2 and {after for after, _ in refused} == {"2"}
    assert max(waited_s for _, waited_s in refused) < 2 * QUICKLY_S, "they are refused, and do not wait for long"


def test_a_reader_is_served_again_once_others_are_done(tmp_path, database):
    settings = ServiceSettings(data_dir=tmp_path, reconcilers=False, requests_per_s=1_000)
    with served(settings, database) as url:
        with httpx.Client(base_url=url, headers=bearer(settings, "operator"), timeout=30) as client:
            for _ in range(3 * database.readers_max):
                assert client.get("/api/v1/jobs").status_code == 200
                assert client.get("/api/v1/jobs/job-none").status_code == 404, (
                    "also one that fails gives its place back"
                )


def test_a_crowd_that_is_served_one_by_one_leaves_places_to_work_that_is_done_for_many():
    async def run() -> None:
        unused: Any = None
        lane = Lane(unused, unused, places=FOR_MANY + 1, wait_s=0.05, whose="agents", outage=Outage())
        async with lane.place(alone=True):
            with pytest.raises(ProblemError):
                async with lane.place(alone=True):
                    raise AssertionError("the crowd takes more than its places")
            async with AsyncExitStack() as stack:
                for _ in range(FOR_MANY):
                    await stack.enter_async_context(lane.place())
        async with lane.place(alone=True):
            pass

    asyncio.run(run())
