"""The world in which a rank trains, and what the ranks of a handoff agree on: the verdict and the certificate plans."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from liver_core.certificate import CertificatePlan
from liver_core.device.moments import Moment
from liver_core.handoff.messages import PreparePhase, Rung
from liver_core.layout import Member, ParallelLayout, Roster, copies_of, copy_counts, paired_parameters
from liver_core.layout.limits import STRICT
from liver_core.state.live_state import LiveState
from liver_core.training.job import TrainState
from liver_core.worlds.megatron import MegatronWorld

_WINDOW_STEPS = 32


@dataclass(slots=True)
class ActiveWorld:
    """The world this rank trains in."""

    world: MegatronWorld
    state: TrainState
    live: LiveState


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the state of one handoff moves; the same for all its ranks. Either LIVE, certified at `version` with
    `certificate`, or STOP_AND_COPY because of `reason`. `phase` is STREAM, or REPLAY if the optimizer cannot be
    replayed."""

    __pydantic_config__ = STRICT

    rung: Rung
    reason: str = ""
    phase: PreparePhase = PreparePhase.STREAM
    version: int = 0
    certificate: str = ""


def rank_in(roster: Roster | None, member: Member) -> int | None:
    """The rank of `member` in `roster`, or None if it is not a member."""
    if roster is None or member not in roster.members:
        return None
    return roster.members.index(member)


def source_certificate_plan(live: LiveState, target: ParallelLayout) -> CertificatePlan:
    """Which element of which parameter lies where in a source's regions. Computed before the pause.

    Only the first rank that holds a copy counts it, once for each copy in the target world. So every copy in the target
    is certified, and sums over any source layout are equal.
    """
    manifest, layout, rank = live.manifest, live.layout, live.rank
    counted = [box for box in live.resident() if copies_of(manifest, layout, rank, box.parameter)[0] == rank]
    shapes = {spec.name: spec.shape for spec in manifest.parameters}
    paired = paired_parameters(manifest, layout, target)
    plan = CertificatePlan(counted, shapes, copy_counts(manifest, target), paired)
    plan.get_ready(live.regions.values())
    return plan


def target_certificate_plan(live: LiveState, source: ParallelLayout) -> CertificatePlan:
    """The same for a target, where every copy counts."""
    shapes = {spec.name: spec.shape for spec in live.manifest.parameters}
    plan = CertificatePlan(live.resident(), shapes, paired=paired_parameters(live.manifest, source, live.layout))
    plan.get_ready(live.regions.values())
    return plan


@dataclass(slots=True)
class Timings:
    """Seconds of the latest ordinary steps of a world: whole steps, and their part after the boundary. The latter are
    the device's, so the newest may not be known yet."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))
    optimizer: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))
    _marked: deque[tuple[Moment, Moment, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))

    def applied(self, reduced: Moment, ended: Moment, *, waited_s: float) -> None:
        """A step was applied between these two, less what it waited for in between."""
        self._marked.append((reduced, ended, waited_s))
        while self._marked:
            first, last, without_s = self._marked[0]
            seconds = first.seconds_to(last)
            if seconds is None:
                return
            self.optimizer.append(seconds - without_s)
            self._marked.popleft()
