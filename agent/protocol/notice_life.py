"""The life of a notice, for watcher, driver and service alike: heard, nearer, withdrawn or due, over, heard anew. Pure.

There is at most one notice for each node, kind, source and planned event; when it was first seen tells it from the one
before it. `merge` puts facts together in any order, with the same result, so that whoever has seen the same facts knows
the same notice. `phase` says where it stands at a moment. No other place decides whether a notice counts.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Any

from agent.protocol.sync import NoticeFact, NoticeKind
from agent.protocol.values import shifted
from liver_core.layout.limits import NAME_CHARS_MAX

TAKES_THE_NODE = (NoticeKind.INTERRUPTION, NoticeKind.MAINTENANCE)
DEADLINE_DRIFT = timedelta(seconds=1)
"""Some sources compute the deadline anew at every read. A change of no more than this is none."""
GOES_LATE = timedelta(seconds=10)
"""A machine goes some seconds after its deadline, and clocks differ. Until then a notice moves jobs."""
GRACE_AFTER_DEADLINE = timedelta(seconds=180)
"""After so long a node that still reports was not taken."""
WITHOUT_DEADLINE_LASTS = timedelta(seconds=600)
LEAD = timedelta(minutes=10)
"""Work on a machine that is planned for later than that is advice; from then on it takes the node. Enough to have
another machine come and to move the largest job without haste."""
DRAIN = "drain"
"""The source of what a person asks for. It does not end by itself: a drained node stays empty until that is undone."""
_NEVER = datetime.max.replace(tzinfo=UTC)

MOVED_LEAST = timedelta(seconds=30)
"""A planned event that is said to be later by less stays where it is: clocks jump, and nobody plans by seconds."""

NoticeKey = tuple[str, NoticeKind, str, str]


class NoticePhase(StrEnum):
    """Heard: the node will go, jobs leave it. Due: its deadline has passed; it starts no handoff any more, and the node
    gets no new rank. Withdrawn, over: the notice does not count any more."""

    HEARD = "heard"
    DUE = "due"
    WITHDRAWN = "withdrawn"
    OVER = "over"


def key_of(fact: NoticeFact) -> NoticeKey:
    """What only one notice has at a time: node, kind, source and planned event."""
    return fact.node_id, fact.kind, fact.source, fact.event_id


def event_id_of(value: object) -> str:
    """What a source calls a planned event, as `NoticeFact.event_id`: a digest where that cannot hold it; empty where it
    is no text."""
    if not isinstance(value, str):
        return ""
    fits = len(value) <= NAME_CHARS_MAX and value.isprintable()
    return value if fits else sha256(value.encode(errors="surrogatepass")).hexdigest()


def merge(known: NoticeFact | None, fact: NoticeFact) -> NoticeFact:
    """The notice after one more fact with its key. Order and repetition change nothing: the notice that was first seen
    later counts; of one notice the nearest deadline counts, and what is withdrawn stays so."""
    if known is None or fact.first_seen_utc > known.first_seen_utc:
        return fact
    if fact.first_seen_utc < known.first_seen_utc:
        return known
    nearest = min(known, fact, key=lambda item: (item.deadline_utc or _NEVER, item.raw))
    withdrawn = min((item.withdrawn_utc for item in (known, fact) if item.withdrawn_utc is not None), default=None)
    said = max((item.said_utc for item in (known, fact) if item.said_utc is not None), default=None)
    return nearest.model_copy(update={"withdrawn_utc": withdrawn, "said_utc": said})


def hear(known: NoticeFact | None, said: NoticeFact) -> NoticeFact | None:
    """The fact to tell when a source announces `said`, dated as if it was heard for the first time; None for no news.

    It is another notice than the known one if that was withdrawn, or if its deadline has passed and the source now
    names a later one that is yet to come. A later deadline of a notice that still runs is no news, unless it is that of
    a planned event, whose time may be moved: then it is another notice too.
    """
    if known is None:
        return said
    if known.withdrawn_utc is not None or _is_another(known, said):
        return said.model_copy(update={"first_seen_utc": max(said.first_seen_utc, _after(known))})
    if said.deadline_utc is None or said.deadline_utc >= (known.deadline_utc or _NEVER) - DEADLINE_DRIFT:
        return None
    return known.model_copy(update={"deadline_utc": said.deadline_utc, "raw": said.raw, "said_utc": said.said_utc})


def withdraw(known: NoticeFact, now: datetime) -> NoticeFact:
    """The fact to tell when its source announces nothing any more."""
    return known if known.withdrawn_utc is not None else known.model_copy(update={"withdrawn_utc": now})


def moved(fact: NoticeFact, by: timedelta) -> NoticeFact:
    """The same fact by a clock that is ahead by so much."""
    if not by:
        return fact
    times = {name: shifted(getattr(fact, name), by) for name in ("first_seen_utc", "deadline_utc", "withdrawn_utc")}
    return fact.model_copy(update=times)


def phase(notice: NoticeFact, now: datetime) -> NoticePhase:
    """Where the notice stands."""
    if notice.withdrawn_utc is not None:
        return NoticePhase.WITHDRAWN
    if now >= ends_utc(notice):
        return NoticePhase.OVER
    return NoticePhase.HEARD if now < heard_until(notice) else NoticePhase.DUE


def heard_until(notice: NoticeFact) -> datetime:
    """Until when it moves jobs, unless it is withdrawn: what answers it has so long at most."""
    if notice.deadline_utc is None:
        return ends_utc(notice)
    return max(notice.deadline_utc, notice.first_seen_utc) + GOES_LATE


def ends_utc(notice: NoticeFact) -> datetime:
    """When the notice is over for everyone, withdrawn or not."""
    if notice.source == DRAIN:
        return _NEVER if notice.withdrawn_utc is None else notice.withdrawn_utc + GRACE_AFTER_DEADLINE
    if notice.deadline_utc is None:
        return notice.first_seen_utc + WITHOUT_DEADLINE_LASTS
    return notice.deadline_utc + GRACE_AFTER_DEADLINE


def is_open(notice: NoticeFact, now: datetime) -> bool:
    """Whether the notice still counts."""
    return phase(notice, now) in (NoticePhase.HEARD, NoticePhase.DUE)


def moves_jobs(notice: NoticeFact, now: datetime) -> bool:
    """Whether jobs must leave the node. Advice, such as a rebalance recommendation, moves nobody."""
    return notice.kind in TAKES_THE_NODE and phase(notice, now) is NoticePhase.HEARD


def bars_ranks(notice: NoticeFact, now: datetime) -> bool:
    """Whether the node gets no rank that it does not have yet."""
    return notice.kind in TAKES_THE_NODE and is_open(notice, now)


class Notices:
    """Every notice that one party knows, by key; at most `most`, of which the oldest goes first."""

    def __init__(self, facts: Iterable[NoticeFact] = (), *, most: int = 10_000) -> None:
        self._most = most
        self._known: dict[NoticeKey, NoticeFact] = {}
        self._ended: dict[NoticeKey, datetime] = {}
        for fact in facts:
            self.take(fact)

    def take(self, fact: NoticeFact) -> NoticeFact | None:
        """One more fact; the notice if this changes it, else None."""
        key = key_of(fact)
        known = self._known.get(key)
        notice = merge(known, fact)
        if notice == known or fact.first_seen_utc <= self._ended.get(key, fact.first_seen_utc - DEADLINE_DRIFT):
            return None
        self._known[key] = notice
        _keep_newest(self._known, self._most)
        return notice

    def drop(self, key: NoticeKey) -> None:
        """Forget the notice with this key, for good."""
        notice = self._known.pop(key, None)
        if notice is not None:
            self._ended[key] = notice.first_seen_utc
            _keep_newest(self._ended, self._most)

    def drop_ended(self, now: datetime) -> None:
        """Forget every notice that is over for everyone. Until then a withdrawn one is kept, and afterwards when it was
        first seen: a copy from before may still come, and must not bring it back."""
        for notice in self.all():
            if now >= ends_utc(notice):
                self.drop(key_of(notice))

    def all(self) -> tuple[NoticeFact, ...]:
        """Every notice known, in any phase."""
        return tuple(self._known.values())

    def moving(self, now: datetime) -> tuple[NoticeFact, ...]:
        """Those that jobs must act on."""
        return tuple(notice for notice in self._known.values() if moves_jobs(notice, now))

    def barred(self, now: datetime) -> frozenset[str]:
        """The nodes that get no new rank."""
        return frozenset(notice.node_id for notice in self._known.values() if bars_ranks(notice, now))


def _is_another(known: NoticeFact, said: NoticeFact) -> bool:
    now = said.first_seen_utc
    if known.deadline_utc is None or said.deadline_utc is None:
        return False
    if said.event_id and said.deadline_utc > known.deadline_utc + MOVED_LEAST:
        return True
    return known.deadline_utc <= now < said.deadline_utc and said.deadline_utc > known.deadline_utc + DEADLINE_DRIFT


def _after(known: NoticeFact) -> datetime:
    # A clock that was set back must not give two notices one name.
    return known.first_seen_utc + timedelta(microseconds=1)


def _keep_newest(kept: dict[NoticeKey, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
