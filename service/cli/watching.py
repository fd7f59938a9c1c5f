"""How `liver jobs watch` shows a job's events: one line a change, or on a terminal one display that stays in place."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

import typer

from service.cli.columns import fitted_pairs
from service.cli.output import print_line, seconds, short_layout, size
from service.elapsed import span

if TYPE_CHECKING:
    from rich.console import Console, Group

STATES = ("proposed", "preparing", "streaming", "ready", "cutting_over", "active")
"""Of a handoff, in the order in which it passes them."""
PHASES_SHOWN = 6
REFRESH_PER_S = 4.0
BAR_CHARS = 60


class View(Protocol):
    """`show` takes the next event, `say` a line about the watching itself; `close` leaves the screen in order."""

    def show(self, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A line for each change, never the same twice."""

    def __init__(self) -> None:
        self._story = Story()

    def show(self, event: dict[str, Any]) -> None:
        """What is new in an event."""
        job = event["job"]
        news = self._story.tell(event)
        if event["steps"]:
            where = [f"{short_layout(job['layout'])} on {_nodes(job)}"] if job["layout"] else []
            news.append(("step", ", ".join([progress(event), *where])))
        for what, text in news:
            print_line(f"{what:9}{text}")

    def say(self, text: str) -> None:
        """On standard error, since it is no news of the job."""
        typer.echo(text, err=True)

    def close(self) -> None:
        """Nothing to take down."""


class Screen:
    """Changes scroll by above; below them the job, its progress, and the handoff under way with its phases."""

    def __init__(self, console: "Console", now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        from rich.live import Live

        self._console, self._now = console, now
        self._story = Story()
        self._event: dict[str, Any] | None = None
        self._live = Live(
            console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self._render, transient=True
        )
        self._live.start()

    def show(self, event: dict[str, Any]) -> None:
        """What is new goes above, what goes on below."""
        from rich.text import Text

        for what, text in self._story.tell(event):
            for line in fitted_pairs([(f"{what:7}", text)], width=self._console.width):
                self._console.print(Text(line), soft_wrap=True)
        steps = event["steps"] or (self._event or event)["steps"]
        self._event = {**event, "steps": steps}

    def say(self, text: str) -> None:
        """A line above."""
        from rich.text import Text

        self._console.print(Text(text, style="dim"))

    def close(self) -> None:
        """The last figures stay on the screen."""
        from rich.text import Text

        self._live.stop()
        if self._event is not None:
            self._console.print(Text(f"step     {progress(self._event)}"))

    def _render(self) -> "Group":
        from rich.console import Group
        from rich.text import Text

        if self._event is None:
            return Group(Text("waiting for the first event", style="dim"))
        job, handoff = self._event["job"], self._event["handoff"]
        title = Text.assemble((job["job_id"], "bold"), f"  {job['state']}")
        if job["layout"]:
            title.append(f"  {short_layout(job['layout'])} on {_nodes(job)}, generation {job['active_generation']}")
        width = min(self._console.width, BAR_CHARS)
        done = min(width, width * job["last_step"] // job["stop_steps"])
        bar = Text.assemble(("█" * done, "green"), ("░" * (width - done), "dim"))
        rows = [title, bar, Text(progress(self._event) + self._end_time())]
        if handoff is not None and handoff["state"] in STATES[:-1]:
            rows += self._handoff(handoff)
        return Group(*rows)

    def _end_time(self) -> str:
        remaining_s = (self._event or {})["pace"]["remaining_s"]
        if not remaining_s:
            return ""
        end = self._now() + timedelta(seconds=remaining_s)
        return f", until {end.astimezone():{'%H:%M' if remaining_s < 20 * 3_600 else '%a %d %b %H:%M'}}"

    def _handoff(self, handoff: dict[str, Any]) -> list[Any]:
        from rich.text import Text

        since = (self._now() - datetime.fromisoformat(handoff["opened_at"])).total_seconds()
        head = Text.assemble((f"handoff {title_of(handoff)}", "bold cyan"), f", for {max(0.0, since):.1f} s")
        if handoff["deadline_at"]:
            left = (datetime.fromisoformat(handoff["deadline_at"]) - self._now()).total_seconds()
            head.append(f", {left:.0f} s to the deadline" if left > 0 else f", deadline was {-left:.0f} s ago")
        at = STATES.index(handoff["state"])
        path = Text("  ")
        for index, name in enumerate(STATES):
            style = "green" if index < at else "bold reverse" if index == at else "dim"
            path.append(name, style=style).append(" > " if name != STATES[-1] else "", style="dim")
        phases = phases_text(handoff["phases_s"], handoff)
        return [head, path, *([Text(f"  {phases}", style="cyan")] if phases else [])]


class Story:
    """What of a job's events is a change worth a line; steps are not."""

    def __init__(self) -> None:
        self._state = ""
        self._still_since = ""
        self._handoff_id = ""
        self._told: tuple[str, str] = ("", "")
        self._phases: set[str] = set()

    def tell(self, event: dict[str, Any]) -> list[tuple[str, str]]:
        """What changed since the event before: of what, and the news."""
        job, handoff = event["job"], event.get("handoff")
        news = []
        state = f"{job['state']}: {job['reason']}"
        if state != self._state:
            self._state = state
            news.append(("job", state))
        since = "" if job["standstill"] is None else job["standstill"]["since"]
        if since != self._still_since:
            self._still_since = since
            news += [("job", f"{job['state']}: {no_step(job)}")] if since else []
        if handoff is not None and (text := self._of_handoff(handoff)):
            news.append(("handoff", text))
        return news

    def _of_handoff(self, handoff: dict[str, Any]) -> str:
        """Its state when that changes, with the phases that were measured since the line before."""
        if handoff["handoff_id"] != self._handoff_id:
            self._handoff_id, self._told, self._phases = handoff["handoff_id"], ("", ""), set()
        told = handoff["state"], handoff["reason"]
        is_news = handoff["reason"] != self._told[1]
        new = {name: took for name, took in handoff["phases_s"].items() if name not in self._phases}
        if told == self._told and not new:
            return ""
        self._phases |= new.keys()
        is_known, self._told = self._told[0] != "", told
        parts = [short_title(handoff) if is_known else title_of(handoff)]
        taken_s = _taken_s(handoff)
        if taken_s >= 0.1:
            parts.append(f"after {taken_s:.1f} s")
        if handoff["state"] == "active":
            parts += [
                f"{name} {text}"
                for name, text in (
                    ("pause", seconds(handoff["pause_s"])),
                    ("lost", seconds(handoff["lost_s"])),
                    ("moved", size(handoff["bytes_moved"])),
                )
                if text != "-"
            ]
        elif handoff["reason"] and is_news:
            parts.append(handoff["reason"])
        phases = phases_text(new, handoff)
        return ", ".join(parts) + (f"; {phases}" if phases else "")


def progress(event: dict[str, Any]) -> str:
    """How far a job is, how fast it goes, and how long it will take at that pace."""
    job, pace = event["job"], event["pace"]
    share = 100 * job["last_step"] / job["stop_steps"]
    parts = [f"{job['last_step']} of {job['stop_steps']} ({share:.0f} %)"]
    if event["steps"]:
        step = event["steps"][-1]
        parts += [f"loss {step['loss']:.4f}"] if step["loss"] is not None else []
        parts.append(f"{seconds(step['seconds'])} a step")
    if still := no_step(job):
        parts.append(still)
    if pace["steps_per_s"]:
        parts.append(f"{pace['steps_per_s']:.3g} steps/s")
    if pace["remaining_s"]:
        parts.append(f"{span(pace['remaining_s'])} left")
    return ", ".join(parts)


def no_step(job: dict[str, Any]) -> str:
    """For how long a job that runs has made no step, and why; empty while steps come in their time."""
    found = job["standstill"]
    if found is None:
        return ""
    passed_s = (datetime.now(UTC) - datetime.fromisoformat(found["since"])).total_seconds()
    return f"no step for {span(passed_s)}: {found['because']}"


def short_title(handoff: dict[str, Any]) -> str:
    """By the beginning of its id, and where it stands."""
    return f"{handoff['handoff_id'][:8]} {handoff['state']}"


def title_of(handoff: dict[str, Any]) -> str:
    """The same with the layouts, its cause, and its rung once an agent has chosen one."""
    source = short_layout(handoff["from"]) if handoff["from"] else "-"
    target = short_layout(handoff["to"])
    why = handoff["cause"] if handoff["state"] == "proposed" else f"{handoff['cause']}, {handoff['rung']}"
    return f"{handoff['handoff_id'][:8]} {source} -> {target} {handoff['state']} ({why})"


def phases_text(phases_s: dict[str, float], handoff: dict[str, Any]) -> str:
    """The longest phases first; how many are left out, and where they are."""
    longest = sorted(phases_s.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {seconds(took)}" for name, took in longest[:PHASES_SHOWN])
    if len(longest) <= PHASES_SHOWN:
        return text
    return f"{text}, {len(longest) - PHASES_SHOWN} more in liver handoffs show {handoff['handoff_id'][:8]}"


def _taken_s(handoff: dict[str, Any]) -> float:
    opened, changed = (datetime.fromisoformat(handoff[name]) for name in ("opened_at", "changed_at"))
    return (changed - opened).total_seconds()


def _nodes(job: dict[str, Any]) -> str:
    count = len(job["nodes"])
    return f"{count} node{'s' * (count != 1)}"
