"""What ends as it must when a source, a target or the store is lost in a handoff, with real kills and real stalls.

The cells of the table in docs/handoff.md that an abort does not cover (those are in test_aborts.py). Where the old
world has lost a rank the reason names it and the ranks end as broken: the checkpoint rung is next.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from liver_core.handoff.messages import CutoverDeadlines
from liver_core.layout import Manifest, from_json
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.support.global_state import assemble, differences
from tests.liver_core.rank.support.trio import LEAVER, SHORT, SURVIVOR, UNHURRIED, Trio, trio_setup
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

KILLED_OR_STOPPED = (
    pytest.param(signal.SIGKILL, id="dies"),
    pytest.param(signal.SIGSTOP, id="stalls", marks=pytest.mark.thorough),
)
TOLD = Fault("state read", "tell")


@pytest.fixture
def job(corpus: str) -> Iterator[Trio]:
    with Trio(trio_setup(corpus, record=True, bring_up_s=8.0)) as trio:
        trio.begin()
        yield trio


@pytest.mark.parametrize("with_signal", KILLED_OR_STOPPED)
def test_a_source_that_is_lost_before_the_boundary_breaks_the_world_with_a_reason(job: Trio, with_signal: int):
    request, newcomer = job.ready()
    job.kill(LEAVER, with_signal)
    how, reason = job.ending(SURVIVOR)
    assert how == "broken" and job.cause(SURVIVOR) == "peer"
    assert "rank 1" in reason and "the world cannot go on" in reason
    assert any(phase in reason for phase in ("training", "boundary", "optimizer step"))
    assert "the world cannot go on" in job.reason(SURVIVOR, request, "aborted")
    job.command([newcomer], "abort", request.handoff_id, _reason("a source is lost"))
    assert job.ending(newcomer) == ("aborted", "abort: a source is lost")


def test_a_leaver_that_dies_before_its_state_was_read_leaves_the_checkpoint(job: Trio):
    job.arm(LEAVER, "boundary", "kill")
    request, newcomer = job.ready(cutover=SHORT)
    job.permit(request)
    how, reason = job.ending(SURVIVOR)
    assert how == "broken" and "a source is gone" in reason and "state certificate" in reason, reason
    assert job.cause(SURVIVOR) == "peer"
    assert "a source is gone" in job.reason(SURVIVOR, request, "broken")
    assert job.ending(newcomer)[0] == "aborted"


@pytest.mark.parametrize("with_signal", KILLED_OR_STOPPED)
def test_a_leaver_lost_after_its_state_was_read_costs_one_batch_that_is_done_again(job: Trio, with_signal: int):
    job.arm(LEAVER, "norm", "hold")
    job.arm(SURVIVOR, "state read", "tell")
    request, newcomer = job.ready(TOLD, cutover=SHORT)
    job.permit(request)
    job.await_passage(LEAVER, "norm")
    for member in (SURVIVOR, newcomer):
        job.await_passage(member, "state read")
    job.kill(LEAVER, with_signal)
    for member in (SURVIVOR, newcomer):
        job.wait_for(lambda m=member: _active(job, m, request), 30, f"active of {member}")
    assert_started_at_the_version_held(job, newcomer)
    if with_signal == signal.SIGSTOP:
        # It wakes up, finds the decision and goes.
        job.kill(LEAVER, signal.SIGCONT)
        job.command([LEAVER], "release")
        job.command([LEAVER], "retire", request.handoff_id)
        assert job.ending(LEAVER)[0] == "left"


def test_a_leaver_that_dies_after_go_is_not_missed(job: Trio):
    job.arm(LEAVER, "leave", "kill")
    request, newcomer = job.ready()
    job.permit(request)
    for member in (SURVIVOR, newcomer):
        job.wait_for(lambda m=member: _active(job, m, request), 30, f"active of {member}")
    job.await_death(LEAVER)
    job.roster = request.target
    job.command(request.target.members, "retire", request.handoff_id)
    job.trains_on((SURVIVOR, newcomer))
    assert {result["how"] for result in job.stop().values()} == {"stopped"}


@pytest.mark.parametrize(
    ("with_signal", "cutover", "most_s"),
    [
        pytest.param(signal.SIGKILL, UNHURRIED, 10.0, id="dies"),
        pytest.param(signal.SIGSTOP, SHORT, 30.0, id="stalls", marks=pytest.mark.thorough),
    ],
)
def test_a_store_lost_before_the_decision_makes_all_hold_and_then_fall(
    job: Trio, with_signal: int, cutover: CutoverDeadlines, most_s: float
):
    """One that stalls may come back and is waited for until the deadline, 10 s here. One that died is not: 30 s."""
    job.arm(SURVIVOR, "gradients read", "hold")
    request, newcomer = job.ready(TOLD, cutover=cutover)
    job.permit(request)
    job.await_passage(SURVIVOR, "gradients read")
    # Before it has learned of the boundary, it would give up the handoff, and not fall with the others.
    job.await_passage(newcomer, "state read")
    job.kill_store(with_signal)
    lost_at = time.monotonic()
    job.command([SURVIVOR], "release")
    stood_at = job.steps(SURVIVOR)[-1][1]
    for member in (LEAVER, SURVIVOR, newcomer):
        how, reason = job.ending(member)
        assert how == "broken" and "rank" in reason and "decision" in reason, reason
        assert "the store" in job.reason(member, request, "broken") and job.cause(member) == "store"
    assert time.monotonic() - lost_at < most_s
    assert job.steps(SURVIVOR)[-1][1] == stood_at, "a step was applied although nothing was decided"


def test_a_store_that_stalls_until_the_handoff_is_aborted_does_not_stop_training(corpus: str):
    """Over the product's own transport, which finds its peers through the store."""
    with Trio(trio_setup(corpus, transport="mixed", bring_up_s=8.0)) as job:
        job.begin()
        request, newcomer = job.ready()
        job.kill_store(signal.SIGSTOP)
        job.abort(request, "the store is gone")
        stood_at = {member: job.steps(member)[-1][1] for member in (LEAVER, SURVIVOR)}
        for member, step in stood_at.items():
            job.await_step(member, step + 10, timeout_s=10.0)
        for member in (LEAVER, SURVIVOR):
            assert "the store is gone" in job.reason(member, request, "aborted")
        assert job.ending(newcomer)[0] == "aborted"


@pytest.mark.thorough
def test_a_target_that_alone_misses_the_result_of_the_comparison_goes_and_trains_on(job: Trio):
    """Its part was in the sum, so the others go. It has all it needs, and its world has lost no connection."""
    job.arm(SURVIVOR, "certificate", "lose the result")
    request, newcomer = job.ready(cutover=SHORT)
    job.permit(request)
    for member in (SURVIVOR, newcomer):
        job.wait_for(lambda m=member: _active(job, m, request), 30, f"active of {member}")
    job.roster = request.target
    job.command(job.members(request), "retire", request.handoff_id)
    job.trains_on((SURVIVOR, newcomer))
    results = job.stop()
    assert {results[member]["how"] for member in (SURVIVOR, newcomer)} == {"stopped"}


def test_a_target_that_dies_after_go_is_an_ordinary_loss_of_the_new_world(job: Trio):
    request, newcomer = job.ready(Fault("switched", "kill"))
    job.permit(request)
    job.await_death(newcomer)
    how, reason = job.ending(SURVIVOR)
    assert how == "broken" and "rank 0" in reason and "the world cannot go on" in reason
    assert "the world cannot go on" in job.reason(SURVIVOR, request, "broken")
    job.command([LEAVER], "retire", request.handoff_id)
    assert job.ending(LEAVER)[0] == "left"


def test_a_world_beyond_the_budget_is_refused_with_numbers_and_the_old_one_trains_on(corpus: str):
    with Trio(trio_setup(corpus, extra_bytes_max=100_000)) as job:
        job.begin()
        request, newcomer = job.attempt()
        for member, rank in ((SURVIVOR, 0), (newcomer, 1)):
            reason = job.reason(member, request, "aborted")
            assert f"rank {rank}" in reason and "extra_bytes_max" in reason and "budget is 100000" in reason
            needed = int(reason.partition("needs ")[2].split()[0])
            assert needed > 100_000
        job.abort(request, "does not fit")
        assert "does not fit" in job.reason(LEAVER, request, "aborted")
        job.trains_on()


def assert_started_at_the_version_held(job: Trio, newcomer: Any) -> None:
    """Version v came over whole, batch v+1 was done again: no step, no sample missing or twice."""
    job.roster = next(rank for rank in [job.roster] if rank is not None)
    for member in (SURVIVOR, newcomer):
        job.command([member], "stop", "enough")
    results: dict[Any, Any] = {
        member: job.ending(member) and job.ranks[member].result for member in (SURVIVOR, newcomer)
    }
    first = min(row[1] for row in job.steps(newcomer))
    records = {rank: result["records"][("stepped", 2, rank)] for rank, result in enumerate(results.values())}
    assert {record["step"] for record in records.values()} == {first - 1}, "the step was applied, not done again"
    last = job.steps(newcomer)[-1][1]
    alone = run_undisturbed(job.setup, job.layout, last, record_steps=(first - 1,))
    manifest = from_json(Manifest, results[SURVIVOR]["manifest"])
    ours = assemble({rank: record["regions"] for rank, record in records.items()}, manifest, "TP2")
    assert differences(alone.state("step", first - 1), ours) == []
    said = {row[1]: (row[3], row[4]) for row in (*job.steps(SURVIVOR), *job.steps(newcomer))}
    assert said == {step: (consumed, digest) for _, step, _, consumed, digest in alone.steps}


def _active(job: Trio, member: Any, request: Any) -> bool:
    names = [name for name, *_ in job.stages(member, request.handoff_id)]
    assert "broken" not in names and "aborted" not in names, job.stages(member, request.handoff_id)[-1]
    return "active" in names


def _reason(text: str) -> Any:
    from liver_core.handoff.messages import Reason

    return Reason(text, "abort")
