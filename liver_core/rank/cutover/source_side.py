"""The source world's side of a cutover: what its ranks publish about the boundary, and its collectives.

All living source ranks run the same collectives, even if they fail as targets. So their world still works after NO-GO.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from liver_core.certificate import CertificatePlan
from liver_core.device import DeviceWait, settle
from liver_core.device.region import AnyRegion
from liver_core.handoff.messages import FailedPart, FailureCause, Reason
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.next_world import NextWorld
from liver_core.rank.step_boundary import StepTotals
from liver_core.rank.store_exchange import ExchangeTimeout, cause_of
from liver_core.state.megatron_optimizer import GRAD
from liver_core.state.small_state import beside_sums
from liver_core.worlds.groups import limited, plainly

_LOST = "lost"
POLL_LEAST_S, POLL_MOST_S = 0.0001, 0.01


class Lost(Exception):
    """Something needed is lost. `source`: it is a source rank."""

    def __init__(self, reason: Reason, *, source: bool) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.source = source


@dataclass(slots=True)
class Pause:
    """What both sides of one rank share in the pause.

    `until`: when the present action must end, by `clock`. `problems`: what was lost, in order. `dead`: which rank of
    the source world is known to be dead, empty while none is.
    """

    following: NextWorld
    rank: int | None
    clock: Callable[[], float]
    probe: Callable[[str], None]
    dead: Callable[[], str] = lambda: ""
    until: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)
    problems: list[Lost] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds left until `until`."""
        return self.until - self.clock()

    def reason(self, phase: str, text: str, *, tile: str = "", cause: FailureCause | None = None) -> Reason:
        """A reason that names this rank."""
        return Reason(text=text, phase=phase, rank=self.rank, tile=tile, cause=cause)

    def add(self, name: str, started: float) -> None:
        """Add the seconds since `started` to a measure."""
        self.measures[name] = self.measures.get(name, 0.0) + self.clock() - started

    def post(self, name: str, value: Any) -> None:
        """Publish a value in the handoff's store. Raises Lost."""
        try:
            self.following.exchange.post(name, value)
        except ExchangeTimeout as error:
            raise Lost(self.reason(name, str(error), cause=cause_of(error)), source=False) from error

    def wait(self, name: str) -> Any:
        """Wait for what the source world publishes as `name`. Raises Lost, also if it says that it has lost a rank."""
        try:
            found, value = self.following.exchange.wait_in_store(name, self.until, unless=_LOST)
        except ExchangeTimeout as error:
            raise Lost(self.reason(name, str(error), cause=cause_of(error)), source=True) from error
        if found != name:
            text = f"the source world reports: {value}"
            raise Lost(self.reason(name, text, cause=FailureCause(FailedPart.PEER)), source=True)
        return value


class SourceSide:
    """See the module. `boundary`: what is published about it. `certificates`: "state" and "gradients", summed over the
    source world, once they are known. `broken`: why the source world cannot go on, None while it can."""

    def __init__(
        self, pause: Pause, active: ActiveWorld, boundary_of: Callable[[], dict[str, Any]], totals: StepTotals | None
    ) -> None:
        self.boundary: dict[str, Any] = {}
        self.certificates: dict[str, torch.Tensor] = {}
        self.broken: Reason | None = None
        self._pause = pause
        self._following = pause.following
        self._active = active
        self._boundary_of = boundary_of
        self._chain = None if totals is None else totals.chain
        self._norm = None if totals is None else totals.norm
        self._summing: tuple[str, torch.Tensor, Any] | None = None

    @property
    def publishes(self) -> bool:
        """Whether this rank publishes for the source world. Rank 0 and the first survivor do, so that one may die."""
        request, rank = self._following.request, self._following.source_rank
        assert request.source is not None
        survivors = [index for index, member in enumerate(request.source.members) if member in request.target.members]
        return rank == 0 or rank in survivors[:1]

    def publish_boundary(self) -> None:
        """Publish that the boundary is reached. Raises Lost."""
        self.boundary = self._boundary_of()
        settle(DeviceWait.BOUNDARY, self._active.live.device)
        if self._active.live.manifest.whole:
            self._publish_step_tensors()
        self._publish("boundary", self.boundary)

    def _publish_step_tensors(self) -> None:
        """Two ranks of each stage do, so that one may die: all of its ranks have the same."""
        request, rank, live = self._following.request, self._following.source_rank, self._active.live
        assert request.source is not None and rank is not None
        stage, size = live.layout.coordinates(rank).pp, live.layout.stage_size
        ranks = range(stage * size, (stage + 1) * size)
        survivors = [each for each in ranks if request.source.members[each] in request.target.members]
        if rank == ranks[0] or rank in survivors[:1]:
            both = live.step_tensors.encoded()
            value = {"version": self.boundary["version"], "before": both.before, "after": both.after}
            self._pause.post(step_tensors_key(stage), value)

    def publish_state(self, version: int, kinds: Sequence[str]) -> None:
        """Publish that the boundary is reached, then the certificate of these kinds of state. Raises Lost."""
        failure = None
        try:
            self.publish_boundary()
        except Lost as lost:
            # Even if the store is lost, this rank must enter the collectives: the other ranks enter them too.
            failure = lost
        if self._chain is None or not self._following.streams:
            self._start_sum("state", self._state_part(version, kinds))
            self.finish_certificate()
        elif failure is None:
            self._publish_certificate("state", word(self._chain))
        if failure is not None:
            raise failure

    def publish_gradients(self) -> None:
        """Make the gradients readable and publish their norm. Call `finish_certificate` next. Raises Lost."""
        pause, norm = self._pause, self._norm
        pause.probe("norm")
        # All gradients are reduced: the norm was computed of them. Targets need not wait for their hash.
        settle(DeviceWait.GRADIENTS, self._active.live.device)
        self._publish("norm", norm)
        started = pause.clock()
        assert self._following.source_certificate is not None
        part = hashed(self._following.source_certificate, self._active.live.regions, (GRAD,))
        pause.add("hash_source_s", started)
        self._start_sum("gradients", part)
        self.boundary["norm"] = norm

    def finish_certificate(self) -> None:
        """Finish the sum in progress, if any, and publish the certificate to newcomers. Raises Lost."""
        if self._summing is None:
            return
        (name, whole, work), self._summing = self._summing, None
        started = self._pause.clock()
        self._collective(f"{name} certificate", lambda: self._await(work))
        self._pause.add("certify_source_s", started)
        self._publish_certificate(name, whole)

    def publish_lost(self, reason: Reason) -> None:
        """Publish that a source is lost, so that newcomers stop waiting for what will not come."""
        if self.publishes:
            self._pause.post(_LOST, reason.text)

    def _state_part(self, version: int, kinds: Sequence[str]) -> torch.Tensor:
        """This rank's part of the state's certificate. Streamed state was certified at the announced version, so only
        the gradients of the steps since then remain to be compared."""
        following = self._following
        assert following.source_certificate is not None
        if not following.streams:
            live, plan = self._active.live, following.source_certificate
            beside = words(beside_sums(live, plan, following.request.target.layout))
            return torch.cat([hashed(plan, live.regions, kinds), beside])
        assert following.source_stream is not None and following.verdict is not None
        try:
            return word(following.source_stream.chain(following.verdict.version, version, self._pause.until))
        except TimeoutError as error:
            # The others wait in the collective. Add a wrong value there, which makes the comparison fail.
            self._pause.problems.append(Lost(self._pause.reason("certificate", str(error)), source=False))
            return word(1)

    def _start_sum(self, name: str, part: torch.Tensor) -> None:
        everyone = self._active.world.everyone
        work = self._collective(f"{name} certificate", lambda: dist.all_reduce(part, group=everyone, async_op=True))
        self._summing = (name, part, work)

    def _publish_certificate(self, name: str, whole: torch.Tensor) -> None:
        self.certificates[name] = whole
        self._publish(f"certificate/{name}", whole.tolist())

    def _publish(self, name: str, value: Any) -> None:
        if self.publishes:
            self._pause.post(name, value)

    def _await(self, work: Any) -> None:
        """Until a collective of the source world has ended. Over gloo only the neighbours of a rank that dies notice,
        so the word of its agent ends the wait too."""
        pause_s = POLL_LEAST_S
        while not work.is_completed():
            if dead := self._pause.dead():
                raise RuntimeError(dead)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MOST_S)
        work.wait()

    def _collective(self, what: str, action: Callable[[], Any]) -> Any:
        """Run a collective of the source world. It fails if a source is gone or late. Raises Lost."""
        try:
            with limited(self._active.world.everyone, self._pause.left_s):
                return action()
        except RuntimeError as error:
            text, cause = f"a source is gone: {plainly(error)}", FailureCause(FailedPart.PEER)
            self.broken = self._pause.reason(what, text, cause=cause)
            raise Lost(self.broken, source=True) from error


def step_tensors_key(stage: int) -> str:
    """Under which a stage of the source world publishes what steps change beside parameters."""
    return f"step_tensors/{stage}"


def hashed(plan: CertificatePlan, regions: Mapping[str, AnyRegion], kinds: Sequence[str]) -> torch.Tensor:
    """int64 [kinds x parameters]: this rank's part of the certificate. Its world sums the parts modulo 2^64."""
    return torch.cat([torch.from_numpy(plan.sums(regions[kind], kind).view("int64")) for kind in kinds])


def words(values: Sequence[int]) -> torch.Tensor:
    """int64 with the bits of unsigned 64-bit numbers."""
    return torch.tensor([value - 2**64 if value >= 2**63 else value for value in values], dtype=torch.int64)


def word(value: int) -> torch.Tensor:
    """One of `words`."""
    return words([value])
