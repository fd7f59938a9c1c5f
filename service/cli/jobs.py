"""`liver jobs`: submit, list, show, watch, logs, stop."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli import try_job
from service.cli.client import DEFAULT_URL, AsJson, ServiceClient, ServiceUrl, TokenFile, connect, fail
from service.cli.output import age, print_details, print_json, print_table, seconds

app = typer.Typer(help="Register, follow and stop jobs.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(help="Id of the job, as `liver jobs list` shows it.", metavar="ID")]
JOB_FILE_BYTES_MAX = 1024 * 1024
RECONNECTS_MAX = 30
RECONNECT_S = 1.0
FOLLOW_S = 1.0
ENDED = ("stopped", "finished", "failed")


@app.command(epilog="Example: liver jobs submit job.yaml")
def submit(
    job_file: Annotated[Path, typer.Argument(help="Job file in YAML or JSON; see docs/job-file.md.", metavar="FILE")],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Register a job; prints its id. It starts as soon as enough nodes are ready."""
    content = _read_job_file(job_file)
    job = connect(service_url, token_file).post("/api/v1/jobs", content=content, content_type="application/yaml")
    if as_json:
        print_json(job)
    else:
        typer.echo(job["job_id"])


app.command("try", epilog=try_job.EXAMPLE)(try_job.try_job)


@app.command("list", epilog="Example: liver jobs list --json")
def list_all(service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List jobs, newest first."""
    jobs = connect(service_url, token_file).get("/api/v1/jobs")
    if as_json:
        return print_json(jobs)
    rows = [
        (
            job["job_id"],
            job["state"],
            job["layout"] or "-",
            str(len(job["nodes"])),
            f"{job['last_step']}/{job['stop_steps']}",
            age(job["created_at"]),
            job["reason"],
        )
        for job in jobs
    ]
    print_table(("JOB", "STATE", "LAYOUT", "NODES", "STEP", "AGE", "REASON"), rows, empty="no jobs")


@app.command(epilog="Example: liver jobs show gpt-small-1a2b3c4d")
def show(
    job_id: JobId, service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Show one job: where it stands and why, its generations, its checkpoints."""
    job = connect(service_url, token_file).get(f"/api/v1/jobs/{job_id}")
    if as_json:
        return print_json(job)
    checkpoint = max(job["checkpoints"], key=lambda item: item["step"], default=None)
    print_details(
        (
            ("job", job["job_id"]),
            ("state", f"{job['state']}: {job['reason']}"),
            ("layout", f"{job['layout'] or '-'} on {', '.join(job['nodes']) or 'no nodes'}"),
            ("step", f"{job['last_step']} of {job['stop_steps']}, {job['lost_steps']} lost"),
            ("step time", ", ".join(f"{name} {seconds(value)}" for name, value in job["step_seconds"].items())),
            ("checkpoint", f"step {checkpoint['step']} in {checkpoint['path']}" if checkpoint else "none"),
            ("open handoff", job["open_handoff"] or ""),
        )
    )
    rows = [
        (str(item["generation"]), item["source"], item["layout"], ", ".join(item["nodes"]), item["reason"])
        for item in job["generations"]
    ]
    typer.echo("")
    print_table(("GENERATION", "FROM", "LAYOUT", "NODES", "REASON"), rows, empty="no generation yet")


@app.command(epilog="Example: liver jobs stop gpt-small-1a2b3c4d")
def stop(
    job_id: JobId, service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Stop a job: its ranks end after their step. Stopping a stopped job changes nothing."""
    job = connect(service_url, token_file).post(f"/api/v1/jobs/{job_id}/stop")
    if as_json:
        print_json(job)
    else:
        typer.echo(f"{job['job_id']}: {job['state']}, stop was asked for")


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
    path, lines, after = f"/api/v1/jobs/{job_id}/logs", RankLines(), 0
    while True:
        pieces = client.get(path, rank=rank, after=after, limit=limit)
        for piece in pieces:
            after = piece["log_id"]
            for line in [json.dumps(piece)] if as_json else lines.feed(piece):
                typer.echo(line)
        if not follow:
            break
        try:
            time.sleep(FOLLOW_S if not pieces else 0.0)
        except KeyboardInterrupt:
            break
    for line in lines.rest():
        typer.echo(line)


@app.command(epilog="Example: liver jobs watch gpt-small-1a2b3c4d")
def watch(
    job_id: JobId, service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Follow a job until it ends: states, handoffs, steps. The status is 1 when the job failed."""
    client = connect(service_url, token_file)
    story, state = JobStory(), ""
    try:
        for event in _events(client, job_id):
            state = event["job"]["state"]
            for line in [json.dumps(event)] if as_json else story.tell(event):
                typer.echo(line)
            if state in ENDED:
                break
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if state == "failed":
        raise typer.Exit(1)


def _events(client: ServiceClient, job_id: str) -> Iterator[dict[str, Any]]:
    """Events of the stream; a stream that breaks is opened again, a limited number of times in a row."""
    failures = 0
    while True:
        try:
            with client.events(f"/api/v1/jobs/{job_id}/watch") as stream:
                for line in stream:
                    failures = 0
                    yield json.loads(line)
            if client.get(f"/api/v1/jobs/{job_id}")["state"] in ENDED:
                return
        except ConnectionError as error:
            failures += 1
            if failures > RECONNECTS_MAX:
                fail(str(error))
            time.sleep(RECONNECT_S)


def _read_job_file(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        fail(f"job file {path}: {error.strerror}")
    if len(content) > JOB_FILE_BYTES_MAX:
        fail(f"job file {path}: has {len(content)} bytes, at most {JOB_FILE_BYTES_MAX} are allowed")
    return content


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


class JobStory:
    """A job's events as lines for people: what is new, never the same twice."""

    def __init__(self) -> None:
        self._state = ""
        self._handoff = ""

    def tell(self, event: dict[str, Any]) -> list[str]:
        """Lines for what changed since the event before."""
        job, handoff = event["job"], event.get("handoff")
        lines = []
        state = f"{job['state']}: {job['reason']}"
        if state != self._state:
            self._state = state
            lines.append(f"job      {state}")
        if handoff is not None:
            text = _handoff_line(handoff)
            if text != self._handoff:
                self._handoff = text
                lines.append(text)
        if event["steps"]:
            step = event["steps"][-1]
            loss = "-" if step["loss"] is None else f"{step['loss']:.4f}"
            where = f"{job['layout'] or '-'} on {len(job['nodes'])} nodes"
            lines.append(f"step     {step['step']} loss {loss} {seconds(step['seconds'])} {where}")
        return lines


def _handoff_line(handoff: dict[str, Any]) -> str:
    text = f"handoff  {handoff['from'] or '-'} -> {handoff['to']}: {handoff['state']}"
    if handoff["state"] == "active" and handoff["pause_s"] is not None:
        return f"{text}, pause {seconds(handoff['pause_s'])}"
    return f"{text}{': ' + handoff['reason'] if handoff['reason'] else ''}"
