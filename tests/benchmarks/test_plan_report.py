"""The figures of `make bench-plan` show the mistakes that they are there for."""

from dataclasses import replace

import pytest

from liver_core.layout import Manifest
from liver_core.streaming import tiles
from tests.benchmarks import plan as bench
from tests.benchmarks.wire_model import Reader, least_seconds, seconds
from tests.liver_core.layout.models import KINDS, roster, spec


class FirstReplica(bench._Told):
    """Planted: every target reads from the same replica."""

    def choose(self, holders: tuple[tuple[int, int], ...], copies: tuple[int, ...], elements: int) -> tuple[int, int]:
        return super().choose(holders[:1], copies, elements)


def test_a_target_that_always_reads_the_first_replica_loads_it_too_much():
    vectors = tuple(spec(f"layer{at}.norm", (512,), layer=at) for at in range(24))
    manifest = Manifest(vectors, 24, KINDS)
    source, target = roster("TP4xPP2"), roster("TP4xPP3", generation=1, first=100)

    def imbalance(choice: type) -> float:
        ranks = range(target.layout.world_size)
        chosen = [bench.look_at(manifest, source, target, rank, choice) for rank in ranks]
        free = [bench.look_at(manifest, source, target, rank) for rank in ranks]
        both = zip(free, chosen, strict=True)
        return bench.source_imbalance(replace(each, given=other.given) for each, other in both)

    assert imbalance(bench._Told) <= 1.05 and imbalance(FirstReplica) > 3


def test_targets_that_all_read_in_one_order_wait_for_each_other(monkeypatch: pytest.MonkeyPatch):
    case = bench.CASES[1]
    manifest, (source, target) = bench.MODELS[case.model](), bench.rosters(case)

    def over() -> float:
        ranks = range(target.layout.world_size)
        return bench.wire(source, target, [bench.look_at(manifest, source, target, rank) for rank in ranks])

    assert over() <= 1.1
    monkeypatch.setattr(tiles, "_spread", lambda ordered, rank: ordered)  # Planted.
    assert over() > 1.5


def test_cards_are_shared_so_that_none_could_get_more_without_another_getting_less():
    both = [Reader(1, (((0, 10.0),),)), Reader(2, (((0, 10.0),), ((3, 10.0),)))]
    assert seconds(both, 4, 10.0) == pytest.approx(3.0)  # Half a card each, then the last one alone.
    assert least_seconds(both, 4, 10.0) == pytest.approx(2.0)
    into_one = [Reader(0, (((1, 10.0), (2, 20.0)),)), Reader(3, (((2, 10.0),),))]
    assert seconds(into_one, 4, 10.0) == pytest.approx(3.0)
    assert seconds([Reader(0, ())], 1, 10.0) == 0.0
