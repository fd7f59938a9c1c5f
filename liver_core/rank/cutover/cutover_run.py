"""The cutover of one rank: carries out what `liver_core.handoff.Cutover` decides, in the main thread, at the boundary.

Training pauses from the agreed boundary to the decision. Targets read and certify masters and moments first, gradients
second. So if a source is lost in between, a version remains from which the batch can be redone. Every failure here
becomes an event of the machine. Nothing of the old world is written before GO has been read.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from liver_core.certificate import MASK
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    BarrierFailed,
    BarrierPassed,
    CertificateCompared,
    CompareCertificates,
    ComparisonFailed,
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
    StateRead,
    StoreUnreachable,
    Tick,
)
from liver_core.handoff.messages import Decision, FailedPart, FailureCause, Reason
from liver_core.layout import stage_of_layer
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.cutover.source_side import Lost, Pause, SourceSide, hashed, step_tensors_key, word, words
from liver_core.rank.cutover.vote import Counted, count
from liver_core.rank.next_world import NextWorld
from liver_core.rank.step_boundary import StepTotals
from liver_core.rank.store_exchange import ExchangeTimeout, StoreGone, cause_of
from liver_core.rank.stream.target_stream import StreamFailed
from liver_core.state.live_state import state_kinds
from liver_core.state.megatron_optimizer import GRAD
from liver_core.state.small_state import count_sums
from liver_core.state.step_tensors import BothVersions, StepTensorsMissing, taken, version_sums
from liver_core.streaming.tiles import LOCAL
from liver_core.transport.protocol import Read, TransportError
from liver_core.transport.regions import copy_runs
from liver_core.worlds.groups import limited, plainly

_log = logging.getLogger(__name__)
TrainOn = ApplyStepInSource | RedoBatchInSource
Ending = ApplyStepInTarget | RedoBatchInTarget | TrainOn | Leave | FallToCheckpoint
Probe = Callable[[str], None]

# When these must be over, as shares of a target's time limit: reading the state; all reading, with the source world's
# collectives; comparing. The rest is for the barrier. A rank whose read of the state runs to its limit still has time
# for these collectives. Without it they would fail on all sources, and so break the world that NO-GO goes back to.
STATE_SHARE = 0.5
READING_SHARE = 0.7
COMPARING_SHARE = 0.85


@dataclass(slots=True)
class Outcome:
    """How the cutover ended on this rank. `boundary`: what the source world published (norm, small state)."""

    ending: Ending
    decision: Decision
    boundary: dict[str, Any]
    measures: dict[str, float] = field(default_factory=dict)
    certificate: str = ""


class CutoverRun:
    """One rank's cutover. On a source, `boundary_of` gives what is equal on all its ranks at this boundary: version,
    small state, totals of the step. `totals`: of the step that is handed over, None where it was dropped or where this
    rank did not take part in it. `dead`: which rank of the source world is known to be dead, empty while none is."""

    def __init__(
        self,
        following: NextWorld,
        active: ActiveWorld | None,
        machine: Cutover,
        *,
        boundary_of: Callable[[], dict[str, Any]],
        totals: StepTotals | None = None,
        probe: Probe = lambda point: None,
        dead: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.following = following
        self.active = active
        self.machine = machine
        self.probe = probe
        self.clock = clock
        self.boundary = following.boundary
        self.decision = Decision.UNDECIDED
        self.pause = Pause(following, machine.rank, clock, probe, dead)
        self.source: SourceSide | None = None
        if following.source_rank is not None and active is not None:
            self.source = SourceSide(self.pause, active, boundary_of, totals)
        self._reached = Level.NOTHING
        self._arrived_gradients: torch.Tensor | None = None
        self._joined = self._agreed = False
        self._refused: Reason | None = None
        self._compare_until = 0.0
        self._version = 0
        self._dropped = machine.boundary.dropped

    def run(self) -> Outcome:
        """From the agreed boundary to an ending. The machine's deadlines bound it. Never raises because of a peer."""
        effects: deque[CutoverEffect] = deque(self.machine.begin())
        while True:
            if not effects:
                time.sleep(max(0.0, min(self.machine.next_deadline - self.clock(), 0.05)))
                effects.extend(self.machine.handle(Tick(), self.clock()))
                continue
            effect = effects.popleft()
            if isinstance(effect, TrainOn) and self._source_broken is not None:
                effect = FallToCheckpoint(self._source_broken)
            elif isinstance(effect, TrainOn) and self.pause.problems and self.following.target_rank is None:
                # This rank only gives. Its machine knows the vote of the others, but this rank knows the cause.
                effect = type(effect)(self.pause.problems[0].reason)
            if isinstance(effect, Ending):
                return Outcome(effect, self.decision, self.boundary, self.pause.measures, self._certificate_text())
            event = self._timed(effect)
            effects.extend(self.machine.handle(event, self.clock()))

    def _timed(self, effect: CutoverEffect) -> CutoverEvent:
        started = self.clock()
        event = self._carry_out(effect)
        name = f"{_snake(type(effect).__name__)}_s"
        self.pause.measures[name] = self.pause.measures.get(name, 0.0) + self.clock() - started
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

        A source rank does its part in the source world even if it fails as a target: all living sources run the same
        collectives, so that the source world still works after NO-GO.
        """
        started = self.clock()
        state_until = started + STATE_SHARE * (until - started)
        self.pause.until = started + READING_SHARE * (until - started)
        self._compare_until = started + COMPARING_SHARE * (until - started)
        self.probe("boundary")
        following = self.following
        if following.request.source is None:
            self._reached = Level.STATE
            why = Reason("the world was started and took nothing over", "read")
            return StateRead(self._reached, source_lost=True, reason=why)
        self._version = version
        state_kinds, grad_kinds = self._kinds()
        published = self._tried(lambda: self._publish_state(state_kinds))
        if following.streams:
            has_state = published and self._tried(lambda: self._catch_up(state_until))
        else:
            has_state = published and self._tried(lambda: self._fetch(state_kinds, state_until))
        has_state = has_state and self._tried(self._take_step_tensors)
        if has_state:
            self._reached = Level.STATE
            self.probe("state read")
        measured = published and not self._dropped and self._tried(self._publish_gradients)
        fetched = has_state and measured and self._tried(lambda: self._fetch(grad_kinds, self.pause.until))
        if fetched:
            self.probe("gradients read")
            self._hash_gradients()
        certified = self.source is None or self._tried(self.source.finish_certificate)
        if fetched and certified:
            self._reached = Level.EVERYTHING
        source_lost = any(problem.source for problem in self.pause.problems)
        return StateRead(self._reached, source_lost, self.pause.problems[0].reason if self.pause.problems else None)

    def _tried(self, action: Callable[[], None]) -> bool:
        """Whether `action` succeeded. Stores what was lost; if it is a source, a source rank publishes the loss."""
        try:
            action()
        except Lost as lost:
            _log.warning("handoff %s, cutover: %s", self.following.request.handoff_id, lost)
            self.pause.problems.append(lost)
            if lost.source and self.source is not None:
                with contextlib.suppress(Lost):
                    self.source.publish_lost(lost.reason)
            return False
        return True

    def _kinds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        manifest = self.following.manifest
        assert manifest is not None
        return state_kinds(manifest), (GRAD,)

    def _publish_state(self, kinds: Sequence[str]) -> None:
        if self.source is not None:
            try:
                self.source.publish_state(self._version, kinds)
            finally:
                self.boundary = self.source.boundary

    def _publish_gradients(self) -> None:
        """Source: publish. Newcomer: wait for the norm; once it is published, gradients can be read."""
        if self.source is not None:
            self.source.publish_gradients()
        else:
            self.boundary["norm"] = self.pause.wait("norm")

    def _catch_up(self, until: float) -> None:
        """As a streaming target: reach the version of this boundary, which is at most one step away, by `until`."""
        stream = self.following.target_stream
        if stream is None:
            return
        started = self.clock()
        try:
            stream.finish(self._version, until)
        except StreamFailed as error:
            reason = self.pause.reason("catch up", str(error), cause=cause_of(error))
            raise Lost(reason, source=False) from error
        finally:
            self.pause.add("catch_up_s", started)
        assert self.following.verdict is not None
        if unsummed := stream.unsummed(self.following.verdict.version, self._version):
            raise Lost(self.pause.reason("catch up", unsummed), source=False)
        self.pause.measures |= stream.measures()
        self.pause.measures["bytes_moved"] = self.pause.measures["bytes_streamed"]

    def _take_step_tensors(self) -> None:
        """As a target: what steps change beside parameters, before and after this one, of this rank's layers. Both are
        read before the vote: who has them may be gone after it."""
        following = self.following
        manifest, source, rank = following.manifest, following.request.source, following.target_rank
        assert manifest is not None and source is not None
        if rank is None or not manifest.whole or following.step_tensors is not None:
            return
        target, stage = following.request.target.layout, following.request.target.layout.coordinates(rank).pp
        mine = [spec for spec in manifest.whole if stage_of_layer(manifest, target, spec.layer) == stage]
        before, after = {}, {}
        for source_stage in sorted({stage_of_layer(manifest, source.layout, spec.layer) for spec in mine}):
            given = self.pause.wait(step_tensors_key(source_stage))
            if given["version"] != self.boundary["version"]:
                text = f"of version {given['version']}, not {self.boundary['version']}"
                raise Lost(self.pause.reason("read", text, tile=step_tensors_key(source_stage)), source=True)
            before |= given["before"]
            after |= given["after"]
        try:
            following.step_tensors = BothVersions(taken(mine, before), taken(mine, after))
        except StepTensorsMissing as error:
            raise Lost(self.pause.reason("read", str(error)), source=False) from error

    def _fetch(self, kinds: Sequence[str], until: float) -> None:
        """As a target: get all state of these kinds by `until`, from this process and from the other sources."""
        following = self.following
        if following.world is None:
            return
        assert following.plan is not None and following.live is not None
        started = self.clock()
        if following.plan.local is not None and self.active is not None:
            for kind in kinds:
                read = Read(LOCAL, kind, following.plan.local.runs)
                copy_runs(read, self.active.live.regions[kind], following.live.regions[kind])
        self.pause.add("copy_local_s", started)
        reads = following.reads(kinds)
        if not reads:
            return
        assert following.transport is not None
        try:
            report = following.transport.read(reads, until)
        except TransportError as error:
            reason = self.pause.reason("read", str(error), tile=error.kind or "", cause=cause_of(error))
            raise Lost(reason, source=True) from error
        self.pause.measures["bytes_moved"] = self.pause.measures.get("bytes_moved", 0.0) + report.bytes
        if following.streams:
            self.pause.measures["gradient_bytes_at_cutover"] = float(report.bytes)
        self.pause.measures["read_s"] = self.pause.measures.get("read_s", 0.0) + report.seconds

    # Certificates, barrier, decision.

    def _compared(self) -> CertificateCompared | ComparisonFailed:
        """Over the whole target world, compare what arrived with what the source world had."""
        if self.following.world is None or self.following.request.source is None:
            return CertificateCompared(equal=True)
        self.probe("certificate")
        started, self.pause.until = self.clock(), self._compare_until
        try:
            counted = self._counted()
        except Lost as lost:
            self._refused = lost.reason
            return ComparisonFailed(lost.reason)
        finally:
            self.pause.add("certify_target_s", started)
        if counted.unknown:
            self._refused = self.pause.reason("certificate", counted.unknown)
        elif bad := self._mismatches(counted):
            self._refused = self.pause.reason("certificate", f"{len(bad)} differ, first {bad[0]}", tile=bad[0])
        self._agreed = self._refused is None and counted.everything
        return CertificateCompared(equal=self._refused is None, reason=self._refused)

    def _mismatches(self, counted: Counted) -> list[str]:
        """Parameter/kind pairs whose sums over the target world differ from the source world's."""
        following = self.following
        assert following.manifest is not None
        kinds, grad_kinds = self._kinds()
        state, gradients = (
            [f"{spec.name}/{kind}" for kind in kinds for spec in following.manifest.parameters]
            for kinds in ((*kinds, "step counts"), grad_kinds)
        )
        state += [spec.name for spec in following.manifest.whole]
        if following.streams:
            state = ["gradients of the steps streamed, or step counts"]
        return counted.differing(state, gradients)

    def _counted(self) -> Counted:
        """The count over the target world. Every rank runs the same collective, however much it has read."""
        following = self.following
        assert following.world is not None and following.manifest is not None
        group, size = following.world.voting, following.world.layout.world_size
        gradients = self._arrived_gradients
        if gradients is None:
            gradients = torch.zeros(len(following.manifest.parameters), dtype=torch.int64)
        sent = [self._sent(name) for name in ("state", "gradients")]
        self.probe("barrier")
        self._joined = True
        try:
            with limited(group, self.pause.left_s):
                arrived = (self._target_state(), gradients)
                return count(self._reached, arrived, sent, size, lambda whole: dist.all_reduce(whole, group=group))
        except RuntimeError as error:
            text, cause = f"a target is gone: {plainly(error)}", FailureCause(FailedPart.PEER)
            raise Lost(self.pause.reason("certificate", text, cause=cause), source=False) from error

    def _sent(self, name: str) -> torch.Tensor | None:
        """The source world's certificate, on the one rank of the target world that adds it; None on the others. This is
        the first survivor, which took part in the source world's sum. Without survivors it is rank 0, which reads the
        certificate from the store."""
        request, rank = self.following.request, self.following.target_rank
        assert request.source is not None
        survivors = [index for index, member in enumerate(request.target.members) if member in request.source.members]
        if rank != next(iter(survivors), 0):
            return None
        if not survivors and self._reached >= Level.STATE and (name == "state" or self._reached is Level.EVERYTHING):
            with contextlib.suppress(Lost):
                return torch.tensor(self.pause.wait(f"certificate/{name}"), dtype=torch.int64)
        return None if self.source is None else self.source.certificates.get(name)

    def _hash_gradients(self) -> None:
        """As a target: hash the gradients that have arrived."""
        following = self.following
        if following.world is not None:
            assert following.certificate is not None and following.live is not None
            self._arrived_gradients = hashed(following.certificate, following.live.regions, (GRAD,))

    def _target_state(self) -> torch.Tensor:
        """As a target: this rank's part of the certificate of the state that arrived."""
        following = self.following
        live, plan, small = following.live, following.certificate, self.boundary.get("small")
        assert plan is not None and live is not None
        counts = [0] * len(plan.parameters) if small is None else count_sums(live, plan, small)
        counts += version_sums(live.manifest, following.step_tensors or BothVersions({}, {}), 1)
        if not following.streams:
            return torch.cat([hashed(plan, live.regions, self._kinds()[0]), words(counts)])
        assert following.target_stream is not None and following.verdict is not None
        chain = following.target_stream.chain(following.verdict.version, self._version)
        return word(chain + sum(counts) & MASK)

    def _barrier(self, level: Level, until: float) -> BarrierPassed | BarrierFailed:
        assert self.following.world is not None
        if self._agreed and level is Level.EVERYTHING:
            # The comparison already was a barrier: all ranks have everything, and all know that nothing differs.
            return BarrierPassed(level)
        self.pause.until = until
        lowest, group = torch.tensor([int(level)], dtype=torch.int64), self.following.world.voting
        try:
            if self.following.request.source is None:
                self.probe("barrier")
            elif not self._joined:
                # A rank without the state did not compare, but the others wait for its part in that collective.
                self._counted()
            with limited(group, self.pause.left_s):
                dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        except RuntimeError as error:
            text = f"not all ranks of the next world reached the barrier: {plainly(error)}"
            reason = self.pause.reason("barrier", text, cause=FailureCause(FailedPart.PEER))
            return BarrierFailed(self._refused or reason)
        except Lost as lost:
            return BarrierFailed(self._refused or lost.reason)
        return BarrierPassed(Level(int(lowest.item())))

    def _ask(self, question: Callable[[], Decision]) -> DecisionRead | StoreUnreachable:
        try:
            self.decision = question()
        except ExchangeTimeout as error:
            reason = self.pause.reason("decision", str(error), cause=cause_of(error))
            return StoreUnreachable(reason, gone=isinstance(error, StoreGone))
        return DecisionRead(self.decision)

    # Small things.

    @property
    def _source_broken(self) -> Reason | None:
        return None if self.source is None else self.source.broken

    def _state_certificate(self) -> torch.Tensor | None:
        """The certificate of the source world's state, or None if this rank does not know it."""
        return None if self.source is None else self.source.certificates.get("state")

    def _certificate_text(self) -> str:
        if self.following.verdict is not None and self.following.streams:
            return self.following.verdict.certificate
        whole = self._state_certificate()
        return "" if whole is None else f"{int(whole.sum()) & (2**64 - 1):016x}"


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")
