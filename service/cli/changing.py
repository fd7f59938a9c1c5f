"""Verbs of `liver jobs` that change a job: stop, pause, resume, update, delete, rotate-key; and that show what is
decided about it and measured of it: decisions, plan, metrics.
"""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from liver_core.handoff import Prefer
from liver_core.layout.limits import BUILT_IN_METRICS, COUNT_MAX
from service.cli.client import DEFAULT_URL, AsJson, Every, Limit, ServiceUrl, TokenFile, connect, fail
from service.cli.columns import Column
from service.cli.output import layout, names, print_details, print_json, print_table, seconds, since
from service.cli.which import JobId, find_job

EXAMPLES = {
    "stop": "Example: liver jobs stop gpt-small-1a2b3c4d",
    "pause": "Example: liver jobs pause gpt-small-1a2b3c4d",
    "resume": "Example: liver jobs resume gpt-small-1a2b3c4d --from-step 4000 --steps 10000",
    "update": "Example: liver jobs update gpt-small-1a2b3c4d --nodes-max 8",
    "delete": "Example: liver jobs delete gpt-small-1a2b3c4d --yes",
    "rotate_key": "Example: liver jobs rotate-key gpt-small-1a2b3c4d",
    "decisions": "Example: liver jobs decisions gpt-small-1a2b3c4d",
    "metrics": "Example: liver jobs metrics gpt-small-1a2b3c4d --name loss --name own/score --csv",
    "plan": "Example: liver jobs plan gpt-small-1a2b3c4d --without node-3",
}
DECISIONS = (
    Column("WHEN"),
    Column("DID"),
    Column("LAYOUT"),
    Column("NODES", right=True),
    Column("ASKED BY"),
    Column("REASON", below=True),
)
SHOWN = 20
ROWS_MAX = 1_000_000
LOSSES = (Column("IF LOST"), Column("LAYOUT"), Column("PLAN"))
WEIGHED = (
    Column("NODES", right=True),
    Column("LAYOUT"),
    Column("STEP", right=True),
    Column("USD/H", right=True),
    Column("WORTH USD/H", right=True),
)
WANTED = (
    Column("POOL"),
    Column("PLACE"),
    Column("SOLD AS"),
    Column("HELD", right=True),
    Column("SHOULD HOLD", right=True),
    Column("USD/H OF ONE", right=True),
)
OPTIONS = (
    Column("OPTION"),
    Column("PLACE"),
    Column("NODES", right=True),
    Column("SPARES", right=True),
    Column("HOLDS"),
    Column("USD/H", right=True),
    Column("WORTH USD/H", right=True),
)
ALTERNATIVES = (Column("LAYOUT"), Column("NODES", right=True), Column("STEP", right=True), Column("KNOWN BY"))


def stop(
    job_id: JobId, service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Stop a job: its ranks end after their step, with a checkpoint if the job file has a place for one.

    Stopping a stopped job changes nothing. `liver jobs resume` continues it."""
    client = connect(service_url, token_file)
    job = client.post(f"/api/v1/jobs/{find_job(client, job_id)}/stop")
    _say(job, f"{job['state']}, stop was asked for", as_json=as_json)


def pause(
    job_id: JobId, service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Let a job stand until `liver jobs resume`: its ranks end after their step, with a checkpoint.

    Other jobs may use its nodes meanwhile."""
    client = connect(service_url, token_file)
    job = client.post(f"/api/v1/jobs/{find_job(client, job_id)}/pause")
    _say(job, f"{job['state']}, a pause was asked for", as_json=as_json)


def resume(
    job_id: JobId,
    steps: Annotated[int | None, typer.Option(min=1, help="Its new stop.steps; without it, as before.")] = None,
    from_step: Annotated[
        int | None, typer.Option(min=0, help="Which checkpoint; without it, the newest that is not damaged.")
    ] = None,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Continue a paused, stopped, finished or failed job from its newest checkpoint, once enough nodes are ready.

    With --from-step it goes back: no start uses later checkpoints any more, until the job writes them anew."""
    client = connect(service_url, token_file)
    body = {name: value for name, value in (("steps", steps), ("from_step", from_step)) if value is not None}
    job = client.post(f"/api/v1/jobs/{find_job(client, job_id)}/resume", content=json.dumps(body).encode())
    _say(job, f"{job['state']}, it goes on as soon as it can", as_json=as_json)


def update(
    job_id: JobId,
    *,
    name: Annotated[str | None, typer.Option(help="Its new name; the id stays.")] = None,
    nodes_min: Annotated[int | None, typer.Option(min=1, help="Its new nodes.min.")] = None,
    nodes_max: Annotated[int | None, typer.Option(min=1, help="Its new nodes.max.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Its new stop.steps; not while it has ranks.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Its new checkpoint.every_steps; not while it has ranks.")
    ] = None,
    prefer: Annotated[Prefer | None, typer.Option(help="Which handoff is taken where several fit.")] = None,
    hang_restart_s: Annotated[
        str | None, typer.Option(help="Its new hang_restart_s; 0: never; none: the default.", metavar="SECONDS")
    ] = None,
    hook_s_max: Annotated[float | None, typer.Option(help="Its new hook_s_max; 0 takes it away.")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Its new budget_usd; 0 takes it away.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Its new deadline with time zone; none takes it away.")] = None,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Change a job while it lives. Ranks read steps and interval when they start: pause the job for these."""
    nodes = {"min": nodes_min, "max": nodes_max}
    wanted: dict[str, Any] = {
        "name": name,
        "nodes": {bound: value for bound, value in nodes.items() if value is not None} or None,
        "stop": None if steps is None else {"steps": steps},
        "checkpoint": None if checkpoint_every is None else {"every_steps": checkpoint_every},
        "prefer": prefer,
    }
    change = {field: value for field, value in wanted.items() if value is not None}
    change |= {} if hang_restart_s is None else {"hang_restart_s": _seconds(hang_restart_s)}
    change |= {} if hook_s_max is None else {"hook_s_max": hook_s_max or None}
    change |= {} if budget_usd is None else {"budget_usd": budget_usd or None}
    change |= {} if deadline is None else {"deadline": None if deadline == "none" else deadline}
    if not change:
        fail("nothing to change: give an option, see liver jobs update --help", code=2)
    client = connect(service_url, token_file)
    job = client.patch(f"/api/v1/jobs/{find_job(client, job_id)}", change)
    _say(job, f"changed, {job['state']}: {job['reason']}", as_json=as_json)


def _seconds(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        fail(f"hang_restart_s: must be a number of seconds or none, not {text!r}", code=2)


def delete(
    job_id: JobId,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
) -> None:
    """Delete a job that has ended, with its steps, logs and handoffs. Its checkpoints on disk stay."""
    client = connect(service_url, token_file)
    found = find_job(client, job_id)
    if not yes and not typer.confirm(f"delete {found} with all that is known of it?", err=True):
        raise typer.Exit(1)
    client.delete(f"/api/v1/jobs/{found}")
    typer.echo(f"{found} is deleted")


def rotate_key(
    job_id: JobId, service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Give the agents of a job a new key for what they say to each other.

    The key before stays valid until each node that has a part in the job has the new one; `liver audit` shows when it
    is dropped. The service does this by itself when a node has no part in the job any more."""
    client = connect(service_url, token_file)
    job = client.post(f"/api/v1/jobs/{find_job(client, job_id)}/rotate-key")
    _say(job, "has a new key; the one before is valid until all its nodes have the new one", as_json=as_json)


def decisions(
    job_id: JobId,
    limit: Limit = 20,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List what the service decided about a job, newest first, with its reasons. --json shows the alternatives too."""
    client = connect(service_url, token_file)
    found = client.listed(f"/api/v1/jobs/{find_job(client, job_id)}/decisions", limit=limit, every=every)
    if as_json:
        return print_json(found)
    rows = [
        (
            since(item["decided_at"]),
            item["action"].replace("_", " "),
            layout(item["layout"]),
            str(len(item["nodes"])),
            item["asked_by"],
            item["reason"],
        )
        for item in found
    ]
    print_table(DECISIONS, rows, empty="nothing was decided yet")


def plan(
    job_id: JobId,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="As if this node were gone; may be repeated.", metavar="NODE")
    ] = None,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what the service would decide about a job now, without acting on it."""
    client = connect(service_url, token_file)
    found = client.get(f"/api/v1/jobs/{find_job(client, job_id)}/plan", without=without or None)
    if as_json:
        return print_json(found)
    print_details(
        (
            ("job", found["job_id"]),
            ("decision", f"{found['verdict']}: {found['verdict_reason']}"),
            ("layout", layout(found["layout"])),
            ("nodes", names(found["nodes"])),
            ("next", f"{found['action'].replace('_', ' ')}: {found['reason']}" if found["action"] else ""),
        )
    )
    rows = [
        (
            layout(item["layout"]),
            str(item["nodes"]),
            seconds(item["step_s"]),
            "measured" if item["measured"] else f"predicted, +-{item['step_error'] or 0:.0%}",
        )
        for item in found["alternatives"]
    ]
    typer.echo("")
    print_table(ALTERNATIVES, rows, empty="no layout fits")
    if weighed := [
        (
            str(item["nodes"]),
            layout(item["layout"]),
            seconds(item["step_s"]),
            *("-" if item[name] is None else f"{item[name]:.2f}" for name in ("usd_per_hour", "usd_per_hour_worth")),
        )
        for item in found["options"]
    ]:
        typer.echo("")
        print_table(WEIGHED, weighed, empty="")
    if found["wanted"] is not None:
        _print_wanted(found["wanted"])
    if losses := [(item["what"], layout(item["layout"]), item["reason"]) for item in found["losses"]]:
        typer.echo("")
        print_table(LOSSES, losses, empty="")


def _print_wanted(found: dict) -> None:
    """What the policy wants the job to have, and what that was chosen from."""
    beside = f" and {found['spares']} spare{'s' * (found['spares'] > 1)}" if found["spares"] else ""
    typer.echo("")
    print_details(
        (
            ("should have", f"{layout(found['layout'])} on {found['nodes']} nodes{beside}"),
            ("no use for", names(found["gives_back"])),
        )
    )
    rows = [
        (
            each["pool"],
            each["place"] or "any",
            each["market"].replace("_", " "),
            str(each["held"]),
            str(each["hold"]),
            f"{each['usd_per_hour']:.2f}",
        )
        for each in found["pools"]
    ]
    typer.echo("")
    print_table(WANTED, rows, empty="")
    rows = [
        (
            layout(each["layout"]),
            each["place"],
            str(each["nodes"]),
            str(each["spares"]),
            ", ".join(f"{count} {pool}" for pool, count in each["hold"]),
            f"{each['usd_per_hour']:.2f}",
            f"{each['utility_usd_per_hour']:.2f}",
        )
        for each in found["weighed"]
    ]
    typer.echo("")
    print_table(OPTIONS, rows, empty="")


def metrics(
    job_id: JobId,
    *,
    name: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be given several times. Default: all.", metavar="NAME")
    ] = None,
    after: Annotated[int, typer.Option(min=-1, help="Only steps above this one.", metavar="STEP")] = -1,
    until: Annotated[int | None, typer.Option(min=0, help="Only steps up to this one.", metavar="STEP")] = None,
    points: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=5_000,
            help=f"So many steps at most, evenly spread. Default: {SHOWN} in a table, every step as CSV or JSON.",
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV; a field is empty where there is no number.")
    ] = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show loss, learning rate, gradient norm, and what the job reports of its own, by step.

    Each step stands there once, also where it was made again after a restart."""
    if as_csv and as_json:
        fail("--csv, --json: give one of them", code=2)
    client = connect(service_url, token_file)
    path = f"/api/v1/jobs/{find_job(client, job_id)}/metrics"
    wanted = {"name": name or None, "after": after, "until": COUNT_MAX if until is None else until}
    if points is None and (as_csv or as_json):
        rows = client.listed(path, limit=ROWS_MAX, every=True, **wanted)
    else:
        rows = client.get(path, points=points or SHOWN, **wanted)
    if as_json:
        print_json(rows)
    elif as_csv:
        _print_csv(rows)
    else:
        names = _names(rows)
        columns = (Column("STEP", right=True), *(Column(name, right=True) for name in names))
        print_table(columns, _lines(rows, names), empty="no numbers yet")


def _say(job: dict[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        typer.echo(f"{job['job_id']}: {what}")


def _lines(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    return [[str(row["step"]), *(_shown(row["values"], name) for name in names)] for row in rows]


def _shown(values: dict[str, float | None], name: str) -> str:
    if name not in values:
        return "-"
    value = values[name]
    return "nan" if value is None else f"{value:.6g}"


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    names = _names(rows)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["step", "generation", "at", *names])
    for row in rows:
        writer.writerow([row["step"], row["generation"], row["at"], *(row["values"].get(name) for name in names)])


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Those that LiveR reports by itself first."""
    found = {name for row in rows for name in row["values"]}
    built_in = [name for name in BUILT_IN_METRICS if name in found]
    return [*built_in, *sorted(found.difference(built_in))]
