"""A proposer burns a number for each handoff, journals before it speaks, and ends each one with a reason. Pure."""

from dataclasses import replace
from typing import Any

import pytest

from liver_core.handoff import (
    OUT_OF_TIME,
    Decision,
    FailedPart,
    FailureCause,
    Phase,
    ProposerRecord,
    Reason,
    Rung,
    Stage,
    StoreAddress,
)
from liver_core.handoff.participant_events import OrderReceived, ParticipantState, RankStage
from liver_core.handoff.proposer import GIVE_UP_S, RESEND_S, ProposerState
from liver_core.handoff.proposer_events import (
    Amend,
    Cancel,
    HandoffEnded,
    Hindered,
    MemberLost,
    Open,
    PersistProposal,
    Refused,
    ReportReceived,
    SendOrder,
    Tick,
)
from liver_core.layout import ParallelLayout
from tests.liver_core.handoff.samples import (
    DEADLINE,
    H1,
    H2,
    WHY,
    A,
    B,
    C,
    order,
    participant,
    participant_in,
    proposal,
    proposer,
    rank_says,
    reports_in,
    roster,
)

NOW = 3.0


def opened():
    machine = proposer()
    machine.handle(Open(proposal()), NOW)
    return machine


def truth(state: ParticipantState, member, **changes):
    """What a member in `state` reports."""
    report = reports_in(participant_in(state, member).handle(OrderReceived(order()), NOW))[0]
    return ReportReceived(replace(report, **changes))


def left(member):
    machine = participant_in(ParticipantState.CUTTING_OVER, member)
    return ReportReceived(reports_in(machine.handle(rank_says(RankStage.LEFT, decision=Decision.GO), NOW))[0])


def aborted(member, **changes):
    machine = participant_in(ParticipantState.ABORTING, member)
    report = reports_in(machine.handle(rank_says(RankStage.ABORTED), NOW))[0]
    return ReportReceived(replace(report, report_seq=9, **changes))


def feed(machine, *events, now=NOW):
    effects: tuple[Any, ...] = ()
    for event in events:
        effects = machine.handle(event, now)
    return effects


def permitted():
    machine = opened()
    feed(machine, *(truth(ParticipantState.READY, member) for member in (A, B, C)))
    assert machine.state is ProposerState.PERMITTED
    return machine


def past_the_boundary():
    machine = permitted()
    feed(machine, truth(ParticipantState.CUTTING_OVER, A))
    return machine


def withdrawn(member):
    """What a member says once its tag is gone."""
    machine = participant_in(ParticipantState.WITHDRAWING, member)
    report = reports_in(machine.handle(rank_says(RankStage.PREPARED), NOW))[0]
    return ReportReceived(replace(report, report_seq=9))


def phases(effects):
    return {(effect.member, effect.order.phase) for effect in effects if isinstance(effect, SendOrder)}


def ending(effects):
    return next(effect for effect in effects if isinstance(effect, HandoffEnded))


def test_a_generation_is_burned_on_disk_before_anybody_hears_of_it():
    effects = proposer().handle(Open(proposal()), NOW)
    assert isinstance(effects[0], PersistProposal)
    assert effects[0].record.highest_generation == 2
    assert phases(effects) == {(member, Phase.PREPARE) for member in (A, B, C)}


def test_a_number_is_never_used_again_also_when_the_handoff_is_aborted():
    machine = opened()
    feed(machine, Cancel(WHY), *(aborted(member) for member in (A, B, C)))
    assert machine.state is ProposerState.IDLE
    effects = machine.handle(Open(proposal(handoff_id=H2)), NOW)
    assert effects[0].record.generation == 3


def test_numbers_that_others_burned_are_learned_from_their_refusals():
    machine = opened()
    refusal = reports_in(participant(A).handle(OrderReceived(order(generation=1, parent=0)), NOW))[0]
    feed(machine, ReportReceived(replace(refusal, highest_generation=7, generation=2)))
    feed(machine, *(aborted(member) for member in (A, B, C)))
    effects = machine.handle(Open(proposal(handoff_id=H2)), NOW)
    assert effects[0].record.generation == 8


def test_what_participants_say_of_the_same_handoff_under_another_number_does_not_count():
    """Another agent has opened the same proposal of the service, and its ranks go."""
    machine = permitted()
    said = truth(ParticipantState.CUTTING_OVER, A).report
    effects = feed(machine, ReportReceived(replace(said, generation=9, decision=Decision.GO, report_seq=99)))
    assert effects == () and not machine.tally.boundary_passed()


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (proposal(job_id="other"), "job_id: this proposer belongs to job"),
        (proposal(parent=4), "source: is of generation 1, the parent is 4"),
        (proposal(rung=Rung.CHECKPOINT), "rung: a restart from a checkpoint is the service's"),
        (proposal(layout=ParallelLayout(dp=3)), "needs 3, 2 given"),
        (proposal(deadline_utc=NOW), "deadline_utc: has passed"),
    ],
)
def test_an_impossible_proposal_is_refused_and_burns_nothing(wanted, complaint):
    machine = proposer()
    (effect,) = machine.handle(Open(wanted), NOW)
    assert isinstance(effect, Refused) and complaint in effect.reason.text
    assert machine.record == ProposerRecord(highest_generation=1)


def test_only_one_handoff_is_open_and_an_id_is_used_once():
    machine = opened()
    (effect,) = machine.handle(Open(proposal(handoff_id=H2)), NOW)
    assert isinstance(effect, Refused) and "handoff h1 is open" in effect.reason.text
    feed(machine, Cancel(WHY), *(aborted(member) for member in (A, B, C)))
    (effect,) = machine.handle(Open(proposal()), NOW)
    assert isinstance(effect, Refused) and "was used before" in effect.reason.text


def test_permission_is_on_disk_and_given_when_every_member_is_ready():
    machine = opened()
    assert feed(machine, truth(ParticipantState.READY, A), truth(ParticipantState.READY, B)) == ()
    effects = feed(machine, truth(ParticipantState.READY, C))
    assert isinstance(effects[0], PersistProposal) and effects[0].record.phase is Phase.PERMIT
    assert phases(effects) == {(member, Phase.PERMIT) for member in (A, B, C)}


def test_an_order_is_repeated_to_those_whose_report_does_not_show_it():
    machine = opened()
    feed(machine, truth(ParticipantState.READY, A))
    assert feed(machine, Tick(), now=NOW + RESEND_S / 2) == ()
    assert phases(feed(machine, Tick(), now=NOW + RESEND_S)) == {(B, Phase.PREPARE), (C, Phase.PREPARE)}


def test_older_reports_do_not_undo_newer_ones():
    machine = opened()
    feed(machine, truth(ParticipantState.READY, A, report_seq=9), truth(ParticipantState.READY, B))
    feed(machine, truth(ParticipantState.PREPARING, A, report_seq=2))
    feed(machine, truth(ParticipantState.READY, C))
    assert machine.state is ProposerState.PERMITTED


def test_reports_of_others_are_no_concern():
    machine = opened()
    ready = truth(ParticipantState.READY, A)
    assert feed(machine, replace(ready, report=replace(ready.report, job_id="other"))) == ()
    assert feed(machine, replace(ready, report=replace(ready.report, handoff_id=H2))) == ()
    assert machine.tally.waiting(Phase.PREPARE, 1) == (A, B, C)


def test_a_refusal_aborts_everybody_with_the_reason_the_rank_and_its_node():
    machine = opened()
    effects = feed(machine, aborted(C, reason=Reason("no memory", "build")))
    assert phases(effects) == {(A, Phase.ABORT), (B, Phase.ABORT)}
    effects = feed(machine, aborted(A), aborted(B))
    assert ending(effects) == HandoffEnded(
        H1, 2, Stage.ABORTED, Decision.UNDECIDED, Reason("no memory", "build", rank=1, node="c")
    )


def test_a_lost_member_aborts_before_the_boundary_and_is_not_waited_for():
    machine = permitted()
    feed(machine, MemberLost(C, Reason("the node is gone", "supervise")))
    assert machine.state is ProposerState.ABORTING
    effects = feed(machine, aborted(A), aborted(B))
    assert ending(effects).reason == Reason("the node is gone", "supervise", rank=1, node="c")


def test_the_deadline_aborts_and_names_who_was_missing():
    machine = opened()
    feed(machine, truth(ParticipantState.READY, A), truth(ParticipantState.PREPARING, B))
    feed(machine, Tick(), now=DEADLINE + 1)
    assert machine.record.reason is not None
    assert machine.record.reason.text == "the deadline passed before all were ready; b/0 is preparing"
    assert machine.record.reason.cause == FailureCause(FailedPart.PEER), "another may be what it waits for"
    assert machine.record.reason.rank == 1


def test_a_deadline_that_passes_while_nobody_is_behind_names_nobody():
    for say in (Tick(), aborted(B, reason=Reason("the deadline passed before the boundary", OUT_OF_TIME))):
        machine = permitted()
        feed(machine, say, now=DEADLINE + 1)
        assert machine.record.reason == Reason("the deadline passed before the boundary", OUT_OF_TIME)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (Reason("the store is gone", "boundary"), Reason("the store is gone", "boundary", 1, node="b")),
        (Reason("too late", OUT_OF_TIME), Reason("too late", OUT_OF_TIME, 1, node="b")),
        (None, Reason("the deadline passed before the boundary", OUT_OF_TIME, 1, node="b")),
    ],
)
def test_an_attempt_that_was_late_and_broke_a_rank_names_that_rank(said: Reason | None, told: Reason):
    machine = permitted()
    feed(machine, Tick(), now=DEADLINE + 1)
    effects = feed(machine, aborted(A), aborted(C), aborted(B, stage=Stage.BROKEN, reason=said))
    assert (ending(effects).stage, ending(effects).reason) == (Stage.BROKEN, told)


@pytest.mark.parametrize("why", [Reason("nobody wants it", "cancel"), Reason("the build failed", "build", 0)])
def test_a_rank_that_broke_after_the_attempt_was_given_up_is_named_and_not_what_it_was_given_up_for(why: Reason):
    died, missed = Reason("the device failed", "train", 1), FailureCause(FailedPart.PEER)
    for said, told in ((died, replace(died, node="b")), (replace(died, cause=missed), None)):
        machine = permitted()
        feed(machine, Cancel(why))
        effects = feed(machine, aborted(A), aborted(C), aborted(B, stage=Stage.BROKEN, reason=said))
        found = ending(effects).reason
        assert ending(effects).stage is Stage.BROKEN
        if told is None:  # It only missed another: what had failed before counts, and else nobody is accused.
            told = why if why.phase == "build" else replace(said, node="b")
        assert found == told


def test_who_has_not_come_to_the_boundary_is_named_where_others_are_past_it():
    machine = permitted()
    feed(machine, truth(ParticipantState.ACTIVE, A, report_seq=9))
    effects = feed(machine, Tick(), now=NOW + 1_000)
    assert ending(effects).reason.text == "no first step was reported; b/0 is ready"


def test_when_all_are_active_and_the_leaver_has_left_the_source_world_is_retired():
    machine = permitted()
    feed(machine, truth(ParticipantState.ACTIVE, A, report_seq=9), left(B))
    assert machine.state is ProposerState.PERMITTED
    effects = feed(machine, truth(ParticipantState.ACTIVE, C, report_seq=9))
    assert phases(effects) == {(A, Phase.RETIRE), (C, Phase.RETIRE)}
    free = [truth(ParticipantState.ACTIVE, member, report_seq=10, promise=None) for member in (A, C)]
    assert ending(feed(machine, *free)).stage is Stage.ACTIVE


@pytest.mark.parametrize("said", [(), (MemberLost(B, WHY),), (left(B),)])
def test_a_leaver_that_dies_after_go_costs_nothing_and_is_not_waited_for(said: tuple):
    """Its machine goes when its notice is over, perhaps before it has said that it left; nobody says that it died."""
    machine = permitted()
    feed(machine, *said, *(truth(ParticipantState.ACTIVE, member, report_seq=9) for member in (A, C)))
    assert machine.state is ProposerState.RETIRING
    free = [truth(ParticipantState.ACTIVE, member, report_seq=10, promise=None) for member in (A, C)]
    ended = ending(feed(machine, *free))
    assert (ended.stage, ended.reason.text) == (Stage.ACTIVE, "every rank did its first step")


def test_a_target_that_is_lost_after_go_breaks_the_new_world():
    machine = permitted()
    effects = feed(machine, truth(ParticipantState.ACTIVE, A, report_seq=9), MemberLost(C, WHY))
    assert ending(effects).stage is Stage.BROKEN
    assert ending(effects).decision is Decision.GO


def test_an_abort_that_loses_against_the_boundary_turns_back():
    machine = permitted()
    feed(machine, Cancel(Reason("another notice", "supersede")))
    assert machine.state is ProposerState.ABORTING
    feed(machine, truth(ParticipantState.ACTIVE, A, report_seq=9))
    assert machine.state is ProposerState.PERMITTED


def test_cancel_is_too_late_when_somebody_is_past_the_boundary():
    machine = permitted()
    feed(machine, truth(ParticipantState.CUTTING_OVER, A, report_seq=9))
    (effect,) = feed(machine, Cancel(WHY))
    assert isinstance(effect, Refused) and "too late" in effect.reason.text


def test_no_go_ends_aborted_and_an_unknown_decision_ends_broken():
    for decision, stage, expected in (
        (Decision.NO_GO, Stage.ABORTED, Stage.ABORTED),
        (Decision.UNDECIDED, Stage.BROKEN, Stage.BROKEN),
    ):
        machine = permitted()
        effects = feed(machine, *(aborted(member, decision=decision, stage=stage) for member in (A, B, C)))
        assert ending(effects).stage is expected
        assert ending(effects).decision is decision


def test_whoever_stays_silent_is_named_in_the_end():
    machine = opened()
    feed(machine, Cancel(WHY), aborted(A), aborted(C))
    assert feed(machine, Tick(), now=NOW + GIVE_UP_S)[-1:] != ()
    effects = feed(machine, Tick(), now=NOW + GIVE_UP_S + 1)
    assert ending(effects).reason.text == "because; b/0 never reported"


def test_who_is_just_silent_is_not_named_where_the_lead_itself_heard_nobody_for_a_while():
    late, trouble = "the deadline passed before all were ready", Reason("c reached no other node", "lead", node="c")
    silent, slow = opened(), opened()
    feed(slow, truth(ParticipantState.READY, A), truth(ParticipantState.PREPARING, B))
    for machine in (silent, slow):
        feed(machine, Hindered(trouble), Tick(), now=DEADLINE + 1)
    assert silent.record.reason == Reason(f"{late}; c reached no other node", "prepare", 1, node="c")
    assert slow.record.reason is not None and slow.record.reason.text == f"{late}; b/0 is preparing"


def test_where_a_participant_that_is_lost_is_waited_for_the_attempt_ends_of_what_took_it():
    machine, cause = past_the_boundary(), FailureCause(FailedPart.RANK, signal="SIGKILL", step=7)
    feed(machine, MemberLost(A, Reason("it was killed", "training", cause=cause)))
    effects = feed(machine, Tick(), now=NOW + 1_000)
    assert ending(effects).reason.cause == cause and "it was killed" in ending(effects).reason.text


def test_an_amendment_before_permission_is_a_new_revision_and_says_goodbye_to_who_is_dropped():
    machine = opened()
    feed(machine, truth(ParticipantState.READY, A))
    effects = feed(machine, Amend(proposal(members=(A, B), plan_digest="d2")))
    assert phases(effects) == {(C, Phase.ABORT), (A, Phase.PREPARE), (B, Phase.PREPARE)}
    revisions = {effect.member: effect.order.plan_revision for effect in effects if isinstance(effect, SendOrder)}
    assert revisions == {A: 2, B: 2, C: 1}
    feed(machine, truth(ParticipantState.READY, B))
    assert machine.state is ProposerState.PREPARING  # Both spoke of the older revision.


@pytest.mark.parametrize(
    ("machine", "wanted", "complaint"),
    [
        (past_the_boundary(), proposal(members=(A, B)), "the notice becomes the next handoff"),
        (opened(), proposal(handoff_id=H2), "no such handoff is open"),
        (
            opened(),
            proposal(source=roster(1, B, A)),
            "a revision must keep parent, source, store and cutover deadlines",
        ),
        (opened(), proposal(store=StoreAddress("127.0.0.1", 4001)), "a revision must keep parent, source, store"),
        (opened(), proposal(rung=Rung.CHECKPOINT), "a restart from a checkpoint is the service's"),
        (
            opened(),
            proposal(deadline_utc=DEADLINE + 1.5),
            "a revision can only make it earlier, this one is 1.5 s later",
        ),
        (opened(), proposal(deadline_utc=NOW), "deadline_utc: has passed"),
    ],
)
def test_an_amendment_that_cannot_be_is_refused(machine, wanted, complaint):
    (effect,) = feed(machine, Amend(wanted))
    assert isinstance(effect, Refused) and complaint in effect.reason.text


def test_an_amendment_may_bring_the_deadline_nearer_and_take_the_next_rung():
    machine = proposer()
    feed(machine, Open(proposal(rung=Rung.LIVE)))
    nearer = proposal(members=(A, B), deadline_utc=DEADLINE - 40, rung=Rung.STOP_AND_COPY, cause="second notice")
    orders = [effect.order for effect in feed(machine, Amend(nearer)) if isinstance(effect, SendOrder)]
    said = {(order.plan_revision, order.rung, order.deadline_utc, order.cause) for order in orders[1:]}
    assert said == {(2, Rung.STOP_AND_COPY, DEADLINE - 40, "second notice")}
    assert {order.generation for order in orders} == {2}, "the generation stays"
    (refused,) = feed(machine, Amend(replace(nearer, deadline_utc=DEADLINE)))
    assert isinstance(refused, Refused), "what came nearer does not go away again"


def test_only_a_revision_that_changes_layout_members_or_rung_makes_ranks_build_again():
    machine = proposer()
    feed(machine, Open(proposal(rung=Rung.LIVE)))
    nearer = proposal(rung=Rung.LIVE, deadline_utc=DEADLINE - 1, plan_digest="d2", cause="second notice")
    said = []
    for wanted in (nearer, replace(nearer, members=(A, B)), replace(nearer, members=(A, B), deadline_utc=DEADLINE - 2)):
        sent = [effect.order for effect in feed(machine, Amend(wanted)) if isinstance(effect, SendOrder)]
        said.append((sent[-1].plan_revision, sent[-1].target_revision))
    assert said == [(2, 1), (3, 3), (4, 3)]
    feed(machine, Amend(replace(nearer, members=(A, B), deadline_utc=DEADLINE - 3, rung=Rung.STOP_AND_COPY)))
    assert (machine.record.plan_revision, machine.record.target_revision) == (5, 5)


def test_after_permission_the_tags_are_taken_back_first_those_of_the_sources_before_newcomers_hear_of_it():
    machine = permitted()
    wanted = proposal(members=(A, B), deadline_utc=DEADLINE - 5)
    assert phases(feed(machine, Amend(wanted))) == {(A, Phase.WITHDRAW), (B, Phase.WITHDRAW)}
    assert machine.state is ProposerState.WITHDRAWING
    assert feed(machine, truth(ParticipantState.WITHDRAWING, A)) == ()
    feed(machine, withdrawn(A), withdrawn(B))
    assert machine.record.plan_revision == 1
    assert phases(feed(machine, Tick(), now=NOW + 2)) == {(C, Phase.WITHDRAW)}
    effects = feed(machine, withdrawn(C))
    assert phases(effects) == {(A, Phase.PREPARE), (B, Phase.PREPARE), (C, Phase.ABORT)}
    record = machine.record
    assert (record.proposal, record.pending, record.plan_revision, record.generation) == (wanted, None, 2, 2)


def test_a_boundary_that_comes_before_the_tags_are_gone_leaves_the_plan_as_it_is():
    machine = permitted()
    before = machine.record
    feed(machine, Amend(proposal(members=(A, B))), withdrawn(B))
    feed(machine, truth(ParticipantState.CUTTING_OVER, A))
    assert machine.record == before
    (refused,) = feed(machine, Amend(proposal(members=(A, B))))
    assert isinstance(refused, Refused) and "the notice becomes the next handoff" in refused.reason.text


def test_taking_permission_back_goes_on_after_a_restart_and_ends_with_the_deadline():
    machine = permitted()
    feed(machine, Amend(proposal(members=(A, B), deadline_utc=DEADLINE - 5)))
    restarted = proposer(machine.record)
    assert phases(feed(restarted, Tick())) == {(A, Phase.WITHDRAW), (B, Phase.WITHDRAW)}
    feed(restarted, Tick(), now=DEADLINE - 4)
    assert restarted.state is ProposerState.ABORTING and restarted.record.pending is None


def test_ready_of_an_older_revision_gives_no_permission_and_its_abort_ends_nothing():
    machine = opened()
    feed(machine, Amend(proposal(plan_digest="d2")))
    feed(machine, *(truth(ParticipantState.READY, member) for member in (A, B, C)))
    assert machine.state is ProposerState.PREPARING
    feed(machine, truth(ParticipantState.ABORTING, A))
    assert machine.state is ProposerState.PREPARING


def test_an_amended_handoff_goes_when_all_are_ready_for_the_newer_revision():
    machine = opened()
    machines = {member: participant(member) for member in (A, B, C)}
    for answering in machines.values():
        answering.handle(OrderReceived(order()), NOW)
    orders = {
        effect.member: effect.order
        for effect in feed(machine, Amend(proposal(deadline_utc=DEADLINE - 10)))
        if isinstance(effect, SendOrder)
    }
    for member, answering in machines.items():
        assert machine.state is ProposerState.PREPARING
        answering.handle(OrderReceived(orders[member]), NOW)
        said = reports_in(answering.handle(rank_says(RankStage.PREPARED, plan_revision=2), NOW))
        feed(machine, *map(ReportReceived, said))
    assert machine.state is ProposerState.PERMITTED
    assert machine.record.plan_revision == 2


def test_whoever_still_streams_is_waited_for_and_named_when_the_deadline_passes():
    machine = opened()
    feed(machine, truth(ParticipantState.READY, A), truth(ParticipantState.READY, B))
    feed(machine, truth(ParticipantState.STREAMING, C))
    assert machine.state is ProposerState.PREPARING
    machine.handle(Tick(), DEADLINE + 1)
    assert machine.record.reason.text == "the deadline passed before all were ready; c/0 is streaming"


def test_a_restarted_host_repeats_the_orders_of_its_open_handoff():
    machine = proposer(permitted().record)
    assert phases(feed(machine, Tick())) == {(member, Phase.PERMIT) for member in (A, B, C)}
