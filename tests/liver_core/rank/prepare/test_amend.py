"""A handoff under way is amended: more leavers, another layout, other newcomers, a nearer deadline.

One job is handed over live again and again, and each time the plan is amended in another phase, with more nodes going
or coming. It always ends in the world of the newest revision. The last test compares every step's state, bit for bit,
with stop-and-copy at the same steps, every step's samples with what the cursor alone says, and looks for leftovers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from liver_core.layout import Member
from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import EVERY_TIME, Fault
from tests.liver_core.rank.support.amended import AmendedJob, member
from tests.liver_core.rank.support.stream_random import Story
from tests.liver_core.rank.support.stream_trio import STREAM

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

STAYS = Member("s", 0)
"""The node that is in every world."""


@pytest.fixture(scope="module")
def job(corpus: str) -> Iterator[AmendedJob]:
    setup = RankSetup(
        small_gpt(corpus), trace=True, counts=True, pace_s=0.2, stream={**STREAM, "tile_elements": 1 << 14}
    )
    with AmendedJob(setup) as amended:
        amended.begin("PP2", "sa")
        yield amended


def test_a_newcomer_more_while_the_newcomer_of_the_older_revision_prepares(job: AmendedJob):
    job.faults["b"] = (Fault("bring_up_groups", "hold"),)
    first = job.live("TP2", "sb")
    job.await_passage(member("b"), "bring_up_groups")
    newer = job.amend(first, "PP3", "sbc")
    job.let_go(member("b"), "bring_up_groups")
    job.ends_in(newer, "PP3", "sbc")
    for who in (STAYS, member("a"), member("b")):
        assert job.said(who, first, 1) == ["preparing"], "an older revision ends in silence"


def test_a_leaver_more_while_models_are_built(job: AmendedJob):
    """The others wait in a collective for the one that is held; it breaks for them, which ends nothing."""
    job.arm(member("b"), "build_model", "hold")
    first = job.live("PP2", "sb")
    job.await_passage(member("b"), "build_model")
    newer = job.amend(first, "TP1", "s")
    job.let_go(member("b"), "build_model")
    job.ends_in(newer, "TP1", "s")


def test_a_rank_whose_build_breaks_because_others_were_amended_first_waits_for_its_own_order(job: AmendedJob):
    """Only the newcomer has the newer revision when it lets the others down; they have it when they wait for it."""
    job.faults["d"] = (Fault("build_model", "hold"), Fault("offer_state", "tell"))
    job.arm(STAYS, "build_model", "tell")
    first = job.live("PP2", "sd")
    job.await_passage(member("d"), "build_model")
    job.await_passage(STAYS, "build_model")
    job.ranks[STAYS].events.remove(("passed", "build_model"))
    commanded, job.command = job.command, _only_to(job, member("d"))
    newer = job.amend(first, "PP2", "ds")
    job.command = commanded
    job.let_go(member("d"), "build_model")
    job.wait_for(lambda: job.said(member("d"), newer, 2) == ["preparing"], 20, "the newer revision at the newcomer")
    job.trains_on(5)
    assert job.said(STAYS, first, 1) == ["preparing"], "it told its agent of a failure that is none"
    job.command([who for who in job.members(newer) if who != member("d")], "prepare", newer)
    job.ends_in(newer, "PP2", "ds")


def test_another_layout_while_state_streams(job: AmendedJob):
    job.arm(STAYS, "middle tile", "hold")
    first = job.live("TP2", "sd")
    job.await_passage(STAYS, "middle tile")
    newer = job.amend(first, "DP2", "sd")
    job.let_go(STAYS, "middle tile")
    job.ends_in(newer, "DP2", "sd")
    assert job.said(STAYS, first, 1) == ["preparing", "streaming"]
    assert job.said(STAYS, newer, 2)[:3] == ["preparing", "streaming", "prepared"]


@pytest.mark.thorough
def test_other_newcomers_when_all_are_prepared_and_the_one_that_is_dropped_leaves_with_a_reason(job: AmendedJob):
    first = job.live("PP3", "sde")
    job.prepared(first)
    newer = job.amend(first, "TP2", "sf")
    job.wait_for(lambda: job.ranks[member("e")].result is not None, 20, "end of the newcomer that is dropped")
    result = job.ranks[member("e")].result
    assert result is not None and result["how"] == "aborted" and "no part in the amended plan" in result["reason"]
    job.ends_in(newer, "TP2", "sf")
    assert "ready" not in job.said(STAYS, first, 1)


@pytest.mark.thorough
def test_a_rank_that_comes_to_groups_which_another_has_left_does_not_wait_in_vain_for_them(job: AmendedJob):
    """The survivor has counted itself in when it is amended; the newcomer is the last to come, and hears of it late."""
    job.faults["g"] = (Fault("bring_up_groups", "hold"),)
    job.arm(STAYS, "bring_up_groups", "tell")
    first = job.live("PP2", "sg")
    for who in (member("g"), STAYS):
        job.await_passage(who, "bring_up_groups")
    commanded, job.command = job.command, _only_to(job, STAYS)
    newer = job.amend(first, "TP2", "gs")
    job.command = commanded
    job.wait_for(lambda: "preparing" in job.said(STAYS, newer, 2), 20, "the newer revision at the survivor")
    job.let_go(member("g"), "bring_up_groups")
    job.trains_on(2)
    job.command([member("f"), member("g")], "prepare", newer)
    job.await_stage(job.members(newer), newer, "prepared", 0.75 * job.setup.bring_up_s)
    job.ends_in(newer, "TP2", "gs")


@pytest.mark.thorough
def test_permission_that_is_taken_back_too_late_leaves_the_older_revision_to_finish(job: AmendedJob):
    """One rank has taken it back and knows a newer plan, but both have shown their tags at the boundary under way."""
    first = job.live("PP2", "sh")
    job.prepared(first)
    other = _at_a_boundary(job, first, job.members(first))
    job.command([STAYS], "withdraw", first.handoff_id)
    newer = job.amend(first, "PP2", "hs")
    job.let_go(other, "asked")
    job.await_stage(first.target.members, first, "active", 30)
    job.switches_to(first, "PP2", "sh")
    for who in job.members(newer):
        assert job.said(who, newer, 2) == []


@pytest.mark.thorough
def test_permission_that_is_taken_back_in_time_lets_the_plan_be_amended_after_the_boundary(job: AmendedJob):
    """One rank has shown its tag at the boundary under way, the other has not: nothing is agreed there."""
    first = job.live("TP2", "hs")
    job.prepared(first)
    other = _at_a_boundary(job, first, [STAYS])
    job.command([STAYS], "withdraw", first.handoff_id)
    newer = job.amend(first, "PP2", "hs")
    job.let_go(other, "asked")
    job.prepared(newer)
    assert job.said(STAYS, first, 1)[-2:] == ["ready", "prepared"], "it says that the tag is gone when it knows"
    job.command(job.members(newer), "permit", first.handoff_id, 1)
    job.trains_on(2)
    assert "ready" not in job.said(STAYS, newer, 2), "permission of an older revision is void"
    job.ends_in(newer, "PP2", "hs")


@pytest.mark.thorough
@pytest.mark.parametrize(("point", "layout"), [("middle tile", "TP2"), ("prepared", "PP2")])
def test_a_nearer_deadline_keeps_what_is_built_and_has_arrived(job: AmendedJob, point: str, layout: str):
    nodes = "is"
    job.arm(STAYS, "build_model", "tell")
    if point != "prepared":
        job.arm(STAYS, point, "hold")
    first = job.live(layout, nodes)
    if point == "prepared":
        job.prepared(first)
    else:
        job.wait_for(lambda: ("held", point) in list(job.ranks[STAYS].events), 30, point)
    job.arm(STAYS, "build_model", "hold")
    newer = job.amend(first, layout, nodes, deadline_s=30)
    if point != "prepared":
        job.let_go(STAYS, point)
    assert newer.target_revision == 1 and newer.deadline_utc < first.deadline_utc
    job.ends_in(newer, layout, nodes)
    assert ("held", "build_model") not in job.ranks[STAYS].events, "it was built again"
    job.ranks[STAYS].events.remove(("passed", "build_model"))
    job.command([STAYS], "disarm")
    assert job.said(STAYS, newer, 2)[0] == {"middle tile": "streaming"}.get(point, point)


@pytest.mark.thorough
def test_revisions_that_follow_each_other_at_once_and_one_that_a_rank_never_heard_of(job: AmendedJob):
    job.arm(member("i"), "build_model", "hold")
    first = job.live("PP2", "si")
    job.await_passage(member("i"), "build_model")
    commanded, job.command = job.command, _only_to(job, STAYS)
    second = job.amend(first, "TP1", "i")
    job.command = commanded
    third = job.amend(second, "PP2", "si")
    fourth = job.amend(third, "PP2", "si", deadline_s=30)
    assert [each.target_revision for each in (first, second, third, fourth)] == [1, 2, 3, 3]
    job.let_go(member("i"), "build_model")
    job.ends_in(fourth, "PP2", "si")
    assert job.said(member("i"), second, 2) == []


@pytest.mark.thorough
def test_a_revision_that_comes_too_late_leaves_the_older_one_to_finish(job: AmendedJob):
    """The boundary is agreed, and the newcomer has not heard of it yet: neither takes anything newer."""
    first = job.live("TP2", "sj")
    job.prepared(first)
    job.arm(STAYS, "boundary", "hold")
    job.command(job.members(first), "permit", first.handoff_id, 1)
    job.await_passage(STAYS, "boundary")
    late = job.amend(first, "PP2", "js")
    job.let_go(STAYS, "boundary")
    job.await_stage(first.target.members, first, "active", 30)
    job.switches_to(first, "TP2", "sj")
    assert job.said(STAYS, late, 2) == job.said(member("j"), late, 2) == []


def test_every_step_held_the_bits_that_stop_and_copy_gives_and_used_each_sample_once(job: AmendedJob):
    before = next(event[3] for event in job.ranks[STAYS].events if event[0] == "resident" and event[1] == 2)
    job.wait_for(lambda: _no_more(job, before), 15, "end of what amended handoffs held")
    job.held_what_stop_and_copy_gives(Story(0, "adam", "fp32", 2, ()))


def _at_a_boundary(job: AmendedJob, request: Any, permitted: Sequence[Member]) -> Member:
    """Give permission, and hold the world at a boundary at which all have shown what they want and nobody knows what
    was agreed. Returns the rank that is held, for which STAYS waits."""
    assert job.roster is not None
    (other,) = (who for who in job.roster.members if who != STAYS)
    job.arm(other, "asked", "hold")
    job.await_passage(other, "asked")
    job.command(permitted, "permit", request.handoff_id, 1)
    job.await_stage([STAYS], request, "ready", 10)
    # STAYS may be behind at the boundary at which the other is held: it is the next one that counts.
    job.arm(STAYS, "asked", "tell", EVERY_TIME)
    job.arm(other, "asked", "hold")
    job.ranks[other].events.remove(("held", "asked"))
    job.command([other], "release")
    job.await_passage(other, "asked")
    done = job.steps(other)[-1][1]
    events = job.ranks[STAYS].events

    def asked_there() -> bool:
        told = list(events)
        steps = [index for index, event in enumerate(told) if event[0] == "step" and event[2] == done]
        return bool(steps) and ("passed", "asked") in told[steps[-1] :]

    job.wait_for(asked_there, 30, f"the boundary after step {done} on {STAYS}")
    job.command([STAYS], "disarm")
    while ("passed", "asked") in events:
        events.remove(("passed", "asked"))
    return other


def _only_to(job: AmendedJob, who: Member) -> Any:
    """`job.command` for one rank alone, as when the others' orders are still on their way."""
    command = job.command
    return lambda members, *rest: command([each for each in members if each == who], *rest)


def _no_more(job: AmendedJob, before: dict[str, int]) -> bool:
    """As many groups as the first world had, and a thread, socket or two of the last handoff at most."""
    now = [event[3] for event in list(job.ranks[STAYS].events) if event[0] == "resident"][-1]
    same = now["groups"] <= before["groups"] and now["group names"] <= before["group names"]
    return same and all(now[name] <= before[name] + 10 for name in before)
