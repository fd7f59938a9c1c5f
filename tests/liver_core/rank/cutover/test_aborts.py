"""An abort at any moment before GO leaves the old world bit for bit as it was, and training.

One job is asked again and again to hand over and is disturbed each time at another point. The last test compares the
state after every one of its steps with that of a job which was left alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.support.trio import (
    LEAVER,
    SHORT,
    SURVIVOR,
    Trio,
    assert_trained_as_if_nothing_had_happened,
    trio_setup,
)
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

PHASES = (
    "bring_up_groups",
    "build_model",
    "warm_up",
    "agree_on_the_manifest",
    "lay_out_state",
    "plan",
    "connect_to_sources",
)
AFTER_THE_BOUNDARY = ("boundary", "state read", "gradients read", "certificate", "barrier")


@pytest.fixture(scope="module")
def job(corpus: str) -> Iterator[Trio]:
    with Trio(trio_setup(corpus)) as trio:
        trio.begin()
        yield trio


@pytest.mark.parametrize("phase", sample(PHASES, "bring_up_groups", "plan"))
def test_it_is_aborted_while_the_newcomer_prepares(job: Trio, phase: str):
    request, newcomer = job.attempt(Fault(phase, "hold"))
    job.await_passage(newcomer, phase)
    job.abort(request)
    job.command([newcomer], "release")
    for member in job.members(request):
        assert "the notice was withdrawn" in job.reason(member, request, "aborted")
    job.trains_on()


@pytest.mark.parametrize("phase", sample(["offer_state", "build_model"], "offer_state"))
def test_it_is_aborted_while_the_survivor_prepares(job: Trio, phase: str):
    job.is_aborted_at(phase)


def test_the_newcomer_dies_while_the_groups_connect_and_nobody_waits_for_gloo(job: Trio):
    """gloo waits for a member that has died until its own time is over, 20 s here."""
    request, newcomer = job.attempt(Fault("connect_groups", "kill"))
    job.await_death(newcomer)
    job.abort(request)
    for member in (LEAVER, SURVIVOR):
        assert "the notice was withdrawn" in job.reason(member, request, "aborted", timeout_s=3.0)
    job.trains_on()
    job.is_aborted_at("build_model")


def test_it_is_aborted_when_all_are_prepared(job: Trio):
    request, _ = job.ready()
    job.abort(request)
    for member in job.members(request):
        assert "the notice was withdrawn" in job.reason(member, request, "aborted")
    job.trains_on()


def test_a_rank_that_cannot_build_says_where_and_why(job: Trio):
    job.arm(SURVIVOR, "build_model", "raise")
    request, _ = job.attempt()
    reason = job.reason(SURVIVOR, request, "aborted")
    assert "rank 0" in reason and "build model" in reason and "planted" in reason
    job.abort(request)
    job.reason(LEAVER, request, "aborted")
    job.trains_on()


@pytest.mark.parametrize("action", ["kill", "stall"])
def test_the_newcomer_dies_or_stalls_while_it_prepares(job: Trio, action: str):
    request, newcomer = job.attempt(Fault("build_model", "tell"), Fault("build_model", action))
    job.await_passage(newcomer, "build_model")
    job.abort(request, "the newcomer does not answer")
    job.trains_on()
    job.kill(newcomer)  # the agent ends what it has given up; only then does a stalled peer's collective return
    assert "does not answer" in job.reason(LEAVER, request, "aborted")
    # The survivor may find out by itself, in the collective that it builds its optimizer with.
    reason = job.reason(SURVIVOR, request, "aborted")
    assert "does not answer" in reason or "build model" in reason
    job.trains_on()


def test_the_store_dies_before_the_boundary(job: Trio):
    request, newcomer = job.ready()
    job.kill_store()
    job.permit_newcomers(request)
    reason = job.reason(newcomer, request, "aborted")
    assert "the store is gone" in reason and "boundary" in reason and "rank 1" in reason
    assert job.cause(newcomer) == "store"
    job.abort(request, "the store is gone")
    for member in (LEAVER, SURVIVOR):
        assert "the store is gone" in job.reason(member, request, "aborted")
    job.trains_on()


@pytest.mark.parametrize("point", sample(AFTER_THE_BOUNDARY, "state read", "barrier"))
@pytest.mark.parametrize("action", sample(["kill", "stall"], "kill"))
def test_the_newcomer_dies_or_stalls_between_boundary_and_decision(job: Trio, point: str, action: str):
    request, newcomer = job.ready(Fault(point, action), cutover=SHORT)
    job.permit(request)
    for member in (LEAVER, SURVIVOR):
        reason = job.reason(member, request, "aborted")
        assert "rank" in reason and any(phase in reason for phase in ("certificate", "barrier", "decision")), reason
    job.kill(newcomer)
    job.trains_on()


def test_the_newcomer_dies_while_gradients_are_measured(job: Trio):
    job.arm(SURVIVOR, "norm", "hold")
    request, newcomer = job.ready()
    job.permit(request)
    job.await_passage(SURVIVOR, "norm")
    job.kill(newcomer)
    job.command([SURVIVOR], "release")
    assert "a target is gone" in job.reason(SURVIVOR, request, "aborted")
    job.reason(LEAVER, request, "aborted")
    job.trains_on()


def test_a_state_that_arrived_damaged_is_refused_by_name(job: Trio):
    request, newcomer = job.ready(Fault("state read", "corrupt"))
    job.permit(request)
    reasons = [job.reason(member, request, "aborted") for member in (newcomer, SURVIVOR, LEAVER)]
    assert "1 differ" in reasons[0] and "/exp_avg" in reasons[0] and "certificate" in reasons[0]
    job.trains_on()


def test_a_count_of_steps_that_is_not_the_source_worlds_is_refused_by_name(job: Trio):
    request, newcomer = job.ready(Fault("state read", "corrupt counts"))
    job.permit(request)
    reason = job.reason(newcomer, request, "aborted")
    assert "differ" in reason and "/step counts" in reason and "certificate" in reason, reason
    job.trains_on()


@pytest.mark.thorough
def test_who_comes_too_late_with_go_reads_no_go(job: Trio):
    """Both targets have passed the barrier and stall; the leaver's deadline decides; they find it and obey."""
    job.arm(SURVIVOR, "propose", "hold")
    request, newcomer = job.ready(Fault("propose", "hold"), cutover=SHORT)
    job.permit(request)
    job.await_passage(SURVIVOR, "propose")
    job.await_passage(newcomer, "propose")
    # The leaver has proposed and waits in the optimizer step for the survivor.
    job.wait_for(lambda: bool(job.stages(LEAVER, request.handoff_id)[-1][0] == "aborted"), 30, "the leaver's NO-GO")
    job.command([SURVIVOR, newcomer], "release")
    for member in job.members(request):
        assert "rank" in job.reason(member, request, "aborted")
    job.trains_on()


@pytest.mark.timeout(400)  # as many steps as all tests above took
def test_after_all_this_every_step_was_that_of_a_job_left_alone(job: Trio):
    assert_trained_as_if_nothing_had_happened(job)
