"""`liver incidents`: list, show."""

from datetime import datetime
from typing import Annotated, Any

import typer

from service.cli.client import DEFAULT_URL, LISTED, AsJson, Every, Limit, ServiceUrl, TokenFile, connect
from service.cli.columns import Column
from service.cli.output import print_details, print_json, print_table, seconds, since, size
from service.cli.which import find_job

app = typer.Typer(help="Notices with what became of each, and what it cost.", no_args_is_help=True)
LIST = (
    Column("INCIDENT", right=True),
    Column("NODE"),
    Column("OUTCOME"),
    Column("SAFE"),
    Column("PAUSE", right=True),
    Column("STEPS LOST", right=True),
    Column("USD", right=True),
    Column("HEARD"),
    Column("WHY", below=True),
)


@app.command("list", epilog="Example: liver incidents list --failed")
def list_all(
    node: Annotated[str | None, typer.Option("--node", help="Only of this node.", metavar="NODE")] = None,
    job: Annotated[str | None, typer.Option("--job", help="Only of nodes of this job.", metavar="JOB")] = None,
    is_open: Annotated[bool, typer.Option("--open", help="Only those that still count.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed or led to a restart.")] = False,
    limit: Limit = LISTED,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List incidents, newest first."""
    client = connect(service_url, token_file)
    chosen = {"node_id": node, "job_id": find_job(client, job) if job else None}
    chosen |= {name: "true" if given else None for name, given in (("open", is_open), ("failed", failed))}
    found = client.listed("/api/v1/incidents", limit=limit, every=every, **chosen)
    if as_json:
        return print_json(found)
    rows = [
        (
            str(item["incident_id"]),
            item["node_id"],
            item["outcome"],
            slack(item),
            seconds(item["pause_s"]),
            str(item["lost_steps"]),
            usd(item["dollars"]),
            since(item["first_seen_at"]),
            item["outcome_reason"],
        )
        for item in found
    ]
    print_table(LIST, rows, empty="no incidents")


@app.command(epilog="Example: liver incidents show 7 --json")
def show(
    incident_id: Annotated[int, typer.Argument(help="Number of the incident.", min=1, metavar="NUMBER")],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one incident: who said so, what was decided, what followed, and what it cost."""
    item = connect(service_url, token_file).get(f"/api/v1/incidents/{incident_id}")
    if as_json:
        return print_json(item)
    costs = ", ".join(f"{name} {usd(value)}" for name, value in item["costs"].items() if value)
    decided = [f"{each['verdict']}: {each['reason']}" for each in item["decisions"][:1]]
    print_details(
        (
            ("incident", str(item["incident_id"])),
            ("node", f"{item['node_id']} of pool {item['pool']}"),
            ("notice", f"{item['kind']} at {item['first_seen_at']}, deadline {item['deadline_at'] or '-'}"),
            ("channels", ", ".join(each["source"] for each in item["channels"])),
            ("jobs", ", ".join(item["jobs"]) or "-"),
            ("outcome", f"{item['outcome']}: {item['outcome_reason']}"),
            ("safe", slack(item)),
            ("decision", decided[0] if decided else "-"),
            ("handoffs", ", ".join(item["handoff_ids"]) or "-"),
            ("pause", seconds(item["pause_s"])),
            ("steps lost", str(item["lost_steps"])),
            ("bytes moved", size(item["bytes_moved"])),
            ("cost", usd(item["dollars"]) + (f": {costs}" if costs else "")),
        )
    )


def slack(item: dict[str, Any]) -> str:
    """How long before its deadline the node was needed no more; a dash where something still needs it."""
    if item["outcome"] != "moved" or item["deadline_at"] is None or item["notice_to_safe_s"] is None:
        return "-"
    until, heard = (datetime.fromisoformat(item[name]) for name in ("deadline_at", "first_seen_at"))
    left_s = (until - heard).total_seconds() - item["notice_to_safe_s"]
    return f"{seconds(abs(left_s))} {'before the deadline' if left_s >= 0 else 'late'}"


def usd(value: float | None) -> str:
    """Four places: an interruption may cost less than a cent."""
    return "-" if value is None else f"${value:,.4f}" if value < 1 else f"${value:,.2f}"
