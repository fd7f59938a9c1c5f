"""The service of a simulated job by itself: what it makes of reports, and when it does what."""

from dataclasses import replace

import pytest

from agent.protocol.process_end import ProcessEnd
from agent.protocol.sync import DesiredState
from agent.protocol.values import HandoffState
from liver_core.handoff import FailedPart, RankStage, Reason
from liver_core.handoff.generations import next_start
from service.jobs.tables import JobState
from service.jobs.view import JobLimits
from service.simulation.world.moments import seconds_at
from service.simulation.world.reports import DeclinedProposal, RankSays, SteadyHost, Steps
from service.simulation.world.service import setting_s
from tests.service.simulation.world.story import LIMITS, Story, world_of

SECOND_START = next_start(1)


def test_a_job_starts_when_nodes_are_there_and_trains_from_its_first_step():
    story = Story("a")
    story.run(10.0)
    assert (story.service.state, story.started) == (JobState.PENDING, [])
    story.join("b")
    story.run(3.0)
    orders = story.service.orders()
    assert story.service.state is JobState.STARTING
    assert [number for _, number in story.started] == [1]
    assert orders.start is not None and orders.start.target == orders.roster == story.roster
    assert (orders.desired, orders.lead_order) == (DesiredState.RUN, ("a", "b"))
    story.train(0)
    story.run(2.0)
    assert story.service.state is JobState.STARTING
    story.train(1)
    story.run(2.0)
    assert story.service.state is JobState.RUNNING


def test_after_a_notice_agents_have_time_and_then_a_handoff_is_proposed():
    story = Story("abc")
    story.trains()
    story.service.hear_notice("a", story.clock.now, story.clock.now + 100.0)
    assert [fact.node_id for fact in story.service.orders().notices] == ["a"]
    story.keep_training(int(LIMITS.propose_after_s) - 1)
    assert story.service.orders().proposal is None
    story.keep_training(2)
    proposal = story.service.orders().proposal
    assert proposal is not None
    assert (proposal.target.node_ids(), proposal.leaving, proposal.parent) == (("b", "c"), ("a",), 1)
    assert story.service.orders().lead_order == ("b", "a"), "one that goes leads last"


def test_a_handoff_that_agents_report_as_active_is_the_worlds_next():
    story = Story("abc")
    story.trains()
    target, changes = world_of(2, "ac"), story.changes
    mirror = story.mirror(HandoffState.PREPARING, 1, handoff_id="h1", target=target, leaving=("b",))
    assert story.tell("a", mirrors=(mirror,)).acknowledged == (mirror,)
    assert story.roster.generation == 1 and story.changes > changes
    story.run(1.0)
    story.tell("a", mirrors=(replace(mirror, state=HandoffState.ACTIVE, mirror_seq=2),))
    assert (story.roster, story.service.orders().next_generation) == (target, 3)
    story.run(1.0)
    story.tell("a", mirrors=(replace(mirror, state=HandoffState.ABORTED, mirror_seq=3),))
    assert story.service.rows.handoffs.rows["h1"].state is HandoffState.ACTIVE, "whichever copy comes later"


def test_what_the_agents_open_instead_takes_the_place_of_a_proposal():
    story = Story("abcd")
    story.trains()
    story.service.hear_notice("b", story.clock.now, story.clock.now + 100.0)
    story.keep_training(5)
    proposal = story.service.orders().proposal
    assert proposal is not None
    mirror = story.mirror(HandoffState.PREPARING, 1, handoff_id="h1", target=world_of(2, "ad"), leaving=("b",))
    story.tell("a", mirrors=(mirror,))
    assert story.service.orders().proposal is None
    assert story.service.rows.handoffs.rows[proposal.handoff_id].state is HandoffState.ABORTED


def test_what_was_declined_is_not_proposed_again_at_once():
    story = Story("abc")
    story.trains()
    story.service.hear_notice("b", story.clock.now, story.clock.now + 300.0)
    story.keep_training(5)
    proposal = story.service.orders().proposal
    assert proposal is not None
    story.tell("a", declined=(DeclinedProposal(proposal.handoff_id, "no memory"),))
    story.keep_training(int(LIMITS.propose_again_s) - 5)
    assert list(story.service.rows.handoffs.rows) == [proposal.handoff_id]
    story.keep_training(10)
    again = story.service.orders().proposal
    assert again is not None and again.handoff_id != proposal.handoff_id


def test_a_rank_that_an_agent_saw_end_is_the_cause_and_not_those_that_miss_it():
    story = Story()
    story.trains()
    story.service.checkpoint_published(1, 4, story.clock.now)
    story.misses_a_peer("a")
    story.run(0.5)
    killed = ProcessEnd(7, signal="SIGKILL", step=5)
    story.ranks["b"] = (RankSays(1, 1, RankStage.FAILED, 5, Reason(str(killed), "exit", 1), killed),)
    story.run(3.0)
    first, orders = story.service.rows.generations.get(1), story.service.orders()
    assert first is not None and first.ended_by is not None
    assert (first.ended_by.what, first.ended_by.node, first.ended_by.signal) == (FailedPart.RANK, "b", "SIGKILL")
    assert [number for _, number in story.started] == [1, SECOND_START]
    assert orders.start is not None and (orders.start.generation, orders.start.checkpoint) == (SECOND_START, "4")
    story.train(4)
    story.run(2.0)
    assert story.service.state is JobState.STARTING, "the checkpoint was of that step"
    story.train(5)
    story.run(2.0)
    assert story.service.state is JobState.RUNNING


def test_reports_that_come_in_the_wrong_order_change_nothing():
    story = Story()
    story.trains(step=9)
    before, seen = story.service.rows.nodes.ranks_of("a"), story.service.orders()
    lost = (RankSays(1, 0, RankStage.FAILED, 3),)
    assert not story.tell("a", sent_at=story.clock.now - 5.0, ranks=lost).is_news
    assert story.tell("a", sent_at=story.clock.now, incarnation=1).is_news
    assert not story.tell("a", sent_at=story.clock.now + 1.0, incarnation=0, ranks=lost).is_news
    story.run(0.5)
    story.tell("a", sent_at=story.clock.now, incarnation=0)
    assert seconds_at(story.service.rows.nodes.last_seen_at("a")) < story.clock.now, "its agent has been replaced"
    assert (story.service.rows.nodes.ranks_of("a"), story.service.orders()) == (before, seen)
    assert story.service.state is JobState.RUNNING


def test_a_late_report_of_the_machine_before_says_nothing_of_the_new_one():
    story = Story()
    story.trains()
    story.cut_off.add("b")
    story.service.node_came("b", incarnation=2)
    assert not story.tell("b", incarnation=1).is_news
    assert story.service.rows.nodes.ranks_of("b") == ()
    assert story.tell("b", incarnation=2).is_news


def test_a_start_waits_until_the_step_leases_of_a_world_that_is_cut_off_are_over():
    limits = JobLimits(stall_after_s=1.0, stall_steps=1, lost_after_s=60.0)
    story = Story("ab", limits=limits)
    story.trains()
    story.join("c")
    story.join("d")
    story.run(2.0)
    heard_s = max(seconds_at(story.service.rows.nodes.last_seen_at(name)) for name in "ab")
    story.cut_off |= {"a", "b"}
    story.run(heard_s + limits.lease_s - story.clock.now - 0.1)
    assert len(story.started) == 1
    story.run(2.0)
    assert [number for _, number in story.started] == [1, SECOND_START]
    assert story.roster.node_ids() == ("c", "d")


def test_ranks_of_a_start_beside_a_world_that_is_heard_wait_before_they_step():
    story = Story("ab")
    story.run(3.0)
    story.join("c")
    story.join("d")
    for name in "ab":
        story.service.hear_notice(name, story.clock.now, story.clock.now + 20.0)
    story.run(2.0)
    orders = story.service.orders()
    assert story.roster.node_ids() == ("c", "d"), "the first start would not have come to a step in time"
    assert orders.steps_from_at == pytest.approx(story.started[-1][0] + LIMITS.lease_s)


def test_a_service_that_was_away_takes_nobody_for_lost_before_it_could_hear_them():
    story = Story("abcd")
    story.trains()
    story.service.stop_listening()
    story.cut_off |= set("abcd")
    assert not story.tell("a").is_news
    story.run(300.0)
    story.service.listen_again()
    story.run(setting_s("silent_after_s") - 1.0)
    assert (story.service.state, len(story.started)) == (JobState.RUNNING, 1)
    story.cut_off.clear()
    story.keep_training(30)
    assert (story.service.state, len(story.started)) == (JobState.RUNNING, 1)


def test_a_generation_that_already_trains_is_not_started_again_where_its_handoff_is_not_reported_yet():
    story = Story("abc")
    story.trains()
    story.train(6, world_of(2, "ac"))
    story.ranks["b"] = (RankSays(1, 1, RankStage.FAILED, 5),)
    story.run(10.0)
    assert len(story.started) == 1
    assert story.service.orders().next_generation == 3, "its number is used"


def test_a_job_for_which_nothing_is_left_is_suspended_and_starts_again_on_a_new_node():
    story = Story()
    story.trains()
    story.service.hear_notice("b", story.clock.now, story.clock.now + 12.0)
    story.keep_training(20)
    assert story.service.orders().desired is DesiredState.SUSPENDED
    story.ranks = dict.fromkeys(story.ranks, ())
    story.cut_off.add("b")
    story.run(60.0)
    assert story.service.state is JobState.SUSPENDED
    story.join("c")
    story.run(5.0)
    assert story.service.state is JobState.STARTING and story.roster.node_ids() == ("a", "c")


def test_a_notice_that_is_withdrawn_moves_nobody():
    story = Story("abc")
    story.trains()
    story.service.hear_notice("b", story.clock.now, story.clock.now + 100.0)
    story.keep_training(1)
    story.service.withdraw_notice("b")
    story.keep_training(10)
    assert story.service.orders().proposal is None


def test_a_person_ends_the_job():
    story = Story()
    story.trains()
    story.service.stop()
    story.run(5.0)
    assert (story.service.state, story.service.orders().desired) == (JobState.STOPPING, DesiredState.STOP)
    story.ranks = dict.fromkeys(story.ranks, ())
    story.run(5.0)
    assert story.service.state is JobState.STOPPED


def test_a_job_that_has_no_ranks_yet_ends_at_once():
    story = Story()
    story.run(1.0)
    story.service.stop()
    story.run(0.2)
    assert story.service.state is JobState.STOPPED


def test_a_host_whose_agents_report_news_only_says_when_a_node_went():
    went: dict[str, float] = {}
    host = SteadyHost(
        heard_at=lambda name: went.get(name, story.clock.now),
        steps=lambda: Steps(7, min([*went.values(), story.clock.now]), 0.5),
    )
    story = Story("abc", steady=host)
    story.run(1.0)
    story.train(1)
    calm = story.clock._number
    story.run(86_400.0)
    assert story.service.state is JobState.RUNNING
    assert story.clock._number - calm < 10, "nothing is looked at where nothing happens"
    went["b"] = story.clock.now
    story.service.node_went("b")
    story.run(setting_s("gone_after_s") + 2.0)
    assert [number for _, number in story.started] == [1, SECOND_START]
    assert story.roster.node_ids() == ("a", "c")
