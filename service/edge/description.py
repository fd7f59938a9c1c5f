"""The API description: what FastAPI finds in the routes, completed by what it cannot see there. Pure.

Bodies that are read by hand have their schemas among the components, and every status that a request can meet is
documented with the one error body.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from agent.protocol.errors import PROBLEM_MEDIA_TYPE, Problem
from service.edge.credentials import REASON, REASON_CHARS_MAX
from service.edge.routes import KEY, KEY_PATTERN

_COMPONENT = "#/components/schemas/{model}"
_MEANINGS = {
    400: "What was sent is no plain HTTP/1.1 request.",
    401: "No token, or one that is unknown, expired or revoked.",
    403: "The token's role may not do this.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "The present state does not allow this; `code` says more.",
    412: "It was changed since the answer whose ETag If-Match names.",
    413: "The body is too large. It was not read.",
    422: "Fields break rules; `errors` names each with its rule.",
    429: "Too many requests with this token. Try again after Retry-After seconds.",
    500: "An error in the service, which its log names as `detail` does.",
    503: "The service or its database cannot serve now. Unless `detail` says otherwise, nothing was changed; try again "
    "after Retry-After seconds.",
}
_KEY = {
    "name": KEY,
    "in": "header",
    "schema": {"type": "string", "pattern": KEY_PATTERN},
    "description": "Sent again under it by the same token within 24 hours, the same request is not carried out again: "
    "it gets the answer of the first one. One that failed has changed nothing, and is tried again.",
}
_WHY = {
    "name": REASON,
    "in": "header",
    "schema": {"type": "string"},
    "description": f"Why, in at most {REASON_CHARS_MAX} characters, percent-encoded UTF-8: it stands in the audit log.",
}
_KNOWN = {
    "name": "If-None-Match",
    "in": "header",
    "schema": {"type": "string"},
    "description": "ETags of earlier answers: where the answer would be one of them, it is not sent.",
}
_TAG = {
    "schema": {"type": "string"},
    "description": "Of the whole answer; of what can be changed, its part before the dot is of what people have set.",
}
_NEXT_PAGE = {"schema": {"type": "string"}, "description": 'The next page, with rel="next". Absent at the last one.'}
_HEADERS = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}


def describe(
    app: FastAPI, bodies: Mapping[str, type[BaseModel]], events: Sequence[type[BaseModel]] = ()
) -> dict[str, Any]:
    """The whole description. `bodies`: by operation id, what a route reads out of its body by itself. `events`: what a
    stream sends."""
    described = get_openapi(
        title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes,
        tags=app.openapi_tags,
    )  # fmt: skip
    components = described.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    names = _add_schemas(schemas, [*bodies.values(), Problem])
    _add_sent(schemas, events)
    components["responses"] = {f"Problem{status}": _response(status, names[Problem]) for status in _MEANINGS}
    for path, method, operation in _operations(described):
        if method != "get" and path.startswith("/api/") and "security" in operation:
            more = [_KEY, _WHY] if method == "post" else [_WHY]
            operation.setdefault("parameters", []).extend(more)
        if model := bodies.get(operation["operationId"]):
            for content in operation["requestBody"]["content"].values():
                content["schema"] = {"$ref": _COMPONENT.format(model=names[model])}
        if method == "get" and path.startswith("/api/") and _reads_one(operation):
            operation.setdefault("parameters", []).append(_KNOWN)
            operation["responses"]["200"]["headers"] = {"ETag": _TAG}
            operation["responses"]["304"] = {"description": "The caller has this answer.", "headers": {"ETag": _TAG}}
        if any(parameter["name"] == "cursor" for parameter in operation.get("parameters", ())):
            operation["responses"]["200"]["headers"] = {"Link": _NEXT_PAGE}
        for status in _statuses(path, operation):
            if status == 422 or str(status) not in operation["responses"]:
                operation["responses"][str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
    return described


def _operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _reads_one(operation: dict[str, Any]) -> bool:
    """Whether it answers with one thing, and not with a list or a stream."""
    answer = operation["responses"]["200"]["content"].get("application/json")
    return answer is not None and answer["schema"].get("type") != "array"


def _statuses(path: str, operation: dict[str, Any]) -> list[int]:
    found = [400, 429, 500, 503]
    if "security" in operation or path.startswith("/api/"):
        found += [401, 403]
    if "{" in path:
        found += [409]
    if "{" in path or any(parameter["name"].endswith("_id") for parameter in operation.get("parameters", ())):
        found += [404]
    if any(parameter["name"] == "if-match" for parameter in operation.get("parameters", ())):
        found += [412]
    if "requestBody" in operation:
        found += [408, 409, 413]
    if "requestBody" in operation or "parameters" in operation:
        found += [422]
    return sorted(set(found))


def _response(status: int, problem: str) -> dict[str, Any]:
    content = {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": _COMPONENT.format(model=problem)}}}
    response: dict[str, Any] = {"description": _MEANINGS[status], "content": content}
    if name := _HEADERS.get(status):
        response["headers"] = {name: {"schema": {"type": "string"}}}
    return response


def _add_schemas(schemas: dict[str, Any], models: list[type[BaseModel]]) -> dict[type[BaseModel], str]:
    """Add the models, and what they are made of; returns their names. What FastAPI has under the same name in another
    shape, since answers have more fields than requests need, is called Input here."""
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=_COMPONENT)
    new = found["$defs"]
    refers = {name: {other for other in new if _ref(other) in json.dumps(schema)} for name, schema in new.items()}
    clashing, before = {name for name, schema in new.items() if schemas.get(name, schema) != schema}, set()
    while clashing != before:
        before, clashing = clashing, clashing | {name for name in new if refers[name] & clashing}
    text = json.dumps(new)
    clashing &= schemas.keys()
    for name in clashing:
        text = text.replace(_ref(name), _ref(name + "Input"))
    schemas.update({name + "Input" * (name in clashing): schema for name, schema in json.loads(text).items()})
    return {model: model.__name__ + "Input" * (model.__name__ in clashing) for model in models}


def _add_sent(schemas: dict[str, Any], models: Sequence[type[BaseModel]]) -> None:
    """Add what is only sent, and what it is made of, where it is not there."""
    _, found = models_json_schema([(model, "serialization") for model in models], ref_template=_COMPONENT)
    for name, schema in found.get("$defs", {}).items():
        schemas.setdefault(name, schema)


def _ref(name: str) -> str:
    return f'"{_COMPONENT.format(model=name)}"'
