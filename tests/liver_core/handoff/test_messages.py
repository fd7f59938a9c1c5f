"""Orders and Reports go through JSON unchanged, and what is wrong with one is said by field and rule. Pure."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from liver_core.handoff import (
    CutoverDeadlines,
    Decision,
    MessageError,
    Order,
    Phase,
    Reason,
    Report,
    Rung,
    Stage,
    WorldStage,
)
from liver_core.handoff.participant_events import OrderReceived, ParticipantState
from liver_core.layout import Member, decode, from_json, to_json
from tests.liver_core.handoff.samples import (
    DEADLINE,
    H1,
    WHY,
    A,
    B,
    C,
    order,
    participant_in,
    reports_in,
    roster,
    start,
)

HEADER = {
    "protocol_version",
    "agent_incarnation",
    "report_seq",
    "job_id",
    "handoff_id",
    "parent",
    "generation",
    "plan_revision",
    "plan_digest",
    "reason",
    "deadline_utc",
    "issued_at",
}


SENT_UTC = 1_700_000_000.0
"""The samples count from zero; what is sent is of this century."""


def sent(message: Order | Report) -> Any:
    """The message with the times that it has on its way."""
    return replace(message, deadline_utc=SENT_UTC + message.deadline_utc, issued_at=SENT_UTC + message.issued_at)


def report() -> Report:
    return reports_in(participant_in(ParticipantState.READY).handle(OrderReceived(order()), 3.0))[0]


@pytest.mark.parametrize("message", [order(), order(Phase.ABORT), start(), order(source=None, parent=0)])
def test_an_order_goes_through_json_unchanged(message: Order):
    assert decode(Order, json.dumps(to_json(sent(message)))) == sent(message)


def test_a_report_goes_through_json_unchanged():
    for message in (report(), replace(report(), reason=WHY, promise=None, decision=Decision.GO_REDO)):
        assert decode(Report, json.dumps(to_json(sent(message)))) == sent(message)


def test_both_messages_carry_every_field_that_was_promised_from_the_first_day():
    assert {field.name for field in fields(Order)} >= HEADER
    assert HEADER | {"stages"} <= {field.name for field in fields(Report)}
    assert set(to_json(order())["cutover"]) == {"target_s", "source_s", "store_s", "build_s"}
    assert set(to_json(Reason("text", "phase"))) == {"rank", "phase", "tile", "text", "node", "cause"}


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("protocol_version", 1, "protocol_version: must be 5, the sender speaks 1"),
        ("generation", 0, "generation: must be at least 1, is 0"),
        ("generation", True, "generation: must be a valid integer, is True"),
        ("plan_revision", "1", "plan_revision: must be a valid integer, is '1'"),
        ("target_revision", 2, "target_revision: must be at most 1, is 2"),
        ("phase", "go", "phase: must be 'prepare', 'permit', 'withdraw', 'retire' or 'abort', is 'go'"),
        ("handoff_id", "", "handoff_id: must not be empty"),
        ("handoff_id", "x" * 65, "handoff_id: must have at most 64 characters, has 65"),
        ("deadline_utc", float("inf"), "deadline_utc: must be a finite number, is inf"),
        ("deadline_utc", 100.0, "deadline_utc: must be at least 946684800, is 100.0"),
        ("cause", "a\0b", "cause: must not contain a NUL character"),
        ("deadline_utc", "soon", "deadline_utc: must be a valid number, is 'soon'"),
        ("store", {"host": "h", "port": 0}, r"store\.port: must be at least 1, is 0"),
        ("store", None, "store: must be an object, is None"),
        ("parent", 2, "generation: must be above parent 2, is 2"),
        (
            "cutover",
            {"target_s": 5, "source_s": 4, "store_s": 9, "build_s": 1},
            r"cutover\.target_s: needs 0 < target_s < source_s < store_s",
        ),
        ("reason", {"rank": 0, "phase": "p", "tile": ""}, r"reason\.text: is required"),
    ],
)
def test_a_wrong_field_of_an_order_is_named_with_its_rule(field: str, value: object, complaint: str):
    data = to_json(sent(order()))
    data[field] = value
    with pytest.raises(MessageError, match=complaint):
        from_json(Order, data)


def test_a_missing_and_an_unknown_field_are_named():
    data = to_json(sent(order()))
    del data["cause"]
    with pytest.raises(MessageError, match="cause: is required"):
        from_json(Order, data)
    with pytest.raises(MessageError, match="colour: is not a field of this message"):
        from_json(Order, to_json(sent(order())) | {"colour": "red"})


def test_rosters_must_belong_to_the_generations_and_the_job_of_the_order():
    with pytest.raises(MessageError, match=r"target\.generation: must be 3, is 2"):
        from_json(Order, to_json(sent(order())) | {"generation": 3})
    with pytest.raises(MessageError, match=r"source\.generation: must be parent 0, is 1"):
        from_json(Order, to_json(sent(order())) | {"parent": 0})
    with pytest.raises(MessageError, match=r"target\.job_id: must be other, is job"):
        from_json(Order, to_json(sent(order())) | {"job_id": "other"})


def test_a_roster_that_does_not_fit_its_layout_is_refused():
    data = to_json(sent(order()))
    data["target"]["members"].pop()
    with pytest.raises(MessageError, match="members"):
        from_json(Order, data)


def test_an_abort_needs_a_reason():
    with pytest.raises(MessageError, match="reason: is required when phase is abort"):
        from_json(Order, to_json(sent(order(Phase.ABORT))) | {"reason": None})


def test_a_report_has_a_bounded_number_of_stages():
    many = replace(report(), stages=tuple(WorldStage(g, 0, Stage.IDLE) for g in range(1, 6)))
    with pytest.raises(MessageError, match="stages: must have at most 4 items, has 5"):
        from_json(Report, to_json(sent(many)))


def test_something_that_is_no_object_is_refused():
    with pytest.raises(MessageError, match="message: must be an object, is a list"):
        from_json(Order, [])


def test_newer_reports_have_a_greater_key_also_after_a_restart_of_the_agent():
    before, after = replace(report(), report_seq=9), replace(report(), report_seq=1, agent_incarnation=2)
    assert after.order_key > before.order_key


def test_deadlines_that_do_not_grow_are_refused():
    with pytest.raises(MessageError, match="needs 0 < target_s < source_s < store_s, got 3, 2, 9"):
        CutoverDeadlines(3, 2, 9)
    with pytest.raises(MessageError, match="needs build_s > 0, got 0"):
        CutoverDeadlines(build_s=0)


def test_a_reason_reads_as_a_sentence():
    assert (
        str(Reason("hashes differ", "certificate", 3, "layer 2")) == "rank 3, certificate, tile layer 2: hashes differ"
    )
    assert str(Reason("another notice", "supersede")) == "supersede: another notice"


def test_only_an_order_with_a_living_source_takes_over():
    assert order().takes_over
    assert not order(rung=Rung.CHECKPOINT).takes_over
    assert not order(source=None, parent=0).takes_over
    assert order().handoff_id == H1


def test_what_a_rung_does_is_done_only_where_there_is_a_living_source():
    streaming = {Rung.LIVE, Rung.DROP_STEP}
    for rung in Rung:
        checkpoint = "step-5" if rung is Rung.CHECKPOINT else ""
        from_a_world, from_none = (order(rung=rung, checkpoint=checkpoint), order(rung=rung, source=None, parent=0))
        assert from_a_world.streams == (rung in streaming)
        assert from_a_world.rescues == (rung is Rung.RESCUE)
        assert not from_none.streams and not from_none.rescues


def test_who_has_a_part_in_an_order_and_which_rank_reasons_name():
    """Generation 1 on a and b goes to generation 2 on a and c; from c and a it would be another rank."""
    moved = order(target=roster(2, C, A))
    assert [moved.names(member) for member in (A, B, C, Member("d", 0))] == [True, True, True, False]
    assert [moved.rank_of(member) for member in (A, B, C, Member("d", 0))] == [1, 1, 0, 0]
    begun = order(source=None, parent=0)
    assert [begun.names(member) for member in (A, B)] == [True, False]
    assert begun.rank_of(B) == 0


def test_only_a_newcomer_to_a_rescue_may_pass_the_boundary_after_the_deadline():
    for rung in (Rung.LIVE, Rung.RESCUE):
        later_s = order().cutover.newcomer_s(rung)
        found = [order(rung=rung).boundary_by(member) - DEADLINE for member in (A, B, C)]
        assert found == [0.0, 0.0, later_s] and (later_s > 0) == (rung is Rung.RESCUE)
    assert order(source=None, parent=0, rung=Rung.RESCUE).boundary_by(C) == DEADLINE
