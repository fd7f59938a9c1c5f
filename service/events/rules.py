"""The last events, each under a number, so that a browser that lost its connection gets what it missed. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

EVENTS_MAX = 2_000
CHARS_MAX = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """`job_id`: only for those who asked for this job; None: for all."""

    number: int
    name: str
    data: str
    job_id: str | None = None


class Ring:
    """Of one run of the service: numbers of another one mean nothing here. `run`: its name, part of each id."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._events: deque[StreamEvent] = deque()
        self._chars = 0
        self.newest = 0

    def add(self, name: str, data: str, job_id: str | None = None) -> None:
        """One more. The oldest go where there are too many."""
        self.newest += 1
        self._events.append(StreamEvent(self.newest, name, data, job_id))
        self._chars += len(data)
        while len(self._events) > EVENTS_MAX or self._chars > CHARS_MAX:
            self._chars -= len(self._events.popleft().data)

    def id_of(self, number: int) -> str:
        """As it goes over the wire."""
        return f"{self._run}-{number}"

    def place(self, last_id: str | None) -> int | None:
        """The number behind which a stream goes on; None where something it missed is known no more."""
        run, _, number = (last_id or "").partition("-")
        if run != self._run or not number.isdecimal() or len(number) > 18:
            return None
        return int(number) if self.holds(int(number)) else None

    def holds(self, number: int) -> bool:
        """Whether everything behind this number is still here."""
        oldest = self._events[0].number if self._events else self.newest + 1
        return oldest - 1 <= number <= self.newest

    def behind(self, number: int, job_ids: Iterable[str]) -> list[StreamEvent]:
        """What came after it, of that what somebody wants who watches these jobs."""
        wanted = {None, *job_ids}
        return [event for event in self._events if event.number > number and event.job_id in wanted]
