"""The peer endpoint over real HTTP: who may speak, and what a bad request gets."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import httpx
import pytest

from agent.peer.peer_client import PeerClient, PeerClock, PeerUnreachable
from agent.peer.peer_server import PeerRefused, PeerServer, bind, peer_app
from agent.peer.signing import (
    NONCE_HEADER,
    ReplayWindow,
    Request,
    SignatureRefused,
    SignatureStale,
    sign,
    tell_time,
    told_time,
)
from agent.protocol.peer import ENVELOPE_BYTES_MAX, PEER_PATH, Envelope, NoticeBody
from agent.protocol.sync import NoticeFact, NoticeKind
from tests.agent.waiting import eventually

KEY = "k" * 43


def notice(number: int) -> NoticeFact:
    first_seen_utc = datetime(2026, 1, 1, tzinfo=UTC)
    return NoticeFact(
        node_id=f"n{number}",
        kind=NoticeKind.INTERRUPTION,
        source="test",
        deadline_utc=None,
        first_seen_utc=first_seen_utc,
    )


def envelope(receiver: str = "b", job_id: str = "job", number: int = 0) -> Envelope:
    return Envelope(
        sender="a",
        receiver=receiver,
        agent_incarnation=uuid4(),
        job_id=job_id,
        issued_utc=datetime.now(UTC),
        body=NoticeBody(notice=notice(number)),
    )


@asynccontextmanager
async def endpoint(
    taken: list[Envelope],
    take: Callable[[Envelope], Awaitable[None]] | None = None,
    ahead_s: float = 0.0,
    keys: Sequence[str] = (KEY,),
) -> AsyncIterator[str]:
    """`ahead_s`: so much its clock is ahead. `keys`: those of the job that it has."""

    async def keep(message: Envelope) -> None:
        taken.append(message)

    def status(job_id: str) -> dict[str, Any]:
        return {"job_id": job_id}

    app = peer_app(
        node_id="b",
        keys_of=lambda job_id: keys if job_id == "job" else (),
        take=take or keep,
        status=status,
        now=lambda: time.time() + ahead_s,
    )
    server, listener = PeerServer(app), bind("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


def client_for(url: str, *keys: str) -> PeerClient:
    return PeerClient(lambda job_id, node_id: url, lambda job_id: keys or (KEY,))


def test_a_signed_envelope_is_taken_and_status_is_told() -> None:
    async def scenario() -> None:
        taken: list[Envelope] = []
        async with endpoint(taken) as url:
            client = client_for(url)
            await client.send(envelope(number=7))
            assert [message.body for message in taken] == [NoticeBody(notice=notice(7))]
            assert await client.status("job", "b") == {"job_id": "job"}
            await client.close()

    asyncio.run(scenario())


def test_only_the_newest_of_what_could_not_be_sent_yet_is_sent() -> None:
    async def scenario() -> None:
        taken: list[Envelope] = []
        gate = asyncio.Event()

        async def slow(message: Envelope) -> None:
            await gate.wait()
            taken.append(message)

        async with endpoint(taken, slow) as url:
            client = client_for(url)
            for number in range(50):
                client.send_newest(envelope(number=number), "order")
            gate.set()
            await eventually(lambda: taken and taken[-1].body == NoticeBody(notice=notice(49)), "the newest")
            assert len(taken) <= 2
            await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("key", "job_id", "receiver", "what"),
    [
        ("w" * 43, "job", "b", "401.*signature does not match"),
        (KEY, "other", "b", "401.*signature does not match"),
        (KEY, "job", "c", "403.*receiver must be b"),
    ],
)
def test_a_wrong_key_a_foreign_job_and_a_wrong_receiver_are_refused(
    key: str, job_id: str, receiver: str, what: str
) -> None:
    async def scenario() -> None:
        taken: list[Envelope] = []
        async with endpoint(taken) as url:
            client = client_for(url, key)
            with pytest.raises(PeerUnreachable, match=what):
                await client.send(envelope(receiver, job_id))
            await client.close()
            assert taken == []

    asyncio.run(scenario())


def test_a_replayed_request_is_refused() -> None:
    async def scenario() -> None:
        taken: list[Envelope] = []
        async with endpoint(taken) as url, httpx.AsyncClient() as client:
            body = envelope().model_dump_json().encode()
            headers = sign(
                Request("POST", PEER_PATH, "job", body), KEY, now=datetime.now(UTC).timestamp(), nonce="n" * 32
            )
            first = await client.post(url + PEER_PATH, content=body, headers=headers)
            second = await client.post(url + PEER_PATH, content=body, headers=headers)
            assert (first.status_code, second.status_code) == (202, 401)
            assert "accepted before" in second.json()["detail"]
            assert len(taken) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("offset_s", [-6.0, 6.0])
def test_a_stale_request_is_refused(offset_s: float) -> None:
    request = Request("POST", PEER_PATH, "job", b"{}")
    headers = sign(request, KEY, now=1_000_000.0 + offset_s, nonce="n" * 32)
    with pytest.raises(SignatureStale, match=r"signed -?6\.0 s ago"):
        ReplayWindow().verify(request, headers, (KEY,), 1_000_000.0)


def test_a_nonce_is_remembered_as_long_as_its_request_could_be_fresh() -> None:
    window = ReplayWindow()
    request = Request("POST", PEER_PATH, "job", b"{}")
    headers = sign(request, KEY, now=1_000_004.0, nonce="n" * 32)
    window.verify(request, headers, (KEY,), 1_000_000.0)
    with pytest.raises(SignatureRefused, match="accepted before"):
        window.verify(request, headers, (KEY,), 1_000_008.5)


@pytest.mark.parametrize("ahead_s", [-300.0, -7.0, -2.0, 2.0, 7.0, 300.0])
def test_peers_bear_clocks_that_differ_and_name_times_by_the_clock_of_the_one_they_tell(ahead_s: float) -> None:
    """A clock that is off by some minutes made its node deaf and dumb: every message was refused."""

    async def scenario() -> None:
        taken: list[Envelope] = []
        async with endpoint(taken, ahead_s=ahead_s) as url:
            client, sent = client_for(url), envelope(number=7)
            for _ in range(2):
                await client.send(sent)
            assert (await client.status("job", "b"))["job_id"] == "job"
            await client.close()
        assert len(taken) == 2
        body = sent.body
        assert isinstance(body, NoticeBody)
        for message in taken:
            assert isinstance(message.body, NoticeBody)
            moved_s = (message.body.notice.first_seen_utc - body.notice.first_seen_utc).total_seconds()
            assert moved_s == pytest.approx(0.0 if abs(ahead_s) < 5 else ahead_s, abs=0.6)
        assert taken[0] == taken[1], "what is repeated stays the same"

    asyncio.run(scenario())


def test_only_who_has_the_key_is_told_or_can_tell_what_time_it_is() -> None:
    request = Request("POST", PEER_PATH, "job", b"{}")
    nonce, others = "n" * 32, "o" * 32
    told = tell_time(request, nonce, KEY, now=1_000_000.5)
    assert told_time(request, nonce, KEY, told) == 1_000_000.5
    assert told_time(request, others, KEY, told) is None, "the answer to another request"
    assert told_time(request, nonce, "w" * 43, told) is None
    assert told_time(request, nonce, KEY, {}) is None
    with pytest.raises(SignatureRefused, match="does not match"):
        ReplayWindow().verify(request, told | {NONCE_HEADER: nonce}, (KEY,), 1_000_000.5)

    async def scenario() -> None:
        async with endpoint([]) as url, httpx.AsyncClient() as client:
            headers = sign(request, "w" * 43, now=0.0, nonce=nonce)
            refused = await client.post(url + PEER_PATH, content=b"{}", headers=headers)
            assert refused.status_code == 401 and "x-liver-time-ms" not in refused.headers

    asyncio.run(scenario())


def test_times_are_moved_by_one_value_until_a_clock_has_clearly_changed() -> None:
    clock = PeerClock()
    assert not clock.take(1_004.0, 1_000.0, 1_000.2) and clock.ahead_s == 0.0
    assert not clock.take(1_300.0, 1_000.0, 1_001.5) and clock.ahead_s == 0.0, "an answer that took long tells little"
    assert clock.take(1_300.1, 1_000.0, 1_000.2) and clock.ahead_s == pytest.approx(300.0)
    assert not clock.take(1_304.0, 1_000.0, 1_000.2) and clock.ahead_s == pytest.approx(300.0)
    assert clock.take(1_001.0, 1_000.0, 1_000.2) and clock.ahead_s == 0.0


def test_a_changed_body_does_not_match_its_signature() -> None:
    headers = sign(Request("POST", PEER_PATH, "job", b"{}"), KEY, now=1_000.0, nonce="n" * 32)
    with pytest.raises(SignatureRefused, match="does not match"):
        ReplayWindow().verify(Request("POST", PEER_PATH, "job", b"[]"), headers, (KEY,), 1_000.0)


def test_unreadable_and_oversized_messages_and_refusals_name_the_rule() -> None:
    async def refuse(message: Envelope) -> None:
        raise PeerRefused("generation: 3 is used up")

    async def scenario() -> None:
        async with endpoint([], refuse) as url, httpx.AsyncClient() as client:

            async def post(body: bytes) -> httpx.Response:
                now = datetime.now(UTC).timestamp()
                headers = sign(Request("POST", PEER_PATH, "job", body), KEY, now=now, nonce=uuid4().hex)
                return await client.post(url + PEER_PATH, content=body, headers=headers)

            malformed = await post(b'{"sender": 1}')
            assert (malformed.status_code, malformed.json()["errors"][0]["field"]) == (422, "sender")
            assert (await post(b"x" * (ENVELOPE_BYTES_MAX + 1))).status_code == 413
            refused = await post(envelope().model_dump_json().encode())
            assert (refused.status_code, refused.json()["detail"]) == (422, "generation: 3 is used up")
            assert (await client.get(url + "/elsewhere")).status_code == 404

    asyncio.run(scenario())


def test_a_peer_that_is_not_there_is_unreachable() -> None:
    async def scenario() -> None:
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        client = client_for(url)
        with pytest.raises(PeerUnreachable, match="ConnectError"):
            await client.send(envelope())
        await client.close()

    asyncio.run(scenario())


def test_an_agent_is_silent_only_after_several_tries_and_until_it_speaks() -> None:
    async def scenario() -> None:
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        client = client_for(url)
        for tries in range(1, 4):
            with pytest.raises(PeerUnreachable):
                await client.send(envelope())
            assert ("b" in client.unreachable_since("job")) == (tries >= 3)
        client.mark_reachable("job", "b")
        assert client.unreachable_since("job") == {}
        await client.close()

    asyncio.run(scenario())


def test_an_agent_that_is_gone_does_not_fill_the_log_of_those_that_go_on_telling_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At first each time, then ever more rarely, and at once again for another reason or after it was heard."""
    client = PeerClient(lambda job_id, node_id: None, lambda job_id: (KEY,))
    caplog.set_level(logging.INFO, "agent.peer.peer_client")

    async def fails(times: int) -> list[str]:
        caplog.clear()
        for _ in range(times):
            client.send_newest(envelope(), "order/0")
            await asyncio.gather(*client._tasks.values())
        return [record.getMessage() for record in caplog.records]

    async def scenario() -> None:
        lines = await fails(20)
        assert lines[0] == "job job: notice to node b was not delivered: the address of b is not known"
        assert [line.partition(" (")[2][:8] for line in lines[1:]] == ["2 times ", "4 times ", "8 times ", "16 times"]
        client._undelivered.clear()
        assert len(await fails(1)) == 1
        client._address_of = lambda job_id, node_id: "http://127.0.0.1:9"
        assert len(await fails(1)) == 1, "another reason"
        await client.close()

    asyncio.run(scenario())


def test_an_agent_whose_address_nobody_knows_any_more_is_silent_too() -> None:
    """It has left the job. Who leads a handoff with it would wait for it for ever, and keep stores and ranks."""

    async def scenario() -> None:
        client = PeerClient(lambda job_id, node_id: None, lambda job_id: (KEY,))
        for tries in range(1, 4):
            with pytest.raises(PeerUnreachable, match="the address of b is not known"):
                await client.send(envelope())
            assert ("b" in client.unreachable_since("job")) == (tries >= 3)
        await client.close()

    asyncio.run(scenario())


def test_a_call_for_which_this_agent_has_no_connection_left_is_no_silence_of_the_other_one() -> None:
    async def scenario() -> None:
        taken: list[Envelope] = []
        gate = asyncio.Event()

        async def slow(message: Envelope) -> None:
            taken.append(message)
            await gate.wait()

        async with endpoint([], slow) as url:
            client = PeerClient(lambda job_id, node_id: url, lambda job_id: (KEY,), connections_max=1)
            client._client.timeout = httpx.Timeout(60.0, pool=0.02)
            first = asyncio.create_task(client.send(envelope()))
            await eventually(lambda: taken, "the only connection is in use")
            for _ in range(4):
                with pytest.raises(PeerUnreachable, match=r"b at .* was not called: all connections of this agent"):
                    await client.send(envelope())
            assert client.unreachable_since("job") == {}
            gate.set()
            await first
            await client.send(envelope())
            await client.close()
        assert len(taken) == 2

    asyncio.run(scenario())


NEW, OLD, OLDER = "n" * 43, "o" * 43, "p" * 43


@pytest.mark.parametrize("ahead_s", [0.0, 300.0])
@pytest.mark.parametrize(
    ("own", "theirs"),
    [((NEW, OLD), (OLD,)), ((OLD,), (NEW, OLD)), ((NEW, OLD), (NEW,)), ((NEW,), (NEW, OLD)), ((NEW, OLD), (NEW, OLD))],
)
def test_agents_with_one_key_in_common_hear_each_other_and_tell_the_time(
    own: tuple[str, ...], theirs: tuple[str, ...], ahead_s: float
) -> None:
    async def scenario() -> None:
        taken: list[Envelope] = []
        async with endpoint(taken, ahead_s=ahead_s, keys=theirs) as url:
            client = client_for(url, *own)
            for _ in range(2):
                await client.send(envelope(number=7))
            assert (await client.status("job", "b"))["job_id"] == "job"
            await client.close()
        assert len(taken) == 2, "each message is taken once"
        body = taken[0].body
        assert isinstance(body, NoticeBody)
        moved_s = (body.notice.first_seen_utc - notice(7).first_seen_utc).total_seconds()
        assert moved_s == pytest.approx(ahead_s, abs=0.6)

    asyncio.run(scenario())


@pytest.mark.parametrize("own", [(OLD,), (OLD, OLDER)])
@pytest.mark.parametrize("ahead_s", [0.0, 300.0])
def test_a_key_that_has_been_dropped_opens_nothing(own: tuple[str, ...], ahead_s: float) -> None:
    async def scenario() -> None:
        taken: list[Envelope] = []
        async with endpoint(taken, keys=(NEW,), ahead_s=ahead_s) as url:
            client = client_for(url, *own)
            for ask in (lambda: client.send(envelope()), lambda: client.status("job", "b")):
                with pytest.raises(PeerUnreachable, match=r"401.*signature does not match"):
                    await ask()
            assert client.unreachable_since("job") == {}, "it refuses, and so it is there"
            await client.close()
        assert taken == []

    asyncio.run(scenario())


def test_what_is_refused_for_another_reason_than_the_key_is_not_sent_again_with_another_one() -> None:
    taken: list[Envelope] = []

    async def refuse(message: Envelope) -> None:
        taken.append(message)
        raise PeerRefused("generation: 3 is used up")

    async def scenario() -> None:
        async with endpoint(taken, refuse, keys=(NEW, OLD)) as url:
            client = client_for(url, NEW, OLD)
            with pytest.raises(PeerUnreachable, match="422"):
                await client.send(envelope())
            await client.close()

    asyncio.run(scenario())
    assert len(taken) == 1


def test_an_answer_counts_only_if_it_is_signed_with_the_key_of_its_request() -> None:
    """Who has only the key before cannot tell what time it is to one that asked with the current one."""
    request = Request("POST", PEER_PATH, "job", b"{}")
    headers = sign(request, NEW, now=1_000.0, nonce="n" * 32)
    assert ReplayWindow().verify(request, headers, (NEW, OLD), 1_000.0) == NEW
    with pytest.raises(SignatureStale) as stale:
        ReplayWindow().verify(request, sign(request, OLD, now=1.0, nonce="n" * 32), (NEW, OLD), 1_000.0)
    assert stale.value.key == OLD and OLD not in str(stale.value)
    told = tell_time(request, "n" * 32, OLD, now=1_000.0)
    assert told_time(request, "n" * 32, NEW, told) is None


def test_a_replayed_request_is_refused_whichever_key_signed_it() -> None:
    window, request = ReplayWindow(), Request("POST", PEER_PATH, "job", b"{}")
    headers = sign(request, OLD, now=1_000.0, nonce="n" * 32)
    assert window.verify(request, headers, (NEW, OLD), 1_000.0) == OLD
    with pytest.raises(SignatureRefused, match="accepted before"):
        window.verify(request, headers, (NEW, OLD), 1_000.0)
