"""What a leader does with the handoffs that it opens: numbers and stores, another notice, failures, newer starts."""

from dataclasses import replace

import pytest

from liver_core.handoff import CutoverDeadlines, Decision, FailedPart, FailureCause, RankStage, Reason, Rung, Stage
from liver_core.handoff.leader_events import (
    AskedToLead,
    AskPeers,
    HandoffAmended,
    HandoffSuperseded,
    NoPlan,
    PeersAnswered,
    PeersUnreachable,
    Say,
    StoreDied,
    StoreFailed,
    StoreReady,
    Wait,
    WorldStarted,
)
from liver_core.handoff.own_handoffs import FENCED_LOST_S, SOONER_LEAST_S, WAITS_LONGER_S, Led
from liver_core.handoff.proposer import PEER_LOST_S, ProposerState
from liver_core.handoff.proposer_events import Cancel, Proposal, ProposerRecord, Tick
from liver_core.layout import Member
from liver_core.retries import RETRY_MAX_S
from tests.liver_core.handoff.leader_scene import ACTIVE, FOUR, STORE, Scene, only, plan_of, wanted

WHY = Reason("a person said so", "cancel")


def proposal_of(now: Scene) -> Proposal:
    found = now.leader.own.proposer.record.proposal
    assert found is not None
    return found


# Numbers and stores.


def test_the_number_of_a_store_that_died_is_not_used_again_and_that_of_nobody_who_answered_is():
    """It may have been up for a moment, and a second record of one decision could be written there."""
    now = Scene()
    assert only(now.look(now.goes("d")), AskPeers) == AskPeers(2, FOUR)
    said = now.hear(PeersAnswered(2, too_few="a may be cut off: no answer from b, c, d"))
    assert said == (Say("no handoff could be opened: a may be cut off: no answer from b, c, d"),)
    assert now.opens(now.look(now.goes("d"))) == 2
    now.hear(PeersAnswered(2))
    assert now.hear(StoreFailed(2, "it ended")) == (Say("no handoff could be opened: it ended"),)
    assert now.opens(now.look(now.goes("d"))) == 3
    assert now.leader.own.used == 3, "others hear of a number that is about to be used"


def test_a_number_that_another_node_or_a_report_knows_of_is_not_taken():
    now = Scene()
    now.look(now.goes("d"))
    assert now.hear(PeersAnswered(2, highest=3)) == (
        Say("no handoff could be opened: another node knows of a generation 3"),
    )
    assert now.opens(now.look(now.goes("d"))) == 4
    now.hear(PeersAnswered(4))
    now.leader.own.proposer._highest_seen = 6
    assert now.hear(StoreReady(4, STORE)) == (Say("no handoff could be opened: another node knows of a generation 6"),)
    assert now.opens(now.look(now.goes("d"))) == 7


def test_a_number_comes_after_what_the_service_knows_and_never_from_a_world_that_a_newer_start_replaces():
    now = Scene()
    assert now.opens(now.look(now.goes("d"), used=39)) == 40
    late = Scene()
    said = late.look(late.goes("d"), used=100_001)
    assert said[0] == Say("no handoff of generation 1: the service has started generation 100001")


def test_an_answer_that_comes_for_another_number_changes_nothing():
    now = Scene()
    now.look(now.goes("d"))
    for late in (PeersAnswered(1), StoreReady(1, STORE), StoreFailed(1, "it ended"), PeersAnswered(3)):
        assert now.hear(late) == ()
    assert now.leader.own.used == 2


@pytest.mark.parametrize("event", [Cancel(WHY), WorldStarted(100_001), StoreDied(2)])
def test_what_is_being_opened_is_let_go_when_nobody_wants_it_or_its_store_or_world_is_gone(event):
    now = Scene()
    now.look(now.goes("d"))
    now.hear(PeersAnswered(2))
    said = now.hear(event)
    assert only(said, Say).text.startswith("no handoff could be opened: ") and now.leader.own.is_idle
    assert now.hear(StoreReady(2, STORE)) == (), "it comes too late"
    assert now.opens(now.look(now.goes("d"))) == 3, "its number is used: the store may be up"


def test_what_is_being_opened_outlives_the_death_of_another_store_and_the_start_that_it_follows():
    now = Scene()
    now.look(now.goes("d"))
    assert now.hear(StoreDied(1)) == now.hear(WorldStarted(1)) == ()
    assert not now.leader.own.is_idle
    assert now.look(now.goes("c"), now.goes("d")) == (), "one at a time"


# Another notice.


def test_another_notice_amends_what_is_open_and_the_deadline_only_comes_nearer():
    now = Scene()
    opened = now.open(now.goes("d", 40.0))
    amended = only(now.look(now.goes("d", 90.0), now.goes("c", 80.0)), HandoffAmended)
    assert amended.purpose.leaving == {"c"} and amended.purpose.reason.startswith("c will go too: as planned; live: ")
    found = proposal_of(now)
    assert (found.handoff_id, found.deadline_utc) == (opened.proposal.handoff_id, opened.proposal.deadline_utc)
    assert [member.node_id for member in found.members] == ["a", "b"]
    assert now.look(now.goes("d", 90.0), now.goes("c", 80.0)) == (), "it is answered"


def test_permission_is_taken_back_for_more_nodes_and_not_for_a_nearer_deadline():
    now = Scene()
    now.open(now.goes("d"))
    now.say(RankStage.PREPARED)
    assert now.leader.own.state is ProposerState.PERMITTED
    assert now.look(now.goes("d", 10.0)) == ()
    now.say(RankStage.READY)
    only(now.look(now.goes("c"), now.goes("d")), HandoffAmended)
    assert now.leader.own.state is ProposerState.WITHDRAWING
    assert now.look(now.goes("c"), now.goes("d")) == (), "what is under way is not said again"
    now.say(RankStage.PREPARED)
    assert now.leader.own.led is not None and now.leader.own.led.leaving == {"c", "d"}


def test_past_the_boundary_a_notice_becomes_the_next_handoff():
    now = Scene()
    now.open(now.goes("d"))
    now.say(RankStage.PREPARED)
    now.say(RankStage.READY)
    now.look(now.goes("c"), now.goes("d"))
    now.say(RankStage.CUTTING_OVER)
    assert now.leader.own.state is ProposerState.PERMITTED
    assert now.leader.own.led is not None and now.leader.own.led.wanted is None
    assert now.look(now.goes("c"), now.goes("d")) == ()
    now.say(RankStage.ACTIVE)
    now.deliver()
    assert now.ended()[-1].stage is Stage.ACTIVE
    now.known = replace(now.known, world=replace(ACTIVE, generation=2))
    assert now.opens(now.look(now.goes("c"))) == 3


def test_a_node_that_goes_sooner_brings_the_deadline_nearer_and_keeps_the_target():
    now = Scene()
    now.open(now.goes("d", 60.0))
    before = proposal_of(now)
    assert now.look(now.goes("d", 60.0 - SOONER_LEAST_S)) == (), "it is not worth a revision"
    effects = now.look(now.goes("d", 30.0))
    assert proposal_of(now) == replace(before, deadline_utc=now.now + 30.0)
    assert "d goes 30.0 s sooner than was known" in only(effects, HandoffAmended).purpose.reason
    now.plans.inputs = replace(now.plans.inputs, prepare_s=20.0)
    effects = now.look(now.goes("d", 10.0))
    assert proposal_of(now).rung is Rung.RESCUE, "what ranks prepare would be ready too late"
    assert now.look(now.goes("d", -1.0)) == (), "no time is left to amend it"


@pytest.mark.parametrize("finds", [NoPlan("nothing fits"), "no live rung", "the one that was to come goes"])
def test_what_cannot_be_amended_is_superseded_and_the_next_is_opened_at_once(finds: NoPlan | str):
    now = Scene()
    now.look()
    if finds == "the one that was to come goes":
        now.comes_up(now.hear(wanted()))
        losses = (now.goes("e"),)
    else:
        now.open(now.goes("d"))
        losses = (now.goes("c"), now.goes("d"))
    if isinstance(finds, NoPlan):
        now.plans.finds = finds
    elif finds == "no live rung":
        now.plans.inputs = replace(now.plans.inputs, nodes_left=0)
    effects = now.look(*losses)
    only(effects, HandoffSuperseded)
    assert now.leader.own.state is ProposerState.ABORTING
    assert now.look(*losses) == (), "it is ending"
    now.plans.finds, now.plans.inputs = None, replace(now.plans.inputs, nodes_left=3)
    now.say(RankStage.ABORTED)
    assert now.ended()[-1].stage is Stage.ABORTED and now.leader.next_deadline == float("-inf")
    assert now.opens(now.look(now.goes("c"), now.goes("d"))) == 3


@pytest.mark.parametrize(("goes", "in_s", "superseded"), [("a", 4.0, True), ("c", 4.0, False), ("a", 60.0, False)])
def test_a_rescue_without_the_node_that_leads_is_left_to_the_next_one(goes: str, in_s: float, superseded: bool):
    """The next world is built when leavers are gone, and needs a store until then. Only a rescue fits into 4 s."""
    now = Scene()
    now.open(now.goes("d"))
    losses = (now.goes("d"), now.goes(goes, in_s))
    only(now.look(*losses), HandoffSuperseded if superseded else HandoffAmended)
    now.say(RankStage.ABORTED)
    assert now.opens(now.look(*losses)) is None, "a node that goes opens nothing"


@pytest.mark.parametrize(
    ("stage", "after_s", "rung"),
    [
        (RankStage.PREPARING, 1.0, Rung.RESCUE),
        (RankStage.PREPARING, 11.0, Rung.LIVE),
        (RankStage.STREAMING, 1.0, Rung.LIVE),
    ],
)
def test_another_target_is_built_when_what_is_being_built_is_done(stage: RankStage, after_s: float, rung: Rung):
    """Building takes 10 s, and cannot be interrupted."""
    now = Scene()
    now.plans.inputs = replace(now.plans.inputs, prepare_s=10.0, follow_s=0.0)
    now.open(now.goes("d"))
    now.say(RankStage.PREPARING, *([stage] if stage is not RankStage.PREPARING else []))
    now.now += after_s
    only(now.look(now.goes("d"), now.goes("c", 17.0)), HandoffAmended)
    assert proposal_of(now).rung is rung


def test_a_rescue_without_the_node_that_leads_is_left_to_the_next_one_also_where_it_goes_sooner_than_was_known():
    now = Scene()
    now.open(now.goes("d"))
    only(now.look(now.goes("d"), now.goes("a")), HandoffAmended)
    now.say(RankStage.PREPARING)
    only(now.look(now.goes("d"), now.goes("a", 4.0)), HandoffSuperseded)


def test_while_the_service_is_asked_for_a_plan_the_open_handoff_goes_on():
    now = Scene()
    now.open(now.goes("d"))
    now.plans.finds = Wait("the service is asked")
    losses = (now.goes("c"), now.goes("d"))
    assert now.look(*losses) == (Say("the service is asked"),)
    now.now += 2.0
    now.look(*losses)
    assert now.plans.asked[-1][2] == 2.0, "it knows for how long nothing was found"
    now.plans.finds = None
    only(now.look(*losses), HandoffAmended)


def test_capacity_that_appears_neither_amends_nor_delays_what_is_open():
    now = Scene()
    now.open(now.goes("d"))
    before = proposal_of(now)
    assert now.hear(wanted()) == () and proposal_of(now) == before


# Failures.


def test_after_failures_the_next_comes_later_and_later_and_at_once_after_a_success():
    now = Scene()
    for pause_s in (1.0, 2.0, 4.0, 8.0, RETRY_MAX_S, RETRY_MAX_S):
        now.open(now.goes("d", 600.0))
        assert now.leader.next_deadline == float("inf")
        assert now.fail().stage is Stage.ABORTED
        assert now.leader.next_deadline == now.now + pause_s
        now.now += pause_s - 0.1
        assert now.look(now.goes("d", 600.0)) == ()
        now.now += 0.1
    now.open(now.goes("d", 600.0))
    assert now.succeed().decision is Decision.GO
    assert now.opens(now.look(now.goes("d", 600.0))) is not None


def test_two_that_opened_at_once_and_both_failed_do_not_try_again_at_once():
    """Ranks of either node are promised to its own handoff first, so that neither gets all."""
    waits_s = []
    for name in FOUR[:3]:
        now = Scene(name)
        now.hear(AskedToLead())
        now.comes_up(now.look(now.goes("d", 600.0)))
        now.fail()
        waits_s.append(now.leader.next_deadline - now.now)
    assert waits_s == [1.0, 1.0 + WAITS_LONGER_S, 1.0 + 2 * WAITS_LONGER_S]


def test_what_is_put_off_does_not_hold_up_the_answer_of_a_handoff_that_is_open():
    """The service has proposed one meanwhile."""
    now = Scene()
    now.look()
    for _ in range(3):
        now.comes_up(now.look(now.goes("d")))
        now.fail()
        now.now += 3.9
    now.look(now.goes("d"))
    now.comes_up(now.hear(wanted()))
    only(now.look(now.goes("d")), HandoffAmended)


def test_a_newer_start_ends_what_is_open_and_the_same_one_said_again_changes_nothing():
    now = Scene()
    now.open(now.goes("d"))
    assert now.hear(WorldStarted(1)) == ()
    now.hear(WorldStarted(100_001))
    record = now.leader.own.proposer.record
    assert record.reason == Reason("generation 100001 starts afresh", "cancel")
    assert now.hear(WorldStarted(100_001)) == ()


def test_a_handoff_whose_store_died_is_ended_and_its_store_is_named():
    now = Scene()
    now.open(now.goes("d"))
    assert now.hear(StoreDied(1)) == now.hear(StoreDied(3)) == ()
    now.hear(StoreDied(2))
    reason = now.leader.own.proposer.record.reason
    text = "the store of generation 2 on node a died"
    assert reason == Reason(text, "store", cause=FailureCause(FailedPart.STORE))


@pytest.mark.parametrize(("started", "lost_s"), [(1, PEER_LOST_S), (100_001, FENCED_LOST_S)])
def test_who_is_not_reached_is_lost_after_a_while_and_soon_where_a_newer_start_fences_it(started: int, lost_s: float):
    now = Scene()
    now.open(now.goes("d", 600.0))
    now.deliver()
    now.hear(WorldStarted(started))
    now.hear(Cancel(WHY))
    del now.participants[Member("d", 0)]
    now.orders = [(member, order) for member, order in now.orders if member.node_id != "d"]
    now.say(RankStage.ABORTED)
    since = {"d": now.now}
    now.now += lost_s
    assert now.hear(PeersUnreachable(since)) == () and not now.ended()
    now.now += 0.1
    now.hear(PeersUnreachable(since))
    assert now.ended()[-1].stage is Stage.ABORTED


def test_a_cancel_of_nothing_is_nothing():
    now = Scene()
    assert now.hear(Cancel(WHY)) == now.hear(Tick()) == now.hear(PeersUnreachable({"b": 0.0})) == ()


# A restart.


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_leader_that_was_started_again_goes_on_with_what_it_has_open_and_blames_itself(is_kept: bool):
    """Where nothing was kept beside the record, its handoff answers those that it leaves behind."""
    now = Scene()
    opened = now.open(now.goes("d", 30.0))
    now.restart(Led(opened.purpose.leaving, now.now) if is_kept else None)
    assert now.leader.own.open_id == opened.proposal.handoff_id
    assert now.look(now.goes("d", 30.0)) == (), "it is answered"
    only(now.look(now.goes("d", 30.0), now.goes("c", 30.0)), HandoffAmended)
    now.now += 31.0
    now.hear(Tick())
    reason = now.leader.own.proposer.record.reason
    assert reason is not None and "the agent of a, which leads, was started again meanwhile" in reason.text


def test_a_leader_without_a_record_has_nothing_open():
    own = Scene(record=ProposerRecord(highest_generation=5)).leader.own
    assert (own.is_idle, own.open_id, own.used, own.coming, own.knows("h1")) == (True, "", 5, frozenset(), False)


def test_what_is_opened_has_the_limits_of_its_rung_and_answers_with_the_rest():
    now = Scene()
    now.plans.finds = plan_of("a", "b", "c")
    opened = now.open(now.goes("d"))
    assert opened.proposal.cutover != CutoverDeadlines() and opened.proposal.store == STORE
    assert opened.purpose.estimate_s is not None and opened.purpose.costs
