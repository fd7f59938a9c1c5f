"""`liver nodes`: list."""

from datetime import UTC, datetime
from typing import Any

import typer

from service.cli.client import DEFAULT_URL, AsJson, ServiceUrl, TokenFile, connect
from service.cli.columns import Cell, Column, Value
from service.cli.output import print_json, print_table, since
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
)


@app.callback()
def nodes() -> None:
    """Nodes whose agents have reported."""


@app.command("list", epilog="Example: liver nodes list")
def list_all(service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List nodes with their state, their jobs, and when they must go."""
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
        )
        for node in found
    ]
    print_table(LIST, rows, empty="no nodes")


def _notice(node: dict[str, Any]) -> Value:
    if not node["leaving"]:
        return "-"
    words = departure(node["deadline_at"], datetime.now(UTC), is_gone=node["state"] == "gone")
    return Cell(words, node["deadline_at"] or "unknown")
