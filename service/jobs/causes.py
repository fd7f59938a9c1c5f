"""What ended a world of a job, or an attempt to hand it over: the first cause as a typed value. Pure.

Several facts tell of one failure. What an agent knows of a process that ended outranks what a rank reported of itself,
and both outrank what another rank felt of it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from agent.protocol.process_end import STOPPED, ProcessEnd
from liver_core.handoff import OUT_OF_TIME, FailedPart, FailureCause, Reason
from liver_core.handoff.refusals import REFUSED
from liver_core.layout.limits import fitting
from liver_core.layout.roster import Roster

FIRST_CAUSE_WITHIN_S = 1.5
"""Ranks feel that a peer is gone before its agent has reported how it ended, by no more than this."""
SHUT_DOWN_BY = ("SIGTERM", "SIGKILL")
"""How a machine that goes ends the processes on it, the ranks perhaps before the agent."""
_WORDS = {
    "peer": "a rank that no agent has named",
    "start": "no step was made",
    "checkpoint": "its checkpoint cannot be loaded",
}


@dataclass(frozen=True, slots=True)
class FirstCause:
    """`signal` or `exit_code` where a process ended; `step`: the last one that it, or else the job, had made."""

    what: FailedPart
    node: str | None = None
    rank: int | None = None
    signal: str | None = None
    exit_code: int | None = None
    step: int | None = None

    def as_json(self) -> dict[str, Any]:
        """To be stored."""
        return asdict(self)

    @classmethod
    def of(cls, stored: Mapping[str, Any] | None) -> "FirstCause | None":
        """From what was stored, if anything was."""
        return None if stored is None else cls(**{**stored, "what": FailedPart(stored["what"])})

    @property
    def is_felt(self) -> bool:
        """Whether no one who knows more has reported it yet."""
        return self.what is FailedPart.PEER


def end_of(rank: Mapping[str, Any]) -> ProcessEnd | None:
    """How the process of a rank ended, from what its agent reported of it; None while it runs, or nobody knows."""
    ended = rank.get("ended")
    return None if ended is None else ProcessEnd(**ended)


def said_of(rank: Mapping[str, Any]) -> FailureCause | None:
    """The cause in the reason that a rank or its agent gave, None without one. So it is where an older agent reports,
    and then the rank itself counts as the cause."""
    said = (rank.get("reason") or {}).get("cause")
    return None if said is None else FailureCause(**{**said, "what": FailedPart(said["what"])})


def cause_of_rank(
    node: str | None,
    rank: int | None,
    step: int | None,
    said: FailureCause | None,
    end: ProcessEnd | None,
    *,
    blamed: str | None = None,
) -> FirstCause:
    """What is known of the cause by what a rank of this node, or its agent, `said`, and by how its process ended.
    `blamed`: the node that the reason names, if it names one."""
    known = said if end is None else end.cause(said)
    at = step if known is None or known.step is None else known.step
    if known is None:
        return FirstCause(FailedPart.RANK, node, rank, step=at)
    if known.what is not FailedPart.RANK:
        return FirstCause(known.what, blamed if known.what is FailedPart.NODE else None, step=at)
    return FirstCause(FailedPart.RANK, node, rank, known.signal, known.exit_code, at)


def blamed_in(rank: Mapping[str, Any]) -> str | None:
    """The node that the reason of a rank or its agent names, None where it names none."""
    return (rank.get("reason") or {}).get("node") or None


def at_store(cause: FirstCause, store_node: str | None) -> FirstCause:
    """The same, and where it was the store of a world: the node that keeps it. No rank needs to know that."""
    return replace(cause, node=store_node) if cause.what is FailedPart.STORE else cause


def cause_of_attempt(reason: Reason, *, store_node: str | None, source: Roster | None = None) -> FirstCause | None:
    """The same of the reason for which a handoff ended; None if nothing failed, as where it was taken back. `source`:
    the world that it began from, whose ranks were read."""
    node = reason.node or None
    found = cause_of_rank(node, reason.rank, None, reason.cause, None, blamed=node)
    nobody = reason.rank is None or reason.phase == REFUSED
    match found.what:
        case FailedPart.STORE:
            return at_store(FirstCause(FailedPart.STORE), store_node)
        case FailedPart.PEER if (missed := _missed(reason, source)) is not None:
            return FirstCause(FailedPart.PEER, *missed, step=found.step)
        case FailedPart.RANK if nobody and found.signal is None and found.exit_code is None:
            return None
        case _:
            return found


def _missed(reason: Reason, source: Roster | None) -> tuple[str, int] | None:
    """Node and rank of the source that another rank could not read."""
    peer = reason.cause.peer if reason.cause is not None else None
    if peer is None or source is None or peer >= len(source.members):
        return None
    return source.members[peer].node_id, peer


def first_of(causes: Iterable[FirstCause | None]) -> FirstCause | None:
    """The one whose reporter knows most."""
    return min((cause for cause in causes if cause is not None), key=_order, default=None)


def behind(cause: FirstCause | None, away: Sequence[str], others: Sequence[tuple[str, int]]) -> FirstCause | None:
    """The same, but where ranks only felt that a peer is gone. If just one of their nodes is `away` (not heard, and has
    reported no error) it is that node, else if all but one of the ranks (`others`: node and rank) felt it, the one that
    only stands still. Of several nobody knows which was first."""
    if cause is None or not cause.is_felt:
        return cause
    if len(away) == 1:
        return FirstCause(FailedPart.NODE, away[0], step=cause.step)
    return FirstCause(FailedPart.RANK, *others[0], step=cause.step) if len(others) == 1 else cause


def stood_in_the_way(
    reason: Reason | None, away: Sequence[str], others: Sequence[tuple[str, int]]
) -> FirstCause | None:
    """What an attempt waited for that only ran out of time, as `behind` tells: None where all its nodes are heard and
    all its ranks go on, and where it ended of something else."""
    if reason is None or reason.phase != OUT_OF_TIME:
        return None
    found = behind(FirstCause(FailedPart.PEER), away, others)
    return None if found is None or found.is_felt else found


def ran_out(leaving: Iterable[tuple[str, datetime | None]], now: datetime) -> list[str]:
    """The nodes whose notices have run out, the earliest first. `leaving`: nodes, and by when they will go."""
    due = [(deadline_at, node_id) for node_id, deadline_at in leaving if deadline_at is not None]
    return [node_id for deadline_at, node_id in sorted(due) if deadline_at <= now]


def may_be_of_a_node(cause: FirstCause | None) -> bool:
    """Whether it only says that something cannot be reached which runs on a node, the one of a peer or of the store."""
    return cause is not None and cause.what in (FailedPart.PEER, FailedPart.STORE)


def is_of_nodes(cause: FirstCause | None, *, unheard: Collection[str], leaving: Collection[str]) -> bool:
    """Whether nodes that are gone explain it, so that it says nothing against the job. `unheard`: nodes of the world
    that are not heard, and have reported no error. `leaving`: those of which a notice tells."""
    if cause is None or cause.what is FailedPart.START:
        return False
    if may_be_of_a_node(cause):
        return bool(unheard)
    return cause.what is FailedPart.NODE or (cause.node in leaving and cause.signal in SHUT_DOWN_BY)


def stopped_among(ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[tuple[str, int], ...]:
    """Node and number of each rank whose agent says that its process is stopped, of these reports by their nodes."""
    return tuple((node, rank["rank"]) for node, rank in ranks if (rank.get("reason") or {}).get("phase") == STOPPED)


def away_of(silent: Sequence[str], overdue: Sequence[str], due: Sequence[str], heard: Set[str | None]) -> list[str]:
    """The nodes to look for behind ranks that only miss a peer: those that are not heard, but for those in `heard`,
    which report so themselves. Where notices of such nodes ran out (`due`, in that order) it is the first: that one is
    gone as it was announced, though its silence is too short to count as more than an `overdue` report, or only as one
    that has not come since the ranks felt it."""
    gone = next((node for node in due if node in (*silent, *overdue) and node not in heard), None)
    return [node for node in silent if node not in heard] if gone is None else [gone]


def in_words(cause: Mapping[str, Any] | None) -> str:
    """A stored cause for people, empty without one."""
    if cause is None:
        return ""
    what = _WORDS.get(cause["what"], cause["what"])
    if cause["what"] == FailedPart.PEER and cause["rank"] is not None:
        what = f"not reached by another rank: rank {cause['rank']}"
    elif cause["rank"] is not None:
        what = f"{what} {cause['rank']}"
    if cause["node"] is not None:
        what = f"{what} on {cause['node']}" if cause["what"] != FailedPart.NODE else f"node {cause['node']}"
    how = f", killed by {cause['signal']}" if cause["signal"] else ""
    how = how or (f", exit code {cause['exit_code']}" if cause["exit_code"] is not None else "")
    return fitting(f"{what}{how}" + (f", after step {cause['step']}" if cause["step"] is not None else ""))


def _order(cause: FirstCause) -> tuple[int, int]:
    known = cause.signal is not None or cause.exit_code is not None
    return (tuple(FailedPart).index(cause.what), 0 if known else 1)
