"""What a person sees while the demo runs: a live display on a terminal, lines elsewhere."""

import sys
import textwrap
import time
from datetime import UTC, datetime
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.demo.tracker import Tracker
from service.cli.output import seconds, size
from service.cli.output import short_layout as short

PLAIN_EVERY_S = 5.0


class Display(Protocol):
    """`act` opens a part of the demo, `say` notes a fact of it, `note` shows something that changes, `job` the job."""

    def act(self, title: str) -> None: ...

    def say(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def job(self, tracker: Tracker) -> None: ...

    def close(self) -> None: ...


def open_display(*, plain: bool) -> Display:
    """The live one on a terminal, unless lines are asked for."""
    return PlainDisplay() if plain or not sys.stdout.isatty() else LiveDisplay()


class PlainDisplay:
    """Lines, each with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._said_at = 0.0
        self._handoff = ""

    def act(self, title: str) -> None:
        """A part of the demo begins."""
        self._line(f"== {title}")

    def say(self, text: str) -> None:
        """A fact."""
        self._line(f"   {text}")

    def note(self, text: str) -> None:
        """Something that changes: not every change is a line."""
        if text and time.monotonic() - self._said_at > PLAIN_EVERY_S:
            self._line(f"   {text}")

    def job(self, tracker: Tracker) -> None:
        """The job: a line for each stage of a handoff, else one every few seconds."""
        handoff = handoff_text(tracker.open_handoff())
        stage = handoff.split(",")[0]
        if stage and stage != self._handoff:
            self._line(f"   {handoff}")
        self._handoff = stage
        self.note(job_text(tracker))

    def close(self) -> None:
        """Nothing to take down."""

    def _line(self, text: str) -> None:
        self._said_at = time.monotonic()
        print(f"[{self._said_at - self._started:6.1f} s] {text}", flush=True)


class LiveDisplay:
    """A list of the parts with what was found in each, and below it what is happening now."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._console = Console(highlight=False)
        self._acts: list[tuple[str, list[str], float]] = []
        self._now: list[str] = []
        self._live = Live(console=self._console, refresh_per_second=8, get_renderable=self._render)
        self._live.start()

    def act(self, title: str) -> None:
        """A part of the demo begins."""
        self._flush()
        self._acts = [(title, [], time.monotonic())]
        self._now = []

    def say(self, text: str) -> None:
        """A fact of the part under way."""
        if self._acts:
            self._acts[-1][1].append(text)

    def note(self, text: str) -> None:
        """Something that changes."""
        self._now = [text]

    def job(self, tracker: Tracker) -> None:
        """The job and the handoff under way."""
        self._now = [job_text(tracker), handoff_text(tracker.open_handoff())]

    def close(self) -> None:
        """Leave the last part on the screen."""
        self._flush()
        self._now = []
        self._live.stop()

    def _flush(self) -> None:
        """What is over moves above the live part, where it scrolls away like any output."""
        for title, said, began in self._acts:
            took = time.monotonic() - began
            self._console.print(Text.assemble(("✓ ", "green"), (title, "bold"), (f"  {took:.1f} s", "dim")))
            for text in said:
                self._console.print(Padding(Text(text), (0, 0, 0, 2)))
        self._acts = []

    def _render(self) -> Group:
        rows: list[Any] = []
        for title, said, began in self._acts:
            head = Table.grid(padding=(0, 1))
            took = f"{time.monotonic() - began:.1f} s of {time.monotonic() - self._started:.0f} s"
            head.add_row(Spinner("dots"), Text(title, style="bold"), Text(took, style="dim"))
            rows += [head, *(Padding(Text(text), (0, 0, 0, 2)) for text in said)]
        rows += [Padding(Text(text, style="cyan"), (0, 0, 0, 2)) for text in self._now if text]
        return Group(*rows)


def job_text(tracker: Tracker) -> str:
    """Where the job stands, in one line."""
    job = tracker.job
    if not tracker.steps:
        return textwrap.shorten(f"job {job.get('state', '-')}: {job.get('reason', '')}", 160, placeholder=" …")
    row = tracker.steps[tracker.last_step]
    loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
    where = f"{short(job['layout'] or '')} on {', '.join(tracker.nodes)}"
    return f"step {row['step']}, loss {loss}, {seconds(row['seconds'])} a step, {where}"


def handoff_text(handoff: dict[str, Any] | None, *, now: datetime | None = None) -> str:
    """The handoff under way, in one line: stage first, then bytes, then the time left."""
    if handoff is None:
        return ""
    parts = [f"handoff {short(handoff['from'])} -> {short(handoff['to'])} {handoff['state']}"]
    if handoff["bytes_moved"]:
        parts.append(f"{size(handoff['bytes_moved'])} moved")
    if handoff["deadline_at"]:
        left = (datetime.fromisoformat(handoff["deadline_at"]) - (now or datetime.now(UTC))).total_seconds()
        parts.append(f"{left:.0f} s to the deadline")
    return ", ".join(parts)
