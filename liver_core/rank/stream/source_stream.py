"""What a source rank does for a live handoff beside its steps: it fills the ring and hashes its state.

The main thread calls `attach`, `before_step` and `after_step`. One thread sums the gradients of each step, another
hashes the state at exactly the version that the target world announced, during forward and backward passes. A step that
would change the state waits; the wait is measured. Threads sleep until there is something to do: they share the
interpreter with the steps.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from liver_core.certificate import MASK, CertificatePlan, chained_sums
from liver_core.device import DeviceWait, follow, is_host
from liver_core.device.threads import background
from liver_core.layout import ParallelLayout
from liver_core.memory.memory_placement import GRAD
from liver_core.rank.active_world import ActiveWorld
from liver_core.state.live_state import LiveState, state_kinds
from liver_core.state.megatron_optimizer import element_scalars
from liver_core.state.optimizer_step import hyper_parameters
from liver_core.state.small_state import beside_sums
from liver_core.streaming.header import StepHeader
from liver_core.streaming.ring import SourceRing
from liver_core.worlds.released_storage import discard

_log = logging.getLogger(__name__)
STANDING_SHARE = 0.8
"""The share of a usual step in which the version is expected not to change. The optimizer needs a part of the rest, and
steps vary."""
HASH_WAIT_S_MAX = 30.0
"""How long a step may wait for a hash. No hash takes that long: reaching it means that a thread is stuck, an error."""


class SourceStream:
    """See the module. `_version`: the number of steps applied; None before `attach` and inside a step."""

    def __init__(
        self,
        live: LiveState,
        plan: CertificatePlan,
        ring: SourceRing,
        *,
        rank: int,
        target: ParallelLayout,
        probe: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.ring = ring
        self.wait_s = 0.0
        self.failure = ""
        self._live = live
        self._plan = plan
        self._rank = rank
        self._target = target
        self._probe = probe
        self._changed = threading.Condition()
        self._version: int | None = None
        self._hashing = False
        self._announced: int | None = None
        self._hashes: dict[int, list[int] | int] = {}
        self._published: list[int] = []
        self._sums: dict[int, int] = {}
        self._closed = False
        self._usual_step_s = 0.0
        self._stands_since = 0.0
        ring.stepping(ring.version)
        self._standing = ring.standing
        if not is_host(ring.device):
            self._in_background("source-counters", self._settle)
        self._summing = self._in_background("source-sum", self._sum)
        self._in_background("source-hash", self._hash)

    # The main thread.

    @property
    def attached(self) -> bool:
        """Whether this stream publishes steps."""
        return self._version is not None or bool(self._published)

    def attach(self, version: int, steps: Sequence[float], *, since: float) -> None:
        """Publish every step from now on. Call it before a step is applied; `version` steps are applied already.

        `steps`: seconds of the last steps, newest last. `since`: start of the present step (time.monotonic seconds).
        """
        self._learn_usual_step(steps)
        # Until now the counter was odd, so readers saw a source inside a step.
        self.ring.version = version - 1
        self.after_step(version)
        self._stands_since = since

    def before_step(self, active: ActiveWorld, version: int, norm: float, steps: Sequence[float]) -> None:
        """The gradients of the step to `version` are reduced, with total norm `norm`. Nothing is applied yet.

        `steps`: seconds of the last steps, newest last. Never raises: if a step cannot be published, the stream fails
        and training goes on.
        """
        started = time.monotonic()
        try:
            self._publish(active, version, norm, steps)
        except Exception as error:
            self._fail(f"step {version} could not be published: {type(error).__name__}: {error}")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._hashing, HASH_WAIT_S_MAX):
                self._fail(f"the state of version {version - 1} was not hashed within {HASH_WAIT_S_MAX:.0f} s")
            self._version = None
            self.ring.stepping(version - 1)
        self.wait_s += time.monotonic() - started

    def _learn_usual_step(self, steps: Sequence[float]) -> None:
        """Use the first known steps. Later ones may be slow because of the stream."""
        if steps and not self._usual_step_s:
            self._usual_step_s = statistics.median(steps)

    def _publish(self, active: ActiveWorld, version: int, norm: float, steps: Sequence[float]) -> None:
        self._learn_usual_step(steps)
        header = StepHeader(
            version=version,
            norm=norm,
            clip=active.live.optimizer.config.clip_grad,
            groups=tuple(hyper_parameters(active.state)),
            scalars=element_scalars(active.live),
            stepped=active.live.optimizer.has_stepped,
            step_s=steps[-1] if steps else 0.0,
            usual_step_s=self._usual_step_s,
        )
        overwritten = version - self.ring.depth
        with self._changed:
            if not self._changed.wait_for(lambda: self._may_overwrite(overwritten), HASH_WAIT_S_MAX):
                self._fail(f"the gradients of step {overwritten} were not hashed within {HASH_WAIT_S_MAX:.0f} s")
        self.ring.publish(active.live.regions[GRAD], header)
        with self._changed:
            self._published.append(version)
            self._changed.notify_all()

    def after_step(self, version: int) -> None:
        """The step to `version` is applied."""
        with self._changed:
            self.ring.stepped(version)
            self._version = version
            self._standing = self.ring.standing
            self._stands_since = time.monotonic()
            self._changed.notify_all()

    def announce(self, version: int) -> None:
        """Hash at exactly `version`. From any thread, one version at a time."""
        with self._changed:
            self._announced = version
            self._changed.notify_all()

    def hashed(self, version: int) -> list[int] | int | None:
        """uint64 sums over this rank's state at `version`, kinds by parameters, or by how many steps it was missed.
        None if not known yet."""
        with self._changed:
            return self._hashes.get(version)

    def stands_for_s(self, version: int) -> float:
        """Seconds for which this source is expected to stay at `version`. 0 if it is elsewhere or may leave at once."""
        with self._changed:
            if self._version != version:
                return 0.0
            return max(0.0, self._stands_since + STANDING_SHARE * self._usual_step_s - time.monotonic())

    def chain(self, after: int, upto: int, until: float) -> int:
        """One number over the gradients of the steps after `after` up to `upto`, and the optimizer's present counts,
        summed modulo 2^64 over this rank. For the main thread, at version `upto`.

        Waits until `until` (time.monotonic seconds) for the last of them to be hashed, then raises TimeoutError. Raises
        it at once if the stream has failed.
        """
        wanted = range(after + 1, upto + 1)
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure or all(v in self._sums for v in wanted), max(0.0, until - time.monotonic())
            )
            if any(v not in self._sums for v in wanted):
                raise TimeoutError(
                    f"the gradients of steps {after + 1} to {upto} were not hashed: {self.failure or 'late'}"
                )
            gradients = chained_sums({version: self._sums[version] for version in wanted})
        return gradients + sum(beside_sums(self._live, self._plan, self._target)) & MASK

    def close(self) -> None:
        """End the threads. The ring stays readable as long as its endpoint is open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def free(self) -> int:
        """After `close`, and once no endpoint uses the ring: free its memory. Returns bytes."""
        self._summing.join(HASH_WAIT_S_MAX)
        if self._summing.is_alive():
            return 0
        while self.ring.settle_next():
            pass
        return discard(tensor for region in self.ring.regions.values() for tensor in region.tensors)

    def _may_overwrite(self, version: int) -> bool:
        """A later step may reuse a slot once its gradients are hashed, or if nothing will hash them any more."""
        return version in self._sums or version not in self._published or self._closed or bool(self.failure)

    def _fail(self, text: str) -> None:
        """Store the first failure."""
        with self._changed:
            self.failure = self.failure or text
            self._changed.notify_all()

    # The threads.

    def _in_background(self, name: str, action: Callable[[], None]) -> threading.Thread:
        thread = background(self._guarded, args=(action,), name=name)
        thread.start()
        return thread

    def _guarded(self, action: Callable[[], None]) -> None:
        """A thread that ended without a word would leave its readers waiting for their deadline."""
        try:
            action()
        except (OSError, RuntimeError, ValueError) as error:
            self._fail(str(error))
        except Exception as error:
            _log.exception("the stream of source rank %d failed", self._rank)
            self._fail(f"{type(error).__name__}: {error}")

    def _until(self, is_due: Callable[[], bool]) -> bool:
        """Sleep until there is something to do; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or is_due())
            return not self._closed

    def _hash(self) -> None:
        while self._until(lambda: self._announced is not None and self._announced not in self._hashes):
            version = self._announced
            assert version is not None
            answer = self._hash_at(version)
            if answer is None:
                return
            with self._changed:
                self._hashes[version] = answer

    def _settle(self) -> None:
        """Write the counters that are due, once the device has got there."""
        while self._until(lambda: self.ring.is_due):
            self.ring.settle_next()

    def _sum(self) -> None:
        while self._until(lambda: bool(self._published) and self._published[-1] not in self._sums):
            self._sum_gradients()

    def _hash_at(self, version: int) -> list[int] | int | None:
        """uint64 sums over this rank's state, kinds by parameters, at exactly `version`. If that version is past: by
        how many steps. None once closed.
        """
        with self._changed:
            # With the lock kept from here on: the next step may be about to begin.
            if not self._until(lambda: self._version is not None and self._version >= version):
                return None
            assert self._version is not None
            if self._version > version:
                return self._version - version
            self._hashing, standing = True, self._standing
        try:
            self._probe("hash source")
            follow(DeviceWait.STANDS, self.ring.device, standing)
            kinds = state_kinds(self._live.manifest)
            return [int(part) for kind in kinds for part in self._plan.sums(self._live.regions[kind], kind)]
        finally:
            with self._changed:
                self._hashing = False
                self._changed.notify_all()

    def _sum_gradients(self) -> None:
        with self._changed:
            waiting = [version for version in self._published if version not in self._sums]
        for version in waiting:
            part = self.ring.slot_sum(version, self._plan)
            if part is None:
                raise OSError(f"the gradients of step {version} were overwritten before they were hashed")
            with self._changed:
                self._sums[version] = part & MASK
                self._changed.notify_all()
            self._probe("gradients summed")
