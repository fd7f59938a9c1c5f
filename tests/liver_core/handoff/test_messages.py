"""Orders and Reports go through JSON unchanged, and what is wrong with one is said by field and rule. Pure."""

import json
from dataclasses import fields, replace

import pytest

from liver_core.handoff import (
    CutoverDeadlines,
    Decision,
    MessageError,
    Order,
    Phase,
    Reason,
    Report,
    Stage,
    WorldStage,
)
from liver_core.handoff.participant_events import OrderReceived, ParticipantState
from tests.liver_core.handoff.samples import H1, WHY, order, participant_in, reports_in, restart_order

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


def report() -> Report:
    return reports_in(participant_in(ParticipantState.READY).handle(OrderReceived(order()), 3.0))[0]


@pytest.mark.parametrize("message", [order(), order(Phase.ABORT), restart_order(), order(source=None, parent=0)])
def test_an_order_goes_through_json_unchanged(message: Order):
    assert Order.from_json(json.loads(json.dumps(message.to_json()))) == message


def test_a_report_goes_through_json_unchanged():
    for message in (report(), replace(report(), reason=WHY, promise=None, decision=Decision.GO_REDO)):
        assert Report.from_json(json.loads(json.dumps(message.to_json()))) == message


def test_both_messages_carry_every_field_that_was_promised_from_the_first_day():
    assert {field.name for field in fields(Order)} >= HEADER
    assert HEADER | {"stages"} <= {field.name for field in fields(Report)}
    assert set(order().to_json()["cutover"]) == {"target_s", "source_s", "store_s", "build_s"}
    assert set(Reason("text", "phase").to_json()) == {"rank", "phase", "tile", "text"}


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("protocol_version", 2, "protocol_version: must be 1, the sender speaks 2"),
        ("generation", 0, r"generation: must be in 1\.\.2147483648, is 0"),
        ("generation", True, "generation: must be an integer, not bool"),
        ("plan_revision", "1", "plan_revision: must be an integer, not str"),
        ("target_revision", 2, "target_revision: must be at most 1, is 2"),
        ("phase", "go", "phase: must be one of prepare, permit, withdraw, retire, abort, is 'go'"),
        ("handoff_id", "", "handoff_id: must not be empty"),
        ("handoff_id", "x" * 65, "handoff_id: must have at most 64 characters, has 65"),
        ("deadline_utc", float("inf"), "deadline_utc: must be finite and not negative, is inf"),
        ("deadline_utc", "soon", "deadline_utc: must be a number of seconds, not str"),
        ("store", {"host": "h", "port": 0}, r"store\.port: must be in 1\.\.65535, is 0"),
        ("store", None, "store: must be an object, not NoneType"),
        ("parent", 2, "generation: must be above parent 2, is 2"),
        (
            "cutover",
            {"target_s": 5, "source_s": 4, "store_s": 9, "build_s": 1},
            "cutover: needs 0 < target_s < source_s < store_s",
        ),
        ("reason", {"rank": 0, "phase": "p", "tile": ""}, r"reason\.text: is required"),
    ],
)
def test_a_wrong_field_of_an_order_is_named_with_its_rule(field: str, value: object, complaint: str):
    data = order().to_json()
    data[field] = value
    with pytest.raises(MessageError, match=complaint):
        Order.from_json(data)


def test_a_missing_and_an_unknown_field_are_named():
    data = order().to_json()
    del data["cause"]
    with pytest.raises(MessageError, match="cause: is required"):
        Order.from_json(data)
    with pytest.raises(MessageError, match="colour: is not a field of this message"):
        Order.from_json(order().to_json() | {"colour": "red"})


def test_rosters_must_belong_to_the_generations_and_the_job_of_the_order():
    with pytest.raises(MessageError, match=r"target\.generation: must be 3, is 2"):
        Order.from_json(order().to_json() | {"generation": 3})
    with pytest.raises(MessageError, match=r"source\.generation: must be parent 0, is 1"):
        Order.from_json(order().to_json() | {"parent": 0})
    with pytest.raises(MessageError, match=r"target\.job_id: must be other, is job"):
        Order.from_json(order().to_json() | {"job_id": "other"})


def test_a_roster_that_does_not_fit_its_layout_is_refused():
    data = order().to_json()
    data["target"]["members"].pop()
    with pytest.raises(MessageError, match="members"):
        Order.from_json(data)


def test_an_abort_needs_a_reason():
    with pytest.raises(MessageError, match="reason: is required when phase is abort"):
        Order.from_json(order(Phase.ABORT).to_json() | {"reason": None})


def test_a_report_has_a_bounded_number_of_stages():
    many = replace(report(), stages=tuple(WorldStage(g, 0, Stage.IDLE) for g in range(1, 6)))
    with pytest.raises(MessageError, match="stages: must have at most 4 items, has 5"):
        Report.from_json(many.to_json())


def test_something_that_is_no_object_is_refused():
    with pytest.raises(MessageError, match="message: must be an object, not list"):
        Order.from_json([])


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
    assert not restart_order().takes_over
    assert not order(source=None, parent=0).takes_over
    assert order().handoff_id == H1
