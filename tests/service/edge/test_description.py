"""The API description: whole, committed, and true of what the service answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.protocol.errors import PROBLEM_MEDIA_TYPE
from tests.service.fake_agent import JOB

FILE = Path(__file__).parents[3] / "docs" / "openapi.json"


@pytest.fixture
def described(client) -> dict[str, Any]:
    return client.get("/api/v1/openapi.json").json()


def test_the_committed_description_is_that_of_the_service(described, request):
    """`python -m pytest tests/service/edge/test_description.py --rewrite` writes it anew."""
    described["info"]["version"] = "0"
    text = json.dumps(described, indent=1, sort_keys=True) + "\n"
    if request.config.getoption("--rewrite"):
        FILE.write_text(text)
    assert FILE.read_text() == text, "the API has changed: run this test with --rewrite, and commit docs/openapi.json"


def references(part: Any) -> Iterator[str]:
    match part:
        case {"$ref": str(name)}:
            yield name
        case dict():
            for inner in part.values():
                yield from references(inner)
        case list():
            for inner in part:
                yield from references(inner)


def test_no_reference_leads_nowhere(described):
    found = set(references(described))
    assert len(found) > 40
    for name in found:
        part = described
        for step in name.removeprefix("#/").split("/"):
            assert step in part, f"{name} leads nowhere"
            part = part[step]
    assert "$defs" not in json.dumps(described)


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_every_operation_documents_every_status_as_a_problem(described):
    for method, path, operation in operations(described):
        wanted = {"400", "429", "500", "503"} | ({"401", "403"} if path.startswith(("/api", "/agent")) else set())
        wanted |= {"404"} if "{" in path else set()
        wanted |= {"422"} if "parameters" in operation or "requestBody" in operation else set()
        wanted |= {"408", "409", "413"} if "requestBody" in operation else set()
        assert wanted <= operation["responses"].keys(), (method, path)
        for status in wanted - ({"503"} if path == "/readyz" else set()):
            found = operation["responses"][status]["$ref"].rpartition("/")[2]
            content = described["components"]["responses"][found]["content"]
            assert content == {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    assert "HTTPValidationError" not in json.dumps(described)


def test_the_body_of_a_job_asks_for_no_more_than_the_service_does(described):
    schema = described["paths"]["/api/v1/jobs"]["post"]["requestBody"]["content"]["application/yaml"]["schema"]
    fields = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert set(fields["required"]) == {"name", "model", "global_batch", "nodes", "stop"}
    assert set(fields["required"]) <= JOB.keys() <= fields["properties"].keys()
