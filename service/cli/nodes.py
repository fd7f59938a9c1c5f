"""`liver nodes`: list."""

import typer

from service.cli.client import DEFAULT_URL, AsJson, ServiceUrl, TokenFile, connect
from service.cli.output import age, print_json, print_table

app = typer.Typer(help="Nodes whose agents have reported.", no_args_is_help=True)


@app.callback()
def nodes() -> None:
    """Nodes whose agents have reported."""


@app.command("list", epilog="Example: liver nodes list")
def list_all(service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List nodes with their state, their jobs, and when they must go."""
    found = connect(service_url, token_file).get("/api/v1/nodes")
    if as_json:
        return print_json(found)
    rows = [
        (
            node["node_id"],
            node["state"],
            f"goes {age(node['deadline_at'])}" if node["leaving"] else "",
            node["provider"],
            node["pool"],
            str(node["slots"]),
            ", ".join(node["jobs"]) or "-",
            age(node["last_seen_at"]),
        )
        for node in found
    ]
    print_table(("NODE", "STATE", "NOTICE", "PROVIDER", "POOL", "SLOTS", "JOBS", "SEEN"), rows, empty="no nodes")
