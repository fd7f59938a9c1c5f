"""The checker finds every planted fault and accepts every right plan; it does not know the planner."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import tests.liver_core.reshard.checker as checker
from liver_core.layout import Manifest
from liver_core.reshard import CopyRuns, PlanError, RankPlan, Transfer
from tests.liver_core.layout.models import KINDS, gpt, roster, spec
from tests.liver_core.reshard.checker import check_plans, check_rank_plan
from tests.liver_core.reshard.execute import all_plans

MANIFEST = gpt()
SOURCE = roster("TP2xPP2", slots=2)
TARGET = roster("TP1xPP2xDP2", generation=1, slots=2, first=1)


def plans() -> list[RankPlan]:
    return all_plans(MANIFEST, SOURCE, TARGET)


def with_runs(plan: RankPlan, change) -> RankPlan:
    """The plan with the runs of its first remote transfer changed."""
    first, *rest = plan.remote
    runs = tuple(change(list(first.runs)))
    return replace(plan, remote=(Transfer(first.source_rank, runs, sum(run.elements for run in runs)), *rest))


def moved(run: CopyRuns, *, source: int = 0, target: int = 0) -> CopyRuns:
    return replace(run, source_offset=run.source_offset + source, target_offset=run.target_offset + target)


def test_right_plans_pass():
    check_plans(MANIFEST, SOURCE, TARGET, plans())


def test_the_checker_imports_no_planner():
    imported = [
        node for node in ast.walk(ast.parse(Path(checker.__file__).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    assert not {"planner", "runs", "sources", "replicas"} & {str(node.module).rpartition(".")[2] for node in imported}


FAULTS = {
    "a run left out": (lambda runs: runs[1:], "are never written"),
    "a run twice": (lambda runs: [runs[0], *runs], "is written twice at"),
    "a source one element off": (lambda runs: [moved(runs[0], source=1), *runs[1:]], "wants element"),
    "a target one element off": (lambda runs: [moved(runs[0], target=1), *runs[1:]], "target rank"),
    "a source past the region": (lambda runs: [moved(runs[0], source=10**7), *runs[1:]], "outside the region"),
    "a target past the region": (lambda runs: [moved(runs[0], target=10**7), *runs[1:]], "outside the region"),
    "one element too many": (lambda runs: [replace(runs[0], length=runs[0].length + 1), *runs[1:]], "rank"),
    "one element too few": (lambda runs: [replace(runs[0], length=runs[0].length - 1), *runs[1:]], "1 of"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", range(4))
def test_a_planted_fault_is_found(fault, rank):
    change, text = FAULTS[fault]
    plan = plans()[rank]
    first = next(run for run in plan.remote[0].runs if run.count == 1)
    ordered = with_runs(plan, lambda runs: [first, *(run for run in runs if run != first)])
    with pytest.raises(PlanError) as error:
        check_rank_plan(MANIFEST, SOURCE, TARGET, with_runs(ordered, change))
    assert text in str(error.value)
    assert f"rank {rank}" in str(error.value)


def test_an_error_names_parameter_box_and_both_ranks():
    plan = with_runs(plans()[0], lambda runs: [moved(runs[0], source=1), *runs[1:]])
    with pytest.raises(
        PlanError,
        match=r"target rank 0: \S+ \[.*\] wants element \(.*\) at \d+, but source rank \d+, read by target rank 0",
    ):
        check_rank_plan(MANIFEST, SOURCE, TARGET, plan)


def test_a_wrong_stride_is_found():
    target = roster("TP4", generation=1, first=4)
    source = roster("TP2")
    plan = all_plans(MANIFEST, source, target)[0]
    strided = next(run for run in plan.remote[0].runs if run.count > 1)
    broken = with_runs(
        plan,
        lambda runs: [replace(run, source_stride=run.source_stride + 1) if run == strided else run for run in runs],
    )
    check_rank_plan(MANIFEST, source, target, plan)
    with pytest.raises(PlanError, match="wants element"):
        check_rank_plan(MANIFEST, source, target, broken)


def test_a_replica_of_the_wrong_source_rank_is_found():
    plan = plans()[0]
    ranks = {transfer.source_rank for transfer in plan.transfers}
    other = next(rank for rank in range(4) if rank not in ranks)
    with pytest.raises(PlanError, match=f"source rank {other}"):
        check_rank_plan(MANIFEST, SOURCE, TARGET, replace(plan, remote=(replace(plan.remote[0], source_rank=other),)))


def test_padding_may_not_be_written():
    plan = with_runs(plans()[0], lambda runs: [*runs, CopyRuns(0, 32, 1)])
    with pytest.raises(PlanError, match=r"written twice|padding|wants element"):
        check_rank_plan(MANIFEST, SOURCE, TARGET, plan)


def test_taking_from_elsewhere_what_the_own_process_holds_is_found():
    # Both TP ranks hold the vector; the values are right, the bytes on the wire are for nothing.
    manifest = Manifest((spec("norm", (32,), layer=0),), 1, KINDS)
    plan = RankPlan(0, None, (Transfer(1, (CopyRuns(0, 0, 32),), 32),), "by hand")
    with pytest.raises(PlanError, match="target rank 0: reads 32 elements of other processes, 0 are not in its own"):
        check_rank_plan(manifest, roster("TP2"), roster("TP2", generation=1), plan)


def test_a_run_that_goes_on_past_the_end_of_a_row_is_found():
    # Source rows are 8 wide, target rows 4: a run of 16 is right for its first 4 elements only.
    manifest = Manifest((spec("w", (4, 8), 1, layer=0),), 1, KINDS)
    plan = RankPlan(0, None, (Transfer(0, (CopyRuns(0, 0, 16),), 16),), "by hand")
    with pytest.raises(PlanError, match=r"wants element \(1, 0\) at 4, .* holds w \(0, 4\) at 4"):
        check_rank_plan(manifest, roster("TP1"), roster("TP2", generation=1, first=5), plan)


def test_a_run_that_stays_in_step_over_many_rows_passes_whole():
    manifest = Manifest((spec("w", (6, 2, 3), 0, layer=0),), 1, KINDS)
    plan = RankPlan(0, None, (Transfer(0, (CopyRuns(0, 0, 18),), 18),), "by hand")
    check_rank_plan(manifest, roster("TP1"), roster("TP2", generation=1, first=5), plan)


def test_local_and_remote_must_be_what_they_say():
    plan = next(plan for plan in plans() if plan.local)
    assert plan.local
    with pytest.raises(PlanError, match="of its own process as remote"):
        check_rank_plan(MANIFEST, SOURCE, TARGET, replace(plan, local=None, remote=(*plan.remote, plan.local)))
    with pytest.raises(PlanError, match="which lives in"):
        check_rank_plan(MANIFEST, SOURCE, TARGET, replace(plan, local=plan.remote[0], remote=plan.remote[1:]))


def test_every_target_rank_has_one_plan():
    made = plans()
    with pytest.raises(PlanError, match=r"target ranks \[3\] of TP1xPP2xDP2 have no plan"):
        check_plans(MANIFEST, SOURCE, TARGET, made[:3])
    with pytest.raises(PlanError, match="target rank 0: more than one plan"):
        check_plans(MANIFEST, SOURCE, TARGET, [made[0], *made])
    with pytest.raises(PlanError, match="target rank 7: not a rank"):
        check_plans(MANIFEST, SOURCE, TARGET, [replace(made[0], target_rank=7)])
    with pytest.raises(PlanError, match="source rank 9 is not a rank"):
        check_rank_plan(MANIFEST, SOURCE, TARGET, replace(made[0], remote=(replace(made[0].remote[0], source_rank=9),)))
