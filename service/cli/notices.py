"""`liver notices`: list."""

import typer

from service.cli.client import DEFAULT_URL, AsJson, ServiceUrl, TokenFile, connect
from service.cli.columns import Column
from service.cli.output import deadline, print_json, print_table, since

app = typer.Typer(help="Announcements that nodes will go.", no_args_is_help=True)
LIST = (
    Column("NODE"),
    Column("KIND"),
    Column("STATE"),
    Column("HEARD"),
    Column("DEADLINE"),
    Column("SOURCE", below=True, label="from"),
)


@app.callback()
def notices() -> None:
    """Announcements that nodes will go."""


@app.command("list", epilog="Example: liver notices list --json")
def list_all(service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
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
    print_table(LIST, rows, empty="no notices")
