"""`liver serve`: the control service, in the foreground, until a signal ends it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liver_core.installation import lacking
from service.cli.client import fail

if TYPE_CHECKING:
    from agent.protocol.errors import FieldProblem

EXAMPLE = "Example: liver serve --port 8470 --data-dir ./liver-data"


def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one. [default: 8470]")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Embedded PostgreSQL and token files. [default: ~/.local/share/liver]", metavar="DIR"),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Serve HTTPS with this certificate chain (PEM).", metavar="FILE")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM).", metavar="FILE")] = None,
    trusted_proxies: Annotated[
        str | None,
        typer.Option(
            help="Addresses or networks, with commas between them, of proxies whose X-Forwarded-For and "
            "X-Forwarded-Proto are believed. [default: none]",
            metavar="LIST",
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. [default: info]", metavar="LEVEL")
    ] = None,
) -> None:
    """Run the control service: API, agent endpoints, web console.

    Keeps an embedded PostgreSQL under the data directory, unless LIVER_SERVICE_DATABASE_URL names a server. Further
    settings are environment variables LIVER_SERVICE_*; options win over them. It logs to standard error.
    """
    if lacks := lacking("service"):
        fail(f"liver serve {lacks}")
    from pydantic import ValidationError

    from service.db.engine import StartError
    from service.problems import field_problems
    from service.server import serve as run
    from service.settings import ServiceSettings

    given: dict[str, Any] = {"host": host, "port": port, "data_dir": data_dir}
    given |= {"tls_certificate": tls_certificate, "tls_key": tls_key, "trusted_proxies": trusted_proxies}
    given |= {"log_level": log_level}
    try:
        settings = ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        fail("; ".join(map(_setting, field_problems(error))), code=2)
    _log_to_stderr(settings.log_level)
    try:
        run(settings, say=lambda line: typer.echo(line))
    except StartError as error:
        fail(str(error))


def _log_to_stderr(level: str) -> None:
    """One line an event, as the agent logs."""
    import logging

    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # Says at each start how it connects; which revision it runs is in `service.db.upgrade`.
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _setting(problem: "FieldProblem") -> str:
    """Which setting breaks which rule. One about several settings names them itself."""
    return problem.rule if problem.field == "(whole)" else f"LIVER_SERVICE_{problem.field.upper()}: {problem.rule}"
