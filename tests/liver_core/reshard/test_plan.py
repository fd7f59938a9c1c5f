"""Plans as values: sums, limits, and the digest that all ranks must agree on."""

import pytest

from liver_core.layout import BucketRule, Manifest
from liver_core.reshard import CopyRuns, PlanError, PlanLimits, RankPlan, Transfer, plan_digest, plan_rank
from tests.liver_core.layout.models import KINDS, gpt, roster, spec


def test_a_transfer_must_hold_as_many_elements_as_it_says():
    with pytest.raises(PlanError, match="rank 3: runs hold 8 elements, 7 stated"):
        Transfer(3, (CopyRuns(0, 0, 4, 2, 4, 4),), 7)


def test_a_transfer_of_nothing_is_refused():
    with pytest.raises(PlanError, match="rank 3: runs hold 0 elements, 0 stated"):
        Transfer(3, (), 0)


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


def test_a_plan_may_be_exactly_as_large_as_its_limits_and_not_one_larger():
    manifest, source, target = gpt(), roster("TP2xPP2"), roster("TP1", generation=1, order=[1])
    plan = plan_rank(manifest, source, target, 0)
    sizes = {
        "runs": sum(len(transfer.runs) for transfer in plan.transfers),
        "bytes": 12 * plan.elements,
        "transfers": len(plan.transfers),
    }
    assert plan.local and sizes["transfers"] == 4
    limits = {f"{what}_max": size for what, size in sizes.items()}
    assert plan_rank(manifest, source, target, 0, PlanLimits(**limits)) == plan
    for what, size in sizes.items():
        with pytest.raises(PlanError, match=f"^target rank 0: the plan has {size} {what}, limit {size - 1}$"):
            plan_rank(manifest, source, target, 0, PlanLimits(**limits | {f"{what}_max": size - 1}))


def test_runs_count_four_times_over_until_they_are_joined():
    def plan(parameters: int, runs_max: int) -> RankPlan:
        specs = tuple(spec(f"p{order}", (8,), layer=0, order=order) for order in range(parameters))
        manifest = Manifest(specs, 1, KINDS, BucketRule(1, 1))
        return plan_rank(
            manifest, roster("TP1"), roster("TP1", generation=1, first=1), 0, PlanLimits(runs_max=runs_max)
        )

    for runs_max in (1, 2):
        assert plan(4 * runs_max, runs_max).remote == (Transfer(0, (CopyRuns(0, 0, 32 * runs_max),), 32 * runs_max),)
        with pytest.raises(PlanError, match=f"^target rank 0: more than {4 * runs_max + 1} runs, limit {runs_max}$"):
            plan(4 * runs_max + 1, runs_max)


def test_what_lies_apart_is_copied_by_strides_that_are_counted_at_both_ends():
    run = CopyRuns(10, 100, 4, count=3, source_stride=8, target_stride=5)
    assert list(run.each()) == [(10, 100, 4), (18, 105, 4), (26, 110, 4)]
    assert (run.elements, run.source_stop, run.target_stop) == (12, 30, 114)


@pytest.mark.parametrize(
    ("source", "target", "rank", "text"),
    [
        ("TP2", "TP2", -1, "target rank -1 is not in 0..1 of TP2xPP1xDP1"),
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
