"""A small analytic step-time model, overridden by what was measured. Pure.

step = a1 [(M - 1) x slowest stage + sum of stages] + a2 (M - 1 + PP) x activation + a3 x gradient x 2 (DP - 1) / DP
       + a4 (M + PP - 1) + tensor-parallel all-reduces.
The constants are a prior for commodity machines; only the ranking matters until a layout was measured, and then the
prior is scaled by measured over predicted.
"""

from dataclasses import dataclass
from statistics import median

from agent.protocol.jobfile import JobFile, parse_layout
from liver_core.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class Prior:
    """Rates of the prior, per rank."""

    flops_per_s: float = 5.0e12
    bytes_per_s: float = 2.0e9
    launch_s: float = 2.0e-4


@dataclass(frozen=True, slots=True)
class Score:
    """Predicted seconds per step and where the number comes from."""

    seconds: float
    measured: bool


BETWEEN_NODES = 8.0
"""So many times slower are the all-reduces of a TP group that does not lie on one node."""


def predict(job: JobFile, layout: ParallelLayout, prior: Prior | None = None, *, whole: bool = True) -> float:
    """Seconds per step by the formula alone. `whole`: each TP group lies on one node."""
    rate = prior or Prior()
    model = job.model
    ffn = model.ffn_hidden_size or 4 * model.hidden_size
    layer_parameters = 4 * model.hidden_size**2 + 3 * model.hidden_size * ffn
    tokens = job.micro_batch * model.seq_length
    micro_batches = max(1, job.global_batch // (job.micro_batch * layout.dp))
    flops = 6 * tokens * (layer_parameters + 2 * model.seq_length * model.hidden_size)
    stage_s = flops * model.num_layers / layout.pp / (layout.tp * layout.cp) / rate.flops_per_s
    head_s = 6 * tokens * model.hidden_size * model.padded_vocab_size / layout.tp / rate.flops_per_s
    activation_s = 4 * tokens * model.hidden_size / rate.bytes_per_s
    tensor_s = 8 * (layout.tp - 1) / layout.tp * activation_s * model.num_layers / layout.pp
    tensor_s *= 1.0 if whole else BETWEEN_NODES
    compute = (micro_batches - 1 + layout.pp) * (stage_s + tensor_s) + micro_batches * head_s
    pipeline = 2 * (micro_batches - 1 + layout.pp) * activation_s if layout.pp > 1 else 0.0
    stage_parameters = layer_parameters * model.num_layers / (layout.pp * layout.tp)
    gradient = 4 * stage_parameters * 2 * (layout.dp - 1) / layout.dp / rate.bytes_per_s
    launches = rate.launch_s * (micro_batches + layout.pp - 1) * (1 + model.num_layers / layout.pp)
    return compute + pipeline + gradient + launches


def score(
    job: JobFile, layout: ParallelLayout, measured: tuple[tuple[str, float], ...], *, whole: bool = True
) -> Score:
    """The measured step time of the layout; else the prediction, scaled by measured over predicted of other layouts."""
    known = dict(measured)
    if str(layout) in known:
        return Score(known[str(layout)], measured=True)
    ratios = [seconds / predict(job, parse_layout(name)) for name, seconds in measured if seconds > 0]
    return Score(predict(job, layout, whole=whole) * (median(ratios) if ratios else 1.0), measured=False)
