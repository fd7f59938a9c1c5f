"""The `liver` command. Each verb lives in the file of its noun; nothing heavy is imported before a verb runs."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from liver_core.installation import release
from service.cli import access, handoffs, jobs, ledger, nodes, serve
from service.cli.client import TRUST, Trust
from service.cli.offline import plan_memory, simulate

PLUGGED_COMMANDS = "liver.commands"
"""Entry points of this group are functions that take `app` and add a command to it, as the demo does."""

app = typer.Typer(
    name="liver",
    help="Keeps large Megatron training jobs alive on spot capacity: live handoff between layouts, without a restart.",
    epilog="Client verbs take the service from --service-url or LIVER_SERVICE_URL and a token from --token-file, "
    "LIVER_TOKEN_FILE, LIVER_TOKEN or the service's data directory. A token is never given on the command line. "
    "liver --install-completion makes bash, zsh and fish complete verbs and options.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(jobs.app, name="jobs")
app.add_typer(nodes.app, name="nodes")
app.add_typer(handoffs.app, name="handoffs")
app.add_typer(handoffs.incidents, name="incidents")
app.add_typer(nodes.notices, name="notices")
app.add_typer(nodes.prices, name="prices")
app.add_typer(ledger.app, name="ledger")
app.add_typer(plan_memory.app, name="plan")
app.add_typer(access.app, name="tokens")
app.add_typer(nodes.clouds, name="cloud")
app.command("audit", epilog=access.AUDIT_EXAMPLE)(access.audit)
app.command("simulate", epilog=simulate.EXAMPLE)(simulate.simulate)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
for _command in entry_points(group=PLUGGED_COMMANDS):
    _command.load()(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"liver {release()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the release and exit.", callback=_show_version, is_eager=True)
    ] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            envvar="LIVER_TLS_CA",
            help="Certificates (PEM) that an https service is checked against; else the system's own.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """What all verbs share."""
    TRUST.set(Trust(tls_ca))


if __name__ == "__main__":
    app()
