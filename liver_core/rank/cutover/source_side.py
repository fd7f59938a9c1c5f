"""The source world's side of a cutover: what one of its ranks tells of the boundary, and the collectives it owes.

All living source ranks run the same collectives whatever happens to them as targets, so that on NO-GO their world still
stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from liver_core.certificate import CertificatePlan
from liver_core.handoff.messages import Reason
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.next_world import NextWorld
from liver_core.rank.store_exchange import ExchangeTimeout
from liver_core.state.buckets import collect_gradients
from liver_core.state.megatron_optimizer import GRAD
from liver_core.state.optimizer_step import measure_gradients
from liver_core.worlds.groups import limited, plainly

IN_PAUSE_POLL_S = 0.002
"""How late a newcomer may see what the source world posts while training stands still."""


class Lost(Exception):
    """Something needed is gone; `source` when it is a source rank."""

    def __init__(self, reason: Reason, *, source: bool) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.source = source


@dataclass(slots=True)
class Pause:
    """What both sides of one rank share while training stands still.

    `until`: when what is being done must be over, of `clock`. `problems`: what was lost, in order.
    """

    following: NextWorld
    rank: int | None
    clock: Callable[[], float]
    probe: Callable[[str], None]
    until: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)
    problems: list[Lost] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds until then."""
        return self.until - self.clock()

    def reason(self, phase: str, text: str, tile: str = "") -> Reason:
        """In the name of this rank."""
        return Reason(text=text, phase=phase, rank=self.rank, tile=tile)

    def add(self, name: str, started: float) -> None:
        """Count the seconds since `started` to a measure."""
        self.measures[name] = self.measures.get(name, 0.0) + self.clock() - started

    def post(self, name: str, value: Any) -> None:
        """Put a word into the handoff's store. Raises Lost."""
        try:
            self.following.exchange.post(name, value)
        except ExchangeTimeout as error:
            raise Lost(self.reason(name, str(error)), source=False) from error

    def wait(self, name: str) -> Any:
        """What the source world posts under `name`; it posts "lost" instead when it has lost a rank. Raises Lost."""
        try:
            found, value = self.following.exchange.wait_any((name, "lost"), self.until, poll_s=IN_PAUSE_POLL_S)
        except ExchangeTimeout as error:
            raise Lost(self.reason(name, str(error)), source=True) from error
        if found != name:
            raise Lost(self.reason(name, f"the source world says: {value}"), source=True)
        return value


class SourceSide:
    """See the module. `boundary`: what was told of it. `certificates`: "state" and "gradients", summed over the source
    world, once they are known. `broken`: why the source world cannot go on, None while it can."""

    def __init__(
        self, pause: Pause, active: ActiveWorld, boundary_of: Callable[[], dict[str, Any]], chain: int | None
    ) -> None:
        self.boundary: dict[str, Any] = {}
        self.certificates: dict[str, torch.Tensor] = {}
        self.broken: Reason | None = None
        self._pause = pause
        self._following = pause.following
        self._active = active
        self._boundary_of = boundary_of
        self._chain = chain
        self._summing: tuple[str, torch.Tensor, Any] | None = None

    @property
    def speaks(self) -> bool:
        """Whether this rank posts for the source world: its rank 0 and its first survivor, so that one may die."""
        request, rank = self._following.request, self._following.source_rank
        assert request.source is not None
        survivors = [index for index, member in enumerate(request.source.members) if member in request.target.members]
        return rank == 0 or rank in survivors[:1]

    def announce(self) -> None:
        """Say that the boundary is reached. Raises Lost."""
        self.boundary = self._boundary_of()
        self._speak("boundary", self.boundary)

    def tell_boundary(self, version: int, kinds: Sequence[str]) -> None:
        """Say that the boundary is reached, then what the state of these kinds hashes to. Raises Lost."""
        unspoken = None
        try:
            self.announce()
        except Lost as lost:
            # A store that is gone must not keep this rank out of the collectives that the others enter.
            unspoken = lost
        if self._chain is None or not self._following.streams:
            self._start_sum("state", self._state_part(version, kinds))
            self.finish_certificate()
        elif unspoken is None:
            self._know("state", word(self._chain))
        if unspoken is not None:
            raise unspoken

    def tell_gradients(self) -> None:
        """Measure the gradients, make them readable and say so; `finish_certificate` must follow. Raises Lost."""
        pause, stay = self._pause, self._gradients_stay
        pause.probe("norm")
        norm = self._collective("gradient norm", lambda: measure_gradients(self._active.state))
        # All gradients are reduced: where they are read from where they are, nobody need wait for what they hash to.
        if stay:
            self._speak("norm", norm)
        started = pause.clock()
        collect_gradients(self._active.live)
        assert self._following.source_certificate is not None
        part = hashed(self._following.source_certificate, self._active.live.regions, (GRAD,))
        pause.add("hash_source_s", started)
        self._start_sum("gradients", part)
        if not stay:
            self.finish_certificate()
            self._speak("norm", norm)
        self.boundary["norm"] = norm

    def finish_certificate(self) -> None:
        """The sum that is under way, if one is, becomes known here and to newcomers. Raises Lost."""
        if self._summing is None:
            return
        (name, whole, work), self._summing = self._summing, None
        started = self._pause.clock()
        self._collective(f"{name} certificate", work.wait)
        self._pause.add("certify_source_s", started)
        self._know(name, whole)

    def tell_lost(self, reason: Reason) -> None:
        """A source is lost: newcomers need not wait for what will not come."""
        if self.speaks:
            self._pause.post("lost", reason.text)

    @property
    def _gradients_stay(self) -> bool:
        """Whether no source moves its gradients before they are read: those of one bucket lie in one piece."""
        assert self._following.manifest is not None
        return self._following.manifest.bucket_rule.elements_max is None

    def _state_part(self, version: int, kinds: Sequence[str]) -> torch.Tensor:
        """The part of this rank in what the state hashes to. Where it streamed it was certified at the announced
        version, and only the gradients of the steps since then are left to be compared."""
        following = self._following
        assert following.source_certificate is not None
        if not following.streams:
            return hashed(following.source_certificate, self._active.live.regions, kinds)
        assert following.source_stream is not None and following.verdict is not None
        try:
            return word(following.source_stream.chain(following.verdict.version, version, self._pause.until))
        except TimeoutError as error:
            # The others wait in the collective; what this rank adds there makes the comparison fail.
            self._pause.problems.append(Lost(self._pause.reason("certificate", str(error)), source=False))
            return word(1)

    def _start_sum(self, name: str, part: torch.Tensor) -> None:
        everyone = self._active.world.everyone
        work = self._collective(f"{name} certificate", lambda: dist.all_reduce(part, group=everyone, async_op=True))
        self._summing = (name, part, work)

    def _know(self, name: str, whole: torch.Tensor) -> None:
        self.certificates[name] = whole
        self._speak(f"certificate/{name}", whole.tolist())

    def _speak(self, name: str, value: Any) -> None:
        if self.speaks:
            self._pause.post(name, value)

    def _collective(self, what: str, action: Callable[[], Any]) -> Any:
        """Run a collective of g; a source that is gone, or does not come in time, shows as an error of it."""
        try:
            with limited(self._active.world.everyone, self._pause.left_s):
                return action()
        except RuntimeError as error:
            self.broken = self._pause.reason(what, f"a source is gone: {plainly(error)}")
            raise Lost(self.broken, source=True) from error


def hashed(plan: CertificatePlan, regions: Mapping[str, torch.Tensor], kinds: Sequence[str]) -> torch.Tensor:
    """int64 [kinds x parameters]: this rank's part of the certificate, to be summed over its world modulo 2^64."""
    return torch.cat([torch.from_numpy(plan.sums(regions[kind], kind).view("int64")) for kind in kinds])


def word(value: int) -> torch.Tensor:
    """int64 [1] with the bits of an unsigned 64-bit number."""
    return torch.tensor([value - 2**64 if value >= 2**63 else value], dtype=torch.int64)
