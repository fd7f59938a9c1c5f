"""Part 4: the reference job on one device: DP2 to TP2 by stop-and-copy, back live, live where the device has no room
for the next world, and live between layouts with pipeline stages."""

from __future__ import annotations

import traceback
from typing import Any

from liver_core.handoff.messages import Rung
from tests.gpu.check import Finding, Verdict
from tests.gpu.handed_over import judged
from tests.liver_core.rank.support.chain import World

DP2_TO_TP2 = (World("DP2", "ab"), World("TP2", "bc"))
TP2_TO_DP2 = (World("TP2", "ab"), World("DP2", "bc"))
HANDOFFS: dict[str, tuple[tuple[World, World], Rung, Any]] = {
    "stop-and-copy": (DP2_TO_TP2, Rung.STOP_AND_COPY, None),
    "live": (TP2_TO_DP2, Rung.LIVE, None),
    "live over host memory": (TP2_TO_DP2, Rung.LIVE, (("TP2", 1), ("DP2", 0))),
    "live with stages": ((World("TP2xPP2", "abcd"), World("PP3", "abe")), Rung.LIVE, None),
}


def run(device: str) -> Finding:
    """All are tried, so that one stands where another fails."""
    found: dict[str, Any] = {}
    wrong = []
    for name, (worlds, rung, on_device) in HANDOFFS.items():
        try:
            [found[name]] = judged(device, worlds, (rung,), on_device=on_device)
            waited = found[name]["host_bytes_peak"] > 0
            assert waited == (on_device is not None), f"{'some' if waited else 'nothing'} waited in host memory"
        except AssertionError as error:
            traceback.print_exc()
            found[name] = {"failed": str(error)}
            wrong.append(f"{name}: {error}")
    if wrong:
        return Finding(Verdict.FAILED, "\n".join(wrong), found)
    pauses = ", ".join(f"{name} {found[name]['pause_s'] * 1e3:.0f} ms of pause" for name in HANDOFFS)
    return Finding(Verdict.PASSED, f"bit for bit what the old world held and what Megatron loads; {pauses}", found)
