"""`liver jobs what-if`: what a job of the service would have done on a trace of capacity, answered by the service."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.client import DEFAULT_URL, AsJson, ServiceUrl, TokenFile, connect, text_of
from service.cli.offline.simulate import POLICIES, Machines, enacted_rows
from service.cli.output import print_details, print_json, print_table, seconds
from service.cli.pages import page
from service.cli.which import JobId, find_job

EXAMPLE = "Example: liver jobs what-if gpt-small --trace p3-trace.csv, or without --trace on the service's own nodes"
FILE_BYTES_MAX = 4 * 1024 * 1024
ANSWER_S = 60.0
"""The service gives up before, unless it was told to take longer."""

Slots = Annotated[int | None, typer.Option(min=1, max=64, help="GPUs of a node.", show_default="as the nodes have")]
Change = Annotated[
    float | None,
    typer.Option("--change", min=0, max=3_600, help="Seconds that a change loses.", show_default="by state"),
]
Notice = Annotated[
    float | None, typer.Option("--notice", min=0, max=3_600, help="Seconds of notice.", show_default="120")
]
Unannounced = Annotated[
    float | None, typer.Option(min=0, max=1, help="Share of losses without notice.", show_default="0.05")
]
Acquire = Annotated[
    float | None,
    typer.Option(
        "--acquire", min=0, max=86_400, help="Seconds to get a node back.", show_default="by the job, else 120"
    ),
]
Spares = Annotated[
    int | None, typer.Option(min=0, max=64, help="Nodes held beyond those used.", show_default="by the job, else 4")
]
Gain = Annotated[
    float | None,
    typer.Option(
        "--gain", min=0, max=10, help="Share by which another choice must be better.", show_default="by the job, else 0"
    ),
]
Value = Annotated[
    float | None,
    typer.Option("--usd-per-mtok", min=0, help="What a million tokens is worth.", show_default="by the job"),
]


def what_if(
    job_id: JobId,
    *,
    trace: Annotated[
        Path | None, typer.Option(help=f"Capacity trace, at most 4 MiB; see {page('policy.md')}.", metavar="FILE")
    ] = None,
    own_hours: Annotated[
        int, typer.Option("--own", min=1, max=9_999, help="Without --trace: the service's nodes in so many hours.")
    ] = 48,
    prices: Annotated[
        Path | None,
        typer.Option(help="CSV with pool, from_s and usd_per_hour, of pools spot and on-demand.", metavar="FILE"),
    ] = None,
    slots: Slots = None,
    device: Annotated[str | None, typer.Option(help="The GPU.", show_default="as the nodes have")] = None,
    change_s: Change = None,
    notice_s: Notice = None,
    unannounced: Unannounced = None,
    acquire_s: Acquire = None,
    spares: Spares = None,
    gain: Gain = None,
    value: Value = None,
    machines: Machines = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace of capacity with a job of the service: what it would have made and cost, and under other policies.

    Steps are as the job has made them, or else predicted; the policy is that of its file.

    Goodput is the share of a free ideal that changes at no cost.
    """
    client = connect(service_url, token_file)
    knobs = {
        "slots_per_node": slots,
        "device": device,
        "change_s": change_s,
        "notice_s": notice_s,
        "unannounced_share": unannounced,
        "acquire_s": acquire_s,
        "spares_max": spares,
        "gain_min": gain,
        "usd_per_mtok": value,
    }
    asked: dict[str, Any] = {
        "job": find_job(client, job_id),
        "machines": machines,
        "knobs": {name: each for name, each in knobs.items() if each is not None},
        **_capacity(trace, own_hours, prices),
    }
    found = client.post("/api/v1/what-if", content=json.dumps(asked).encode(), answer_s=ANSWER_S)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _capacity(trace: Path | None, own_hours: int, prices: Path | None) -> dict[str, Any]:
    """Which trace and prices are meant, as the API takes them."""
    found: dict[str, Any] = {"builtin": f"own-{own_hours}h"}
    if trace is not None:
        found = {"trace": {"name": trace.name[:256], "text": text_of(trace, "--trace", bytes_max=FILE_BYTES_MAX)}}
    if prices is not None:
        found["prices"] = text_of(prices, "--prices", bytes_max=FILE_BYTES_MAX)
    return found


def _show(found: dict[str, Any]) -> None:
    rows = [
        (
            run["policy"].replace("_", " "),
            f"{run['goodput']:.4f}",
            f"{run['tokens'] / 1e6:.1f}",
            f"{run['usd']:.2f}",
            f"{run['usd_per_mtok']:.4g}" if run["usd_per_mtok"] is not None else "-",
            str(run["changes"]),
        )
        for run in found["policies"]
    ]
    print_table(POLICIES, rows, empty="nothing was replayed")
    ideal, oracles = found["ideal_tokens"] or 1.0, found["oracles"]
    lost = found["policies"][0]["tokens_lost_by"].items()
    how = "extrapolated from" if found["lost_s_is_guess"] else "by"
    print_details(
        [
            ("trace", f"{found['trace']}, {found['hours']:.1f} hours, at most {found['nodes_most']} nodes"),
            ("nodes", f"{found['slots_per_node']} x {found['device']}"),
            ("short of the count oracle", f"{oracles['regret_count']:.3%}"),
            ("short of the victim oracle", f"{oracles['regret_victim']:.3%}"),
            ("tokens lost by", ", ".join(f"{name.replace('_', ' ')} {tokens / ideal:.2%}" for name, tokens in lost)),
            ("cost of a change", f"{seconds(found['lost_s'])}, {how} {found['lost_s_source']}"),
            *enacted_rows(found),
            *(("not followed", text) for text in found["not_followed"]),
        ]
    )
