"""What counts as wrong in a play of `make fuzz-api`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("schemathesis")

from tests.fuzz.play import _is_list_of_one
from tests.fuzz.run import logged

NAMES = {"name": "job_id", "in": "query", "schema": {"anyOf": [{"type": "array"}, {"type": "null"}]}}
LIMIT = {"name": "limit", "in": "query", "schema": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}


@pytest.mark.parametrize(
    ("query", "is_one"),
    [
        ({"job_id": False}, True),
        ({"job_id": "a"}, True),
        ({"job_id": ["a"]}, False),
        ({"limit": "x"}, False),
        ({}, False),
    ],
)
def test_a_single_value_in_a_query_is_a_list_of_one_where_a_list_is_wanted(query: dict[str, Any], is_one: bool) -> None:
    assert _is_list_of_one({"parameters": [NAMES, LIMIT]}, query) is is_one


def test_errors_in_the_log_are_found_and_what_became_of_a_job_is_none(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text("x INFO service.reconcilers.jobs: job a: settle: 3 starts in a row failed; the last one: too long\n")
    place = cast(Any, SimpleNamespace(log=log))
    assert logged(place) == []
    log.write_text(log.read_text() + "x ERROR service.what_if.replaying: a replay ended with 1\n")
    assert len(logged(place)) == 1
