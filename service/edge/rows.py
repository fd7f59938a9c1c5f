"""A list of many rows as the body of an answer, written by whoever reads them: in a thread, and some at a time.

FastAPI would write it in the event loop, all at once. Agents' requests would wait for either, since whoever writes JSON
keeps the interpreter until it is done.
"""

from collections.abc import Iterable
from functools import cache

from fastapi import Response
from pydantic import BaseModel, TypeAdapter

from service.paging import in_batches


def answer_with(rows: Iterable[BaseModel], kind: type[BaseModel], response: Response) -> Response:
    """What FastAPI would make of a list of this kind of rows, which are asked for as they are written. `response`: the
    one that FastAPI hands to the route, for its headers."""
    parts = [_adapter(kind).dump_json(batch, by_alias=True)[1:-1] for batch in in_batches(rows)]
    answer = Response(b"[" + b",".join(parts) + b"]", media_type="application/json")
    answer.headers.raw.extend(response.headers.raw)
    return answer


@cache
def _adapter(kind: type[BaseModel]) -> TypeAdapter[list[BaseModel]]:
    return TypeAdapter(list[kind])  # type: ignore[valid-type]
