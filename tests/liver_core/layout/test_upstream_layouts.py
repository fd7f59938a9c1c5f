"""Our layout at real sizes is what Megatron's own function says, which was asked once and written down."""

import json

import pytest

from liver_core.layout import ParallelLayout
from tests.liver_core.layout.upstream_layout import FIXTURES, LAYOUTS, MODELS, drawn_ranks, ours

KNOWN = json.loads(FIXTURES.read_text())["digests"]


@pytest.mark.parametrize(("model", "text"), LAYOUTS)
def test_buckets_and_shares_of_a_large_model_are_those_of_megatrons_own_function(model: str, text: str):
    layout, told = ParallelLayout.parse(text), KNOWN[f"{model} {text}"]
    ranks = drawn_ranks(layout)
    assert {str(rank): ours(MODELS[model], layout, rank) for rank in ranks} == told
    assert len(told) == 16


def test_a_mistake_of_one_element_is_seen():
    model, text = LAYOUTS[0]
    layout = ParallelLayout.parse(text)
    assert ours(MODELS[model], layout, 0) != ours(MODELS[model], layout, 1)
    other = layout.__class__(tp=8, dp=8, pp=2)
    assert ours(MODELS[model], other, 0) != ours(MODELS[model], layout, 0)
