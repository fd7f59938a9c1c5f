"""What two sources must agree on when they say the same of one step, and what they need not."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from liver_core.streaming.header import StepHeader, same_step

HEADER = StepHeader(
    version=3,
    norm=1.5,
    clip=1.0,
    groups=({"key": "decayed", "lr": 1e-3, "weight_decay": 0.1},),
    scalars={"step": 2.0},
    stepped=True,
    step_s=0.2,
    usual_step_s=0.19,
)


def test_each_source_has_its_own_idea_of_how_long_steps_take():
    assert same_step(HEADER.encode(), replace(HEADER, step_s=0.3, usual_step_s=0.31).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 4},
        {"norm": 1.5000001},
        {"clip": 0.0},
        {"groups": ({"key": "decayed", "lr": 2e-3, "weight_decay": 0.1},)},
        {"scalars": {"step": 3.0}},
        {"stepped": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_that_a_step_depends_on_must_be_the_same(change: dict):
    assert not same_step(HEADER.encode(), replace(HEADER, **change).encode())


def test_a_norm_that_is_no_number_is_the_same_on_all_sources():
    encoded = replace(HEADER, norm=nan).encode()
    assert same_step(encoded, replace(HEADER, norm=nan, step_s=0.3).encode())
