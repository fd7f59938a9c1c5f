"""Every message that an AWS account sends about machines, as it was documented or seen, and what it means."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.clouds.aws.events import EventRead, Hook, read_message

GOLDEN = Path(__file__).with_name("aws_events.json")
SPOT = json.loads(GOLDEN.read_text())["spot interruption"]["event"]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def summary(reading: EventRead) -> dict:
    """What a golden file says of a reading."""
    facts = reading.facts
    if reading.reservation is not None:
        kinds = "p5.48xlarge", "p6e-gb200.36xlarge", "trn2u.48xlarge"
        facts += tuple(reading.reservation.of_machine(f"i-{kind}", kind) for kind in kinds)
    found = {
        "facts": [
            {"machine": fact.provider_id, "kind": fact.kind.value, "said": fact.said_at.isoformat(),
             "deadline": fact.deadline_at and fact.deadline_at.isoformat(), "withdrawal": fact.is_withdrawal,
             "message": fact.message_id}
            for fact in facts
        ],
        "passed": reading.passed,
        "unread": reading.unread.reason if reading.unread else "",
        "hook": [*vars_of(reading.hook)] if reading.hook else [],
        "reservation": reading.reservation.reservation_id if reading.reservation else "",
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def test_no_machine_of_a_long_list_is_left_out():
    """A message of EventBridge has room for thousands of them."""
    health = json.loads(GOLDEN.read_text())["health, a scheduled change"]["event"]
    names = [f"i-{number:017x}" for number in range(3_000)]
    health["detail"]["affectedEntities"] = [{"entityValue": name} for name in names]
    assert [fact.provider_id for fact in read_message(json.dumps(health), "sqs-1").facts] == names


def vars_of(hook: Hook) -> tuple[str, ...]:
    return hook.group, hook.hook, hook.token, hook.provider_id


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()))
def test_each_message_means_what_its_golden_file_says(name, request):
    golden = json.loads(GOLDEN.read_text())
    event = golden[name]["event"]
    found = summary(read_message(event if isinstance(event, str) else json.dumps(event), "sqs-1"))
    if request.config.getoption("--rewrite"):
        golden[name]["means"] = found
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert found == golden[name]["means"]


def test_what_comes_through_sns_means_the_same():
    plain = read_message(json.dumps(SPOT), "sqs-1")
    wrapped = json.dumps({"Type": "Notification", "MessageId": "x", "Message": json.dumps(SPOT)})
    assert summary(read_message(wrapped, "sqs-2")) == summary(plain)
    assert read_message(wrapped, "sqs-2").facts[0].raw == wrapped


def test_the_machine_is_never_taken_from_the_arn():
    without = SPOT | {"detail": {"instance-action": "terminate"}}
    reading = read_message(json.dumps(without), "sqs-1")
    assert reading.unread is not None and reading.unread.reason.startswith("detail.instance-id: must be the id")


def test_a_state_that_is_no_word_is_refused_with_a_reason():
    stopped = {"detail-type": "EC2 Instance State-change Notification", "source": "aws.ec2"}
    detail = {"instance-id": SPOT["detail"]["instance-id"], "state": ["stopped"]}
    reading = read_message(json.dumps({**SPOT, **stopped, "detail": detail}), "sqs-1")
    assert reading.unread is not None and reading.unread.reason.startswith("detail.state: ")


@pytest.mark.parametrize("absent", ["account", "region", "version", "resources", "id"])
def test_what_emulators_and_some_partitions_leave_out_is_not_needed(absent):
    (fact,) = read_message(json.dumps({name: SPOT[name] for name in SPOT if name != absent}), "sqs-1").facts
    assert fact.provider_id == "i-0b662ef9931388ba0"
    assert fact.message_id == ("sqs-1" if absent == "id" else SPOT["id"])


@pytest.mark.parametrize("name", ["id", "account"])
def test_a_text_that_no_database_takes_makes_a_message_unreadable(name):
    for body in (json.dumps(SPOT | {name: "\ud800"}), json.dumps(SPOT | {name: "\ud800"}, ensure_ascii=False)):
        reading = read_message(body, "sqs-1")
        assert reading.unread is not None and "surrogates not allowed" in reading.unread.reason


def mutated(draw, value):
    """An event of which something is another value, or gone."""
    others = st.one_of(st.none(), st.integers(), st.text(max_size=20), st.lists(st.text(max_size=5), max_size=2))
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        return {**value, name: mutated(draw, value[name])}
    return draw(others)


@given(st.data())
def test_whatever_a_message_has_in_it_it_is_read_or_refused_with_a_reason(data):
    golden = json.loads(GOLDEN.read_text())
    event = golden[data.draw(st.sampled_from(sorted(golden)))]["event"]
    body = json.dumps(mutated(data.draw, event)) if data.draw(st.booleans()) else data.draw(st.text(max_size=200))
    reading = read_message(body, "sqs-1")
    assert reading.facts or reading.reservation or reading.passed or (reading.unread and reading.unread.reason)
    for fact in reading.facts:
        assert fact.said_at.tzinfo is not None and fact.provider_id.startswith("i-")
