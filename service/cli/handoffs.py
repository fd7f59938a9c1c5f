"""`liver handoffs`: list, show."""

from typing import Annotated, Any

import typer

from service.cli.client import DEFAULT_URL, AsJson, ServiceUrl, TokenFile, connect
from service.cli.output import age, print_details, print_json, print_table, seconds, size

app = typer.Typer(help="Every attempt to hand a job over, with what was measured.", no_args_is_help=True)


@app.command("list", epilog="Example: liver handoffs list --job gpt-small-1a2b3c4d")
def list_all(
    job: Annotated[str | None, typer.Option("--job", help="Only of this job.", metavar="ID")] = None,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List handoffs, newest first, also those that were aborted."""
    found = connect(service_url, token_file).get("/api/v1/handoffs", job_id=job)
    if as_json:
        return print_json(found)
    rows = [
        (
            item["handoff_id"],
            item["job_id"],
            str(item["generation"] or "-"),
            f"{item['from'] or '-'} -> {item['to']}",
            item["state"],
            item["cause"],
            item["rung"],
            seconds(item["pause_s"]),
            size(item["bytes_moved"]),
            age(item["opened_at"]),
        )
        for item in found
    ]
    columns = ("HANDOFF", "JOB", "GEN", "LAYOUTS", "STATE", "CAUSE", "RUNG", "PAUSE", "MOVED", "AGE")
    print_table(columns, rows, empty="no handoffs")


@app.command(epilog="Example: liver handoffs show 2f1c9a52-8f5e-4d6b-9d53-0b6f5c6d7e8f --json")
def show(
    handoff_id: Annotated[str, typer.Argument(help="Id of the handoff.", metavar="ID")],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one handoff: why, from where to where, how long each phase took, how much was moved."""
    item = connect(service_url, token_file).get(f"/api/v1/handoffs/{handoff_id}")
    if as_json:
        return print_json(item)
    print_details(_details(item))
    rows = [(name.removesuffix("_s"), seconds(value)) for name, value in item["phases_s"].items()]
    typer.echo("")
    print_table(("PHASE", "TIME"), rows, empty="no phases were measured")


def _details(item: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    steps = "" if item["pause_steps"] is None else f" ({item['pause_steps']:.2f} median steps)"
    budget = f" of {size(item['extra_bytes_budget'])}" if item["extra_bytes_budget"] is not None else ""
    return (
        ("handoff", item["handoff_id"]),
        ("job", item["job_id"]),
        ("generation", f"{item['parent']} -> {item['generation'] or 'not opened'}"),
        ("state", item["state"] + (" (superseded)" if item["superseded"] else "")),
        ("reason", item["reason"]),
        ("cause", item["cause"] + (f", {', '.join(item['leaving'])} will go" if item["leaving"] else "")),
        ("rung", item["rung"]),
        ("decision", item["decision"] or ""),
        ("from", f"{item['from'] or '-'} on {', '.join(item['source_nodes']) or '-'}"),
        ("to", f"{item['to']} on {', '.join(item['target_nodes'])}"),
        ("opened", f"{item['opened_at']} by {item['proposer']}"),
        ("pause", seconds(item["pause_s"]) + steps),
        ("lost", seconds(item["lost_s"])),
        ("notice to safe", seconds(item["notice_to_safe_s"])),
        ("notice to active", seconds(item["notice_to_active_s"])),
        ("bytes moved", f"{size(item['bytes_moved'])}, lower bound {size(item['bytes_lower_bound'])}"),
        ("extra memory", f"{size(item['extra_bytes_peak'])}{budget} on one rank"),
        ("certificate", item["certificate"] or "-"),
    )
