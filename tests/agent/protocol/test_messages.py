"""The wire contract: strict, bounded, the same after a round trip."""

import copy
import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from agent.protocol import peer, rank, sync, worker
from agent.protocol.jobfile import JobFile
from agent.protocol.values import HandoffCause, HandoffState, Placement
from liver_core.handoff import (
    CutoverDeadlines,
    Decision,
    HandoffId,
    Order,
    Phase,
    RankStage,
    Reason,
    Report,
    Rung,
    Stage,
    StoreAddress,
)
from liver_core.layout import Member, ParallelLayout, Roster
from tests.service.fake_agent import JOB

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROSTER = Roster(
    job_id="j-1",
    generation=1,
    layout=ParallelLayout(tp=2),
    members=(Member(node_id="a", slot=0), Member(node_id="b", slot=0)),
)
TARGET = replace(ROSTER, generation=2)
ID = uuid.uuid4()
ORDER = Order(
    job_id="j-1", handoff_id=HandoffId(str(ID)), parent=1, generation=2, plan_revision=1, plan_digest="d",
    phase=Phase.PREPARE, source=ROSTER, target=TARGET, target_revision=1, store=StoreAddress("h", 1), cause="notice",
    rung=Rung.LIVE, deadline_utc=NOW.timestamp(), cutover=CutoverDeadlines(), proposer_id="a", agent_incarnation=1,
    report_seq=1, issued_at=NOW.timestamp(),
)  # fmt: skip

REPORT = Report(
    job_id="j-1", handoff_id=HandoffId(str(ID)), parent=1, generation=2, plan_revision=1, plan_digest="d",
    member=Member("a", 0), stage=Stage.READY, stages=(), promise=None, active_generation=1, highest_generation=2,
    decision=Decision.UNDECIDED, agent_incarnation=1, report_seq=1, issued_at=NOW.timestamp(),
    deadline_utc=NOW.timestamp(),
)  # fmt: skip


def report(**parts) -> sync.SyncReport:
    node = sync.NodeInfo(
        node_id="a", provider=sync.Provider.AWS, slots=1, peer_url="http://a:1", private_address="127.0.0.1"
    )
    return sync.SyncReport(agent_version="1", agent_incarnation=ID, report_seq=1, issued_utc=NOW, node=node, **parts)


MIRROR = sync.HandoffMirror(
    handoff_id=ID, job_id="j-1", parent=1, generation=2, proposer="a", cause=HandoffCause.NOTICE,
    state=HandoffState.ACTIVE, source=ROSTER, target=TARGET, leaving=("c",), opened_utc=NOW, changed_utc=NOW,
    measures=sync.HandoffMeasures(phases_s={"prepare": 1.5}, pause_s=0.2, bytes_moved=12, extra={"tiles": 3.0}),
)  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        report(handoffs=(MIRROR,)),
        report(
            ranks=(
                sync.RankStatus(
                    job_id="j-1", generation=1, rank=0, slot=0, pid=7, stage=RankStage.FAILED, reason=Reason("x", "y")
                ),
            ),
            steps=(sync.StepRow(job_id="j-1", generation=1, step=3, seconds=0.5, finished_utc=NOW, loss=1.5),),
            checkpoints=(sync.CheckpointFact(job_id="j-1", generation=1, step=3, path="/c", finished_utc=NOW),),
        ),
        rank.Prepare(order=ORDER, clock_zero=1_700_000_000.0),
        peer.Envelope(
            sender="a", receiver="b", agent_incarnation=ID, job_id="j-1", issued_utc=NOW,
            body=peer.OrderBody(slot=3, order=ORDER),
        ),
        worker.RankSpec(
            node_id="b", slot=0, order=ORDER, spec=JobFile.model_validate(JOB), private_address="127.0.0.1",
            socket_path="/s", clock_zero=1_700_000_000.0,
        ),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_is_the_same_after_a_round_trip(message):
    assert type(message).model_validate_json(message.model_dump_json()) == message


def test_an_order_inside_another_message_is_checked_as_strictly_as_alone():
    content = json.loads(rank.Prepare(order=ORDER, clock_zero=1_700_000_000.0).model_dump_json())
    for path, value, complaint in (
        ("order.rung", "fast", "order.rung"),
        ("order.cutover.build_s", float("inf"), "order.cutover.build_s"),
        ("order.cutover.target_s", 40.0, "needs 0 < target_s < source_s < store_s"),
        ("order.target.members", [], "order.target.members"),
        ("order.generation", 1, "must be above parent 1"),
        ("order.colour", "red", "order.colour"),
        ("order.protocol_version", 1, "must be 5, the sender speaks 1"),
    ):
        *parents, name = path.split(".")
        part = changed = copy.deepcopy(content)
        for parent in parents:
            part = part[parent]
        part[name] = value
        with pytest.raises(ValidationError, match=complaint):
            rank.Prepare.model_validate_json(json.dumps(changed))


def test_an_unknown_field_is_refused_wherever_it_stands():
    content = json.loads(report(handoffs=(MIRROR,)).model_dump_json())
    content["handoffs"][0]["measures"]["new"] = 1
    with pytest.raises(ValidationError, match=r"handoffs.0.measures.new"):
        sync.SyncReport.model_validate_json(json.dumps(content))


@pytest.mark.parametrize(
    ("field", "value"),
    [("report_seq", "1"), ("report_seq", 0), ("agent_incarnation", "x"), ("issued_utc", "2026-01-01T00:00:00")],
)
def test_nothing_is_coerced(field, value):
    content = json.loads(report().model_dump_json()) | {field: value}
    with pytest.raises(ValidationError, match=field):
        sync.SyncReport.model_validate_json(json.dumps(content))


def test_lists_are_bounded():
    chunk = sync.LogChunk(job_id="j", generation=1, rank=0, offset=0, text="x")
    with pytest.raises(ValidationError, match="at most 64"):
        report(logs=(chunk,) * 65)
    with pytest.raises(ValidationError, match="at most 16384"):
        sync.LogChunk(job_id="j", generation=1, rank=0, offset=0, text="x" * 16_385)


def test_a_placement_has_one_slot_for_each_rank():
    with pytest.raises(ValidationError, match="members: TP2xPP2xDP1 needs 4 members, 2 given"):
        Placement(layout=ParallelLayout(tp=2, pp=2), members=tuple(ROSTER.members))
    with pytest.raises(ValidationError, match="a/0 holds more than one rank"):
        Placement(layout=ParallelLayout(tp=2), members=(ROSTER.members[0], ROSTER.members[0]))


@pytest.mark.parametrize(
    "event",
    [
        rank.Hello(job_id="j", generation=1, rank=0, pid=5, start_time=1.5, stage=RankStage.TRAINING),
        rank.StageReport(handoff_id=ID, generation=2, rank=0, stage=RankStage.READY, measures={"prepare_s": 1.0}),
        rank.StepReport(generation=1, step=4, seconds=0.5, loss=None),
        rank.Finished(step=9),
        rank.Failed(reason=Reason(text="out of memory", rank=0, phase="step")),
    ],
    ids=lambda event: event.type,
)
def test_rank_events_are_one_line_each_and_known_by_their_type(event):
    line = rank.encode_line(event)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert rank.decode_event(line) == event


def test_a_rank_command_of_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="dance"):
        rank.decode_command(b'{"type": "dance"}')
    assert rank.decode_command(b'{"type": "stop", "reason": "done"}') == rank.Stop(reason="done")


@pytest.mark.parametrize("ahead_s", [-300.0, 300.0])
def test_a_message_to_a_peer_names_every_time_by_the_clock_of_the_peer(ahead_s: float):
    def sent(body: peer.PeerBody) -> peer.Envelope:
        return peer.Envelope(sender="a", receiver="b", agent_incarnation=ID, job_id="j-1", issued_utc=NOW, body=body)

    by = timedelta(seconds=ahead_s)
    notice = sync.NoticeFact(
        node_id="a", kind=sync.NoticeKind.INTERRUPTION, source="aws-imds", deadline_utc=NOW + by, first_seen_utc=NOW
    )
    measured = peer.RankMeasures(measures={"ordered_at_utc": 1_700_000_000.0, "build_s": 2.0})
    for body in (peer.OrderBody(slot=3, order=ORDER), peer.NoticeBody(notice=notice)):
        assert peer.in_time_of(sent(body), 0.0) == sent(body)
        assert peer.in_time_of(peer.in_time_of(sent(body), ahead_s), -ahead_s) == sent(body)
    told = peer.in_time_of(sent(peer.OrderBody(slot=3, order=ORDER)), ahead_s)
    assert isinstance(told.body, peer.OrderBody) and told.issued_utc == NOW + by
    assert told.body.order == replace(
        ORDER, deadline_utc=ORDER.deadline_utc + ahead_s, issued_at=ORDER.issued_at + ahead_s
    )
    told = peer.in_time_of(sent(peer.NoticeBody(notice=notice)), ahead_s)
    assert isinstance(told.body, peer.NoticeBody)
    assert (told.body.notice.deadline_utc, told.body.notice.first_seen_utc) == (NOW + by + by, NOW + by)
    told = peer.in_time_of(sent(peer.ReportBody(report=REPORT, measured=measured)), ahead_s)
    assert isinstance(told.body, peer.ReportBody) and told.body.measured is not None
    assert told.body.measured.measures == {"ordered_at_utc": 1_700_000_000.0 + ahead_s, "build_s": 2.0}
    assert told.body.report.issued_at == REPORT.issued_at + ahead_s
