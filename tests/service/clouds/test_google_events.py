"""Every message that a GCP project sends about machines, as it is documented, and what it means; tokens and cursors."""

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.clouds.gcp.log_entries import LogRead, read_operation, read_pulled, read_push
from service.clouds.gcp.operation_list import OVERLAP, advance, filter_since, since_of
from service.clouds.gcp.push_tokens import PushRefused, check_claims, take_apart

GOLDEN = Path(__file__).with_name("gcp_events.json")
NOW = datetime(2026, 11, 20, 17, 0, tzinfo=UTC)


def summary(reading: LogRead) -> dict:
    """What a golden file says of a reading."""
    found = {
        "facts": [
            {"machine": fact.provider_id, "kind": fact.kind.value, "said": fact.said_at.isoformat(),
             "deadline": fact.deadline_at and fact.deadline_at.isoformat(), "channel": fact.channel,
             "message": fact.message_id}
            for fact in reading.facts
        ],
        "passed": reading.passed,
        "unread": reading.unread.reason if reading.unread else "",
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def read(case: dict) -> LogRead:
    if "operation" in case:
        return read_operation(case["operation"])
    if "push" in case:
        return read_push(json.dumps(case["push"]).encode(), "digest")
    entry = case["entry"] if isinstance(case["entry"], str) else json.dumps(case["entry"])
    return read_pulled({"data": base64.b64encode(entry.encode()).decode(), "messageId": "m-1"}, "ack-1")


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()))
def test_each_message_means_what_its_golden_file_says(name, request):
    golden = json.loads(GOLDEN.read_text())
    found = summary(read(golden[name]))
    if request.config.getoption("--rewrite"):
        golden[name]["means"] = found
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    assert found == golden[name]["means"]


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
    case = dict(golden[data.draw(st.sampled_from(sorted(golden)))])
    for kind in ("entry", "push", "operation"):
        if kind in case:
            changed = mutated(data.draw, case[kind])
            case[kind] = changed if kind != "operation" or isinstance(changed, dict) else {}
    reading = read(case)
    assert reading.facts or reading.passed or (reading.unread and reading.unread.reason)
    for fact in reading.facts:
        assert fact.said_at.tzinfo is not None and fact.provider_id.isdigit()


def test_an_operation_whose_type_is_no_word_is_none_of_ours():
    assert read_operation({"id": "1", "operationType": ["compute.instances.preempted"]}).passed


@given(st.binary(max_size=200))
def test_any_body_of_a_push_is_read_or_refused_with_a_reason(body):
    reading = read_push(body, "digest")
    assert reading.facts or reading.passed or (reading.unread and reading.unread.reason)


@given(st.text(max_size=200) | st.lists(st.binary(max_size=40).map(base64.b64encode).map(bytes.decode)).map(".".join))
def test_what_is_no_token_is_refused(token):
    with pytest.raises(PushRefused) as refused:
        take_apart(token)
    assert refused.value.status == 401


@pytest.mark.parametrize("begins, ends", [
    (0, 10**400), (-(10**400), 10**400), (10**400, 1e300), (1e308, 1.0), (float("nan"), 1.0), (0, float("inf")),
    ("0", 1),
], ids=map(str, range(7)))  # fmt: skip
def test_a_token_whose_times_are_none_is_refused(begins, ends):
    claims = {"iss": "accounts.google.com", "aud": "a", "email": "e", "email_verified": True}
    with pytest.raises(PushRefused, match="iat, exp") as refused:
        check_claims(claims | {"iat": begins, "exp": ends}, audience="a", account="e", now=NOW)
    assert refused.value.status == 401


@pytest.mark.parametrize("name", ["insertId", "timestamp"])
def test_a_text_that_no_database_takes_makes_a_message_unreadable(name):
    golden = json.loads(GOLDEN.read_text())
    event = next(case["entry"] for case in golden.values() if isinstance(case.get("entry"), dict))
    reading = read_push(json.dumps(event | {name: "\ud800"}).encode(), "digest")
    assert reading.unread is not None and "surrogates not allowed" in reading.unread.reason


looks = st.lists(st.lists(st.integers(0, 39), max_size=12), min_size=1, max_size=8)


@given(looks, st.lists(st.integers(0, 600), min_size=40, max_size=40), st.lists(st.booleans(), min_size=8, max_size=8))
def test_no_operation_is_new_twice_and_none_within_the_overlap_is_left_out(shown, ages_s, wholes):
    """`shown`: which operations each look finds, of those that its filter takes."""
    until, recent, told = None, (), set()
    for found, is_whole in zip(shown, wholes, strict=False):
        since = since_of(until, NOW)
        at = {number: NOW - timedelta(seconds=ages_s[number]) for number in found}
        listed = [
            {"id": str(number), "operationType": "compute.instances.preempted", "insertTime": at[number].isoformat()}
            for number in found if at[number] >= since
        ]  # fmt: skip
        before = until
        progress = advance(listed, inserted_until=until, recent=recent, is_whole=is_whole)
        until, recent = progress.inserted_until, progress.recent
        new = {one["id"] for one in progress.new}
        assert not new & told
        told |= new
        assert {one["id"] for one in listed} <= told
        assert before is None or (until is not None and until >= before)
        assert is_whole or until == before


def test_the_list_is_read_from_a_little_before_where_it_ended_and_never_from_long_ago():
    assert since_of(NOW, NOW) == NOW - OVERLAP
    assert since_of(NOW - timedelta(days=3), NOW) == NOW - timedelta(hours=2)
    assert filter_since(NOW).endswith('AND (insertTime >= "2026-11-20T17:00:00Z")')
