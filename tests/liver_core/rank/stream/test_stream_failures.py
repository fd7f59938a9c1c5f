"""How a live handoff ends when a source is lost, when state cannot stream, and when there is little memory.

The rest of the table in docs/handoff.md, section 5, for live handoffs (`test_stream_aborts` has the others), with real
kills and stalls. What cannot stream is copied in the pause: with a reason, and never with other bits.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from liver_core.handoff.messages import Reason, Rung
from liver_core.memory.memory_budget import TILE_ELEMENTS_LEAST, replay_bytes
from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.cutover.test_failures import KILLED_OR_STOPPED, assert_started_at_the_version_held
from tests.liver_core.rank.support.stream_random import (
    Link,
    Story,
    first_difference,
    setup_of,
    told_by_stop_and_copy,
    told_live,
)
from tests.liver_core.rank.support.stream_trio import LiveTrio, live_setup
from tests.liver_core.rank.support.trio import LEAVER, SHORT, SURVIVOR
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def job(corpus: str) -> Iterator[LiveTrio]:
    with LiveTrio(live_setup(corpus, record=True)) as trio:
        trio.begin()
        yield trio


# A source is lost before the boundary.


@pytest.mark.parametrize(
    ("point", "with_signal"),
    [
        pytest.param("first tile", signal.SIGKILL, id="dies at the first"),
        pytest.param("middle tile", signal.SIGSTOP, id="stalls at a middle", marks=pytest.mark.thorough),
        pytest.param("last tile", signal.SIGKILL, id="dies at the last", marks=pytest.mark.thorough),
    ],
)
def test_a_leaver_that_is_lost_while_its_tiles_are_read_breaks_the_world_with_a_reason(
    job: LiveTrio, point: str, with_signal: int
):
    job.arm(SURVIVOR, "stream", "tell")
    request, newcomer = job.attempt(Fault(point, "hold"))
    job.await_passage(newcomer, point)
    # A survivor that is still connecting would say so instead.
    job.await_passage(SURVIVOR, "stream")
    job.kill(LEAVER, with_signal)
    job.command([newcomer], "release")
    how, reason = job.ending(SURVIVOR)
    assert how == "broken" and "rank 1" in reason and "the world cannot go on" in reason, reason
    assert "the world cannot go on" in job.reason(SURVIVOR, request, "aborted")
    _given_up(job, request, newcomer)


@pytest.mark.thorough
def test_a_leaver_that_stalls_while_it_hashes_breaks_the_world_with_a_reason(job: LiveTrio):
    job.arm(LEAVER, "hash source", "tell")
    job.arm(LEAVER, "hash source", "stall")
    request, newcomer = job.attempt()
    job.await_passage(LEAVER, "hash source")
    how, reason = job.ending(SURVIVOR)
    assert how == "broken" and "the world cannot go on" in reason, reason
    _given_up(job, request, newcomer)


@pytest.mark.parametrize(
    ("point", "action"), sample([("middle tile", "kill"), ("hash target", "stall")], ("middle tile", "kill"))
)
def test_a_survivor_that_is_lost_while_it_streams_breaks_the_world_with_a_reason(
    job: LiveTrio, point: str, action: str
):
    job.arm(SURVIVOR, point, action)
    request, newcomer = job.attempt()
    how, reason = job.ending(LEAVER)
    assert how == "broken" and "rank 0" in reason and "the world cannot go on" in reason, reason
    _given_up(job, request, newcomer)


def _given_up(job: LiveTrio, request: Any, newcomer: Any) -> None:
    """The newcomer never enters the next world; it goes when it is told, if it has not found out by itself."""
    job.command([newcomer], "abort", request.handoff_id, Reason("a source is lost", "abort"))
    how, _ = job.ending(newcomer)
    assert how == "aborted"
    assert "active" not in [stage for stage, *_ in job.stages(newcomer, request.handoff_id)]


# A source is lost between the boundary and the decision.


@pytest.mark.parametrize("with_signal", KILLED_OR_STOPPED)
def test_a_leaver_lost_when_the_stream_has_caught_up_costs_one_batch_that_is_done_again(
    job: LiveTrio, with_signal: int
):
    job.arm(LEAVER, "norm", "hold")
    job.arm(SURVIVOR, "state read", "tell")
    request, newcomer = job.ready(Fault("state read", "tell"), cutover=SHORT)
    job.live(request)
    job.permit(request)
    job.await_passage(LEAVER, "norm")
    for member in (SURVIVOR, newcomer):
        job.await_passage(member, "state read")
    job.kill(LEAVER, with_signal)
    for member in (SURVIVOR, newcomer):
        assert "every target holds the state before the step" in job.reason(member, request, "active")
    assert_started_at_the_version_held(job, newcomer)


@pytest.mark.parametrize("action", sample(["kill", "stall"], "kill"))
def test_a_leaver_lost_at_the_boundary_before_a_word_of_it_costs_one_batch(job: LiveTrio, action: str):
    job.arm(LEAVER, "boundary", action)
    request, newcomer = job.ready(cutover=SHORT)
    job.live(request)
    job.permit(request)
    job.await_stage([SURVIVOR, newcomer], request, "active", 30)
    assert_started_at_the_version_held(job, newcomer)


@pytest.mark.thorough
def test_a_target_that_does_not_catch_up_in_time_holds_up_nobody(job: LiveTrio):
    """It neither waits for its own stream in the pause, nor when it drops the next world."""
    request, newcomer = job.ready(Fault("state read", "tell"), cutover=SHORT)
    job.live(request)
    job.arm(SURVIVOR, "replay", "hold")
    job.await_passage(SURVIVOR, "replay")
    job.permit(request)
    job.await_passage(newcomer, "state read")
    stood_at = job.steps(SURVIVOR)[-1][1]
    job.await_step(SURVIVOR, stood_at + 3, timeout_s=SHORT.source_s + 5.0)
    job.await_step(LEAVER, stood_at + 3)
    assert "aborted" not in [stage for stage, *_ in job.stages(SURVIVOR, request.handoff_id)], (
        "its world is not dropped"
    )
    job.command([SURVIVOR], "release")
    assert "catch up" in job.reason(SURVIVOR, request, "aborted")
    job.trains_on()


@pytest.mark.thorough
def test_a_boundary_in_time_is_not_lost_to_a_stream_that_catches_up_after_the_deadline(job: LiveTrio):
    request, newcomer = job.ready(deadline_s=20.0)
    job.live(request)
    job.wait_for(lambda: time.time() > request.deadline_utc - 4.0, 30, "time just before the deadline")
    job.arm(SURVIVOR, "replay", "hold")
    job.await_passage(SURVIVOR, "replay")
    job.permit(request)
    job.wait_for(lambda: time.time() > request.deadline_utc, 30, "deadline")
    job.command([SURVIVOR], "release")
    for member in (SURVIVOR, newcomer):
        job.wait_for(lambda m=member: _is_active(job, m, request), 30, f"active of {member}")


def _is_active(job: LiveTrio, member: Any, request: Any) -> bool:
    names = [name for name, *_ in job.stages(member, request.handoff_id)]
    assert "aborted" not in names, job.stages(member, request.handoff_id)[-1]
    return "active" in names


def test_gradients_that_are_summed_late_are_waited_for_at_the_boundary(job: LiveTrio):
    request, newcomer = job.ready()
    job.live(request)
    job.arm(LEAVER, "gradients summed", "hold")
    job.arm(LEAVER, "boundary", "tell")
    job.wait_for(lambda: ("held", "gradients summed") in job.ranks[LEAVER].events, 20, "a sum that is held up")
    held_at = job.steps(SURVIVOR)[-1][1]
    job.await_step(SURVIVOR, held_at + 3)
    job.permit(request)
    job.await_passage(LEAVER, "boundary")
    job.command([LEAVER], "release")
    job.await_stage([SURVIVOR, newcomer], request, "active", 30)
    measures = job.stages(newcomer, request.handoff_id)[-1][2]
    assert measures["gradient_bytes_at_cutover"] > 0, "the step was done again, not handed over"


def test_a_target_that_lost_a_slot_after_it_was_certified_is_no_go_and_says_so(job: LiveTrio):
    """It reads everything again at a later version, so that the steps up to there are in no sum of its."""
    request, _ = job.ready()
    job.live(request)
    job.arm(SURVIVOR, "replay", "hold")
    job.await_passage(SURVIVOR, "replay")
    held_at = job.steps(LEAVER)[-1][1]
    job.await_step(LEAVER, held_at + 2 * int(job.setup.stream["ring_depth"]))
    job.command([SURVIVOR], "release")
    job.await_step(LEAVER, job.steps(LEAVER)[-1][1] + 10)
    job.permit(request)
    reason = job.reason(SURVIVOR, request, "aborted")
    assert "catch up" in reason and "a slot was overwritten after the state was certified" in reason, reason
    job.trains_on()


@pytest.mark.parametrize("action", sample(["kill", "stall"], "kill"))
@pytest.mark.parametrize("point", sample(["boundary", "state read", "certificate", "barrier"], "boundary", "barrier"))
def test_a_newcomer_lost_between_boundary_and_decision_is_no_go(job: LiveTrio, point: str, action: str):
    request, newcomer = job.ready(Fault(point, action), cutover=SHORT)
    job.live(request)
    job.permit(request)
    for member in (LEAVER, SURVIVOR):
        reason = job.reason(member, request, "aborted")
        assert "rank" in reason and any(phase in reason for phase in ("certificate", "barrier", "decision")), reason
    job.kill(newcomer)
    job.trains_on()


# State that cannot stream is copied in the pause.

SMALL_RING = {"tile_elements": 256, "ring_depth": 2}
FALLS = {
    "a fused optimizer": ("fused", {}, "'fused': True"),
    "a step that no slot holds": ("wordy", {}, "could not be published: HeaderError"),
    "a group that no slot holds": ("very wordy", {}, "at most 16384 fit"),
    "a target that is too slow": ("adam", SMALL_RING, "the ring of depth 2 was overtaken at version"),
}


@pytest.mark.parametrize("why", sample(FALLS, "a step that no slot holds"))
def test_what_cannot_stream_is_copied_in_the_pause_with_a_reason_and_the_same_bits(corpus: str, why: str):
    optimizer, stream, text = FALLS[why]
    stands_for = 4 if stream is SMALL_RING else 0
    links = (Link("PP2", ("a", "b"), {}, 0), Link("TP2", ("b", "c"), stream, 2, stands_for=stands_for))
    story = Story(0, optimizer, "fp32", 2, links)
    setup = setup_of(story, corpus)
    live = told_live(story, setup)
    rung, reason = live.verdicts[2]
    assert rung == Rung.STOP_AND_COPY and text in reason and "rank" in reason, reason
    copied = told_by_stop_and_copy(story, setup, live.handed_at)
    assert not first_difference(live.traces, copied.traces)


# Memory.


def test_little_memory_makes_ring_and_tiles_small_and_less_makes_it_stop_and_copy(corpus: str):
    """Each budget is one byte away from the next behaviour; what is taken never exceeds it."""
    setup = RankSetup(small_gpt(corpus), pace_s=0.05, stream={"ring_depth": 8})
    with LiveTrio(setup) as job:
        job.begin()
        said = _prepared(job, None)[0]
        assert said[SURVIVOR]["ring_depth"] == 8 and said[SURVIVOR]["tile_elements"] > TILE_ELEMENTS_LEAST
        ring = int(said[SURVIVOR]["ring_bytes"] - 8) // 8
        own = int(said[SURVIVOR]["extra_bytes_peak"] - said[SURVIVOR]["ring_bytes"])
        own -= replay_bytes(int(said[SURVIVOR]["tile_elements"]))
        least = own + 8 + 2 * ring + replay_bytes(TILE_ELEMENTS_LEAST)

        said, (rung, reason) = _prepared(job, least)
        assert rung == Rung.LIVE, reason
        assert said[SURVIVOR]["ring_depth"] == 2 and said[SURVIVOR]["tile_elements"] == TILE_ELEMENTS_LEAST
        assert said[SURVIVOR]["extra_bytes_peak"] == least

        said, (rung, reason) = _prepared(job, least - 1)
        assert rung == Rung.STOP_AND_COPY
        assert reason.startswith("source rank 1: extra_bytes_max: streaming needs ") and str(least - 1) in reason
        assert "ring_bytes" not in said[SURVIVOR], "a ring was made although nobody can stream"

        said, (rung, reason) = _prepared(job, 8 + ring, LEAVER)
        assert rung == Rung.STOP_AND_COPY and reason.startswith("source rank 0: extra_bytes_max: "), reason

        job.setup = replace(setup, extra_bytes_max=own - 1)
        job.command([SURVIVOR], "set_budget", own - 1)
        request, newcomer = job.attempt()
        for member in (SURVIVOR, newcomer):
            reason = job.reason(member, request, "aborted")
            assert f"needs {own} bytes" in reason and f"budget is {own - 1}" in reason
        job.aborted(request, "does not fit", LEAVER)
        job.trains_on()


def _prepared(job: LiveTrio, budget: int | None, *only: Any) -> tuple[dict[Any, dict[str, float]], tuple[str, str]]:
    """Prepare a handoff under a budget of all ranks (or `only` some), and give it up. Measures by member, verdict."""
    if not only:
        job.setup = replace(job.setup, extra_bytes_max=budget)
    else:
        job.setup = replace(job.setup, extra_bytes_max=None)
        job.command([SURVIVOR], "set_budget", None)
    job.command(only or (LEAVER, SURVIVOR), "set_budget", budget)
    request, newcomer = job.ready()
    verdict = job.verdict(SURVIVOR, request)
    said = {member: job.stages(member, request.handoff_id)[-1][2] for member in job.members(request)}
    if budget is not None:
        limited = only or tuple(said)
        assert all(said[member].get("extra_bytes_peak", 0.0) <= budget for member in limited)
    job.aborted(request, "enough was seen", LEAVER, SURVIVOR, newcomer)
    job.command([LEAVER], "set_budget", None)
    return said, verdict
