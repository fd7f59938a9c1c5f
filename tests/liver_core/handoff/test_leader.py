"""Who leads a handoff of a job, who is told, and what becomes of a proposal of the service."""

from dataclasses import replace
from itertools import combinations

import pytest

from liver_core.handoff import Phase, Rung
from liver_core.handoff.forwarding import FORWARD_AGAIN_S, FORWARD_PATIENCE_S
from liver_core.handoff.leader import ASKS_PACE, IN_TOUCH_S, LEAD_TURN_S
from liver_core.handoff.leader_events import (
    AskedToLead,
    AskPace,
    AskPeers,
    CallOffSuspension,
    Decline,
    Forwarded,
    ForwardNotices,
    HandoffAmended,
    HandoffOpened,
    HandoffSuperseded,
    LeaderEffect,
    Loss,
    NoPlan,
    OwnNoticeWithdrawn,
    Promised,
    Say,
    StartStore,
    SuspendAlone,
    TellWithdrawal,
    Wait,
    with_time_left,
)
from liver_core.handoff.proposer_events import SendOrder
from tests.liver_core.handoff.leader_scene import ACTIVE, FOUR, Scene, only, plan_of, wanted, world_of


def texts(effects: tuple[LeaderEffect, ...]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Say)]


def told(effects: tuple[LeaderEffect, ...]) -> list[tuple[str, ...]]:
    return [effect.to for effect in effects if isinstance(effect, ForwardNotices)]


# Who opens.


def test_the_first_that_stays_opens_and_the_others_wait_until_they_are_asked():
    for name in FOUR[:3]:
        now = Scene(name)
        assert (now.opens(now.look(now.goes("d"))) is not None) is (name == "a")
    third = Scene("c")
    third.hear(AskedToLead())
    assert third.opens(third.look(third.goes("d"))) is not None
    other = Scene("c")
    other.hear(AskedToLead())
    other.look()
    assert other.opens(other.look(other.goes("d"))) is None, "it was asked because of a notice that counts no more"


def test_whose_turn_it_was_in_one_world_leaves_the_next_to_the_first():
    """Else both open one there, whose ranks are promised to either, and again after each failure."""
    now = Scene("c")
    now.hear(AskedToLead())
    now.open(now.goes("d"))
    now.succeed()
    now.known = replace(now.known, world=world_of(2, "a", "b", "c"))
    assert now.opens(now.look(now.goes("b"))) is None, "a notice counted all the time"
    now.known = replace(now.known, world=world_of(3, "a", "b", "c"))
    now.hear(AskedToLead())
    assert now.opens(now.look(now.goes("b"))) is not None, "it has been asked before it heard of that world"


def test_a_node_that_will_go_opens_nothing_although_it_was_asked():
    now = Scene("a")
    now.hear(AskedToLead())
    effects = now.look(now.goes("a"))
    assert now.opens(effects) is None and told(effects) == [("b", "c", "d")]


def test_a_node_without_a_rank_leads_where_every_member_goes_and_only_there():
    for name, leads in (("e", True), ("f", False)):
        now = Scene(name)
        now.plans.spares = ("e", "f")
        assert now.look(*map(now.goes, FOUR[:3])) == ()
        assert (now.opens(now.look(*map(now.goes, FOUR))) is not None) is leads


@pytest.mark.parametrize("count", [1, 2, 3])
def test_whatever_goes_somebody_acts_at_once_where_agents_reach_each_other(count: int):
    """Each node that goes hears of its own end; whoever is told looks then."""
    for going in combinations(FOUR, count):
        nodes = {name: Scene(name) for name in FOUR}
        for name in going:
            losses = [nodes[name].goes(each) for each in going]
            for to in told(nodes[name].look(*losses)):
                nodes[to[0]].hear(AskedToLead())
                nodes[to[0]].look(*losses)
        opening = [name for name, node in nodes.items() if not node.leader.own.is_idle]
        assert opening == [next(name for name in FOUR if name not in going)]


def test_who_was_just_asked_to_lead_is_in_touch_and_asks_nobody_but_after_a_failure():
    for after_s, asks in ((0.0, False), (IN_TOUCH_S, False), (IN_TOUCH_S + 0.1, True)):
        now = Scene()
        now.hear(AskedToLead())
        now.now += after_s
        effects = now.look(now.goes("d"))
        assert any(isinstance(effect, AskPeers) for effect in effects) is asks
        assert any(isinstance(effect, StartStore) for effect in effects) is not asks
    now = Scene()
    now.open(now.goes("d"))
    now.fail()
    now.now += 5.0
    now.hear(AskedToLead())
    only(now.look(now.goes("d")), AskPeers)


def test_candidates_that_open_at_once_take_different_numbers():
    numbers = []
    for name in FOUR[:3]:
        now = Scene(name)
        now.hear(AskedToLead())
        numbers.append(now.opens(now.look(now.goes("d"))))
    assert numbers == [2, 3, 4]


def test_a_node_whose_ranks_follow_another_leader_opens_nothing_of_its_own():
    now = Scene()
    theirs = Promised("b", frozenset("abc"))
    assert now.look(now.goes("d"), promised=theirs) == ()
    ours = Promised("a", frozenset("abc"))
    assert now.opens(now.look(now.goes("d"), promised=ours)) is not None


def test_a_world_is_handed_over_once_it_has_made_a_step():
    """Its ranks refuse before: each attempt would use up a number and wait longer for the next."""
    now = Scene()
    effects = now.look(now.goes("d"), is_starting=True)
    assert effects == (Say("the world of generation 1 has not made its first step yet"),)
    assert now.hear(wanted()) == () and now.leader.own.is_idle
    assert now.opens(now.look(now.goes("d"))) is not None


def test_who_does_not_know_the_pace_asks_for_it_before_it_opens_but_amends_what_is_open():
    now = Scene()
    asks = (AskPace(ACTIVE), Say(ASKS_PACE))
    assert now.look(now.goes("d"), knows_pace=False) == asks
    assert now.hear(wanted()) == asks
    now.open(now.goes("d"))
    only(now.look(now.goes("c"), now.goes("d"), knows_pace=False), HandoffAmended)


# Who answers for an open handoff.


@pytest.mark.parametrize(("leads", "goes"), [("a", "a"), ("b", "d")])
def test_whoever_leads_an_open_handoff_answers_every_notice_of_a_member(leads: str, goes: str):
    """Also one of its own node, and although it is not the first that may open one: no other agent may answer."""
    now = Scene(leads)
    now.look()
    effects = now.hear(wanted())
    now.now += LEAD_TURN_S * FOUR.index(leads)
    now.comes_up(effects or now.hear(wanted()))
    effects = now.look(now.goes(goes), promised=Promised(leads, frozenset((*FOUR, "e"))))
    assert only(effects, HandoffAmended).purpose.leaving == {goes}
    now.fail()
    now.now += 60.0
    assert now.opens(now.look(now.goes(goes))) is None, "it has ended, and another one may open the next"


def test_a_member_of_the_next_world_counts_as_a_member_for_its_lead():
    now = Scene()
    assert now.look(now.goes("e")) == (CallOffSuspension(),)
    now.plans.spares = ("e",)
    now.open(now.goes("d"))
    effects = now.look(now.goes("d"), now.goes("e", 5.0), barred=frozenset("e"))
    amended = only(effects, HandoffAmended)
    proposal = now.leader.own.proposer.record.proposal
    assert proposal is not None and [member.node_id for member in proposal.members] == ["a", "b", "c"]
    assert proposal.deadline_utc == now.now + 60.0, "what was to come says nothing of when the state must be safe"
    assert amended.purpose.leaving == frozenset(), "it answers no more notices than before"


def test_a_node_that_goes_before_the_handoff_that_brings_it_in_has_ended_tells_its_lead():
    now = Scene("e")
    assert told(now.look(now.goes("e"))) == []
    promised = Promised("b", frozenset((*FOUR, "e")))
    effects = now.look(now.goes("e"), promised=promised)
    assert only(effects, ForwardNotices) == ForwardNotices(("b",), frozenset("e"))


# Who is told.


def test_only_the_node_that_goes_tells_and_not_what_a_handoff_answers_already():
    assert told(Scene("b").look(Scene("b").goes("d"))) == []
    for target, tells in (("abc", False), ("abd", True)):
        now = Scene("d")
        effects = now.look(now.goes("d"), promised=Promised("a", frozenset(target)))
        assert bool(told(effects)) is tells


def test_who_did_not_answer_is_left_alone_for_a_while_and_who_did_nothing_is_passed_over():
    now = Scene("d")
    loss = now.goes("d")
    assert told(now.look(loss)) == [("a", "b", "c")]
    assert told(now.look(loss, news=True)) == [], "somebody is being told"
    now.hear(Forwarded("b", missed=("a",)))
    now.now += FORWARD_AGAIN_S
    assert told(now.look(loss)) == [("b", "c")]
    now.hear(Forwarded("b"))
    now.now += FORWARD_PATIENCE_S - FORWARD_AGAIN_S + 0.1
    assert told(now.look(loss)) == [("a", "c")], "its time is over, and b made nothing of it"
    now.hear(Forwarded("a"))
    now.now += FORWARD_PATIENCE_S + 0.1
    assert told(now.look(loss)) == [("c",)]
    now.hear(Forwarded("", missed=("c",)))
    now.now += FORWARD_AGAIN_S
    assert told(now.look(loss)) == [("a", "b", "c")], "none is left: all of them anew"


def test_that_nothing_was_made_of_a_notice_while_a_handoff_was_open_says_nothing_once_it_has_ended():
    now = Scene("d")
    now.look(now.goes("d"))
    now.hear(Forwarded("a"))
    now.now += FORWARD_PATIENCE_S + 0.1
    loss = now.goes("d")
    assert told(now.look(loss, promised=Promised("a", frozenset("abc")))) == []
    assert told(now.look(loss)) == [("a", "b", "c")]


def test_news_is_told_at_once_and_what_is_no_news_is_not():
    now = Scene("d")
    now.look(now.goes("d"))
    now.hear(Forwarded("a"))
    now.now += FORWARD_AGAIN_S / 4
    assert told(now.look(now.goes("d"))) == []
    assert told(now.look(now.goes("d", 30.0), news=True)) == [("a", "b", "c")]


def test_whoever_was_told_is_told_that_the_node_stays_once():
    now = Scene("d")
    assert now.hear(OwnNoticeWithdrawn()) == ()
    now.look(now.goes("d"))
    now.hear(Forwarded("b", missed=("a",)))
    assert now.hear(OwnNoticeWithdrawn()) == (TellWithdrawal(("b",)),)
    assert now.hear(OwnNoticeWithdrawn()) == ()


# Suspension.


def test_where_nothing_fits_the_job_is_suspended_unless_it_may_not_or_another_way_is_found():
    now = Scene()
    now.plans.finds = NoPlan("3 nodes stay, it needs 4")
    losses = (now.goes("d"), now.goes("c"))
    assert now.look(*losses) == (Say("3 nodes stay, it needs 4"),)
    effects = now.look(*losses, may_suspend=True)
    text = "c, d will go, and 3 nodes stay, it needs 4"
    assert only(effects, SuspendAlone) == SuspendAlone(ACTIVE, frozenset("cd"), text)
    now.plans.finds = Wait("the service is asked")
    assert now.look(*losses, may_suspend=True) == (Say("the service is asked"),)
    now.plans.finds = None
    only(now.look(*losses, may_suspend=True), CallOffSuspension)
    assert now.look(may_suspend=True) == (CallOffSuspension(),)


def test_where_every_node_goes_and_none_comes_any_of_them_suspends():
    now = Scene("d")
    effects = now.look(*map(now.goes, FOUR), may_suspend=True)
    assert only(effects, SuspendAlone).reason == "a, b, c, d will go, and every node goes, and none comes"


def test_where_every_node_goes_and_none_comes_an_open_handoff_is_superseded_and_the_job_suspended():
    """It would go on with a world that nothing is left of."""
    now = Scene()
    now.look()
    now.comes_up(now.hear(wanted()))
    now.plans.finds = NoPlan("too few stay")
    effects = now.look(*map(now.goes, FOUR), may_suspend=True)
    only(effects, HandoffSuperseded)
    only(effects, SuspendAlone)
    amends = Scene()
    amends.look()
    amends.comes_up(amends.hear(wanted()))
    amends.plans.finds = plan_of("e")
    effects = amends.look(*map(amends.goes, FOUR), may_suspend=True)
    assert only(effects, HandoffAmended).purpose.leaving == set(FOUR)
    assert not any(isinstance(effect, SuspendAlone) for effect in effects)


# What the service proposes.


def test_each_candidate_leaves_a_proposal_to_the_one_before_it_for_a_while():
    now = Scene("b")
    now.look()
    assert now.hear(wanted()) == ()
    now.now += LEAD_TURN_S - 0.1
    assert now.hear(wanted()) == ()
    now.now += 0.2
    assert now.opens(now.hear(wanted())) == 3, "a may take the number before"


def test_a_proposal_is_not_opened_before_the_losses_are_known_nor_from_another_world_nor_twice():
    now = Scene()
    assert now.hear(wanted()) == ()
    now.look()
    assert now.hear(replace(wanted(), parent=2)) == ()
    assert now.hear(replace(wanted(), has_ended=True)) == (), "another agent has tried"
    now.look(promised=Promised("b", frozenset("abc")))
    assert now.hear(wanted()) == ()
    now.look()
    opened = now.comes_up(now.hear(wanted()))
    assert opened.proposal.handoff_id == "s1"
    assert now.hear(wanted("s2")) == (), "it waits for what is open"
    now.fail()
    now.now += 60.0
    assert now.hear(wanted()) == (), "it was led here"


def test_a_proposal_for_a_notice_that_is_withdrawn_is_declined_once_and_not_before_it_was_heard():
    now = Scene()
    now.look()
    proposal = replace(wanted(cause="notice", to=("a", "b", "c")), leaving=frozenset("d"))
    assert now.hear(proposal) == ()
    heard = replace(proposal, is_heard=True)
    assert only(now.hear(heard), Decline).reason == "no notice moves the job away from d any more"
    assert now.hear(heard) == ()


def test_a_proposal_that_takes_a_node_that_will_go_is_declined_and_a_member_keeps_its_rank():
    now = Scene()
    now.look(barred=frozenset("de"))
    assert now.hear(wanted()) == (Decline(wanted().handoff_id, "e will go"),)  # type: ignore[arg-type]
    now.look(barred=frozenset("d"))
    assert now.opens(now.hear(wanted("s2"))) is not None


def test_a_proposal_that_the_ladder_refuses_is_declined_with_its_reason_and_said():
    now = Scene()
    now.look()
    now.plans.inputs = replace(now.plans.inputs, memory_refusal="2 GB are missing")
    effects = now.hear(wanted())
    text = only(effects, Decline).reason
    assert text.startswith("no live handoff to TP1xPP1xDP5: ") and "2 GB are missing" in text
    assert texts(effects) == [text]
    assert now.hear(wanted()) == (), "once"


def test_capacity_that_appears_gets_the_time_that_its_state_needs_and_a_notice_no_more_than_it_has():
    now = Scene()
    now.plans.inputs = replace(now.plans.inputs, bandwidth_bytes_per_s=10e6)
    now.look()
    opened = now.comes_up(now.hear(wanted()))
    assert opened.purpose.estimate_s is not None and opened.purpose.estimate_s > 100.0
    assert opened.proposal.deadline_utc == pytest.approx(now.now + 3 * opened.purpose.estimate_s)
    told = Scene()
    told.look(told.goes("d", 600.0))
    assert told.leader.own._opening is not None
    assert told.leader.own._opening.proposal.deadline_utc == told.now + 600.0


# Time.


def test_a_node_whose_time_has_run_out_takes_none_from_the_others_and_what_is_reserved_is_used_last():
    now = Scene()
    c = replace(now.goes("c"), safe_by=25.0, ends_at=28.0, late_until=38.0)
    d = replace(now.goes("d"), safe_by=21.0, ends_at=24.0, late_until=34.0)
    for at, expected in ((20.9, (25.0, 21.0)), (21.5, (25.0, 25.0)), (25.5, (28.0, 28.0)), (28.5, (34.0, 34.0))):
        left = with_time_left((c, d), at)
        assert (left["c"].safe_by, left["d"].safe_by) == expected
    left = with_time_left((c, d), 40.0)
    assert (left["c"].safe_by, left["d"].safe_by) == (25.0, 21.0), "nothing is left"


def just_past(now: Scene, name: str, *, by_s: float) -> Loss:
    """A notice that is heard now and whose deadline was so long ago. It counts for ten seconds more."""
    return Loss(name, now.now, now.now - by_s - 2.0, now.now - by_s, now.now + 10.0)


@pytest.mark.parametrize("by_s", [0.0, 5.0, 60.0, 3_600.0])
def test_a_notice_whose_deadline_is_past_is_answered_while_it_counts_and_a_rung_fits(by_s: float):
    """A clock may be ahead, and a notice may be read late: the machine is still there."""
    now = Scene()
    opened = now.open(just_past(now, "d", by_s=by_s))
    assert opened.purpose.leaving == {"d"}
    assert opened.proposal.deadline_utc == now.now + 10.0
    assert opened.proposal.rung in (Rung.LIVE, Rung.DROP_STEP, Rung.STOP_AND_COPY, Rung.RESCUE)


def test_what_the_service_proposes_for_a_notice_that_counts_no_more_is_declined_at_once_with_a_reason():
    now = Scene()
    now.look()
    late = replace(wanted(cause="notice", to=("a", "b", "c")), leaving=frozenset("d"), deadline_utc=now.now - 5.0)
    effects = now.hear(replace(late, is_heard=True))
    assert only(effects, Decline).reason == "no notice moves the job away from d any more"
    # Where it counts here and every rung is late, the reason is the ladder's.
    now = Scene()
    now.plans.inputs = replace(now.plans.inputs, bandwidth_bytes_per_s=1e6)
    now.look(just_past(now, "d", by_s=5.0))
    effects = now.hear(replace(late, is_heard=True, notice_at=now.now))
    assert "the deadline was 5.0 s ago" in only(effects, Decline).reason


def test_a_handoff_is_for_the_nearest_deadline_and_counts_from_the_first_notice():
    now = Scene()
    first = replace(now.goes("c", 80.0), heard_at=990.0)
    opened = now.open(first, now.goes("d", 40.0))
    assert opened.proposal.deadline_utc == now.now + 40.0
    assert (opened.purpose.notice_at, opened.purpose.leaving) == (990.0, {"c", "d"})


def test_what_is_opened_is_told_before_it_is_kept_and_kept_before_it_is_ordered():
    now = Scene()
    now.plans.finds = plan_of("a", "b", "c", reason="as the service says")
    now.open(now.goes("d"))
    kinds = [type(effect).__name__ for effect in now.effects if isinstance(effect, HandoffOpened | SendOrder)]
    assert kinds == ["HandoffOpened", *["SendOrder"] * 4]
    assert now.orders[0][1].phase is Phase.PREPARE
    opening = next(text for text in texts(tuple(now.effects)) if text.startswith("opening"))
    assert opening.startswith("opening handoff h1 to TP1xPP1xDP3: as the service says; live: needs ")
    assert now.orders[0][1].target == world_of(2, "a", "b", "c")
