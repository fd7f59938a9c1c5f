"""The AWS source against a real IMDSv2 server on loopback."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from agent.notices import aws
from agent.notices.aws import ACTION_PATH, REBALANCE_PATH, TERMINATION_PATH, TOKEN_PATH, AwsImdsSource
from agent.notices.metadata_read import BODY_BYTES_MAX
from agent.notices.source import Announced, Announcement, Nothing, Observation, Unknown
from agent.protocol.sync import NoticeKind
from deploy.local.metadata_server import ImdsServer, Instance, Mode
from tests.agent.notices.scripted_server import Reply, Scripted, scripted


@pytest.fixture
def imds() -> Iterator[ImdsServer]:
    server = ImdsServer(Instance(instance_id="i-0a1")).start()
    yield server
    server.stop()


def look(
    imds: ImdsServer, *, times: int = 1, timeout_s: float = 2.0, off: timedelta = timedelta(0)
) -> list[Observation]:
    async def run() -> list[Observation]:
        now = lambda: datetime.now(UTC) + off  # noqa: E731
        source = AwsImdsSource(imds.url, monotonic=time.monotonic, now=now, timeout_s=timeout_s)
        try:
            return [await source.observe() for _ in range(times)]
        finally:
            await source.close()

    return asyncio.run(run())


def test_a_quiet_instance_announces_nothing(imds: ImdsServer) -> None:
    assert look(imds) == [Nothing()]


def test_a_proxy_of_the_environment_is_not_asked_for_what_is_link_local(
    imds: ImdsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert look(imds) == [Nothing()]


def test_an_interruption_is_heard_with_its_deadline(imds: ImdsServer) -> None:
    assert httpx.post(f"{imds.url}/admin", json={"do": "interrupt", "ends_in_s": 120}).status_code == 200
    (seen,) = look(imds)
    assert isinstance(seen, Announced)
    (announcement,) = seen.announcements
    assert announcement.kind is NoticeKind.INTERRUPTION
    assert announcement.deadline_utc is not None
    left = announcement.deadline_utc - datetime.now(UTC)
    assert timedelta(seconds=115) < left < timedelta(seconds=121)


@pytest.mark.parametrize("off_s", [-300, 300])
def test_a_deadline_is_by_the_clock_of_the_node_also_where_that_is_off(imds: ImdsServer, off_s: int) -> None:
    off = timedelta(seconds=off_s)
    imds.instance.change({"do": "interrupt", "ends_in_s": 120})
    (seen,) = look(imds, off=off)
    assert isinstance(seen, Announced) and seen.announcements[0].deadline_utc is not None
    left = seen.announcements[0].deadline_utc - (datetime.now(UTC) + off)
    assert timedelta(seconds=115) < left < timedelta(seconds=122)


def test_hibernation_is_due_at_once(imds: ImdsServer) -> None:
    imds.instance.change({"do": "interrupt", "action": "hibernate"})
    (seen,) = look(imds)
    assert isinstance(seen, Announced)
    assert seen.announcements[0].deadline_utc is not None
    assert seen.announcements[0].deadline_utc <= datetime.now(UTC)


def test_a_rebalance_recommendation_is_heard_without_a_deadline(imds: ImdsServer) -> None:
    imds.instance.change({"do": "rebalance"})
    (seen,) = look(imds)
    assert isinstance(seen, Announced)
    assert (seen.announcements[0].kind, seen.announcements[0].deadline_utc) == (NoticeKind.REBALANCE, None)


def test_an_answer_of_500_is_unknown_and_never_no_notice(imds: ImdsServer) -> None:
    imds.instance.mode = Mode.ERROR
    (seen,) = look(imds)
    assert isinstance(seen, Unknown)
    assert "500" in seen.reason


def test_a_server_that_hangs_is_unknown_after_the_timeout(imds: ImdsServer) -> None:
    imds.instance.mode = Mode.HANG
    started = time.monotonic()
    (seen,) = look(imds, timeout_s=0.2)
    assert isinstance(seen, Unknown)
    assert "did not answer in 0.2 s" in seen.reason
    assert time.monotonic() - started < 5.0


def test_a_refused_token_is_dropped_and_the_same_observation_hears_with_another(imds: ImdsServer) -> None:
    async def run() -> list[Observation]:
        source = AwsImdsSource(imds.url, monotonic=time.monotonic, now=lambda: datetime.now(UTC))
        first = await source.observe()
        imds.instance.change({"do": "drop_tokens"})
        imds.instance.change({"do": "interrupt"})
        second = await source.observe()
        await source.close()
        return [first, second]

    first, second = asyncio.run(run())
    assert first == Nothing()
    assert isinstance(second, Announced) and second.announcements[0].kind is NoticeKind.INTERRUPTION


def answered(answer: Callable[[str], Reply], *, timeout_s: float = 2.0) -> tuple[Observation, Scripted]:
    async def run() -> tuple[Observation, Scripted]:
        async with scripted(answer) as server:
            source = AwsImdsSource(
                server.url, monotonic=time.monotonic, now=lambda: datetime.now(UTC), timeout_s=timeout_s
            )
            seen = await source.observe()
            await source.close()
            return seen, server

    return asyncio.run(run())


def test_a_token_that_is_refused_twice_is_unknown_with_the_reason() -> None:
    seen, server = answered(lambda asked: Reply(body="token") if asked.startswith("PUT") else Reply(401))
    assert isinstance(seen, Unknown) and not seen.announcements
    assert f"{TERMINATION_PATH} answered 401" in seen.reason
    assert server.asked.count(f"GET {ACTION_PATH}") == 2


def test_a_body_that_trickles_ends_at_the_limit_of_the_whole_read() -> None:
    started = time.monotonic()
    seen, _ = answered(lambda _: Reply(drips=True), timeout_s=0.3)
    assert isinstance(seen, Unknown) and "did not answer in 0.3 s" in seen.reason
    assert time.monotonic() - started < 5.0


def test_a_body_that_is_too_long_is_not_read() -> None:
    seen, server = answered(lambda asked: Reply(body="token") if "PUT" in asked else Reply(flood_bytes=200_000_000))
    assert isinstance(seen, Unknown) and f"more than {BODY_BYTES_MAX} bytes" in seen.reason
    assert server.sent_bytes < 100_000_000


@pytest.mark.parametrize("refusal", [Reply(403, "not here"), Reply(200, "")])
def test_without_a_token_no_key_is_asked_for(refusal: Reply) -> None:
    seen, server = answered(lambda asked: refusal if "PUT" in asked else Reply(404))
    assert seen == Unknown(f"PUT /latest/api/token answered {refusal.status}")
    assert {asked.split()[0] for asked in server.asked} == {"PUT"}


@pytest.mark.parametrize("body", ["none", "", "no time"])
def test_a_termination_time_that_is_no_time_announces_nothing(body: str) -> None:
    def answer(asked: str) -> Reply:
        if "PUT" in asked:
            return Reply(body="t")
        return Reply(body=body) if TERMINATION_PATH in asked else Reply(404)

    seen, _ = answered(answer)
    assert seen == Nothing()


@pytest.mark.parametrize("token", ["to\nken", "tok\u00e9n"])
def test_a_token_that_cannot_stand_in_a_header_is_unknown(token: str) -> None:
    seen, _ = answered(lambda _: Reply(body=token))
    assert isinstance(seen, Unknown) and "is no token" in seen.reason


ABSENT = Reply(404)


def keys(*, action: Reply = ABSENT, termination: Reply = ABSENT, rebalance: Reply = ABSENT) -> Observation:
    """What is seen where the three keys answer so."""
    replies = {TOKEN_PATH: Reply(body="t"), ACTION_PATH: action, TERMINATION_PATH: termination,
               REBALANCE_PATH: rebalance}  # fmt: skip
    seen, server = answered(lambda asked: replies.get(asked.split()[1], ABSENT))
    assert server.asked.count(f"PUT {TOKEN_PATH}") == 1, "one token serves all keys"
    return seen


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"action": "dance", "time": "2026-11-20T12:02:00Z"}',
         "action must be one of terminate, stop, hibernate, is 'dance'"),
        ('{"time": "2026-11-20T12:02:00Z"}', "action must be one of terminate, stop, hibernate, is None"),
        ('{"action": "stop", "time": 7}', "time must be RFC 3339, is 7"),
    ],
)  # fmt: skip
def test_an_action_that_is_none_of_ec2s_is_unknown_with_what_was_there(body: str, reason: str) -> None:
    assert keys(action=Reply(body=body)) == Unknown(f"{ACTION_PATH}: {reason}")


def test_an_action_that_is_no_object_is_unknown() -> None:
    assert keys(action=Reply(body="[1]")) == Unknown(f"{ACTION_PATH} is not a JSON object: '[1]'")


def test_the_reason_of_an_unreadable_action_is_kept_where_the_termination_time_is_no_time() -> None:
    assert keys(action=Reply(body="[1]"), termination=Reply(body="soon")) == Unknown(
        f"{ACTION_PATH} is not a JSON object: '[1]'"
    )


@pytest.mark.parametrize("body", ["{}", '{"noticeTime": 7}'])
def test_a_recommendation_without_its_time_is_unknown(body: str) -> None:
    assert keys(rebalance=Reply(body=body)) == Unknown(f"{REBALANCE_PATH}: noticeTime is missing in {body!r}")


def test_all_that_cannot_be_read_is_said_and_what_can_be_read_is_still_heard() -> None:
    assert keys(action=Reply(500), termination=Reply(500), rebalance=Reply(503)) == Unknown(
        f"{TERMINATION_PATH} answered 500; {REBALANCE_PATH} answered 503"
    )
    deadline = datetime(2026, 11, 20, 12, 2, tzinfo=UTC)
    heard = Announcement(NoticeKind.INTERRUPTION, deadline, f"{TERMINATION_PATH}: 2026-11-20T12:02:00Z ")
    assert keys(termination=Reply(body="2026-11-20T12:02:00Z "), rebalance=Reply(503)) == Unknown(
        f"{REBALANCE_PATH} answered 503", (heard,)
    )


def test_what_is_kept_of_a_long_answer_is_bounded() -> None:
    seen = keys(rebalance=Reply(body=f'{{"noticeTime": "{"x" * 3_000}"}}'))
    assert isinstance(seen, Announced) and len(seen.announcements[0].raw) == 1_000
    assert seen.announcements[0].raw.startswith(f'{REBALANCE_PATH}: {{"noticeTime": "xxx')


def test_a_hibernation_keeps_what_was_answered_and_is_due_now_in_utc() -> None:
    body = '{"action": "hibernate"}'
    seen = keys(action=Reply(body=body))
    assert isinstance(seen, Announced)
    (heard,) = seen.announcements
    assert heard.raw == f"{ACTION_PATH}: {body}" and heard.deadline_utc is not None
    assert heard.deadline_utc.tzinfo is UTC


@pytest.mark.parametrize("action", ["terminate", "stop"])
def test_the_time_of_the_action_is_the_deadline_where_no_termination_time_is_served(action: str) -> None:
    """EC2 serves the older key for instances that end, and not for those that stop."""
    body = f'{{"action": "{action}", "time": "2026-11-20T12:02:00Z"}}'
    seen, _ = answered(
        lambda asked: Reply(body=body) if ACTION_PATH in asked else Reply(404 if "GET" in asked else 200, "t")
    )
    deadline = datetime(2026, 11, 20, 12, 2, tzinfo=UTC)
    assert seen == Announced((Announcement(NoticeKind.INTERRUPTION, deadline, f"{ACTION_PATH}: {body}"),))


@pytest.mark.parametrize("time_of_action", ["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-01-01T00:00:00"])
def test_a_time_that_cannot_be_is_reported(time_of_action: str) -> None:
    body = f'{{"action": "stop", "time": "{time_of_action}"}}'
    seen, _ = answered(
        lambda asked: Reply(body=body) if ACTION_PATH in asked else Reply(404 if "GET" in asked else 200, "t")
    )
    assert isinstance(seen, Unknown) and "time must be RFC 3339" in seen.reason


@pytest.mark.parametrize(
    ("headers", "token_s"),
    [({}, 3_600), ({"X-aws-ec2-metadata-token-ttl-seconds": "60"}, 60),
     ({"X-aws-ec2-metadata-token-ttl-seconds": "an hour"}, 3_600)],
)  # fmt: skip
def test_a_token_with_less_than_15_seconds_left_is_renewed(headers: dict[str, str], token_s: int) -> None:
    """Its life is what the server says, and what was asked for where it says nothing."""
    clock = [1_000.0]

    async def run() -> list[int]:
        async with scripted(lambda asked: Reply(body="t", headers=headers) if "PUT" in asked else Reply(404)) as server:
            source = AwsImdsSource(f"{server.url}/", monotonic=lambda: clock[0], now=lambda: datetime.now(UTC))
            tokens = []
            for after_s in (0, token_s - 15, 1):
                clock[0] += after_s
                assert await source.observe() == Nothing()
                tokens.append(server.asked.count(f"PUT {TOKEN_PATH}"))
            await source.close()
            return tokens

    assert asyncio.run(run()) == [1, 1, 2]


def test_a_malformed_action_falls_back_to_the_termination_time(imds: ImdsServer) -> None:
    imds.instance.change({"do": "interrupt"})
    imds.instance.mode = Mode.MALFORMED
    (seen,) = look(imds)
    assert isinstance(seen, Announced)
    assert "termination-time" in seen.announcements[0].raw


def test_a_malformed_action_without_a_fallback_is_reported(imds: ImdsServer) -> None:
    imds.instance.change({"do": "interrupt", "action": "stop"})
    imds.instance.mode = Mode.MALFORMED
    (seen,) = look(imds)
    assert isinstance(seen, Unknown)
    assert "instance-action is not JSON" in seen.reason


def test_nobody_listening_is_unknown() -> None:
    server = ImdsServer().start()
    server.stop()
    (seen,) = look(server)
    assert isinstance(seen, Unknown)


def test_the_server_keeps_the_token_rules_of_ec2(imds: ImdsServer) -> None:
    token_url, key_url = f"{imds.url}/latest/api/token", f"{imds.url}/latest/meta-data/instance-id"
    assert httpx.put(token_url).status_code == 400
    assert httpx.put(token_url, headers={"X-aws-ec2-metadata-token-ttl-seconds": "21601"}).status_code == 400
    assert httpx.get(key_url).status_code == 401
    issued = httpx.put(token_url, headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    assert issued.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
    with_token = {"X-aws-ec2-metadata-token": issued.text}
    assert httpx.get(key_url, headers=with_token).text == "i-0a1"
    assert httpx.get(f"{imds.url}/latest/meta-data/spot/instance-action", headers=with_token).status_code == 404


def test_the_server_runs_as_a_program_and_says_its_address() -> None:
    command = [sys.executable, "-m", "deploy.local.metadata_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert httpx.get(f"{url}/latest/meta-data/instance-id").status_code == 401
        process.terminate()
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(
    ("date", "ahead_s"),
    [
        # Five seconds either way are none.
        ("Fri, 20 Nov 2026 11:59:55 GMT", 0),
        ("Fri, 20 Nov 2026 12:00:05 GMT", 0),
        ("Fri, 20 Nov 2026 11:59:54 GMT", 6),
        ("Fri, 20 Nov 2026 12:00:06 GMT", -6),
        ("Fri, 20 Nov 2026 11:00:00 GMT", 3_600),
        ("", 0),
        ("today", 0),
    ],
)
def test_a_clock_is_ahead_by_what_it_differs_from_the_date_of_the_answer(date: str, ahead_s: int) -> None:
    noon = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
    assert aws._ahead_of(date, noon) == timedelta(seconds=ahead_s)
