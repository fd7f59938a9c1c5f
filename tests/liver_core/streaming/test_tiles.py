"""Tiles cover a rank's share exactly once, and take every element from where the plan takes it. Pure."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.reshard import CopyRuns, PlanError, RankPlan, Transfer
from liver_core.reshard.copy_runs import join_runs
from liver_core.streaming.tiles import LOCAL, Tile, clip_runs, cut_tiles
from tests.liver_core.own_time import at_most

ROWS_MAX = 6


@st.composite
def runs(draw: st.DrawFn) -> CopyRuns:
    length, count = draw(st.integers(1, 5)), draw(st.integers(1, ROWS_MAX))
    source, target = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    if count == 1:
        return CopyRuns(source, target, length)
    gaps = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    return CopyRuns(source, target, length, count, length + gaps[0], length + gaps[1])


@given(runs(), st.integers(0, 60), st.integers(0, 40))
def test_a_clipped_run_is_the_elements_of_the_run_inside_the_range(run: CopyRuns, start: int, width: int):
    stop = start + width
    inside = {(s, t) for s, t in elements([run]) if start <= t < stop}
    clipped = list(clip_runs(run, start, stop))
    found = elements(clipped)
    assert len(found) == len(set(found))
    assert set(found) == inside
    assert len(clipped) <= 3


@given(st.integers(0, 2**32), st.integers(1, 70))
def test_tiles_take_every_element_once_and_from_where_the_plan_takes_it(seed: int, tile_elements: int):
    plan, parameters = random_plan(random.Random(seed))
    tiles = cut_tiles(plan, parameters, tile_elements)
    expected = {
        t: (LOCAL if transfer is plan.local else transfer.source_rank, s)
        for transfer in plan.transfers
        for s, t in elements(transfer.runs)
    }
    found: dict[int, tuple[int, int]] = {}
    for tile in tiles:
        for read in tile.reads:
            for s, t in elements(read.runs):
                assert t not in found, "an element is read twice"
                assert any(start <= t < stop for start, stop in tile.spans)
                found[t] = (read.peer, s)
    assert found == expected
    check_shapes(tiles, parameters, tile_elements)


def check_shapes(tiles: tuple[Tile, ...], parameters: list[tuple[int, int]], tile_elements: int) -> None:
    whole = set(parameters)
    for tile in tiles:
        assert tile.stop - tile.start <= tile_elements
        assert len(tile.spans) == 1 or set(tile.spans) <= whole, "several parameters share a tile only whole"
        assert any(start <= tile.start < stop for start, stop in parameters)
        assert tile.peers == tuple(sorted(set(tile.peers)))


def test_tiles_whose_sources_leave_first_come_first():
    parts = [Transfer(rank, (CopyRuns(0, 10 * rank, 10),), 10) for rank in range(4)]
    plan = RankPlan(0, None, tuple(parts), "test")
    tiles = cut_tiles(plan, [(0, 40)], 5, leaving={3: 20.0, 2: 9.0})
    assert [(tile.start, tile.deadline) for tile in tiles] == [
        *((20, 9.0), (25, 9.0)),
        *((30, 20.0), (35, 20.0)),
        *((0, inf), (5, inf), (10, inf), (15, inf)),
    ]


@pytest.mark.parametrize("parameters", [[(0, 9)], [(0, 11)], [(0, 4), (5, 10)], [(0, 10), (12, 13)]])
def test_a_plan_that_does_not_write_exactly_the_parameters_is_refused(parameters):
    plan = RankPlan(0, None, (Transfer(1, (CopyRuns(0, 0, 10),), 10),), "test")
    with pytest.raises(PlanError, match="writes"):
        cut_tiles(plan, parameters, 64)


def test_a_tile_has_one_element_at_least():
    plan = RankPlan(0, None, (Transfer(1, (CopyRuns(0, 0, 3),), 3),), "test")
    assert [tile.elements for tile in cut_tiles(plan, [(0, 3)], 1)] == [1, 1, 1]
    with pytest.raises(PlanError, match="tile_elements must be positive, is 0"):
        cut_tiles(plan, [(0, 3)], 0)


def test_a_large_parameter_is_cut_into_even_pieces_and_small_neighbours_share_a_tile_while_they_fit():
    plan = RankPlan(0, None, (Transfer(1, (CopyRuns(0, 0, 31),), 31),), "test")
    parameters = [(0, 11), (11, 14), (14, 18), (18, 22), (22, 31)]
    tiles = cut_tiles(plan, parameters[::-1], 7)
    assert [tile.spans for tile in tiles] == [
        ((0, 5),), ((5, 11),), ((11, 14), (14, 18)), ((18, 22),), ((22, 26),), ((26, 31),),
    ]  # fmt: skip
    assert [(tile.start, tile.stop, tile.elements) for tile in tiles][2] == (11, 18, 7)
    assert tiles[0].peers == (1,) and tiles[0].deadline == inf


def test_a_plan_that_writes_too_little_of_a_tile_or_beside_all_tiles_is_refused_by_its_numbers():
    plan = RankPlan(4, None, (Transfer(1, (CopyRuns(0, 0, 10),), 10),), "test")
    with pytest.raises(PlanError, match=r"^the plan writes 10 elements of region\[0:11\], not 11$"):
        cut_tiles(plan, [(0, 11)], 64)
    with pytest.raises(PlanError, match=r"^the plan writes 10 elements of rank 4, parameters have 9$"):
        cut_tiles(plan, [(0, 9)], 64)


def test_a_plan_of_a_hundred_thousand_runs_is_cut_into_a_thousand_tiles_in_a_moment():
    count, length = 100_000, 40
    odd = [CopyRuns(i * length, 2 * i * length, length) for i in range(count)]
    even = CopyRuns(0, length, length, count, length, 2 * length)
    parts = (Transfer(1, tuple(odd), count * length), Transfer(2, (even,), count * length))
    plan = RankPlan(0, None, parts, "test")
    with at_most(3.0):
        tiles = cut_tiles(plan, [(0, 2 * count * length)], 2 * count * length // 1000)
    assert len(tiles) == 1000
    assert sum(tile.elements for tile in tiles) == plan.elements
    assert sum(len(read.runs) for tile in tiles for read in tile.reads) < 1.1 * count


def random_plan(draw: random.Random) -> tuple[RankPlan, list[tuple[int, int]]]:
    """Parameters with padding between them, every element given to one of four peers: runs, rows and columns."""
    parameters, at, owner = [], 0, {}
    for _ in range(draw.randint(1, 6)):
        at += draw.randint(0, 4)
        rows, width = draw.randint(1, ROWS_MAX), draw.randint(1, 12)
        parameters.append((at, at + rows * width))
        peers = [draw.randrange(4) for _ in range(width)]
        by_row = draw.random() < 0.5
        for row in range(rows):
            for column in range(width):
                owner[at + row * width + column] = peers[(row if by_row else column) % len(peers)]
        at += rows * width
    transfers = [made for peer in range(4) if (made := transfer_of(draw, peer, owner)) is not None]
    local = next((made for made in transfers if made.source_rank == 0), None)
    remote = tuple(made for made in transfers if made is not local)
    return RankPlan(0, local, remote, "test"), parameters


def transfer_of(draw: random.Random, peer: int, owner: dict[int, int]) -> Transfer | None:
    """Elements of one peer from shuffled source places, folded into strided runs where they happen to fit."""
    mine = sorted(t for t, who in owner.items() if who == peer)
    if not mine:
        return None
    gap = draw.randint(1, 2)
    joined = join_runs(CopyRuns(5 + index * gap, t, 1) for index, t in enumerate(mine))
    return Transfer(peer, joined, len(mine))


def elements(runs) -> list[tuple[int, int]]:
    return [(s + i, t + i) for run in runs for s, t, length in run.each() for i in range(length)]
