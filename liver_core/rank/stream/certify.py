"""How the ranks of a live handoff agree that the state has arrived: everybody hashes at one version announced ahead.

The first target announces a version once every target has converged, adds up what sources and targets say of it, and
writes the verdict, which is the same for all. Whoever cannot stream writes the verdict STOP_AND_COPY with its reason;
the first verdict stands. No collective is used, so that nothing here meets the collectives of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from liver_core.certificate import MASK
from liver_core.handoff.messages import Rung
from liver_core.layout import Manifest, from_json, to_json
from liver_core.rank.active_world import Verdict
from liver_core.rank.store_exchange import Exchange
from liver_core.rank.stream.source_stream import SourceStream
from liver_core.rank.stream.target_stream import LiveTarget
from liver_core.state.live_state import state_kinds

ATTEMPTS_MAX = 8
NOTICE_S = 0.1
"""Least time between the first announcement and its version: every rank must have heard of it by then. Doubles with
each announcement that somebody heard of too late."""


class CertificateRefused(RuntimeError):
    """What arrived is not what the sources had; the text names parameter and kind."""


def propose_verdict(exchange: Exchange, verdict: Verdict) -> None:
    """Write the verdict unless there is one."""
    exchange.settle("verdict", to_json(verdict))


def read_verdict(exchange: Exchange) -> Verdict | None:
    """The verdict, None while there is none."""
    found = exchange.peek("verdict")
    return None if found is None else from_json(Verdict, found)


class Hashing(Protocol):
    """A stream that hashes at an announced version: of a source, or of a target."""

    def announce(self, version: int) -> None: ...

    def hashed(self, version: int) -> list[int] | int | None: ...


class Answers:
    """What the streams of one rank say of each version announced. `streams`: by "source/RANK" and "target/RANK".
    `advance` never waits."""

    def __init__(self, exchange: Exchange, streams: Mapping[str, Hashing]) -> None:
        self._exchange = exchange
        self._streams = streams
        self._attempt = 1
        self._announced = 0
        self._due: dict[str, Hashing] = {}

    def advance(self) -> None:
        """Say what is known by now."""
        if not self._due:
            found = self._exchange.peek(f"certify/{self._attempt}")
            if found is None:
                return
            self._announced, self._due = int(found), dict(self._streams)
            for stream in self._due.values():
                stream.announce(self._announced)
        for name, stream in tuple(self._due.items()):
            answer = stream.hashed(self._announced)
            if answer is not None:
                self._exchange.post(f"certified/{self._attempt}/{name}", answer)
                del self._due[name]
        self._attempt += not self._due


class Certifier:
    """One target's part; the first target's is also to announce and to add up. `advance` never waits."""

    def __init__(
        self,
        exchange: Exchange,
        stream: LiveTarget,
        manifest: Manifest,
        *,
        rank: int,
        sources: int,
        targets: int,
        beside: SourceStream | None = None,
        steps_outlast: bool = False,
    ) -> None:
        """`rank` is the target's; `beside`: the source in the same process, which knows how long a version stands.

        `steps_outlast`: a step takes longer than there is time, so that only the version where all stand can be met.
        """
        self._steps_outlast = steps_outlast
        self._beside = beside
        self._exchange = exchange
        self._stream = stream
        self._manifest = manifest
        self._rank = rank
        self._names = [f"source/{index}" for index in range(sources)] + [f"target/{index}" for index in range(targets)]
        self._sources = sources
        self._targets = targets
        self._counted = False
        self._leading: int | None = None
        self._lead_attempt = 1
        self._given = 0
        self._late: dict[str, int] = {}

    def advance(self) -> None:
        """Do what can be done now. Raises CertificateRefused."""
        if not self._counted and self._stream.converged:
            self._counted = True
            self._exchange.count("converged", 1)
        if self._rank == 0:
            self._lead()

    def _lead(self) -> None:
        if self._leading is None:
            if self._exchange.count("converged", 0) >= self._targets:
                self._announce()
            return
        keys = [f"certified/{self._lead_attempt}/{name}" for name in self._names]
        if not self._exchange.there(keys):
            return
        answers: dict[str, Any] = {name: self._exchange.peek(key) for name, key in zip(self._names, keys, strict=True)}
        version, self._leading, self._lead_attempt = self._leading, None, self._lead_attempt + 1
        self._late = {name: late for name, late in answers.items() if isinstance(late, int)}
        if not self._late:
            propose_verdict(self._exchange, self._compared(version, list(answers.values())))

    def _announce(self) -> None:
        if self._lead_attempt > ATTEMPTS_MAX:
            late = ", ".join(f"{name} by {steps}" for name, steps in self._late.items())
            reason = f"no version was met by all ranks in {ATTEMPTS_MAX} announcements; too late for the last: {late}"
            propose_verdict(self._exchange, Verdict(Rung.STOP_AND_COPY, reason))
            return
        self._given = self._ahead()
        self._leading = self._stream.version + self._given
        self._exchange.post(f"certify/{self._lead_attempt}", self._leading)

    def _ahead(self) -> int:
        """How many steps from this target's version: to where the sources stand, if they still will when all have
        heard, else to where all will get after it.
        """
        lag, notice_s = self._stream.lag, NOTICE_S * 2 ** (self._lead_attempt - 1)
        beside, step_s = self._beside, self._stream.step_s
        if beside is not None and not self._late and beside.stands_for_s(self._stream.version + lag) > NOTICE_S:
            return lag
        if self._steps_outlast and not 0 < step_s <= notice_s:
            return lag
        # Before a step was heard of, nobody knows how long one takes; then half the notice is a guess like any.
        steps = math.ceil(notice_s / (step_s or NOTICE_S / 2))
        # A step may be longer than the notice, and this target further behind than it knows.
        return max(lag + steps, self._given + max(self._late.values(), default=0) + 1)

    def _compared(self, version: int, parts: list[list[int]]) -> Verdict:
        sums = [[sum(column) & MASK for column in zip(*some, strict=True)] for some in self._sides(parts)]
        kinds = state_kinds(self._manifest)
        names = [f"{spec.name}/{kind}" for kind in kinds for spec in self._manifest.parameters]
        bad = [name for name, ours, theirs in zip(names, *sums, strict=True) if ours != theirs]
        if bad:
            raise CertificateRefused(f"{len(bad)} differ at version {version}, first {bad[0]}")
        return Verdict(Rung.LIVE, version=version, certificate=f"{sum(sums[0]) & MASK:016x}")

    def _sides(self, parts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        return parts[: self._sources], parts[self._sources :]
