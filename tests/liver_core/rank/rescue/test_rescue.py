"""A rescue changes nothing but the layout: leavers go before the next world is built, and no bit goes with them.

Judged as in `test_exactness`: state bit for bit, by our mapping and by Megatron's own checkpoint loader, and steps by a
job that was left alone.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff.messages import Rung
from liver_core.layout import Manifest, ParallelLayout
from liver_core.memory.memory_placement import areas
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.layout.oracle import rank_region
from tests.liver_core.rank.support.chain import (
    Chain,
    World,
    assert_as_megatron_loads,
    load_with_megatron,
    run_chain,
)
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000}
WORLDS = (
    World("TP2xDP2", "abcd"),
    World("PP3", "bcd"),  # rank 0 leaves, and two survivors have moved up
    World("TP2", "ce"),  # two leave, one stays, one is new
    World("TP2xPP2", "cefg"),  # nobody leaves: nothing is kept for anybody
    World("PP2", "ec"),  # the last stage leaves
)
HANDOFFS = range(2, len(WORLDS) + 1)
NAMES = [f"{a.layout} on {a.nodes} to {b.layout} on {b.nodes}" for a, b in itertools.pairwise(WORLDS)]
every_handoff = pytest.mark.parametrize("generation", HANDOFFS, ids=NAMES)
BATCH: dict[str, Any] = {"global_batch": 4, "micro_batch": 1}
"""Every layout here accumulates gradients over two micro-batches or more."""

PACE_S = 0.4
NARROW = {**OVERLAPPED, "grad_reduce_in_fp32": False, "norms_in_fp32": True}
MODES = {"fp32, buckets": OVERLAPPED, "bf16": {}, "bf16, gradients too": NARROW}


@pytest.fixture(scope="module", params=sample(MODES, "fp32, buckets"))
def setup(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> RankSetup:
    precision = request.param.partition(",")[0]
    arguments = small_gpt(corpus, precision=precision, **MODES[request.param])
    folder = str(tmp_path_factory.mktemp("boundary"))
    return RankSetup(arguments, **BATCH, record=True, checkpoint_at_boundary=folder, pace_s=PACE_S)


@pytest.fixture(scope="module")
def chain(setup: RankSetup) -> Chain:
    return run_chain(setup, WORLDS, rung=Rung.RESCUE, steps_each=2, steps_last=2)


@every_handoff
def test_masters_moments_and_weights_are_bit_for_bit_what_the_old_world_held(chain: Chain, generation: int):
    before, after = (
        {name: bits for name, bits in chain.state(*where).items() if not name.startswith("grad/")}
        for where in (("source", generation - 1), ("target", generation))
    )
    assert {name.split("/")[0] for name in before} == {"master", "exp_avg", "exp_avg_sq"}
    assert differences(before, after) == []
    assert differences(chain.weights("source", generation - 1), chain.weights("target", generation)) == []


@every_handoff
def test_small_state_follows_to_every_rank_and_the_batch_of_the_boundary_is_done_again(chain: Chain, generation: int):
    sources, targets = chain.records[("source", generation - 1)], chain.records[("switched", generation)]
    expected = sources[0]["small"]
    assert expected["step"] == chain.handed_step(generation) - 1
    assert [record["small"] for record in targets.values()] == [expected] * len(targets)
    assert {record["step"] for record in chain.records[("stepped", generation)].values()} == {expected["step"]}


def test_every_local_tensor_is_what_megatrons_own_loader_puts_there(chain: Chain, setup: RankSetup):
    folder = Path(str(setup.checkpoint_at_boundary))
    wanted = [(str(folder / f"generation-{number - 1}"), WORLDS[number - 1].layout) for number in HANDOFFS]
    for generation, oracle in zip(HANDOFFS, load_with_megatron(setup, wanted), strict=True):
        switched, gathered = chain.records[("switched", generation)], chain.records[("target", generation)]
        assert_as_megatron_loads(oracle, switched, gathered)


def test_the_state_that_is_gone_on_with_is_that_of_a_job_left_alone_and_no_sample_is_missing_or_twice(
    chain: Chain, setup: RankSetup
):
    first = chain.handed_step(2)
    alone = run_undisturbed(setup, WORLDS[0].layout, chain.steps[-1][1], record_steps=(first - 1,))
    assert differences(alone.state("step", first - 1), chain.state("stepped", 2)) == []
    ours, theirs = ([(row[1], row[3], row[4]) for row in each.steps] for each in (chain, alone))
    assert ours == theirs, "step, consumed samples, digest"


@every_handoff
def test_only_what_nobody_else_holds_is_rescued_and_no_byte_moves_to_who_has_it(chain: Chain, generation: int):
    before, after, said = WORLDS[generation - 2], WORLDS[generation - 1], chain.measures[generation]
    least = 12 * only_leaving(chain.manifest, before, after)
    assert sum(each.get("bytes_rescued", 0.0) for each in said) == least
    assert (least > 0) == bool(set(before.nodes) - set(after.nodes))
    for each in said:
        assert each.get("bytes_rescued", 0.0) == each.get("bytes_rescue_planned", 0.0)
        assert each.get("bytes_moved", 0.0) == each["bytes_planned"] == each["bytes_lower_bound"]


@every_handoff
def test_what_a_rank_is_going_to_need_is_known_before_anything_pauses(chain: Chain, setup: RankSetup, generation: int):
    # Of weights and gradients of norms alone there is less than is worth being built without memory.
    small = 2 * 4096 if "norms_in_fp32" in setup.job_arguments else 0
    layout = ParallelLayout.parse(WORLDS[generation - 1].layout)
    for rank, said in enumerate(chain.measures[generation]):
        built = areas(chain.manifest, layout, layout.coordinates(rank).pp)
        needs = sum(area.device_bytes for area in built)
        expected = needs + said.get("bytes_rescue_planned", 0.0)
        assert expected - small <= said["extra_bytes_peak"] <= expected


def only_leaving(manifest: Manifest, before: World, after: World) -> int:
    """Elements that no survivor holds, by ids of a mapping that is not ours."""
    sides: dict[bool, set[int]] = {True: set(), False: set()}
    for rank, node in enumerate(before.nodes):
        sides[node in after.nodes] |= set(rank_region(manifest, ParallelLayout.parse(before.layout), rank).tolist())
    return len(sides[False] - sides[True] - {-1})


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_the_same_layout_every_later_step_is_bit_for_bit_that_of_a_job_left_alone(corpus: str, precision: str):
    arguments = small_gpt(corpus, precision=precision, **OVERLAPPED)
    setup = RankSetup(arguments, **BATCH, trace=True, pace_s=PACE_S)
    worlds = (World("DP2", "ab"), World("DP2", "cb"), World("DP2", "bd"))
    chain = run_chain(setup, worlds, rung=Rung.RESCUE)
    alone = run_undisturbed(setup, "DP2", chain.steps[-1][1])
    ours = {
        (worlds[generation - 1].nodes.index(node), step): digest
        for node, trace in chain.traces.items()
        for step, (generation, digest) in trace.items()
    }
    expected = {
        ("ab".index(node), step): digest for node, trace in alone.traces.items() for step, (_, digest) in trace.items()
    }
    assert expected.keys() <= ours.keys() and len(expected) > 2 * 9
    assert [place for place, digest in sorted(expected.items()) if ours[place] != digest] == []
    assert chain.losses() == {step: loss for step, loss in alone.losses().items() if step in chain.losses()}


@pytest.mark.thorough
def test_over_gloo_alone_a_rescue_is_the_same(corpus: str):
    setup = RankSetup(small_gpt(corpus), **BATCH, transport="gloo", record=True, pace_s=PACE_S)
    chain = run_chain(setup, (World("TP2xPP2", "abcd"), World("TP2", "cb")), rung=Rung.RESCUE)
    first = chain.handed_step(2)
    alone = run_undisturbed(setup, "TP2xPP2", first + 1, record_steps=(first - 1,))
    assert differences(alone.state("step", first - 1), chain.state("stepped", 2)) == []
    assert sum(said["bytes_rescued"] for said in chain.measures[2]) > 0


def test_leavers_are_gone_while_the_next_world_is_built(corpus: str):
    """And what was kept for them is given back after its first step."""
    with Cluster(RankSetup(small_gpt(corpus), **BATCH, pace_s=PACE_S)) as cluster:
        cluster.launch("TP2xPP2", "abcd")
        assert cluster.roster is not None
        a, b, c, d = cluster.roster.members
        cluster.await_step(a, 2)
        for survivor in (a, b):
            cluster.arm(survivor, "released", "hold")
        request = cluster.open("PP2", "ab", rung=Rung.RESCUE)
        cluster.await_stage(cluster.members(request), request, "prepared", 40)
        cluster.command(cluster.members(request), "permit", request.handoff_id, 1)
        for leaver in (c, d):
            cluster.await_stage([leaver], request, "left", 30)
            cluster.await_death(leaver)
        for survivor in (a, b):
            assert "active" not in [stage for stage, *_ in cluster.stages(survivor, request.handoff_id)]
        cluster.command((a, b), "release")
        cluster.await_stage((a, b), request, "active", 40)
        cluster.command((a, b), "tell_rescue")
        for survivor in (a, b):
            events = cluster.ranks[survivor].events
            cluster.wait_for(lambda events=events: ("rescue", 0) in events, 20, f"freed memory on {survivor}")
        cluster.roster = request.target
        cluster.await_step(a, cluster.steps(a)[-1][1] + 2)
        assert {result["how"] for result in cluster.stop().values()} == {"stopped", "left"}
