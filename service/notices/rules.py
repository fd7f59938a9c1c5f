"""What a service makes of notices. Pure. When a notice counts is decided in `agent.protocol.notice_life`.

A notice belongs to one lease of a node: the next machine under that name starts without one.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from agent.protocol.notice_life import (
    DEADLINE_DRIFT,
    DRAIN,
    GRACE_AFTER_DEADLINE,
    TAKES_THE_NODE,
    WITHOUT_DEADLINE_LASTS,
    NoticePhase,
    bars_ranks,
    ends_utc,
    is_open,
    key_of,
    moves_jobs,
    phase,
    withdraw,
)
from agent.protocol.sync import NoticeFact, NoticeKind, Provider, SourceHealth, SourceState

AWS_QUEUE, GCP_PUBSUB, GCP_OPERATIONS = "aws-queue", "gcp-pubsub", "gcp-operations"
"""The channels by which a cloud tells the service of the machines of an account. Each is the source of its notices."""
ACCOUNT_CHANNELS = {AWS_QUEUE: Provider.AWS, GCP_PUBSUB: Provider.GCP, GCP_OPERATIONS: Provider.GCP}
SAID_BY_SERVICE = frozenset({DRAIN, *ACCOUNT_CHANNELS})
"""Agents know such notices from their orders only: what they say of them is no news, and withdraws nothing."""

NOTICES_OF_LEASE_MAX = 64
"""So many notices of one lease may count at a time, of those that agents tell. A node has a handful of sources."""


PEERS_WORD_LASTS = timedelta(minutes=5)
"""For so long counts what only other nodes of its job have said of a node: enough for one that could not say it itself.
"""
PEERS_SPEAK_AGAIN = timedelta(hours=1)
"""Within this time of their first word of a node's loss, whatever peers say of its loss counts no longer than that
word: else they could say it anew for ever. The same holds for advice."""
PEERS_WORDS_MAX = 8
"""So many notices of one lease may peers tell that count at a time, beside those that the node tells itself."""
COUNTS_AT_MOST = max(GRACE_AFTER_DEADLINE, WITHOUT_DEADLINE_LASTS)


def horizon(now: datetime) -> datetime:
    """A notice whose deadline and first sight are both before this time is over."""
    return now - COUNTS_AT_MOST


def over_at(notice: NoticeFact, *, told_in: str | None, recorded_at: datetime) -> datetime:
    """When a stored notice is over. `told_in`: the job in which peers told it, None where somebody who knows did.
    `recorded_at`: when the service first heard of it, or of what peers told before, see PEERS_SPEAK_AGAIN."""
    ends = ends_utc(notice)
    return ends if told_in is None else min(ends, recorded_at + PEERS_WORD_LASTS)


def takes_node(kind: NoticeKind) -> bool:
    """Whether such a notice announces a loss; the other kinds are advice."""
    return kind in TAKES_THE_NODE


def earliest_deadline(notices: Iterable[NoticeFact]) -> datetime | None:
    """The earliest deadline of the notices; None if no notice names one."""
    return min((notice.deadline_utc for notice in notices if notice.deadline_utc is not None), default=None)


def withdrawn_by(source: SourceHealth, known: Iterable[NoticeFact], now: datetime) -> tuple[NoticeFact, ...]:
    """The facts that follow when a source is read and does not announce what is `known` of it.

    An agent that has lost its journal, or a new machine under the node's name, does not withdraw a notice of which it
    never knew.
    """
    if source.state is not SourceState.WATCHING:
        return ()
    still = {*source.announces, *source.overdue}
    return tuple(
        withdraw(notice, now)
        for notice in known
        if notice.source == source.source and notice.kind not in still and notice.withdrawn_utc is None
    )


def gives_way(
    known: Iterable[NoticeFact], fact: NoticeFact, now: datetime, *, most: int = NOTICES_OF_LEASE_MAX
) -> NoticeFact | None:
    """Which notice of a lease must go if `fact` is told too, so that no more than `most` may count: the one that
    presses least, which is `fact` itself unless it presses more than another. None where there is room, or where `fact`
    says more of a notice that is `known` (all that may count). What the service itself was told is neither counted nor
    goes."""
    told = [notice for notice in known if notice.source not in SAID_BY_SERVICE]
    if len(told) < most or any(key_of(notice) == key_of(fact) for notice in told):
        return None
    least = max(told, key=lambda notice: _pressing(notice, now))
    return least if _pressing(fact, now) < _pressing(least, now) else fact


def _pressing(notice: NoticeFact, now: datetime) -> tuple[int, datetime]:
    """The less, the more it matters: what moves jobs, then what keeps new ranks away, then advice, each by its time."""
    matters = (moves_jobs(notice, now), bars_ranks(notice, now), is_open(notice, now), True)
    return matters.index(True), notice.deadline_utc or notice.first_seen_utc + WITHOUT_DEADLINE_LASTS


def aligned(known: NoticeFact, fact: NoticeFact, within: timedelta) -> NoticeFact:
    """The fact with the known times where its own differ from them by no more: it is about the same notice."""
    is_anew = known.withdrawn_utc is not None and fact.withdrawn_utc is None
    if is_anew or abs(fact.first_seen_utc - known.first_seen_utc) > within:
        return fact
    deadline = fact.deadline_utc
    if deadline is not None and known.deadline_utc is not None and abs(deadline - known.deadline_utc) <= within:
        deadline = known.deadline_utc
    return fact.model_copy(update={"first_seen_utc": known.first_seen_utc, "deadline_utc": deadline})


def same_loss(one: NoticeFact, other: NoticeFact) -> bool:
    """Whether two notices of one lease announce the same loss, so that they are one occurrence: neither is withdrawn,
    both take the node or are the same advice, and they name about the same time. What a person asks for is apart."""
    if DRAIN in (one.source, other.source) and one.source != other.source:
        return False
    if one.withdrawn_utc is not None or other.withdrawn_utc is not None:
        return False
    if one.kind is not other.kind and not (takes_node(one.kind) and takes_node(other.kind)):
        return False
    if one.deadline_utc is not None and other.deadline_utc is not None:
        return abs(one.deadline_utc - other.deadline_utc) <= GRACE_AFTER_DEADLINE
    # One of them says no time: it is the same loss if the other was not over when it was heard.
    first, second = sorted((one, other), key=lambda notice: notice.first_seen_utc)
    return second.first_seen_utc < max(ends_utc(first), first.first_seen_utc + WITHOUT_DEADLINE_LASTS)


def is_urgent(before: Iterable[NoticeFact], after: Iterable[NoticeFact], now: datetime) -> bool:
    """Whether agents have to hear at once of a change in the notices of one node: jobs have to leave it now, or sooner
    than they knew, or not any more. All else, such as advice or one more channel that says the same, changes nothing
    that they do; they find it in the answer to their next report."""
    was, comes = _end_of_moving(before, now), _end_of_moving(after, now)
    if was is None or comes is None:
        return was is not comes
    return comes < was - DEADLINE_DRIFT


def _end_of_moving(notices: Iterable[NoticeFact], now: datetime) -> datetime | None:
    """By when jobs have to have left the node; None if nothing takes it."""
    moving = [notice for notice in notices if moves_jobs(notice, now)]
    return min(
        (notice.deadline_utc or notice.first_seen_utc + WITHOUT_DEADLINE_LASTS for notice in moving), default=None
    )


def phase_of_all(notices: Iterable[NoticeFact], now: datetime) -> NoticePhase:
    """Where an occurrence stands: it counts while one of its notices does, and is withdrawn when all of them are."""
    order = (NoticePhase.HEARD, NoticePhase.DUE, NoticePhase.OVER, NoticePhase.WITHDRAWN)
    return min((phase(notice, now) for notice in notices), key=order.index)
