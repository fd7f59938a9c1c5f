"""`liver simulate`: a capacity trace replayed under LiveR's policy and others, without a service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liver_core.installation import lacking
from service.cli.client import AsJson, fail, text_of
from service.cli.columns import Column
from service.cli.offline.job_files import read_job_file
from service.cli.output import print_details, print_json, print_table, seconds
from service.cli.pages import page

if TYPE_CHECKING:
    from agent.protocol.jobfile import JobFile
    from service.planner.change_cost import ChangeCost
    from service.policy.price_book import PriceSteps
    from service.simulation.comparing import Comparison
    from service.simulation.what_if import WhatIf, WhatIfAnswer

EXAMPLE = "Example: liver simulate --trace p3-trace.csv --job job.yaml --html p3.html"
FILE_BYTES_MAX = 64 * 1024 * 1024
POLICIES = (
    Column("POLICY"),
    Column("GOODPUT", right=True),
    Column("M TOKENS", right=True),
    Column("USD", right=True),
    Column("USD PER M TOKENS", right=True),
    Column("CHANGES", right=True),
)
Acquire = Annotated[
    float | None,
    typer.Option(
        "--acquire",
        min=0,
        max=86_400,
        help="Seconds to get a node back that was given back.",
        show_default="by the job, else 120",
    ),
]
Value = Annotated[
    float | None,
    typer.Option(
        "--usd-per-mtok", min=0, help="What a million tokens is worth.", show_default="by the job, else on-demand"
    ),
]
Machines = Annotated[
    bool, typer.Option("--machines", help=f"The product's machines carry every change; see {page('policy.md')}.")
]


def simulate(
    trace_file: Annotated[
        Path, typer.Option("--trace", help=f"Capacity trace; see {page('policy.md')}.", metavar="FILE")
    ],
    job_file: Annotated[Path, typer.Option("--job", help="Job file in YAML or JSON.", metavar="FILE")],
    *,
    prices: Annotated[
        Path | None,
        typer.Option(help="CSV with pool, from_s and usd_per_hour, of pools spot and on-demand.", metavar="FILE"),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=64, help="GPUs of a node.")] = 1,
    device: Annotated[str, typer.Option(help="The GPU, for step times: H100, A100, V100 ...")] = "A100",
    change_s: Annotated[
        float | None,
        typer.Option("--change", min=0, max=3_600, help="Seconds that a change loses.", show_default="by state"),
    ] = None,
    notice_s: Annotated[float, typer.Option("--notice", min=0, max=3_600, help="Seconds of notice.")] = 120.0,
    unannounced: Annotated[float, typer.Option(min=0, max=1, help="Share of losses without notice.")] = 0.05,
    acquire_s: Acquire = None,
    gang: Annotated[int, typer.Option(min=0, max=10_000, help="Nodes without which the job does not run.")] = 0,
    value: Value = None,
    report: Annotated[
        Path | None, typer.Option(help="Report of make bench-handoff to fit the cost of a change on.", metavar="FILE")
    ] = None,
    machines: Machines = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots.", metavar="OUT")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace of spot capacity: goodput, dollars per token, and the distance to what could have been had.

    Step times are predicted from the job file, whose policy is followed.

    Goodput is the share of a free ideal that changes at no cost.
    """
    if lacks := lacking("service"):
        fail(f"liver simulate {lacks}")
    from service.simulation.machines.change_times import ChangeTimes
    from service.simulation.replay_setup import ReplaySetup
    from service.simulation.what_if import SETUP, WhatIf

    spot, on_demand = _read_prices(prices)
    setup = ReplaySetup(
        usd_per_hour_on_demand=on_demand,
        prices=spot,
        notice_s=notice_s,
        unannounced_share=unannounced,
        acquire_s=SETUP.acquire_s,
        counts_steps=True,
        gang=gang,
    )
    times = ChangeTimes() if machines else None
    asked = WhatIf(setup, slots, device, change_s, _read_cost(report), value, acquire_s, times=times)
    answer = _answered(trace_file, read_job_file(job_file), asked)
    if html is not None:
        _write(html, answer.comparison)
    print_json(answer.facts()) if as_json else _show(answer)


def _write(path: Path, found: "Comparison") -> None:
    from service.simulation.trace_page import page_of

    try:
        path.write_text(page_of(found))
    except OSError as error:
        fail(f"--html {path}: cannot be written: {error}")


def _answered(trace_file: Path, job: "JobFile", asked: "WhatIf") -> "WhatIfAnswer":
    from service.simulation.traces import TraceError, read_trace
    from service.simulation.what_if import GangError, what_if

    try:
        trace = read_trace(trace_file.name, text_of(trace_file, "--trace", bytes_max=FILE_BYTES_MAX))
    except TraceError as error:
        fail(f"--trace {error}")
    try:
        return what_if(job, trace, asked)
    except GangError as error:
        fail(f"--gang {error}")
    except ValueError as error:
        fail(str(error))


def _read_prices(path: Path | None) -> "tuple[PriceSteps, float]":
    """Of a node: on spot over time, and on demand."""
    from service.policy.price_book import PriceError
    from service.simulation.what_if import read_node_prices

    try:
        return read_node_prices(None if path is None else text_of(path, "--prices", bytes_max=FILE_BYTES_MAX))
    except PriceError as error:
        fail(f"--prices {path}: {error}")


def _show(answer: "WhatIfAnswer") -> None:
    found, facts = answer.comparison, answer.facts()
    rows = [
        (
            name.replace("_", " "),
            f"{run.goodput:.4f}",
            f"{run.tokens / 1e6:.1f}",
            f"{run.usd:.2f}",
            f"{run.usd_per_mtok:.4g}" if run.tokens else "-",
            str(run.changes),
        )
        for name, run in zip(found.names, found.runs, strict=True)
    ]
    print_table(POLICIES, rows, empty="nothing was replayed")
    ideal = facts["ideal_tokens"] or 1.0
    lost = (f"{name.replace('_', ' ')} {tokens / ideal:.2%}" for name, tokens in facts["tokens_lost_by"].items())
    how = "extrapolated from" if answer.is_guess else "by"
    print_details(
        [
            ("hours", f"{facts['hours']:.1f}"),
            ("short of the count oracle", f"{facts['regret_count_oracle']:.3%}"),
            ("short of the victim oracle", f"{facts['regret_victim_oracle']:.3%}"),
            ("tokens lost by", ", ".join(lost)),
            ("cost of a change", f"{seconds(answer.lost_s)}, {how} {answer.lost_s_source}"),
            *enacted_rows(facts),
            *(("not followed", text) for text in answer.not_followed),
        ]
    )


def enacted_rows(facts: "dict[str, Any]") -> list[tuple[str, str]]:
    """What the machines did under LiveR's policy, where they carried the changes."""
    if not facts["enacted"]:
        return []
    done = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in facts["enacted"].items() if count)
    rows = [("enacted", done), ("handoffs refused", str(facts["handoffs_refused"]))]
    return [*rows, ("gave up", facts["gave_up"])] if facts["gave_up"] else rows


def _read_cost(path: Path | None) -> "ChangeCost":
    import json

    from service.planner.change_cost import cost_of_report, shipped_cost

    if path is None:
        return shipped_cost()
    try:
        return cost_of_report(json.loads(text_of(path, "--report", bytes_max=FILE_BYTES_MAX)), str(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"--report {path}: {error}")
