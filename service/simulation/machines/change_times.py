"""How long the parts of a change take in a replay, and what the ladder is told of that. Pure.

What a change loses in all is the `change_s` of its layout. These times say what can still happen before it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

from liver_core.handoff import LadderInputs, Rung
from liver_core.handoff.ladder import CERTIFY_STEPS, copy_s, stream_estimate

STREAM_SHARE, REPLAY_SHARE = 0.5, 0.1
"""Of the bandwidth beside training, and of a step that following it takes: guesses of agents that measured nothing."""
GRADIENT_SHARE = 1 / 3
"""Of the bytes of the state: one fp32 gradient beside a master and two moments."""


@dataclass(frozen=True, slots=True)
class ChangeTimes:
    """`build_s`: until the next world is built beside the running one; `endpoints_s`: until the ranks of a rescue are
    connected. `state_bytes`: of the whole job, `bytes_per_s`: of one node. `usable_share`: of a notice. `margin_s`: of
    the ladder. `restart_s`: from deciding on a restart to its first step; `checkpoint_every_s`: of training, None: none
    is ever written, and a restart begins at the first step. `parts_of_step`: of each layout whose steps can be dropped,
    the share of a step after which that can be.

    The defaults: what an agent assumes that has measured nothing, 10 Gb/s, the warning that AWS leaves, and a restart
    as Parcae's authors measured it.
    """

    build_s: float = 5.0
    endpoints_s: float = 1.0
    state_bytes: float = 0.0
    bytes_per_s: float = 1.25e9
    usable_share: float = 105 / 120
    margin_s: float = 2.0
    restart_s: float = 55.0
    checkpoint_every_s: float | None = 600.0
    parts_of_step: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "parts_of_step"}
        for name, value in values.items():
            if value is not None and (not isfinite(value) or value < 0):
                raise ValueError(f"{name} must be a number of at least 0, is {value}")
        for layout, share in self.parts_of_step:
            if not 0 < share < 1:
                raise ValueError(f"parts_of_step: of {layout} must be above 0 and below 1, is {share}")
        if self.usable_share > 1:
            raise ValueError(f"usable_share must be at most 1, is {self.usable_share}")
        if self.checkpoint_every_s == 0 or not self.bytes_per_s:
            raise ValueError("checkpoint_every_s and bytes_per_s must be above 0")

    @property
    def writes_checkpoints(self) -> bool:
        return self.checkpoint_every_s is not None

    def part_of_step(self, layout: str) -> float | None:
        """None where a step is never dropped."""
        return next((share for name, share in self.parts_of_step if name == layout), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderCase:
    """What the ladder is asked about: a world of these nodes, and the next one. `step_s`: 0 where steps do not count;
    `left_s`: None where nothing presses; `part_s`: None where no step can be dropped."""

    source: Sequence[str]
    target: Sequence[str]
    step_s: float
    to_boundary_s: float
    left_s: float | None
    nodes_least: int
    checkpoint_age_steps: int | None
    part_s: float | None


def ladder_of(times: ChangeTimes, moment: LadderCase) -> LadderInputs:
    """What an agent would tell the ladder. Each node brings its own link."""
    going = [node for node in moment.source if node not in moment.target]
    bandwidth = times.bytes_per_s * max(1, min(len(moment.source), len(moment.target)))
    follow_s = copy_s(int(GRADIENT_SHARE * times.state_bytes), bandwidth) + REPLAY_SHARE * moment.step_s
    return LadderInputs(
        bytes_to_move=int(times.state_bytes),
        bandwidth_bytes_per_s=bandwidth,
        prepare_s=times.build_s,
        step_s=moment.step_s,
        seconds_to_boundary=moment.to_boundary_s,
        seconds_to_deadline=moment.left_s,
        margin_s=times.margin_s,
        sources_whole=True,
        nodes_left=len({*moment.source, *moment.target} - set(going)),
        nodes_least=moment.nodes_least,
        checkpoint_age_steps=moment.checkpoint_age_steps,
        stream_share=STREAM_SHARE,
        follow_s=follow_s if moment.step_s else 0.0,
        one_sided=True,
        replay_refusal="",
        stream_failure="",
        bytes_only_leaving=int(times.state_bytes * len(going) / max(1, len(moment.source))),
        endpoints_s=times.endpoints_s,
        ranks_staying=len(moment.source) - len(going),
        rescue_failure="",
        part_s=moment.part_s,
    )


def prepared_in_s(rung: Rung, inputs: LadderInputs) -> float:
    """From an order to a rank that can cut over: built, and certified where the state streams."""
    match rung:
        case Rung.RESCUE:
            return inputs.endpoints_s
        case Rung.LIVE:
            return inputs.prepare_s + stream_estimate(inputs).seconds + CERTIFY_STEPS * inputs.step_s
        case Rung.DROP_STEP:
            return inputs.prepare_s + copy_s(inputs.bytes_to_move, STREAM_SHARE * inputs.bandwidth_bytes_per_s)
        case _:
            return inputs.prepare_s


def read_in_s(rung: Rung, inputs: LadderInputs) -> float:
    """From the boundary until a target holds all that it needs."""
    match rung:
        case Rung.LIVE:
            return inputs.follow_s
        case Rung.DROP_STEP:
            return 0.0
        case Rung.RESCUE:
            return copy_s(inputs.bytes_only_leaving, inputs.bandwidth_bytes_per_s)
        case _:
            return copy_s(inputs.bytes_to_move, inputs.bandwidth_bytes_per_s)
