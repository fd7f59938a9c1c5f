"""`liver tokens`: create, list, rotate, revoke. `liver audit`: who changed what."""

import errno
import json
import os
from enum import StrEnum
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Annotated
from urllib.parse import quote

import typer

from service.cli.client import (
    DEFAULT_URL,
    LISTED,
    AsJson,
    Every,
    Limit,
    ServiceClient,
    ServiceUrl,
    TokenFile,
    connect,
    fail,
)
from service.cli.columns import Column
from service.cli.output import print_json, print_table, seconds_in, since

app = typer.Typer(help="Tokens of people, scripts and nodes. Needs an admin's token.", no_args_is_help=True)
LIST = (
    Column("TOKEN"),
    Column("ROLE"),
    Column("NAME"),
    Column("CREATED"),
    Column("ENDS"),
    Column("NODE", below=True),
    Column("USES LEFT", below=True),
)

AUDIT = (
    Column("WHEN"),
    Column("WHO"),
    Column("ROLE"),
    Column("DID"),
    Column("TO"),
    Column("DETAIL", below=True),
)
AUDIT_EXAMPLE = "Example: liver audit --target demo-1a2b3c4d"


class IssuedRole(StrEnum):
    """What a token that an admin makes may do."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"
    JOIN = "join"


Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Write the token to this file, for its owner only, instead of showing it.", metavar="FILE"
    ),
]


@app.command(epilog="Example: liver tokens create join --name rack-7 --uses 8 --expires 1h --out join.token")
def create(
    role: Annotated[IssuedRole, typer.Argument(help="What it may do. Each but join may do what the one before may.")],
    name: Annotated[str, typer.Option("--name", help="Who or what it is for; it stands in the audit log.")],
    expires: Annotated[
        str | None, typer.Option("--expires", help="When it ends: 30min, 12h, 90d. Never, if absent.")
    ] = None,
    uses: Annotated[
        int | None, typer.Option("--uses", min=1, help="Of a join token: how many nodes it admits; 1 if absent.")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="Of a join token: the only node it admits.")] = None,
    out: Out = None,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a token. It is shown once."""
    wanted = {"role": role, "name": name, "uses": uses, "node_id": node}
    if expires is not None:
        wanted["expires_in_s"] = seconds_in(expires, "--expires")
    body = json.dumps({key: value for key, value in wanted.items() if value is not None}).encode()
    _issue(connect(service_url, token_file), "/api/v1/tokens", body, out, as_json=as_json)


@app.command("list", epilog="Example: liver tokens list")
def list_all(
    revoked: Annotated[bool, typer.Option("--revoked", help="Also those that were revoked.")] = False,
    limit: Limit = LISTED,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List tokens and the keys of nodes, newest first. Secrets are never shown again."""
    found = connect(service_url, token_file).listed("/api/v1/tokens", limit=limit, every=every, revoked=revoked)
    if as_json:
        return print_json(found)
    rows = [
        (
            item["token_id"],
            item["role"].replace("_", " "),
            item["name"],
            since(item["created_at"]),
            "revoked" if item["revoked_at"] else item["expires_at"] or "never",
            item["node_id"] or "-",
            "-" if item["uses_left"] is None else str(item["uses_left"]),
        )
        for item in found
    ]
    print_table(LIST, rows, empty="no tokens")


@app.command(epilog="Example: liver tokens rotate 3f9a12bc44d0 --grace 1h --out operator.token")
def rotate(
    token_id: Annotated[str, typer.Argument(help="See `liver tokens list`.", metavar="TOKEN")],
    grace: Annotated[str, typer.Option("--grace", help="How long the old one still works.")] = "0s",
    out: Out = None,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Replace a token by a new one with the same role, name and limits."""
    body = json.dumps({"grace_s": seconds_in(grace, "--grace")}).encode()
    path = f"/api/v1/tokens/{quote(token_id, safe='')}/rotate"
    _issue(connect(service_url, token_file), path, body, out, as_json=as_json)


@app.command(epilog="Example: liver tokens revoke 3f9a12bc44d0")
def revoke(
    token_id: Annotated[str, typer.Argument(help="See `liver tokens list`.", metavar="TOKEN")],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a token useless at once. Of a node's key: the node has to join again."""
    row = connect(service_url, token_file).post(f"/api/v1/tokens/{quote(token_id, safe='')}/revoke")
    if as_json:
        print_json(row)
    else:
        typer.echo(f"{row['token_id']} ({row['role'].replace('_', ' ')} {row['name']}) is revoked")


def _issue(client: ServiceClient, path: str, body: bytes, out: Path | None, *, as_json: bool) -> None:
    """Ask for a token, and show or write it. It is told once, and one that it replaces may be dead by then: a file for
    it is opened before, and where it cannot be written all the same, the token is shown."""
    file = None if out is None else _opened_beside(out)
    try:
        token = client.post(path, content=body)
        problem = _write(token["token"], file, out) if file is not None and out is not None else ""
    finally:
        if file is not None:
            file.close()
            Path(file.name).unlink(missing_ok=True)
    where = token["token"]
    if out is not None and not problem:
        del token["token"]
        where = f"written to {out}"
    if as_json:
        print_json(token)
    else:
        typer.echo(f"{token['token_id']} ({token['role']} {token['name']}): {where}")
    if problem:
        fail(f"--out: cannot write {out}: {problem}; the token was made and is shown instead")


def _opened_beside(out: Path) -> IO[str]:
    """A file for its owner only that can take the place of `out`. Fails where there can be none."""
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return NamedTemporaryFile("w", dir=out.parent, prefix=".liver-token-", delete=False)
    except OSError as error:
        fail(f"--out: cannot write {out}: {error.strerror or error}; no token was made")


def _write(secret: str, file: IO[str], out: Path) -> str:
    """Why it could not be written; empty if it was."""
    try:
        file.write(secret + "\n")
        file.close()
        os.replace(file.name, out)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def audit(
    target: Annotated[
        str | None, typer.Option("--target", help="Only of this job, node, pool or token.", metavar="NAME")
    ] = None,
    limit: Limit = 50,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List who changed what, newest first."""
    found = connect(service_url, token_file).listed("/api/v1/audit", limit=limit, every=every, target=target)
    if as_json:
        return print_json(found)
    rows = [
        (
            since(item["at"]),
            item["actor"],
            item["role"],
            item["action"].replace("_", " "),
            item["target"],
            ", ".join(f"{name} {value}" for name, value in item["detail"].items() if value is not None) or "-",
        )
        for item in found
    ]
    print_table(AUDIT, rows, empty="nothing was changed yet")
