"""`liver demo`: the whole product on one machine, from one command."""

from pathlib import Path
from typing import Annotated

import typer

from liver_core.installation import lacking
from service.cli.client import fail

EXAMPLE = "Example: liver demo --report build/reports/demo.json"


def register(liver: typer.Typer) -> None:
    """Add the command to `liver` (entry point `liver.commands`)."""
    liver.command("demo", epilog=EXAMPLE)(demo)


def demo(
    report: Annotated[
        Path | None, typer.Option(help="Write everything that was measured to this JSON file.", metavar="FILE")
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep the data directory, and leave a service running on it, whose console shows what happened.",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="Train on this: cpu, or any name for this machine's GPUs, which the four ranks take in turn.",
            metavar="NAME",
        ),
    ] = "cpu",
    moe: Annotated[
        bool,
        typer.Option("--moe", help="Train a GPT with experts, in layouts that split them, instead of a dense one."),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live display (the default off a terminal).")
    ] = False,
) -> None:
    """Run a real Megatron job through real spot notices on this machine.

    Starts a service with an embedded PostgreSQL and four agents with one rank each, trains a small GPT, takes nodes
    away and gives them back, and compares with a restart from a checkpoint. About three minutes on two cores.
    """
    if lacks := lacking("agent", "service"):
        fail(f"liver demo {lacks}")
    from deploy.demo.demo_job import DENSE, MOE
    from deploy.demo.run import run_demo

    raise typer.Exit(run_demo(report=report, keep=keep, plain=plain, device=device, job=MOE if moe else DENSE))
