"""One caller's share: schemathesis makes requests from the description, and judges every answer."""

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import schemathesis
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema
from schemathesis.specs.openapi.checks import negative_data_rejection

REQUEST_S = 30.0
STREAM_EVENTS = 1
FAILURES_KEPT = 100
BODY_CHARS_SHOWN = 2_000
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "nothing_invalid_is_accepted",
)  # fmt: skip

# The description says in words which years count: JSON Schema cannot.
schemathesis.openapi.format(
    "date-time",
    st.datetimes(datetime(2000, 1, 2), datetime(2099, 12, 30)).map(lambda moment: moment.isoformat() + "Z"),
)


@schemathesis.check
def nothing_invalid_is_accepted(ctx: Any, response: Any, case: Any) -> bool | None:
    """What breaks a rule of the description is rejected. Of a report, the part that breaks it is refused by name."""
    is_sync = case.operation.definition.raw["operationId"] == "sync"
    if is_sync and response.status_code == 200 and json.loads(response.content)["refusals"]:
        return None
    if response.status_code < 300 and _is_list_of_one(case.operation.definition.raw, case.query or {}):
        return None
    return negative_data_rejection(ctx, response, case)


def _is_list_of_one(operation: dict[str, Any], query: dict[str, Any]) -> bool:
    """Whether a single value was made up for a list in the query, which says a list of one in just that way. Its items
    were read by the same rules as those of a list."""
    return any(
        isinstance(query.get(parameter["name"]), str | int | float)
        for parameter in operation.get("parameters", ())
        for schema in (parameter.get("schema", {}), *parameter.get("schema", {}).get("anyOf", ()))
        if parameter["in"] == "query" and schema.get("type") == "array"
    )


@dataclass(slots=True)
class Tally:
    """What happened: answers by route and status, and what was wrong with them."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    shown: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Requests that were answered."""
        return self.answers.total()

    def add(self, event: Any) -> None:
        """One event of the engine."""
        if isinstance(event, events.NonFatalError | events.FatalError):
            self._fail(str(getattr(event, "label", "engine")), "error", str(getattr(event, "value", event)), None)
        elif isinstance(event, events.ScenarioFinished):
            for case_id, interaction in event.recorder.interactions.items():
                route = event.recorder.cases[case_id].value.operation.label
                if interaction.response is None:
                    self._fail(route, "no answer", "the service did not answer", interaction.request)
                    continue
                self.answers[route, interaction.response.status_code] += 1
                for check in event.recorder.checks.get(case_id, ()):
                    if check.status == Status.FAILURE:
                        failure = check.failure_info.failure if check.failure_info else None
                        what = f"{failure.title}: {failure.message}" if failure else ""
                        self._fail(route, check.name, what, interaction.request, interaction.response)

    def _fail(self, route: str, check: str, what: str, request: Any, response: Any = None) -> None:
        self.failures[route, check] += 1
        if len(self.shown) >= FAILURES_KEPT:
            return
        shown: dict[str, Any] = {"route": route, "check": check, "what": what[:BODY_CHARS_SHOWN]}
        if request is not None:
            body = (request.body or b"").decode(errors="replace")
            shown |= {"request": f"{request.method} {_place(request.uri)}", "body": body[:BODY_CHARS_SHOWN]}
        if response is not None:
            shown |= {"status": response.status_code, "answer": response.content.decode(errors="replace")[:500]}
        self.shown.append(shown)


@dataclass(frozen=True, slots=True)
class Share:
    """What one caller asks: `examples` drawn requests of each route whose path matches `paths`, and, with `borders`,
    first all those at the borders of the schema. Drawing goes on for `for_s` at most."""

    headers: dict[str, str]
    paths: str
    examples: int
    for_s: int
    borders: bool = True


def play(url: str, described: dict[str, Any], share: Share, tally: Tally, *, seed: int) -> None:
    """Ask, and add what came of it to the tally."""
    schema = schemathesis.openapi.from_dict(described, config=_config(url, share, seed))
    for event in from_schema(schema.include(path_regex=share.paths)).execute():
        tally.add(event)


def _config(url: str, share: Share, seed: int) -> SchemathesisConfig:
    return SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "max-time": share.for_s,
            "base-url": url,
            "headers": share.headers,
            "workers": 1,
            "continue-on-failure": True,
            "request-timeout": REQUEST_S,
            "max-stream-events": STREAM_EVENTS,
            "suppress-health-check": ["all"],
            "generation": {"max-examples": share.examples, "no-shrink": True},
            "phases": {"stateful": {"enabled": False}, "coverage": {"enabled": share.borders}},
            "checks": {"enabled": False} | {name: {"enabled": True} for name in CHECKS},
        }
    )


def _place(uri: str) -> str:
    parts = urlsplit(uri)
    return parts.path + (f"?{parts.query}" if parts.query else "")
