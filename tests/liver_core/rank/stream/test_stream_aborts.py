"""Whatever happens to a stream before GO, the old world stays bit for bit as it was, trains, and is told why.

One job is asked again and again to hand over live and is disturbed each time at another point: targets die or stall
with their first, a middle and their last tile and while they hash, the store goes away, bits are flipped. The last test
compares the state after every one of its steps, and its samples, with a job that was left alone.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from liver_core.handoff.messages import Rung
from liver_core.layout import Member
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.support.stream_trio import STREAM, LiveTrio, live_setup
from tests.liver_core.rank.support.trio import LEAVER, SURVIVOR, assert_trained_as_if_nothing_had_happened
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

POINTS = ("first tile", "middle tile", "last tile", "hash target")


@pytest.fixture(scope="module")
def job(corpus: str) -> Iterator[LiveTrio]:
    with LiveTrio(live_setup(corpus, counts=True)) as trio:
        trio.begin()
        yield trio


@pytest.mark.parametrize(
    ("action", "point"),
    sample(
        itertools.product(["kill", "stall"], POINTS),
        *(("kill", "first tile"), ("stall", "middle tile")),
    ),
)
def test_a_newcomer_is_lost_while_its_share_streams(job: LiveTrio, point: str, action: str):
    request, newcomer = job.attempt(Fault(point, "tell"), Fault(point, action))
    job.await_passage(newcomer, point)
    job.trains_on()
    job.aborted(request, "the newcomer does not answer", LEAVER, SURVIVOR)
    job.kill(newcomer)
    job.trains_on()


@pytest.mark.thorough
def test_a_newcomer_that_stalls_makes_the_others_choose_stop_and_copy_before_the_deadline(job: LiveTrio):
    newcomer = f"c{job.newcomers + 1}"
    job.newcomers += 1
    job.faults[newcomer] = (Fault("last tile", "stall"),)
    request = job.open("TP2", ["b", newcomer], deadline_s=12)
    job.await_stage([LEAVER, SURVIVOR], request, "prepared", 20)
    rung, reason = job.verdict(SURVIVOR, request)
    assert rung == Rung.STOP_AND_COPY
    assert reason.startswith("target rank 0: not certified in time: at version")
    job.aborted(request, "the newcomer does not answer", LEAVER, SURVIVOR)
    job.kill(request.target.members[1])
    job.trains_on()


@pytest.mark.parametrize("point", sample(POINTS, "middle tile"))
def test_it_is_aborted_while_the_survivor_streams(job: LiveTrio, point: str):
    job.is_aborted_at(point)


def test_it_is_aborted_while_a_source_hashes_and_the_step_that_waits_for_it_goes_on(job: LiveTrio):
    job.arm(LEAVER, "hash source", "hold")
    request, newcomer = job.attempt()
    job.await_passage(LEAVER, "hash source")
    job.abort(request)
    job.command([LEAVER], "release")
    for member in (LEAVER, SURVIVOR, newcomer):
        assert "the notice was withdrawn" in job.reason(member, request, "aborted")
    job.trains_on()


@pytest.mark.parametrize("point", sample(["first tile", "middle tile", "hash target"], "middle tile"))
def test_the_store_dies_while_state_streams(job: LiveTrio, point: str):
    request, newcomer = job.attempt(Fault(point, "hold"))
    job.await_passage(newcomer, point)
    job.kill_store()
    job.command([newcomer], "release")
    for member, rank in ((newcomer, 1), (SURVIVOR, 0), (LEAVER, 0)):
        reason = job.reason(member, request, "aborted")
        assert "the store is gone" in reason and f"rank {rank}" in reason and "stream" in reason, reason
    job.trains_on()


def test_a_store_that_stalls_while_state_streams_does_not_stall_the_steps(job: LiveTrio):
    request, newcomer = job.attempt(Fault("middle tile", "hold"))
    job.await_passage(newcomer, "middle tile")
    store = job.stores[-1].pid
    os.kill(store, signal.SIGSTOP)
    try:
        job.command([newcomer], "release")
        at = job.steps(SURVIVOR)[-1][1]
        # More than the ring holds: each step must give its slot to the next though nobody can be told of sums.
        job.await_step(SURVIVOR, at + 3 * STREAM["ring_depth"], 15)
    finally:
        os.kill(store, signal.SIGCONT)
    # Ranks give it up by themselves after a while; the proposer's word may come first.
    job.abort(request, "the store does not answer")
    for member in (LEAVER, SURVIVOR):
        assert "the store" in job.reason(member, request, "aborted"), member
    job.trains_on()


@pytest.mark.parametrize("action", sample(["corrupt", "corrupt replica"], "corrupt"))
def test_a_tile_that_arrived_damaged_is_refused_by_name(job: LiveTrio, action: str):
    request, newcomer = job.attempt(Fault("hash target", action))
    reason = job.reason(SURVIVOR, request, "aborted")
    assert "rank 0, stream: CertificateRefused: 1 differ at version" in reason and "/exp_avg" in reason, reason
    job.aborted(request, "the certificate was refused", LEAVER, newcomer)
    job.trains_on()


def test_gradients_that_landed_damaged_after_the_certificate_are_refused_at_the_boundary(job: LiveTrio):
    request, newcomer = job.ready()
    job.live(request)
    job.arm(newcomer, "replay", "corrupt gradients")
    job.arm(newcomer, "replay", "tell", 2)
    job.await_passage(newcomer, "replay")
    job.permit(request)
    for member in (newcomer, SURVIVOR, LEAVER):
        reason = job.reason(member, request, "aborted")
        assert "certificate" in reason or "NO-GO" in reason or "another" in reason, reason
    assert "gradients of the steps streamed" in job.reason(newcomer, request, "aborted")
    job.trains_on()


@pytest.mark.thorough
def test_a_count_of_steps_that_is_not_the_source_worlds_is_refused_at_the_boundary(job: LiveTrio):
    request, newcomer = job.ready()
    job.live(request)
    job.arm(newcomer, "boundary", "corrupt counts")
    job.permit(request)
    assert "or step counts" in job.reason(newcomer, request, "aborted")
    job.trains_on()


def test_a_slot_of_a_ring_that_is_damaged_after_it_was_summed_is_refused_at_the_boundary(job: LiveTrio):
    request, newcomer = job.ready()
    job.live(request)
    job.arm(newcomer, "replay", "hold")
    job.await_passage(newcomer, "replay")
    # The first that is summed now may be of the slot that the newcomer has read already.
    job.arm(LEAVER, "gradients summed", "corrupt slot", 2)
    job.await_passage(LEAVER, "gradients summed")
    job.command([newcomer], "release")
    job.arm(newcomer, "replay", "tell", 4)
    job.permit(request)
    assert "gradients of the steps streamed" in job.reason(newcomer, request, "aborted")
    for member in (SURVIVOR, LEAVER):
        assert "rank" in job.reason(member, request, "aborted")
    job.trains_on()


def test_a_target_that_was_overtaken_after_the_certificate_is_refused_at_the_boundary(job: LiveTrio):
    """It has copied everything again, at a version that nobody certified."""
    request, newcomer = job.ready()
    job.live(request)
    job.arm(newcomer, "replay", "hold")
    job.await_passage(newcomer, "replay")
    job.await_step(SURVIVOR, job.steps(SURVIVOR)[-1][1] + 2 * STREAM["ring_depth"])
    job.arm(newcomer, "replay", "tell", 3)
    job.command([newcomer], "release")
    job.wait_for(lambda: ("passed", "replay") in job.ranks[newcomer].events, 20, "replay after everything was copied")
    job.permit(request)
    assert "a slot was overwritten after the state was certified" in job.reason(newcomer, request, "aborted")
    for member in (SURVIVOR, LEAVER):
        assert "rank" in job.reason(member, request, "aborted")
    job.trains_on()


def test_a_source_that_can_sum_its_gradients_no_more_is_refused_at_the_boundary(job: LiveTrio):
    request, newcomer = job.ready()
    job.live(request)
    job.arm(LEAVER, "gradients summed", "raise")
    job.trains_on()
    job.permit(request)
    reasons = [job.reason(member, request, "aborted") for member in (LEAVER, SURVIVOR, newcomer)]
    assert "were not hashed: planted at gradients summed" in reasons[0], reasons
    assert all("gradients of the steps streamed" in reason for reason in reasons[1:]), reasons
    job.trains_on()


def test_the_store_dies_after_the_certificate(job: LiveTrio):
    request, newcomer = job.ready()
    job.live(request)
    job.kill_store()
    job.trains_on()
    job.permit_newcomers(request)
    reason = job.reason(newcomer, request, "aborted")
    assert "the store is gone" in reason and "boundary" in reason and "rank 1" in reason
    job.aborted(request, "the store is gone", LEAVER, SURVIVOR)
    job.trains_on()


def test_it_is_withdrawn_after_the_certificate_while_the_stream_follows(job: LiveTrio):
    request, newcomer = job.ready()
    job.live(request)
    job.trains_on()
    job.aborted(request, "the notice was withdrawn", LEAVER, SURVIVOR, newcomer)
    job.trains_on()


def test_so_many_attempts_leave_no_thread_and_no_open_file_behind(job: LiveTrio):
    """A few belong to the attempt before this one; each held four threads and a socket or two of its groups."""
    request, _ = job.ready()
    job.aborted(request, "enough was seen", LEAVER, SURVIVOR)
    for member in (LEAVER, SURVIVOR):
        before = next(event[3] for event in job.ranks[member].events if event[0] == "resident")
        job.wait_for(lambda m=member, b=before: _few_more(job, m, b), 10, f"end of what attempts held on {member}")


@pytest.mark.timeout(400)  # as many steps as all tests above took
def test_after_all_this_every_step_was_that_of_a_job_left_alone(job: LiveTrio):
    assert_trained_as_if_nothing_had_happened(job)


def _few_more(job: LiveTrio, member: Member, before: dict[str, int]) -> bool:
    now = [event[3] for event in list(job.ranks[member].events) if event[0] == "resident"][-1]
    return all(now[name] <= before[name] + 10 for name in before)
