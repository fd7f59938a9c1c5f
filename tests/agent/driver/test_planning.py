"""Plans, measures, mirrors and journal records: the pure parts of the driver."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from agent.driver.handoff_measures import merge_measures
from agent.driver.journal_records import SlotMemory
from agent.driver.planning import (
    Intent,
    Learned,
    NoPlan,
    Plan,
    Pulse,
    Wait,
    cutover_deadlines,
    estimate_parameters,
    ladder_inputs,
    lead_candidates,
    on_rung,
    plan_loss,
)
from agent.driver.progress import LostTime, Progress, learned_from
from agent.protocol.jobfile import DropStepRule
from agent.protocol.sync import (
    HandoffMeasures,
    HandoffMirror,
    HandoffOrder,
    JobOrder,
    LayoutByCount,
    LayoutForCount,
    StandingPlan,
)
from agent.protocol.values import HandoffCause, HandoffState, Placement
from liver_core.handoff import (
    CutoverDeadlines,
    Decision,
    HandoffId,
    Order,
    ParticipantRecord,
    Phase,
    PreparePhase,
    Promise,
    Proposal,
    ProposerRecord,
    Reason,
    Rung,
    RungChoice,
    Stage,
    StoreAddress,
    choose_rung,
)
from liver_core.handoff.participant_events import EndedHandoff
from liver_core.handoff.proposer_events import HandoffEnded
from liver_core.layout import Member, ParallelLayout, Roster, from_json, to_json
from tests.agent.stub_service import StubService, members_of, roster_of
from tests.agent.waiting import fake_job

FOUR = ("a", "b", "c", "d")
ACTIVE = roster_of(1, FOUR)


@pytest.fixture
def order(tmp_path: Path) -> JobOrder:
    return StubService(fake_job(tmp_path), FOUR).order()


def plan(
    order: JobOrder, *leaving: str, left_s: float = 105.0, waited_s: float = 0.0, service_is_there: bool = True
) -> Plan | Wait | NoPlan:
    where = (order, ACTIVE, frozenset(leaving))
    return plan_loss(*where, left_s=left_s, waited_s=waited_s, service_is_there=service_is_there)


def test_the_loss_of_one_node_has_its_standing_plan(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    assert (str(found.layout), found.digest) == (str(ParallelLayout(pp=3)), "standing")
    assert [member.node_id for member in found.members] == ["a", "c", "d"]


def test_of_a_short_notice_only_a_tenth_is_left_to_the_service(order: JobOrder) -> None:
    assert isinstance(plan(order, "b", "c", left_s=4.0, waited_s=0.3), Wait)
    assert isinstance(plan(order, "b", "c", left_s=4.0, waited_s=0.5), Plan)
    assert isinstance(plan(order, "b", "c", left_s=-1.0), Plan)


def test_the_loss_of_one_node_is_not_left_to_a_service_that_does_not_know_this_world_yet(order: JobOrder) -> None:
    """Seen: a node went right after a grow, of which the service had not heard; half a second of 5 s was waited."""
    grown = roster_of(2, FOUR)
    found = plan_loss(order, grown, frozenset({"b"}), left_s=4.0, waited_s=0.0, service_is_there=True)
    assert isinstance(found, Plan)
    assert (found.layout.pp, [member.node_id for member in found.members]) == (3, ["a", "c", "d"])


def test_a_loss_of_two_nodes_without_a_standing_plan_waits_for_the_service_three_seconds(order: JobOrder) -> None:
    assert isinstance(plan(order, "b", "c"), Wait)
    assert isinstance(plan(order, "b", "c", waited_s=2.9), Wait)
    found = plan(order, "b", "c", waited_s=3.0)
    assert isinstance(found, Plan)
    assert (found.layout.pp, [member.node_id for member in found.members]) == (2, ["a", "d"])


def test_a_plan_made_without_the_service_keeps_tensor_parallel_groups_on_one_node(order: JobOrder) -> None:
    nodes = order.spec.nodes.model_copy(update={"min": 1})
    choices = LayoutByCount(choices=(LayoutForCount(nodes=2, layout=ParallelLayout(tp=2), reason="only one"),))
    order = order.model_copy(
        update={
            "spec": order.spec.model_copy(update={"nodes": nodes}),
            "standing_plans": (),
            "layouts_by_count": choices,
        }
    )
    source = Roster("job", 1, ParallelLayout(dp=4), (Member("a", 0), Member("b", 0), Member("c", 0), Member("b", 1)))
    found = plan_loss(order, source, frozenset({"c"}), waited_s=0.0, left_s=60.0, service_is_there=False)
    assert isinstance(found, Plan)
    assert found.members == (Member("b", 0), Member("b", 1))


def test_without_a_service_nothing_is_waited_for(order: JobOrder) -> None:
    assert isinstance(plan(order, "b", "c", service_is_there=False), Plan)


def test_a_standing_plan_of_another_generation_is_not_used(order: JobOrder) -> None:
    newer = roster_of(2, FOUR)
    found = plan_loss(order, newer, frozenset({"b"}), left_s=105.0, waited_s=9.0, service_is_there=True)
    assert isinstance(found, Plan)
    assert "made without the service" in found.reason


def test_a_standing_plan_that_takes_a_node_which_will_go_is_not_used(tmp_path: Path) -> None:
    service = StubService(fake_job(tmp_path), FOUR)
    service.spares = ("e",)
    where = (service.order(), ACTIVE, frozenset({"b"}))
    found = plan_loss(*where, left_s=105.0, waited_s=9.0, service_is_there=True)
    assert isinstance(found, Plan) and "e" in {member.node_id for member in found.members}
    found = plan_loss(*where, left_s=105.0, waited_s=9.0, service_is_there=True, barred=frozenset({"e"}))
    assert isinstance(found, Plan)
    assert [member.node_id for member in found.members] == ["a", "c", "d"]


def test_too_few_nodes_make_no_plan_and_say_so(order: JobOrder) -> None:
    few = order.model_copy(
        update={"spec": order.spec.model_copy(update={"nodes": order.spec.nodes.model_copy(update={"min": 3})})}
    )
    found = plan(few, "b", "c", service_is_there=False)
    assert isinstance(found, NoPlan)
    assert found.reason == "2 nodes stay without b, c, the job needs 3"


def test_a_node_that_will_go_never_leads(order: JobOrder) -> None:
    assert lead_candidates(order, ACTIVE, {"a"}) == ("b", "c", "d")
    no_order = order.model_copy(update={"lead_order": ()})
    assert lead_candidates(no_order, ACTIVE, {"c"}) == ("a", "b", "d")


def test_where_every_member_goes_the_nodes_that_come_lead_and_none_of_them_that_goes_too(order: JobOrder) -> None:
    target = Placement(layout=ParallelLayout(pp=3), members=members_of(("d", "e", "f")))
    plan = StandingPlan(parent=1, leaving=("a", "b", "c", "d"), target=target, plan_digest="", reason="all new")
    planned = order.model_copy(update={"standing_plans": (plan,)})
    assert lead_candidates(planned, ACTIVE, {"a", "b", "c", "d"}) == ("e", "f")
    assert lead_candidates(planned, ACTIVE, {"a", "b", "c"}) == ("d",)
    other_world = plan.model_copy(update={"parent": 2})
    assert lead_candidates(order.model_copy(update={"standing_plans": (other_world,)}), ACTIVE, {*"abcd"}) == ()
    proposed = HandoffOrder(
        handoff_id=UUID(int=1),
        parent=1,
        cause=HandoffCause.NOTICE,
        target=target,
        proposed_utc=datetime.now(UTC),
        reason="all go",
    )
    asked = planned.model_copy(update={"handoff": proposed, "standing_plans": ()})
    assert lead_candidates(asked, ACTIVE, {"a", "b", "c", "d"}) == ("e", "f")
    stale = asked.model_copy(update={"handoff": proposed.model_copy(update={"parent": 2})})
    assert lead_candidates(stale, ACTIVE, {"a", "b", "c", "d"}) == ()


def test_parameters_are_guessed_in_the_right_order_of_magnitude(order: JobOrder) -> None:
    assert 4_000_000 < estimate_parameters(order.spec.model) < 10_000_000


def rung_for(order: JobOrder, left_s: float | None, *, step_s: float = 0.5, learned: Learned | None = None) -> Rung:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    pulse = Pulse(100, 0.1, step_s, 90)
    where = (order, ACTIVE, found, frozenset({"b"}), left_s)
    return choose_rung(ladder_inputs(*where, pulse=pulse, learned=learned or Learned())).rung


def test_a_handoff_is_live_unless_something_is_known_against_it(order: JobOrder) -> None:
    assert rung_for(order, None) is Rung.LIVE
    assert rung_for(order, 25.0) is Rung.LIVE
    assert rung_for(order, 9.0) is Rung.STOP_AND_COPY
    assert rung_for(order, 3.0) is Rung.RESCUE
    assert rung_for(order, 0.0) is Rung.CHECKPOINT
    assert rung_for(order, None, step_s=0.0) is Rung.STOP_AND_COPY
    assert rung_for(order, None, learned=Learned(replay_refusal="fused AdamW")) is Rung.STOP_AND_COPY
    assert rung_for(order, None, learned=Learned(follow_s=0.6)) is Rung.STOP_AND_COPY
    assert rung_for(order, 25.0, learned=Learned(prepare_s=22.0)) is Rung.STOP_AND_COPY
    assert rung_for(order, 25.0, learned=Learned(prepare_s=23.0)) is Rung.RESCUE
    assert rung_for(order, 3.5, learned=Learned(prepare_s=23.0)) is Rung.RESCUE


def test_the_margin_is_what_earlier_handoffs_came_late_within_bounds(order: JobOrder) -> None:
    for late_s, margin_s in (((), 2.0), ((0.1, -3.0), 0.5), ((1.2, 0.4), 1.2), ((60.0,), 4.0)):
        assert Learned(late_s=late_s).margin_s == margin_s
    copied, late = Learned(prepare_s=7.3), Learned(prepare_s=7.3, late_s=(0.2,))
    assert (rung_for(order, 9.0, learned=copied), rung_for(order, 9.0, learned=late)) == (
        Rung.RESCUE,
        Rung.STOP_AND_COPY,
    )


def test_a_rescue_is_tried_where_a_fixed_margin_would_lose_steps(order: JobOrder) -> None:
    """Seen: it needed 1.1 s, 2.8 s were left, and the machine lived for 3.4 s more."""
    assert rung_for(order, 2.8, step_s=0.2, learned=Learned(prepare_s=5.0)) is Rung.RESCUE
    assert rung_for(order, 0.3, step_s=0.2, learned=Learned(prepare_s=5.0)) is Rung.RESCUE


def in_parts(order: JobOrder, every: int) -> JobOrder:
    drop_step = DropStepRule(every_micro_batches=every)
    return order.model_copy(update={"spec": order.spec.model_copy(update={"drop_step": drop_step})})


def test_a_step_that_outlasts_the_notice_is_dropped_where_the_job_has_parts(order: JobOrder) -> None:
    """Twelve micro-batches in a step of the pipeline: parts of two are 10 s of 60."""
    assert rung_for(in_parts(order, 2), 40.0, step_s=60.0) is Rung.DROP_STEP
    assert rung_for(order, 40.0, step_s=60.0) is Rung.RESCUE
    assert rung_for(in_parts(order, 6), 40.0, step_s=60.0) is Rung.RESCUE
    assert rung_for(in_parts(order, 12), 40.0, step_s=60.0) is Rung.RESCUE
    assert rung_for(in_parts(order, 2), 9.0) is Rung.STOP_AND_COPY
    assert rung_for(in_parts(order, 2), None, step_s=60.0) is Rung.LIVE


def test_how_far_a_part_reaches_is_counted_on_a_data_parallel_rank(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    pipeline, replicas = ACTIVE, replace(ACTIVE, layout=ParallelLayout(dp=4))
    given = {"pulse": Pulse(100, 10.0, 60.0, 90), "learned": Learned()}
    where = (found, frozenset({"b"}), 40.0)
    assert ladder_inputs(in_parts(order, 2), pipeline, *where, **given).part_s == 10.0
    assert ladder_inputs(in_parts(order, 2), replicas, *where, **given).part_s == 40.0
    assert ladder_inputs(in_parts(order, 3), replicas, *where, **given).part_s is None
    assert ladder_inputs(order, pipeline, *where, **given).part_s is None
    assert ladder_inputs(order, pipeline, *where, **given).seconds_to_boundary == 50.0


def test_streaming_that_failed_is_not_tried_again_in_the_same_world(order: JobOrder) -> None:
    assert rung_for(order, None, learned=Learned(stream_failure="ring", failed_in=1)) is Rung.STOP_AND_COPY
    assert rung_for(order, None, learned=Learned(stream_failure="ring", failed_in=2)) is Rung.LIVE


def test_a_world_that_had_no_room_is_not_built_again_beside_the_same_one(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    learned = Learned(memory_refusal="too large", refused_in=1, refused_layout=str(found.layout))
    assert rung_for(order, None, learned=learned) is Rung.CHECKPOINT
    assert rung_for(order, None, learned=replace(learned, refused_in=2)) is Rung.LIVE
    assert rung_for(order, None, learned=replace(learned, refused_layout="DP64")) is Rung.LIVE


def test_the_ladder_counts_the_leavers_share_of_the_bytes_and_the_nodes_that_are_left(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    where = (order, ACTIVE, found, frozenset({"b"}), 25.0)
    inputs = ladder_inputs(*where, pulse=Pulse(100, 0.1, 0.5, 90), learned=Learned())
    assert inputs.bytes_to_move == 12 * estimate_parameters(order.spec.model)
    # b is a stage between the embeddings; a holds one of them besides its layers.
    embedding = 12 * order.spec.model.padded_vocab_size * order.spec.model.hidden_size
    assert inputs.bytes_only_leaving == (inputs.bytes_to_move - 2 * embedding) // 4
    assert (inputs.ranks_staying, inputs.endpoints_s, inputs.rescue_failure) == (3, 1.0, "")
    assert (inputs.nodes_left, inputs.nodes_least, inputs.checkpoint_age_steps) == (3, 1, 10)


def test_measures_take_the_longest_phase_the_sum_of_bytes_and_the_pause_over_all_ranks() -> None:
    first = {"build_s": 2.0, "bytes_moved": 10.0, "reduced_at_utc": 100.0, "optimizer_s": 0.1, "median_step_s": 0.5}
    second = {"build_s": 3.0, "bytes_moved": 5.0, "read_s": 0.5, "first_forward_at_utc": 101.1, "peak_rss": 7.0}
    second["optimizer_s"] = 0.4  # waited for the other rank in it, which is no optimizer time
    merged = merge_measures([first, second], HandoffMeasures(phases_s={"to_ready": 4.0}))
    assert merged.phases_s == {"build": 3.0, "read": 0.5, "to_ready": 4.0}
    assert (merged.bytes_moved, merged.bandwidth_bytes_per_s) == (15, 30.0)
    assert merged.pause_s == pytest.approx(1.0)
    assert merged.pause_steps == pytest.approx(2.0)
    assert merged.extra == {"peak_rss": 7.0}


def test_bytes_that_were_rescued_are_told_as_a_sum() -> None:
    merged = merge_measures([{"bytes_rescued": 8.0, "bytes_moved": 1.0}, {"bytes_rescued": 4.0}], HandoffMeasures())
    assert (merged.extra, merged.bytes_moved) == ({"bytes_rescued": 12.0}, 1)


def test_seconds_of_one_step_are_no_phase_and_are_shown_apart() -> None:
    merged = merge_measures([{"follow_s": 0.2, "stream_s": 3.0}, {"follow_s": 0.3}], HandoffMeasures())
    assert merged.phases_s == {"stream": 3.0}
    assert merged.extra == {"follow_s": 0.3}


def measured(**phases_s: float) -> Progress:
    """A handoff that ended, of which these phases are known."""
    now = datetime.now(UTC)
    measures = HandoffMeasures(phases_s=phases_s, bandwidth_bytes_per_s=1e9)
    mirror = HandoffMirror(
        handoff_id=uuid4(),
        job_id="fake-job",
        parent=1,
        generation=2,
        proposer="a",
        cause=HandoffCause.NOTICE,
        state=HandoffState.ACTIVE,
        rung=Rung.LIVE,
        target=roster_of(2, FOUR[:3]),
        opened_utc=now,
        changed_utc=now,
        measures=measures,
    )
    return Progress(mirror, LostTime(0.0, 0, 1.0), None, measures={ACTIVE.members[0]: {"follow_s": 0.2}})


def test_the_next_ladder_knows_what_a_handoff_measured_and_why_it_fell() -> None:
    done = HandoffEnded(HandoffId("h"), 2, Stage.ACTIVE, Decision.GO, Reason("all did", "retire"))
    learned = learned_from(measured(to_ready=9.0, stream=4.0), Learned(), done)
    # The bandwidth beside training is not that of the link.
    assert learned == Learned(prepare_s=5.0, follow_s=0.2)
    progress = measured()
    progress.fallback = Reason("fused AdamW", PreparePhase.REPLAY, 0)
    assert learned_from(progress, Learned(), done).replay_refusal == "fused AdamW"
    aborted = HandoffEnded(HandoffId("h"), 2, Stage.ABORTED, Decision.UNDECIDED, Reason("ring", PreparePhase.STREAM, 0))
    failed = learned_from(measured(), Learned(), aborted)
    assert (failed.stream_failure, failed.failed_in) == ("ring", 1)
    too_large = HandoffEnded(
        HandoffId("h"), 2, Stage.ABORTED, Decision.UNDECIDED, Reason("9", PreparePhase.ESTIMATE_MEMORY, 0)
    )
    refused = learned_from(measured(), Learned(), too_large)
    layout = str(roster_of(2, FOUR[:3]).layout)
    assert (refused.memory_refusal, refused.refused_in, refused.refused_layout) == ("9", 1, layout)
    elsewhere = HandoffEnded(HandoffId("h"), 2, Stage.ABORTED, Decision.UNDECIDED, Reason("dead", "prepare", 0))
    assert learned_from(measured(), Learned(), elsewhere) == Learned()


def test_how_late_a_handoff_was_safe_is_known_to_the_next_ladder() -> None:
    done = HandoffEnded(HandoffId("h"), 2, Stage.ACTIVE, Decision.GO, Reason("all did", "retire"))
    progress = measured()
    opened = progress.mirror.opened_utc.timestamp()
    assert learned_from(progress, Learned(), done).late_s == (), "no leaver, nothing was estimated"
    progress.estimate_s, progress.marks["safe"] = 2.0, opened + 3.25
    learned = Learned(late_s=(9.0, *(0.0 for _ in range(7))))
    assert learned_from(progress, learned, done).late_s == (*(0.0 for _ in range(7)), pytest.approx(1.25, abs=1e-3))
    progress.mirror = progress.mirror.model_copy(update={"plan_revision": 2})
    assert learned_from(progress, Learned(), done).late_s == (), "an amended one took what several plans need"


def test_a_rescue_tells_what_endpoints_take_and_whether_there_is_room_for_what_leavers_hold() -> None:
    progress = measured(to_ready=2.0)
    progress.mirror = progress.mirror.model_copy(update={"rung": Rung.RESCUE})
    done = HandoffEnded(HandoffId("h"), 2, Stage.ACTIVE, Decision.GO_REDO, Reason("all did", "retire"))
    assert learned_from(progress, Learned(prepare_s=9.0), done).endpoints_s == 2.0
    assert learned_from(progress, Learned(prepare_s=9.0), done).prepare_s == 9.0
    refused = HandoffEnded(
        HandoffId("h"), 2, Stage.ABORTED, Decision.UNDECIDED, Reason("budget", PreparePhase.PLAN_THE_RESCUE, 0)
    )
    failed = learned_from(progress, Learned(), refused)
    assert (failed.rescue_failure, failed.rescue_failed_in) == ("budget", 1)


def test_a_rescue_that_failed_is_not_tried_again_in_the_same_world(order: JobOrder) -> None:
    learned = Learned(prepare_s=23.0, rescue_failure="budget", rescue_failed_in=1)
    assert rung_for(order, 20.0, learned=learned) is Rung.CHECKPOINT
    assert rung_for(order, 20.0, learned=replace(learned, rescue_failed_in=2)) is Rung.RESCUE


def test_the_next_world_of_a_rescue_gets_several_times_what_it_is_expected_to_take(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    where = (order, ACTIVE, found, frozenset({"b"}), 25.0)
    settings = {"pulse": Pulse(100, 0.1, 0.5, 90)}
    limits = [
        cutover_deadlines(ladder_inputs(*where, learned=learned, **settings)).build_s
        for learned in (Learned(), Learned(prepare_s=20.0, bandwidth_bytes_per_s=1e12), Learned(prepare_s=100.0))
    ]
    assert limits == [60.0, pytest.approx(120.0, abs=0.1), 180.0]


def test_the_pause_gets_several_times_what_a_copy_and_the_step_take_at_most_two_minutes(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    where = (order, ACTIVE, found, frozenset({"b"}), None)
    small = ladder_inputs(*where, pulse=Pulse(100, 0.1, 0.5, 90), learned=Learned())
    small = replace(small, bytes_to_move=0, step_s=0.0)
    for inputs, target_s in (
        (small, 20.0),
        (replace(small, bytes_to_move=40 * 10**9, bandwidth_bytes_per_s=4e9), 60.0),
        (replace(small, step_s=5.0), 40.0),
        (replace(small, bytes_to_move=840 * 10**9), 120.0),
    ):
        limits = cutover_deadlines(inputs)
        assert (limits.target_s, limits.source_s, limits.store_s) == (target_s, 1.5 * target_s, 3 * target_s)


def test_only_what_nothing_presses_gets_a_deadline_by_its_estimate(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    wanted = Intent("h", HandoffCause.GROW, found, ACTIVE, frozenset(), 1_000.0, None)
    where, pulse = (order, ACTIVE, found, frozenset(), None), Pulse(100, 0.1, 0.5, 90)
    inputs = ladder_inputs(*where, pulse=pulse, learned=Learned())
    for estimate_s, deadline in ((1.0, 1_000.0), (400.0, 2_100.0), (9_000.0, 4_500.0)):
        choice = RungChoice(Rung.LIVE, estimate_s, ((Rung.LIVE, "fits"),))
        taken = on_rung(wanted, choice, inputs, now=900.0)
        assert (taken.rung, taken.deadline_utc) == (Rung.LIVE, deadline)
        assert on_rung(replace(wanted, notice_at=899.0), choice, inputs, now=900.0).deadline_utc == 1_000.0
    assert taken.cutover == cutover_deadlines(inputs)


def test_lost_time_is_what_five_steps_after_the_cutover_came_late() -> None:
    lost = LostTime(since=100.0, step=10, median_step_s=1.0)
    assert not lost.stepped(1, 2, 11, 101.0)
    assert lost.stepped(2, 2, 13, 105.0)
    assert lost.cutover_step == 13
    # The new world's own step takes half a second; its first five took one second longer than that together.
    ends = [105.0 + 0.5 * count + 1.0 for count in range(1, 11)]
    known = [lost.stepped(2, 2, 13 + count, end) for count, end in enumerate(ends, start=1)]
    assert known == [False] * 9 + [True]
    # 3 of its 8.5 seconds until five steps later are the old world's three steps, 2.5 the new world's five.
    assert lost.lost_s == pytest.approx(8.5 - 3.0 - 2.5)


def test_lost_time_is_concluded_with_what_there_is_when_the_next_world_begins() -> None:
    lost = LostTime(since=100.0, step=10, median_step_s=1.0)
    lost.stepped(2, 2, 11, 101.0)
    for count in range(1, 8):
        assert not lost.stepped(2, 2, 11 + count, 101.0 + count)
        assert not lost.stepped(2, 2, 11 + count, 101.5 + count), "another rank's word for the same step"
    assert lost.stepped(3, 2, 19, 110.0)
    assert lost.lost_s == pytest.approx(0.0)


def handoff_order() -> Order:
    return Order(
        job_id="fake-job",
        handoff_id=HandoffId(str(uuid4())),
        parent=1,
        generation=2,
        plan_revision=1,
        plan_digest="d",
        phase=Phase.PREPARE,
        source=ACTIVE,
        target=Roster("fake-job", 2, ParallelLayout(pp=3), ACTIVE.members[:3]),
        target_revision=1,
        store=StoreAddress("127.0.0.1", 1_234),
        cause="notice",
        rung=Rung.STOP_AND_COPY,
        deadline_utc=datetime.now(UTC).timestamp(),
        cutover=CutoverDeadlines(),
        proposer_id="a",
        agent_incarnation=3,
        report_seq=1,
        issued_at=datetime.now(UTC).timestamp(),
    )


def test_a_slot_and_a_proposer_come_back_from_the_journal_as_they_were() -> None:
    order, reason = handoff_order(), Reason("why", "prepare", 1)
    ended = EndedHandoff(order.handoff_id, 2, 1, Stage.ABORTED, Decision.NO_GO, reason)
    record = ParticipantRecord(
        active=ACTIVE,
        highest_generation=2,
        promise=Promise(order.handoff_id, 2, 1, Phase.PERMIT),
        order=order,
        decision=Decision.GO,
        reason=reason,
        ended=(ended,),
    )
    memory = SlotMemory(record=record, origin="o", store=StoreAddress("h", 5))
    assert from_json(SlotMemory, to_json(memory)) == memory
    assert from_json(SlotMemory, to_json(SlotMemory())) == SlotMemory()
    proposal = Proposal(
        handoff_id=order.handoff_id,
        job_id="fake-job",
        parent=1,
        source=ACTIVE,
        layout=ParallelLayout(pp=3),
        members=(Member("a", 0), Member("b", 0), Member("c", 0)),
        plan_digest="d",
        store=order.store,
        cause="notice",
        rung=Rung.STOP_AND_COPY,
        deadline_utc=order.deadline_utc,
        cutover=CutoverDeadlines(),
    )
    end = HandoffEnded(order.handoff_id, 2, Stage.ACTIVE, Decision.GO, reason)
    proposer = ProposerRecord(
        highest_generation=3, proposal=proposal, generation=3, plan_revision=4, target_revision=2, ended=(end,)
    )
    assert from_json(ProposerRecord, to_json(replace(proposer, pending=proposal))).pending == proposal
    assert from_json(ProposerRecord, to_json(proposer)) == proposer
