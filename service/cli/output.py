"""What the client verbs print: tables and details for people or, in a pipe, for programs; JSON as the API says it."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from service.cli.client import fail
from service.cli.columns import Cell, Column, Kind, Line, Value, escaped, fitted, fitted_pairs, shown, tabbed, whole
from service.elapsed import ago, due

NAMES_SHOWN = 6
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_STYLES: dict[Kind, dict[str, Any]] = {Kind.HEAD: {"bold": True}, Kind.ROW: {}, Kind.BELOW: {"dim": True}}


def terminal_width() -> int | None:
    """Characters a line may have on the terminal; None where nobody looks: in a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_json(data: Any) -> None:
    """Stable JSON: as the API said it, two spaces, keys in the API's order."""
    typer.echo(escaped(json.dumps(data, indent=2, ensure_ascii=False)))


def print_line(text: str) -> None:
    """One line that others wrote, such as the output of a job: as it is in a pipe, escaped on a terminal."""
    typer.echo(text if terminal_width() is None else escaped(text))


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[Value]], *, empty: str) -> None:
    """As wide as the terminal; in a pipe one line a row, whole values with tabs between. `empty`: there is no row."""
    found = list(rows)
    width = terminal_width()
    if not found:
        typer.echo(empty)
    elif width is None:
        typer.echo("\n".join(tabbed(columns, found)))
    else:
        print_lines(fitted(columns, found, width=width))


def print_lines(lines: Iterable[Line]) -> None:
    """Lines of a table: titles bold, what stands beneath a row dim."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    for line in lines:
        style = _STYLES[line.kind]
        typer.echo(line.text if is_plain or not style else typer.style(line.text, **style))


def print_details(pairs: Iterable[tuple[str, Value]]) -> None:
    """Name and value, one a line; empty values are left out."""
    found = [(name, value) for name, value in pairs if shown(value)]
    width = terminal_width()
    if width is None:
        typer.echo("\n".join(f"{name}\t{whole(value)}" for name, value in found))
    else:
        typer.echo("\n".join(fitted_pairs(found, width=width)))


def seconds_in(text: str, option: str) -> float:
    """A time like 90s, 30min, 12h or 90d, in seconds; a bare number is in seconds. Fails naming the option."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)?", text.strip())
    if found is None:
        fail(f"{option}: must be a number with s, min, h or d behind it, such as 120s, is {text!r}", code=2)
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def since(moment: str | None) -> Value:
    """A past time: how long ago for people, the time itself for programs."""
    return Cell(ago(moment, datetime.now(UTC)), moment or "-")


def deadline(moment: str | None) -> Value:
    """A time that may be past or to come."""
    return Cell(due(moment, datetime.now(UTC)), moment or "-")


def names(found: Sequence[str]) -> Value:
    """A list of names; people see the first ones of many."""
    every = ", ".join(found) or "-"
    more = len(found) - NAMES_SHOWN
    return Cell(f"{', '.join(found[:NAMES_SHOWN])} and {more} more", every) if more > 1 else every


def short_layout(layout: str) -> str:
    """A layout without the axes that are 1: TP2xPP2xDP1 is TP2xPP2."""
    kept = [axis for axis in layout.split("x") if axis.strip("ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "1"]
    return "x".join(kept) or layout


def layout(text: str | None) -> Value:
    """A layout, or a dash where there is none."""
    return Cell(short_layout(text), text) if text else "-"


def layouts(source: str | None, target: str) -> Value:
    """From where to where a handoff goes."""
    more = " on other nodes" if source == target else ""
    short = f"{short_layout(source) if source else '-'} -> {short_layout(target)}"
    return Cell(short + more, f"{source or '-'} -> {target}{more}")


def seconds(value: float | None) -> str:
    """Seconds with three digits that matter; a dash where nothing is known."""
    if value is None:
        return "-"
    return f"{1e3 * value:.2g} ms" if 0 < abs(value) < 1e-3 else f"{_three_digits(value)} s"


def size(value: float | None) -> str:
    """Bytes in a unit that fits."""
    if value is None:
        return "-"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
