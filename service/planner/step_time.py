"""How long a step takes in a layout: physical terms, weighed by what was observed, with the error of the number. Pure.

step = a1 ((M - 1) x slowest stage + all stages) + a2 (M - 1 + PP) x activation + a3 x gradient x 2 (DP - 1) / DP
       + a4 (M + PP - 1) + a5 + a6 x TP all-reduces + a7 x all-to-alls of experts, every a >= 0
(M: micro-batches of a data-parallel rank).
A device's rates make each term a guess in seconds. Observed steps scale and weigh them, and stand as they are.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from agent.protocol.jobfile import JobFile
from liver_core.layout import ParallelLayout
from liver_core.layout.experts import ExpertShape
from service.planner.least_squares import non_negative, predictor_leverages

OBSERVATIONS_MAX = 64
PRIOR_ERRORS = (2.0, 0.3, 0.15)
"""The error of a prediction from none, one and two observed steps: data sheets are wrong by a factor of 2 or 3."""
USUAL_MISS = 0.1
"""Counts as one more observation that was missed by so much: three that fit by chance prove little."""
TIES = (0.01, 0.03, 0.03, 0.03, 0.03, 0.03, 0.03)
"""How strongly the weight of each term is held to the common scale, beside observations that weigh one each."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a rank's device does in a second. `bytes_per_s`: between nodes; `near_bytes_per_s`: inside one."""

    flops_per_s: float = 5.0e12
    bytes_per_s: float = 2.0e9
    near_bytes_per_s: float = 16.0e9
    launch_s: float = 2.0e-4


DATA_SHEETS = {
    "B200": DeviceRates(900e12, 50e9, 700e9, 1e-5),
    "H200": DeviceRates(400e12, 50e9, 350e9, 1e-5),
    "H100": DeviceRates(400e12, 50e9, 350e9, 1e-5),
    "A100": DeviceRates(150e12, 25e9, 220e9, 1e-5),
    "L40S": DeviceRates(120e12, 6e9, 24e9, 1e-5),
    "V100": DeviceRates(50e12, 1.2e9, 100e9, 1.5e-5),
    "L4": DeviceRates(40e12, 3e9, 24e9, 1.5e-5),
    "T4": DeviceRates(20e12, 3e9, 12e9, 2e-5),
    "CUDA": DeviceRates(150e12, 12e9, 200e9, 1e-5),
}
"""About half of what NVIDIA's data sheets promise for dense bf16 (V100, T4: fp16), and the usual links of machines that
have them. Only a guess to begin with: whatever was observed scales it."""


def rates_of(device: str) -> DeviceRates:
    """By the name of a device; unknown ones are taken for processors."""
    return next((rates for name, rates in DATA_SHEETS.items() if name in device.upper()), DeviceRates())


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a job sets the length of its steps. Sizes by Megatron's names. `cuts_head`: stages are cut as if the
    output layer were one more layer, whether or not their number divides that of the layers; a Megatron job's never.
    `experts`: None for a dense model."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    padded_vocab_size: int
    seq_length: int
    micro_batch: int
    global_batch: int
    cuts_head: bool = False
    experts: ExpertShape | None = None

    @classmethod
    def of(cls, job: JobFile) -> "StepShape":
        """The shape of a job."""
        model = job.model
        sizes = model.num_layers, model.hidden_size, model.ffn, model.padded_vocab_size, model.seq_length
        return cls(*sizes, job.micro_batch, job.global_batch, experts=model.experts())


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Seconds of a step. `error`: by how much of itself the number may be off."""

    seconds: float
    error: float
    measured: bool = False


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A layout that ran, and the median of its steps. `near`: as `terms` has it."""

    layout: ParallelLayout
    seconds: float
    near: int | None = None


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """The weights of the terms, and how far it was off where it could be checked."""

    shape: StepShape
    rates: DeviceRates
    weights: tuple[float, ...]
    error: float

    def predict(self, layout: ParallelLayout, *, near: int | None = None) -> float:
        """Seconds of a step. `near`: as `terms` has it."""
        return sum(a * term for a, term in zip(self.weights, terms(self.shape, layout, self.rates, near), strict=True))


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a model with their flops, and the most of them on one stage: `largest` flops, `count` layers in
    all, `sparse` with experts, `dense_parameters` and `experts` in parameters."""

    flops: float
    largest: float
    count: int
    sparse: int
    dense_parameters: int
    experts: int


@lru_cache(maxsize=1_024)
def _layers(shape: StepShape, stages: int) -> _Layers:
    """Of so many pipeline stages. Flops are those of one micro-batch, over all tensor and context parallel ranks."""
    hidden, tokens, of_experts = shape.hidden_size, shape.micro_batch * shape.seq_length, shape.experts
    attention, scores = 4 * hidden**2, 2 * shape.seq_length * hidden
    dense = attention + 3 * hidden * shape.ffn_hidden_size
    is_sparse = of_experts.layers if of_experts else (False,) * shape.num_layers
    beside, all_experts, active = attention, 0, 0
    if of_experts is not None:
        beside += of_experts.dense_parameters(hidden)
        all_experts = of_experts.count * 3 * hidden * of_experts.ffn
        active = of_experts.topk * 3 * hidden * of_experts.ffn
    flops = (6 * tokens * (dense + scores), 6 * tokens * (beside + active + scores))
    count = -(-(shape.num_layers + shape.cuts_head) // stages)
    of_stages = [sum(is_sparse[at : at + count]) for at in range(0, shape.num_layers, count)]
    most = max(of_stages, key=lambda sparse: sparse * (flops[1] - flops[0]))
    return _Layers(
        flops=sum(flops[sparse] for sparse in is_sparse),
        largest=(count - most) * flops[0] + most * flops[1],
        count=count,
        sparse=most,
        dense_parameters=(count - most) * dense + most * beside,
        experts=most * all_experts,
    )


def terms(shape: StepShape, layout: ParallelLayout, rates: DeviceRates, near: int | None = None) -> tuple[float, ...]:
    """Seconds of compute, of activations between stages, of gradients, of launches, of what every step has, of
    all-reduces in a TP group, and of all-to-alls in an EP x ETP group. `near`: so many ranks one after the other lie on
    one node; None: those of each group (`near_units`)."""
    hidden, tokens = shape.hidden_size, shape.micro_batch * shape.seq_length
    micro_batches = max(1, shape.global_batch // (shape.micro_batch * layout.dp))
    layers = _layers(shape, layout.pp)
    head = 6 * tokens * hidden * shape.padded_vocab_size
    slowest = layers.largest + (0 if shape.cuts_head else head)
    compute = ((micro_batches - 1) * slowest + layers.flops + head) / (layout.tp * layout.cp)
    activation = 4 * tokens * hidden / layout.cp
    passes = micro_batches - 1 + layout.pp
    between = passes * activation * 2 if layout.pp > 1 else 0
    dense = 4 * (layers.dense_parameters + hidden * shape.padded_vocab_size) / layout.tp
    experts = 4 * layers.experts / (layout.expert_tp * layout.ep)
    gradient = dense * 2 * (layout.dp - 1) / layout.dp + experts * 2 * (layout.expert_dp - 1) / layout.expert_dp
    # Where a layer has experts and no shared ones, only its attention is summed over TP.
    half = layers.sparse / 2 if shape.experts is not None and not shape.experts.shared_ffn else 0
    reduces = 8 * (layout.tp - 1) / layout.tp * activation * (layers.count - half) * passes

    def links(group: int) -> float:
        return rates.near_bytes_per_s if near is None or near % group == 0 else rates.bytes_per_s

    return (
        compute / rates.flops_per_s,
        between / rates.bytes_per_s,
        gradient / rates.bytes_per_s,
        passes * (1 + layers.count) * rates.launch_s,
        rates.launch_s,
        reduces / links(layout.tp),
        passes * layers.sparse * _exchanged(shape, layout) / links(layout.expert_tp * layout.ep),
    )


def _exchanged(shape: StepShape, layout: ParallelLayout) -> float:
    """Bytes that a rank gets for the experts of one layer and one micro-batch: each of its tokens goes to `topk` of
    them and back, forward and backward, in two bytes an element. A share of 1 / EP stays where it is; ETP's ranks all
    get what comes to one of them."""
    if shape.experts is None:
        return 0.0
    tokens = shape.micro_batch * shape.seq_length / (layout.tp * layout.cp)
    copies = (layout.ep - 1) / layout.ep + layout.expert_tp - 1
    return 4 * tokens * shape.experts.topk * shape.hidden_size * 2 * copies


def fitted(shape: StepShape, observed: tuple[ObservedStep, ...], rates: DeviceRates) -> StepTimeModel:
    """The model after these observations: each counts by its relative error, and the terms that they say nothing of
    keep the common scale of all."""
    seen = [item for item in observed[-OBSERVATIONS_MAX:] if item.seconds > 0]
    rows = [terms(shape, item.layout, rates, item.near) for item in seen]
    scale = median(item.seconds / sum(row) for item, row in zip(seen, rows, strict=True)) if seen else 1.0
    relative = [[scale * value / item.seconds for value in row] for item, row in zip(seen, rows, strict=True)]
    weights = non_negative(relative, [1.0] * len(seen), ties=TIES, toward=1.0)
    error = PRIOR_ERRORS[min(len(seen), 2)]
    if len(seen) > 2:
        left_out = predictor_leverages(relative, weights, ties=TIES)
        off = [abs(1 - sum(a * x for a, x in zip(weights, row, strict=True))) for row in relative]
        misses = [miss / max(0.05, 1 - h) for miss, h in zip(off, left_out, strict=True)]
        error = (USUAL_MISS + sum(misses)) / (1 + len(misses))
    return StepTimeModel(shape, rates, tuple(scale * weight for weight in weights), error)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The steps of one job: measured where it has run so, predicted from those where it has not."""

    shape: StepShape
    rates: DeviceRates
    measured: tuple[tuple[str, float], ...]
    errors: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(
        cls,
        job: JobFile,
        measured: tuple[tuple[str, float], ...],
        device: str = "",
        errors: tuple[tuple[str, float], ...] = (),
    ) -> "StepTimes":
        """Of a job. `measured`: the median step by layout; `errors`: its error, 0 where none is named."""
        return cls(StepShape.of(job), rates_of(device), measured, errors)

    def of_layout(self, layout: ParallelLayout, *, near: int | None = None) -> StepEstimate:
        """The step in this layout. `near`: as `terms` has it."""
        seconds = dict(self.measured).get(str(layout))
        if seconds is not None and seconds > 0:
            return StepEstimate(seconds, dict(self.errors).get(str(layout), 0.0), measured=True)
        return self.predicted(layout, near=near)

    def predicted(self, layout: ParallelLayout, *, near: int | None = None) -> StepEstimate:
        """As if this layout had never run."""
        others = tuple((name, seconds) for name, seconds in self.measured if name != str(layout))
        model = _fitted_to(self.shape, others, self.rates)
        return StepEstimate(model.predict(layout, near=near), model.error)


@lru_cache(maxsize=256)
def _fitted_to(shape: StepShape, measured: tuple[tuple[str, float], ...], rates: DeviceRates) -> StepTimeModel:
    return fitted(shape, tuple(ObservedStep(ParallelLayout.parse(name), seconds) for name, seconds in measured), rates)
