"""`liver plan`: arithmetic on a job file, without a service and without a device."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.client import AsJson, fail
from service.cli.columns import Column
from service.cli.offline.job_files import read_job_file
from service.cli.output import print_details, print_json, print_table

if TYPE_CHECKING:
    from agent.protocol.jobfile import JobFile
    from liver_core.layout import ParallelLayout
    from liver_core.memory.device_memory import HandoffMemory, RankMemory
    from liver_core.memory.memory_placement import MemoryPlacement

app = typer.Typer(help="Work out beforehand what a job needs.", no_args_is_help=True)
EXAMPLE = "Example: liver plan memory --job job.yaml --from TP2xDP4 --to TP2xDP2 --device-bytes 80GiB"
_UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
WORLDS = (
    Column("LAYOUT"),
    Column("WEIGHTS", right=True),
    Column("GRADIENTS", right=True),
    Column("OPTIMIZER", right=True),
    Column("ACTIVATIONS", right=True),
    Column("FP32 COPIES", right=True),
    Column("CONTEXT", right=True),
    Column("NCCL", right=True),
    Column("ALL", right=True),
)
CHOICES = (
    Column("ON THE DEVICE BESIDE TRAINING"),
    Column("DEVICE", right=True),
    Column("HOST", right=True),
    Column("FITS"),
)


@app.command(epilog=EXAMPLE)
def memory(
    job_file: Annotated[Path, typer.Option("--job", help="Job file in YAML or JSON.", metavar="FILE")],
    source: Annotated[str, typer.Option("--from", help="Layout that trains.", metavar="LAYOUT")],
    target: Annotated[str, typer.Option("--to", help="Layout of the next world.", metavar="LAYOUT")],
    *,
    device: Annotated[
        str | None,
        typer.Option("--device-bytes", help="Memory of a device, such as 80GiB.", show_default="device_bytes"),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host-bytes", help="Host memory in which a rank's next world may wait.", show_default="any"),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option("--activation-bytes", help="Activations of a rank as measured.", show_default="estimated"),
    ] = None,
    nccl: Annotated[
        str | None, typer.Option("--nccl-bytes", help="NCCL's memory of one world on a rank.", show_default="2GB")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The device memory of a rank in both layouts, and while the next world is made beside the one that trains.

    Estimates, in GB of 10^9 bytes, of the rank that needs most. The status is 1 where it does not fit.
    """
    from dataclasses import replace

    from liver_core.memory.device_memory import HOST_BYTES_UNLIMITED, handoff_memory
    from liver_core.memory.overheads import DeviceOverheads
    from service.planner.memory_fit import training_shape

    job = read_job_file(job_file)
    sizes = [_fitting(job, text, option) for text, option in ((source, "--from"), (target, "--to"))]
    device_bytes = job.device_bytes if device is None else _bytes(device, "--device-bytes")
    if device_bytes is None:
        fail("--device-bytes: say how much memory a device has, such as 80GiB, here or as device_bytes in the job file")
    training = training_shape(job)
    if activations is not None:
        training = replace(training, activations=_bytes(activations, "--activation-bytes"))
    overheads = DeviceOverheads()
    if nccl is not None:
        overheads = replace(overheads, nccl_per_world=_bytes(nccl, "--nccl-bytes"))
    found = handoff_memory(
        training,
        *sizes,
        device_bytes=device_bytes,
        host_bytes=HOST_BYTES_UNLIMITED if host is None else _bytes(host, "--host-bytes"),
        overheads=overheads,
    )
    if as_json:
        print_json(_as_json(found, sizes, device_bytes))
    else:
        _print(found, sizes, device_bytes)
    if found.waits is None:
        raise typer.Exit(1)


def _print(found: "HandoffMemory", layouts: "list[ParallelLayout]", device_bytes: int) -> None:
    worlds = (found.present, found.following)
    rows = [(str(layout), *map(_gb, _parts(world))) for layout, world in zip(layouts, worlds, strict=True)]
    print_table(WORLDS, rows, empty="")
    typer.echo("")
    stream = found.stream
    ring = f"{_gb(found.ring)} of gradients in 2 slots" if stream else "no room: the state is copied in the pause"
    print_details(
        (
            ("a device has", _gb(device_bytes)),
            ("streaming", ring),
            ("certificate", _gb(found.certificate)),
            ("reads for host memory", _gb(found.landing)),
            ("context of the stream relay", _gb(found.relay)),
            ("verdict", _verdict(found)),
        )
    )
    typer.echo("")
    print_table(CHOICES, [_choice(found, waits, device_bytes) for waits in found.choices], empty="")


def _choice(found: "HandoffMemory", waits: "MemoryPlacement", device_bytes: int) -> tuple[str, str, str, str]:
    named = ", ".join(area.name for area in waits.on_device) or "nothing"
    needed = found.device_bytes(waits)
    return named, _gb(needed), _gb(waits.host_bytes), "yes" if needed <= device_bytes else "no"


def _verdict(found: "HandoffMemory") -> str:
    waits = found.waits
    if waits is None:
        return f"does not fit: {found.refusal}"
    if not waits.on_host:
        return "fits: all of the next world is on the device beside training"
    late = ", ".join(area.name for area in waits.on_host)
    return f"fits: {late} come at the cutover, {_gb(waits.host_bytes)} waits in host memory until then"


def _parts(world: "RankMemory") -> tuple[int, ...]:
    return (
        world.weights,
        world.gradients,
        world.optimizer,
        world.activations,
        world.cast,
        world.context,
        world.nccl,
        world.total,
    )


def _as_json(found: "HandoffMemory", layouts: "list[ParallelLayout]", device_bytes: int) -> dict[str, Any]:
    names = ("weights", "gradients", "optimizer", "activations", "fp32_copies", "context", "nccl", "all")
    worlds = (found.present, found.following)
    waits = found.waits
    return {
        "fits": waits is not None,
        "verdict": _verdict(found),
        "device_bytes": device_bytes,
        "worlds": [
            {"layout": str(layout), **dict(zip(names, _parts(world), strict=True))}
            for layout, world in zip(layouts, worlds, strict=True)
        ],
        "slot": found.ring // 2,
        "ring": found.ring,
        "certificate": found.certificate,
        "landing": found.landing,
        "relay": found.relay,
        "waits": None if waits is None else [area.name for area in waits.on_device],
        "choices": [
            {
                "on_device": [area.name for area in choice.on_device],
                "device_bytes": found.device_bytes(choice),
                "host_bytes": choice.host_bytes,
            }
            for choice in found.choices
        ],
    }


def _fitting(job: "JobFile", text: str, option: str) -> "ParallelLayout":
    """The layout, if the job can run in it on a device of any size."""
    from liver_core.layout import LayoutError, ParallelLayout
    from service.planner.feasibility import violations

    try:
        layout = ParallelLayout.parse(text)
    except LayoutError as error:
        fail(f"{option}: {error}", code=2)
    for broken in violations(job.model_copy(update={"device_bytes": None}), layout):
        fail(f"{option}: {broken.field}: {broken.rule}")
    return layout


def _bytes(text: str, option: str) -> int:
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        fail(f"{option}: must be bytes, or a number with MB, GB, MiB or GiB behind it, is {text!r}", code=2)
    return round(float(found[1]) * unit)


def _gb(value: int) -> str:
    return f"{value / 1e9:.1f} GB"
