"""What a service makes of notices. Pure. When a notice counts is decided in `agent.protocol.notice_life`.

A notice belongs to one lease of a node: the next machine under that name starts without one.
"""

from collections.abc import Iterable
from datetime import datetime

from agent.protocol.notice_life import GRACE_AFTER_DEADLINE, TAKES_THE_NODE, WITHOUT_DEADLINE_LASTS, withdraw
from agent.protocol.sync import NoticeFact, NoticeKind, SourceHealth, SourceState


def horizon(now: datetime) -> datetime:
    """A notice whose deadline and first sight are both before this time is over."""
    return now - max(GRACE_AFTER_DEADLINE, WITHOUT_DEADLINE_LASTS)


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
    return tuple(
        withdraw(notice, now)
        for notice in known
        if notice.source == source.source and notice.kind not in source.announces and notice.withdrawn_utc is None
    )
