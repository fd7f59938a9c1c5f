"""The fallback ladder: which rung fits into the time that is left, and why (handoff.md section 6).

Pure. Estimates come in as numbers; the first rung that fits with margin is taken, and every rung passed over is named.
"""

from dataclasses import dataclass

from liver_core.handoff.messages import Rung


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderInputs:
    """What is known when a handoff is chosen; seconds, bytes and bytes per second.

    `seconds_to_deadline` is None when nothing forces the change. `checkpoint_age_steps` is None without a checkpoint.
    """

    bytes_to_move: int
    bandwidth_bytes_per_s: float
    prepare_s: float
    step_s: float
    seconds_to_boundary: float
    seconds_to_deadline: float | None
    margin_s: float
    sources_whole: bool
    nodes_left: int
    nodes_least: int
    checkpoint_age_steps: int | None


@dataclass(frozen=True, slots=True)
class RungChoice:
    """The rung taken, the estimate behind it, and what was said about every rung above it."""

    rung: Rung
    estimate_s: float
    reason: str


def choose_rung(inputs: LadderInputs) -> RungChoice:
    """The least disturbing rung that fits."""
    raise NotImplementedError
