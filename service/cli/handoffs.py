"""`liver handoffs`: list, show."""

from typing import Annotated, Any

import typer

from service.cli.client import DEFAULT_URL, LISTED, AsJson, Every, Limit, ServiceUrl, TokenFile, connect
from service.cli.columns import Column
from service.cli.output import layouts, print_details, print_json, print_table, seconds, since, size
from service.cli.which import find_handoff, find_job, short_handoffs, short_jobs
from service.jobs.causes import in_words

app = typer.Typer(help="Every attempt to hand a job over, with what was measured.", no_args_is_help=True)
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
    job_id = find_job(client, job) if job else None
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
