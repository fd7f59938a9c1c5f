"""What every reader of an account's channel shares: threads that ask, what they get stored together, and a message let
go of only after the commit.

Whatever fails, the service goes on, and the channel says why it is not heard. A message that cannot be stored is left
to the queue, which shows it again and at last puts it where its own rules say.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from sqlalchemy.orm import Session

from service.clouds.operations import note_channel
from service.clouds.stored_together import StoredTogether
from service.context import Context
from service.db.outage import is_outage
from service.notices.rules import ACCOUNT_CHANNELS

AFTER_ERROR_S, AFTER_ERROR_MOST_S = 1.0, 30.0
OUTAGE_AGAIN_S = 0.25
SAY_ALIVE_EVERY = timedelta(seconds=5)
ReadingT = TypeVar("ReadingT")
_log = logging.getLogger(__name__)


class ChannelWorker:
    """The threads of one replica that ask one channel. `what`: the channel in words. `trouble`: why it cannot be asked,
    empty while it can."""

    def __init__(self, context: Context, channel: str, what: str) -> None:
        self._context = context
        self._settings = context.settings
        self._channel, self.what = channel, what
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._alive_at: datetime | None = None
        self._threads: list[threading.Thread] = []
        self.trouble = ""

    def begin(self, loops: Mapping[str, Callable[[], None]]) -> None:
        """Start a thread for each of these, by name."""
        for name, loop in loops.items():
            thread = threading.Thread(target=loop, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, *, timeout_s: float = 2.0) -> None:
        """Ask for nothing more. What was read and is not stored comes again."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s / max(1, len(self._threads)))

    def repeat(self, once: Callable[[], object]) -> None:
        """Do it until the service ends; after an error less and less often."""
        wait_s = AFTER_ERROR_S
        while not self._stop.is_set():
            try:
                once()
                wait_s = AFTER_ERROR_S
            except Exception as error:
                self.say_trouble(error)
                self._stop.wait(wait_s)
                wait_s = min(2 * wait_s, AFTER_ERROR_MOST_S)

    def commit(self, write: Callable[[Session, datetime], object]) -> None:
        """One transaction. While the database is away it is tried again: that is not the fault of a message, which
        else would be shown again so often that the queue takes it for one that nobody can handle."""
        while not self._stop.is_set():
            try:
                with self._context.sessions.begin() as session:
                    write(session, self._context.clock())
                self._context.database.outage.ends()
                return
            except Exception as error:
                if not is_outage(error):
                    raise
                self._context.database.outage.begins(error)
                self._stop.wait(OUTAGE_AGAIN_S)
        raise InterruptedError("the service ends")

    def say_alive(self) -> None:
        """The channel has answered."""
        now = self._context.clock()
        if not self.trouble and self._alive_at is not None and now - self._alive_at < SAY_ALIVE_EVERY:
            return
        if self.trouble:
            _log.warning("%s is read again", self.what)
        self.trouble, self._alive_at = "", now
        with self._context.sessions.begin() as session:
            note_channel(session, self._channel, ACCOUNT_CHANNELS[self._channel], now=now)

    def say_trouble(self, error: Exception) -> None:
        """Why the channel is not heard: shown, stored if that goes, and logged when it changes."""
        if is_outage(error):
            return
        reason = f"{type(error).__name__}: {error}"
        if reason != self.trouble:
            _log.error("%s cannot be read: %s", self.what, reason)
        self.trouble = reason
        try:
            with self._context.sessions.begin() as session:
                provider, now = ACCOUNT_CHANNELS[self._channel], self._context.clock()
                note_channel(session, self._channel, provider, trouble=reason, now=now)
        except Exception:
            _log.debug("the trouble could not be stored", exc_info=True)


class MessageWorker(ChannelWorker, ABC, Generic[ReadingT]):
    """A channel whose messages are lent for a time, and gone once they are let go. Several replicas may read it."""

    EXTEND_MOST = 10
    """Of so many messages the time is extended at once."""

    def __init__(self, context: Context, channel: str, what: str) -> None:
        super().__init__(context, channel, what)
        self._held: set[str] = set()
        self._stored = StoredTogether(self._commit_all)

    @abstractmethod
    def receive(self) -> Mapping[str, Any]:
        """Messages as they come, by the handle that lets them go. May wait."""

    @abstractmethod
    def meaning(self, message: Any) -> ReadingT:
        """What a message says. Never raises."""

    @abstractmethod
    def write(self, session: Session, readings: Sequence[ReadingT], now: datetime) -> None:
        """Store what messages say, in the caller's transaction."""

    @abstractmethod
    def let_go(self, handles: Sequence[str]) -> None:
        """These messages are stored: nobody shall get them again."""

    @abstractmethod
    def extend(self, handles: Sequence[str]) -> None:
        """Nobody else shall get these messages for some time more. Never raises."""

    def completed(self, reading: ReadingT) -> ReadingT:
        """With what the cloud has to be asked for. Outside of any transaction."""
        return reading

    def _read_once(self) -> None:
        found = self.receive()
        with self._lock:
            self._held |= set(found)
        try:
            self.say_alive()
            done = self._store([(handle, self.meaning(message)) for handle, message in found.items()])
            # Held up to here: a cloud that takes long to let go of messages must not give them to somebody else.
            if done:
                self.let_go(done)
        finally:
            with self._lock:
                self._held -= set(found)

    def _store(self, messages: Sequence[tuple[str, ReadingT]]) -> list[str]:
        """Those of the messages that are stored, together if that goes, or else one by one."""
        if not messages or self._stop.is_set():
            return []
        try:
            readings = [self.completed(reading) for _, reading in messages]
            self._stored.store(readings)
            return [handle for handle, _ in messages]
        except Exception as error:
            if len(messages) == 1:
                _log.exception("a message cannot be stored: %s keeps it", self.what)
                self.say_trouble(error)
                return []
        return [done for item in messages for done in self._store([item])]

    def _commit_all(self, readings: Sequence[ReadingT]) -> None:
        self.commit(lambda session, now: self.write(session, readings, now))

    def _extend_all(self, every_s: float) -> None:
        """While messages are worked on nobody else gets them."""
        while not self._stop.wait(every_s):
            with self._lock:
                held = sorted(self._held)
            for start in range(0, len(held), self.EXTEND_MOST):
                self.extend(held[start : start + self.EXTEND_MOST])
