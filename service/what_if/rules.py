"""From what is asked to what is answered, without database or process. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile import JobFile
from service.policy.price_book import PriceError
from service.policy.types import PolicyVerdict
from service.simulation.cluster_replay import ClusterRun
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.replay_ledger import hours_by_cause
from service.simulation.replay_setup import ReplaySetup
from service.simulation.traces import CapacityTrace, TraceError, TraceFormat, read_trace
from service.simulation.what_if import SETUP, GangError, WhatIf, WhatIfAnswer, read_node_prices, what_if
from service.what_if.schemas import (
    CurvePoint,
    OraclesOut,
    PolicyRunOut,
    TokensLost,
    WhatIfKnobs,
    WhatIfOut,
)

SLOTS_PER_NODE, DEVICE = 1, "A100"


class CannotReplay(ValueError):
    """What was asked cannot be replayed: the field and the rule it breaks."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.problem = FieldProblem(field=field, rule=rule)


@dataclass(frozen=True, slots=True)
class Question:
    """All that a replay needs. `measured`: seconds of a step by layout, of those in which the job has run.
    `lasts_s`: how long the trace lasts at least, also if nothing happens at its end. `machines`: whether the product's
    machines carry the changes."""

    job: JobFile
    trace_name: str
    trace_format: TraceFormat
    trace_text: str
    prices: str | None
    knobs: WhatIfKnobs
    measured: tuple[tuple[str, float], ...] = ()
    lasts_s: float = 0.0
    machines: bool = False


def answer_of(asked: Question) -> WhatIfOut:
    """Replays. Raises CannotReplay."""
    trace, found = _trace(asked), _asked(asked)
    try:
        answer = what_if(asked.job, trace, found)
    except TraceError as error:
        raise CannotReplay("trace", str(error)) from None
    except GangError as error:
        raise CannotReplay("knobs.gang", str(error)) from None
    except ValueError as error:
        raise CannotReplay("job", str(error)) from None
    return _shown(asked.job, found, answer)


def _trace(asked: Question) -> CapacityTrace:
    try:
        trace = read_trace(asked.trace_name, asked.trace_text, asked.trace_format)
    except TraceError as error:
        raise CannotReplay("trace.text", str(error)) from None
    return replace(trace, end_s=max(trace.end_s, asked.lasts_s))


def _asked(asked: Question) -> WhatIf:
    knobs = asked.knobs
    try:
        spot, on_demand = read_node_prices(asked.prices)
    except PriceError as error:
        raise CannotReplay("prices", str(error)) from None
    return WhatIf(
        setup=ReplaySetup(
            usd_per_hour_on_demand=on_demand,
            prices=spot,
            notice_s=knobs.notice_s,
            unannounced_share=knobs.unannounced_share,
            acquire_s=SETUP.acquire_s,
            counts_steps=True,
            gang=knobs.gang,
        ),
        slots_per_node=knobs.slots_per_node or SLOTS_PER_NODE,
        device=knobs.device or DEVICE,
        change_s=knobs.change_s,
        usd_per_mtok=knobs.usd_per_mtok,
        acquire_s=knobs.acquire_s,
        spares_max=knobs.spares_max,
        gain_min=knobs.gain_min,
        measured=asked.measured,
        times=ChangeTimes() if asked.machines else None,
    )


def _shown(job: JobFile, asked: WhatIf, answer: WhatIfAnswer) -> WhatIfOut:
    found, facts = answer.comparison, answer.facts()
    return WhatIfOut(
        job=job.name,
        trace=found.trace.name,
        hours=found.trace.end_s / 3_600.0,
        nodes_most=max((count for _, count in found.trace.counts()), default=0),
        slots_per_node=asked.slots_per_node,
        device=asked.device,
        notice_s=found.setup.notice_s,
        unannounced_share=found.setup.unannounced_share,
        acquire_s=found.setup.acquire_s,
        lost_s=answer.lost_s,
        lost_s_source=answer.lost_s_source,
        lost_s_is_guess=answer.is_guess,
        ideal_tokens=found.runs[0].ideal_tokens,
        oracles=OraclesOut(
            count_tokens=found.count_oracle_tokens,
            victim_tokens=found.victim_oracle_tokens,
            regret_count=facts["regret_count_oracle"],
            regret_victim=facts["regret_victim_oracle"],
        ),
        tokens_vs_hold_all=facts["tokens_vs_hold_all"],
        usd_vs_hold_all=facts["usd_vs_hold_all"],
        policies=[_run(name, run) for name, run in zip(found.names, found.runs, strict=True)],
        enacted=None if asked.times is None else facts["enacted"],
        handoffs_refused=facts["handoffs_refused"],
        gave_up=facts["gave_up"],
        not_followed=facts["not_followed"],
    )


def _run(name: str, run: ClusterRun) -> PolicyRunOut:
    return PolicyRunOut(
        policy=name,
        goodput=run.goodput,
        tokens=run.tokens,
        usd=run.usd,
        usd_per_mtok=run.usd_per_mtok if run.tokens > 0 else None,
        changes=run.changes,
        tokens_lost_by=TokensLost(**dict(run.tokens_lost_by)),
        node_hours_by_cause=hours_by_cause(run),
        decisions=_counted([decision.verdict for _, decision in run.decisions]),
        curve=[CurvePoint(**asdict(point)) for point in run.progress],
    )


def _counted(verdicts: Sequence[PolicyVerdict]) -> dict[PolicyVerdict, int]:
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in PolicyVerdict}
