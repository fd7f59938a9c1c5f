"""The job that the handoff benchmark trains, sized by bytes of state, and what it needs in memory. Pure.

Bytes of state are those of the whole job: masters, two moments and gradients in fp32, 16 bytes a parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from liver_core.layout import ParallelLayout
from liver_core.memory.memory_budget import replay_bytes, ring_bytes

GPT_JOB, DEVICE_TIME_JOB = "liver_core.training.gpt:GptJob", "tests.benchmarks.device_time:DeviceTimeJob"
BYTES_PER_PARAMETER = 16
CHECKPOINT_BYTES_PER_PARAMETER = 12
SAVING_BYTES_PER_PARAMETER = 16
"""What a snapshot and Megatron's writer take for each data parallel replica: 15 to 17 with one, 15 with two, by what
the machine had left at its least while 256 MB and 1 GB of state were saved."""
GLOBAL_BATCH, MICRO_BATCH, SEQ_LENGTH = 8, 4, 64
TOKENS = GLOBAL_BATCH * SEQ_LENGTH
SEED = 1234
LAYERS, VOCABULARY = 12, 264
RING_DEPTH = 4
TILE_ELEMENTS = 1 << 20
BUDGET_OVER_NEED = 1.5
RESIDENT_BYTES_PER_PROCESS = 400 << 20
"""What a rank process takes before it has any state: torch, Megatron and NIXL, mostly not shared."""
FLOPS_PER_SECOND = 20e9
"""A slow pair of cores, for time limits only."""


@dataclass(frozen=True, slots=True)
class Change:
    """One way from layout to layout; each letter is a node."""

    name: str
    source: str
    source_nodes: str
    target: str
    target_nodes: str

    def __str__(self) -> str:
        return f"{self.name} {self.source} -> {self.target}"


CHANGES = (
    Change("reshape", "TP2xPP2", "abcd", "TP2xDP2", "abcd"),
    Change("shrink", "TP2xDP2", "abcd", "PP3", "abc"),
    Change("grow", "PP3", "abc", "TP2xPP2", "abcd"),
)
"""A closed round: each begins where the one before it ends."""

EXPERT_CHANGES = (
    Change("reshape", "PP2xDP2xEP2", "abcd", "DP4xEP4", "abcd"),
    Change("shrink", "DP4xEP4", "abcd", "PP3", "abc"),
    Change("grow", "PP3", "abc", "PP2xDP2xEP2", "abcd"),
)
"""The same of a model with experts."""

EXPERTS = 8


@dataclass(frozen=True, slots=True)
class Model:
    """`parameters` of the whole job; `arguments` are those of its class but for the data. `device_s`: layout and the
    seconds that a rank sleeps in each step in place of a device; empty: none does. `experts`: of each layer, each of
    the size `ffn`; 0: layers are dense."""

    hidden: int
    ffn: int
    device_s: tuple[tuple[str, float], ...] = ()
    experts: int = 0

    @property
    def changes(self) -> tuple[Change, ...]:
        """The round that it goes."""
        return EXPERT_CHANGES if self.experts else CHANGES

    @property
    def entrypoint(self) -> str:
        return DEVICE_TIME_JOB if self.device_s else GPT_JOB

    @property
    def micro_batch(self) -> int:
        """With experts the round has a layout with more replicas."""
        return MICRO_BATCH // 2 if self.experts else MICRO_BATCH

    @property
    def parameters(self) -> int:
        return LAYERS * self.layer_parameters + 2 * VOCABULARY * self.hidden + self.hidden

    @property
    def layer_parameters(self) -> int:
        router = self.experts * self.hidden
        return 4 * self.hidden**2 + max(1, self.experts) * 3 * self.hidden * self.ffn + 2 * self.hidden + router

    @property
    def state_bytes(self) -> int:
        return BYTES_PER_PARAMETER * self.parameters

    def arguments(self, data_prefix: str) -> dict[str, Any]:
        return {
            "num_layers": LAYERS,
            "hidden_size": self.hidden,
            "ffn_hidden_size": self.ffn,
            "num_attention_heads": 4,
            "padded_vocab_size": VOCABULARY,
            "seq_length": SEQ_LENGTH,
            "precision": "fp32",
            "lr": 2e-4,
            "warmup_steps": 50,
            "adam_eps": 1e-5,
            "data_prefix": data_prefix,
        } | self._more_arguments()

    def _more_arguments(self) -> dict[str, Any]:
        of_experts = {
            "num_experts": self.experts,
            "moe_ffn_hidden_size": self.ffn,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }
        more = of_experts if self.experts else {}
        return more | ({"device_s": dict(self.device_s)} if self.device_s else {})

    def rank_parameters(self, layout: str) -> int:
        """Of the fullest rank: its part of the parameters, before the optimizer cuts them over data parallel ranks."""
        parallel = ParallelLayout.parse(layout)
        elsewhere = self.experts * 3 * self.hidden * self.ffn * (1 - 1 / parallel.ep)
        stage = LAYERS // parallel.pp * (self.layer_parameters - elsewhere) + VOCABULARY * self.hidden + self.hidden
        if parallel.pp == 1:
            stage += VOCABULARY * self.hidden
        return math.ceil(stage / parallel.tp)

    def world_bytes(self, layout: str) -> int:
        """Of all ranks: parameters and gradients on every replica, moments once."""
        parallel = ParallelLayout.parse(layout)
        return self.parameters * (8 * parallel.dp + 8)


def parse_bytes(text: str) -> int:
    """ "64MB" -> 64 000 000; k, M and G with or without i (powers of 1024). Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG])(i?)B", text.strip())
    if found is None:
        raise ValueError(f"size {text!r}: a number with kB, MB, GB, kiB, MiB or GiB")
    number, unit, binary = found.groups()
    return round(float(number) * (1024 if binary else 1000) ** ("kMG".index(unit) + 1))


def model_of(state_bytes: int, experts: int = 0) -> Model:
    """The model whose state comes nearest; hidden and FFN sizes are multiples of 8. Raises ValueError."""
    wanted = state_bytes / BYTES_PER_PARAMETER
    # With experts most of a layer is theirs, so that it is less wide.
    hidden = max(8, 8 * round(math.sqrt(wanted / ((28 if experts else 13) * LAYERS)) / 8))
    beside_ffn = LAYERS * (4 * hidden**2 + (2 + experts) * hidden) + (2 * VOCABULARY + 1) * hidden
    ffn = 8 * round((wanted - beside_ffn) / (3 * hidden * LAYERS * max(1, experts)) / 8)
    if ffn < 8:
        raise ValueError(f"{state_bytes} bytes of state are too few for {LAYERS} layers and {VOCABULARY} tokens")
    return Model(hidden, ffn, experts=experts)


def extra_bytes_needed(model: Model, changes: Iterable[Change] = ()) -> int:
    """What the hardest of the changes adds to a rank: its part of the next world, its ring, one replayed tile."""
    return max(_extra_bytes_of(model, change) for change in changes or model.changes)


def _extra_bytes_of(model: Model, change: Change) -> int:
    target, source = ParallelLayout.parse(change.target), ParallelLayout.parse(change.source)
    here = model.rank_parameters(change.target)
    next_world = 8 * here + 8 * math.ceil(here / target.dp)
    ring = ring_bytes(4 * math.ceil(model.rank_parameters(change.source) / source.dp), RING_DEPTH)
    return next_world + ring + replay_bytes(min(here, TILE_ELEMENTS))


def extra_bytes_budget(model: Model, changes: Iterable[Change] = ()) -> int:
    """What each rank may take more than it has; BUDGET_OVER_NEED times what it needs."""
    return int(BUDGET_OVER_NEED * extra_bytes_needed(model, changes))


def memory_needed(model: Model, mode: str) -> int:
    """Bytes of the whole machine at the worst moment of handoffs. `mode`: live or stop_and_copy."""
    rings = RING_DEPTH * 4 * model.parameters if mode == "live" else 0
    worlds = max(model.world_bytes(change.source) + model.world_bytes(change.target) for change in model.changes)
    return worlds + rings + 6 * RESIDENT_BYTES_PER_PROCESS


def restart_memory_needed(model: Model, layout: str, restarts: int) -> int:
    """Bytes of the whole machine while one of the worlds that are restarted saves, after all others did."""
    saving = SAVING_BYTES_PER_PARAMETER * ParallelLayout.parse(layout).dp
    per_parameter = restarts * CHECKPOINT_BYTES_PER_PARAMETER + saving
    return model.world_bytes(layout) + per_parameter * model.parameters + 6 * RESIDENT_BYTES_PER_PROCESS


def step_s_at_most(model: Model) -> float:
    """Seconds of a step on a slow and busy machine, for time limits only."""
    sleeping_s = max((seconds for _, seconds in model.device_s), default=0.0)
    return 0.5 + 6 * model.parameters * TOKENS / FLOPS_PER_SECOND + sleeping_s
