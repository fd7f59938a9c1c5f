"""Our layout at real sizes is what Megatron's own function says, which was asked once and written down."""

import json

import pytest

from liver_core.layout import ParallelLayout
from tests.liver_core.layout.upstream_layout import FIXTURES, LAYOUTS, drawn_ranks, model, ours

KNOWN = json.loads(FIXTURES.read_text())["digests"]


@pytest.mark.parametrize(("name", "text"), LAYOUTS)
def test_buckets_and_shares_of_a_large_model_are_those_of_megatrons_own_function(name: str, text: str):
    layout, told = ParallelLayout.parse(text), KNOWN[f"{name} {text}"]
    ranks = drawn_ranks(layout)
    assert {str(rank): ours(model(name), layout, rank) for rank in ranks} == told
    assert len(told) == 16


def test_a_mistake_of_one_element_is_seen():
    name, text = LAYOUTS[0]
    layout = ParallelLayout.parse(text)
    assert ours(model(name), layout, 0) != ours(model(name), layout, 1)
    other = layout.__class__(tp=8, dp=8, pp=2)
    assert ours(model(name), other, 0) != ours(model(name), layout, 0)
