"""Part 6: how long steps of the reference job take, alone and while its state streams to another process beside it."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from liver_core.handoff.messages import Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import build_corpus, small_gpt
from tests.gpu.check import Finding, Verdict
from tests.gpu.handed_over import LIMIT_S, UNHURRIED

STEPS = 12
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "seq_length": 1024, "precision": "bf16"},
    "cpu": {"num_layers": 2, "precision": "bf16"},
}
FIRST, SECOND = Member("a", 0), Member("b", 0)


def run(device: str) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        arguments = small_gpt(build_corpus(Path(folder)), **SHAPES[device])
        with Cluster(RankSetup(arguments, bring_up_s=LIMIT_S)) as cluster:
            return measure(cluster)


def measure(cluster: Cluster) -> Finding:
    """One rank each, so that nothing but streaming lies between the two figures."""
    cluster.launch("TP1", "a", timeout_s=LIMIT_S)
    cluster.await_step(FIRST, STEPS + 2, LIMIT_S)
    alone = latest_steps(cluster)
    request = cluster.open("TP1", "b", deadline_s=4 * LIMIT_S, cutover=UNHURRIED, rung=Rung.LIVE)
    cluster.await_stage(cluster.members(request), request, "prepared", LIMIT_S)
    kept, reason = cluster.verdict(SECOND, request)
    if kept != Rung.LIVE:
        return Finding(Verdict.FAILED, f"did not stream, {kept} instead: {reason}")
    cluster.await_step(FIRST, cluster.steps(FIRST)[-1][1] + STEPS + 1, LIMIT_S)
    beside = latest_steps(cluster)
    cluster.complete(request, timeout_s=LIMIT_S)
    cluster.stop()
    ratio = statistics.median(beside) / statistics.median(alone)
    found = {"alone_s": alone, "streaming_s": beside, "ratio": ratio}
    text = f"{statistics.median(alone) * 1e3:.1f} ms alone, {ratio:.2f} times that while another process follows"
    return Finding(Verdict.PASSED, f"{text} (medians of {STEPS}; both share the device)", found)


def latest_steps(cluster: Cluster) -> list[float]:
    """Seconds of the last steps of the first rank."""
    events = cluster.ranks[FIRST].events
    before = sum(event[0] == "steps" for event in list(events))
    cluster.command([FIRST], "tell_steps")
    cluster.wait_for(lambda: sum(event[0] == "steps" for event in list(events)) > before, 20, "durations of steps")
    return [event[2] for event in list(events) if event[0] == "steps"][-1][-STEPS:]
