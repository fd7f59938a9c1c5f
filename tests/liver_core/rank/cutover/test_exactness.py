"""A handoff changes nothing but the layout: state bit for bit, by two oracles, and losses as an undisturbed run's.

One chain of real processes goes through every required pair of layouts, once in fp32 and once in bf16 with fp32
masters, live and by stop-and-copy in turn; with --thorough each pair in all four ways. The second oracle is Megatron's
own checkpoint loader in fresh processes: it shares no mapping with us.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from liver_core.handoff.messages import Rung
from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks import run_alone
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.undisturbed import undisturbed_samples
from tests.liver_core.rank.support.chain import (
    Chain,
    World,
    assert_as_megatron_loads,
    load_with_megatron,
    run_chain,
    run_undisturbed,
)
from tests.liver_core.rank.support.global_state import differences

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

WORLDS = (
    World("TP2xPP2", "abcd"),
    World("PP3", "abc"),  # d leaves
    World("TP2xDP2", "abce"),  # e joins
    World("DP4", "ecba"),  # the same nodes, renumbered
    World("TP2", "fg"),  # all new
    World("PP3", "fgh"),  # two nodes become three
    World("TP2", "hg"),  # and two again, the youngest first
    World("TP1", "g"),
    World("TP2xPP2", "gijk"),
)
HANDOFFS = range(2, len(WORLDS) + 1)
NAMES = [f"{a.layout} on {a.nodes} to {b.layout} on {b.nodes}" for a, b in itertools.pairwise(WORLDS)]
PACE_S = 0.4
every_handoff = pytest.mark.parametrize("generation", HANDOFFS, ids=NAMES)

LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
"""Absolute, for a mean loss of about 5 over 8 x 32 tokens: rounding in another order of summation."""

Mode = tuple[str, tuple[Rung, ...]]
"""Precision, and the rung of each handoff."""

COPIED_FIRST, LIVE_FIRST = (
    tuple(itertools.islice(itertools.cycle(rungs), len(HANDOFFS)))
    for rungs in ((Rung.STOP_AND_COPY, Rung.LIVE), (Rung.LIVE, Rung.STOP_AND_COPY))
)
MODES: tuple[Mode, ...] = (("fp32", LIVE_FIRST), ("bf16", COPIED_FIRST))
"""Every handoff in either precision and by either rung; with --thorough in all four ways."""

THOROUGH: tuple[Mode, ...] = (("fp32", COPIED_FIRST), ("bf16", LIVE_FIRST))
PARAMS = (*MODES, *(pytest.param(mode, marks=pytest.mark.thorough) for mode in THOROUGH))


@pytest.fixture(scope="module", params=PARAMS, ids=lambda mode: f"{mode[0]}, {mode[1][0]} first")
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.fixture(scope="module")
def setup(mode: Mode, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> RankSetup:
    folder = str(tmp_path_factory.mktemp("boundary"))
    return RankSetup(small_gpt(corpus, precision=mode[0]), record=True, checkpoint_at_boundary=folder, pace_s=PACE_S)


@pytest.fixture(scope="module")
def chain(setup: RankSetup, mode: Mode) -> Chain:
    return run_chain(setup, WORLDS, rung=mode[1], steps_each=2)


@pytest.fixture(scope="module")
def twin(setup: RankSetup, chain: Chain) -> Chain:
    """The same job in the first layout, never handed over; the state after the step that the first handoff applied."""
    step = chain.handed_step(2)
    return run_undisturbed(setup, WORLDS[0].layout, step + 4, record_steps=(step,))


@pytest.fixture(scope="module")
def loaded_by_megatron(setup: RankSetup, chain: Chain) -> dict[int, dict]:
    """generation -> rank -> what Megatron's loader makes, in that layout, of the checkpoint of the world before."""
    assert setup.checkpoint_at_boundary is not None
    folder = Path(setup.checkpoint_at_boundary)
    wanted = [(str(folder / f"generation-{number - 1}"), WORLDS[number - 1].layout) for number in HANDOFFS]
    return dict(zip(HANDOFFS, load_with_megatron(setup, wanted), strict=True))


@every_handoff
def test_masters_moments_and_gradients_are_bit_for_bit_what_the_old_world_held(chain: Chain, generation: int):
    before, after = chain.state("source", generation - 1), chain.state("target", generation)
    assert {name.split("/")[0] for name in before} == {"master", "exp_avg", "exp_avg_sq", "grad"}
    assert differences(before, after) == []


@every_handoff
def test_weights_are_bit_for_bit_what_the_old_world_held(chain: Chain, generation: int):
    assert differences(chain.weights("source", generation - 1), chain.weights("target", generation)) == []


@every_handoff
def test_small_state_follows_to_every_rank(chain: Chain, generation: int):
    sources, targets = chain.records[("source", generation - 1)], chain.records[("switched", generation)]
    expected = sources[0]["small"]
    assert expected["element_scalars"] == {"step": float(chain.handed_step(generation) - 1)}
    assert expected["step"] == chain.handed_step(generation) - 1
    assert [record["small"] for record in (*sources.values(), *targets.values())] == [expected] * (
        len(sources) + len(targets)
    )


@every_handoff
def test_every_local_tensor_is_what_megatrons_own_loader_puts_there(
    chain: Chain, loaded_by_megatron: dict[int, dict], generation: int
):
    switched, gathered = chain.records[("switched", generation)], chain.records[("target", generation)]
    assert_as_megatron_loads(loaded_by_megatron[generation], switched, gathered)


def test_the_step_handed_over_gives_the_bits_that_the_old_world_would_have_computed(chain: Chain, twin: Chain):
    step = chain.handed_step(2)
    assert {record["step"] for record in chain.records[("stepped", 2)].values()} == {step}
    assert differences(twin.state("step", step), chain.state("stepped", 2)) == []


def test_until_the_first_handoff_losses_are_those_of_an_undisturbed_run_and_then_equal_but_for_rounding(
    chain: Chain, twin: Chain, setup: RankSetup
):
    """The first loss after the handoff is of one batch on bitwise equal weights in the old layout and in the new."""
    ours, undisturbed, handed = chain.losses(), twin.losses(), chain.handed_step(2)
    before = {step: abs(ours[step] - undisturbed[step]) for step in undisturbed if step <= handed}
    assert max(before.values()) == 0.0
    tolerance = LOSS_TOLERANCE[setup.job_arguments["precision"]]
    assert abs(ours[handed + 1] - undisturbed[handed + 1]) <= tolerance


def test_every_sample_is_used_exactly_once_whatever_the_layout(chain: Chain, twin: Chain):
    expected = run_alone(undisturbed_samples, len(chain.steps))
    assert {step: (consumed, digest) for _, step, _, consumed, digest in chain.steps} == expected
    assert all(chain.digests()[step] == digest for step, digest in twin.digests().items() if step in chain.digests())


@every_handoff
def test_no_byte_moves_that_a_rank_holds_already(chain: Chain, generation: int):
    for said in chain.measures[generation]:
        assert said.get("bytes_moved", 0.0) == said["bytes_planned"] == said["bytes_lower_bound"]
        assert said["extra_bytes_peak"] > 0


@every_handoff
def test_what_streams_leaves_only_gradients_for_the_pause(chain: Chain, mode: Mode, generation: int):
    rung = mode[1][HANDOFFS.index(generation)]
    for said in chain.measures[generation]:
        streamed = said.get("bytes_streamed", 0.0)
        assert (streamed > 0) == (rung is Rung.LIVE and said["bytes_planned"] > 0)
        if rung is Rung.LIVE:
            # Three of four kinds have arrived before: master and two moments.
            assert said.get("gradient_bytes_at_cutover", 0.0) * 4 == said["bytes_planned"]


def test_losses_after_a_handoff_stay_within_what_two_layouts_differ_by(corpus: str):
    """Ten steps after TP2xPP2 -> PP3, against undisturbed runs in either layout."""
    setup = RankSetup(small_gpt(corpus), pace_s=PACE_S)
    chain = run_chain(setup, (World("TP2xPP2", "abcd"), World("PP3", "abc")), steps_last=10)
    handed, last = chain.handed_step(2), chain.steps[-1][1]
    old = run_undisturbed(setup, "TP2xPP2", last).losses()
    new = run_undisturbed(setup, "PP3", last).losses()
    ours = chain.losses()
    assert all(ours[step] == old[step] for step in range(1, handed + 1))
    layout_noise = max(abs(old[step] - new[step]) for step in range(1, last + 1))
    assert max(abs(ours[step] - old[step]) for step in range(handed + 1, last + 1)) <= layout_noise


def test_tied_embeddings_are_handed_over_without_a_pipeline(corpus: str):
    setup = RankSetup(small_gpt(corpus, num_layers=2, share_embeddings_and_output_weights=True), record=True)
    chain = run_chain(setup, (World("TP2", "ab"), World("DP2", "bc")), rung=Rung.LIVE)
    before, after = chain.state("source", 1), chain.state("target", 2)
    assert not [name for name in before if "output_layer" in name]
    assert differences(before, after) == []
    assert differences(chain.weights("source", 1), chain.weights("target", 2)) == []
