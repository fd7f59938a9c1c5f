"""Part 8: a GPU for each rank, NCCL between them: TP2xPP2 to PP3 by stop-and-copy, and back live."""

from __future__ import annotations

from liver_core.handoff.messages import Rung
from tests.gpu.check import Finding, Verdict
from tests.gpu.handed_over import judged
from tests.liver_core.rank.support.chain import World

GPUS = 4
# Node h, the eighth, takes the GPU that d leaves, the fourth of four.
WORLDS = (World("TP2xPP2", "abcd"), World("PP3", "abc"), World("TP2xPP2", "abch"))


def run(device: str) -> Finding:
    gpus: tuple[str, ...] = ()
    if device == "cuda":
        import torch

        if (there := torch.cuda.device_count()) < GPUS:
            return Finding(Verdict.SKIPPED, f"needs {GPUS} GPUs, this machine has {there}")
        gpus = tuple(str(at) for at in range(GPUS))
    handoffs = judged(device, WORLDS, (Rung.STOP_AND_COPY, Rung.LIVE), gpus=gpus)
    pauses = ", ".join(f"{each['from']} to {each['to']} {each['pause_s'] * 1e3:.0f} ms" for each in handoffs)
    return Finding(Verdict.PASSED, f"bit for bit, and as Megatron loads it; pauses: {pauses}", {"handoffs": handoffs})
