"""What the notice benchmark plays: which job, notice, cloud and end of the machine each run has. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from agent.protocol.jobfile import DEFAULT_ENTRYPOINT
from agent.protocol.sync import Provider
from tests.benchmarks.handoff_model import GLOBAL_BATCH, MICRO_BATCH, SEED, VOCABULARY, model_of

STATE_BYTES = 64_000_000
NOTICES_S = (3, 5, 10, 30, 120)
EARLY_S = 10.0
"""Every second machine goes so soon after its notice, whatever its deadline; the others at the deadline."""
FAST, SLOW = "fast", "slow"
CLOUDS = (Provider.AWS, Provider.GCP)
MICRO_BATCH_S = 0.45
"""Of the slow job: with two micro-batches a step takes about two seconds on three nodes in a row, and on two."""
MODEL = model_of(STATE_BYTES)
CHECKPOINT_EVERY = {FAST: 50, SLOW: 10}
NODES, NODES_LEAST = 3, 2
GCP_LONG_S = 120


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `goes_after_s`: when the machine goes, in seconds after the notice."""

    number: int
    job: str
    provider: str
    notice_s: int
    goes_after_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cases(runs: int) -> tuple[Case, ...]:
    """Rounds of ten, on the fast job and on the slow one in turn; in each every notice, on AWS and on GCP."""
    return tuple(_case(number) for number in range(runs))


def _case(number: int) -> Case:
    round_number, place = divmod(number, len(NOTICES_S) * len(CLOUDS))
    at, cloud = divmod(place, len(CLOUDS))
    is_early = (at + round_number // 2) % 2 == 0
    notice_s = NOTICES_S[at]
    goes_after_s = min(EARLY_S, notice_s) if is_early else float(notice_s)
    return Case(number, (FAST, SLOW)[round_number % 2], CLOUDS[cloud].value, notice_s, goes_after_s)


def gcp_notice_s(pending: tuple[Case, ...], skip: int = 0) -> int:
    """What an agent on GCP is set to whose notice will be that of the next case (after `skip` others): such a machine
    has 30 s, or 120 s where that was asked for. A shorter notice is one that ends before its time."""
    ahead = (case for case in pending if case.provider == Provider.GCP.value)
    case = next(islice(ahead, skip, None), None)
    return GCP_LONG_S if case is not None and case.notice_s >= GCP_LONG_S else 0


def job_file(job: str, data_prefix: str, checkpoints: str) -> dict[str, Any]:
    """What a user would write."""
    arguments = MODEL.arguments(data_prefix)
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "padded_vocab_size", "seq_length")
    args = {name: value for name, value in arguments.items() if name not in names}
    assert arguments["padded_vocab_size"] == VOCABULARY
    return {
        "name": f"notice-{job}",
        "entrypoint": DEFAULT_ENTRYPOINT if job == FAST else "tests.agent.held_job:SlowJob",
        "model": {name: arguments[name] for name in names},
        "args": args if job == FAST else args | {"micro_batch_s": MICRO_BATCH_S},
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "seed": SEED,
        "nodes": {"min": NODES_LEAST, "max": NODES},
        "layouts": {"pinned": [{"nodes": 3, "layout": "PP3"}, {"nodes": 2, "layout": "PP2"}]},
        "checkpoint": {"path": checkpoints, "every_steps": CHECKPOINT_EVERY[job]},
        "stop": {"steps": 1_000_000},
    }
