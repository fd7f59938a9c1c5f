"""Part 6: how long steps of the reference job take, alone and while its state streams to another process beside it; and
how long it pauses, by each rung."""

from __future__ import annotations

import statistics
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from liver_core.handoff.messages import RankStage, Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import build_corpus, small_gpt
from tests.gpu.check import Finding, Verdict
from tests.gpu.handed_over import LIMIT_S, UNHURRIED
from tests.liver_core.rank.support.chain import pause_of

STEPS = 12
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "seq_length": 1024, "precision": "bf16"},
    "cpu": {"num_layers": 2, "precision": "bf16"},
}
FIRST = Member("a", 0)
FURTHER = (("DP2", (0, 1), Rung.LIVE), ("TP2", (1, 2), Rung.LIVE), ("TP1", (1,), Rung.STOP_AND_COPY))
"""Layout, which nodes, and how."""
BETWEEN = 3
"""Steps that each world takes at least before the next handoff begins."""


def run(device: str) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        arguments = small_gpt(build_corpus(Path(folder)), **SHAPES[device])
        with Cluster(RankSetup(arguments, bring_up_s=LIMIT_S)) as cluster:
            return measure(cluster)


def measure(cluster: Cluster) -> Finding:
    """One rank each at first, so that nothing but streaming lies between the two figures."""
    cluster.launch("TP1", "a", timeout_s=LIMIT_S)
    cluster.await_step(FIRST, STEPS + 2, LIMIT_S)
    alone = latest_steps(cluster)
    request, _, why_not = prepared(cluster, "TP1", "b", Rung.LIVE)
    cluster.await_step(FIRST, cluster.steps(FIRST)[-1][1] + STEPS + 1, LIMIT_S)
    beside = latest_steps(cluster)
    reason = completed(cluster, request)
    why_not += [reason] if reason else []
    nodes = "abcd" if reason else "bcde"
    pauses = []
    for layout, places, rung in FURTHER:
        request, kept, otherwise = prepared(cluster, layout, [nodes[at] for at in places], rung)
        why_not += otherwise
        if reason := completed(cluster, request):
            why_not.append(reason)
            break
        pauses.append(pause(cluster, request, kept))
    cluster.stop()
    ratio = statistics.median(beside) / statistics.median(alone)
    found = {"alone_s": alone, "streaming_s": beside, "ratio": ratio, "pauses": pauses, "given_up": why_not}
    text = f"{statistics.median(alone) * 1e3:.1f} ms alone, {ratio:.2f} times that while another process follows"
    text += f" (medians of {STEPS}; both share the device); pauses: "
    text += ", ".join(f"{each['from']} to {each['to']} {each['how']} {each['pause_s'] * 1e3:.0f} ms" for each in pauses)
    text += "".join(f"; given up: {reason}" for reason in why_not)
    return Finding(Verdict.FAILED if why_not else Verdict.PASSED, text, found)


def prepared(cluster: Cluster, layout: str, nodes: Iterable[str], rung: Rung) -> tuple[Any, str, list[str]]:
    """The order of a handoff that needs the permission only, how it will be done, and why not as asked."""
    assert cluster.roster is not None
    first = cluster.roster.members[0]
    cluster.await_step(first, cluster.steps(first)[-1][1] + BETWEEN, LIMIT_S)
    request = cluster.open(layout, nodes, deadline_s=4 * LIMIT_S, cutover=UNHURRIED, rung=rung)
    cluster.await_stage(cluster.members(request), request, "prepared", LIMIT_S)
    kept, reason = (rung, "") if rung is not Rung.LIVE else cluster.verdict(request.target.members[0], request)
    return request, str(kept), [] if kept == rung else [f"to {layout} by {kept} instead: {reason}"]


def completed(cluster: Cluster, request: Any) -> str:
    """Empty, or why the old world kept the job."""
    try:
        cluster.complete(request, timeout_s=LIMIT_S)
    except AssertionError as error:
        stages = [cluster.stages(member, request.handoff_id)[-1] for member in request.target.members]
        if not any(stage == RankStage.ABORTED for stage, *_ in stages):
            raise
        traceback.print_exc()
        return next((reason for stage, reason, _ in stages if stage == RankStage.ABORTED and reason), str(error))
    return ""


def pause(cluster: Cluster, request: Any, how: str) -> dict[str, Any]:
    said = [cluster.stages(member, request.handoff_id)[-1][-1] for member in request.target.members]
    return {
        "from": str(request.source.layout),
        "to": str(request.target.layout),
        "how": how,
        "pause_s": max(0.0, pause_of(said)),
        "measures": said,
    }


def latest_steps(cluster: Cluster) -> list[float]:
    """Seconds of the last steps of the first rank."""
    events = cluster.ranks[FIRST].events
    before = sum(event[0] == "steps" for event in list(events))
    cluster.command([FIRST], "tell_steps")
    cluster.wait_for(lambda: sum(event[0] == "steps" for event in list(events)) > before, 20, "durations of steps")
    return [event[2] for event in list(events) if event[0] == "steps"][-1][-STEPS:]
