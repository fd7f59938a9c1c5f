"""One page of a list: up to `limit` rows, and behind them a cursor with which the next request goes on.

The cursor names the last row by an indexed key: no page costs more than the first, and rows that come or go meanwhile
shift nothing. It is checked, so that a mistake is named, but no secret: a made-up one only begins elsewhere.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from fastapi import Depends, Query, Request, Response
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Select, literal, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from agent.protocol.errors import FieldProblem
from agent.protocol.values import Utc
from liver_core.layout.limits import Bound, Text
from service.problems import invalid

CURSOR_CHARS_MAX = 1_000
BATCH_ROWS = 200
"""That are read at once where a page is chosen from what rows mean."""
ROWS_AT_ONCE = 500
"""Of a page of many short rows, so many are read, and written as JSON, at a time: neither lets another thread have the
interpreter before it is done."""
_TYPES: dict[type, Any] = {datetime: Utc, str: Text, int: Annotated[int, Bound(ge=-(2**63), le=2**63 - 1)], UUID: UUID}
_RULE = "must be the one in the Link header of the page before, with the same filters"
T = TypeVar("T")
Columns = tuple[InstrumentedAttribute[Any], ...]


@dataclass(frozen=True, slots=True)
class Pages:
    """Which page of a list is wanted. `about`: its address and filters, to which a cursor belongs; `announce` gets the
    cursor of the next page, if there is one."""

    limit: int
    cursor: str | None = None
    about: str = ""
    announce: Callable[[str], object] = lambda cursor: None

    def newest(self, session: Session, statement: Select[Any], *key: InstrumentedAttribute[Any]) -> list[Any]:
        """The rows of this page, the greatest `key` first. Raises 422 for a cursor that is none of this list."""
        if self.cursor is not None:
            statement = statement.where(tuple_(*key) < self._place(key))
        return self._page(
            session.scalars(statement.order_by(*(column.desc() for column in key)).limit(self._most)), key
        )

    def oldest(self, session: Session, statement: Select[Any], *key: InstrumentedAttribute[Any]) -> Iterator[Any]:
        """The same, the least `key` first. Rows are read some at a time, as they are asked for, and the cursor is
        announced with the last of them: whoever keeps none of many rows never makes others wait for the interpreter."""
        statement = statement.order_by(*key)
        behind = tuple_(*key) > self._place(key) if self.cursor is not None else None
        left = self.limit
        while True:
            most = min(left, ROWS_AT_ONCE)
            found = session.scalars((statement if behind is None else statement.where(behind)).limit(most + 1)).all()
            rows, has_more, left = found[:most], len(found) > most, left - most
            if has_more and not left:
                self._announce_behind(rows[-1], key)
            yield from rows
            if not has_more or not left:
                return
            behind = tuple_(*key) > _place_of(rows[-1], key)

    def newest_kept(
        self,
        session: Session,
        statement: Select[Any],
        key: InstrumentedAttribute[Any],
        *,
        keep: Callable[[Sequence[Any]], Sequence[T | None]],
        read_max: int,
    ) -> list[T]:
        """A page of what `keep` makes of rows, the greatest `key` first, where a database cannot choose them. `keep`
        gets a batch of rows and answers each with what is shown of it, or with None. At most `read_max` rows are read,
        to the next whole batch: the page may then be short, or empty, although the list goes on behind it. Raises 422
        for a cursor that is none of this list."""
        statement = statement.order_by(key.desc()).limit(BATCH_ROWS)
        behind = tuple_(key) < self._place((key,)) if self.cursor is not None else None
        kept: list[T] = []
        last = read = None
        for _ in range(-(-read_max // BATCH_ROWS)):
            rows = session.scalars(statement if behind is None else statement.where(behind)).all()
            for row, shown in zip(rows, keep(rows), strict=True):
                if shown is not None and len(kept) == self.limit:
                    self._announce_behind(last, (key,))
                    return kept
                if shown is not None:
                    kept.append(shown)
                    last = row
            if len(rows) < BATCH_ROWS:
                return kept
            read = rows[-1]
            behind = key < getattr(read, key.key)
        self._announce_behind(read, (key,))
        return kept

    @property
    def _most(self) -> int:
        # One more than is shown: whether there is a next page.
        return self.limit + 1

    def _page(self, found: Any, key: Columns) -> list[Any]:
        rows = found.all()
        if len(rows) > self.limit:
            self._announce_behind(rows[self.limit - 1], key)
        return rows[: self.limit]

    def _announce_behind(self, last: Any, key: Columns) -> None:
        self.announce(self._cursor_behind([getattr(last, column.key) for column in key]))

    def _cursor_behind(self, values: Sequence[Any]) -> str:
        written = [value if isinstance(value, int) else _text(value) for value in values]
        content = json.dumps([self._check(written), *written], separators=(",", ":"))
        return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")

    def _place(self, key: Columns) -> Any:
        assert self.cursor is not None
        try:
            padded = self.cursor.encode() + b"=" * (-len(self.cursor) % 4)
            check, *written = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
            if check != self._check(written) or len(written) != len(key):
                raise ValueError
            kinds = [column.type.python_type for column in key]
            values = [
                TypeAdapter(_TYPES[kind]).validate_python(item) for kind, item in zip(kinds, written, strict=True)
            ]
        except (ValueError, TypeError, RecursionError, ValidationError):
            raise invalid(FieldProblem(field="cursor", rule=_RULE)) from None
        return _as_tuple(values, key)

    def _check(self, written: Sequence[Any]) -> str:
        return hashlib.sha256(json.dumps([self.about, written]).encode()).hexdigest()[:16]


def paged(usual: int, most: int) -> Any:
    """The parameters of a list that has pages."""

    # Does not block: a coroutine needs no thread.
    async def pages(
        request: Request,
        response: Response,
        limit: Annotated[int, Query(ge=1, le=most, description="Rows of a page at most.")] = usual,
        cursor: Annotated[
            str | None,
            Query(
                min_length=1,
                max_length=CURSOR_CHARS_MAX,
                pattern="^[A-Za-z0-9_-]*$",
                description='Goes on behind another page: take the address in that one\'s Link header (rel="next").',
            ),
        ] = None,
    ) -> Pages:
        filters = sorted(item for item in request.query_params.multi_items() if item[0] not in ("limit", "cursor"))
        path = request.url.path

        def announce(following: str) -> None:
            query = urlencode([*filters, ("limit", limit), ("cursor", following)])
            response.headers["Link"] = f'<{path}?{query}>; rel="next"'

        return Pages(limit, cursor, json.dumps([path, filters]), announce)

    return Depends(pages)


PagesOf = Annotated[Pages, paged(usual=100, most=1_000)]
ManyPagesOf = Annotated[Pages, paged(usual=1_000, most=20_000)]
"""Of short rows that are many, as nodes and steps."""


def in_batches(rows: Iterable[T]) -> Iterator[list[T]]:
    """The rows, some at a time, as they are asked for."""
    coming = iter(rows)
    while batch := list(islice(coming, ROWS_AT_ONCE)):
        yield batch


def _place_of(row: Any, key: Columns) -> Any:
    return _as_tuple([getattr(row, column.key) for column in key], key)


def _as_tuple(values: Sequence[Any], key: Columns) -> Any:
    return tuple_(*(literal(value, column.type) for value, column in zip(values, key, strict=True)))


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
