"""Wake-ups: a committed change sends NOTIFY; every replica listens once and wakes its waiting streams and reconcilers.

A wake-up is only a hint: every waiter also checks from time to time, so a lost one costs a second, not an order.
"""

import asyncio
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import psycopg
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.orm import Session

from service.db.outage import Outage

CHANNEL = "liver_wake"
PAYLOAD_CHARS_MAX = 7_500  # PostgreSQL's own limit is 8000 bytes.
TOPIC_CHARS_MAX = len("node/,") + 63
SENDING = {"channel": CHANNEL, "topics_max": PAYLOAD_CHARS_MAX // TOPIC_CHARS_MAX}
"""For a statement that sends topics of nodes and jobs itself: so many always fit one notification."""
RETRY_S = 1.0
LOOK_S = 0.5
"""How often to look whether streams should end."""
ORDERS_FIRST_S = 0.05
"""What wakes the reconcilers has nearly always woken agents too: their orders do not compete with a look at the job."""
RECONCILERS = "reconcilers"
TOKENS = "tokens"
"""Topic of keys and tokens of nodes that end before their time."""


def node_topic(node_id: str) -> str:
    """Topic of the orders of one node."""
    return f"node/{node_id}"


def job_topic(job_id: str) -> str:
    """Topic of everything that a watcher of one job sees."""
    return f"job/{job_id}"


def notify(session: Session, topics: Iterable[str]) -> None:
    """Wake the waiters for these topics when (and only if) this transaction commits."""
    batch: list[str] = []
    chars = 0
    for topic in dict.fromkeys(topics):
        if chars + len(topic) + 1 > PAYLOAD_CHARS_MAX:
            _send(session, batch)
            batch, chars = [], 0
        batch.append(topic)
        chars += len(topic) + 1
    if batch:
        _send(session, batch)


def _send(session: Session, topics: list[str]) -> None:
    session.execute(text("SELECT pg_notify(:channel, :payload)"), {"channel": CHANNEL, "payload": ",".join(topics)})


class WakeHub:
    """One LISTEN connection per process and the waiters behind it."""

    def __init__(self, url: URL, outage: Outage) -> None:
        self._outage = outage
        self._conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._stop = threading.Event()
        self._stopped_here, self._stopped_there = socket.socketpair()
        self._is_ending: Callable[[], bool] = lambda: False
        self._reconcilers = threading.Event()
        self._lock = threading.Lock()
        self._calls: dict[str, Callable[[], None]] = {}
        self._waiters: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(set)
        self._thread = threading.Thread(target=self._listen, name="wake-listener", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Stop listening and wake every waiter once, so that none hangs."""
        self._stop.set()
        self._stopped_here.close()  # The thread that listens sees its end of the pair at once.
        self.wake_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def wait_for_reconcilers(self, timeout_s: float) -> None:
        """Block one reconciler thread until something changed, a moment ago, or the time is over."""
        if self._reconcilers.wait(timeout_s):
            self._stop.wait(ORDERS_FIRST_S)
            self._reconcilers.clear()

    def wake_all(self) -> None:
        """Wake every waiter: at the end, and after a lost connection, when wake-ups may have been missed."""
        self._reconcilers.set()
        for call in self._calls.values():
            call()
        with self._lock:
            waiters = [waiter for group in self._waiters.values() for waiter in group]
        for loop, event in waiters:
            _set_in(loop, event)

    def call_at(self, topic: str, call: Callable[[], None]) -> None:
        """Call it, in the listener's thread, at every change of the topic. It must not block."""
        self._calls[topic] = call

    def end_streams_with(self, is_ending: Callable[[], bool]) -> None:
        """Streams also end once `is_ending()` is true: a server that stops waits for them before anything else."""
        self._is_ending = is_ending

    @property
    def stopping(self) -> bool:
        """Whether streams should end."""
        return self._stop.is_set() or self._is_ending()

    @asynccontextmanager
    async def waiter(self, topic: str) -> AsyncIterator[asyncio.Event]:
        """An event that is set at every change of `topic`; the caller clears it."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiters[topic].add(entry)
        try:
            yield entry[1]
        finally:
            with self._lock:
                self._waiters[topic].discard(entry)
                if not self._waiters[topic]:
                    del self._waiters[topic]

    def _listen(self) -> None:
        with self._stopped_there:
            self._listen_until_stopped()

    def _listen_until_stopped(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True, connect_timeout=5) as connection:
                    connection.execute(f"LISTEN {CHANNEL}")
                    self._outage.ends()
                    self.wake_all()
                    self._take_notifications(connection)
            except psycopg.Error as error:
                self._outage.begins(error)
                self._stop.wait(RETRY_S)
                self._end_streams()

    def _take_notifications(self, connection: psycopg.Connection) -> None:
        with selectors.DefaultSelector() as selector:
            for source in (connection, self._stopped_there):
                selector.register(source, selectors.EVENT_READ)
            while not self._stop.is_set():
                selector.select(LOOK_S)
                for notification in connection.notifies(timeout=0):
                    self._dispatch(notification.payload)
                self._end_streams()

    def _end_streams(self) -> None:
        if self.stopping:
            self.wake_all()

    def _dispatch(self, payload: str) -> None:
        topics = payload.split(",")
        for topic in topics:
            if topic in self._calls:
                self._calls[topic]()
        if any(not topic.startswith("node/") for topic in topics):
            self._reconcilers.set()
        with self._lock:
            waiters = [waiter for topic in topics for waiter in self._waiters.get(topic, ())]
        for loop, event in waiters:
            _set_in(loop, event)


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # A loop that was just closed has no waiters left.
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
