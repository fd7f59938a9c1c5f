"""`liver nodes`: list, drain. `liver notices`: list."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from service.cli.client import DEFAULT_URL, AsJson, ServiceUrl, TokenFile, connect
from service.cli.columns import Cell, Column, Value
from service.cli.output import deadline, print_details, print_json, print_table, seconds_in, since
from service.cli.which import short_jobs
from service.elapsed import departure

app = typer.Typer(help="Nodes whose agents have reported.", no_args_is_help=True)
LIST = (
    Column("NODE"),
    Column("STATE"),
    Column("SLOTS", right=True),
    Column("JOB"),
    Column("HEARD"),
    Column("NOTICE", below=True),
    Column("PROVIDER", below=True),
    Column("POOL", below=True),
    Column("JOBS RUN AS", below=True, label="jobs run as"),
)


notices = typer.Typer(help="Announcements that nodes will go.", no_args_is_help=True)
NOTICES = (
    Column("NODE"),
    Column("KIND"),
    Column("STATE"),
    Column("HEARD"),
    Column("DEADLINE"),
    Column("SOURCE", below=True, label="from"),
)


@app.callback()
def nodes() -> None:
    """Nodes whose agents have reported."""


@app.command("list", epilog="Example: liver nodes list")
def list_all(service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List nodes with their state, their jobs, when they must go, and whether notices can be heard."""
    found = connect(service_url, token_file).get("/api/v1/nodes")
    if as_json:
        return print_json(found)
    ids = short_jobs(job_id for node in found for job_id in node["jobs"])
    rows = [
        (
            node["node_id"],
            node["state"],
            str(node["slots"]),
            Cell(", ".join(ids[job].shown for job in node["jobs"]) or "-", ", ".join(node["jobs"]) or "-"),
            since(node["last_seen_at"]),
            _notice(node),
            node["provider"],
            node["pool"],
            node["job_user"] or "the agent's user",
        )
        for node in found
    ]
    print_table(LIST, rows, empty="no nodes")


@app.command(epilog="Example: liver nodes drain node-3 --in 120s")
def drain(
    node_id: Annotated[str, typer.Argument(help="Name of the node; see `liver nodes list`.", metavar="NODE")],
    within: Annotated[str, typer.Option("--in", help="When jobs must have left it: 90s, 5min or 2h.")] = "120s",
    undo: Annotated[bool, typer.Option("--undo", help="Let jobs use the node again.")] = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Have jobs leave a node, as if its cloud had announced that it goes. The node stays empty until --undo."""
    body = b"" if undo else json.dumps({"in_s": seconds_in(within, "--in")}).encode()
    path = f"/api/v1/nodes/{quote(node_id, safe='')}/{'undrain' if undo else 'drain'}"
    node = connect(service_url, token_file).post(path, content=body)
    if as_json:
        return print_json(node)
    state = "drained" if node["drained"] else node["state"]
    print_details((("node", node["node_id"]), ("state", state), ("notice", _notice(node))))


@notices.callback()
def of_notices() -> None:
    """Announcements that nodes will go."""


@notices.command("list", epilog="Example: liver notices list --json")
def list_notices(service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List notices, newest first."""
    found = connect(service_url, token_file).get("/api/v1/notices")
    if as_json:
        return print_json(found)
    rows = [
        (
            item["node_id"],
            item["kind"],
            item["state"],
            since(item["first_seen_at"]),
            deadline(item["deadline_at"]),
            item["source"],
        )
        for item in found
    ]
    print_table(NOTICES, rows, empty="no notices")


def _notice(node: dict[str, Any]) -> Value:
    """When the node goes, or that it is drained; else whether its notice source is being watched."""
    now, deadline = datetime.now(UTC), node["deadline_at"]
    if node["drained"] and deadline is not None and datetime.fromisoformat(deadline) < now:
        return Cell("drained", deadline)
    if node["leaving"]:
        return Cell(departure(deadline, now, is_gone=node["state"] == "gone"), deadline or "unknown")
    health = node["notice_source"]
    if health is None or node["state"] == "gone":
        return "-"
    if health["state"] == "watching":
        return "watching"
    at = datetime.fromisoformat(health["since_at"]).astimezone(UTC)
    return f"{health['state']} since {at:%H:%M:%S} UTC, because {health['reason']}"
