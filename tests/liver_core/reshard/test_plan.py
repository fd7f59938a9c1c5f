"""Plans as values: sums, limits, and the digest that all ranks must agree on."""

import pytest

from liver_core.layout import BucketRule
from liver_core.reshard import CopyRuns, PlanError, PlanLimits, Transfer, plan_digest, plan_rank
from tests.liver_core.layout.models import gpt, roster


def test_a_transfer_must_hold_as_many_elements_as_it_says():
    with pytest.raises(PlanError, match="rank 3: runs hold 8 elements, 7 stated"):
        Transfer(3, (CopyRuns(0, 0, 4, 2, 4, 4),), 7)


def test_the_digest_names_what_plans_are_made_of_and_not_the_generation_that_is_not_burned_yet():
    manifest, source, target = gpt(), roster("TP2xPP2"), roster("PP4", generation=1)
    digest = plan_digest(manifest, source, target)
    assert digest == plan_digest(manifest, source, roster("PP4", generation=9))
    others = [
        plan_digest(gpt(vocab=256), source, target),
        plan_digest(gpt(rule=BucketRule(elements_max=500)), source, target),
        plan_digest(manifest, roster("TP2xPP2", generation=1), target),
        plan_digest(manifest, roster("TP2xDP2"), target),
        plan_digest(manifest, source, roster("PP4", order=[1, 0, 2, 3])),
        plan_digest(manifest, source, roster("PP4", slots=2)),
    ]
    assert len({digest, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (PlanLimits(runs_max=1), "runs, limit 1"),
        (PlanLimits(bytes_max=1000), "bytes, limit 1000"),
        (PlanLimits(transfers_max=1), "transfers, limit 1"),
    ],
)
def test_a_plan_beyond_a_limit_is_refused_naming_rank_value_and_limit(limits, text):
    with pytest.raises(PlanError, match=r"^target rank 0: ") as error:
        plan_rank(gpt(), roster("TP2xPP2"), roster("TP1", generation=1), 0, limits)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("source", "target", "rank", "text"),
    [
        ("TP2", "TP2", 2, "target rank 2 is not in 0..1 of TP2xPP1xDP1"),
        ("TP2", "PP3", 0, "target layout TP1xPP3xDP1 does not fit the model: num_layers: 4"),
        ("TP8", "PP2", 0, "source layout TP8xPP1xDP1 does not fit the model: tp: 8"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(source, target, rank, text):
    with pytest.raises(PlanError) as error:
        plan_rank(gpt(), roster(source), roster(target, generation=1), rank)
    assert text in str(error.value)


def test_rosters_of_two_jobs_are_refused():
    other = type(roster("TP2"))("other", 1, roster("TP2").layout, roster("TP2").members)
    with pytest.raises(PlanError, match="source is of job job, target of job other"):
        plan_rank(gpt(), roster("TP2"), other, 0)
