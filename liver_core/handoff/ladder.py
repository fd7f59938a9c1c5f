"""The fallback ladder: which rung fits into the time that is left, and why (handoff.md section 6).

Pure. Estimates come in as numbers; the first rung that fits with margin is taken, and every rung passed over is named
with its reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from liver_core.handoff.messages import Rung

BESIDE = frozenset({Rung.LIVE, Rung.DROP_STEP, Rung.STOP_AND_COPY, Rung.RESCUE})
"""On these the memory of two worlds is needed at once."""
CERTIFY_STEPS = 2
"""The version at which both sides hash is announced so many steps ahead (handoff.md section 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderInputs:
    """What is known when a handoff is chosen; seconds, bytes and bytes per second.

    `seconds_to_deadline` is None when nothing forces the change. `sources_whole`: every rank of g is alive.
    `prepare_s` is the building of g+1, which overlaps with training. `checkpoint_age_steps` is None without one.
    Streaming gets `stream_share` (0..1) of the bandwidth, and needs `follow_s` for each step of g: reading its
    gradients and replaying them. `one_sided`: the transport reads without the source's help. `replay_refusal` is why
    the optimizer cannot be replayed exactly, `stream_failure` why streaming failed before in this world; empty: nothing
    is known against it. `memory_refusal` is why this next world does not fit beside the running one; empty: it is not
    known to be too large. `bytes_only_leaving` is what no survivor holds, `endpoints_s` how long it takes to connect to
    those who hold it, `ranks_staying` how many survive, `rescue_failure` why a rescue failed before in this world.
    `part_s`: how far apart the places are at which a step can be dropped, None where the job has none.
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
    stream_share: float
    follow_s: float
    one_sided: bool
    replay_refusal: str
    stream_failure: str
    bytes_only_leaving: int
    endpoints_s: float
    ranks_staying: int
    rescue_failure: str
    part_s: float | None = None
    memory_refusal: str = ""


@dataclass(frozen=True, slots=True)
class RungChoice:
    """The rung taken, the seconds it is estimated to need, and what was said about it and about every rung above it."""

    rung: Rung
    estimate_s: float
    said: tuple[tuple[Rung, str], ...]

    @property
    def reason(self) -> str:
        """All of it in one line."""
        return "; ".join(f"{rung}: {text}" for rung, text in self.said)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one rung needs; `refusal` is empty when nothing but time can be against it."""

    seconds: float
    refusal: str = ""


def choose_rung(inputs: LadderInputs) -> RungChoice:
    """The least disturbing rung that fits. Raises ValueError naming a number that cannot be."""
    _check(inputs)
    said: list[tuple[Rung, str]] = []
    for rung, estimated in _ESTIMATES:
        estimate = estimated(inputs)
        refusal = _refusal(rung, estimate, inputs)
        if not refusal:
            return RungChoice(rung, estimate.seconds, (*said, (rung, _fit(inputs, estimate.seconds))))
        said.append((rung, refusal))
    estimate_s, text = _checkpoint(inputs)
    if _too_few_nodes(inputs):
        said.append((Rung.CHECKPOINT, _too_few_nodes(inputs)))
        return RungChoice(Rung.SUSPEND, 0.0, (*said, (Rung.SUSPEND, "until there are nodes again")))
    return RungChoice(Rung.CHECKPOINT, estimate_s, (*said, (Rung.CHECKPOINT, text)))


def _refusal(rung: Rung, estimate: Estimate, inputs: LadderInputs) -> str:
    """Why this rung is passed over; empty when it fits."""
    refusal = _too_few_nodes(inputs) or _without_state(inputs) or _without_room(rung, inputs)
    return refusal or estimate.refusal or _late(inputs, estimate.seconds)


def _too_few_nodes(inputs: LadderInputs) -> str:
    if inputs.nodes_left >= inputs.nodes_least:
        return ""
    return f"{inputs.nodes_left} nodes are left, the job needs {inputs.nodes_least}"


def _without_state(inputs: LadderInputs) -> str:
    """What is against every rung that reads a living world."""
    if not inputs.sources_whole:
        return "a rank of the running world is lost"
    if inputs.bytes_to_move and not inputs.bandwidth_bytes_per_s:
        return "no bandwidth was measured"
    return ""


def _without_room(rung: Rung, inputs: LadderInputs) -> str:
    """What is against every rung that builds the next world beside the running one."""
    if inputs.memory_refusal and rung in BESIDE:
        return f"the next world was refused: {inputs.memory_refusal}"
    return ""


def _live(inputs: LadderInputs) -> Estimate:
    """Built, converged and certified while g trains; then the next boundary, and the last step's gradients."""
    stream = _stream(inputs)
    if stream.refusal:
        return stream
    certified_s = inputs.prepare_s + stream.seconds + CERTIFY_STEPS * inputs.step_s
    # Ready comes at any moment of a step: the boundary after it is a whole step away at worst.
    boundary_s = max(inputs.seconds_to_boundary, certified_s + inputs.step_s)
    return Estimate(boundary_s + inputs.follow_s)


def _drop_step(inputs: LadderInputs) -> Estimate:
    """Copied as on the live rung, but the step under way is dropped where its next part ends, and redone in g+1.

    A source publishes from the end of a part on, and ready comes at any moment of a part. No step is thrown away where
    the boundary comes in time for the copy that is the next rung.
    """
    stream = _stream(inputs)
    if stream.refusal:
        return stream
    if inputs.part_s is None:
        return Estimate(0.0, "the job's steps are not done in parts")
    if inputs.seconds_to_deadline is None:
        return Estimate(0.0, "nothing presses: no step need be dropped")
    copied = _stop_and_copy(inputs)
    if not _late(inputs, copied.seconds):
        return Estimate(0.0, f"a copy at the boundary is done in {copied.seconds:.1f} s: no step need be dropped")
    # The state does not change before the boundary that is out of reach: what is copied need not be followed.
    bandwidth = inputs.stream_share * inputs.bandwidth_bytes_per_s
    return Estimate(inputs.prepare_s + copy_s(inputs.bytes_to_move, bandwidth) + 2 * inputs.part_s)


def _stop_and_copy(inputs: LadderInputs) -> Estimate:
    """Preparing runs while g trains; the copy starts at the first boundary after it, at worst a whole step later."""
    boundary_s = max(inputs.seconds_to_boundary, inputs.prepare_s + inputs.step_s)
    return Estimate(boundary_s + copy_s(inputs.bytes_to_move, inputs.bandwidth_bytes_per_s))


def _rescue(inputs: LadderInputs) -> Estimate:
    """What no survivor holds goes into host memory at a boundary; the new world is built when the leavers are gone, so
    that it is the first boundary at which endpoints are connected."""
    if not inputs.ranks_staying:
        return Estimate(0.0, "no rank of the running world stays")
    if inputs.rescue_failure:
        return Estimate(0.0, f"it failed before in this world: {inputs.rescue_failure}")
    boundary_s, connected_s = inputs.seconds_to_boundary, inputs.endpoints_s
    if connected_s > boundary_s:
        steps = ceil((connected_s - boundary_s) / inputs.step_s) if inputs.step_s else 0
        boundary_s = max(connected_s, boundary_s + steps * inputs.step_s)
    return Estimate(boundary_s + copy_s(inputs.bytes_only_leaving, inputs.bandwidth_bytes_per_s))


def _checkpoint(inputs: LadderInputs) -> tuple[float, str]:
    if inputs.checkpoint_age_steps is None:
        return inputs.prepare_s, "none was written, the job starts from its first step"
    lost_s = inputs.checkpoint_age_steps * inputs.step_s
    return inputs.prepare_s + lost_s, f"{inputs.checkpoint_age_steps} steps ({lost_s:.1f} s) are done again"


_ESTIMATES: tuple[tuple[Rung, Callable[[LadderInputs], Estimate]], ...] = (
    (Rung.LIVE, _live),
    (Rung.DROP_STEP, _drop_step),
    (Rung.STOP_AND_COPY, _stop_and_copy),
    (Rung.RESCUE, _rescue),
)


def _stream(inputs: LadderInputs) -> Estimate:
    """Seconds until what was copied has caught up with the steps done meanwhile.

    While copying takes c seconds in all, t / step_s steps pass in t = c + (t / step_s) * follow_s seconds.
    """
    if not inputs.one_sided:
        return Estimate(0.0, "the transport has no one-sided reads")
    if inputs.replay_refusal:
        return Estimate(0.0, f"steps cannot be replayed: {inputs.replay_refusal}")
    if inputs.stream_failure:
        return Estimate(0.0, f"it failed before in this world: {inputs.stream_failure}")
    bandwidth = inputs.stream_share * inputs.bandwidth_bytes_per_s
    if inputs.bytes_to_move and not bandwidth:
        return Estimate(0.0, "no bandwidth is left beside training")
    if inputs.follow_s and inputs.follow_s >= inputs.step_s:
        text = f"following a step takes {inputs.follow_s:.2f} s, a step {inputs.step_s:.2f} s: it never converges"
        return Estimate(0.0, text)
    copying = 1.0 - inputs.follow_s / inputs.step_s if inputs.follow_s else 1.0
    return Estimate(copy_s(inputs.bytes_to_move, bandwidth) / copying)


def copy_s(count: int, bytes_per_s: float) -> float:
    """Seconds to copy `count` bytes; 0.0 where a refusal says that there is no bandwidth."""
    return count / bytes_per_s if bytes_per_s else 0.0


def _late(inputs: LadderInputs, estimate_s: float) -> str:
    left_s = inputs.seconds_to_deadline
    if left_s is None or estimate_s + inputs.margin_s <= left_s:
        return ""
    return f"needs {estimate_s:.1f} s and {inputs.margin_s:.1f} s of margin, {left_s:.1f} s are left"


def _fit(inputs: LadderInputs, estimate_s: float) -> str:
    if inputs.seconds_to_deadline is None:
        return f"needs {estimate_s:.1f} s, nothing presses"
    return f"needs {estimate_s:.1f} s of the {inputs.seconds_to_deadline:.1f} s left, margin {inputs.margin_s:.1f} s"


def _check(inputs: LadderInputs) -> None:
    for name in (
        "bytes_to_move",
        "bandwidth_bytes_per_s",
        "prepare_s",
        "step_s",
        "seconds_to_boundary",
        "margin_s",
        "stream_share",
        "follow_s",
        "bytes_only_leaving",
        "endpoints_s",
        "ranks_staying",
    ):
        if getattr(inputs, name) < 0:
            raise ValueError(f"{name}: must not be negative, is {getattr(inputs, name)}")
    if inputs.part_s is not None and inputs.part_s < 0:
        raise ValueError(f"part_s: must not be negative, is {inputs.part_s}")
    if inputs.stream_share > 1:
        raise ValueError(f"stream_share: must not exceed 1, is {inputs.stream_share}")
