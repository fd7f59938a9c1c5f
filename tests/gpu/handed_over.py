"""A reference job handed over once or more, and both judgements: the state that the old world held, bit for bit, and
what Megatron's own loader makes of its checkpoint in the new layout."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from liver_core.handoff.messages import CutoverDeadlines, Rung
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import build_corpus, small_gpt
from tests.liver_core.rank.support.chain import (
    Chain,
    World,
    assert_as_megatron_loads,
    gather,
    load_with_megatron,
)
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.rank.support.tight import manifest_of, tight

STEPS_EACH, LIMIT_S = 2, 60.0
MORE_PART, PLENTY_BYTES = 20, 1 << 40
UNHURRIED = CutoverDeadlines(target_s=15.0, source_s=20.0, store_s=30.0)
"""What is judged is state, also on a machine that does much else."""
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"num_layers": 6, "hidden_size": 256, "ffn_hidden_size": 1024, "seq_length": 256, "precision": "bf16"},
    "cpu": {"num_layers": 6, "hidden_size": 32, "ffn_hidden_size": 64, "seq_length": 16, "precision": "bf16"},
}


def judged(
    device: str,
    worlds: tuple[World, ...],
    rungs: tuple[Rung, ...],
    *,
    gpus: tuple[str, ...] = (),
    on_device: tuple[tuple[str, int], tuple[str, int]] | None = None,
    job: Mapping[str, Any] = MappingProxyType({}),
) -> list[Any]:
    """What each handoff took. Raises AssertionError, with the reason, where state differs or a rung was not kept.

    on_device: (layout, rank) before and after of a survivor; the device then has room for little more than a tile of
    its next world, and the rest of all next worlds waits in host memory. job: more of its arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = small_gpt(build_corpus(Path(folder)), **{**SHAPES[device], **job})
        setup = RankSetup(arguments, record=True, checkpoint_at_boundary=folder, bring_up_s=LIMIT_S, gpus=gpus)
        if on_device is not None:
            least, _ = tight(manifest_of(setup), *on_device, streams=rungs[0] is Rung.LIVE)
            setup = replace(setup, extra_bytes_max=least + least // MORE_PART, host_bytes_max=PLENTY_BYTES)
        chain = run(setup, worlds, rungs)
        generations = range(2, len(worlds) + 1)
        for generation in generations:
            before, after = chain.state("source", generation - 1), chain.state("target", generation)
            unequal = differences(before, after)
            if on_device is None:  # What waits in host memory has no weights before the pause is over.
                unequal += differences(chain.weights("source", generation - 1), chain.weights("target", generation))
            unequal += _other_biases(chain, generation)
            assert not unequal, f"after {worlds[generation - 1].layout} state differs: {', '.join(unequal[:4])}"
        wanted = [(f"{folder}/generation-{number - 1}", worlds[number - 1].layout) for number in generations]
        for generation, loaded in zip(generations, load_with_megatron(setup, wanted), strict=True):
            gathered = chain.records[("target", generation)] if on_device is None else None
            assert_as_megatron_loads(loaded, chain.records[("switched", generation)], gathered)
    return [taken(chain, worlds, generation) for generation in generations]


def _other_biases(chain: Chain, generation: int) -> list[str]:
    """Names of what steps change beside parameters that a rank did not get as the world before had it."""
    had: dict[str, str] = {}
    for record in chain.records[("source", generation - 1)].values():
        had |= record["step_tensors"]["after"]
    got = [record["step_tensors"]["after"] for record in chain.records[("switched", generation)].values()]
    return sorted({name for each in got for name in each if each[name] != had[name]})


def run(setup: RankSetup, worlds: tuple[World, ...], rungs: tuple[Rung, ...]) -> Chain:
    measures: dict[int, list[dict[str, float]]] = {}
    with Cluster(setup) as cluster:
        cluster.launch(worlds[0].layout, worlds[0].nodes, timeout_s=LIMIT_S)
        step = 0
        for (world, following), rung in zip(itertools.pairwise(worlds), rungs, strict=True):
            cluster.await_step(world.first, step + STEPS_EACH, LIMIT_S)
            request = cluster.open(
                following.layout, following.nodes, deadline_s=2 * LIMIT_S, cutover=UNHURRIED, rung=rung
            )
            cluster.await_stage(cluster.members(request), request, "prepared", LIMIT_S)
            if rung is Rung.LIVE:
                kept, reason = cluster.verdict(following.first, request)
                assert kept == rung, f"to {following.layout} by {kept} instead: {reason}"
            cluster.complete(request, timeout_s=LIMIT_S)
            stages = [cluster.stages(member, request.handoff_id)[-1] for member in request.target.members]
            measures[request.generation] = [said for _, _, said in stages]
            step = max(row[1] for row in cluster.steps(following.first))
        cluster.await_step(worlds[-1].first, step + STEPS_EACH, LIMIT_S)
        cluster.stop()
        return replace(gather(cluster, worlds), measures=measures)


def taken(chain: Chain, worlds: tuple[World, ...], generation: int) -> dict[str, Any]:
    said = chain.measures[generation]
    return {
        "from": worlds[generation - 2].layout,
        "to": worlds[generation - 1].layout,
        "pause_s": chain.pause_s(generation),
        "bytes_moved": sum(each.get("bytes_moved", 0.0) for each in said),
        "host_bytes_peak": max(each.get("host_bytes_peak", 0.0) for each in said),
        "bytes_streamed": sum(each.get("bytes_streamed", 0.0) for each in said),
        "measures": said,
        "losses": list(chain.losses().values()),
    }
