"""What the service of a simulated job does where ranks, nodes and starts are lost, and where nothing fits any more."""

from agent.protocol.sync import DesiredState
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.handoff.generations import next_start
from service.jobs.tables import JobState
from service.nodes.tables import NodeState
from service.simulation.world.reports import RankSays
from service.simulation.world.service import setting_s
from tests.service.simulation.world.story import LIMITS, Story

SILENT_S, GONE_S = setting_s("silent_after_s"), setting_s("gone_after_s")


def test_the_same_error_again_and_again_after_one_step_ends_the_job():
    story = Story()
    for _ in range(LIMITS.crashes_max):
        story.trains()
        story.fails("b", "out of memory")
        story.run(3.0)
    assert story.service.state is JobState.FAILED
    assert "out of memory" in story.service.reason and "3 times" in story.service.reason


def test_starts_that_fail_one_after_the_other_end_the_job():
    story = Story()
    for _ in range(LIMITS.starts_max):
        story.run(3.0)
        story.train(0)
        story.fails("b", "no such dataset")
        story.run(3.0)
    assert story.service.state is JobState.FAILED
    assert "starts in a row failed" in story.service.reason


def test_a_start_that_comes_after_several_without_a_step_waits():
    story = Story("abc")
    for _ in range(LIMITS.starts_max):
        story.run(3.0)
        story.train(0)
        first = story.roster.node_ids()[0]
        reason = Reason("its node goes", "exit", 0, node=first, cause=FailureCause(FailedPart.NODE))
        story.ranks[first] = (RankSays(story.roster.generation, 0, RankStage.FAILED, 0, reason),)
        story.tell(first)
        story.run(3.0)
    assert len(story.started) == LIMITS.starts_max
    assert "the next one begins at" in story.service.last_action.reason
    story.run(15.0)
    assert len(story.started) == LIMITS.starts_max + 1


def test_a_node_that_is_not_heard_is_missed_by_all_who_ask_who_leads():
    story = Story("abc")
    story.trains()
    story.cut_off.add("a")
    changes = story.changes
    for _ in range(int(SILENT_S) + 2):
        story.train(story.service.rows.job.last_step + 1)
        story.run(1.0)
    assert story.changes > changes
    assert story.service.orders().lead_order == ("b",)
    assert story.service.usable() == ("b", "c")


def test_a_node_that_is_gone_takes_with_it_what_it_said():
    story = Story("abc")
    story.trains()
    story.service.hear_notice("c", story.clock.now, story.clock.now + 600.0)
    story.cut_off |= {"b", "c"}
    story.ranks["a"] = (RankSays(1, 0, RankStage.FAILED, 5),)
    story.run(GONE_S + 5.0)
    nodes = story.service.rows.nodes
    assert (nodes.ranks_of("b"), story.service.orders().notices) == ((), ())
    story.service.stop_listening()
    story.service.listen_again()
    story.run(1.0)
    assert nodes.state_of("b") is NodeState.GONE, "nobody has heard it since"
    story.cut_off.clear()
    story.run(2.0)
    assert story.service.usable() == ("a", "b", "c")


def test_a_restart_waits_for_news_of_a_node_whose_report_is_overdue():
    story = Story()
    story.trains()
    story.cut_off.add("b")
    story.run(LIMITS.first_cause_within_s + 2.5)
    story.fails("a", "out of memory")
    story.run(0.6)
    assert "waits for news from b" in story.service.last_action.reason
    story.cut_off.clear()
    story.run(3.0)
    assert len(story.started) == 2


def test_a_start_that_lost_its_store_waits_for_a_member_that_may_be_gone_with_it():
    story = Story()
    story.run(3.0)
    story.train(0)
    story.run(1.0)
    story.cut_off.add("b")
    reason = Reason("the store is gone", "start", 0, cause=FailureCause(FailedPart.STORE))
    story.ranks["a"] = (RankSays(1, 0, RankStage.FAILED, 0, reason),)
    story.tell("a")
    story.run(0.5)
    assert "will say what failed" in story.service.last_action.reason


def test_a_checkpoint_is_asked_for_where_the_agents_did_not_answer_a_notice_in_time():
    story = Story("abc")
    story.trains()
    story.service.hear_notice("b", story.clock.now, story.clock.now + 100.0)
    story.keep_training(5)
    assert story.service.orders().checkpoint_asked == 1
    story.service.checkpoint_published(1, 9, story.clock.now, asked=1)
    assert story.service.orders().checkpoint_asked == 0


def test_where_nothing_fits_the_ranks_end_shortly_before_the_node_goes():
    story = Story()
    story.trains()
    goes_at = story.clock.now + 300.0
    story.service.hear_notice("b", story.clock.now, goes_at)
    story.keep_training(10)
    orders = story.service.orders()
    assert orders.suspends_at is not None and story.clock.now < orders.suspends_at < goes_at
    assert (orders.desired, orders.saves_at_end) == (DesiredState.RUN, True)
    story.join("c")
    story.keep_training(10)
    assert story.service.orders().suspends_at is None, "the job has where to go"


def test_nodes_that_are_gone_and_not_needed_are_forgotten():
    story = Story()
    story.trains()
    for number in range(80):
        story.join(f"n{number}")
    story.cut_off |= {f"n{number}" for number in range(80)}
    story.keep_training(int(GONE_S) + 10)
    assert story.service.rows.nodes.names() == ("a", "b")


def test_after_a_start_that_made_no_step_the_next_one_waits_for_its_leases_too():
    story = Story("abcd")
    story.run(3.0)
    story.train(0)
    begun_s = story.started[0][0]
    story.fails("a", "no such dataset")
    story.run(3.0)
    assert story.roster.generation == next_start(1)
    story.train(0)
    story.fails("a", "no such dataset")
    story.run(3.0)
    steps_from = story.service.orders().steps_from_at
    assert steps_from is not None and begun_s < steps_from <= story.started[1][0] + LIMITS.lease_s + 0.1
