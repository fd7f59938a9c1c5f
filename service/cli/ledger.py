"""`liver ledger`: show, check."""

from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.client import DEFAULT_URL, AsJson, ServiceClient, ServiceUrl, TokenFile, connect, fail
from service.cli.columns import Column
from service.cli.output import print_details, print_json, print_table, seconds, size
from service.cli.which import JobId, find_job
from service.elapsed import span
from service.ledger.training_log import ALLOWED, WorldAccount, compare, difference, read_log

app = typer.Typer(help="Where the time and the money went.", no_args_is_help=True)
LONG_S = 120.0
CAUSES = (Column("CAUSE"), Column("SLOT TIME", right=True), Column("SHARE", right=True), Column("USD", right=True))
CHECK = (
    Column("GENERATION", right=True),
    Column("RANKS", right=True),
    Column("STEPS", right=True),
    Column("BY THE LOG", right=True),
    Column("BY THE LEDGER", right=True),
    Column("DIFFERENCE", right=True),
)


@app.callback()
def ledger() -> None:
    """Where the time and the money went."""


@app.command(epilog="Example: liver ledger show --job gpt-small-1a2b3c4d")
def show(
    job: Annotated[str | None, typer.Option("--job", help="Only of this job.", metavar="JOB")] = None,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show goodput and dollars by cause. Of a job, also what restarts would have cost, as an estimate from its own."""
    client = connect(service_url, token_file)
    job_id = find_job(client, job) if job is not None else None
    found = client.get("/api/v1/ledger", job_id=job_id)
    restarts = client.get("/api/v1/ledger/restarts", job_id=job_id) if job_id else None
    if as_json:
        return print_json(found | {"restarts": restarts} if restarts else found)
    rows = [
        (item["cause"], _time(item["slot_seconds"]), f"{100 * item['share']:.2f} %", f"{item['dollars']:.2f}")
        for item in found["causes"]
    ]
    print_table(CAUSES, rows, empty="no time accounted yet")
    print_details([*_totals(found), *(_estimate(restarts) if restarts else ())])


@app.command(epilog="Example: liver ledger check gpt-small-1a2b3c4d --log rank-0.log")
def check(
    job_id: JobId,
    log: Annotated[
        Path, typer.Option("--log", help="What a rank wrote; see `liver jobs logs --rank`.", metavar="FILE")
    ],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the productive time of a job from its training log, and compare it with the ledger.

    The status is 1 where they differ by more than 0.5 %. The log must be whole: the service keeps only the newest.
    """
    try:
        with log.open(errors="replace") as lines:
            steps = read_log(lines)
    except OSError as error:
        fail(f"--log: cannot read {log}: {error.strerror or error}")
    if not steps:
        fail(f"--log: {log} names no step; a line like 'step 7 generation 1 loss 0.69 0.120 s at TIME' is expected")
    client = connect(service_url, token_file)
    job_id = find_job(client, job_id)
    found = compare(steps, _worlds(client, job_id))
    total_s = client.get("/api/v1/ledger", job_id=job_id)["slot_seconds"]
    log_s, ledger_s = sum(item.log_s for item in found), sum(item.ledger_s for item in found)
    by = difference(found)
    result = {
        "job_id": job_id,
        "goodput_by_log": log_s / total_s if total_s else None,
        "goodput_by_ledger": ledger_s / total_s if total_s else None,
        "difference": by,
        "allowed": ALLOWED,
        "generations": [{name: getattr(item, name) for name in type(item).__slots__} for item in found],
    }
    if as_json:
        print_json(result)
    else:
        _print_check(result)
    if by > ALLOWED:
        raise typer.Exit(1)


def _time(value_s: float) -> str:
    return seconds(value_s) if value_s < LONG_S else span(value_s)


def _totals(found: dict[str, Any]) -> list[tuple[str, str]]:
    moved, usd = found["egress"], found["egress"]["dollars"]
    goodput = "-" if found["goodput"] is None else f"{100 * found['goodput']:.2f} %"
    unpriced = found["unpriced_slot_seconds"]
    return [
        ("goodput", goodput),
        ("slots", f"{found['dollars']:.2f} USD for {_time(found['slot_seconds'])} of slot time"),
        ("without a price", _time(unpriced) if unpriced else ""),
        ("moved", f"{size(moved['bytes'])}, {'price not known' if usd is None else f'{usd:.2f} USD'}"),
    ]


def _estimate(found: dict[str, Any]) -> list[tuple[str, str]]:
    took = f"{found['handoffs']} moves paused {_time(found['handoffs_slot_seconds'])} of slot time"
    if found["slot_seconds"] is None:
        return [("handoffs", took), ("restarts instead", found["estimate"])]
    instead = f"{_time(found['slot_seconds'])} of slot time, {found['dollars']:.2f} USD: {found['estimate']}"
    return [("handoffs", took), ("restarts instead", instead)]


def _worlds(client: ServiceClient, job_id: str) -> list[WorldAccount]:
    accounts = client.listed("/api/v1/ledger/generations", limit=1, every=True, job_id=job_id)
    causes = {item["generation"]: item["causes"] for item in accounts}
    made = client.listed("/api/v1/handoffs", limit=1, every=True, job_id=job_id, state=["active"])
    pauses = {item["generation"]: item["pause_s"] or 0.0 for item in made}
    return [
        WorldAccount(
            generation=row["generation"],
            slots=frozenset((member["node_id"], member["slot"]) for member in row["members"]),
            pause_s=pauses.get(row["generation"], 0.0) if row["source"] == "handoff" else None,
            productive_s=sum(
                item["slot_seconds"] for item in causes.get(row["generation"], ()) if item["cause"] == "productive"
            ),
        )
        for row in client.listed(f"/api/v1/jobs/{job_id}/generations", limit=1, every=True)
    ]


def _print_check(result: dict[str, Any]) -> None:
    rows = [
        (
            str(item["generation"]),
            str(item["ranks"] or "-"),
            str(item["steps"]),
            f"{item['log_s']:.3f} s",
            f"{item['ledger_s']:.3f} s",
            f"{item['ledger_s'] - item['log_s']:+.3f} s",
        )
        for item in result["generations"]
    ]
    print_table(CHECK, rows, empty="no work in log or ledger")
    by, allowed = 100 * result["difference"], 100 * result["allowed"]
    verdict = "they agree" if by <= allowed else "they do not agree"
    typer.echo(f"productive time differs by {by:.3f} %, at most {allowed:.1f} % is allowed: {verdict}")
