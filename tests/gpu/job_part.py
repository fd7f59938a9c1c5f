"""Part 4: the reference job on one device, two ranks on it: DP2 to TP2 by stop-and-copy, then back live."""

from __future__ import annotations

import traceback
from typing import Any

from liver_core.handoff.messages import Rung
from tests.gpu.check import Finding, Verdict
from tests.gpu.handed_over import judged
from tests.liver_core.rank.support.chain import World

HANDOFFS = {
    "stop-and-copy": ((World("DP2", "ab"), World("TP2", "bc")), Rung.STOP_AND_COPY),
    "live": ((World("TP2", "ab"), World("DP2", "bc")), Rung.LIVE),
}


def run(device: str) -> Finding:
    """Both are tried, so that the first stands where the second fails."""
    found: dict[str, Any] = {}
    wrong = []
    for name, (worlds, rung) in HANDOFFS.items():
        try:
            [found[name]] = judged(device, worlds, (rung,))
        except AssertionError as error:
            traceback.print_exc()
            found[name] = {"failed": str(error)}
            wrong.append(f"{name}: {error}")
    if wrong:
        return Finding(Verdict.FAILED, "\n".join(wrong), found)
    pauses = ", ".join(f"{name} {found[name]['pause_s'] * 1e3:.0f} ms of pause" for name in HANDOFFS)
    return Finding(Verdict.PASSED, f"bit for bit what the old world held and what Megatron loads; {pauses}", found)
