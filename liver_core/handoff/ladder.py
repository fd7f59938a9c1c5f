"""The fallback ladder: which rung fits into the time that is left, and why (handoff.md section 6).

Pure. Estimates come in as numbers; the first rung that fits with margin is taken, and every rung passed over is named.
"""

from dataclasses import dataclass

from liver_core.handoff.messages import Rung


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderInputs:
    """What is known when a handoff is chosen; seconds, bytes and bytes per second.

    `seconds_to_deadline` is None when nothing forces the change. `sources_whole`: every rank of g is alive.
    `prepare_s` is the building of g+1, which overlaps with training. `checkpoint_age_steps` is None without one.
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
    """The rung taken, the seconds it is estimated to need, and what was said about every rung above it."""

    rung: Rung
    estimate_s: float
    reason: str


def choose_rung(inputs: LadderInputs) -> RungChoice:
    """The least disturbing rung that fits."""
    _check(inputs)
    said = ["live: not in this version"]
    if inputs.nodes_left < inputs.nodes_least:
        said.append(f"suspend: {inputs.nodes_left} nodes are left, the job needs {inputs.nodes_least}")
        return RungChoice(Rung.SUSPEND, 0.0, "; ".join(said))
    refusal, estimate_s = _stop_and_copy(inputs)
    if refusal is None:
        said.append(f"stop_and_copy: {_fit(inputs, estimate_s)}")
        return RungChoice(Rung.STOP_AND_COPY, estimate_s, "; ".join(said))
    said.append(f"stop_and_copy: {refusal}")
    if inputs.checkpoint_age_steps is None:
        said.append("checkpoint: none was written, the job starts from its first step")
        return RungChoice(Rung.CHECKPOINT, inputs.prepare_s, "; ".join(said))
    lost_s = inputs.checkpoint_age_steps * inputs.step_s
    said.append(f"checkpoint: {inputs.checkpoint_age_steps} steps ({lost_s:.1f} s) are done again")
    return RungChoice(Rung.CHECKPOINT, inputs.prepare_s + lost_s, "; ".join(said))


def _stop_and_copy(inputs: LadderInputs) -> tuple[str | None, float]:
    """Why stop-and-copy cannot be (None when it can), and its seconds until the leavers are free."""
    if not inputs.sources_whole:
        return "a rank of the running world is lost", 0.0
    if inputs.bytes_to_move and not inputs.bandwidth_bytes_per_s:
        return "no bandwidth was measured", 0.0
    copy_s = inputs.bytes_to_move / inputs.bandwidth_bytes_per_s if inputs.bytes_to_move else 0.0
    # Preparing runs while g trains; the copy starts at the first boundary after it, on average half a step later and
    # at worst a whole one.
    boundary_s = max(inputs.seconds_to_boundary, inputs.prepare_s + inputs.step_s)
    estimate_s = boundary_s + copy_s
    left_s = inputs.seconds_to_deadline
    if left_s is not None and estimate_s + inputs.margin_s > left_s:
        return f"needs {estimate_s:.1f} s and {inputs.margin_s:.1f} s of margin, {left_s:.1f} s are left", estimate_s
    return None, estimate_s


def _fit(inputs: LadderInputs, estimate_s: float) -> str:
    if inputs.seconds_to_deadline is None:
        return f"needs {estimate_s:.1f} s, nothing presses"
    return f"needs {estimate_s:.1f} s of the {inputs.seconds_to_deadline:.1f} s left, margin {inputs.margin_s:.1f} s"


def _check(inputs: LadderInputs) -> None:
    for name in ("bytes_to_move", "bandwidth_bytes_per_s", "prepare_s", "step_s", "seconds_to_boundary", "margin_s"):
        if getattr(inputs, name) < 0:
            raise ValueError(f"{name}: must not be negative, is {getattr(inputs, name)}")
