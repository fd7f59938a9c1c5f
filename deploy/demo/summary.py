"""The tables at the end of the demo."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from deploy.demo.display import short
from deploy.demo.report import AS_TODAY_OVER_LOST_MIN, AS_TODAY_OVER_PAUSE_MIN, PAUSE_STEPS_MAX, missed_targets
from service.cli.columns import Column, fitted, fitted_pairs
from service.cli.output import print_lines, seconds, size, terminal_width

WIDE = 1_000
"""Where no terminal limits a line: rows stay whole."""
HANDOFFS = (
    Column("FROM"),
    Column("TO"),
    Column("CAUSE"),
    Column("TO SAFE", right=True),
    Column("PAUSE", right=True),
    Column("STEPS", right=True),
    Column("LOST", right=True),
    Column("MOVED", right=True),
    Column("LEAST", right=True, below=True, label="least"),
    Column("CERTIFICATE", below=True, label="certificate"),
)
RESTARTS = (
    Column("RESTART"),
    Column("DOWNTIME", right=True),
    Column("OVER PAUSE", right=True),
    Column("OVER LOST", right=True),
    Column("PHASES IN S", below=True, label="in s:"),
)


def print_summary(report: dict[str, Any], *, broken: list[str], report_path: Path | None = None) -> None:
    """Handoffs, restarts, exactness; then each bound that is broken."""
    _table("Live handoffs", HANDOFFS, [_handoff(item) for item in report["handoffs"]])
    _table("The same move by restart", RESTARTS, _restarts(report))
    typer.echo("")
    for line in _exactness(report):
        _say(line)
    device = report["device"]
    _say(f"took {report['took_s']:.0f} s on {device['cores']} cores, {device['cpu']}")
    if report_path is not None:
        typer.echo(f"report: {report_path}")
    for text in missed_targets(report):
        _say(f"MISSED: {text} (load average {device['load_average_1_min']:.1f})")
    for text in broken:
        _say(f"BROKEN: {text}", fg="red", bold=True)


def _table(title: str, columns: Sequence[Column], rows: list[tuple[str, ...]]) -> None:
    typer.echo(f"\n{title}")
    print_lines(fitted(columns, rows, width=terminal_width() or WIDE))


def _say(text: str, **style: Any) -> None:
    for line in fitted_pairs([("", text)], width=(terminal_width() or WIDE)):
        typer.echo(typer.style(line.strip(), **style) if style else line.strip())


def _handoff(item: dict[str, Any]) -> tuple[str, ...]:
    return (
        short(item["from"]),
        short(item["to"]),
        item["cause"],
        seconds(item["notice_to_safe_s"]),
        seconds(item["pause_s"]),
        f"{item['pause_steps']:.2f}",
        seconds(item["lost_s"]),
        size(item["bytes_moved"]),
        size(item["bytes_lower_bound"]),
        item["certificate"] or "-",
    )


def _restarts(report: dict[str, Any]) -> list[tuple[str, ...]]:
    ratios, rows = report["ratios"], []
    for name, text in (("as_today", "as today: torchrun"), ("at_best", "at best: forked")):
        found = report["restart_baseline"][name]
        rows.append(
            (
                text,
                seconds(found["downtime_s"]),
                _times(ratios.get(f"{name}_over_pause")),
                _times(ratios.get(f"{name}_over_lost")),
                ", ".join(f"{phase} {value:.2f}" for phase, value in found["phases_s"].items()),
            )
        )
    return rows


def _exactness(report: dict[str, Any]) -> tuple[str, ...]:
    undisturbed = report["undisturbed"]
    same = report["sample_digest"] == report["sample_digest_undisturbed"]
    return (
        f"{report['steps']} steps; samples {'equal' if same else 'DIFFER FROM'} those of an undisturbed run "
        f"({report['sample_digest']})",
        f"loss against an undisturbed run: {undisturbed['max_abs_loss_diff_before']:g} before the first handoff, "
        f"{undisturbed['abs_loss_diff_right_after']:.2g} right after it, then at most "
        f"{undisturbed['max_abs_loss_diff_after']:.2g}; two undisturbed runs in different layouts differ by "
        f"{undisturbed['layout_noise']:.2g}"
        + (
            f", and routing of level experts may add {undisturbed['routing_noise']:.2g}"
            if undisturbed["routing_noise"]
            else ""
        ),
        f"bound: pause at most {PAUSE_STEPS_MAX:g} median steps; targets: restart as today over pause at least "
        f"{AS_TODAY_OVER_PAUSE_MIN:g}, over lost time at least {AS_TODAY_OVER_LOST_MIN:g}",
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} x"
