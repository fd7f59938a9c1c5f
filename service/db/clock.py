"""The database's time, which all replicas share: read now and then, and carried on by this machine's monotonic clock.

Wrong by at most `error_s`: half the round trip of the reading in use and `DRIFT` for each second since. The clock of
this machine's wall plays no part.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

LOOK_S = 10.0
FIRST_LOOKS = 3
"""Readings at the start, of which the fastest is used."""
ROUND_TRIP_S_MAX = 1.0
"""A slower reading says too little, unless it is the first."""
DRIFT = 500e-6
"""By how much two clocks that nobody sets may go apart in a second: the most that Linux lets NTP correct."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimeReading:
    """The database's time `at` the moment `monotonic_s`, give or take `half_s`."""

    at: datetime
    monotonic_s: float
    half_s: float

    def error_s(self, monotonic_s: float) -> float:
        """How wrong the time that follows from it may be at another moment."""
        return self.half_s + DRIFT * (monotonic_s - self.monotonic_s)


class DatabaseClock:
    """Call it for the time. `start` keeps it right until `stop`; while the database is away it goes on by itself."""

    def __init__(self, engine: Engine, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="database-clock", daemon=True)
        self._reading = self._read()
        for _ in range(FIRST_LOOKS - 1):
            self._take(self._read())

    def __call__(self) -> datetime:
        """The time by the database's clock."""
        reading = self._reading
        return reading.at + timedelta(seconds=self._monotonic() - reading.monotonic_s)

    @property
    def error_s(self) -> float:
        """The most by which that may be wrong now."""
        return self._reading.error_s(self._monotonic())

    def look(self) -> None:
        """Read the database's time once more. Raises SQLAlchemyError where it does not answer."""
        reading = self._read()
        if reading.half_s <= ROUND_TRIP_S_MAX / 2:
            self._take(reading)

    def start(self) -> None:
        """Look again and again."""
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Stop looking."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _keep(self) -> None:
        while not self._ending.wait(LOOK_S):
            try:
                self.look()
            except SQLAlchemyError as error:
                # Whoever needs the database says that it is away.
                _log.debug("the database's clock cannot be read: %s", error)

    def _read(self) -> TimeReading:
        with self._engine.connect() as connection:
            sent = self._monotonic()
            at = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
            half_s = (self._monotonic() - sent) / 2
        return TimeReading(at, sent + half_s, half_s)

    def _take(self, new: TimeReading) -> None:
        """The better of both readings counts. Where they exclude each other, the database's clock was set."""
        known = self._reading
        error_s = known.error_s(new.monotonic_s)
        expected = known.at + timedelta(seconds=new.monotonic_s - known.monotonic_s)
        apart_s = abs((new.at - expected).total_seconds())
        if apart_s > error_s + new.half_s:
            _log.warning("the database's clock was set: it is off by %.3f s from what it was", apart_s)
        elif new.half_s > error_s:
            return
        self._reading = new
