"""The table at the end of the demo."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.demo.display import short
from deploy.demo.report import AS_TODAY_OVER_LOST_MIN, AS_TODAY_OVER_PAUSE_MIN, PAUSE_STEPS_MAX, missed_targets
from service.cli.output import seconds, size


def print_summary(report: dict[str, Any], *, broken: list[str], report_path: Path | None = None) -> None:
    """Handoffs, restarts, exactness; then each bound that is broken."""
    console = Console(highlight=False, width=None)
    console.print()
    console.print(_handoffs(report))
    console.print()
    console.print(_restarts(report))
    console.print()
    for line in _exactness(report):
        console.print(line, soft_wrap=True)
    console.print(f"took {report['took_s']:.0f} s on {report['device']['cores']} cores, {report['device']['cpu']}")
    if report_path is not None:
        console.print(f"report: {report_path}", soft_wrap=True)
    for text in missed_targets(report):
        console.print(f"MISSED: {text} (load average {report['device']['load_average_1_min']:.1f})", soft_wrap=True)
    for text in broken:
        console.print(f"BROKEN: {text}", style="bold red", soft_wrap=True, markup=False)


def _handoffs(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="Live handoffs", title_justify="left")
    for name in ("FROM", "TO", "CAUSE", "NOTICE TO SAFE", "PAUSE", "STEPS", "LOST", "MOVED", "LEAST", "CERTIFICATE"):
        table.add_column(name, justify="left" if name in ("FROM", "TO", "CAUSE", "CERTIFICATE") else "right")
    for item in report["handoffs"]:
        table.add_row(
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
    return table


def _restarts(report: dict[str, Any]) -> Table:
    ratios = report["ratios"]
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title="The same move by restart")
    for name in ("RESTART", "DOWNTIME", "OVER PAUSE", "OVER LOST", "PHASES"):
        table.add_column(name, justify="left" if name in ("RESTART", "PHASES") else "right")
    for name, text in (("as_today", "as today: torchrun"), ("at_best", "at best: forked")):
        found = report["restart_baseline"][name]
        phases = ", ".join(f"{phase} {value:.2f}" for phase, value in found["phases_s"].items())
        table.add_row(
            text,
            seconds(found["downtime_s"]),
            _times(ratios.get(f"{name}_over_pause")),
            _times(ratios.get(f"{name}_over_lost")),
            phases,
        )
    return table


def _exactness(report: dict[str, Any]) -> tuple[str, ...]:
    undisturbed = report["undisturbed"]
    same = report["sample_digest"] == report["sample_digest_undisturbed"]
    return (
        f"{report['steps']} steps; samples {'equal' if same else 'DIFFER FROM'} those of an undisturbed run "
        f"({report['sample_digest']})",
        f"loss against an undisturbed run: {undisturbed['max_abs_loss_diff_before']:g} before the first handoff, "
        f"at most {undisturbed['max_abs_loss_diff_after']:.2g} after it; two undisturbed runs in different layouts "
        f"differ by {undisturbed['layout_noise']:.2g}",
        f"bound: pause at most {PAUSE_STEPS_MAX:g} median steps; targets: restart as today over pause at least "
        f"{AS_TODAY_OVER_PAUSE_MIN:g}, over lost time at least {AS_TODAY_OVER_LOST_MIN:g}",
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} x"
