"""How ranks wait for what others leave in the store; and what their errors say of what failed first."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from liver_core.handoff.messages import FailedPart, FailureCause, PreparePhase
from liver_core.rank.prepare.preparation import PrepareFailed
from liver_core.rank.store_exchange import Cancelled, Exchange, ExchangeTimeout, StoreLost, cause_of
from liver_core.transport.protocol import Call, TransportTimeout
from liver_core.worlds.groups import NoStore


class _DeadStore:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def set(self, *_: object) -> None:
        raise self._error


def _error_of_exchange(error: Exception) -> Exception:
    exchange = Exchange(lambda *_: _DeadStore(error), "h")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ExchangeTimeout) as raised:
        exchange.post("name", 1)
    return raised.value


def _behind(error: Exception) -> Exception:
    """As a preparation wraps it: with the text of the first error in its own."""
    try:
        raise PrepareFailed(PreparePhase.CONNECT, f"{type(error).__name__}: {error}") from error
    except PrepareFailed as failed:
        return failed


@pytest.mark.parametrize(
    "error",
    [
        # The connection to the store is one to a peer as well, by its words.
        _error_of_exchange(dist.DistNetworkError("Connection closed by peer")),
        _error_of_exchange(RuntimeError("Broken pipe")),
        NoStore("the store at a:1 does not answer"),
    ],
)
def test_an_error_of_the_store_names_the_store_also_behind_another_one(error: Exception):
    assert cause_of(error) == cause_of(_behind(error)) == FailureCause(FailedPart.STORE)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4001"),
        RuntimeError("[/pytorch/gloo/buffer.cc:72] Timed out waiting 20000ms for recv operation to complete"),
        ExchangeTimeout("certificate/state was not posted in time"),
        TimeoutError("the handoff's deadline has passed"),
    ],
)
def test_an_error_at_which_a_rank_misses_another_names_no_rank(error: Exception):
    assert cause_of(error) == cause_of(_behind(error)) == FailureCause(FailedPart.PEER)


def test_an_error_of_reading_one_peer_names_its_rank():
    error = TransportTimeout(Call.CONNECT, "did not answer a read", peer=5)
    assert cause_of(error) == cause_of(_behind(error)) == FailureCause(FailedPart.PEER, peer=5)


def test_any_other_error_is_the_rank_s_own():
    for error in (ValueError("no item 7"), RuntimeError("CUDA out of memory"), _behind(RuntimeError("planted")), None):
        assert cause_of(error) is None


class _Counted:
    """A client of a real store. `asked`: how many requests were made through it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self._store, name)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def clients(store: dist.TCPStore) -> list[_Counted]:
    return []


@pytest.fixture
def exchange(store: dist.TCPStore, clients: list[_Counted]) -> Exchange:
    def connect(*_: float) -> Any:
        clients.append(_Counted(dist.TCPStore("127.0.0.1", store.port, is_master=False)))
        return clients[-1]

    return Exchange(connect, "h")


@pytest.fixture
def others(store: dist.TCPStore) -> Exchange:
    return Exchange(lambda *_: store, "h")


WAITS = {
    "in the pause": lambda exchange, until: exchange.wait_in_store("norm", until, unless="lost")[1],
    "for the boundary": lambda exchange, until: exchange.wait_in_store_beside("norm", until),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_what_is_waited_for_in_the_store_is_asked_for_once_however_long_it_takes(
    exchange: Exchange, others: Exchange, clients: list[_Counted], wait: Callable[[Exchange, float], Any]
):
    """Thousands of ranks wait so for one store."""
    later = threading.Timer(0.3, lambda: others.post("norm", 1.5))
    later.start()
    assert wait(exchange, time.monotonic() + 60) == 1.5
    later.join()
    assert clients[0].asked <= 4, "it waits, and reads the value; where the machine is slow, it asks once again"


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_what_does_not_come_in_time_is_named_and_the_client_is_of_use_after_that(
    exchange: Exchange, clients: list[_Counted], wait: Callable[[Exchange, float], Any]
):
    with pytest.raises(ExchangeTimeout, match="norm was not posted in time") as raised:
        wait(exchange, time.monotonic() + 0.2)
    assert not isinstance(raised.value, StoreLost)
    exchange.post("mine", 1)
    assert exchange.peek("mine") == 1 and len(clients) == 1


def test_in_the_pause_the_loss_of_a_source_ends_the_wait_for_what_it_would_have_said(
    exchange: Exchange, others: Exchange
):
    others.post("lost", "rank 3")
    assert exchange.wait_in_store("norm", time.monotonic() + 60, unless="lost") == ("lost", "rank 3")


def test_a_wait_for_the_boundary_is_cancelled_at_once_and_the_rank_can_still_tell_the_others(
    exchange: Exchange, others: Exchange, clients: list[_Counted]
):
    began = time.monotonic()
    exchange.cancelled = lambda: time.monotonic() > began + 0.2
    with pytest.raises(Cancelled):
        exchange.wait_in_store_beside("boundary", began + 60)
    exchange.post("overtaken", True)
    assert time.monotonic() - began < 30
    assert others.peek("overtaken") is True and len(clients) == 2


JOINT_WAITS = {
    "of survivors": lambda exchange, until: exchange.all_hold("held", 2, until, holds=True),
    "of targets that are brought up": lambda exchange, until: exchange.gather("bring_up", 2, until),
}


@pytest.mark.parametrize("wait", JOINT_WAITS.values(), ids=JOINT_WAITS)
def test_the_last_of_several_ranks_is_waited_for_in_the_store_which_is_asked_few_times(
    exchange: Exchange, others: Exchange, clients: list[_Counted], wait: Callable[[Exchange, float], Any]
):
    until = time.monotonic() + 60
    later = threading.Timer(0.3, lambda: wait(others, until))
    later.start()
    assert wait(exchange, until) is not False
    later.join()
    assert clients[0].asked <= 5, "it counts itself in, waits and reads; where the machine is slow, it asks once again"


def test_a_survivor_that_has_not_its_share_ends_the_wait_of_the_others_at_once(exchange: Exchange, others: Exchange):
    later = threading.Timer(0.1, lambda: others.all_hold("held", 2, time.monotonic() + 60, holds=False))
    later.start()
    began = time.monotonic()
    assert exchange.all_hold("held", 2, began + 60, holds=True) is False
    later.join()
    assert time.monotonic() - began < 30


def test_ranks_of_which_not_all_come_in_time_say_how_many_did(exchange: Exchange):
    with pytest.raises(ExchangeTimeout, match="bring_up: only 1 of 2 ranks came in time"):
        exchange.gather("bring_up", 2, time.monotonic() + 0.2)


def test_a_rank_that_is_cancelled_before_the_last_has_come_leaves_and_the_last_does_not_go_on(
    exchange: Exchange, others: Exchange
):
    began = time.monotonic()
    exchange.cancelled = lambda: time.monotonic() > began + 0.1
    with pytest.raises(Cancelled):
        exchange.gather("bring_up", 2, began + 60)
    others.cancelled = lambda: time.monotonic() > began + 0.5
    with pytest.raises(Cancelled):
        others.gather("bring_up", 2, began + 60)


def test_a_rank_that_is_cancelled_after_the_last_has_come_goes_on_with_the_others(exchange: Exchange, others: Exchange):
    others.settle("bring_up/outcome", "complete")
    exchange.cancelled = lambda: True
    exchange.gather("bring_up", 2, time.monotonic() + 60)
