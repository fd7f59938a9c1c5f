"""What ended a world of a job, or an attempt to hand it over: the first cause as a typed value. Pure.

Several facts tell of one failure. `Known` orders them: what somebody saw outranks what others infer.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import IntEnum, auto
from math import inf
from typing import Any

from agent.protocol.process_end import OWN_ABORT, STOPPED, ProcessEnd
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


class Known(IntEnum):
    """How a first cause is known. The first line of this table for which there is a fact tells the cause, in whatever
    order facts have arrived. All lines but the last are seen by somebody; the last is inferred. Where all that is told
    `may_follow` from another end, a moment is left for that to be told."""

    KILLED = auto()
    """An agent saw that the process of its own rank was ended by a signal."""
    EXITED = auto()
    """An agent saw that the process of its own rank ended with an exit code, and that rank blamed nobody else."""
    ABORTED = auto()
    """An agent saw that the process of its own rank aborted itself, without a word. It has often lost another rank."""
    FAILED = auto()
    """A rank, or its own agent, says that this rank failed, and not how its process ended."""
    STORE = auto()
    """The store of a world is gone: its agent saw it die, or a rank that uses it got no answer."""
    CHECKPOINT = auto()
    """A rank could not load the checkpoint that its world began from."""
    START = auto()
    """The service saw no step of a start in its time, or a rank read of a newer start."""
    NODE = auto()
    """One node is not heard: by the service, or by the agent that leads. Of several nobody knows which was first."""
    STOPPED = auto()
    """An agent saw that the process of its own rank, and of no other, is stopped by a signal or a debugger."""
    FELT = auto()
    """A rank infers that some rank failed, since it gets no answer. It accuses nobody."""

    @property
    def is_seen(self) -> bool:
        """Whether somebody saw it, and does not only infer it."""
        return self is not Known.FELT

    @property
    def may_follow(self) -> bool:
        """Whether it is often no more than what follows when another rank has ended, of which its agent tells soon."""
        return self in (Known.ABORTED, Known.FELT)


_OF_PART = {
    FailedPart.RANK: Known.FAILED,
    FailedPart.STORE: Known.STORE,
    FailedPart.NODE: Known.NODE,
    FailedPart.CHECKPOINT: Known.CHECKPOINT,
    FailedPart.START: Known.START,
    FailedPart.PEER: Known.FELT,
}
"""Of a cause that tells of the end of no process."""


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
    def known(self) -> Known:
        """How it is known, where a rank or its agent says so."""
        if self.what is FailedPart.RANK and self.signal is not None:
            return Known.ABORTED if self.signal == OWN_ABORT else Known.KILLED
        exited = self.what is FailedPart.RANK and self.exit_code is not None
        return Known.EXITED if exited else _OF_PART[self.what]

    @property
    def is_felt(self) -> bool:
        """Whether no one who knows more has reported it yet."""
        return not self.known.is_seen


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
    """The one that is known best; of several alike always the same one, in whatever order they arrive."""
    return min((cause for cause in causes if cause is not None), key=_order, default=None)


def first_cause(
    said: Iterable[FirstCause | None], *, away: Sequence[str], stopped: Sequence[tuple[str, int]]
) -> FirstCause | None:
    """The first cause by all that is known, None where nobody `said` anything. `away`: nodes that are not heard, and
    have reported no error. `stopped`: node and rank of each process that is stopped, by its own agent."""
    told = first_of(said)
    if told is None:
        return None
    if told.known > Known.NODE and len(away) == 1:
        return FirstCause(FailedPart.NODE, away[0], step=told.step)
    if told.known > Known.STOPPED and len(stopped) == 1:
        return FirstCause(FailedPart.RANK, *stopped[0], step=told.step)
    return told


def stood_in_the_way(
    reason: Reason | None, away: Sequence[str], stopped: Sequence[tuple[str, int]]
) -> FirstCause | None:
    """What an attempt waited for that only ran out of time: None where all its nodes are heard and all its ranks go on,
    and where it ended of something else."""
    if reason is None or reason.phase != OUT_OF_TIME:
        return None
    found = first_cause([FirstCause(FailedPart.PEER)], away=away, stopped=stopped)
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


def _order(cause: FirstCause) -> tuple[Known, bool, str, float, float, str]:
    """A total order: who is named comes before who is not, and a later step before an earlier one."""
    rank, step = inf if cause.rank is None else cause.rank, -1 if cause.step is None else cause.step
    return cause.known, cause.node is None, cause.node or "", rank, -step, f"{cause.signal} {cause.exit_code}"
