"""A participant promises once, journals before it speaks, and tells the truth about its rank. Pure."""

from dataclasses import replace

import pytest

from liver_core.handoff import (
    OUT_OF_TIME,
    Decision,
    FailedPart,
    FailureCause,
    ParticipantRecord,
    Phase,
    Reason,
    Rung,
    Stage,
)
from liver_core.handoff.participant_events import (
    RETIRE_GRACE_S,
    AbortRank,
    ClearReadyTag,
    OrderReceived,
    ParticipantState,
    Persist,
    PrepareRank,
    QueryRank,
    RankDied,
    RankStage,
    RetireRank,
    SendReport,
    SetReadyTag,
    StopRank,
    Tick,
)
from tests.liver_core.handoff.samples import (
    DEADLINE,
    G1,
    H1,
    H2,
    WHY,
    A,
    B,
    C,
    order,
    participant,
    participant_in,
    rank_says,
    reports_in,
    roster,
)

NOW = 3.0
G2 = roster(2, A, C)


def take(machine, message, now=NOW):
    return machine.handle(OrderReceived(message), now)


def kinds(effects):
    return [type(effect) for effect in effects]


def test_a_promise_is_on_disk_before_the_rank_or_the_proposer_hears_of_it():
    machine = participant()
    effects = take(machine, order())
    assert kinds(effects) == [Persist, PrepareRank, SendReport]
    assert effects[0].record.promise.handoff_id == H1
    assert effects[0].record.highest_generation == 2
    assert effects[2].report.promise == effects[0].record.promise


def test_it_promises_to_one_handoff_at_a_time_and_says_to_which():
    machine = participant_in(ParticipantState.PREPARING)
    (report,) = reports_in(take(machine, order(handoff_id=H2, generation=3, proposer_id="another")))
    assert report.stage is Stage.ABORTED
    assert report.promise is not None and report.promise.handoff_id == H1
    assert report.reason is not None and "promised to handoff h1" in report.reason.text


def test_an_order_of_the_same_handoff_under_another_number_is_another_attempt():
    """Two agents that do not hear each other open what the service proposes, each under a number of its own."""
    machine = participant_in(ParticipantState.READY)
    ours = machine.record
    (report,) = reports_in(take(machine, order(Phase.ABORT, generation=5, proposer_id="elsewhere", reason=WHY)))
    assert machine.state is ParticipantState.READY and machine.record.promise == ours.promise
    (report,) = reports_in(take(machine, order(Phase.PREPARE, generation=5, proposer_id="elsewhere")))
    assert report.stage is Stage.ABORTED and report.generation == 5
    assert report.reason is not None and "promised to handoff h1 of generation 2" in report.reason.text


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (order(generation=1, parent=0), "generation: 1 is used up, the highest seen is 1"),
        (order(parent=0, generation=5), "parent: this member trains in generation 1, not 0"),
        (order(source=roster(1, B, A)), "source: not the roster of generation 1 in which this member trains"),
        (order(source=None, parent=0), "source: a handoff has one; a world without is started by the service"),
        (order(rung=Rung.CHECKPOINT), "rung: must be a live one; checkpoint is the service's"),
        (order(job_id="other"), "job_id: this participant belongs to job"),
        (order(deadline_utc=1.0), "deadline_utc: passed 2.0 s ago"),
        (order(Phase.PERMIT), "phase: permit of a handoff that was never promised here"),
        (order(Phase.RETIRE), "phase: retire of a handoff that was never promised here"),
        (replace(order(), protocol_version=1), "protocol_version: must be 5, is 1"),
    ],
)
def test_what_is_foreign_late_or_stale_is_refused_by_field_and_rule(message, complaint):
    machine = participant()
    effects = take(machine, message)
    (report,) = reports_in(effects)
    assert kinds(effects) == [SendReport]
    assert report.stage is Stage.ABORTED and complaint in report.reason.text
    assert machine.record.promise is None


def test_a_member_without_a_rank_does_not_pass_for_a_source():
    why = replace(WHY, cause=FailureCause(FailedPart.RANK, signal="SIGKILL", step=7))
    machine = participant(B, ParticipantRecord(reason=why))
    (report,) = reports_in(take(machine, order()))
    assert "this member runs no rank of generation 1 (rank 0, test: because)" in report.reason.text
    assert report.reason.cause == why.cause
    (report,) = reports_in(take(machine, order(generation=1)))
    assert report.reason.cause is None, "it is refused for its number, whatever became of the rank"


def test_a_member_that_has_no_part_says_so():
    machine = participant(C)
    (report,) = reports_in(take(machine, order(target=roster(2, A, B))))
    assert report.reason is not None and "this member has no part in it" in report.reason.text


def test_ready_is_said_when_the_rank_is_built_and_the_tag_is_set_on_permission():
    machine = participant_in(ParticipantState.PREPARING)
    (report,) = reports_in(machine.handle(rank_says(RankStage.PREPARED), NOW))
    assert report.stage is Stage.READY
    effects = take(machine, order(Phase.PERMIT))
    assert kinds(effects) == [Persist, SetReadyTag, SendReport]
    assert effects[0].record.promise.phase is Phase.PERMIT


def test_a_repeated_order_changes_nothing_and_is_answered_with_the_truth():
    machine = participant_in(ParticipantState.PERMITTED)
    for message in (order(), order(Phase.PERMIT)):
        effects = take(machine, message)
        assert kinds(effects) == [SendReport]
        assert effects[0].report.stage is Stage.READY
        assert effects[0].report.promise.phase is Phase.PERMIT


def test_reports_are_numbered_upwards():
    machine = participant_in(ParticipantState.PREPARING)
    first, second = (reports_in(take(machine, order()))[0] for _ in range(2))
    assert second.order_key > first.order_key


def test_an_abort_takes_the_tag_back_first_and_the_promise_ends_when_the_rank_says_so():
    machine = participant_in(ParticipantState.PERMITTED)
    effects = take(machine, order(Phase.ABORT))
    assert kinds(effects) == [Persist, ClearReadyTag, AbortRank, SendReport]
    assert machine.record.promise is not None
    effects = machine.handle(rank_says(RankStage.ABORTED), NOW)
    assert kinds(effects) == [Persist, SendReport]
    assert machine.record.promise is None
    assert machine.record.active == G1
    assert effects[1].report.stage is Stage.ABORTED
    assert effects[1].report.reason == WHY


def test_an_abort_that_comes_after_the_boundary_changes_nothing():
    machine = participant_in(ParticipantState.PERMITTED)
    take(machine, order(Phase.ABORT))
    machine.handle(rank_says(RankStage.CUTTING_OVER), NOW)
    assert machine.state is ParticipantState.CUTTING_OVER
    assert machine.record.promise is not None and machine.record.promise.phase is Phase.PERMIT
    machine.handle(rank_says(RankStage.ACTIVE, decision=Decision.GO), NOW)
    effects = take(machine, order(Phase.RETIRE))
    assert kinds(effects) == [Persist, RetireRank, SendReport]


def test_a_generation_is_burned_by_the_abort_of_a_handoff_that_never_arrived():
    machine = participant()
    assert kinds(take(machine, order(Phase.ABORT))) == [Persist, SendReport]
    (report,) = reports_in(take(machine, order()))
    assert "generation: 2 is used up" in report.reason.text


def test_a_late_order_of_an_ended_handoff_is_answered_with_how_it_ended():
    machine = participant_in(ParticipantState.ABORTING)
    machine.handle(rank_says(RankStage.ABORTED, decision=Decision.NO_GO), NOW)
    for phase in Phase:
        effects = take(machine, order(phase))
        assert kinds(effects) == [SendReport]
        assert effects[0].report.stage is Stage.ABORTED
        assert effects[0].report.decision is Decision.NO_GO


def test_a_rank_that_fails_to_build_aborts_the_handoff_here_and_trains_on():
    machine = participant_in(ParticipantState.PREPARING)
    (report,) = reports_in(machine.handle(rank_says(RankStage.ABORTED, reason=Reason("no memory", "build", 0)), NOW))
    assert report.reason == Reason("no memory", "build", 0)
    assert machine.record.active == G1


def test_a_rank_that_dies_leaves_its_world():
    machine = participant_in(ParticipantState.READY)
    (report,) = reports_in(machine.handle(RankDied(WHY), NOW))
    assert report.stage is Stage.ABORTED and report.active_generation == 0
    assert machine.record.active is None


def test_a_rank_that_dies_after_the_boundary_is_broken():
    machine = participant_in(ParticipantState.CUTTING_OVER)
    (report,) = reports_in(machine.handle(RankDied(WHY), NOW))
    assert report.stage is Stage.BROKEN


def test_the_deadline_aborts_without_the_proposer_until_the_boundary():
    machine = participant_in(ParticipantState.PERMITTED)
    assert machine.handle(Tick(), DEADLINE) == ()
    effects = machine.handle(Tick(), DEADLINE + 1)
    assert kinds(effects) == [Persist, ClearReadyTag, AbortRank, SendReport]
    assert effects[3].report.reason == Reason("the deadline passed before the boundary", OUT_OF_TIME), "it was ready"
    assert participant_in(ParticipantState.CUTTING_OVER).handle(Tick(), DEADLINE + 1) == ()
    (report,) = reports_in(participant_in(ParticipantState.WITHDRAWING).handle(Tick(), DEADLINE + 1))
    assert report.reason.phase == OUT_OF_TIME and report.reason.rank is None, "nor is one late that is to wait again"


def test_a_member_that_was_not_ready_by_the_deadline_says_so_of_itself():
    (report,) = reports_in(participant_in(ParticipantState.STREAMING).handle(Tick(), DEADLINE + 1))
    text = "timed out: the deadline passed before the boundary"
    assert report.reason == Reason(text, "streaming", report.reason.rank) and report.reason.rank is not None


def test_an_abort_is_repeated_to_the_rank_until_it_answers():
    assert AbortRank in kinds(participant_in(ParticipantState.ABORTING).handle(Tick(), NOW))


def test_a_leaver_is_free_when_it_has_read_go():
    machine = participant_in(ParticipantState.CUTTING_OVER, B)
    effects = machine.handle(rank_says(RankStage.LEFT, decision=Decision.GO), NOW)
    assert kinds(effects) == [Persist, StopRank, SendReport]
    assert effects[2].report.stage is Stage.LEFT and effects[2].report.decision is Decision.GO
    assert machine.record.active is None and machine.record.promise is None


def test_retire_frees_the_source_world_and_ends_the_promise():
    machine = participant_in(ParticipantState.ACTIVE)
    assert machine.record.active == G2
    assert kinds(take(machine, order(Phase.RETIRE))) == [Persist, RetireRank, SendReport]
    assert machine.state is ParticipantState.IDLE and not machine.wants_ticks


def test_the_next_handoff_retires_the_last_one_on_the_way():
    machine = participant_in(ParticipantState.ACTIVE)
    following = order(handoff_id=H2, parent=2, generation=3, source=G2)
    effects = take(machine, following)
    assert kinds(effects) == [Persist, RetireRank, PrepareRank, SendReport]
    assert effects[1] == RetireRank(H1)
    assert [ended.stage for ended in machine.record.ended] == [Stage.ACTIVE]


def test_a_proposer_that_never_says_retire_does_not_hold_two_worlds_for_ever():
    machine = participant_in(ParticipantState.ACTIVE)
    late = DEADLINE + order().cutover.store_s + RETIRE_GRACE_S
    assert machine.handle(Tick(), late) == ()
    assert RetireRank in kinds(machine.handle(Tick(), late + 1))


def test_a_newer_revision_is_prepared_until_permission():
    newer = order(plan_revision=2, target=roster(2, A, B))
    machine = participant_in(ParticipantState.READY)
    assert kinds(take(machine, newer)) == [Persist, PrepareRank, SendReport]
    assert machine.handle(rank_says(RankStage.PREPARED, plan_revision=1), NOW) == ()
    assert machine.handle(rank_says(RankStage.ABORTED, plan_revision=1), NOW) == ()
    (report,) = reports_in(machine.handle(rank_says(RankStage.PREPARED, plan_revision=2), NOW))
    assert (report.stage, report.plan_revision) == (Stage.READY, 2)
    permitted = participant_in(ParticipantState.PERMITTED)
    assert kinds(take(permitted, newer)) == [SendReport]
    assert permitted.record.promise is not None and permitted.record.promise.plan_revision == 1


def test_permission_that_is_taken_back_is_gone_when_the_rank_says_so_and_never_comes_again():
    machine = participant_in(ParticipantState.PERMITTED)
    effects = take(machine, order(Phase.WITHDRAW))
    assert kinds(effects) == [Persist, ClearReadyTag, SendReport]
    assert effects[2].report.stage is Stage.PREPARING, "the boundary may be first, nobody knows yet"
    assert kinds(machine.handle(Tick(), NOW)) == [ClearReadyTag, SendReport]
    restarted = participant(A, machine.record)
    restarted.start(NOW)
    assert ClearReadyTag in kinds(restarted.handle(rank_says(RankStage.READY), NOW))
    for each in (machine, restarted):
        (report,) = reports_in(each.handle(rank_says(RankStage.PREPARED), NOW))
        assert (report.stage, report.promise.phase) == (Stage.READY, Phase.WITHDRAW)
        assert kinds(take(each, order(Phase.PERMIT))) == [SendReport]
        assert PrepareRank in kinds(take(each, order(plan_revision=2, target=roster(2, A, B))))


def test_what_the_rank_said_before_it_had_permission_does_not_tell_that_its_tag_is_gone():
    machine = participant_in(ParticipantState.PERMITTED)
    take(machine, order(Phase.WITHDRAW))
    assert machine.handle(rank_says(RankStage.PREPARED), NOW) == ()
    machine.handle(rank_says(RankStage.READY), NOW)
    (report,) = reports_in(machine.handle(rank_says(RankStage.PREPARED), NOW))
    assert report.stage is Stage.READY


def test_permission_that_never_came_is_taken_back_all_the_same():
    machine = participant_in(ParticipantState.READY)
    assert kinds(take(machine, order(Phase.WITHDRAW))) == [Persist, SendReport]
    assert kinds(take(machine, order(Phase.PERMIT))) == [SendReport]


def test_a_boundary_before_permission_was_taken_back_counts():
    machine = participant_in(ParticipantState.WITHDRAWING)
    (report,) = reports_in(machine.handle(rank_says(RankStage.CUTTING_OVER), NOW))
    assert (report.stage, report.promise.phase) == (Stage.CUTTING_OVER, Phase.PERMIT)


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.PERMIT])
@pytest.mark.parametrize("state", [ParticipantState.PREPARING, ParticipantState.STREAMING, ParticipantState.READY])
def test_a_newer_revision_is_on_disk_before_the_rank_or_the_proposer_hears_of_it(state, phase):
    """Its permission may be the first that a newcomer to a rescue hears of it: the others did not wait for it."""
    machine = participant_in(state)
    effects = take(machine, order(phase, plan_revision=2, deadline_utc=DEADLINE - 1))
    assert isinstance(effects[0], Persist)
    assert effects[0].record.promise.plan_revision == 2
    assert effects[0].record.order.deadline_utc == DEADLINE - 1
    (report,) = reports_in(effects)
    assert (report.stage, report.plan_revision) == (Stage.PREPARING, 2)
    assert kinds(machine.handle(Tick(), DEADLINE - 0.5))[0] is Persist, "the nearer deadline counts"


def test_another_lead_that_opens_the_same_proposal_under_the_same_number_is_refused():
    machine = participant_in(ParticipantState.READY)
    (report,) = reports_in(take(machine, order(plan_revision=2, proposer_id="another")))
    assert report.reason is not None and report.reason.text.startswith("promised to handoff")
    assert (machine.state, machine.record.promise.plan_revision) == (ParticipantState.READY, 1)


def test_how_a_handoff_ended_is_the_answer_to_its_own_lead_alone():
    """Another that has opened the same proposal under the same number would take GO for the end of its own attempt."""
    machine = participant_in(ParticipantState.ACTIVE)
    take(machine, order(Phase.RETIRE))
    (own,) = reports_in(take(machine, order(Phase.ABORT)))
    (other,) = reports_in(take(machine, order(Phase.ABORT, proposer_id="another", reason=WHY)))
    assert (own.stage, own.decision) == (Stage.ACTIVE, Decision.GO)
    assert (other.stage, other.decision) == (Stage.ABORTED, Decision.UNDECIDED)


def test_an_older_revision_that_comes_late_changes_nothing():
    machine = participant_in(ParticipantState.READY)
    take(machine, order(plan_revision=2))
    for phase in (Phase.PREPARE, Phase.PERMIT, Phase.ABORT):  # A farewell too: it is in again since.
        assert kinds(take(machine, order(phase, reason=Reason("no part", "amend")))) == [SendReport]
    assert machine.state is ParticipantState.PREPARING
    assert machine.record.promise.plan_revision == 2


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        (ParticipantState.PERMITTED, Stage.READY),
        (ParticipantState.CUTTING_OVER, Stage.CUTTING_OVER),
        (ParticipantState.ACTIVE, Stage.ACTIVE),
    ],
)
def test_a_newer_revision_is_refused_with_the_reason_once_permission_was_given(state, stage):
    machine = participant_in(state)
    before = machine.record
    effects = take(machine, order(plan_revision=2))
    assert kinds(effects) == [SendReport]
    (report,) = reports_in(effects)
    assert (report.stage, report.plan_revision) == (stage, 1)
    assert (report.reason.phase, report.reason.text) == ("amend", f"revision 2 is rejected: revision 1 is {state}")
    assert machine.record == before


def test_a_revision_may_take_the_next_rung():
    machine = participant()
    take(machine, order(rung=Rung.LIVE))
    machine.handle(rank_says(RankStage.STREAMING), NOW)
    assert PrepareRank(order(plan_revision=2)) in take(machine, order(plan_revision=2))


# Streaming.


def test_ready_is_said_only_when_what_streams_is_certified():
    machine = participant_in(ParticipantState.PREPARING)
    (report,) = reports_in(machine.handle(rank_says(RankStage.STREAMING), NOW))
    assert report.stage is Stage.STREAMING
    assert kinds(take(machine, order(Phase.PERMIT))) == [SendReport], "no permission before it is ready"
    assert machine.handle(rank_says(RankStage.STREAMING), NOW) == ()
    (report,) = reports_in(machine.handle(rank_says(RankStage.PREPARED), NOW))
    assert (report.stage, report.reason) == (Stage.READY, None)


def test_a_stream_that_fails_names_why_and_the_next_rung_is_taken_in_the_same_handoff():
    machine = participant_in(ParticipantState.STREAMING)
    why = Reason("tile 7 fell out of the ring", "stream", 2, "7")
    (report,) = reports_in(machine.handle(rank_says(RankStage.PREPARED, reason=why), NOW))
    assert (report.stage, report.reason) == (Stage.READY, why)
    (report,) = reports_in(take(machine, order(Phase.PERMIT)))
    assert (report.stage, report.reason) == (Stage.READY, why)
    machine.handle(rank_says(RankStage.CUTTING_OVER), NOW)
    (report,) = reports_in(machine.handle(rank_says(RankStage.ACTIVE), NOW))
    assert (report.stage, report.reason) == (Stage.ACTIVE, None), "it is no fault of the world that is active"


def test_why_the_next_rung_was_taken_belongs_to_one_revision():
    machine = participant_in(ParticipantState.STREAMING)
    machine.handle(rank_says(RankStage.PREPARED, reason=WHY), NOW)
    take(machine, order(plan_revision=2))
    (report,) = reports_in(machine.handle(rank_says(RankStage.PREPARED, plan_revision=2), NOW))
    assert (report.stage, report.reason) == (Stage.READY, None)


def test_a_stream_may_also_abort_the_handoff():
    machine = participant_in(ParticipantState.STREAMING)
    why = Reason("the certificate differs", "stream", 0)
    (report,) = reports_in(machine.handle(rank_says(RankStage.ABORTED, reason=why), NOW))
    assert (report.stage, report.reason) == (Stage.ABORTED, why)
    assert machine.state is ParticipantState.IDLE


def test_the_deadline_and_an_abort_end_a_stream():
    for event, now in ((Tick(), DEADLINE + 1), (OrderReceived(order(Phase.ABORT)), NOW)):
        machine = participant_in(ParticipantState.STREAMING)
        assert kinds(machine.handle(event, now)) == [Persist, AbortRank, SendReport]
        assert machine.state is ParticipantState.ABORTING


@pytest.mark.parametrize(
    "changes",
    [
        {"target": roster(2, B)},
        {"source": roster(1, B, A)},
        {"parent": 0},
        {"deadline_utc": 1.0},
        {"deadline_utc": DEADLINE + 0.1},
        {"rung": Rung.CHECKPOINT},
    ],
)
def test_a_revision_that_cannot_be_aborts_what_was_promised(changes):
    machine = participant_in(ParticipantState.READY, C)
    assert AbortRank in kinds(take(machine, order(plan_revision=2, **changes)))


# After a restart of the agent.


def restored(state: ParticipantState, member=A):
    before = participant_in(state, member)
    machine = participant(member, before.record)
    assert machine.start(NOW) == (QueryRank(),)
    return machine


def test_nothing_is_said_after_a_restart_before_the_rank_has_answered():
    machine = restored(ParticipantState.READY)
    assert take(machine, order(Phase.PERMIT)) == ()
    assert machine.handle(Tick(), NOW) == (QueryRank(),)


@pytest.mark.parametrize(
    ("state", "said", "then", "expected"),
    [
        (ParticipantState.PREPARING, RankStage.TRAINING, ParticipantState.PREPARING, PrepareRank),
        (ParticipantState.PREPARING, RankStage.PREPARING, ParticipantState.PREPARING, SendReport),
        (ParticipantState.PREPARING, RankStage.STREAMING, ParticipantState.STREAMING, SendReport),
        (ParticipantState.STREAMING, RankStage.PREPARING, ParticipantState.PREPARING, SendReport),
        (ParticipantState.ABORTING, RankStage.STREAMING, ParticipantState.ABORTING, AbortRank),
        (ParticipantState.PREPARING, RankStage.PREPARED, ParticipantState.READY, SendReport),
        (ParticipantState.PERMITTED, RankStage.PREPARED, ParticipantState.PERMITTED, SetReadyTag),
        (ParticipantState.PERMITTED, RankStage.READY, ParticipantState.PERMITTED, SetReadyTag),
        (ParticipantState.PERMITTED, RankStage.TRAINING, ParticipantState.IDLE, Persist),
        (ParticipantState.PERMITTED, RankStage.CUTTING_OVER, ParticipantState.CUTTING_OVER, SendReport),
        (ParticipantState.PERMITTED, RankStage.ACTIVE, ParticipantState.ACTIVE, Persist),
        (ParticipantState.ABORTING, RankStage.PREPARED, ParticipantState.ABORTING, AbortRank),
        (ParticipantState.ABORTING, RankStage.TRAINING, ParticipantState.IDLE, Persist),
        (ParticipantState.ACTIVE, RankStage.ACTIVE, ParticipantState.ACTIVE, SendReport),
    ],
)
def test_a_restarted_agent_goes_on_where_its_rank_truly_is(state, said, then, expected):
    machine = restored(state)
    effects = machine.handle(rank_says(said), NOW)
    assert machine.state is then
    assert expected in kinds(effects)


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        (ParticipantState.PREPARING, Stage.ABORTED),
        (ParticipantState.ABORTING, Stage.ABORTED),
        (ParticipantState.PERMITTED, Stage.BROKEN),
        (ParticipantState.WITHDRAWING, Stage.BROKEN),
    ],
)
@pytest.mark.parametrize("member", [A, C])
def test_a_rank_that_ended_while_the_agent_was_away_is_told_by_how_far_it_may_have_come(state, stage, member):
    (report,) = reports_in(restored(state, member).handle(RankDied(WHY), NOW))
    assert report.stage is stage


def test_an_abort_does_not_forget_that_there_was_permission_and_a_newer_revision_does():
    permitted = participant_in(ParticipantState.PERMITTED, C)
    take(permitted, order(Phase.ABORT))
    withdrawn = participant_in(ParticipantState.WITHDRAWING, C)
    withdrawn.handle(rank_says(RankStage.PREPARED), NOW)
    take(withdrawn, order(plan_revision=2))
    take(withdrawn, order(Phase.ABORT, plan_revision=2))
    for before, stage in ((permitted, Stage.BROKEN), (withdrawn, Stage.ABORTED)):
        assert before.state is ParticipantState.ABORTING
        machine = participant(C, before.record)
        machine.start(NOW)
        (report,) = reports_in(machine.handle(RankDied(WHY), NOW))
        assert report.stage is stage


def test_a_rank_that_trains_in_the_target_world_is_active_if_it_had_permission():
    said = rank_says(RankStage.TRAINING, handoff_id="", generation=2)
    machine = restored(ParticipantState.PERMITTED)
    machine.handle(said, NOW)
    assert machine.state is ParticipantState.ACTIVE
    machine = restored(ParticipantState.PREPARING)
    machine.handle(said, NOW)
    assert machine.state is ParticipantState.PREPARING


def test_a_rank_that_was_in_no_handoff_is_just_adopted():
    machine = participant()
    assert machine.start(NOW) == (QueryRank(),)
    assert machine.handle(rank_says(RankStage.TRAINING, handoff_id=""), NOW) == ()
    assert machine.state is ParticipantState.IDLE and machine.record.active == G1


@pytest.mark.parametrize("stage", [RankStage.STARTING, RankStage.FINISHED, RankStage.FAILED])
@pytest.mark.parametrize("state", list(ParticipantState))
def test_what_a_rank_says_of_its_world_alone_moves_no_participant(state, stage):
    machine = participant_in(state)
    assert (machine.handle(rank_says(stage), 3.0), machine.state) == ((), state)


@pytest.mark.parametrize(
    ("state", "member", "phase", "waits"),
    [
        (ParticipantState.READY, C, "superseded", True),
        (ParticipantState.PREPARING, C, "superseded", False),
        (ParticipantState.READY, C, "amend", False),
        (ParticipantState.READY, A, "superseded", False),
    ],
)
def test_the_others_may_wait_for_a_newcomer_that_was_ready_when_it_was_told_to_abort(state, member, phase, waits):
    """All may have had permission, and only the word of its own was lost. A plan that is amended has none yet."""
    machine = participant_in(state, member)
    take(machine, replace(order(Phase.ABORT), reason=Reason("the lead wants it no more", phase)))
    assert (machine.state, machine.is_awaited()) == (ParticipantState.ABORTING, waits)
    machine.handle(rank_says(RankStage.ABORTED), NOW)
    assert not machine.is_awaited()
