"""Where the ranks of a model with experts stand on the experts' grid, and which experts each has."""

import pytest

from liver_core.layout import ParallelLayout
from service.outlook.endpoints import rank_place, sizes_of


@pytest.mark.parametrize(
    ("text", "sizes", "places"),
    [
        ("DP4xEP2", (2, 1, 2), [(0, 0, 0, 0, 31), (1, 0, 0, 32, 63), (0, 0, 1, 0, 31), (1, 0, 1, 32, 63)]),
        ("TP2xDP2", (1, 2, 2), [(0, 0, 0, 0, 63), (0, 1, 0, 0, 63), (0, 0, 1, 0, 63), (0, 1, 1, 0, 63)]),
        ("TP2xPP2xEP2xETP1", (2, 1, 1), [(0, 0, 0, 0, 31), (1, 0, 0, 32, 63)] * 2),
    ],
)
def test_each_rank_says_which_experts_it_has(text, sizes, places):
    layout = ParallelLayout.parse(text)
    found = sizes_of(layout, 64)
    assert (found.ep, found.etp, found.edp) == sizes
    shown = []
    for rank in range(layout.world_size):
        at, experts = rank_place(layout, rank, 64)
        assert experts is not None
        shown.append((at.ep, at.etp, at.edp, experts.first, experts.last))
    assert shown == places


def test_a_dense_model_has_no_place_on_the_experts_grid():
    layout = ParallelLayout(tp=2)
    at, experts = rank_place(layout, 1, 0)
    assert (at.tp, at.ep, at.etp, at.edp, experts, sizes_of(layout, 0).ep) == (1, None, None, None, None, None)
