"""A handoff between machines that have nothing but TCP between them: each node has a network and a pid namespace of its
own, no memory in common with another, and a relay, as an agent starts it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from liver_core.handoff.messages import Rung
from tests.cluster.net_islands import Islands, address_of, why_not
from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.rank.support.chain import World, run_chain
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.transport.relays import RelayProcess

NAMES = ("a", "b", "c", "d", "e")
WORLDS = (World("PP2", "ab"), World("TP2", "cd"), World("DP2", "ce"))
"""All state moves to other machines; then some of it is where it is wanted already."""
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000}
MODES = {"fp32": {}, "bf16, many buckets": {"precision": "bf16", "grad_reduce_in_fp32": False, **OVERLAPPED}}

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why := why_not()), reason=why),
]


@pytest.fixture
def islands() -> Iterator[Islands]:
    with Islands(NAMES) as made:
        yield made


@pytest.fixture
def relays(islands: Islands) -> Iterator[dict[str, RelayProcess]]:
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(RelayProcess(address_of(name, NAMES), enter=islands.inside(name)))
            for name in NAMES
        }


def setup_of(corpus: str, islands: Islands, relays: dict[str, RelayProcess], **arguments) -> RankSetup:
    return RankSetup(
        small_gpt(corpus, **arguments),
        record=True,
        pace_s=0.3,
        transport="mixed",
        islands=(islands.prefix, NAMES),
        relays={name: relay.local for name, relay in relays.items()},
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rung", [Rung.LIVE, Rung.STOP_AND_COPY])
def test_state_moves_between_machines_bit_for_bit(
    corpus: str, islands: Islands, relays: dict[str, RelayProcess], mode: str, rung: Rung
):
    chain = run_chain(setup_of(corpus, islands, relays, **MODES[mode]), WORLDS, rung=rung)
    for generation in (2, 3):
        assert differences(chain.state("source", generation - 1), chain.state("target", generation)) == []
        assert differences(chain.weights("source", generation - 1), chain.weights("target", generation)) == []
        for said in chain.measures[generation]:
            assert (said.get("bytes_streamed", 0.0) > 0) == (rung is Rung.LIVE), said
    assert all(relays[name].reads_served() for name in "abcd"), "state went over another wire"


@pytest.mark.parametrize("mode", MODES)
def test_a_rescue_fetches_what_only_leavers_hold_over_their_relays(
    corpus: str, islands: Islands, relays: dict[str, RelayProcess], mode: str
):
    worlds = (World("PP3", "abc"), World("TP2", "bd"))
    chain = run_chain(setup_of(corpus, islands, relays, **MODES[mode]), worlds, rung=Rung.RESCUE)
    before, after = (
        {name: bits for name, bits in chain.state(*where).items() if not name.startswith("grad/")}
        for where in (("source", 1), ("target", 2))
    )
    assert differences(before, after) == []
    assert differences(chain.weights("source", 1), chain.weights("target", 2)) == []
    assert sum(said.get("bytes_rescued", 0.0) for said in chain.measures[2]) > 0
    reads = {name: relay.reads_served() for name, relay in relays.items()}
    assert all(reads[name] for name in "abc") and not reads["d"], reads
