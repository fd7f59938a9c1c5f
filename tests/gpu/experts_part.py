"""Part 10: the reference job with experts and a bias that each step changes: DP2xEP2 to one rank live, and to DP2xEP2
again by stop-and-copy, in bf16 with 16-bit gradients."""

from __future__ import annotations

from typing import Any

from liver_core.handoff.messages import Rung
from tests.gpu.check import Finding, Verdict
from tests.gpu.handed_over import judged
from tests.liver_core.rank.support.chain import World

WORLDS = (World("DP2xEP2", "ab"), World("TP1", "b"), World("DP2xEP2", "cb"))
EXPERTS: dict[str, Any] = {
    "num_layers": 4,
    "num_experts": 4,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "grad_reduce_in_fp32": False,
}


def run(device: str) -> Finding:
    handoffs = judged(device, WORLDS, (Rung.LIVE, Rung.STOP_AND_COPY), job=EXPERTS)
    pauses = ", ".join(f"{each['from']} to {each['to']} {each['pause_s'] * 1e3:.0f} ms" for each in handoffs)
    return Finding(
        Verdict.PASSED,
        f"bit for bit, with the bias, and as Megatron loads it; pauses: {pauses}",
        {"handoffs": handoffs},
    )
