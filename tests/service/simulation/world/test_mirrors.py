"""What the service of a simulated job makes of agents' copies of handoffs."""

from dataclasses import replace

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import HandoffState
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.handoff.generations import next_start
from service.simulation.world.reports import RankSays
from tests.service.simulation.world.story import LIMITS, Story, world_of

MISSED = Reason("no word of the others", "switch", 0, cause=FailureCause(FailedPart.PEER))


def opened(story: Story, **more: object):
    """A handoff to a and c, of which the agents have told."""
    mirror = story.mirror(HandoffState.PREPARING, 1, handoff_id="h1", target=world_of(2, "ac"), leaving=("b",), **more)
    story.tell("a", mirrors=(mirror,))
    return mirror


def test_of_two_handoffs_with_one_number_the_one_that_goes_on_has_it():
    story = Story("abc")
    story.trains()
    first = opened(story)
    second = replace(first, handoff_id="h2", proposer="b")
    story.tell("b", mirrors=(second,))
    rows = story.service.rows.handoffs.rows
    assert (rows["h1"].generation, rows["h1"].state) == (None, HandoffState.ABORTED)
    story.run(1.0)
    active = replace(second, state=HandoffState.ACTIVE, mirror_seq=2)
    story.tell("b", mirrors=(active,))
    story.run(1.0)
    late = replace(first, state=HandoffState.ACTIVE, mirror_seq=2)
    ((name, refusal),) = story.tell("a", mirrors=(late,)).refused
    assert name == "h1" and "was made by h2" in refusal
    assert story.roster.generation == 2


def test_a_handoff_that_was_overtaken_by_a_start_does_not_become_active():
    story = Story("abc")
    story.trains()
    mirror = opened(story)
    story.fails("a", "out of memory")
    story.run(3.0)
    assert story.roster.generation == next_start(2)
    taken = story.tell("a", mirrors=(replace(mirror, state=HandoffState.ACTIVE, mirror_seq=2),))
    ((_, refusal),) = taken.refused
    assert "was replaced" in refusal or "already active" in refusal
    assert story.roster.generation == next_start(2)


def test_a_handoff_that_is_told_after_the_next_one_is_part_of_the_past():
    story = Story("abc")
    story.trains()
    first = opened(story)
    second = replace(first, handoff_id="h2", parent=2, generation=3, target=world_of(3, "ab"))
    story.run(1.0)
    story.tell("a", mirrors=(replace(second, state=HandoffState.ACTIVE, mirror_seq=5),))
    assert story.roster.generation == 3
    story.run(1.0)
    assert story.tell("a", mirrors=(replace(first, state=HandoffState.ACTIVE, mirror_seq=4),)).refused == ()
    assert story.roster.generation == 3 and 2 in story.service.rows.generations


def test_a_handoff_that_broke_ends_its_world_and_a_rank_seen_to_end_is_its_cause():
    story = Story("abc")
    story.trains()
    mirror = opened(story)
    broken = replace(mirror, state=HandoffState.BROKEN, mirror_seq=2, source=story.roster, reason=MISSED)
    story.run(1.0)
    story.tell("a", mirrors=(broken,))
    row = story.service.rows.handoffs.rows["h1"]
    assert row.ended_by is not None and row.ended_by.is_felt
    killed = ProcessEnd(7, signal="SIGKILL", step=5)
    story.ranks["b"] = (RankSays(1, 1, RankStage.FAILED, 5, Reason(str(killed), "exit", 1), killed),)
    story.tell("b", sent_at=story.clock.now + 0.01)
    assert (row.ended_by.what, row.ended_by.node) == (FailedPart.RANK, "b")
    story.run(3.0)
    assert story.roster.generation == next_start(2)


def test_a_world_whose_handoff_broke_is_started_again_though_no_rank_says_so():
    story = Story("abc")
    story.trains()
    broken = replace(opened(story), state=HandoffState.BROKEN, mirror_seq=2, reason=MISSED)
    story.run(1.0)
    story.tell("a", mirrors=(broken,))
    story.run(3.0)
    assert story.roster.generation == next_start(2)


def test_an_open_handoff_of_which_nobody_tells_any_more_is_dropped():
    story = Story("abc")
    story.trains()
    mirror = opened(story)
    story.keep_training(int(LIMITS.handoff_quiet_s) + 3)
    assert story.service.rows.handoffs.rows["h1"].state is HandoffState.ABORTED
    story.tell("a", sent_at=story.clock.now + 0.01, mirrors=(replace(mirror, mirror_seq=2),))
    assert story.service.rows.handoffs.rows["h1"].state is HandoffState.ABORTED, "what is over stays so"


def test_a_proposal_is_dropped_where_a_target_is_not_heard():
    story = Story("abc")
    story.trains()
    story.service.hear_notice("b", story.clock.now, story.clock.now + 200.0)
    story.keep_training(3)
    story.cut_off.add("c")
    story.keep_training(8)
    assert any("no reports come from c" in row.reason for row in story.service.rows.handoffs.rows.values())
