"""The cutover of one rank: carries out what `liver_core.handoff.Cutover` decides, in the main thread, at the boundary.

Stop-and-copy: training stands still from the agreed boundary to the decision. Masters and moments are read first and
certified, gradients second, so that a source lost in between still leaves a version from which the batch can be redone.
Everything that can fail here ends as an event of the machine; nothing of g is written before GO has been read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
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
    RedoBatchInTarget,
    Release,
    StateRead,
    StoreUnreachable,
    Tick,
)
from liver_core.handoff.messages import Decision, Reason
from liver_core.tensors.megatron import GRAD
from liver_core.tensors.step import measure_gradients
from liver_core.training.exchange import ExchangeTimeout
from liver_core.training.prepare import ActiveWorld, NextWorld
from liver_core.transport.protocol import TransportError

Ending = ApplyStepInTarget | RedoBatchInTarget | ApplyStepInSource | Leave | FallToCheckpoint | Release
Probe = Callable[[str], None]


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
    version, small state, totals of the step."""

    def __init__(
        self,
        following: NextWorld,
        active: ActiveWorld | None,
        machine: Cutover,
        *,
        boundary_of: Callable[[], dict[str, Any]],
        probe: Probe = lambda point: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.following = following
        self.active = active
        self.machine = machine
        self.boundary_of = boundary_of
        self.probe = probe
        self.clock = clock
        self.boundary = following.boundary
        self.measures: dict[str, float] = {}
        self.decision = Decision.UNDECIDED
        self.grad_norm: float | None = None
        self.certificates: dict[str, torch.Tensor] = {}
        self.source_lost: Reason | None = None
        self._until = 0.0

    def run(self, version: int) -> Outcome:
        """From the agreed boundary to an ending. Bounded by the machine's deadlines; never raises for what peers do."""
        effects: deque[CutoverEffect] = deque(self.machine.handle(BoundaryAgreed(version), self.clock()))
        while True:
            if not effects:
                time.sleep(max(0.0, min(self.machine.next_deadline - self.clock(), 0.05)))
                effects.extend(self.machine.handle(Tick(), self.clock()))
                continue
            effect = effects.popleft()
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
        """Source: publish this boundary. Target: read masters and moments, then gradients."""
        self._until = until
        self.probe("boundary")
        try:
            state_kinds, _ = self._kinds()
            if self.following.request.source is None:
                return StateRead(Level.STATE, source_lost=True)
            self._publish(state_kinds)
            if self.following.world is None:
                self._publish_gradients()
                return StateRead(Level.EVERYTHING)
            self._fetch(state_kinds)
            self.probe("state read")
        except _Lost as lost:
            return StateRead(Level.NOTHING, source_lost=lost.source, reason=lost.reason)
        try:
            self._publish_gradients()
            self._fetch((GRAD,))
            self.probe("gradients read")
        except _Lost as lost:
            return StateRead(Level.STATE, source_lost=lost.source, reason=lost.reason)
        return StateRead(Level.EVERYTHING)

    def _kinds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        manifest = self.following.manifest
        assert manifest is not None
        names = tuple(kind.name for kind in manifest.kinds)
        return tuple(name for name in names if name != GRAD), (GRAD,)

    def _publish(self, kinds: Sequence[str]) -> None:
        """As a source: say that the boundary is reached, then what the state hashes to."""
        if self.following.source_rank is None:
            return
        self.boundary = self.boundary_of()
        if self.following.source_rank == 0:
            self._post("boundary", self.boundary)
        self._post_certificate("state", kinds)

    def _publish_gradients(self) -> None:
        """As a source: measure the gradients and publish norm and certificate; a newcomer waits for the norm."""
        if self.following.source_rank is None:
            self.boundary["norm"] = self._wait("norm")
            return
        assert self.active is not None
        self.probe("norm")
        norm = self._collective("gradient norm", lambda: measure_gradients(self.active.state))  # type: ignore[union-attr]
        self._post_certificate("gradients", (GRAD,))
        if self.following.source_rank == 0:
            self._post("norm", norm)
        self.boundary["norm"] = self.grad_norm = norm

    def _post_certificate(self, name: str, kinds: Sequence[str]) -> None:
        """All-reduce the source world's certificate; its rank 0 posts it for newcomers."""
        assert self.active is not None and self.following.source_certificate is not None
        started = self.clock()
        part = self._hashed(self.following.source_certificate, self.active.live.regions, kinds)
        whole = self._collective(f"{name} certificate", lambda: self._summed(part, self.active.world.everyone))  # type: ignore[union-attr]
        self.certificates[name] = whole
        if self.following.source_rank == 0:
            self._post(f"certificate/{name}", whole.tolist())
        self._add("certify_source_s", started)

    def _fetch(self, kinds: Sequence[str]) -> None:
        """As a target: everything of these kinds, from this process and from the other sources."""
        following = self.following
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
            report = following.transport.read(reads, self._deadline())
        except TransportError as error:
            raise _Lost(self._reason("read", str(error), tile=error.kind or ""), source=True) from error
        self.measures["bytes_moved"] = self.measures.get("bytes_moved", 0.0) + report.bytes
        self.measures["read_s"] = self.measures.get("read_s", 0.0) + report.seconds

    # Certificates, barrier, decision.

    def _compared(self) -> CertificateCompared:
        """Compare, over the whole target world, what arrived with what the source world had."""
        if self.following.world is None or self.following.request.source is None:
            return CertificateCompared(equal=True)
        self.probe("certificate")
        state_kinds, grad_kinds = self._kinds()
        try:
            bad = self._mismatches("state", state_kinds)
            if self.grad_norm is not None or self.following.source_rank is None:
                bad += self._mismatches("gradients", grad_kinds)
        except _Lost as lost:
            return CertificateCompared(equal=False, reason=lost.reason)
        if bad:
            return CertificateCompared(
                equal=False, reason=self._reason("certificate", f"{len(bad)} differ, first {bad[0]}", tile=str(bad[0]))
            )
        return CertificateCompared(equal=True)

    def _mismatches(self, name: str, kinds: Sequence[str]) -> list[str]:
        """Parameter/kind pairs whose sums over the target world are not those of the source world."""
        following = self.following
        assert following.world is not None and following.live is not None and following.certificate is not None
        started = self.clock()
        part = self._hashed(following.certificate, following.live.regions, kinds)
        try:
            arrived = self._summed(part, following.world.everyone)
        except RuntimeError as error:
            raise _Lost(self._reason("certificate", f"a target is gone: {_short(error)}"), source=False) from error
        expected = self.certificates.get(name)
        if expected is None:
            expected = self.certificates[name] = torch.tensor(self._wait(f"certificate/{name}"), dtype=torch.int64)
        self._add("certify_target_s", started)
        assert following.manifest is not None
        names = [(spec.name, kind) for kind in kinds for spec in following.manifest.parameters]
        return [
            f"{parameter}/{kind}"
            for (parameter, kind), same in zip(names, (arrived == expected).tolist(), strict=True)
            if not same
        ]

    def _barrier(self, level: Level, until: float) -> BarrierPassed | BarrierFailed:
        assert self.following.world is not None
        self.probe("barrier")
        lowest = torch.tensor([int(level)], dtype=torch.int64)
        try:
            work = dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self.following.world.everyone, async_op=True)
            work.wait(timedelta(seconds=max(0.05, until - self.clock())))  # type: ignore[union-attr]
        except RuntimeError as error:
            return BarrierFailed(self._reason("barrier", f"not all ranks of the next world came: {_short(error)}"))
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

    def _summed(self, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(part, group=group)
        return part

    def _collective(self, what: str, action: Callable[[], Any]) -> Any:
        """Run a collective of g; a source that is gone shows as an error of it."""
        try:
            return action()
        except RuntimeError as error:
            raise _Lost(self._reason(what, f"a source is gone: {_short(error)}"), source=True) from error

    def _post(self, name: str, value: Any) -> None:
        try:
            self.following.exchange.post(name, value)
        except ExchangeTimeout as error:
            raise _Lost(self._reason(name, str(error)), source=False) from error

    def _wait(self, name: str) -> Any:
        try:
            return self.following.exchange.wait(name, self._deadline())
        except ExchangeTimeout as error:
            raise _Lost(self._reason(name, str(error)), source=True) from error

    def _deadline(self) -> float:
        return self._until

    def _reason(self, phase: str, text: str, tile: str = "") -> Reason:
        return Reason(text=text, phase=phase, rank=self.machine.rank, tile=tile)

    def _add(self, name: str, started: float) -> None:
        self.measures[name] = self.measures.get(name, 0.0) + self.clock() - started

    def _certificate_text(self) -> str:
        whole = self.certificates.get("state")
        return "" if whole is None else f"{int(whole.sum()) & (2**64 - 1):016x}"


class _Lost(Exception):
    """Something needed is gone; `source` when it is a source rank."""

    def __init__(self, reason: Reason, *, source: bool) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.source = source


def _copy_runs(source: torch.Tensor, target: torch.Tensor, runs) -> None:
    """Copy strided runs of elements between two flat tensors of one process."""
    for run in runs:
        shape = (run.count, run.length)
        into = target.as_strided(shape, (run.target_stride, 1), target.storage_offset() + run.target_offset)
        into.copy_(source.as_strided(shape, (run.source_stride, 1), source.storage_offset() + run.source_offset))


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:300]
