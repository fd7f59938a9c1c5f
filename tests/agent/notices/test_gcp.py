"""The GCP source: its long poll against a server that answers as Google's does, and servers that do not."""

import asyncio
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlparse

import pytest

from agent.notices import gcp
from agent.notices.gcp import EVENT_PATH, PREEMPTED_PATH, UPCOMING_PATH, GcpMetadataSource
from agent.notices.metadata_read import BODY_BYTES_MAX
from agent.notices.source import Announced, Nothing, Observation, Unknown
from agent.notices.warning_budget import warning_budget
from agent.protocol.sync import Provider
from deploy.local.metadata_server import GCP_NO_MAINTENANCE, ImdsServer
from tests.agent.notices.scripted_server import Reply, scripted

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
GOOGLE = {"Metadata-Flavor": "Google"}


QUIET = {
    EVENT_PATH: Reply(body="NONE", headers=GOOGLE),
    UPCOMING_PATH: Reply(503, GCP_NO_MAINTENANCE, GOOGLE),
}


def look(
    *replies: Reply, upcoming: Reply | None = None, long_poll_s: float = 5, now: Callable[[], datetime] = lambda: NOON
) -> tuple[list[Observation], list[str]]:
    """What the source makes of these answers to the long poll, and which ETags it asked with."""
    waiting = list(replies)

    def answer(asked: str) -> Reply:
        path = urlparse(asked.split()[1]).path
        if path == UPCOMING_PATH and upcoming is not None:
            return upcoming
        return waiting.pop(0) if path == PREEMPTED_PATH else QUIET[path]

    async def run() -> tuple[list[Observation], list[str]]:
        async with scripted(answer) as server:
            budget = warning_budget(Provider.GCP)
            source = GcpMetadataSource(server.url, budget=budget, long_poll_s=long_poll_s, now=now)
            seen = [await source.observe() for _ in replies]
            await source.close()
            asked = [parse_qs(urlparse(line.split()[1]).query) for line in server.asked if PREEMPTED_PATH in line]
            return seen, [query["last_etag"][0] for query in asked]

    return asyncio.run(run())


def test_a_proxy_of_the_environment_is_not_asked_for_what_is_link_local(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert look(Reply(body="FALSE", headers=GOOGLE | {"ETag": "7"}))[0] == [Nothing()]


def test_the_gcp_long_poll_resumes_by_etag_and_hears_the_flip() -> None:
    server = ImdsServer().start()

    async def run() -> tuple[list[Observation], float]:
        source = GcpMetadataSource(server.url, budget=warning_budget(Provider.GCP), long_poll_s=60, now=lambda: NOON)
        first = await source.observe()
        loop = asyncio.get_running_loop()
        began = loop.time()
        loop.call_later(0.2, lambda: server.instance.change({"do": "interrupt", "notice_in_s": 0.2}))
        second = await source.observe()
        took_s = loop.time() - began
        loop.call_later(0.2, lambda: server.instance.change({"do": "clear"}))
        third = await source.observe()
        await source.close()
        return [first, second, third], took_s

    (first, second, third), took_s = asyncio.run(run())
    server.stop()
    assert (first, third) == (Nothing(), Nothing())
    assert isinstance(second, Announced)
    assert second.announcements[0].deadline_utc == NOON + timedelta(seconds=30)
    assert 0.4 <= took_s < 30, "answered when the flag flipped, neither before nor at the end of the poll"


def test_a_gcp_server_that_is_not_there_is_unknown() -> None:
    async def run() -> Observation:
        source = GcpMetadataSource(
            "http://127.0.0.1:9", budget=warning_budget(Provider.GCP), long_poll_s=1, now=lambda: NOON
        )
        seen = await source.observe()
        await source.close()
        return seen

    assert isinstance(asyncio.run(run()), Unknown)


def test_a_notice_that_is_withdrawn_is_read_as_nothing_and_the_next_one_is_heard() -> None:
    def said(value: str, etag: str) -> Reply:
        return Reply(body=value, headers={**GOOGLE, "ETag": etag})

    replies = (said("TRUE", "e1"), said("TRUE", "e1"), said("FALSE", "e2"), said("TRUE", "e3"))
    clock = iter(range(0, 1_000, 1))
    seen, asked = look(*replies, now=lambda: NOON + timedelta(seconds=next(clock)))
    assert [type(item) for item in seen] == [Announced, Announced, Nothing, Announced]
    heard = [item.announcements[0] for item in seen if isinstance(item, Announced)]
    assert heard[0].deadline_utc == heard[1].deadline_utc, "an estimate is made once"
    assert heard[2].deadline_utc is not None and heard[2].deadline_utc > NOON + timedelta(seconds=30)
    assert all(item.is_estimate for item in heard), "the key names no time"
    assert asked == ["NONE", "e1", "e1", "e2"]


@pytest.mark.parametrize("bad", [Reply(500), Reply(body="MAYBE", headers=GOOGLE), Reply(body="FALSE")])
def test_after_a_failure_the_next_request_asks_with_the_stale_etag(bad: Reply) -> None:
    good = Reply(body="FALSE", headers={**GOOGLE, "ETag": "e1"})
    seen, asked = look(good, bad, good, good)
    assert [type(item) for item in seen] == [Nothing, Unknown, Nothing, Nothing]
    assert asked == ["NONE", "e1", "NONE", "e1"]


def test_what_is_asked_names_its_waiting_time_and_the_url_may_end_with_a_slash() -> None:
    async def run() -> tuple[Observation, str]:
        async with scripted(lambda _: Reply(body="TRUE\n", headers=GOOGLE)) as server:
            source = GcpMetadataSource(f"{server.url}/", budget=warning_budget(Provider.GCP), now=lambda: NOON)
            seen = await source.observe()
            await source.close()
            return seen, server.asked[0]

    seen, asked = asyncio.run(run())
    assert isinstance(seen, Announced) and seen.announcements[0].raw == f"{PREEMPTED_PATH}: TRUE"
    url = urlparse(asked.split()[1])
    assert url.path == PREEMPTED_PATH
    assert parse_qs(url.query) == {"wait_for_change": ["true"], "last_etag": ["NONE"], "timeout_sec": ["5"]}


def test_what_cannot_be_read_is_said_by_status_and_by_value() -> None:
    seen, _ = look(Reply(503), Reply(body="MAYBE", headers=GOOGLE))
    assert seen == [
        Unknown(f"{PREEMPTED_PATH} answered 503"), Unknown(f"{PREEMPTED_PATH} must be TRUE or FALSE, is 'MAYBE'")
    ]  # fmt: skip


def test_what_is_said_of_upcoming_maintenance_with_an_error_is_told_by_its_status() -> None:
    (seen,), _ = look(Reply(body="FALSE", headers=GOOGLE), upcoming=Reply(403, body="{", headers=GOOGLE))
    assert seen == Unknown(f"{UPCOMING_PATH} answered 403")
    (seen,), _ = look(Reply(body="FALSE", headers=GOOGLE), upcoming=Reply(body="{", headers=GOOGLE))
    assert seen == Unknown(f"{UPCOMING_PATH} is not JSON: '{{'")


def test_an_answer_that_does_not_name_google_is_not_believed() -> None:
    (seen,), _ = look(Reply(body="FALSE"))
    assert isinstance(seen, Unknown) and "without the header Metadata-Flavor: Google" in seen.reason
    (seen,), _ = look(Reply(body="TRUE", headers={"Metadata-Flavor": "Other"}))
    assert isinstance(seen, Unknown)


def test_a_body_that_trickles_ends_at_the_limit_of_the_whole_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcp, "GRACE_S", 0.2)
    started = time.monotonic()
    (seen,), _ = look(Reply(drips=True, headers=GOOGLE), long_poll_s=0.2)
    assert isinstance(seen, Unknown) and "did not answer in 0.4 s" in seen.reason
    assert time.monotonic() - started < 5


def test_a_poll_that_nobody_answers_ends_well_inside_a_notice_of_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gcp.LONG_POLL_S + gcp.GRACE_S + gcp.READ_S <= 10
    monkeypatch.setattr(gcp, "GRACE_S", 0.2)

    async def run(url: str) -> Observation:
        source = GcpMetadataSource(url, budget=warning_budget(Provider.GCP), long_poll_s=0.2, now=lambda: NOON)
        try:
            return await source.observe()
        finally:
            await source.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        seen = asyncio.run(run(f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert isinstance(seen, Unknown) and "did not answer in 0.4 s" in seen.reason
    assert time.monotonic() - started < 5


def test_a_body_that_is_too_long_is_not_read() -> None:
    (seen,), _ = look(Reply(flood_bytes=200_000_000, headers=GOOGLE))
    assert isinstance(seen, Unknown) and f"more than {BODY_BYTES_MAX} bytes" in seen.reason


def test_a_mistake_of_the_agents_own_is_not_taken_for_an_answer_of_the_cloud() -> None:
    def now() -> datetime:
        # Twice while the source is made, once when the poll says nothing, and then for the key of maintenance.
        if next(calls) > 3:
            raise ArithmeticError("no time")
        return NOON

    calls = iter(range(1, 100))
    with pytest.raises(ArithmeticError, match="no time"):
        look(Reply(body="FALSE", headers=GOOGLE), now=now)
