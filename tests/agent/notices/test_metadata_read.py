"""One read of a metadata service: its limits, and what is said of what cannot be read."""

import asyncio

import httpx
import pytest

from agent.notices.metadata_read import BODY_BYTES_MAX, Answer, Unreadable, read
from agent.notices.source import parse_utc
from tests.agent.notices.scripted_server import Reply, scripted


def answer_of(reply: Reply) -> Answer:
    async def run() -> Answer:
        async with scripted(lambda _: reply) as server, httpx.AsyncClient(trust_env=False) as client:
            return await read(client, "GET", f"{server.url}/key", limit_s=5, headers={}, params={"a": "b"})

    return asyncio.run(run())


def test_an_answer_is_read_whole_whatever_its_status_and_its_bytes() -> None:
    answer = answer_of(Reply(418, "no", {"X-Key": "value"}))
    assert (answer.status, answer.text, answer.headers["x-key"]) == (418, "no", "value")


def test_a_body_may_have_as_many_bytes_as_the_limit_and_not_one_more() -> None:
    assert len(answer_of(Reply(body="x" * BODY_BYTES_MAX)).text) == BODY_BYTES_MAX
    with pytest.raises(Unreadable, match=f"^GET /key answered more than {BODY_BYTES_MAX} bytes$"):
        answer_of(Reply(body="x" * (BODY_BYTES_MAX + 1)))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/key", "no-such-scheme://host/key"])
def test_what_cannot_be_sent_is_unreadable_with_the_kind_of_error(url: str) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            await read(client, "PUT", url, limit_s=5, headers={})

    with pytest.raises(Unreadable, match=r"^PUT /key failed: (ConnectError|UnsupportedProtocol): "):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-11-20T12:02:00Z", "2026-11-20T12:02:00+00:00"),
        (" 2026-11-20T14:02:00+02:00\n", "2026-11-20T14:02:00+02:00"),
        ("2000-01-01T00:00:01Z", "2000-01-01T00:00:01+00:00"), ("1999-12-31T23:59:59Z", None),
        ("2099-12-31T23:59:59Z", "2099-12-31T23:59:59+00:00"), ("2100-01-01T00:00:00Z", None),
        ("2026-11-20T12:02:00", None), ("soon", None),
    ],
)  # fmt: skip
def test_a_time_has_a_zone_and_lies_in_this_age(text: str, time: str | None) -> None:
    moment = parse_utc(text)
    assert (moment and moment.isoformat()) == time
