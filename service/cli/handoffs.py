"""`liver handoffs` and `liver incidents`: list, show."""

from datetime import datetime
from typing import Annotated, Any

import typer

from service.cli.client import DEFAULT_URL, LISTED, AsJson, Every, Limit, ServiceUrl, TokenFile, connect
from service.cli.columns import Column
from service.cli.output import layouts, print_details, print_json, print_table, seconds, since, size
from service.cli.which import find_handoff, find_job, short_handoffs, short_jobs
from service.jobs.causes import in_words

app = typer.Typer(help="Every attempt to hand a job over, with what was measured.", no_args_is_help=True)
incidents = typer.Typer(help="Notices with what became of each, and what it cost.", no_args_is_help=True)
LIST = (
    Column("HANDOFF"),
    Column("JOB"),
    Column("LAYOUTS"),
    Column("STATE"),
    Column("PAUSE", right=True),
    Column("MOVED", right=True),
    Column("OPENED"),
    Column("GENERATION", right=True, below=True, label="generation"),
    Column("CAUSE", below=True),
    Column("RUNG", below=True),
    Column("REASON", below=True),
)
INCIDENTS = (
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
PHASES = (Column("PHASE"), Column("TIME", right=True))


@app.command("list", epilog="Example: liver handoffs list --job gpt-small-1a2b3c4d")
def list_all(
    job: Annotated[str | None, typer.Option("--job", help="Only of this job.", metavar="JOB")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only in this state; may be given several times."),
    ] = None,
    limit: Limit = LISTED,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List handoffs, newest first, also those that were aborted."""
    client = connect(service_url, token_file)
    job_id = find_job(client, job) if job is not None else None
    found = client.listed("/api/v1/handoffs", limit=limit, every=every, job_id=job_id, state=state or None)
    if as_json:
        return print_json(found)
    ids = short_handoffs(item["handoff_id"] for item in found)
    jobs = short_jobs(item["job_id"] for item in found)
    rows = [
        (
            ids[item["handoff_id"]],
            jobs[item["job_id"]],
            layouts(item["from"], item["to"]),
            item["state"],
            seconds(item["pause_s"]),
            size(item["bytes_moved"]),
            since(item["opened_at"]),
            str(item["generation"] or "-"),
            item["cause"],
            item["rung"],
            item["why"] if item["state"] == "active" else item["reason"],
        )
        for item in found
    ]
    print_table(LIST, rows, empty="no handoffs")


@app.command(epilog="Example: liver handoffs show 2f1c9a52 --json")
def show(
    handoff_id: Annotated[str, typer.Argument(help="Id of the handoff, or the beginning of it.", metavar="ID")],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one handoff: why, from where to where, how long each phase took, how much was moved."""
    client = connect(service_url, token_file)
    item = client.get(f"/api/v1/handoffs/{find_handoff(client, handoff_id)}")
    if as_json:
        return print_json(item)
    print_details(_details(item))
    rows = [(name.removesuffix("_s"), seconds(value)) for name, value in item["phases_s"].items()]
    typer.echo("")
    print_table(PHASES, rows, empty="no phases were measured")


def _details(item: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    steps = "" if item["pause_steps"] is None else f" ({item['pause_steps']:.2f} median steps)"
    budget = f" of {size(item['extra_bytes_budget'])}" if item["extra_bytes_budget"] is not None else ""
    return (
        ("handoff", item["handoff_id"]),
        ("job", item["job_id"]),
        ("generation", f"{item['parent']} -> {item['generation'] or 'not opened'}"),
        ("state", item["state"] + (" (superseded)" if item["superseded"] else "")),
        ("why", item["why"]),
        ("outcome", item["reason"]),
        ("failed first", in_words(item["ended_by"])),
        ("cause", item["cause"] + (f", {', '.join(item['leaving'])} will go" if item["leaving"] else "")),
        ("rung", item["rung"]),
        ("decision", item["decision"] or ""),
        ("from", f"{item['from'] or '-'} on {', '.join(item['source_nodes']) or '-'}"),
        ("to", f"{item['to']} on {', '.join(item['target_nodes'])}"),
        ("opened", f"{item['opened_at']} by {item['proposer']}"),
        ("pause", seconds(item["pause_s"]) + steps),
        ("lost", _lost(item)),
        ("expected in all", _expected(item["rung_costs"])),
        ("notice to decided", seconds(item["notice_to_decided_s"])),
        ("notice to first order", seconds(item["notice_to_first_order_s"])),
        ("notice to safe", seconds(item["notice_to_safe_s"])),
        ("notice to active", seconds(item["notice_to_active_s"])),
        ("bytes moved", f"{size(item['bytes_moved'])}, lower bound {size(item['bytes_lower_bound'])}"),
        ("extra memory", f"{size(item['extra_bytes_peak'])}{budget} on one rank"),
        ("certificate", item["certificate"] or "-"),
    )


def _lost(item: dict[str, Any]) -> str:
    """In all, and of what it consists."""
    parts = item["lost_parts"] or {}
    said = ", ".join(f"{name.removesuffix('_s')} {seconds(value)}" for name, value in parts.items())
    return seconds(item["lost_s"]) + (f": {said}" if said else "")


def _expected(costs: list[dict[str, Any]]) -> str:
    """What each rung was expected to cost when this handoff was opened, and from how much that was known."""
    words = (
        f"{cost['rung']} {seconds(cost['total_s'])} "
        + (f"({', '.join(cost['guessed'])} guessed)" if cost["guessed"] else f"(measured {cost['measured']} times)")
        for cost in costs
    )
    return ", ".join(words) or "-"


@incidents.command("list", epilog="Example: liver incidents list --failed")
def list_incidents(
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
    chosen = {"node_id": node, "job_id": find_job(client, job) if job is not None else None}
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
    print_table(INCIDENTS, rows, empty="no incidents")


@incidents.command("show", epilog="Example: liver incidents show 7 --json")
def show_incident(
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
            ("withdrawn", item["withdrawn_at"] or "-"),
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
