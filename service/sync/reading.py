"""Reads a report out of its bytes. Each part that breaks a rule is refused by name, and the rest stands; only a report
without a readable envelope (its numbers, its node) is refused as a whole. Pure.
"""

from collections import defaultdict
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from agent.protocol import PROTOCOL_VERSION
from agent.protocol.errors import FieldProblem, version_problem
from agent.protocol.plain_rules import rule_in_words
from agent.protocol.sync import Refusal, SyncReport
from liver_core.layout.limits import NAME_CHARS_MAX, fitting
from service.problems import ProblemError, field_problems, invalid

ERRORS_MAX = 20_000
"""More errors than this in one report are not listed: it is refused as a whole."""
_WHOLE = -1
"""For the index of an element: the whole part is wrong."""
# What names an element of each part for people, and for the agent that has to forget it.
_NAMED_BY = {
    "notices": ("node_id", "kind", "source"),
    "ranks": ("job_id", "generation", "rank"),
    "steps": ("job_id", "generation", "step"),
    "handoffs": ("handoff_id",),
    "declined": ("handoff_id",),
    "logs": ("job_id", "generation", "rank", "offset"),
    "checkpoints": ("job_id", "path"),
    "stores": ("job_id", "generation"),
    "finished": ("job_id", "generation"),
    "answering": ("job_id", "node_id"),
    "metrics": ("job_id", "generation", "step"),
    "wires": ("job_id", "source", "target"),
    "peer_keys": ("job_id",),
}
_OF_NODE = ("notice_source", "provider_id", "zone")
"""What of the node itself may be wrong without the rest of its report being so."""
_JSON: TypeAdapter[Any] = TypeAdapter(Any)


class Reading(NamedTuple):
    """What could be read of a report, and what of it was refused."""

    report: SyncReport
    refusals: tuple[Refusal, ...] = ()


def read_report(body: bytes) -> Reading:
    """The report. Raises 409 for another protocol version, before any other error, and 422 where its envelope breaks a
    rule. The wire format is strict JSON: a time is a string there, but "1" is not 1."""
    try:
        report = SyncReport.model_validate_json(body)
    except ValidationError as error:
        return _without_wrong_parts(_fields(body), error)
    # For the schema an absent version means the present one; here it is an error.
    if report.protocol_version != PROTOCOL_VERSION or "protocol_version" not in report.model_fields_set:
        _fields(body)
    return Reading(report)


def _fields(body: bytes) -> dict[str, Any]:
    """The fields as plain JSON. Raises for a body that is no JSON and for a wrong version."""
    try:
        seen = _JSON.validate_json(body)
    except ValidationError as error:
        raise invalid(FieldProblem(field="(whole)", rule=f"must be JSON: {error.errors()[0]['msg']}"[:500])) from None
    version = seen.get("protocol_version") if isinstance(seen, dict) else None
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise ProblemError(version_problem(str(version)[:80]))
    return seen


def _without_wrong_parts(fields: dict[str, Any], error: ValidationError) -> Reading:
    if error.error_count() > ERRORS_MAX:
        rule = f"breaks {error.error_count()} rules, more than {ERRORS_MAX}"
        raise invalid(FieldProblem(field="(whole)", rule=rule)) from None
    wrong: dict[str, dict[int, str]] = defaultdict(dict)
    for item in error.errors(include_url=False, include_input=False):
        part, index, place = _part_of(item["loc"])
        if part is None:
            raise invalid(*field_problems(error)) from None
        reason = f"{'.'.join(map(str, place))}: {rule_in_words(item)}" if place else rule_in_words(item)
        wrong[part].setdefault(index, fitting(reason))
    refusals = [
        Refusal(part=part, key=_key(part, index, fields), reason=reason)
        for part, found in wrong.items()
        for index, reason in sorted(found.items())
        if index == _WHOLE or _WHOLE not in found
    ]
    for part, found in wrong.items():
        _take_out(fields, part, set(found))
    try:
        return Reading(SyncReport.model_validate_json(_JSON.dump_json(fields)), tuple(refusals))
    except ValidationError as rest:
        raise invalid(*field_problems(rest)) from None


def _part_of(place: tuple[int | str, ...]) -> tuple[str | None, int, tuple[int | str, ...]]:
    """The part that an error lies in, the index of its element, and the place in that. No part: the envelope."""
    match place:
        case ("node", str(part), *rest) if part in _OF_NODE:
            return part, _WHOLE, tuple(rest)
        case (str(part), int(index), *rest) if part in _NAMED_BY:
            return part, index, tuple(rest)
        case (str(part), *rest) if part in _NAMED_BY:
            return part, _WHOLE, tuple(rest)
    return None, _WHOLE, place


def _take_out(fields: dict[str, Any], part: str, wrong: set[int]) -> None:
    if part in _OF_NODE:
        fields["node"][part] = None
    elif _WHOLE in wrong:
        fields[part] = []
    else:
        fields[part] = [item for index, item in enumerate(fields[part]) if index not in wrong]


def _key(part: str, index: int, fields: dict[str, Any]) -> str:
    if index == _WHOLE:
        return "(whole)"
    element = fields[part][index]
    known = [element[name] for name in _NAMED_BY[part] if name in element] if isinstance(element, dict) else []
    words = [str(value)[:NAME_CHARS_MAX] for value in known if isinstance(value, str | int)]
    return fitting("/".join(words), NAME_CHARS_MAX) or f"number {index}"
