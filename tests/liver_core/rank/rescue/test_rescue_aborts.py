"""A rescue that fails: before the decision the old world trains on as if nothing had happened, after it nothing is lost
unless a second thing fails, and then the checkpoint is next, with the reason.

b keeps what a holds, and goes on with somebody new. No leaver is let go before its share is held and certified.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from liver_core.handoff.messages import CutoverDeadlines, Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.cutover.test_failures import assert_started_at_the_version_held
from tests.liver_core.rank.support.job_names import JOBS
from tests.liver_core.rank.support.trio import (
    LEAVER,
    SURVIVOR,
    UNHURRIED,
    Trio,
    assert_trained_as_if_nothing_had_happened,
    trio_setup,
)
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

HURRIED = CutoverDeadlines(target_s=5.0, source_s=7.5, store_s=10.0, build_s=8.0)
READS = ("rescue exp_avg", "rescue exp_avg_sq", "rescue master")


class RescueTrio(Trio):
    """As Trio, but a's state is rescued."""

    def open(self, *arguments: Any, **named: Any) -> Any:
        return super().open(*arguments, **{"rung": Rung.RESCUE, "cutover": HURRIED} | named)

    def prepared(self, *faults: Fault, deadline_s: float = 60) -> tuple[Any, Member]:
        """Until everybody is prepared; nobody has permission yet."""
        request, newcomer = self.attempt(*faults, cutover=HURRIED)
        self.await_stage(self.members(request), request, "prepared", 40)
        return request, newcomer


@pytest.fixture(scope="module")
def job(corpus: str) -> Iterator[RescueTrio]:
    # Random numbers in forward passes: a stream that was not left alone would show in the bits.
    with RescueTrio(trio_setup(corpus, job=JOBS["dropout"])) as trio:
        trio.begin()
        yield trio


@pytest.fixture
def once(corpus: str) -> Iterator[RescueTrio]:
    """A job that does not outlive the test."""
    with RescueTrio(trio_setup(corpus, record=True, bring_up_s=8.0)) as trio:
        trio.begin()
        yield trio


@pytest.mark.parametrize("phase", ["offer_state", "plan_the_rescue", "connect_to_leavers"])
def test_it_is_aborted_while_the_survivor_prepares(job: RescueTrio, phase: str):
    job.is_aborted_at(phase, cutover=HURRIED)


def test_it_is_aborted_when_all_are_prepared(job: RescueTrio):
    request, newcomer = job.prepared()
    job.abort(request)
    for member in (LEAVER, SURVIVOR, newcomer):
        assert "the notice was withdrawn" in job.reason(member, request, "aborted")
    job.trains_on()


def test_a_share_that_arrived_damaged_keeps_the_leaver_and_names_the_tile(job: RescueTrio):
    job.arm(SURVIVOR, "state read", "corrupt share")
    request, newcomer = job.prepared()
    job.permit(request)
    reason = job.reason(SURVIVOR, request, "aborted")
    assert "rank 0, certificate" in reason and "1 differ" in reason and "/exp_avg" in reason
    for member in (LEAVER, newcomer):
        assert "rank" in job.reason(member, request, "aborted")
    job.trains_on()


@pytest.mark.thorough
@pytest.mark.parametrize("point", [READS[1], "certificate", "vote"])
def test_a_survivor_that_is_too_slow_keeps_the_leaver(job: RescueTrio, point: str):
    job.arm(SURVIVOR, point, "hold")
    request, newcomer = job.prepared()
    job.permit(request)
    job.await_passage(SURVIVOR, point)
    # The limit of those who have no vote decides, whoever of them looks first; the survivor finds that decision.
    reasons = [job.reason(member, request, "aborted") for member in (LEAVER, newcomer)]
    too_late = f"not finished {HURRIED.source_s:g} s after the boundary (source)"
    assert any(too_late in reason for reason in reasons), reasons
    job.command([SURVIVOR], "release")
    assert "rank" in job.reason(SURVIVOR, request, "aborted")
    job.ranks[SURVIVOR].events.remove(("held", point))
    job.trains_on()


def test_a_newcomer_that_dies_before_the_decision_changes_nothing_for_the_old_world(job: RescueTrio):
    request, newcomer = job.prepared()
    job.kill(newcomer)
    job.abort(request, "the newcomer is gone")
    for member in (LEAVER, SURVIVOR):
        assert "the newcomer is gone" in job.reason(member, request, "aborted")
    job.trains_on()


def test_a_rescue_beyond_the_budget_is_refused_with_numbers(job: RescueTrio):
    job.command([SURVIVOR], "set_budget", 700_000)
    request, _ = job.attempt(cutover=HURRIED)
    reason = job.reason(SURVIVOR, request, "aborted")
    assert "rank 0, plan the rescue" in reason and "budget is 700000" in reason, reason
    kept, built = (int(part.split()[0]) for part in reason.partition("(")[2].split(", ")[:2])
    assert f"needs {kept + built} bytes" in reason and kept > 0 and built > 0
    job.abort(request, "does not fit")
    job.reason(LEAVER, request, "aborted")
    job.command([SURVIVOR], "set_budget", None, kept - 1)
    request, _ = job.attempt(cutover=HURRIED)
    reason = job.reason(SURVIVOR, request, "aborted")
    assert f"host_bytes_max: a rescue needs {kept} bytes of host memory on rank 0" in reason, reason
    job.abort(request, "does not fit")
    job.reason(LEAVER, request, "aborted")
    job.command([SURVIVOR], "set_budget", kept + built)
    request, newcomer = job.prepared()
    job.abort(request)
    for member in (LEAVER, SURVIVOR, newcomer):
        job.reason(member, request, "aborted")
    job.command([SURVIVOR], "set_budget", built, kept)
    request, newcomer = job.prepared()
    said = job.stages(SURVIVOR, request.handoff_id)[-1][2]
    assert (said["host_bytes_peak"], said["host_bytes_budget"], said["extra_bytes_budget"]) == (kept, kept, built)
    job.abort(request)
    for member in (LEAVER, SURVIVOR, newcomer):
        job.reason(member, request, "aborted")
    job.command([SURVIVOR], "set_budget", None)
    job.trains_on()


@pytest.mark.timeout(400)  # as many steps as all tests above took
def test_after_all_this_every_step_was_that_of_a_job_left_alone(job: RescueTrio):
    assert_trained_as_if_nothing_had_happened(job)


@pytest.mark.thorough
def test_nobody_waits_for_a_newcomer_that_builds_with_the_survivors_when_it_comes(once: RescueTrio):
    request, newcomer = once.attempt(Fault("warm_up", "hold"), cutover=UNHURRIED)
    once.await_stage((LEAVER, SURVIVOR), request, "prepared", 40)
    once.command((LEAVER, SURVIVOR), "permit", request.handoff_id, 1)
    assert once.ending(LEAVER)[0] == "left"
    once.await_passage(newcomer, "warm_up")
    once.command([newcomer], "release")
    once.await_stage([newcomer], request, "prepared", 40)
    once.permit_newcomers(request)
    once.await_stage((SURVIVOR, newcomer), request, "active", 40)
    # Its agent knows, beyond the deadline, that it is not to be aborted.
    assert "cutting_over" in [stage for stage, *_ in once.stages(newcomer, request.handoff_id)]
    assert_started_at_the_version_held(once, newcomer)


@pytest.mark.parametrize("point", sample(READS, "rescue master"))
def test_a_leaver_that_dies_before_its_share_is_held_leaves_the_checkpoint(once: RescueTrio, point: str):
    once.arm(SURVIVOR, point, "hold")
    request, newcomer = once.prepared()
    once.permit(request)
    once.await_passage(SURVIVOR, point)
    stood_at = once.steps(SURVIVOR)[-1][1]
    once.kill(LEAVER)
    once.await_death(LEAVER)
    once.command([SURVIVOR], "release")
    assert "rank 0, read" in once.reason(SURVIVOR, request, "aborted")
    how, reason = once.ending(SURVIVOR)
    assert how == "broken" and "the world cannot go on" in reason
    assert once.ending(newcomer)[0] == "aborted"
    assert once.steps(SURVIVOR)[-1][1] == stood_at, "a step was applied without the leaver"


def test_a_leaver_that_dies_when_its_share_is_held_and_certified_costs_one_batch(once: RescueTrio):
    once.arm(SURVIVOR, "vote", "hold")
    request, newcomer = once.prepared()
    once.permit(request)
    once.await_passage(SURVIVOR, "vote")
    once.kill(LEAVER)
    once.await_death(LEAVER)
    once.command([SURVIVOR], "release")
    once.await_stage((SURVIVOR, newcomer), request, "active", 40)
    assert_started_at_the_version_held(once, newcomer)


def test_a_leaver_that_dies_at_the_release_is_not_missed(once: RescueTrio):
    once.arm(LEAVER, "leave", "kill")
    once.arm(SURVIVOR, "released", "hold")
    request, newcomer = once.prepared(Fault("released", "tell"))
    once.permit(request)
    once.await_death(LEAVER)
    once.await_passage(newcomer, "released")
    once.await_passage(SURVIVOR, "released")
    once.command([SURVIVOR], "release")
    once.await_stage((SURVIVOR, newcomer), request, "active", 40)
    assert_started_at_the_version_held(once, newcomer)


@pytest.mark.parametrize("point", sample(["released", "refilled"], "refilled"))
def test_a_newcomer_that_dies_after_the_release_leaves_the_checkpoint_and_nobody_steps(once: RescueTrio, point: str):
    request, _ = once.prepared(Fault(point, "kill"))
    once.permit(request)
    assert once.ending(LEAVER)[0] == "left"
    stood_at = once.steps(SURVIVOR)[-1][1]
    how, reason = once.ending(SURVIVOR)
    assert how == "broken" and "rank 0" in reason, reason
    assert reason == once.reason(SURVIVOR, request, "broken")
    assert once.steps(SURVIVOR)[-1][1] == stood_at


def test_a_store_that_is_lost_after_the_release_leaves_the_checkpoint(once: RescueTrio):
    once.arm(SURVIVOR, "released", "hold")
    request, newcomer = once.prepared(Fault("released", "hold"))
    once.permit(request)
    assert once.ending(LEAVER)[0] == "left"
    for member in (SURVIVOR, newcomer):
        once.await_passage(member, "released")
    once.kill_store()
    once.command((SURVIVOR, newcomer), "release")
    for member in (SURVIVOR, newcomer):
        assert "the store" in once.reason(member, request, "broken")
        assert once.ending(member)[0] == "broken"


def test_who_cannot_build_after_the_release_tells_the_others_why(once: RescueTrio):
    request, newcomer = once.prepared(Fault("build_model", "raise"))
    once.permit(request)
    assert "build model: ValueError: planted" in once.reason(newcomer, request, "broken")
    assert "rank 1, build: build model: ValueError: planted" in once.reason(SURVIVOR, request, "broken")


@pytest.mark.thorough
@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
def test_a_survivor_that_is_lost_after_the_release_leaves_the_checkpoint(corpus: str, with_signal: int):
    """What it kept is nowhere else."""
    with Cluster(RankSetup(small_gpt(corpus), pace_s=0.05, bring_up_s=5.0)) as cluster:
        cluster.launch("TP2xPP2", "abcd")
        assert cluster.roster is not None
        a, b, c, d = cluster.roster.members
        cluster.await_step(a, 2)
        cluster.arm(a, "released", "hold")
        request = cluster.open("PP2", "ab", rung=Rung.RESCUE, cutover=HURRIED)
        cluster.await_stage(cluster.members(request), request, "prepared", 40)
        cluster.command(cluster.members(request), "permit", request.handoff_id, 1)
        cluster.await_passage(a, "released")
        cluster.kill(a, with_signal)
        cluster.await_stage((c, d), request, "left", 20)
        cluster.await_stage([b], request, "broken", 30)
        reason = str(cluster.stages(b, request.handoff_id)[-1][1])
        assert "rank 1, build: bring up groups" in reason and "only 1 of 2 ranks came in time" in reason, reason


@pytest.mark.thorough
def test_another_notice_before_the_boundary_makes_the_plan_anew(corpus: str):
    """d was to leave; now c goes too, and a and b keep what both of them hold."""
    with Cluster(RankSetup(small_gpt(corpus), pace_s=0.05)) as cluster:
        cluster.launch("TP2xPP2", "abcd")
        assert cluster.roster is not None
        a, b, c, d = cluster.roster.members
        cluster.await_step(a, 2)
        request = cluster.open("PP3", "abc", rung=Rung.RESCUE)
        cluster.await_stage(cluster.members(request), request, "prepared", 40)
        request = cluster.amend(request, "PP2", "ba")
        cluster.await_stage(cluster.members(request), request, "prepared", 40)
        cluster.command(cluster.members(request), "permit", request.handoff_id, request.plan_revision)
        cluster.await_stage((c, d), request, "left", 30)
        cluster.await_stage((a, b), request, "active", 40)
        kept = [cluster.stages(member, request.handoff_id)[-1][2]["bytes_rescued"] for member in (a, b)]
        assert abs(kept[0] - kept[1]) <= 12, "half of the last stage, each"
        cluster.roster = request.target
        cluster.await_step(b, cluster.steps(b)[-1][1] + 2)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["hold", "corrupt share"])
def test_no_leaver_goes_because_one_survivor_of_two_holds_its_share(corpus: str, fault: str):
    """a is too slow, or has something else than what c and d gave; b has voted."""
    setup = RankSetup(small_gpt(corpus), pace_s=0.05, trace=True)
    with Cluster(setup) as cluster:
        cluster.launch("TP2xPP2", "abcd")
        assert cluster.roster is not None
        a, b, c, d = members = cluster.roster.members
        cluster.await_step(a, 2)
        cluster.arm(a, "state read", fault)
        request = cluster.open("PP2", "ab", rung=Rung.RESCUE, cutover=HURRIED)
        cluster.await_stage(members, request, "prepared", 40)
        cluster.command(members, "permit", request.handoff_id, 1)
        cluster.await_stage((c, d), request, "aborted", 20)
        if fault == "hold":
            cluster.command([a], "release")
        cluster.await_stage((a, b), request, "aborted", 20)
        last = cluster.steps(a)[-1][1]
        for member in members:
            assert "left" not in [stage for stage, *_ in cluster.stages(member, request.handoff_id)]
            cluster.await_step(member, last + 2)
        ours = {member.node_id: result["trace"] for member, result in cluster.stop().items()}
    alone = run_undisturbed(setup, "TP2xPP2", last + 2)
    for node, trace in alone.traces.items():
        assert [step for step in trace if ours[node][step][1] != trace[step][1]] == [], node
