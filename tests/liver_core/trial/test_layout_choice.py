"""Which layout a trial runs of itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("layouts", "processors", "chosen"),
    [
        (("TP1", "TP2", "PP2", "DP2"), 2, "TP2"),
        (("TP2", "TP2xPP2", "PP2"), 4, "TP2xPP2"),
        (("TP2", "TP2xPP2"), 2, "TP2"),
        (("TP4", "DP2"), 1, "DP2"),
        (("DP2", "DP2xEP2"), 2, "DP2xEP2"),
        (("TP2xPP2xDP2", "TP2xPP2xDP4"), 64, "TP2xPP2xDP2"),
        (("TP1", "TP16"), 64, ""),
        ((), 8, ""),
    ],
)
def test_it_splits_most_axes_of_those_that_fit(layouts: tuple[str, ...], processors: int, chosen: str):
    from liver_core.trial.layout_choice import choose

    assert choose(layouts, processors=processors) == chosen
