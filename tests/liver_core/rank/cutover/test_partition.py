"""A network that is cut while a job is handed over live: each rank and the store have a network namespace of their own.

Nobody dies and nothing is closed: whoever is cut off only hears no more. What cross-memory attach reads inside this
machine goes on, which is the harder case: state arrives and agreement does not.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from liver_core.handoff.messages import Reason
from tests.cluster.net_islands import HUB, Islands, why_not
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.support.stream_trio import LiveTrio, live_setup
from tests.liver_core.rank.support.trio import (
    LEAVER,
    SHORT,
    SURVIVOR,
    assert_trained_as_if_nothing_had_happened,
)
from tests.tiers import sample

NAMES = ("a", "b", "c1")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why := why_not()), reason=why),
]


@pytest.fixture
def islands() -> Iterator[Islands]:
    with Islands(NAMES) as made:
        yield made


@pytest.fixture
def job(corpus: str, islands: Islands) -> Iterator[LiveTrio]:
    setup = live_setup(corpus, islands=(islands.prefix, NAMES), transport="mixed")
    with LiveTrio(setup) as trio:
        trio.begin()
        yield trio


@pytest.mark.parametrize("point", sample(["first tile", "middle tile", "last tile"], "middle tile"))
def test_a_newcomer_cut_off_while_its_share_streams_leaves_the_old_world_training(
    job: LiveTrio, islands: Islands, point: str
):
    request, newcomer = job.attempt(Fault(point, "hold"))
    job.await_passage(newcomer, point)
    islands.cut(newcomer.node_id)
    job.command([newcomer], "release")
    job.trains_on()
    job.aborted(request, "the newcomer is not heard", LEAVER, SURVIVOR)
    job.kill(newcomer)
    job.trains_on()
    assert_trained_as_if_nothing_had_happened(job)


def test_a_newcomer_cut_off_for_a_moment_takes_over_all_the_same(job: LiveTrio, islands: Islands):
    request, newcomer = job.attempt(Fault("middle tile", "hold"))
    job.await_passage(newcomer, "middle tile")
    islands.cut(newcomer.node_id)
    job.command([newcomer], "release")
    job.trains_on()
    islands.join(newcomer.node_id)
    job.await_stage(job.members(request), request, "prepared", 40)
    job.complete(request)
    job.trains_on([SURVIVOR, newcomer])


@pytest.mark.thorough
def test_a_newcomer_cut_off_between_boundary_and_decision_is_no_go(job: LiveTrio, islands: Islands):
    request, newcomer = job.ready(Fault("state read", "hold"), cutover=SHORT)
    job.live(request)
    job.permit(request)
    job.await_passage(newcomer, "state read")
    islands.cut(newcomer.node_id)
    job.command([newcomer], "release")
    for member in (LEAVER, SURVIVOR):
        reason = job.reason(member, request, "aborted")
        assert any(phase in reason for phase in ("certificate", "barrier", "decision")), reason
    job.trains_on()
    how, reason = job.ending(newcomer)
    assert how in ("aborted", "broken") and "rank 1" in reason, reason
    assert "active" not in [stage for stage, *_ in job.stages(newcomer, request.handoff_id)]
    assert_trained_as_if_nothing_had_happened(job)


@pytest.mark.thorough
def test_a_store_cut_off_between_boundary_and_decision_leaves_both_worlds_without_an_answer(
    job: LiveTrio, islands: Islands
):
    job.arm(SURVIVOR, "barrier", "hold")
    request, newcomer = job.ready(Fault("barrier", "tell"), cutover=SHORT)
    job.live(request)
    job.permit(request)
    job.await_passage(SURVIVOR, "barrier")
    islands.cut(HUB)
    job.command([SURVIVOR], "release")
    for member in (LEAVER, SURVIVOR, newcomer):
        how, reason = job.ending(member)
        assert how == "broken" and "store" in reason, (member, reason)


@pytest.mark.thorough
def test_a_leaver_cut_off_while_it_is_read_breaks_the_old_world_with_a_reason(job: LiveTrio, islands: Islands):
    request, newcomer = job.attempt(Fault("middle tile", "hold"))
    job.await_passage(newcomer, "middle tile")
    islands.cut(LEAVER.node_id)
    job.command([newcomer], "release")
    for member in (LEAVER, SURVIVOR):
        how, reason = job.ending(member)
        assert how == "broken" and "the world cannot go on" in reason, reason
    job.command([newcomer], "abort", request.handoff_id, Reason("a source is lost", "abort"))
    assert job.ending(newcomer)[0] == "aborted"
