"""What two sources must agree on when they say the same of one step, and what they need not."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan

import pytest

from liver_core.streaming.header import HeaderError, StepHeader, merged

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


NORMS = {"key": "not decayed", "lr": 1e-3, "weight_decay": 0.0}
MATRICES = {"key": "decayed", "lr": 1e-3, "weight_decay": 0.1}


def sent(header: StepHeader) -> StepHeader:
    return StepHeader.decode(header.encode())


def test_each_source_has_its_own_idea_of_how_long_steps_take():
    assert merged([sent(HEADER), sent(replace(HEADER, step_s=0.3, usual_step_s=0.31))]) == sent(HEADER)


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
    with pytest.raises(HeaderError, match="sources differ on"):
        merged([sent(HEADER), sent(HEADER), sent(replace(HEADER, **change))])


def test_a_norm_that_is_no_number_is_the_same_on_all_sources():
    encoded = sent(replace(HEADER, norm=nan))
    assert isnan(merged([encoded, replace(encoded, step_s=0.3)]).norm)


def test_each_source_tells_the_counts_of_what_it_owns_and_together_they_tell_all():
    """The first one owns no norms. Its header alone would have the target count anew there."""
    first = replace(HEADER, groups=(MATRICES | {"counts": {"step": 7}}, NORMS))
    second = replace(HEADER, groups=(NORMS | {"counts": {"step": 7}}, MATRICES))
    found = merged([sent(first), sent(second)])
    assert found.groups == (MATRICES | {"counts": {"step": 7}}, NORMS | {"counts": {"step": 7}})
    other = replace(HEADER, groups=(NORMS | {"counts": {"step": 6}}, MATRICES))
    with pytest.raises(HeaderError, match=r"counts of parameter group not decayed: \{'step': 7\} and \{'step': 6\}"):
        merged([sent(first), sent(second), sent(other)])
