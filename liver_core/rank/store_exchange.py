"""Small JSON values that the ranks of one target of a handoff leave for each other in the target generation's store.

Only bring-up and the decision go through the store; no step ever reads it. Every wait has a deadline and names the key.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from liver_core.handoff.messages import Decision, FailedPart, FailureCause
from liver_core.state.checkpoint_files import DamagedCheckpoint, NewerStart
from liver_core.transport.protocol import TransportError, TransportTimeout
from liver_core.worlds.groups import STORE_ANSWER_S, STORE_PATIENCE_S, NoStore, misses_a_peer

_POLL_LEAST_S, _POLL_MOST_S = 0.001, 0.02
_ASK_AGAIN_S = 0.5
"""In the pause: what is waited for in the store mostly comes sooner, and c10d logs each wait that ends without it."""


class ExchangeTimeout(TimeoutError):
    """A value was not there in time, or the store is gone; the text names the key."""


class StoreLost(ExchangeTimeout):
    """The store does not answer."""


class StoreGone(StoreLost):
    """The process of the store has ended. What it held cannot be read or decided any more."""


class Cancelled(RuntimeError):
    """The handoff was aborted while this rank waited."""


class Exchange:
    """Values of one handoff in one store, as of the plan revision `target_revision` on: ranks that build for different
    targets never meet. Not thread-safe: a TCPStore client is a mutex, each thread makes its own.

    `connect` opens, within so many seconds, a client that gives up an answer after so many. One that gave up is not
    asked again, since its answer may still be on the way; for the decision, which must be learned, another is opened.
    `refused`: whether the store's machine answers that nothing listens at its address.
    """

    def __init__(
        self,
        connect: Callable[[float, float], dist.Store],
        handoff_id: str,
        target_revision: int = 1,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        connect_s: float = STORE_PATIENCE_S,
        refused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connect = connect
        self._refused = refused
        self._store = connect(connect_s, STORE_PATIENCE_S)
        self._lost = ""
        self._is_left_waiting = False
        self._prefix = f"handoff/{handoff_id}/{target_revision}"
        self.cancelled = cancelled

    def post(self, name: str, value: Any) -> None:
        """Set `name`; values are JSON, at most 64 MiB."""
        self._guard(name, lambda: self._store.set(self._key(name), json.dumps(value, separators=(",", ":"))))

    def peek(self, name: str) -> Any | None:
        """The value of `name`, or None where it is not there yet."""
        key = self._key(name)
        if not self._guard(name, lambda: self._store.check([key])):
            return None
        return json.loads(self._guard(name, lambda: self._store.get(key)))

    def there(self, names: Sequence[str]) -> bool:
        """Whether all of `names` are there."""
        keys = [self._key(name) for name in names]
        return self._guard(names[0], lambda: self._store.check(keys))

    def count(self, name: str, more: int) -> int:
        """Add `more` to a counter that starts at 0; its new value."""
        return self._guard(name, lambda: self._store.add(self._key(name), more))

    def settle(self, name: str, value: Any) -> Any:
        """Set `name` unless it is set; what it holds now. Values are JSON."""
        text = json.dumps(value, separators=(",", ":"))
        return json.loads(self._guard(name, lambda: self._store.compare_set(self._key(name), "", text)))

    def wait(self, name: str, deadline: float) -> Any:
        """The value of `name`, waited for until `deadline` (time.monotonic seconds). Asks the store again and again;
        `wait_in_store` is for what must be seen at once."""
        pause_s = _POLL_LEAST_S
        while True:
            if self.cancelled():
                raise Cancelled(f"aborted while waiting for {name}")
            found = self.peek(name)
            if found is not None:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise ExchangeTimeout(f"{name} was not posted in time")
            time.sleep(min(left, pause_s))
            pause_s = min(2 * pause_s, _POLL_MOST_S)

    def wait_in_store(self, name: str, deadline: float, *, unless: str = "") -> tuple[str, Any]:
        """The same, waited for in the store, which answers when the value is there: one request, however long it takes.
        Or `unless` and its value, looked for now and then. For the pause: it is not cancelled."""
        key = self._key(name)
        while True:
            until = min(deadline, time.monotonic() + _ASK_AGAIN_S)
            if self._guard(name, lambda until=until: _comes(self._store, key, until, ask_s=_ASK_AGAIN_S)):
                return name, json.loads(self._guard(name, lambda: self._store.get(key)))
            other = self.peek(unless) if unless else None
            if other is not None:
                return unless, other
            if until >= deadline:
                raise ExchangeTimeout(f"{name} was not posted in time")

    def wait_in_store_beside(self, name: str, deadline: float) -> Any:
        """The same beside training, cancelled as the other waits are. Then the client is left to its wait, and another
        one is opened for whatever else is asked."""
        store, key = self._store, self._key(name)
        ends: queue.Queue[bytes | Exception | None] = queue.Queue(1)

        def work() -> None:
            try:
                # A client whose process will soon pause waits so long for an answer, and no longer than others in all.
                came = _comes(store, key, deadline, ask_s=STORE_PATIENCE_S - STORE_ANSWER_S)
                ends.put(store.get(key) if came else None)
            except Exception as error:
                ends.put(error)

        threading.Thread(target=work, name="wait-in-store", daemon=True).start()
        while True:
            try:
                found = ends.get(timeout=_POLL_MOST_S)
                break
            except queue.Empty:
                if self.cancelled():
                    self._is_left_waiting = True
                    raise Cancelled(f"aborted while waiting for {name}") from None
        value = self._guard(name, lambda: _unless_raised(found))
        if value is None:
            raise ExchangeTimeout(f"{name} was not posted in time")
        return json.loads(value)

    def gather(self, name: str, size: int, deadline: float) -> None:
        """Count this rank in and wait for all `size` ranks. Unlike a group's own bring-up it can be cancelled.

        All go on or nobody does: whoever sees the last one come and whoever is cancelled settle it between them. After
        somebody has left, the others wait to be cancelled too.
        """
        outcome = f"{name}/outcome"
        try:
            is_last = self.count(name, 1) >= size
            settled = self.settle(outcome, "complete") if is_last else self.wait_in_store_beside(outcome, deadline)
            while settled != "complete":
                if self.cancelled():
                    raise Cancelled
                if time.monotonic() >= deadline:
                    raise ExchangeTimeout(f"{name}: a rank has left")
                time.sleep(_POLL_MOST_S)
        except Cancelled:
            if self.settle(outcome, "left") != "complete":
                raise Cancelled(f"aborted while waiting for {name}") from None
        except StoreLost:
            raise
        except ExchangeTimeout:
            there = self.count(name, 0)
            raise ExchangeTimeout(f"{name}: only {there} of {size} ranks came in time") from None

    def all_hold(self, name: str, size: int, deadline: float, *, holds: bool) -> bool:
        """Whether all `size` ranks hold what is asked for: one answer for all, as soon as the last says so or one
        does not. For the pause: it is not cancelled."""
        outcome = f"{name}/outcome"
        if not holds:
            return self.settle(outcome, False)
        if self.count(name, 1) >= size:
            return self.settle(outcome, True)
        return self.wait_in_store(outcome, deadline)[1]

    def decide(self, wish: Decision) -> Decision:
        """One compare-and-set on the decision record, from nothing to `wish`; the answer is what it holds now."""
        self._renew("decision")
        held = self._guard("decision", lambda: self._store.compare_set(self._key("decision"), "", str(wish)))
        return Decision(held.decode())

    def decision(self) -> Decision:
        """What the decision record holds; UNDECIDED when nobody has decided."""
        self._renew("decision")
        key = self._key("decision")
        if not self._guard("decision", lambda: self._store.check([key])):
            return Decision.UNDECIDED
        return Decision(self._guard("decision", lambda: self._store.get(key)).decode())

    def _renew(self, name: str) -> None:
        if not self._lost:
            return
        if self._refused():
            raise StoreGone(f"the store is gone at {name}: its process has ended")
        try:
            self._store = self._connect(STORE_ANSWER_S, STORE_ANSWER_S)
        except ConnectionError as error:
            raise StoreLost(f"the store is gone at {name}: {error}") from error
        self._lost = ""

    def _guard(self, name: str, action: Callable[[], Any]) -> Any:
        if self._lost:
            raise StoreLost(f"the store is gone at {name}: {self._lost}")
        try:
            if self._is_left_waiting:
                self._store, self._is_left_waiting = self._connect(STORE_ANSWER_S, STORE_ANSWER_S), False
            return action()
        except (ConnectionError, dist.DistError, RuntimeError) as error:
            self._lost = str(error)
            raise StoreLost(f"the store is gone at {name}: {error}") from error

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _comes(store: dist.Store, key: str, until: float, *, ask_s: float) -> bool:
    """Whether the key is there by `until`. Every `ask_s` seconds the store has to show that it still lives."""
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(dist.DistStoreError):  # The store has answered that it has not come.
            store.wait([key], timedelta(seconds=min(ask_s, left)))
            return True
    return store.check([key])


def _unless_raised(found: bytes | Exception | None) -> bytes | None:
    if isinstance(found, Exception):
        raise found
    return found


def cause_of(error: BaseException | None) -> FailureCause | None:
    """What an error of a rank, or one behind it, says of what failed first: the store, or another rank, which this one
    only misses; or that this start is not the newest, or its checkpoint damaged. None where none tells: then it is this
    rank itself."""
    chain = list(_with_causes(error))
    if any(isinstance(each, StoreLost | NoStore) for each in chain):
        return FailureCause(FailedPart.STORE)
    if newer := next((each.generation for each in chain if isinstance(each, NewerStart)), None):
        return FailureCause(FailedPart.START, newer_start=newer)
    if damaged := next((each.path for each in chain if isinstance(each, DamagedCheckpoint)), None):
        return FailureCause(FailedPart.CHECKPOINT, checkpoint=damaged)
    if any(isinstance(each, TimeoutError | TransportTimeout) or misses_a_peer(each) for each in chain):
        missed = (each.peer for each in chain if isinstance(each, TransportError) and each.peer is not None)
        return FailureCause(FailedPart.PEER, peer=next(missed, None))
    return None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
