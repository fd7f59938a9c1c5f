"""What the leading agent knows of a handoff: its mirror, the time it cost, and what the next one learns from it."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from agent.driver.planning import Learned
from agent.driver.progress import (
    ENDS_KEPT,
    LostTime,
    Progress,
    cost_of,
    first_mirror,
    from_mirror,
    learned_from,
)
from agent.protocol.peer import RankMeasures
from agent.protocol.sync import HandoffMeasures, HandoffMirror
from agent.protocol.values import HandoffCause, HandoffState, utc
from liver_core.handoff import (
    CostParts,
    CutoverDeadlines,
    Decision,
    HandoffId,
    MeasuredCost,
    Phase,
    PreparePhase,
    Proposal,
    ProposerRecord,
    Reason,
    Report,
    Rung,
    RungCost,
    Stage,
    StoreAddress,
)
from liver_core.handoff.leader_events import Purpose
from liver_core.handoff.proposer_events import HandoffEnded
from liver_core.layout import Member, ParallelLayout
from tests.agent.stub_service import members_of, roster_of

FOUR = ("a", "b", "c", "d")
ACTIVE = roster_of(1, FOUR)


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


def test_steps_of_the_world_before_and_steps_after_the_end_change_nothing() -> None:
    lost = LostTime(since=100.0, step=10, median_step_s=1.0)
    assert not lost.stepped(1, 2, 10, 100.5) and lost.cutover_step is None
    assert not lost.stepped(3, 2, 11, 101.0), "of a world that never stepped nothing is known"
    for count in range(11):
        lost.stepped(2, 2, 11 + count, 101.0 + count)
    assert lost.lost_s == pytest.approx(0.0)
    assert not lost.stepped(2, 2, 22, 200.0) and not lost.stepped(3, 2, 23, 300.0)
    assert (lost.lost_s, len(lost.ends)) == (pytest.approx(0.0), 11)


def test_a_world_that_ends_before_six_steps_are_over_tells_no_lost_time() -> None:
    for steps, is_known in ((6, False), (7, True)):
        lost = LostTime(since=100.0, step=10, median_step_s=1.0)
        for count in range(steps):
            lost.stepped(2, 2, 11 + count, 101.0 + count)
        assert lost.stepped(3, 2, 30, 110.0) is is_known
        assert (lost.lost_s is not None) is is_known


def test_after_a_restart_of_the_agent_the_cutover_is_known_and_the_lost_time_is_not_made_up() -> None:
    lost = LostTime(since=100.0, step=0, median_step_s=0.0, known=False)
    assert lost.stepped(2, 2, 11, 101.0)
    assert not any(lost.stepped(2, 2, 11 + count, 101.0 + count) for count in range(1, 30))
    assert (lost.cutover_step, lost.lost_s) == (11, None)


def slow_then_fast(lost: LostTime) -> LostTime:
    """From 100.0 on: two steps of 1.5 s, one of 3 s, the cutover's of 2 s; then five of 0.7 s and five of 0.5 s."""
    now = lost.since
    for step, seconds in ((11, 1.5), (12, 1.5), (13, 3.0)):
        now += seconds
        lost.stepped(1, 2, step, now)
        lost.stepped(1, 2, step, now + 0.3)  # Another rank's word for the same step.
    now += 2.0
    lost.stepped(2, 2, 14, now)
    for count, seconds in enumerate([0.7] * 5 + [0.5] * 5, start=1):
        now += seconds
        lost.stepped(2, 2, 14 + count, now)
    return lost


def test_lost_time_is_told_by_what_it_was_lost_to() -> None:
    lost = slow_then_fast(LostTime(since=100.0, step=10, median_step_s=1.0))
    # Half a second, half a second, two seconds and one second more than usual; the stream began 1 s into the third.
    parts = lost.parts(104.0, 0.4)
    assert parts is not None and lost.lost_s == pytest.approx(5.0) == pytest.approx(parts.total_s)
    assert parts.building_s == pytest.approx(0.5 + 0.5 + 2.0 / 3)
    assert parts.streaming_s == pytest.approx(2.0 * 2 / 3 + 0.6)
    assert (parts.pause_s, parts.after_s) == (0.4, pytest.approx(1.0))
    copied = lost.parts(None, 0.4)
    assert copied is not None and (copied.building_s, copied.streaming_s) == (pytest.approx(3.6), 0.0)
    unmeasured = lost.parts(None, None)
    assert unmeasured is not None and unmeasured.pause_s == pytest.approx(1.0), "what the cutover's step took longer"
    assert lost.parts(200.0, 0.4) == pytest.approx(copied), "a stream that began after the boundary took nothing"
    early = lost.parts(90.0, 0.4)
    assert early is not None and early.building_s == 0.0


def test_of_what_is_not_known_no_parts_are_made_up() -> None:
    assert LostTime(since=100.0, step=10, median_step_s=1.0).parts(None, 0.4) is None
    unseen = LostTime(100.0, 0, 0.0, 14, 5.0, known=False)
    assert unseen.parts(104.0, 0.4) is None, "the agent was started again meanwhile"


def test_steps_that_stream_for_long_are_thinned_out_and_the_parts_stay_right() -> None:
    lost = LostTime(since=0.0, step=0, median_step_s=1.0)
    for step in range(1, 10_001):
        lost.stepped(1, 2, step, step * 1.25)
    for count in range(11):
        lost.stepped(2, 2, 10_001 + count, 12_501.25 + count)
    assert len(lost.old_ends) <= ENDS_KEPT
    parts = lost.parts(5_000.0, 0.0)
    assert parts is not None
    assert (parts.building_s, parts.streaming_s) == (pytest.approx(1_000.0), pytest.approx(1_500.25))


def test_what_a_handoff_cost_tells_of_its_rung_only_where_nothing_else_was_done() -> None:
    parts = CostParts(1.0, 2.0, 0.3, 0.5)
    done = opened().mirror.model_copy(
        update={"decision": Decision.GO, "measures": HandoffMeasures(lost_parts=parts, phases_s={"stream": 2.0})}
    )
    assert cost_of(done) == MeasuredCost(Rung.LIVE, parts)
    for other in (
        {"decision": Decision.GO_REDO},
        {"plan_revision": 2},
        {"rung": Rung.STOP_AND_COPY},  # It has streamed before it fell.
        {"measures": HandoffMeasures(phases_s={"stream": 2.0})},
    ):
        assert cost_of(done.model_copy(update=other)) is None, other
    copied = {"rung": Rung.STOP_AND_COPY, "measures": HandoffMeasures(lost_parts=parts)}
    assert cost_of(done.model_copy(update=copied)) == MeasuredCost(Rung.STOP_AND_COPY, parts)


START_S = 1_700_000_000.0
HANDOFF = str(uuid4())
MEMBERS = members_of(FOUR)


def proposal(nodes: tuple[str, ...] = FOUR[:3], **changes: Any) -> Proposal:
    wanted = Proposal(
        handoff_id=HandoffId(HANDOFF), job_id=ACTIVE.job_id, parent=1, source=ACTIVE,
        layout=ParallelLayout(pp=len(nodes)), members=members_of(nodes), plan_digest="d",
        store=StoreAddress("127.0.0.1", 4_000), cause="notice", rung=Rung.LIVE, deadline_utc=START_S + 60.0,
        cutover=CutoverDeadlines(),
    )  # fmt: skip
    return replace(wanted, **changes)


def opened(*, rung: Rung = Rung.LIVE, notice_at: float | None = START_S - 1.0) -> Progress:
    """A handoff of four nodes to the first three, which opens at START_S."""
    purpose = Purpose(frozenset({"d"}), notice_at, "because")
    mirror = first_mirror(proposal(rung=rung), purpose, 2, "a", START_S)
    return Progress(mirror, LostTime(START_S, 10, 1.0), notice_at, frozenset(MEMBERS[3:]))


def report(member: Member, stage: Stage, **changes: Any) -> Report:
    said = Report(
        job_id=ACTIVE.job_id, handoff_id=HandoffId(HANDOFF), parent=1, generation=2, plan_revision=1, plan_digest="d",
        member=member, stage=stage, stages=(), promise=None, active_generation=1, highest_generation=2,
        decision=Decision.UNDECIDED, deadline_utc=START_S + 60.0, agent_incarnation=1, report_seq=1, issued_at=START_S,
    )  # fmt: skip
    return replace(said, **changes)


def record(phase: Phase, **changes: Any) -> ProposerRecord:
    kept = ProposerRecord(highest_generation=2, proposal=proposal(), generation=2, plan_revision=1, phase=phase)
    return replace(kept, **changes)


def test_the_first_mirror_says_what_is_opened_for_whom_and_until_when() -> None:
    mirror = opened().mirror
    assert (str(mirror.handoff_id), mirror.parent, mirror.generation, mirror.plan_digest) == (HANDOFF, 1, 2, "d")
    assert (mirror.proposer, mirror.store_node, mirror.cause, mirror.stage) == ("a", "a", "notice", "prepare")
    assert (mirror.state, mirror.rung, mirror.leaving) == (HandoffState.PREPARING, Rung.LIVE, ("d",))
    assert (mirror.source, mirror.target) == (ACTIVE, roster_of(2, FOUR[:3]))
    assert mirror.reason == Reason("because", "open") and mirror.store == StoreAddress("127.0.0.1", 4_000)
    assert (mirror.opened_utc, mirror.changed_utc, mirror.deadline_utc) == (
        utc(START_S), utc(START_S), utc(START_S + 60.0),
    )  # fmt: skip


def test_news_are_old_after_more_than_a_minute() -> None:
    progress = opened()
    assert not progress.is_old(START_S + 60.0) and progress.is_old(START_S + 60.1)


def test_the_state_follows_the_phase_and_the_furthest_rank() -> None:
    progress = opened()
    assert progress.state_of(record(Phase.PREPARE)) is HandoffState.PREPARING
    progress.take_report(report(MEMBERS[0], Stage.PREPARING), None, START_S)
    assert progress.state_of(record(Phase.PREPARE)) is HandoffState.PREPARING
    progress.take_report(report(MEMBERS[0], Stage.STREAMING), None, START_S)
    assert progress.state_of(record(Phase.PREPARE)) is HandoffState.STREAMING
    for phase in (Phase.PERMIT, Phase.WITHDRAW):
        assert progress.state_of(record(phase)) is HandoffState.READY
    assert progress.state_of(record(Phase.ABORT)) is HandoffState.PREPARING
    progress.take_report(report(MEMBERS[0], Stage.CUTTING_OVER), None, START_S)
    assert progress.state_of(record(Phase.PERMIT)) is HandoffState.CUTTING_OVER
    assert progress.state_of(record(Phase.WITHDRAW)) is HandoffState.READY
    assert progress.state_of(record(Phase.RETIRE)) is HandoffState.ACTIVE
    assert progress.state_of(record(Phase.ABORT)) is HandoffState.CUTTING_OVER, "the ranks decide, whatever is wanted"


@pytest.mark.parametrize("stage", [Stage.CUTTING_OVER, Stage.ACTIVE, Stage.LEFT])
def test_the_boundary_is_the_first_rank_past_it_and_safe_is_the_last_leaver(stage: Stage) -> None:
    progress = opened()
    progress.take_report(report(MEMBERS[0], Stage.READY), None, START_S + 1)
    assert progress.marks == {}
    progress.take_report(report(MEMBERS[0], stage), None, START_S + 2)
    progress.take_report(report(MEMBERS[1], Stage.LEFT), None, START_S + 3)
    assert progress.marks == {"boundary": START_S + 2}, "the leaver is still there"
    progress.take_report(report(MEMBERS[3], Stage.LEFT), None, START_S + 4)
    progress.take_report(report(MEMBERS[3], Stage.LEFT), None, START_S + 5)
    assert progress.marks == {"boundary": START_S + 2, "safe": START_S + 4}
    nobody_leaves = opened()
    nobody_leaves.leavers = frozenset()
    nobody_leaves.take_report(report(MEMBERS[0], Stage.ACTIVE), None, START_S + 2)
    assert "safe" not in nobody_leaves.marks


def test_only_what_is_new_makes_the_mirror_stale() -> None:
    progress = opened()

    def is_news(stage: Stage, measured: RankMeasures | None = None, **changes: Any) -> bool:
        progress.is_stale = False
        progress.take_report(report(MEMBERS[0], stage, **changes), measured, START_S)
        return progress.is_stale

    first = RankMeasures(measures={"build_s": 1.0}, certificate="c")
    assert is_news(Stage.PREPARING) and not is_news(Stage.PREPARING)
    assert is_news(Stage.PREPARING, first) and not is_news(Stage.PREPARING, first)
    assert is_news(Stage.PREPARING, RankMeasures(measures={"read_s": 1.0}))
    assert progress.measures[MEMBERS[0]] == {"build_s": 1.0, "read_s": 1.0}, "what was said before is kept"
    assert progress.certificates == {MEMBERS[0]: "c"}
    assert is_news(Stage.READY, reason=Reason("ring", "stream", 0))
    progress.is_stale = True
    progress.take_report(report(MEMBERS[0], Stage.READY), None, START_S)
    assert progress.is_stale, "nothing takes back what is not told yet"


def test_the_first_order_is_the_earliest_that_a_rank_had_and_is_measured_from_the_notice() -> None:
    progress = opened()
    for member, ordered_at in ((0, 3.0), (1, 2.0), (2, 4.0)):
        measured = RankMeasures(measures={"ordered_at_utc": START_S + ordered_at})
        progress.take_report(report(MEMBERS[member], Stage.PREPARING), measured, START_S + 5)
    progress.take_record(record(Phase.PREPARE), START_S + 0.5)
    progress.take_record(record(Phase.PREPARE), START_S + 9.0)
    measures = progress.next_mirror(HandoffState.PREPARING, "prepare", START_S + 9).measures
    assert (measures.notice_to_first_order_s, measures.notice_to_decided_s) == (3.0, 1.5)
    assert (measures.notice_to_safe_s, measures.notice_to_active_s) == (None, None)
    unnoticed = opened(notice_at=None)
    unnoticed.take_record(record(Phase.PREPARE), START_S + 0.5)
    assert unnoticed.next_mirror(HandoffState.PREPARING, "", START_S).measures.notice_to_decided_s is None


@pytest.mark.parametrize(
    ("stage", "revision", "fell"), [(Stage.READY, 1, True), (Stage.PREPARING, 1, False), (Stage.READY, 0, False)]
)
def test_a_rank_that_is_ready_with_a_reason_fell_to_a_copy_and_the_first_reason_stays(
    stage: Stage, revision: int, fell: bool
) -> None:
    progress, why = opened(), Reason("ring", "stream", 2)
    progress.take_report(report(MEMBERS[0], stage, reason=why, plan_revision=revision), None, START_S)
    progress.take_report(
        report(MEMBERS[1], stage, reason=Reason("later", "stream", 1), plan_revision=revision), None, 0
    )
    mirror = progress.next_mirror(HandoffState.READY, "x" * 300, START_S + 1)
    assert mirror.rung is (Rung.STOP_AND_COPY if fell else Rung.LIVE)
    text = "fell to stop_and_copy: rank 2, stream: ring" if fell else "because"
    assert mirror.reason is not None and mirror.reason.text == text
    assert (mirror.mirror_seq, mirror.stage, mirror.changed_utc) == (1, "x" * 256, utc(START_S + 1))


@pytest.mark.parametrize(
    ("rung", "is_said"),
    [(Rung.LIVE, True), (Rung.STOP_AND_COPY, True), (Rung.DROP_STEP, False), (Rung.RESCUE, False)],
)
def test_a_batch_done_again_is_said_where_the_rung_was_to_hand_it_over(rung: Rung, is_said: bool) -> None:
    progress = opened(rung=rung)
    for rank in (1, 2):
        progress.take_report(report(MEMBERS[rank], Stage.ACTIVE, reason=Reason("late", "barrier", rank)), None, START_S)
    progress.take_end(HandoffEnded(HandoffId(HANDOFF), 2, Stage.ACTIVE, Decision.GO_REDO, Reason("all did", "retire")))
    assert progress.reason is not None and progress.decision is Decision.GO_REDO
    again = "; a batch was done again: rank 1, barrier: late" if is_said else ""
    assert progress.reason.text == f"all did{again}"


def test_a_decision_that_one_rank_read_is_told_and_later_ones_that_know_none_do_not_take_it_back() -> None:
    progress = opened()
    assert progress.next_mirror(HandoffState.READY, "", START_S).decision is None
    progress.take_report(report(MEMBERS[0], Stage.ACTIVE, decision=Decision.GO), None, START_S)
    progress.take_report(report(MEMBERS[1], Stage.CUTTING_OVER), None, START_S)
    assert progress.next_mirror(HandoffState.CUTTING_OVER, "", START_S).decision is Decision.GO


def test_phases_are_measured_one_after_the_other_and_never_below_zero() -> None:
    progress = opened()
    progress.marks = {"ready": 2.0 + START_S, "boundary": 5.0 + START_S, "active": 4.0 + START_S}
    progress.marks["retired"] = 9.0 + START_S
    phases = progress.next_mirror(HandoffState.ACTIVE, "", START_S).measures.phases_s
    assert phases == {"to_ready": 2.0, "to_boundary": 3.0, "to_active": 0.0, "to_retired": 5.0}
    progress.marks = {"boundary": 5.0 + START_S, "retired": 9.0 + START_S}
    assert progress.next_mirror(HandoffState.ACTIVE, "", START_S).measures.phases_s == {"to_boundary": 5.0}


def test_certificates_that_differ_are_all_told() -> None:
    progress = opened()
    assert progress.next_mirror(HandoffState.ACTIVE, "", START_S).measures.certificate is None
    progress.certificates = dict(zip(MEMBERS, ("b", "a", "b", "b"), strict=True))
    assert progress.next_mirror(HandoffState.ACTIVE, "", START_S).measures.certificate == "a; b"


def test_a_newer_revision_answers_more_nodes_and_voids_what_was_reported_of_the_older_one() -> None:
    progress = opened()
    progress.take_report(report(MEMBERS[0], Stage.READY, reason=Reason("ring", "stream", 0)), None, START_S)
    progress.take_record(record(Phase.PERMIT), START_S + 1)
    assert progress.marks["ready"] == START_S + 1
    progress.amendment = Purpose(frozenset({"c"}), START_S - 3.0, "c will go too")
    wanted = proposal(FOUR[:2], plan_digest="e", rung=Rung.STOP_AND_COPY, deadline_utc=START_S + 30.0)
    progress.take_record(record(Phase.PREPARE, proposal=wanted, plan_revision=2), START_S + 2)
    mirror = progress.next_mirror(HandoffState.PREPARING, "", START_S + 2)
    assert (mirror.plan_revision, mirror.plan_digest, mirror.leaving) == (2, "e", ("c", "d"))
    assert (mirror.target, mirror.rung, mirror.deadline_utc) == (
        roster_of(2, FOUR[:2]), Rung.STOP_AND_COPY, utc(START_S + 30.0),
    )  # fmt: skip
    assert mirror.reason == Reason("c will go too", "amend")
    assert (progress.stages, progress.fallback, progress.amendment) == ({}, None, None)
    assert progress.marks == {"decided": START_S + 1}
    assert (progress.notice_at, progress.leavers) == (START_S - 3.0, frozenset(MEMBERS[2:]))


def test_a_record_of_another_handoff_or_of_none_is_not_taken() -> None:
    progress = opened()
    other = proposal(handoff_id=HandoffId(str(uuid4())))
    for proposed in (None, other):
        progress.take_record(record(Phase.RETIRE, proposal=proposed, plan_revision=9), START_S)
    assert (progress.marks, progress.mirror.plan_revision) == ({}, 1)


def test_the_end_of_all_phases_is_marked_once() -> None:
    progress = opened()
    for at, phase in ((1, Phase.PERMIT), (2, Phase.PERMIT), (3, Phase.RETIRE), (4, Phase.RETIRE)):
        progress.take_record(record(phase, reason=Reason("so", "x") if at == 1 else None), START_S + at)
    assert progress.marks == {"decided": START_S + 1, "ready": START_S + 1, "active": START_S + 3}
    assert progress.reason == Reason("so", "x")


def test_a_handoff_that_comes_back_from_the_journal_knows_its_leavers_and_no_times_of_the_old_process() -> None:
    cost = RungCost(Rung.LIVE, CostParts(1.0, 0.25, 0.25, 0.0), 1.5, 2, ())
    measures = HandoffMeasures(cutover_step=12, lost_s=1.5, lost_parts=cost.parts, rung_costs=(cost,))
    mirror = opened().mirror.model_copy(update={"measures": measures})
    progress = from_mirror(mirror)
    said = progress.next_mirror(HandoffState.ACTIVE, "active", START_S).measures
    assert (said.lost_s, said.lost_parts, said.rung_costs) == (1.5, cost.parts, (cost,))
    progress = from_mirror(mirror)
    assert (progress.mirror, progress.notice_at, progress.leavers) == (mirror, None, frozenset(MEMBERS[3:]))
    lost = progress.lost_time
    assert (lost.since, lost.cutover_step, lost.lost_s, lost.known) == (START_S, 12, 1.5, False)
    assert from_mirror(mirror.model_copy(update={"source": None})).leavers == frozenset()
