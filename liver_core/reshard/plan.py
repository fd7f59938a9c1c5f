"""What a plan is: frozen, complete, bounded and digested. No addresses, no bytes, no transport. Pure.

All offsets, lengths and strides are in elements of a region; they are the same for every state kind.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from liver_core.layout import Manifest, Roster, digest_of, to_json
from liver_core.reshard.plan_error import PlanError

# Part of every plan digest: two builds whose planners choose differently must not believe that their plans agree.
PLAN_RULES_VERSION = 3


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """`count` runs of `length` elements; run i starts i strides after the offset, at either end.

    Strides are 0 where count is 1. Runs of one CopyRuns never overlap at either end.
    """

    source_offset: int
    target_offset: int
    length: int
    count: int = 1
    source_stride: int = 0
    target_stride: int = 0

    def __post_init__(self) -> None:
        if self.source_offset < 0 or self.target_offset < 0 or self.length < 1 or self.count < 1:
            raise PlanError(f"{self}: offsets must not be negative, length and count must be positive")
        strides = (self.source_stride, self.target_stride)
        if any(strides) if self.count == 1 else min(strides) < self.length:
            raise PlanError(f"{self}: strides must be at least the length, and 0 for a single run")

    @property
    def elements(self) -> int:
        """Elements copied."""
        return self.length * self.count

    @property
    def source_stop(self) -> int:
        """One past the last source element read."""
        return self.source_offset + (self.count - 1) * self.source_stride + self.length

    @property
    def target_stop(self) -> int:
        """One past the last target element written."""
        return self.target_offset + (self.count - 1) * self.target_stride + self.length

    def each(self) -> Iterator[tuple[int, int, int]]:
        """(source offset, target offset, length) of every run."""
        for index in range(self.count):
            yield (
                self.source_offset + index * self.source_stride,
                self.target_offset + index * self.target_stride,
                self.length,
            )


@dataclass(frozen=True, slots=True)
class Transfer:
    """All that one target rank takes from one source rank. Runs ascend by target offset."""

    source_rank: int
    runs: tuple[CopyRuns, ...]
    elements: int

    def __post_init__(self) -> None:
        total = sum(run.elements for run in self.runs)
        if total != self.elements or not self.runs:
            raise PlanError(
                f"transfer from rank {self.source_rank}: runs hold {total} elements, {self.elements} stated"
            )


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How one target rank fills its region. Every element of its parameters is written once, padding never.

    local: copies inside the process, where it also holds a source rank. None when there are none.
    remote: one Transfer per other source rank, ascending by source rank.
    reason: how the sources were chosen, for people.
    """

    target_rank: int
    local: Transfer | None
    remote: tuple[Transfer, ...]
    reason: str

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Local and remote together."""
        return (self.local, *self.remote) if self.local else self.remote

    @property
    def elements(self) -> int:
        """Elements written."""
        return sum(transfer.elements for transfer in self.transfers)

    @property
    def remote_elements(self) -> int:
        """Elements that come out of another process."""
        return sum(transfer.elements for transfer in self.remote)


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Bounds of one rank's plan; `plan_rank` raises PlanError beyond them.

    runs_max: CopyRuns over all transfers. bytes_max: over all state kinds, as if each
    element were of the parameter that has the most. transfers_max: source ranks read from.
    """

    runs_max: int = 200_000
    bytes_max: int = 2**40
    transfers_max: int = 16_384


def plan_digest(manifest: Manifest, source: Roster, target: Roster) -> str:
    """A digest of everything that plans are made of; every rank computes it alone and all must agree.

    The target's generation is left out: a standing plan is made before its generation is burned.
    """
    return digest_of(
        {
            "rules": PLAN_RULES_VERSION,
            "manifest": manifest.digest(),
            "source": to_json(source),
            "target": {key: value for key, value in to_json(target).items() if key != "generation"},
        }
    )
