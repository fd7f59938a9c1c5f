"""The cutover of one rank: carries out what `liver_core.handoff.Cutover` decides, in the main thread, at the boundary.

Stop-and-copy: training stands still from the agreed boundary to the decision. Masters and moments are read first and
certified, gradients second, so that a source lost in between still leaves a version from which the batch can be redone.
Everything that can fail here ends as an event of the machine; nothing of g is written before GO has been read.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from liver_core.certificate import CertificatePlan
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    BarrierFailed,
    BarrierPassed,
    BoundaryAgreed,
    CertificateCompared,
    CompareCertificates,
    Cutover,
    CutoverEffect,
    CutoverEvent,
    DecisionRead,
    EnterBarrier,
    FallToCheckpoint,
    Leave,
    Level,
    ProposeDecision,
    ReadDecision,
    ReadState,
    RedoBatchInSource,
    RedoBatchInTarget,
    Release,
    StateRead,
    StoreUnreachable,
    Tick,
)
from liver_core.handoff.messages import Decision, Reason
from liver_core.tensors.buckets import collect_gradients
from liver_core.tensors.megatron import GRAD
from liver_core.tensors.step import measure_gradients
from liver_core.training.exchange import ExchangeTimeout
from liver_core.training.next_world import ActiveWorld, NextWorld
from liver_core.training.target_stream import StreamFailed
from liver_core.transport.protocol import TransportError
from liver_core.worlds.groups import limited, plainly

TrainOn = ApplyStepInSource | RedoBatchInSource
Ending = ApplyStepInTarget | RedoBatchInTarget | TrainOn | Leave | FallToCheckpoint | Release
Probe = Callable[[str], None]

# By when, in parts of the seconds that a target has, reading and comparing must be over: the rest is for the barrier.
_READING_SHARE = 0.7
_COMPARING_SHARE = 0.85

IN_PAUSE_POLL_S = 0.002
"""How late a newcomer may see what the source world posts while training stands still."""


@dataclass(slots=True)
class Outcome:
    """How the cutover ended on this rank; `boundary` is what the source world posted (norm, small state)."""

    ending: Ending
    decision: Decision
    boundary: dict[str, Any]
    measures: dict[str, float] = field(default_factory=dict)
    certificate: str = ""


class CutoverRun:
    """One rank's cutover. `boundary_of` gives, on a source, what holds at this boundary and is equal on all its ranks:
    version, small state, totals of the step. `chain`: what the gradients streamed until then sum to over the source
    world, None where that was not learned at the boundary."""

    def __init__(
        self,
        following: NextWorld,
        active: ActiveWorld | None,
        machine: Cutover,
        *,
        boundary_of: Callable[[], dict[str, Any]],
        chain: int | None = None,
        probe: Probe = lambda point: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.following = following
        self.active = active
        self.machine = machine
        self.boundary_of = boundary_of
        self.chain = chain
        self.probe = probe
        self.clock = clock
        self.boundary = following.boundary
        self.measures: dict[str, float] = {}
        self.decision = Decision.UNDECIDED
        self.certificates: dict[str, torch.Tensor] = {}
        self.problems: list[_Lost] = []
        self.source_broken: Reason | None = None
        self._held = Level.NOTHING
        self._joined = False
        self._refused: Reason | None = None
        self._until = self._compare_until = 0.0
        self._version = 0
        self._dropped = False

    def run(self, boundary: BoundaryAgreed) -> Outcome:
        """From the agreed boundary to an ending. Bounded by the machine's deadlines; never raises for what peers do."""
        self._dropped = boundary.dropped
        effects: deque[CutoverEffect] = deque(self.machine.handle(boundary, self.clock()))
        while True:
            if not effects:
                time.sleep(max(0.0, min(self.machine.next_deadline - self.clock(), 0.05)))
                effects.extend(self.machine.handle(Tick(), self.clock()))
                continue
            effect = effects.popleft()
            if isinstance(effect, TrainOn) and self.source_broken is not None:
                effect = FallToCheckpoint(self.source_broken)
            elif isinstance(effect, TrainOn) and self.problems and self.following.target_rank is None:
                # The machine of a rank that only gives knows the others' vote; why that failed, this rank knows better.
                effect = type(effect)(self.problems[0].reason)
            if isinstance(effect, Ending):
                return Outcome(effect, self.decision, self.boundary, self.measures, self._certificate_text())
            event = self._timed(effect)
            effects.extend(self.machine.handle(event, self.clock()))

    def _timed(self, effect: CutoverEffect) -> CutoverEvent:
        started = self.clock()
        event = self._carry_out(effect)
        name = f"{_snake(type(effect).__name__)}_s"
        self.measures[name] = self.measures.get(name, 0.0) + self.clock() - started
        return event

    def _carry_out(self, effect: CutoverEffect) -> CutoverEvent:
        match effect:
            case ReadState(version=version, until=until):
                return self._read_state(version, until)
            case CompareCertificates():
                return self._compared()
            case EnterBarrier(level=level, until=until):
                return self._barrier(level, until)
            case ProposeDecision(wish=wish):
                self.probe("propose")
                return self._ask(lambda: self.following.exchange.decide(wish))
            case ReadDecision(not_before=not_before):
                time.sleep(max(0.0, not_before - self.clock()))
                return self._ask(self.following.exchange.decision)
            case _:
                raise AssertionError(f"{effect} ends the cutover and is not carried out here")

    # Reading.

    def _read_state(self, version: int, until: float) -> StateRead:
        """Source: publish this boundary. Target: read masters and moments, then gradients unless the step was dropped.

        What a rank owes the source world it does whatever happens to it as a target: every living source runs the same
        collectives, so that on NO-GO the source world still stands.
        """
        started = self.clock()
        self._until = started + _READING_SHARE * (until - started)
        self._compare_until = started + _COMPARING_SHARE * (until - started)
        self.probe("boundary")
        following = self.following
        if following.request.source is None:
            self._held = Level.STATE
            return StateRead(self._held, source_lost=True)
        self._version = version
        state_kinds, grad_kinds = self._kinds()
        published = self._tried(lambda: self._publish(state_kinds))
        if following.streams:
            has_state = published and self._tried(self._catch_up)
        else:
            has_state = published and self._tried(lambda: self._fetch(state_kinds))
        if has_state:
            self._held = Level.STATE
            self.probe("state read")
        measured = published and not self._dropped and self._tried(self._publish_gradients)
        if has_state and measured and self._tried(lambda: self._fetch(grad_kinds)):
            self._held = Level.EVERYTHING
            self.probe("gradients read")
        source_lost = any(problem.source for problem in self.problems)
        return StateRead(self._held, source_lost, self.problems[0].reason if self.problems else None)

    def _tried(self, action: Callable[[], None]) -> bool:
        """Whether it could be done; what was lost is remembered, and a source tells the others of a lost source."""
        try:
            action()
        except _Lost as lost:
            self.problems.append(lost)
            if lost.source and self._speaks:
                with contextlib.suppress(_Lost):
                    self._post("lost", lost.reason.text)
            return False
        return True

    def _kinds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        manifest = self.following.manifest
        assert manifest is not None
        names = tuple(kind.name for kind in manifest.kinds)
        return tuple(name for name in names if name != GRAD), (GRAD,)

    @property
    def _speaks(self) -> bool:
        """Whether this rank posts for the source world: its rank 0 and its first survivor, so that one may die."""
        request, rank = self.following.request, self.following.source_rank
        if request.source is None or rank is None:
            return False
        survivors = [index for index, member in enumerate(request.source.members) if member in request.target.members]
        return rank == 0 or rank in survivors[:1]

    def _publish(self, kinds: Sequence[str]) -> None:
        """As a source: say that the boundary is reached, then what the state hashes to."""
        if self.following.source_rank is None:
            return
        self.boundary = self.boundary_of()
        # A store that is gone must not keep this rank out of the collectives that the others enter.
        spoken = self._tried(lambda: self._speak("boundary", self.boundary))
        if self.chain is None or not self.following.streams:
            self._certify_source("state", self._source_state(kinds))
        else:
            self.certificates["state"] = _word(self.chain)
            spoken &= self._tried(lambda: self._speak("certificate/state", self.certificates["state"].tolist()))
        if not spoken:
            raise self.problems[-1]

    def _source_state(self, kinds: Sequence[str]) -> torch.Tensor:
        """As a source: the part of this rank in what the state hashes to. Where it streamed it was certified at the
        announced version, and only the gradients of the steps since then are left to be compared."""
        following = self.following
        assert self.active is not None and following.source_certificate is not None
        if not following.streams:
            return self._hashed(following.source_certificate, self.active.live.regions, kinds)
        assert following.source_stream is not None and following.verdict is not None
        try:
            return _word(following.source_stream.chain(following.verdict.version, self._version, self._until))
        except TimeoutError as error:
            # The others wait in the collective; what this rank adds there makes the comparison fail.
            self.problems.append(_Lost(self._reason("certificate", str(error)), source=False))
            return _word(1)

    def _publish_gradients(self) -> None:
        """As a source: measure the gradients and publish norm and certificate; a newcomer waits for the norm."""
        if self.following.source_rank is None:
            self.boundary["norm"] = self._wait("norm")
            return
        assert self.active is not None
        self.probe("norm")
        state = self.active.state
        norm = self._collective("gradient norm", lambda: measure_gradients(state))
        started = self.clock()
        collect_gradients(self.active.live)
        assert self.following.source_certificate is not None
        hashed = self._hashed(self.following.source_certificate, self.active.live.regions, (GRAD,))
        self._add("hash_source_s", started)
        self._certify_source("gradients", hashed)
        self._speak("norm", norm)
        self.boundary["norm"] = norm

    def _certify_source(self, name: str, whole: torch.Tensor) -> None:
        """Sum the source world's certificate over its ranks and post it for newcomers."""
        assert self.active is not None
        started = self.clock()
        everyone = self.active.world.everyone
        self._collective(f"{name} certificate", lambda: dist.all_reduce(whole, group=everyone))
        self.certificates[name] = whole
        self._speak(f"certificate/{name}", whole.tolist())
        self._add("certify_source_s", started)

    def _catch_up(self) -> None:
        """As a target of a stream: reach the version of this boundary, which is at most one step away."""
        stream = self.following.target_stream
        if stream is None:
            return
        started = self.clock()
        try:
            stream.finish(self._version, self._until)
        except StreamFailed as error:
            raise _Lost(self._reason("catch up", str(error)), source=False) from error
        finally:
            self._add("catch_up_s", started)
        self.measures |= stream.measures()
        self.measures["bytes_moved"] = self.measures["bytes_streamed"]

    def _fetch(self, kinds: Sequence[str]) -> None:
        """As a target: everything of these kinds, from this process and from the other sources."""
        following = self.following
        if following.world is None:
            return
        assert following.plan is not None and following.live is not None
        started = self.clock()
        if following.plan.local is not None and self.active is not None:
            for kind in kinds:
                _copy_runs(self.active.live.regions[kind], following.live.regions[kind], following.plan.local.runs)
        self._add("copy_local_s", started)
        reads = following.reads(kinds)
        if not reads:
            return
        assert following.transport is not None
        try:
            report = following.transport.read(reads, self._until)
        except TransportError as error:
            raise _Lost(self._reason("read", str(error), tile=error.kind or ""), source=True) from error
        self.measures["bytes_moved"] = self.measures.get("bytes_moved", 0.0) + report.bytes
        if following.streams:
            self.measures["gradient_bytes_at_cutover"] = float(report.bytes)
        self.measures["read_s"] = self.measures.get("read_s", 0.0) + report.seconds

    # Certificates, barrier, decision.

    def _compared(self) -> CertificateCompared:
        """Compare, over the whole target world, what arrived with what the source world had."""
        if self.following.world is None or self.following.request.source is None:
            return CertificateCompared(equal=True)
        self.probe("certificate")
        started, self._until = self.clock(), self._compare_until
        try:
            bad = self._mismatches()
        except _Lost as lost:
            self._refused = lost.reason
            return CertificateCompared(equal=False, reason=lost.reason)
        finally:
            self._add("certify_target_s", started)
        if bad:
            self._refused = self._reason("certificate", f"{len(bad)} differ, first {bad[0]}", tile=bad[0])
            return CertificateCompared(equal=False, reason=self._refused)
        return CertificateCompared(equal=True)

    def _mismatches(self) -> list[str]:
        """Parameter/kind pairs whose sums over the target world are not those of the source world."""
        following = self.following
        assert following.world is not None and following.manifest is not None
        state_kinds, _ = self._kinds()
        arrived, with_state, with_gradients = self._arrived()
        size = following.world.layout.world_size
        if with_state < size:
            raise _Lost(
                self._reason("certificate", f"only {with_state} of {size} targets hold the state"), source=False
            )
        parameters = following.manifest.parameters
        names = [f"{spec.name}/{kind}" for kind in state_kinds for spec in parameters]
        if following.streams:
            names = ["gradients of the steps streamed"]
        expected = self._expected("state")
        if with_gradients == size:
            expected = torch.cat([expected, self._expected("gradients")])
            names += [f"{spec.name}/{GRAD}" for spec in parameters]
        same = (arrived[: len(expected)] == expected).tolist()
        return [name for name, equal in zip(names, same, strict=True) if not equal]

    def _arrived(self) -> tuple[torch.Tensor, int, int]:
        """The certificate of what the target world holds, and how many of its ranks hold state and gradients.

        One collective, the same on every target however much it holds: state, gradients (zeros where they are not
        here), two counts.
        """
        following = self.following
        assert following.world is not None and following.live is not None and following.certificate is not None
        levels = (Level.STATE, Level.EVERYTHING)
        gradients = self._hashed(following.certificate, following.live.regions, (GRAD,))
        parts = [
            part * (self._held >= level) for part, level in zip((self._target_state(), gradients), levels, strict=True)
        ]
        counts = torch.tensor([self._held >= level for level in levels], dtype=torch.int64)
        whole, group = torch.cat([*parts, counts]), following.world.everyone
        self._joined = True
        try:
            with limited(group, self._left()):
                dist.all_reduce(whole, group=group)
        except RuntimeError as error:
            raise _Lost(self._reason("certificate", f"a target is gone: {plainly(error)}"), source=False) from error
        return whole[:-2], int(whole[-2]), int(whole[-1])

    def _target_state(self) -> torch.Tensor:
        """As a target: the part of this rank in what `_source_state` is compared with."""
        following = self.following
        assert following.certificate is not None and following.live is not None
        if not following.streams:
            return self._hashed(following.certificate, following.live.regions, self._kinds()[0])
        assert following.target_stream is not None and following.verdict is not None
        return _word(following.target_stream.chain(following.verdict.version, self._version))

    def _expected(self, name: str) -> torch.Tensor:
        """What the source world's certificate says; a newcomer reads it from the store."""
        if name not in self.certificates:
            self.certificates[name] = torch.tensor(self._wait(f"certificate/{name}"), dtype=torch.int64)
        return self.certificates[name]

    def _barrier(self, level: Level, until: float) -> BarrierPassed | BarrierFailed:
        assert self.following.world is not None
        self.probe("barrier")
        self._until = until
        lowest, group = torch.tensor([int(level)], dtype=torch.int64), self.following.world.everyone
        try:
            if not self._joined and self.following.request.source is not None:
                # Whoever holds nothing never compared; the others wait for its part of the certificate.
                self._arrived()
            with limited(group, self._left()):
                dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        except RuntimeError as error:
            reason = self._reason("barrier", f"not all ranks of the next world came: {plainly(error)}")
            return BarrierFailed(self._refused or reason)
        except _Lost as lost:
            return BarrierFailed(self._refused or lost.reason)
        return BarrierPassed(Level(int(lowest.item())))

    def _ask(self, question: Callable[[], Decision]) -> DecisionRead | StoreUnreachable:
        try:
            self.decision = question()
        except ExchangeTimeout as error:
            return StoreUnreachable(self._reason("decision", str(error)))
        return DecisionRead(self.decision)

    # Small things.

    def _hashed(self, plan: CertificatePlan, regions: Mapping[str, torch.Tensor], kinds: Sequence[str]) -> torch.Tensor:
        """int64 [kinds x parameters]: this rank's part of the certificate, to be summed over its world modulo 2^64."""
        parts = [torch.from_numpy(plan.sums(regions[kind], kind).view("int64")) for kind in kinds]
        return torch.cat(parts)

    def _collective(self, what: str, action: Callable[[], Any]) -> Any:
        """Run a collective of g; a source that is gone, or does not come in time, shows as an error of it."""
        assert self.active is not None
        try:
            with limited(self.active.world.everyone, self._left()):
                return action()
        except RuntimeError as error:
            self.source_broken = self._reason(what, f"a source is gone: {plainly(error)}")
            raise _Lost(self.source_broken, source=True) from error

    def _speak(self, name: str, value: Any) -> None:
        if self._speaks:
            self._post(name, value)

    def _post(self, name: str, value: Any) -> None:
        try:
            self.following.exchange.post(name, value)
        except ExchangeTimeout as error:
            raise _Lost(self._reason(name, str(error)), source=False) from error

    def _wait(self, name: str) -> Any:
        """What the source world posts under `name`; it posts "lost" instead when it has lost a rank."""
        try:
            found, value = self.following.exchange.wait_any((name, "lost"), self._until, poll_s=IN_PAUSE_POLL_S)
        except ExchangeTimeout as error:
            raise _Lost(self._reason(name, str(error)), source=True) from error
        if found != name:
            raise _Lost(self._reason(name, f"the source world says: {value}"), source=True)
        return value

    def _left(self) -> float:
        return self._until - self.clock()

    def _reason(self, phase: str, text: str, tile: str = "") -> Reason:
        return Reason(text=text, phase=phase, rank=self.machine.rank, tile=tile)

    def _add(self, name: str, started: float) -> None:
        self.measures[name] = self.measures.get(name, 0.0) + self.clock() - started

    def _certificate_text(self) -> str:
        if self.following.verdict is not None and self.following.streams:
            return self.following.verdict.certificate
        whole = self.certificates.get("state")
        return "" if whole is None else f"{int(whole.sum()) & (2**64 - 1):016x}"


class _Lost(Exception):
    """Something needed is gone; `source` when it is a source rank."""

    def __init__(self, reason: Reason, *, source: bool) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.source = source


def _word(value: int) -> torch.Tensor:
    """int64 [1] with the bits of an unsigned 64-bit number."""
    return torch.tensor([value - 2**64 if value >= 2**63 else value], dtype=torch.int64)


def _copy_runs(source: torch.Tensor, target: torch.Tensor, runs) -> None:
    """Copy strided runs of elements between two flat tensors of one process."""
    for run in runs:
        shape = (run.count, run.length)
        into = target.as_strided(shape, (run.target_stride, 1), target.storage_offset() + run.target_offset)
        into.copy_(source.as_strided(shape, (run.source_stride, 1), source.storage_offset() + run.source_offset))


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")
