"""`liver jobs wires`: how the nodes of a job read each other's state, and what a move of all of it would take."""

from typing import Any

import typer

from service.cli.client import DEFAULT_URL, AsJson, ServiceUrl, TokenFile, connect
from service.cli.columns import Column
from service.cli.output import print_details, print_json, print_table, seconds, since, size
from service.cli.which import JobId, find_job

EXAMPLE = "Example: liver jobs wires gpt-small-1a2b3c4d"
WIRES = (
    Column("FROM"),
    Column("TO"),
    Column("WIRE"),
    Column("A SECOND", right=True),
    Column("LATENCY", right=True),
    Column("MEASURED"),
    Column("WHY", below=True, label="no better wire"),
)


def wires(
    job_id: JobId,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show how the nodes of a job read each other's state, as measured, and what a move of all of it would take."""
    client = connect(service_url, token_file)
    found = client.get(f"/api/v1/jobs/{find_job(client, job_id)}/wires")
    if as_json:
        return print_json(found)
    print_details((("state", f"{size(found['state_bytes'])} of masters and moments"), ("a move", _move(found))))
    typer.echo("")
    rows = [
        (
            each["source"],
            each["target"],
            each["wire"] or "none",
            size(each["bytes_per_s"]) if each["bytes_per_s"] else "-",
            seconds(each["latency_s"]) if each["wire"] else "-",
            since(each["measured_at"]),
            "; ".join(filter(None, (*each["refused"], each["failed"]))) or "-",
        )
        for each in found["wires"]
    ]
    print_table(WIRES, rows, empty=_none(found["nodes"]))


def _move(found: dict[str, Any]) -> str:
    if found["move_s"] is None:
        return "not measured"
    how = "while the job trains" if found["live"] else "in the pause, since state cannot be streamed"
    return f"{seconds(found['move_s'])} {how}, from every node to one other"


def _none(nodes: list[str]) -> str:
    if len(nodes) < 2:
        return "the job runs on one node" if nodes else "the job does not run"
    return "nothing measured: agents measure nodes of other addresses, half a minute after a world began"
