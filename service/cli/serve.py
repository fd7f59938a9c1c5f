"""`liver serve`: the control service, in the foreground, until a signal ends it."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli.client import fail

EXAMPLE = "Example: liver serve --port 8470 --data-dir ./liver-data"


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one. [default: 8470]")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Embedded PostgreSQL and token files. [default: ~/.local/share/liver]", metavar="DIR"),
    ] = None,
) -> None:
    """Run the control service: API, agent endpoints, status page.

    Keeps an embedded PostgreSQL under the data directory, unless LIVER_SERVICE_DATABASE_URL names a server. Further
    settings are environment variables LIVER_SERVICE_*; options win over them.
    """
    from pydantic import ValidationError

    from service.db.engine import StartError
    from service.problems import field_problems
    from service.server import serve as run
    from service.settings import ServiceSettings

    given = {"host": host, "port": port, "data_dir": data_dir}
    try:
        settings = ServiceSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        fail("; ".join(f"LIVER_SERVICE_{item.field.upper()}: {item.rule}" for item in field_problems(error)), code=2)
    try:
        run(settings, say=lambda line: typer.echo(line))
    except StartError as error:
        fail(str(error))
