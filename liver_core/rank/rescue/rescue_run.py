"""One rank's cutover in a rescue: survivors read what only leavers have, and vote; then they build the next world.

No collective of the old world runs. So the old world is unchanged after NO-GO, and a leaver may die once all its state
is saved. Survivors vote through the store, because no process group consists of exactly the survivors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from liver_core.handoff.cutover import (
    BarrierFailed,
    BarrierPassed,
    BuildTarget,
    CertificateCompared,
    Cutover,
    CutoverEffect,
    CutoverEvent,
    Level,
    StateRead,
    TargetBuilt,
)
from liver_core.handoff.messages import FailedPart, FailureCause
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.cutover.cutover_run import COMPARING_SHARE, READING_SHARE, CutoverRun, Probe
from liver_core.rank.cutover.source_side import Lost, hashed
from liver_core.rank.next_world import NextWorld
from liver_core.rank.rescue.rescue_preparation import FAILED, every_element
from liver_core.rank.rescue.saved_state import KEPT, Rescue
from liver_core.rank.store_exchange import ExchangeTimeout, StoreLost, cause_of
from liver_core.state.live_state import state_kinds
from liver_core.streaming.tiles import LOCAL
from liver_core.transport.protocol import Read, Transport, TransportError
from liver_core.transport.regions import copy_runs
from liver_core.worlds.groups import limited, plainly


class RescueRun(CutoverRun):
    """As CutoverRun. `complete(until)` builds the next world until that time, or raises RuntimeError."""

    def __init__(
        self,
        following: NextWorld,
        active: ActiveWorld | None,
        machine: Cutover,
        *,
        boundary_of: Callable[[], dict[str, Any]],
        complete: Callable[[float], None],
        probe: Probe = lambda point: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(following, active, machine, boundary_of=boundary_of, probe=probe, clock=clock)
        self.complete = complete
        self._certified: torch.Tensor | None = None

    @property
    def _rescue(self) -> Rescue:
        rescue = self.following.rescue
        assert rescue is not None
        return rescue

    @property
    def _all_kinds(self) -> tuple[str, ...]:
        assert self.following.manifest is not None
        return state_kinds(self.following.manifest)

    def _state_certificate(self) -> torch.Tensor | None:
        return self._certified

    def _carry_out(self, effect: CutoverEffect) -> CutoverEvent:
        if isinstance(effect, BuildTarget):
            return self._built(effect.until)
        return super()._carry_out(effect)

    # Until the decision.

    def _read_state(self, version: int, until: float) -> StateRead:
        """Leaver: publish the certificates of what it gives. Survivor: read its share."""
        started = self.clock()
        self.pause.until = started + READING_SHARE * (until - started)
        self._compare_until = started + COMPARING_SHARE * (until - started)
        self._version = version
        self.probe("boundary")
        assert self.source is not None
        published = self._tried(self.source.publish_boundary)
        self.boundary = self.source.boundary
        if self.following.target_rank is None:
            self._tried(self._publish_certificates)
            return StateRead(Level.EVERYTHING, reason=self.pause.problems[0].reason if self.pause.problems else None)
        has_share = published and self._tried(self._take_share) and self._tried(self._take_step_tensors)
        if has_share:
            self.probe("state read")
        return StateRead(
            Level.STATE if has_share else Level.NOTHING,
            source_lost=any(problem.source for problem in self.pause.problems),
            reason=self.pause.problems[0].reason if self.pause.problems else None,
        )

    def _publish_certificates(self) -> None:
        assert self.active is not None
        started = self.clock()
        for survivor, plan in self._rescue.certificates.items():
            sums = hashed(plan, self.active.live.regions, self._all_kinds)
            self.pause.post(f"rescued/{self.following.source_rank}/{survivor}", sums.tolist())
        self.pause.add("hash_source_s", started)
        self.probe("certificates published")

    def _take_share(self) -> None:
        """Read this rank's share kind by kind, from all leavers at once."""
        rescue, rank = self._rescue, self.following.source_rank
        assert rank is not None
        for kind in self._all_kinds:
            self.probe(f"rescue {kind}")
            nbytes = self._read(rescue.transport, rescue.reads(rank, kind), "rescue_read_s")
            self.pause.measures["bytes_rescued"] = self.pause.measures.get("bytes_rescued", 0.0) + nbytes

    def _read(self, transport: Transport | None, reads: list[Read], measure: str) -> int:
        """Bytes read. Raises Lost if a peer is lost."""
        if not reads:
            return 0
        assert transport is not None
        try:
            report = transport.read(reads, self.pause.until)
        except TransportError as error:
            reason = self.pause.reason("read", str(error), tile=error.kind or "", cause=cause_of(error))
            raise Lost(reason, source=True) from error
        self.pause.measures[measure] = self.pause.measures.get(measure, 0.0) + report.seconds
        return report.bytes

    def _compared(self) -> CertificateCompared:
        """Whether this rank's share equals what its leavers had at this boundary."""
        self.probe("certificate")
        started, self.pause.until = self.clock(), self._compare_until
        try:
            bad = self._differing()
        except Lost as lost:
            return CertificateCompared(equal=False, reason=lost.reason)
        finally:
            self.pause.add("certify_target_s", started)
        if bad:
            reason = self.pause.reason("certificate", f"{len(bad)} differ, first {bad[0]}", tile=bad[0])
            return CertificateCompared(equal=False, reason=reason)
        return CertificateCompared(equal=True)

    def _differing(self) -> list[str]:
        names = self._names()
        bad = []
        for leaver, plan in self._rescue.certificates.items():
            ours = hashed(plan, self._rescue.regions, self._all_kinds).tolist()
            theirs = self.pause.wait(f"rescued/{leaver}/{self.following.source_rank}")
            bad += [name for name, mine, given in zip(names, ours, theirs, strict=True) if mine != given]
        return bad

    def _names(self) -> list[str]:
        assert self.following.manifest is not None
        return [f"{spec.name}/{kind}" for kind in self._all_kinds for spec in self.following.manifest.parameters]

    def _barrier(self, level: Level, until: float) -> BarrierPassed | BarrierFailed:
        """The MIN over survivors: all of them have reported their share, or one has reported that it has none."""
        self.probe("vote")
        exchange, survivors = self.following.exchange, len(self._rescue.plan.survivors)
        try:
            whole = exchange.all_hold("rescue/held", survivors, until, holds=level is not Level.NOTHING)
        except StoreLost as error:
            return BarrierFailed(self.pause.reason("barrier", str(error), cause=cause_of(error)))
        except ExchangeTimeout:
            return BarrierFailed(self.pause.reason("barrier", f"not all {survivors} survivors have their share"))
        return BarrierPassed(level if whole else Level.NOTHING)

    # After the release.

    def _built(self, until: float) -> TargetBuilt:
        """Build, read and certify. Publish a failure: otherwise the others would wait for this rank."""
        self.pause.until = until
        self.probe("released")
        try:
            self.complete(until)
            self._take_step_tensors()
            self._refill()
            self.probe("refilled")
            self._certify()
        except (Lost, RuntimeError) as error:
            reason = self.pause.reason("build", str(error), cause=cause_of(error))
            reason = error.reason if isinstance(error, Lost) else reason
            with contextlib.suppress(ExchangeTimeout):
                self.following.exchange.settle(FAILED, str(reason))
            return TargetBuilt(reason)
        return TargetBuilt()

    def _refill(self) -> None:
        """As a target: fill masters and moments from the survivors' regions and their rescue regions."""
        following, rescue = self.following, self._rescue
        assert following.live is not None and rescue.refill is not None
        self._fetch(self._all_kinds, self.pause.until)
        if rescue.refill.local is not None:
            for kind in self._all_kinds:
                read = Read(LOCAL, kind, rescue.refill.local.runs)
                copy_runs(read, rescue.regions[kind], following.live.regions[kind])
        reads = [
            Read(part.source_rank, KEPT + kind, part.runs) for part in rescue.refill.remote for kind in self._all_kinds
        ]
        nbytes = self._read(following.transport, reads, "read_s")
        self.pause.measures["bytes_moved"] = self.pause.measures.get("bytes_moved", 0.0) + nbytes

    def _certify(self) -> None:
        """Check that the whole target world has what the survivors had and saved. Every rank gets the same answer.

        One collective of the next world sums what survivors have and what targets have. Raises Lost.
        """
        self.probe("barrier")
        following, started = self.following, self.clock()
        assert following.world is not None and following.live is not None
        arrived = hashed(every_element(following.live), following.live.regions, self._all_kinds)
        expected = torch.zeros_like(arrived)
        if self.active is not None and self._rescue.whole is not None:
            live, kept = self._rescue.whole
            expected += hashed(live, self.active.live.regions, self._all_kinds)
            if self._rescue.regions:
                expected += hashed(kept, self._rescue.regions, self._all_kinds)
        whole, group = torch.cat([expected, arrived]), following.world.everyone
        try:
            with limited(group, self.pause.left_s):
                dist.all_reduce(whole, group=group)
        except RuntimeError as error:
            text, cause = f"a target is gone: {plainly(error)}", FailureCause(FailedPart.PEER)
            raise Lost(self.pause.reason("certificate", text, cause=cause), source=False) from error
        self.pause.add("certify_target_s", started)
        expected, arrived = whole.chunk(2)
        self._certified = expected
        bad = [name for name, equal in zip(self._names(), (expected == arrived).tolist(), strict=True) if not equal]
        if bad:
            text = f"{len(bad)} differ, first {bad[0]}"
            raise Lost(self.pause.reason("certificate", text, tile=bad[0]), source=False)
