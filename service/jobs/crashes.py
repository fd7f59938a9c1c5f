"""Whether a job dies of the same error after the same step again and again, so that a restart cannot help. Pure."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agent.protocol.process_end import ProcessEnd
from liver_core.handoff import FailedPart, FailureCause
from service.jobs.causes import FirstCause, blamed_in, cause_of_rank, end_of, said_of

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
KINDS_MAX = 16
HANG_KIND = "stands still"
"""The kind of a world that made no step, whichever rank stood still."""
TEXT_CHARS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class RankError:
    """Why a rank cannot go on. `shown` says which rank as well; `text` is what the rank or its agent reported.
    `blamed`: the node that this names, if it names one."""

    shown: str
    text: str
    node: str | None = None
    rank: int | None = None
    step: int | None = None
    said: FailureCause | None = None
    end: ProcessEnd | None = None
    blamed: str | None = None

    @classmethod
    def of(cls, node: str, rank: Mapping[str, Any]) -> "RankError":
        """Of a rank of this node, as its agent reported it."""
        text, said, end = (rank.get("reason") or {}).get("text", ""), said_of(rank), end_of(rank)
        shown = f"rank {rank['rank']} on node {node} is {rank['stage']}" + f": {text}" * bool(text)
        if said is not None and said.what is FailedPart.NODE:
            shown = text  # Agents ended it, since a node goes: it did as it was told.
        if said is not None and said.what is FailedPart.CHECKPOINT:
            shown = (end.reported if end is not None else "") or text
        return cls(shown, text, node, rank["rank"], rank["step"], said, end, blamed_in(rank))

    @property
    def is_of_a_peer(self) -> bool:
        """Whether the rank only noticed that another one is gone."""
        return self.cause.is_felt

    @property
    def cause(self) -> FirstCause:
        """What this says of the first cause."""
        return cause_of_rank(self.node, self.rank, self.step, self.said, self.end, blamed=self.blamed)

    def kind(self, nodes: tuple[str, ...]) -> str:
        """The error without what differs from one time to the next: process ids, ports, ranks, addresses.

        That a peer is gone is the same error on the same nodes only: otherwise a node may have been taken away.
        """
        ended = self.end is not None and not self.end.is_killed and self.end.reported
        error = ended or self.text
        kind = _NUMBERS.sub("#", error)[:TEXT_CHARS_MAX]
        return f"{kind} on {', '.join(sorted(nodes))}" if self.is_of_a_peer else kind


@dataclass(frozen=True, slots=True)
class Repeated:
    """One kind of error, how often it ended the job, and the newest of them."""

    kind: str
    times: int
    shown: str
    is_of_a_peer: bool


@dataclass(frozen=True, slots=True)
class Crashes:
    """The errors that ended the job after `step`, since it last got further."""

    step: int = 0
    errors: tuple[Repeated, ...] = ()

    def after(self, step: int, errors: tuple[RankError, ...], nodes: tuple[str, ...]) -> "Crashes":
        """The job died once more, after `step`, of these errors. Another step than before starts the count anew."""
        found = {error.kind: error for error in self.errors} if step == self.step else {}
        for kind, error in {error.kind(nodes): error for error in errors}.items():
            times = found[kind].times + 1 if kind in found else 1
            found[kind] = Repeated(kind, times, error.shown[:TEXT_CHARS_MAX], error.is_of_a_peer)
        return Crashes(step, tuple(found.values())[-KINDS_MAX:])

    def hung(self, step: int, shown: str) -> "Crashes":
        """The job stood still after `step`, and is ended."""
        found = {error.kind: error for error in self.errors} if step == self.step else {}
        times = found.pop(HANG_KIND).times + 1 if HANG_KIND in found else 1
        hang = Repeated(HANG_KIND, times, shown[:TEXT_CHARS_MAX], is_of_a_peer=True)
        return Crashes(step, (*found.values(), hang)[-KINDS_MAX:])

    @property
    def hangs(self) -> int:
        """How often the job stood still after `step`."""
        return next((error.times for error in self.errors if error.kind == HANG_KIND), 0)

    def cause(self, times: int) -> str | None:
        """The error to name if one kind ended the job so often, else None. The rank that failed knows more than those
        that miss it."""
        if max((error.times for error in self.errors), default=0) < times:
            return None
        return max(self.errors, key=lambda error: (not error.is_of_a_peer, error.times)).shown

    def as_json(self) -> dict[str, Any]:
        """To be stored."""
        return asdict(self)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Crashes":
        """From what was stored; empty if nothing was."""
        return cls(stored.get("step", 0), tuple(Repeated(**error) for error in stored.get("errors", ())))
