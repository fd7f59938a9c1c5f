"""Plans and journal records: pure parts of the driver."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from agent.driver.journal_records import SlotMemory
from agent.driver.planning import (
    STEP_GUESS_S,
    Learned,
    Pulse,
    ladder_inputs,
    lead_candidates,
    parameters_only_of,
    plan_loss,
)
from agent.protocol.jobfile import DropStepRule
from agent.protocol.sync import (
    HandoffOrder,
    JobOrder,
    LayoutByCount,
    LayoutForCount,
    StandingPlan,
)
from agent.protocol.values import HandoffCause, Placement
from liver_core.handoff import (
    CutoverDeadlines,
    Decision,
    HandoffId,
    LadderInputs,
    Order,
    ParticipantRecord,
    Phase,
    Promise,
    Proposal,
    ProposerRecord,
    Reason,
    Rung,
    Stage,
    StoreAddress,
    choose_rung,
)
from liver_core.handoff.ladder import cutover_deadlines, rung_for_nearer_deadline
from liver_core.handoff.leader_events import NoPlan, Plan, Wait
from liver_core.handoff.participant_events import EndedHandoff
from liver_core.handoff.proposer_events import HandoffEnded
from liver_core.layout import Member, ParallelLayout, Roster, from_json, to_json
from tests.agent.stub_service import StubService, members_of, roster_of
from tests.agent.waiting import fake_job

FOUR = ("a", "b", "c", "d")
ACTIVE = roster_of(1, FOUR)


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


def test_spares_take_the_place_of_what_goes_in_a_world_that_the_service_has_not_heard_of(order: JobOrder) -> None:
    """Seen: a minute without the service, two losses in a row, and a spare stood idle beside a job that ended."""
    need = order.spec.nodes.model_copy(update={"min": 4})
    order = order.model_copy(
        update={"spec": order.spec.model_copy(update={"nodes": need}), "spares": members_of(("e", "f"))}
    )
    newer = roster_of(2, ("b", "c", "d", "e"))  # The service's plan for the loss of a took e.

    def without(*leaving: str, barred: frozenset[str] = frozenset()) -> Plan | Wait | NoPlan:
        where = (order, newer, frozenset(leaving))
        return plan_loss(*where, left_s=105.0, waited_s=9.0, service_is_there=False, barred=barred)

    found = without("b")
    assert isinstance(found, Plan)
    assert [member.node_id for member in found.members] == ["c", "d", "e", "f"]
    assert without("b", barred=frozenset({"f"})) == NoPlan("3 nodes stay without b, the job needs 4")
    assert without("b", "c") == NoPlan("2 nodes stay without b, c, the job needs 4")


def test_no_more_spares_are_taken_than_nodes_go_and_none_where_no_layout_is_known_for_so_many(order: JobOrder) -> None:
    order = order.model_copy(update={"standing_plans": (), "spares": members_of(("e", "f"))})
    found = plan(order, "b")
    assert isinstance(found, Plan) and {member.node_id for member in found.members} == {*"acde"}
    three = LayoutForCount(nodes=3, layout=ParallelLayout(pp=3), reason="fits")
    found = plan(by_count(order, three), "b")
    assert isinstance(found, Plan) and {member.node_id for member in found.members} == {*"acd"}


def test_where_every_member_goes_and_no_plan_says_who_comes_spares_lead(order: JobOrder) -> None:
    order = order.model_copy(update={"standing_plans": (), "spares": members_of(("e", "f"))})
    assert lead_candidates(order, ACTIVE, {*FOUR}) == ("e", "f")
    assert lead_candidates(order, ACTIVE, {*FOUR, "e"}) == ("f",)
    found = plan(order, *FOUR, service_is_there=False)
    assert isinstance(found, Plan) and [member.node_id for member in found.members] == ["e", "f"]


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


def by_count(order: JobOrder, *choices: LayoutForCount) -> JobOrder:
    update = {"standing_plans": (), "layouts_by_count": LayoutByCount(choices=choices)}
    return order.model_copy(update=update)


def test_why_no_layout_by_count_can_be_taken_is_said(order: JobOrder) -> None:
    four = LayoutForCount(nodes=4, layout=ParallelLayout(pp=4), reason="of all")
    for choices, reason in (
        ((four,), "no layout is known for 3 nodes"),
        ((four, LayoutForCount(nodes=3, layout=None, reason="7 heads")), "nothing feasible on 3 nodes: 7 heads"),
        ((LayoutForCount(nodes=3, layout=ParallelLayout(tp=2, pp=2), reason="large"), four),
         "TP2xPP2xDP1 needs 4 slots, 3 stay without b"),
    ):  # fmt: skip
        assert plan(by_count(order, *choices), "b") == NoPlan(reason)
    three = LayoutForCount(nodes=3, layout=ParallelLayout(pp=3), reason="fits")
    assert plan(by_count(order, four, three), "b") == Plan(
        ParallelLayout(pp=3), members_of(("a", "c", "d")), "",
        "layout for 3 nodes, made without the service: fits",
    )  # fmt: skip


def test_a_standing_plan_without_a_world_is_the_answer_with_its_reason(order: JobOrder) -> None:
    none = StandingPlan(parent=1, leaving=("b",), target=None, plan_digest="", reason="too few")
    assert plan(order.model_copy(update={"standing_plans": (none,)}), "b") == NoPlan("standing plan: too few")


@pytest.mark.parametrize(("count", "said"), [(8, ""), (9, " and 1 more"), (11, " and 3 more")])
def test_of_many_nodes_that_go_eight_are_named(order: JobOrder, count: int, said: str) -> None:
    names = tuple(f"n{at:02}" for at in range(count))
    found = plan_loss(order, roster_of(1, names), frozenset(names), left_s=9, waited_s=9, service_is_there=True)
    assert found == NoPlan(f"0 nodes stay without {', '.join(names[:8])}{said}, the job needs 1")


def test_parameters_are_those_of_a_gated_gpt(order: JobOrder) -> None:
    """Attention has 4 x hidden^2, the feed-forward part three matrices, the vocabulary an embedding at either end."""
    attention, dense, vocabulary = 4 * 192 * 192, 3 * 192 * 768, 384 * 192
    assert order.spec.model.parameters() == 12 * (attention + dense) + 2 * vocabulary
    narrow = order.spec.model.model_copy(update={"ffn_hidden_size": 100, "num_experts": 6})
    router = 6 * 192
    assert narrow.parameters() == 12 * (attention + 6 * 3 * 192 * 100 + router) + 2 * vocabulary
    update = {"moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 32, "moe_layer_freq": 5}
    sparse = 6 * 3 * 192 * 64 + router + 3 * 192 * 32
    some = narrow.model_copy(update=update)
    assert some.parameters() == 12 * attention + 3 * sparse + 9 * 3 * 192 * 100 + 2 * vocabulary, "layers 0, 5 and 10"
    # The second of three stages, over twelve ranks whichever way experts are cut.
    layout = ParallelLayout(tp=2, pp=3, dp=6, ep=3, etp=1)
    middle = 4 * attention + sparse + 3 * 3 * 192 * 100
    assert parameters_only_of(some, layout, [12]) == middle // 12


def test_what_only_some_ranks_hold_is_their_share_of_their_stages(order: JobOrder) -> None:
    model, layer, vocabulary = order.spec.model, 4 * 192 * 192 + 3 * 192 * 768, 384 * 192
    assert parameters_only_of(model, ParallelLayout(), [0]) == model.parameters()
    assert parameters_only_of(model, ParallelLayout(pp=3), [1]) == 4 * layer
    assert parameters_only_of(model, ParallelLayout(pp=3), [0, 2]) == 2 * (4 * layer + vocabulary)
    layout = ParallelLayout(tp=2, pp=2, dp=3)
    assert parameters_only_of(model, layout, [0]) == (6 * layer + vocabulary) // 6
    assert parameters_only_of(model, layout, [0, 1, 11]) == 3 * (6 * layer + vocabulary) // 6
    assert parameters_only_of(model, layout, []) == 0


def test_the_ladder_gets_guesses_until_handoffs_have_measured(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    where, pulse = (order, ACTIVE, found, frozenset({"b"}), 25.0), Pulse(100, 0.1, 0.5, 90)
    parameters = order.spec.model.parameters()
    guessed = ladder_inputs(*where, pulse=pulse, learned=Learned())
    assert guessed == LadderInputs(
        bytes_to_move=12 * parameters, bandwidth_bytes_per_s=500e6, prepare_s=5.0, step_s=0.5,
        seconds_to_boundary=0.4, seconds_to_deadline=25.0, margin_s=2.0, sources_whole=True, nodes_left=3,
        nodes_least=1, checkpoint_age_steps=10, stream_share=0.5,
        follow_s=guessed.follow_s, one_sided=True, replay_refusal="", stream_failure="",
        bytes_only_leaving=guessed.bytes_only_leaving, endpoints_s=1.0, ranks_staying=3, rescue_failure="",
    )  # fmt: skip
    assert guessed.follow_s == pytest.approx(4 * parameters / 500e6 + 0.05)
    learned = Learned(bandwidth_bytes_per_s=1e9, prepare_s=7.0, endpoints_s=0.0, follow_s=0.0, late_s=(3.0,))
    assert ladder_inputs(*where, pulse=pulse, learned=learned) == replace(
        guessed, bandwidth_bytes_per_s=1e9, prepare_s=7.0, endpoints_s=0.0, follow_s=0.0, margin_s=3.0
    )
    by_wire = ladder_inputs(*where, pulse=pulse, learned=Learned(), wire_bytes_per_s=100e6)
    assert by_wire.bandwidth_bytes_per_s == 3 * 100e6, "four nodes to three: three pairs"
    assert ladder_inputs(*where, pulse=pulse, learned=learned, wire_bytes_per_s=1.0).bandwidth_bytes_per_s == 1e9
    late = ladder_inputs(*where, pulse=Pulse(80, 2.0, 0.5, 90), learned=Learned())
    assert (late.seconds_to_boundary, late.checkpoint_age_steps) == (0.0, 0)
    even = ladder_inputs(*where, pulse=replace(pulse, deviation_s=0.25), learned=Learned())
    assert (guessed.step_deviation_s, even) == (None, replace(guessed, step_deviation_s=0.25))
    for build_s, prepare_s in ((2.0, 5.0), (9.0, 9.0)):
        built = replace(pulse, build_s=build_s)
        assert ladder_inputs(*where, pulse=built, learned=Learned()) == replace(guessed, prepare_s=prepare_s)
        assert ladder_inputs(*where, pulse=built, learned=Learned(prepare_s=1.0)).prepare_s == 1.0
    assert ladder_inputs(*where, pulse=Pulse(80, 2.0, 0.5, None), learned=Learned()).checkpoint_age_steps is None


def test_what_a_node_may_stream_bounds_what_the_ladder_counts_on(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    shares = []
    for gbps in (0.1, 100.0):
        limited = order.model_copy(update={"spec": order.spec.model_copy(update={"stream_gbps_max": gbps})})
        inputs = ladder_inputs(
            limited, ACTIVE, found, frozenset({"b"}), 25.0, pulse=Pulse(100, 0.1, 0.5, 90), learned=Learned()
        )
        shares.append(inputs.stream_share)
    assert shares == [pytest.approx(len(ACTIVE.node_ids()) * 0.1e9 / 8 / 500e6), 0.5]


@pytest.mark.parametrize("follow_s", [None, 0.01, 3.0])
def test_a_step_of_unknown_length_is_no_step_of_no_length(order: JobOrder, follow_s: float | None) -> None:
    """Streaming is tried, and the boundary may be a step away."""
    found, learned = plan(order, "b"), Learned(follow_s=follow_s)
    assert isinstance(found, Plan)
    where = (order, ACTIVE, found, frozenset({"b"}), 60.0)
    inputs = ladder_inputs(*where, pulse=Pulse(0, 0.0, 0.0, None), learned=learned)
    assert inputs.step_s >= STEP_GUESS_S and inputs.seconds_to_boundary == inputs.step_s > inputs.follow_s
    assert choose_rung(inputs).rung is Rung.LIVE


def test_a_nearer_deadline_takes_a_rescue_only_where_nothing_that_is_prepared_can_be_in_time(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    learned = Learned(prepare_s=20.0)

    def rung(rung: Rung, left_s: float, spent_s: float) -> tuple[Rung, bool]:
        where = (order, ACTIVE, found, frozenset({"b"}), left_s)
        inputs = ladder_inputs(*where, pulse=Pulse(100, 0.1, 0.5, 90), learned=learned)
        taken, why = rung_for_nearer_deadline(inputs, rung, spent_s=spent_s)
        assert not why or (why.startswith("; live: needs ") and "; rescue: needs " in why)
        return taken, bool(why)

    assert rung(Rung.LIVE, 10.0, 0.0) == (Rung.RESCUE, True)
    assert rung(Rung.LIVE, 10.0, 15.0) == (Rung.LIVE, False)
    assert rung(Rung.LIVE, 10.0, 50.0) == (Rung.LIVE, False)
    assert rung(Rung.RESCUE, 10.0, 0.0) == (Rung.RESCUE, False)
    assert rung(Rung.STOP_AND_COPY, 60.0, 0.0) == (Rung.STOP_AND_COPY, False)


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
    assert rung_for(order, None, step_s=0.001) is Rung.STOP_AND_COPY, "following takes longer than a step"
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
    assert inputs.bytes_to_move == 12 * order.spec.model.parameters()
    # b is a stage between the embeddings; a holds one of them besides its layers.
    embedding = 12 * order.spec.model.padded_vocab_size * order.spec.model.hidden_size
    assert inputs.bytes_only_leaving == (inputs.bytes_to_move - 2 * embedding) // 4
    assert (inputs.ranks_staying, inputs.endpoints_s, inputs.rescue_failure) == (3, 1.0, "")
    assert (inputs.nodes_left, inputs.nodes_least, inputs.checkpoint_age_steps) == (3, 1, 10)


def test_a_rescue_that_failed_is_not_tried_again_in_the_same_world(order: JobOrder) -> None:
    learned = Learned(prepare_s=23.0, rescue_failure="budget", rescue_failed_in=1)
    assert rung_for(order, 20.0, learned=learned) is Rung.CHECKPOINT
    assert rung_for(order, 20.0, learned=replace(learned, rescue_failed_in=2)) is Rung.RESCUE


def test_the_next_world_of_a_rescue_gets_several_times_what_it_is_expected_to_take(order: JobOrder) -> None:
    found = plan(order, "b")
    assert isinstance(found, Plan)
    where = (order, ACTIVE, found, frozenset({"b"}), 25.0)
    pulse = Pulse(100, 0.1, 0.5, 90)
    limits = [
        cutover_deadlines(ladder_inputs(*where, learned=learned, pulse=pulse)).build_s
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
