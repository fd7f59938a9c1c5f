"""Rows as text: for a terminal so many characters wide, or for a pipe. Pure.

On a terminal no word is broken: columns are folded between words, the less important ones stand beneath their row, and
where even that does not fit each row becomes a block of lines. In a pipe a row is one line of whole values and tabs.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

GAP = 2
LAST_COLUMN_LEAST = 40
"""A last column of sentences stands beside the others where it has at least this much room."""
SENTENCE_LINES_MAX = 2
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_PARTS = re.compile(r"[^-._]+[-._]*|[-._]+")


@dataclass(frozen=True, slots=True)
class Column:
    """`right`: figures, never folded. `below`: stands beneath the row where the line is too short for all, behind its
    `label`. `parts`: a long name, which may be folded behind its dashes, dots and underscores."""

    title: str
    right: bool = False
    below: bool = False
    label: str = ""
    parts: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A value that people read in another form than programs."""

    shown: str
    whole: str


Value = str | Cell


class Kind(StrEnum):
    """What a line of a table is."""

    HEAD = "head"
    ROW = "row"
    BELOW = "below"


@dataclass(frozen=True, slots=True)
class Line:
    """One line on the terminal, without white space at its end."""

    kind: Kind
    text: str


def tabbed(columns: Sequence[Column], rows: Sequence[Sequence[Value]]) -> list[str]:
    """Titles, then one line a row, whole values with a tab between them."""
    return ["\t".join(column.title for column in columns), *("\t".join(map(whole, row)) for row in rows)]


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[Value]], *, width: int) -> list[Line]:
    """Lines of at most `width` characters, if the longest word is not longer."""
    texts = [[shown(value) for value in row] for row in rows]
    natural = [max(len(column.title), *(len(row[i]) for row in texts)) for i, column in enumerate(columns)]
    room = width - _total(natural[:-1]) - GAP
    heads = [i for i, column in enumerate(columns) if not column.below]
    if _total(natural) <= width:
        return _side_by_side(columns, texts, list(range(len(columns))), natural)
    if columns[-1].below and len(heads) < len(columns) and room >= LAST_COLUMN_LEAST:
        return _side_by_side(columns, texts, list(range(len(columns))), [*natural[:-1], room])
    if widths := _between_words(columns, texts, heads, width):
        return _side_by_side(columns, texts, heads, widths, below_width=width)
    return _blocks(columns, texts, width)


def fitted_pairs(pairs: Sequence[tuple[str, Value]], *, width: int) -> list[str]:
    """Names and values, folded between words under their values."""
    indent = max((len(name) for name, _ in pairs), default=0) + GAP
    lines = []
    for name, value in pairs:
        first, *more = _folded(shown(value), max(1, width - indent))
        lines += [name.ljust(indent) + first, *(" " * indent + line for line in more)]
    return lines


def fitted_text(text: str, *, width: int) -> list[str]:
    """One line of text, folded between words; what follows is indented a little more than its beginning."""
    plain = text.lstrip(" ")
    margin = " " * (len(text) - len(plain))
    folded = _folded(_plain(plain), max(1, width - len(margin) - GAP))
    return [margin + " " * (GAP if at else 0) + line for at, line in enumerate(folded)]


def shown(value: Value) -> str:
    """What people see of it: one line, in which control characters are escaped."""
    return _plain(value.shown if isinstance(value, Cell) else value)


def whole(value: Value) -> str:
    """What programs get of it: one line without tabs."""
    return _plain(value.whole if isinstance(value, Cell) else value)


def escaped(text: str) -> str:
    """The text, with escapes such as `\\u202e` for what a terminal obeys instead of showing it: control characters but
    tabs and ends of lines, and those that turn the direction of writing. JSON stays the same for who reads it."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in escaped(" ".join(text.split()))).split())


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _between_words(columns: Sequence[Column], texts: list[list[str]], heads: list[int], width: int) -> list[int] | None:
    """Widths at which every word of these columns is whole; None where the line is too short for that. Columns that
    need the least to stay on one line get it first."""
    least, natural = [], []
    for i in heads:
        title, cells = columns[i].title, [row[i] for row in texts]
        words = title.split() + [word for cell in cells for word in _words(cell, columns[i])]
        least.append(max(map(len, words)))
        natural.append(max(map(len, [title, *cells])))
    spare = width - _total(least)
    if spare < 0:
        return None
    widths = list(least)
    for at in sorted(range(len(heads)), key=lambda at: natural[at] - least[at]):
        widths[at] += min(spare, natural[at] - least[at])
        spare -= widths[at] - least[at]
    return widths


def _side_by_side(
    columns: Sequence[Column], texts: list[list[str]], heads: list[int], widths: list[int], *, below_width: int = 0
) -> list[Line]:
    beneath = [i for i in range(len(columns)) if i not in heads]
    lines = [Line(Kind.HEAD, text) for text in _row([columns[i].title for i in heads], columns, heads, widths)]
    for row in texts:
        lines += [Line(Kind.ROW, text) for text in _row([row[i] for i in heads], columns, heads, widths)]
        parts = [f"{columns[i].label} {row[i]}".strip() for i in beneath if row[i] not in ("", "-")]
        if parts:
            folded = _folded(", ".join(parts), below_width - GAP, lines_max=SENTENCE_LINES_MAX)
            lines += [Line(Kind.BELOW, " " * GAP + text) for text in folded]
    return lines


def _row(cells: list[str], columns: Sequence[Column], heads: list[int], widths: list[int]) -> list[str]:
    """One row, of as many lines as its highest cell."""
    folded = [
        _folded_name(cell, width)
        if columns[i].parts
        else _folded(cell, width, lines_max=SENTENCE_LINES_MAX if columns[i].below else None)
        for cell, i, width in zip(cells, heads, widths, strict=True)
    ]
    height = max(map(len, folded))
    lines = []
    for at in range(height):
        parts = [cell[at] if at < len(cell) else "" for cell in folded]
        placed = [
            part.rjust(width) if columns[i].right else part.ljust(width)
            for part, i, width in zip(parts, heads, widths, strict=True)
        ]
        lines.append((" " * GAP).join(placed).rstrip())
    return lines


def _blocks(columns: Sequence[Column], texts: list[list[str]], width: int) -> list[Line]:
    lines: list[Line] = []
    for row in texts:
        pairs = [(column.title, cell) for column, cell in zip(columns, row, strict=True) if cell]
        lines += [Line(Kind.ROW, "")] if lines else []
        lines += [Line(Kind.ROW, text) for text in fitted_pairs(pairs, width=width)]
    return lines


def _words(text: str, column: Column) -> list[str]:
    """What of a cell must stay on one line."""
    if column.right:
        return [text]
    return _PARTS.findall(text) if column.parts else text.split()


def _folded_name(text: str, width: int) -> list[str]:
    lines = [""]
    for part in _PARTS.findall(text):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _folded(text: str, width: int, *, lines_max: int | None = None) -> list[str]:
    """Folded between words; what is beyond the last line is left out, which an ellipsis shows."""
    return textwrap.wrap(
        text, width, max_lines=lines_max, placeholder=" …", break_long_words=False, break_on_hyphens=False
    ) or [""]
