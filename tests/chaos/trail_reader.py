"""What the ranks of a trial wrote on their trail, read while they write it. Loads nothing of torch, so that a trial
begins at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HELD = "held"
"""The event of a rank that a strike holds at a probe."""


def hold_file(folder: Path, pid: int) -> Path:
    """While it exists the rank with this pid stops at the probe that is written in it."""
    return folder / f"hold-{pid}"


class TrailReader:
    """Reads on where it stopped: a trial looks several times a second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_to: dict[Path, int] = {}
        self._lines: list[dict[str, Any]] = []
        self._made: set[tuple[int, int]] = set()

    def look(self) -> None:
        """Read what was written since. What a kill, or the look itself, has cut short is left for the next time."""
        for path in self._folder.glob("*.jsonl"):
            at = self._read_to.get(path, 0)
            with path.open("rb") as trail:
                trail.seek(at)
                whole, _, _ = trail.read().rpartition(b"\n")
            if whole:
                self._read_to[path] = at + len(whole) + 1
                self._note([json.loads(text) for text in whole.split(b"\n")])

    def _note(self, lines: list[dict[str, Any]]) -> None:
        self._lines += lines
        self._made |= {(line["generation"], line["step"]) for line in lines if line["event"] == "applied"}

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All lines of all ranks, oldest first."""
        return sorted(self._lines, key=lambda line: line["at"])

    @property
    def made(self) -> int:
        """How many steps were made in all, those done again included."""
        return len(self._made)

    @property
    def applied(self) -> int:
        """The highest step that any rank has applied."""
        return max((step for _, step in self._made), default=0)
