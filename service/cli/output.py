"""What the client verbs print: tables and details for people, JSON for programs."""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def console() -> "Console":
    """Standard output. Wide where it is not a terminal, so that a pipe gets whole lines."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_json(data: Any) -> None:
    """Stable JSON: as the API said it, two spaces, keys in the API's order."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """One line a row; `empty` says what it means that there is none."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    # As text, so that a bracket in a reason is not taken for markup.
    lines = [[Text(cell) for cell in row] for row in rows]
    if not lines:
        typer.echo(empty)
        return
    for line in lines:
        table.add_row(*line)
    console().print(table)


def print_details(pairs: Iterable[tuple[str, str]]) -> None:
    """Name and value, one a line; empty values are left out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            table.add_row(name, Text(value))
    console().print(table)


def age(moment: str | None, *, now: datetime | None = None) -> str:
    """How long ago, short; a dash for never."""
    if moment is None:
        return "-"
    passed = ((now or datetime.now(UTC)) - datetime.fromisoformat(moment)).total_seconds()
    sign, passed = ("in ", -passed) if passed < 0 else ("", passed)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if passed >= size:
            return f"{sign}{passed / size:.1f} {unit}"
    return f"{sign}{passed:.0f} s"


def seconds(value: float | None) -> str:
    """Seconds with three digits that matter; a dash where nothing is known."""
    return "-" if value is None else f"{value:.3g} s"


def size(value: float | None) -> str:
    """Bytes in a unit that fits."""
    if value is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"
