"""`liver jobs`: submit, list, show, watch, logs, checkpoint, export; and what else changes a job."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli import changing, replays, wires
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
from service.cli.offline import try_job
from service.cli.output import (
    deadline,
    layout,
    names,
    print_details,
    print_json,
    print_line,
    print_table,
    seconds,
    since,
)
from service.cli.pages import page
from service.cli.watching import Lines, Screen, View, no_step
from service.cli.which import ENDED, JobId, find_job, short_jobs
from service.elapsed import span
from service.jobs.causes import in_words

app = typer.Typer(help="Register, follow and stop jobs.", no_args_is_help=True)
JOB_FILE_BYTES_MAX = 1024 * 1024
RECONNECTS_MAX = 30
RECONNECT_S = 1.0
FOLLOW_S = 1.0
CHECKPOINT_LOOK_S = 0.5
EXPORT_MODULE = "liver_core.state.megatron_export"
EXPORT_NEEDS = ("torch", "liver_core.state")
LIST = (
    Column("JOB"),
    Column("NAME", parts=True),
    Column("STATE"),
    Column("LAYOUT"),
    Column("NODES", right=True),
    Column("STEP", right=True),
    Column("SUBMITTED"),
    Column("REASON", below=True),
)
GENERATIONS = (
    Column("GENERATION", right=True),
    Column("FROM"),
    Column("LAYOUT"),
    Column("NODES"),
    Column("MADE"),
    Column("ENDED BY", below=True, label="ended by"),
    Column("REASON", below=True),
)


@app.command(epilog="Example: liver jobs submit job.yaml")
def submit(
    job_file: Annotated[
        Path, typer.Argument(help=f"Job file in YAML or JSON; see {page('job-file.md')}.", metavar="FILE")
    ],
    key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="The same file under the same key, within a day, makes one job."),
    ] = None,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Register a job; prints its id. It starts as soon as enough nodes are ready."""
    content = _read_job_file(job_file)
    client = connect(service_url, token_file)
    job = client.post("/api/v1/jobs", content=content, content_type="application/yaml", key=key)
    for remark in _remarks(content):
        typer.echo(f"note: {remark}", err=True)
    if as_json:
        print_json(job)
    else:
        typer.echo(job["job_id"])


app.command("try", epilog=try_job.EXAMPLE)(try_job.try_job)
app.command("what-if", epilog=replays.EXAMPLE)(replays.what_if)


@app.command("list", epilog="Example: liver jobs list --state running --state starting")
def list_all(
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only in this state; may be given several times."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Only where the name begins so.")] = None,
    limit: Limit = LISTED,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    client = connect(service_url, token_file)
    jobs = client.listed("/api/v1/jobs", limit=limit, every=every, state=state or None, name=name)
    if as_json:
        return print_json(jobs)
    ids = short_jobs(job["job_id"] for job in jobs)
    rows = [
        (
            ids[job["job_id"]],
            job["name"],
            job["state"],
            layout(job["layout"]),
            str(len(job["nodes"])),
            f"{job['last_step']}/{job['stop_steps']}",
            since(job["created_at"]),
            no_step(job) or job["warning"] or job["reason"],
        )
        for job in jobs
    ]
    print_table(LIST, rows, empty="no jobs")


@app.command(epilog="Example: liver jobs show gpt-small-1a2b3c4d")
def show(
    job_id: JobId, service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Show one job: where it stands and why, its generations, its checkpoints."""
    client = connect(service_url, token_file)
    job = client.get(f"/api/v1/jobs/{find_job(client, job_id)}")
    if as_json:
        return print_json(job)
    checkpoint = max(_usable(job), key=lambda item: item["step"], default=None)
    print_details(
        (
            ("job", job["job_id"]),
            ("state", f"{job['state']}: {job['reason']}"),
            ("warning", job["warning"]),
            ("suspended", deadline(job["suspends_at"]) if job["suspends_at"] else ""),
            ("layout", f"{job['layout'] or '-'} on {', '.join(job['nodes']) or 'no nodes'}"),
            ("step", f"{job['last_step']} of {job['stop_steps']}, {job['lost_steps']} lost"),
            ("pace", no_step(job) or _pace(job["pace"])),
            ("step time", ", ".join(f"{name} {seconds(value)}" for name, value in job["step_seconds"].items())),
            ("checkpoint", f"step {checkpoint['step']} in {checkpoint['path']}" if checkpoint else "none"),
            *((f"step {item['step']} damaged", item["damage"]) for item in job["checkpoints"] if item["damage"]),
            ("open handoff", job["open_handoff"] or ""),
        )
    )
    rows = [
        (
            str(item["generation"]),
            item["source"],
            layout(item["layout"]),
            names(item["nodes"]),
            since(item["created_at"]),
            in_words(item["ended_by"]),
            item["reason"],
        )
        for item in job["generations"]
    ]
    typer.echo("")
    print_table(GENERATIONS, rows, empty="no generation yet")


def _usable(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The checkpoints that a start may use."""
    return [item for item in job["checkpoints"] if item["damage"] is None and not item["left_behind"]]


def _pace(pace: dict[str, float | None]) -> str:
    if not pace["steps_per_s"]:
        return ""
    return f"{pace['steps_per_s']:.3g} steps/s, {span(pace['remaining_s'] or 0.0)} left"


for _verb in (
    changing.stop, changing.pause, changing.resume, changing.update, changing.delete, changing.rotate_key,
    changing.decisions, changing.plan, changing.metrics,
):  # fmt: skip
    app.command(epilog=changing.EXAMPLES[_verb.__name__])(_verb)
app.command(epilog=wires.EXAMPLE)(wires.wires)


@app.command(epilog="Example: liver jobs checkpoint gpt-small-1a2b3c4d")
def checkpoint(
    job_id: JobId,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until it is written.")] = 300.0,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint after the next step, and wait until it is on disk."""
    client = connect(service_url, token_file)
    path = f"/api/v1/jobs/{find_job(client, job_id)}"
    client.post(f"{path}/checkpoint")
    ends_at = time.monotonic() + wait_s
    while (job := client.get(path))["checkpoint_asked"]:
        if job["state"] in ENDED:
            fail(f"job {job['job_id']} ended before it was written: it is {job['state']}: {job['reason']}")
        if time.monotonic() >= ends_at:
            fail(f"no checkpoint within {wait_s:.0f} s; liver jobs logs {job['job_id']} says why if writing failed")
        time.sleep(CHECKPOINT_LOOK_S)
    newest = max(_usable(job), key=lambda item: item["step"], default=None)
    open_ones = (item for item in client.get(f"{path}/incidents?limit=100") if item["over_at"] is None)
    if failed := next((item for item in open_ones if item["kind"] == "checkpoint"), None):
        fail(f"the checkpoint of step {failed['step']} failed: {failed['reason']}")
    if newest is None:
        fail(f"job {job['job_id']} has no checkpoint; liver jobs logs {job['job_id']} says why if writing failed")
    if as_json:
        print_json(newest)
    else:
        typer.echo(f"{job['job_id']}: step {newest['step']} in {newest['path']}")


@app.command(epilog="Example: liver jobs export gpt-small-1a2b3c4d --to /data/gpt-small-megatron")
def export(
    source: Annotated[
        str,
        typer.Argument(help="A job, or the path (with a / in it) of its checkpoints or of one.", metavar="JOB_OR_PATH"),
    ],
    *,
    to: Annotated[Path, typer.Option("--to", help="Folder to make; it must not exist yet.", metavar="DIR")],
    step: Annotated[int | None, typer.Option(min=0, help="Which checkpoint; without it, the newest.")] = None,
    python: Annotated[
        str, typer.Option(help="An interpreter that has torch and LiveR.", metavar="PATH", show_default="this one")
    ] = sys.executable,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint into a folder that Megatron-LM loads with --load, in any layout.

    It holds weights, optimizer state, schedule, iteration, consumed samples and the model's arguments. Run it where the
    checkpoint's files are. It needs torch but no GPU, and only reads the checkpoint.
    """
    if "/" in source:
        checkpoint = _checkpoint_in(Path(source), step)
    else:
        client = connect(service_url, token_file)
        job_id = find_job(client, source)
        checkpoint = _checkpoint_of(
            job_id, client.listed(f"/api/v1/jobs/{job_id}/checkpoints", limit=1, every=True), step
        )
    made = _export_with(python, checkpoint, to)
    if as_json:
        return print_json(made)
    for remark in made["remarks"]:
        typer.echo(f"note: {remark}", err=True)
    typer.echo(f"{made['folder']}: iteration {made['iteration']}, {made['consumed_samples']} samples")
    typer.echo(f"continue with: pretrain_gpt.py --load {made['folder']} {' '.join(made['flags'])}")


def _checkpoint_of(job_id: str, found: list[dict[str, Any]], step: int | None) -> Path:
    if not found:
        fail(f"job {job_id} has no checkpoint; liver jobs checkpoint writes one while it runs")
    damage = {item["step"]: item["damage"] for item in found if item["damage"]}
    newest = max((item["step"] for item in found if not item["left_behind"]), default=None)
    wanted = newest if step is None else step
    if wanted in damage:
        others = ", ".join(str(item["step"]) for item in found[::-1] if item["step"] not in damage)
        fail(f"step {wanted} is damaged: {damage[wanted]}; --step takes another one: {others or 'there is none'}")
    return _at_step({item["step"]: Path(item["path"]) for item in found}, wanted, f"job {job_id}")


def _checkpoint_in(folder: Path, step: int | None) -> Path:
    """`folder` itself if it is a checkpoint, or one of those in it."""
    paths = _steps_in(folder)
    if not paths and step is not None:
        fail(f"--step {step}: {folder} is not a folder with checkpoints step-N; leave --step out for one checkpoint")
    return _at_step(paths, step, str(folder)) if paths else folder


def _steps_in(folder: Path) -> dict[int, Path]:
    return {int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdigit()}


def _at_step(paths: dict[int, Path], step: int | None, whose: str) -> Path:
    if step is not None and step not in paths:
        fail(f"--step {step}: {whose} has checkpoints of these steps: {', '.join(map(str, sorted(paths)))}")
    return paths[max(paths) if step is None else step]


def _export_with(python: str, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """In a child of an interpreter that has torch, which the service and its commands do without."""
    try:
        if lacks := try_job.lacking(python, EXPORT_NEEDS):
            fail(lacks)
        command = [python, "-m", EXPORT_MODULE, str(checkpoint.absolute()), str(folder.absolute())]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        fail(f"--python: {python} does not run: {error}")
    try:
        said = json.loads(done.stdout)
    except ValueError:
        fail(f"the export ended with status {done.returncode}; what it printed says why")
    if said.get("damaged"):
        others = ", ".join(
            str(step) for step, path in sorted(_steps_in(checkpoint.parent).items()) if path != checkpoint
        )
        fail(f"{said['error']}; it is damaged, and --step takes another one: {others or 'there is none'}")
    if "error" in said:
        fail(said["error"])
    return said


@app.command(epilog="Example: liver jobs logs gpt-small-1a2b3c4d --rank 0 --follow")
def logs(
    job_id: JobId,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes; end with Ctrl-C.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=2_000, help="Newest pieces to begin with.")] = 200,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print what the ranks wrote, oldest first. With --json one piece a line."""
    client = connect(service_url, token_file)
    path, lines, after = f"/api/v1/jobs/{find_job(client, job_id)}/logs", RankLines(), 0
    while True:
        pieces = client.get(path, rank=rank, after=after, limit=limit)
        for piece in pieces:
            after = piece["log_id"]
            for line in [json.dumps(piece)] if as_json else lines.feed(piece):
                print_line(line)
        if not follow:
            break
        try:
            time.sleep(FOLLOW_S if not pieces else 0.0)
        except KeyboardInterrupt:
            break
    for line in lines.rest():
        print_line(line)


@app.command(epilog="Example: liver jobs watch gpt-small-1a2b3c4d")
def watch(
    job_id: JobId, service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Follow a job until it ends: its progress, its states, and the phases of its handoffs as they pass.

    The status is 0 when the job finished or was stopped, and 1 when it failed.
    """
    client = connect(service_url, token_file)
    job_id, view, state = find_job(client, job_id), _view(as_json=as_json), ""
    try:
        for event in _events(client, job_id, view.say):
            state = event["job"]["state"]
            if as_json:
                typer.echo(json.dumps(event))
            else:
                view.show(event)
            if state in ENDED:
                break
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        view.close()
    if state == "failed":
        raise typer.Exit(1)


def _view(*, as_json: bool) -> View:
    """A display in place where there is a terminal that can have one, lines elsewhere."""
    if as_json or not sys.stdout.isatty():
        return Lines()
    from rich.console import Console

    console = Console(highlight=False)
    return Lines() if console.is_dumb_terminal else Screen(console)


def _events(client: ServiceClient, job_id: str, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Events of the stream; one that breaks is opened again, a limited number of times in a row."""
    failures = 0
    while True:
        try:
            with client.events(f"/api/v1/jobs/{job_id}/watch") as stream:
                for line in stream:
                    if failures:
                        say("the service is back")
                    failures = 0
                    yield json.loads(line)
            problem = "the service has ended the stream"
        except ConnectionError as error:
            problem = str(error)
        failures += 1
        if failures > RECONNECTS_MAX:
            fail(problem)
        if failures == 1:
            say(f"{problem}; trying again for {RECONNECTS_MAX * RECONNECT_S:.0f} s")
        time.sleep(RECONNECT_S)


def _read_job_file(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        fail(f"job file {path}: {error.strerror}")
    if len(content) > JOB_FILE_BYTES_MAX:
        fail(f"job file {path}: has {len(content)} bytes, at most {JOB_FILE_BYTES_MAX} are allowed")
    return content


def _remarks(content: bytes) -> list[str]:
    """What of an accepted job file looks wrong."""
    from agent.protocol.jobfile import looks_secret
    from liver_core.layout.fit import EXPERTS_RUN
    from service.cli.offline.workdir_check import remarks
    from service.jobs.job_yaml import read_fields

    fields = read_fields(content)
    if not isinstance(fields, dict):
        return []
    secrets = [
        f"environment.{name} looks like a secret and stands in the job file: use from_file or from_env"
        for name, value in (fields.get("environment") or {}).items()
        if not isinstance(value, dict) and looks_secret(name)
    ]
    experts = [EXPERTS_RUN] if (fields.get("model") or {}).get("num_experts") else []
    return [*remarks(fields.get("workdir"), fields.get("entrypoint")), *secrets, *experts]


class RankLines:
    """Whole lines out of pieces that may end within one; each line says whose it is."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], str] = {}

    def feed(self, piece: dict[str, Any]) -> list[str]:
        """The lines that this piece completes."""
        whose = (piece["generation"], piece["rank"])
        *whole, self._open[whose] = (self._open.get(whose, "") + piece["text"]).split("\n")
        return [_prefixed(whose, line) for line in whole]

    def rest(self) -> list[str]:
        """Lines that nobody completed."""
        return [_prefixed(whose, line) for whose, line in sorted(self._open.items()) if line]


def _prefixed(whose: tuple[int, int], line: str) -> str:
    return f"[generation {whose[0]} rank {whose[1]}] {line}"
