"""`liver simulate`: a capacity trace replayed under LiveR's policy and others, without a service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.client import AsJson, fail
from service.cli.columns import Column
from service.cli.output import print_details, print_json, print_table, seconds

if TYPE_CHECKING:
    from agent.protocol.jobfile import JobFile
    from service.policy.types import Candidate
    from service.simulation.change_cost import ChangeCost
    from service.simulation.comparing import Comparison
    from service.simulation.replay_setup import ReplaySetup

EXAMPLE = "Example: liver simulate --trace p3-trace.csv --job job.yaml --html p3.html"
JOB_FILE_BYTES_MAX = 1024 * 1024
FILE_BYTES_MAX = 64 * 1024 * 1024
PRICE_USD_PER_HOUR = 1.0
ON_DEMAND_OVER_SPOT = 3.0
POLICIES = (
    Column("POLICY"),
    Column("GOODPUT", right=True),
    Column("M TOKENS", right=True),
    Column("USD", right=True),
    Column("USD PER M TOKENS", right=True),
    Column("CHANGES", right=True),
)


def simulate(
    trace_file: Annotated[Path, typer.Option("--trace", help="Capacity trace; see docs/policy.md.", metavar="FILE")],
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
    acquire_s: Annotated[
        float, typer.Option("--acquire", min=0, max=86_400, help="Seconds to get a node back that was given back.")
    ] = 120.0,
    gang: Annotated[int, typer.Option(min=0, max=10_000, help="Nodes without which the job does not run.")] = 0,
    value: Annotated[
        float | None,
        typer.Option("--usd-per-mtok", min=0, help="What a million tokens is worth.", show_default="by on-demand"),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Report of make bench-handoff to fit the cost of a change on.", metavar="FILE")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with plots.", metavar="OUT")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace of spot capacity: goodput, dollars per token, and the distance to what could have been had.

    Step times are predicted from the job file. Goodput is the share of a free ideal that changes at no cost.
    """
    from service.simulation.job_layouts import candidates_of, state_bytes
    from service.simulation.replay_setup import ReplaySetup

    job, cost = _read_job(job_file), _read_cost(report)
    candidates = candidates_of(job, slots_per_node=slots, device=device, cost=cost, change_s=change_s)
    if not candidates:
        fail(f"--job: no layout fits nodes.min {job.nodes.min} to nodes.max {job.nodes.max} of {slots} slots")
    spot, on_demand = _read_prices(prices)
    setup = ReplaySetup(
        usd_per_hour=spot,
        usd_per_hour_on_demand=on_demand,
        notice_s=notice_s,
        unannounced_share=unannounced,
        acquire_s=acquire_s,
        counts_steps=True,
        gang=gang,
    )
    found = _compared(trace_file, candidates, setup, value)
    if html is not None:
        _write(html, found)
    is_guess = change_s is None and cost.is_extrapolated(state_bytes(job))
    _print(found, candidates[0].change_s, "the option" if change_s is not None else cost.source, is_guess, as_json)


def _print(found: "Comparison", lost_s: float, by: str, is_guess: bool, as_json: bool) -> None:
    if as_json:
        print_json(found.facts() | {"lost_s": lost_s, "lost_s_is_extrapolated": is_guess, "lost_s_source": by})
        return
    _show(found)
    print_details([("cost of a change", f"{seconds(lost_s)}, {'extrapolated from' if is_guess else 'by'} {by}")])


def _write(path: Path, found: "Comparison") -> None:
    from service.simulation.trace_page import page_of

    try:
        path.write_text(page_of(found))
    except OSError as error:
        fail(f"--html {path}: cannot be written: {error}")


def _compared(
    trace_file: Path, candidates: "tuple[Candidate, ...]", setup: "ReplaySetup", value: float | None
) -> "Comparison":
    from service.policy.types import Goal
    from service.simulation.comparing import compare
    from service.simulation.traces import TraceError, read_trace

    try:
        trace = read_trace(trace_file.name, _text(trace_file, "--trace"))
        return compare(trace, candidates, setup=setup, goal=Goal(usd_per_mtok=value))
    except (TraceError, ValueError) as error:
        fail(f"--trace {trace_file}: {error}")


def _read_prices(path: Path | None) -> tuple[float, float]:
    """USD per hour of a node on spot and on demand."""
    from service.policy.price_book import PriceError, read_prices

    if path is None:
        return PRICE_USD_PER_HOUR, PRICE_USD_PER_HOUR * ON_DEMAND_OVER_SPOT
    try:
        book = read_prices(_text(path, "--prices"))
        return book.at("spot", 0.0), book.at("on-demand", 0.0)
    except PriceError as error:
        fail(f"--prices {path}: {error}")


def _show(found: "Comparison") -> None:
    facts = found.facts()
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
    print_details(
        [
            ("hours", f"{facts['hours']:.1f}"),
            ("short of the count oracle", f"{facts['regret_count_oracle']:.3%}"),
            ("short of the victim oracle", f"{facts['regret_victim_oracle']:.3%}"),
            ("tokens lost by", ", ".join(lost)),
        ]
    )


def _text(path: Path, option: str) -> str:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            fail(f"{option} {path}: has more than {FILE_BYTES_MAX} bytes")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{option} {path}: cannot be read: {error}")


def _read_job(path: Path) -> "JobFile":
    from agent.protocol.jobfile_check import JobFileError, check_job_file
    from service.jobs.job_yaml import read_fields

    text = _text(path, "--job").encode()
    if len(text) > JOB_FILE_BYTES_MAX:
        fail(f"--job {path}: has {len(text)} bytes, at most {JOB_FILE_BYTES_MAX} are allowed")
    try:
        return check_job_file(read_fields(text))
    except JobFileError as error:
        fail(f"--job {path}: {error}")


def _read_cost(path: Path | None) -> "ChangeCost":
    import json

    from service.simulation.change_cost import cost_of_report, shipped_cost

    if path is None:
        return shipped_cost()
    try:
        return cost_of_report(json.loads(_text(path, "--report")), str(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"--report {path}: {error}")
