"""Handoffs of jobs whose state has more than one dtype: gradients of 16 bits, norms that stay fp32, both at once, and
both with an optimizer of their own for the norms, which the worlds in between do not have.

By the oracles of `test_exactness`, and by fresh worlds that start from the step that was handed over. There are several
gradient buckets, and with norms in fp32 also several buffers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff.messages import Rung
from liver_core.layout import ParallelLayout, shard_ranges
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.rank.support.chain import (
    Chain,
    World,
    assert_as_megatron_loads,
    gather,
    load_with_megatron,
    run_chain,
)
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.rank.support.job_names import JOBS
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

DTYPES = {
    "gradients": {"grad_reduce_in_fp32": False},
    "norms": {"norms_in_fp32": True},
    "both": {"grad_reduce_in_fp32": False, "norms_in_fp32": True},
}
DTYPES["two optimizers"] = DTYPES["both"]
WORLDS = (World("DP2", "ab"), World("TP2", "cb"), World("PP2", "cd"), World("DP2", "ed"))
HANDOFFS = range(2, len(WORLDS) + 1)
LIVE, COPIED = Rung.LIVE, Rung.STOP_AND_COPY
RUNGS = {"live first": (LIVE, COPIED, LIVE), "copied first": (COPIED, LIVE, COPIED)}
MODES = {f"{dtypes}, {how}": (dtypes, rungs) for dtypes in DTYPES for how, rungs in RUNGS.items()}
STEPS_AFTER = 3


@pytest.fixture(scope="module", params=sample(MODES, "two optimizers, live first"))
def mode(request: pytest.FixtureRequest) -> tuple[str, tuple[Rung, ...]]:
    return MODES[request.param]


@pytest.fixture(scope="module")
def setup(mode: tuple[str, tuple[Rung, ...]], corpus: str, tmp_path_factory: pytest.TempPathFactory) -> RankSetup:
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000}
    arguments = small_gpt(corpus, num_layers=2, precision="bf16", **overlaps, **DTYPES[mode[0]])
    return RankSetup(
        arguments,
        job=JOBS.get(mode[0], JOBS["adam"]),
        micro_batch=1,
        record=True,
        trace=True,
        checkpoint_at_boundary=str(tmp_path_factory.mktemp("boundary")),
        checkpoints=(str(tmp_path_factory.mktemp("steps")), 1, 1_000),
        pace_s=0.25,
    )


@pytest.fixture(scope="module")
def chain(setup: RankSetup, mode: tuple[str, tuple[Rung, ...]]) -> Chain:
    return run_chain(setup, WORLDS, rung=mode[1], steps_each=STEPS_AFTER + 2, steps_last=STEPS_AFTER + 2)


def test_buffers_and_buckets_are_several(chain: Chain, mode: tuple[str, tuple[Rung, ...]]):
    held = [shard_ranges(chain.manifest, ParallelLayout.parse(world.layout), 0).buckets for world in WORLDS]
    buffers = [sorted({bucket.buffer[2:] for bucket in of_rank}) for of_rank in held]
    narrow = "float32" if mode[0] == "norms" else "bfloat16"
    wide = [] if mode[0] == "gradients" else [("float32", "float32")]
    assert buffers == [[("bfloat16", narrow), *wide]] * len(WORLDS)
    assert min(len(of_rank) for of_rank in held) > len(buffers[0])


def test_masters_moments_gradients_and_weights_are_bit_for_bit_what_the_old_world_held(chain: Chain):
    for generation in HANDOFFS:
        before, after = chain.state("source", generation - 1), chain.state("target", generation)
        assert {name.split("/")[0] for name in before} == {"master", "exp_avg", "exp_avg_sq", "grad"}
        assert differences(before, after) == [], generation
        weights = [chain.weights("source", generation - 1), chain.weights("target", generation)]
        assert differences(*weights) == [], generation


def test_every_local_tensor_is_what_megatrons_own_loader_puts_there(chain: Chain, setup: RankSetup):
    folder = Path(str(setup.checkpoint_at_boundary))
    wanted = [(str(folder / f"generation-{number - 1}"), WORLDS[number - 1].layout) for number in HANDOFFS]
    for generation, oracle in zip(HANDOFFS, load_with_megatron(setup, wanted), strict=True):
        switched, gathered = chain.records[("switched", generation)], chain.records[("target", generation)]
        assert_as_megatron_loads(oracle, switched, gathered)


def test_no_byte_moves_twice(chain: Chain):
    for of_ranks in chain.measures.values():
        for said in of_ranks:
            assert said.get("bytes_moved", 0.0) == said["bytes_planned"] == said["bytes_lower_bound"]


@pytest.mark.parametrize("generation", sample(list(HANDOFFS), 3))
def test_the_steps_after_are_those_of_a_fresh_world_that_starts_from_the_step_handed_over(
    chain: Chain, setup: RankSetup, generation: int
):
    assert setup.checkpoints is not None
    world, step = WORLDS[generation - 1], chain.handed_step(generation)
    fresh: Any = replace(setup, checkpoints=None, checkpoint_at_boundary="", last_step=step + STEPS_AFTER + 1)
    with Cluster(fresh) as cluster:
        cluster.launch(world.layout, world.nodes, checkpoint=f"{setup.checkpoints[0]}/step-{step:09d}")
        cluster.finish()
        alone = gather(cluster, (world,))
    for node in world.nodes:
        for number in range(step, step + STEPS_AFTER + 1):
            assert chain.traces[node][number][1] == alone.traces[node][number][1], (node, number)
    losses = alone.losses()
    assert {number: loss for number, loss in chain.losses().items() if number in losses} == losses
