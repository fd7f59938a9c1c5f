"""The watcher's bookkeeping, the GCP source's long poll, and the warning budget."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlparse

from agent.notices.gcp import GcpMetadataSource
from agent.notices.source import Announced, Announcement, NoneSource, Nothing, Observation, Unknown
from agent.notices.warning_budget import warning_budget
from agent.notices.watcher import NoticeWatcher, SourceHealth, SourceState
from agent.protocol.sync import NoticeFact, NoticeKind, Provider

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def watch(*observations: Observation) -> tuple[list[NoticeFact], list[SourceHealth]]:
    facts: list[NoticeFact] = []
    healths: list[SourceHealth] = []

    async def on_fact(fact: NoticeFact) -> None:
        facts.append(fact)

    async def on_health(health: SourceHealth) -> None:
        healths.append(health)

    async def run() -> None:
        watcher = NoticeWatcher(NoneSource(), node_id="a", on_fact=on_fact, on_health=on_health, now=lambda: NOON)
        for observation in observations:
            await watcher.take(observation)

    asyncio.run(run())
    return facts, healths


def interruption(seconds: float) -> Announcement:
    return Announcement(NoticeKind.INTERRUPTION, NOON + timedelta(seconds=seconds), "raw")


def test_a_repeated_announcement_is_one_fact() -> None:
    facts, _ = watch(
        Announced((interruption(120),)), Announced((interruption(120.5),)), Announced((interruption(121),))
    )
    assert len(facts) == 1


def test_an_earlier_deadline_is_a_new_fact_with_the_first_sight_kept() -> None:
    facts, _ = watch(Announced((interruption(120),)), Announced((interruption(60),)))
    assert [fact.deadline_utc for fact in facts] == [NOON + timedelta(seconds=120), NOON + timedelta(seconds=60)]


def test_health_is_told_once_for_each_change_with_its_reason() -> None:
    _, healths = watch(Nothing(), Nothing(), Unknown("answered 500"), Unknown("answered 500"), Nothing())
    assert [(health.state, health.reason) for health in healths] == [
        (SourceState.WATCHING, ""),
        (SourceState.UNKNOWN, "answered 500"),
        (SourceState.WATCHING, ""),
    ]


def test_what_a_half_blind_source_heard_still_counts() -> None:
    facts, _ = watch(Unknown("rebalance answered 500", (interruption(120),)))
    assert len(facts) == 1


def test_the_usable_seconds_are_105_on_aws_and_25_or_115_on_gcp() -> None:
    for provider, notice_s, usable_s in ((Provider.AWS, 0, 105), (Provider.GCP, 0, 25), (Provider.GCP, 120, 115)):
        budget = warning_budget(provider, notice_s)
        safe_by = budget.safe_by_utc(NOON, None)
        assert safe_by == NOON + timedelta(seconds=usable_s)


def test_a_short_warning_keeps_the_same_share_in_reserve() -> None:
    safe_by = warning_budget(Provider.AWS).safe_by_utc(NOON, NOON + timedelta(seconds=40))
    assert safe_by == NOON + timedelta(seconds=35)


class _Metadata(BaseHTTPRequestHandler):
    """Answers as GCP's server does: at once on an unknown ETag, otherwise when the flag flips."""

    flipped = threading.Event()
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        query = parse_qs(urlparse(self.path).query)
        etag = "e2" if self.flipped.is_set() else "e1"
        self.asked.append(query["last_etag"][0])
        if query["last_etag"][0] == etag:
            self.flipped.wait(float(query["timeout_sec"][0]))
        body = b"TRUE" if self.flipped.is_set() else b"FALSE"
        status = 200 if self.headers.get("Metadata-Flavor") == "Google" else 403
        self.send_response(status)
        self.send_header("ETag", "e2" if self.flipped.is_set() else "e1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_the_gcp_long_poll_resumes_by_etag_and_hears_the_flip() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    async def run() -> list[Observation]:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        source = GcpMetadataSource(url, budget=warning_budget(Provider.GCP), long_poll_s=5, now=lambda: NOON)
        first = await source.observe()
        asyncio.get_running_loop().call_later(0.2, _Metadata.flipped.set)
        second = await source.observe()
        await source.close()
        return [first, second]

    first, second = asyncio.run(run())
    server.shutdown()
    server.server_close()
    assert first == Nothing()
    assert isinstance(second, Announced)
    assert second.announcements[0].deadline_utc == NOON + timedelta(seconds=30)
    assert _Metadata.asked == ["NONE", "e1"]


def test_a_gcp_server_that_is_not_there_is_unknown() -> None:
    async def run() -> Observation:
        source = GcpMetadataSource(
            "http://127.0.0.1:9", budget=warning_budget(Provider.GCP), long_poll_s=1, now=lambda: NOON
        )
        seen = await source.observe()
        await source.close()
        return seen

    assert isinstance(asyncio.run(run()), Unknown)
