"""What an error says that a user has caused."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from service import problems
from service.jobs.schemas import ResumeJob

OF_TYPE = ("Content-Type", "must be application/json for a request with a body")


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        ("", '{"steps": 5}', OF_TYPE),
        ("text/plain", '{"steps": 5}', OF_TYPE),
        ("application/json", "[5]", ("(whole)", "must be a mapping of fields")),
    ],
)
def test_a_body_that_is_not_said_to_be_json_is_refused_for_its_type(kind, body, problem):
    app = FastAPI()
    problems.install(app)

    @app.post("/resume")
    def _resume(how: ResumeJob) -> None: ...

    answer = TestClient(app).post("/resume", content=body, headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 422
    assert [(error["field"], error["rule"]) for error in answer.json()["errors"]] == [problem]
