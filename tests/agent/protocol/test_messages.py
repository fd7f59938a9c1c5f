"""The wire contract: strict, bounded, the same after a round trip."""

import json
import uuid
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from agent.protocol import peer, rank, sync
from agent.protocol.values import (
    HandoffCause,
    HandoffState,
    Layout,
    Member,
    Placement,
    RankStage,
    Reason,
    Roster,
    StoreAddress,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROSTER = Roster(
    job_id="j-1",
    generation=1,
    layout=Layout(tp=2),
    members=(Member(node_id="a", slot=0), Member(node_id="b", slot=0)),
)
TARGET = ROSTER.model_copy(update={"generation": 2})
ID = uuid.uuid4()


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
                    job_id="j-1", generation=1, rank=0, slot=0, pid=7, stage=RankStage.FAILED, reason=Reason(text="x")
                ),
            ),
            steps=(sync.StepRow(job_id="j-1", generation=1, step=3, seconds=0.5, finished_utc=NOW, loss=1.5),),
            checkpoints=(sync.CheckpointFact(job_id="j-1", generation=1, step=3, path="/c", finished_utc=NOW),),
        ),
        rank.Prepare(
            handoff_id=ID, parent=1, generation=2, plan_revision=1, source=ROSTER, target=TARGET,
            target_revision=1, store=StoreAddress(host="h", port=1), deadline_utc=NOW,
            cutover=rank.CutoverLimits(target_s=20.0, source_s=30.0, store_s=60.0, build_s=120.0),
        ),
        peer.Envelope(
            sender="a", receiver="b", agent_incarnation=ID, job_id="j-1", issued_utc=NOW, kind=peer.PeerKind.ORDER,
            body={"phase": "prepare"},
        ),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_is_the_same_after_a_round_trip(message):
    assert type(message).model_validate_json(message.model_dump_json()) == message


def test_cutover_limits_out_of_order_are_refused():
    with pytest.raises(ValidationError, match=r"target_s < source_s < store_s must hold, are 20\.0, 20\.0, 60\.0"):
        rank.CutoverLimits(target_s=20.0, source_s=20.0, store_s=60.0, build_s=120.0)


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
    with pytest.raises(ValidationError, match="members must be 4 for layout TP2xPP2xDP1, are 2"):
        Placement(layout=Layout(tp=2, pp=2), members=ROSTER.members)
    with pytest.raises(ValidationError, match="every slot at most once"):
        Placement(layout=Layout(tp=2), members=(ROSTER.members[0], ROSTER.members[0]))


def test_the_wire_form_of_a_roster_is_that_of_the_core():
    core = pytest.importorskip("liver_core.layout")
    content = json.loads(ROSTER.model_dump_json())
    assert core.Roster.from_json(content).to_json() == content
    for layout in (Layout(), Layout(tp=2, pp=3, dp=4), Layout(ep=2, cp=2, vpp=2, dp=2, pp=2, tp=2)):
        assert str(core.ParallelLayout.from_json(layout.model_dump())) == str(layout)


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
