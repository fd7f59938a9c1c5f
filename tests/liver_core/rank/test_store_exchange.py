"""What the errors of a rank say of what failed first."""

import pytest
import torch.distributed as dist

from liver_core.handoff.messages import FailedPart, FailureCause, PreparePhase
from liver_core.rank.prepare.preparation import PrepareFailed
from liver_core.rank.store_exchange import Exchange, ExchangeTimeout, cause_of
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


def test_any_other_error_is_the_rank_s_own():
    for error in (ValueError("no item 7"), RuntimeError("CUDA out of memory"), _behind(RuntimeError("planted")), None):
        assert cause_of(error) is None
