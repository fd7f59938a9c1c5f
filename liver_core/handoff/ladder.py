"""The fallback ladder: which rung fits into the time left, and why (handoff.md section 6).

Pure. It gets estimates as numbers and takes the first rung that fits with margin. Where none does, the quickest is
tried with the time that is left. It gives the reason for every rung that it rejects.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from liver_core.handoff.messages import CutoverDeadlines, Rung

BESIDE = frozenset({Rung.LIVE, Rung.DROP_STEP, Rung.STOP_AND_COPY, Rung.RESCUE})
"""The rungs that need memory for two worlds at once."""
LAST_RESORT = "tried all the same, since nothing else fits"
CERTIFY_STEPS = 2
"""How many steps ahead the version is announced at which both sides hash (handoff.md section 4)."""
BUILD_LEAST_S, BUILD_MOST_S, BUILD_TIMES = 60.0, 180.0, 6.0
"""How long a rescue may build its next world, once nothing but the checkpoint is left beside it: several times what is
expected."""
PAUSE_LEAST_S, PAUSE_MOST_S, PAUSE_TIMES = 20.0, 120.0, 4.0
"""How long after the boundary a target may take to hold and certify the state, beyond PAUSE_LEAST_S several times what
copying all of it and a step take; a longer one is worth no more than a restart."""
SOURCE_WAITS, STORE_WAITS = 1.5, 3.0
"""A source waits for the decision, and everybody for the store, so many times as long as a target."""
UNHURRIED_MOST_S, UNHURRIED_TIMES = 3_600.0, 3.0
"""Where nothing presses a handoff may take so many times what its rung is estimated to need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderInputs:
    """What is known when a handoff is chosen. Seconds, bytes, and bytes per second.

    `seconds_to_deadline`: None if there is no deadline. `sources_whole`: every rank of the running world is alive.
    `prepare_s`: time to build the next world, while training goes on. `checkpoint_age_steps`: None if there is no
    checkpoint. `stream_share`: the share (0..1) of the bandwidth for streaming. `follow_s`: time to read and replay the
    gradients of one step. `one_sided`: the transport reads without the source's help.

    Texts say why something does not work; empty: nothing is known against it. `replay_refusal`: the optimizer cannot be
    replayed exactly. `stream_failure`, `rescue_failure`: streaming or a rescue failed before in this world.
    `memory_refusal`: the next world does not fit beside the running one.

    `bytes_only_leaving`: what no survivor holds. `endpoints_s`: time to connect to the ranks that hold it.
    `ranks_staying`: how many ranks survive. `part_s`: time between two places at which a step can be dropped, None if
    the job has no such places. `step_deviation_s`: how far steps lie from `step_s`, in the median; None if not known.
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
    step_deviation_s: float | None = None


@dataclass(frozen=True, slots=True)
class RungChoice:
    """The rung, its estimated seconds, and in `verdicts` the reasons for it and for rejecting each rung above it."""

    rung: Rung
    estimate_s: float
    verdicts: tuple[tuple[Rung, str], ...]

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(f"{rung}: {text}" for rung, text in self.verdicts)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one rung needs. `refusal` is empty if only the deadline can rule it out."""

    seconds: float = 0.0
    refusal: str = ""


def choose_rung(inputs: LadderInputs) -> RungChoice:
    """The least disturbing rung that fits. Raises ValueError naming an impossible input."""
    _check(inputs)
    said: list[tuple[Rung, str]] = []
    late: list[tuple[float, Rung]] = []
    for rung in _ESTIMATES:
        estimate = _needs(rung, inputs)
        refusal = estimate.refusal
        verdict = refusal or _late(inputs, estimate.seconds)
        if not verdict:
            return RungChoice(rung, estimate.seconds, (*said, (rung, _fit(inputs, estimate.seconds))))
        said.append((rung, verdict))
        if not refusal and _is_worth_trying(rung, estimate, inputs):
            late.append((estimate.seconds, rung))
    if late:
        return _last_resort(said, late)
    estimate_s, text = _checkpoint(inputs)
    if _too_few_nodes(inputs):
        said.append((Rung.CHECKPOINT, _too_few_nodes(inputs)))
        return RungChoice(Rung.SUSPEND, 0.0, (*said, (Rung.SUSPEND, "until there are nodes again")))
    return RungChoice(Rung.CHECKPOINT, estimate_s, (*said, (Rung.CHECKPOINT, text)))


def weigh(rung: Rung, inputs: LadderInputs) -> Estimate:
    """What one of the rungs above a restart needs, and why it is not to be taken: it cannot be, or it would be late."""
    estimate = _needs(rung, inputs)
    return Estimate(estimate.seconds, estimate.refusal or _late(inputs, estimate.seconds))


def rung_for_nearer_deadline(inputs: LadderInputs, rung: Rung, *, spent_s: float) -> tuple[Rung, str]:
    """The rung of an open handoff whose deadline has come nearer, and why it is another one, empty where it is not.

    What was prepared for `spent_s` is kept, and ranks take the next rung by themselves. But only a rescue can do
    without what is not prepared yet.
    """
    choice = choose_rung(replace(inputs, prepare_s=max(0.0, inputs.prepare_s - spent_s)))
    if choice.rung is not Rung.RESCUE or rung is Rung.RESCUE:
        return rung, ""
    return choice.rung, f"; {choice.reason}"


def cutover_deadlines(inputs: LadderInputs) -> CutoverDeadlines:
    """Limits that grow with the state and with the step, which the next world's ranks end in the pause.

    They are for a copy of everything on any rung: ranks that cannot stream copy in the pause without asking anybody. A
    rescue gets `build_s` to build the next world and to fill it from what survivors hold.
    """
    copied_s, target_s = copy_s(inputs.bytes_to_move, inputs.bandwidth_bytes_per_s), _target_s(inputs)
    build_s = min(BUILD_MOST_S, max(BUILD_LEAST_S, BUILD_TIMES * (inputs.prepare_s + copied_s)))
    return CutoverDeadlines(target_s, SOURCE_WAITS * target_s, STORE_WAITS * target_s, build_s)


def unhurried_s(choice: RungChoice) -> float:
    """How long a handoff on this rung may take where nothing presses."""
    return min(UNHURRIED_MOST_S, UNHURRIED_TIMES * choice.estimate_s)


def _target_s(inputs: LadderInputs) -> float:
    copied_s = copy_s(inputs.bytes_to_move, inputs.bandwidth_bytes_per_s)
    return min(PAUSE_MOST_S, PAUSE_LEAST_S + PAUSE_TIMES * (copied_s + inputs.step_s))


def _needs(rung: Rung, inputs: LadderInputs) -> Estimate:
    estimate = _ESTIMATES[rung](inputs)
    return Estimate(estimate.seconds, _ruled_out(rung, inputs) or estimate.refusal)


def _last_resort(said: list[tuple[Rung, str]], late: list[tuple[float, Rung]]) -> RungChoice:
    """The quickest: without it a loss is certain. What is late is aborted and leaves the running world as it was."""
    estimate_s, rung = min(late)
    at = [each for each, _ in said].index(rung)
    return RungChoice(rung, estimate_s, (*said[:at], (rung, f"{said[at][1]}; {LAST_RESORT}")))


def _is_worth_trying(rung: Rung, estimate: Estimate, inputs: LadderInputs) -> bool:
    """Whether a rung that does not fit with margin may still be in time. A rescue, which is little work, always."""
    left_s = inputs.seconds_to_deadline
    return left_s is not None and left_s > 0 and (rung is Rung.RESCUE or estimate.seconds <= left_s)


def _ruled_out(rung: Rung, inputs: LadderInputs) -> str:
    """Why this rung is rejected whatever the time; empty if nothing is known against it."""
    return _too_few_nodes(inputs) or _without_state(inputs) or _without_room(rung, inputs)


def _too_few_nodes(inputs: LadderInputs) -> str:
    if inputs.nodes_left >= inputs.nodes_least:
        return ""
    return f"{inputs.nodes_left} nodes are left, the job needs {inputs.nodes_least}"


def _without_state(inputs: LadderInputs) -> str:
    """The reason against every rung that reads a living world; empty if there is none."""
    if not inputs.sources_whole:
        return "a rank of the running world is lost"
    if inputs.bytes_to_move and not inputs.bandwidth_bytes_per_s:
        return "no bandwidth was measured"
    return ""


def _without_room(rung: Rung, inputs: LadderInputs) -> str:
    """The reason against rungs that build the next world beside the running one; empty if there is none."""
    if inputs.memory_refusal and rung in BESIDE:
        return f"the next world was refused: {inputs.memory_refusal}"
    return ""


def _live(inputs: LadderInputs) -> Estimate:
    """Build, converge and certify while training goes on. Then the next boundary, and the last step's gradients."""
    stream = stream_estimate(inputs)
    if stream.refusal:
        return stream
    certified_s = inputs.prepare_s + stream.seconds + CERTIFY_STEPS * inputs.step_s
    # A rank can become ready at any time in a step, so the next boundary is at worst a whole step away.
    boundary_s = max(inputs.seconds_to_boundary, certified_s + inputs.step_s)
    return Estimate(boundary_s + inputs.follow_s)


def _drop_step(inputs: LadderInputs) -> Estimate:
    """Copy as on the live rung, but drop the step in progress at the end of a part, and redo it in the next world.

    A source publishes from the end of a part on, and a rank can become ready at any time in a part. No step is dropped
    if a copy at the boundary (the next rung) is in time.
    """
    stream = stream_estimate(inputs)
    if stream.refusal:
        return stream
    if inputs.part_s is None:
        return Estimate(refusal="the job's steps are not done in parts")
    if inputs.seconds_to_deadline is None:
        return Estimate(refusal="no deadline: no step needs to be dropped")
    copied = _stop_and_copy(inputs)
    if not copied.refusal and not _late(inputs, copied.seconds):
        return Estimate(refusal=f"a copy at the boundary ends in {copied.seconds:.1f} s: no step needs to be dropped")
    # The boundary is out of reach, so the state does not change during the copy. No step has to be followed.
    bandwidth = inputs.stream_share * inputs.bandwidth_bytes_per_s
    return Estimate(inputs.prepare_s + copy_s(inputs.bytes_to_move, bandwidth) + 2 * inputs.part_s)


def _stop_and_copy(inputs: LadderInputs) -> Estimate:
    """Prepare while training goes on. The copy starts at the first boundary after that, at worst a step later."""
    boundary_s = max(inputs.seconds_to_boundary, inputs.prepare_s + inputs.step_s)
    return _copied_in_pause(boundary_s, inputs.bytes_to_move, inputs)


def _rescue(inputs: LadderInputs) -> Estimate:
    """At a boundary, copy what no survivor holds into host memory. Build the new world after the leavers are gone. So
    the copy can start at the first boundary at which endpoints are connected."""
    if not inputs.ranks_staying:
        return Estimate(refusal="no rank of the running world stays")
    if inputs.seconds_to_deadline is None:
        return Estimate(refusal="no deadline: the running world need not end before the next one stands")
    if inputs.rescue_failure:
        return Estimate(refusal=f"it failed before in this world: {inputs.rescue_failure}")
    boundary_s, connected_s = inputs.seconds_to_boundary, inputs.endpoints_s
    if connected_s > boundary_s:
        steps = ceil((connected_s - boundary_s) / inputs.step_s) if inputs.step_s else 0
        boundary_s = max(connected_s, boundary_s + steps * inputs.step_s)
    return _copied_in_pause(boundary_s, inputs.bytes_only_leaving, inputs)


def _copied_in_pause(boundary_s: float, count: int, inputs: LadderInputs) -> Estimate:
    """A copy of `count` bytes that begins at the boundary. What is longer than the pause may last never succeeds,
    whatever time is left."""
    copied_s, limit_s = copy_s(count, inputs.bandwidth_bytes_per_s), _target_s(inputs)
    text = f"copying takes {copied_s:.1f} s, and the pause ends {limit_s:.1f} s after the boundary"
    return Estimate(boundary_s + copied_s, text if copied_s > limit_s else "")


def _checkpoint(inputs: LadderInputs) -> tuple[float, str]:
    if inputs.checkpoint_age_steps is None:
        return inputs.prepare_s, "none was written, the job starts from its first step"
    lost_s = inputs.checkpoint_age_steps * inputs.step_s
    return inputs.prepare_s + lost_s, f"{inputs.checkpoint_age_steps} steps ({lost_s:.1f} s) are done again"


_ESTIMATES: dict[Rung, Callable[[LadderInputs], Estimate]] = {
    Rung.LIVE: _live,
    Rung.DROP_STEP: _drop_step,
    Rung.STOP_AND_COPY: _stop_and_copy,
    Rung.RESCUE: _rescue,
}
"""Least disturbing first."""


def stream_estimate(inputs: LadderInputs) -> Estimate:
    """Seconds until the copy has caught up with the steps done meanwhile.

    If copying takes c seconds in all, then t = c + (t / step_s) * follow_s, since t / step_s steps are done meanwhile.
    """
    if not inputs.one_sided:
        return Estimate(refusal="the transport has no one-sided reads")
    if inputs.replay_refusal:
        return Estimate(refusal=f"steps cannot be replayed: {inputs.replay_refusal}")
    if inputs.stream_failure:
        return Estimate(refusal=f"it failed before in this world: {inputs.stream_failure}")
    bandwidth = inputs.stream_share * inputs.bandwidth_bytes_per_s
    if inputs.bytes_to_move and not bandwidth:
        return Estimate(refusal="no bandwidth is left beside training")
    if inputs.follow_s and inputs.follow_s >= inputs.step_s:
        text = f"following a step takes {inputs.follow_s:.2f} s, a step {inputs.step_s:.2f} s: it never converges"
        return Estimate(refusal=text)
    copying = 1.0 - inputs.follow_s / inputs.step_s if inputs.follow_s else 1.0
    return Estimate(copy_s(inputs.bytes_to_move, bandwidth) / copying)


def copy_s(count: int, bytes_per_s: float) -> float:
    """Seconds to copy `count` bytes. 0.0 without bandwidth; a refusal reports that."""
    return count / bytes_per_s if bytes_per_s else 0.0


def _late(inputs: LadderInputs, estimate_s: float) -> str:
    left_s = inputs.seconds_to_deadline
    if left_s is None or estimate_s + inputs.margin_s <= left_s:
        return ""
    if left_s < 0:
        return f"needs {estimate_s:.1f} s, the deadline was {-left_s:.1f} s ago"
    return f"needs {estimate_s:.1f} s and {inputs.margin_s:.1f} s of margin, {left_s:.1f} s are left"


def _fit(inputs: LadderInputs, estimate_s: float) -> str:
    if inputs.seconds_to_deadline is None:
        return f"needs {estimate_s:.1f} s, no deadline"
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
