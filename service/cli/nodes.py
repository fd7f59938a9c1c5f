"""`liver nodes`: list, show, drain. `liver notices`: list, end. `liver prices`: list, set."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from service.cli.client import DEFAULT_URL, LISTED, AsJson, Every, Limit, ServiceUrl, TokenFile, connect
from service.cli.columns import Cell, Column, Value, shown, whole
from service.cli.output import deadline, print_details, print_json, print_table, seconds_in, since
from service.cli.which import short_jobs
from service.elapsed import departure, span

app = typer.Typer(help="Nodes whose agents have reported.", no_args_is_help=True)
CLOCK_SHOWN_S = 1.0
LIST = (
    Column("NODE"),
    Column("STATE"),
    Column("SLOTS", right=True),
    Column("JOB"),
    Column("HEARD"),
    Column("NOTICE", below=True),
    Column("PROVIDER", below=True),
    Column("POOL", below=True),
    Column("JOBS RUN AS", below=True, label="jobs run as"),
    Column("NOTICES BY", below=True, label="notices by"),
)


notices = typer.Typer(help="Announcements that nodes will go.", no_args_is_help=True)
NOTICES = (
    Column("NOTICE", right=True),
    Column("NODE"),
    Column("KIND"),
    Column("STATE"),
    Column("HEARD"),
    Column("DEADLINE"),
    Column("SOURCE", below=True, label="from"),
)


prices = typer.Typer(help="What a node of each pool costs.", no_args_is_help=True)
PRICES = (
    Column("POOL"),
    Column("USD PER NODE HOUR", right=True),
    Column("SINCE"),
    Column("USD PER GB OUT", below=True, label="per GB that leaves"),
)


@app.callback()
def nodes() -> None:
    """Nodes whose agents have reported."""


@app.command("list", epilog="Example: liver nodes list --state ready --pool spot-a")
def list_all(
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only in this state; may be given several times."),
    ] = None,
    pool: Annotated[str | None, typer.Option("--pool", help="Only of this pool.")] = None,
    limit: Limit = 1_000,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List nodes with their state, their jobs, when they must go, and whether notices can be heard."""
    client = connect(service_url, token_file)
    found = client.listed("/api/v1/nodes", limit=limit, every=every, state=state or None, pool=pool)
    if as_json:
        return print_json(found)
    ids = short_jobs(job_id for node in found for job_id in node["jobs"])
    rows = [
        (
            node["node_id"],
            node["state"],
            str(node["slots"]),
            Cell(", ".join(ids[job].shown for job in node["jobs"]) or "-", ", ".join(node["jobs"]) or "-"),
            since(node["last_seen_at"]),
            _with_remark(_notice(node), _remark(node)),
            node["provider"],
            node["pool"],
            node["job_user"] or "the agent's user",
            _heard_by(node),
        )
        for node in found
    ]
    print_table(LIST, rows, empty="no nodes")


@app.command("show", epilog="Example: liver nodes show node-3")
def show(
    node_id: Annotated[str, typer.Argument(help="Name of the node; see `liver nodes list`.", metavar="NODE")],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one node, and by which channels a notice about it would be heard."""
    node = connect(service_url, token_file).get(f"/api/v1/nodes/{quote(node_id, safe='')}")
    if as_json:
        return print_json(node)
    machine = f"{node['provider']} {node['provider_id'] or ''} {node['zone'] or ''}".strip()
    print_details(
        (
            ("node", node["node_id"]),
            ("state", node["state"]),
            ("machine", machine),
            ("pool", node["pool"]),
            ("slots", str(node["slots"])),
            ("jobs", ", ".join(node["jobs"])),
            ("heard", since(node["last_seen_at"])),
            ("notice", _with_remark(_notice(node), _remark(node))),
            ("notices by", _heard_by(node)),
            *((item["channel"], _channel(item)) for item in node["channels"]),
        )
    )


def _heard_by(node: dict[str, Any]) -> str:
    """The channels that would tell of a notice; deaf if none would."""
    if node["state"] == "gone":
        return "-"
    return "nobody: deaf" if node["deaf"] else ", ".join(item["channel"] for item in node["channels"] if item["alive"])


def _channel(channel: dict[str, Any]) -> Value:
    state = "alive" if channel["alive"] else f"not alive: {channel['reason']}"
    asked, heard = since(channel["asked_at"]), since(channel["heard_at"])
    return Cell(
        f"{state}; asked {shown(asked)}, last spoke of the node {shown(heard)}",
        f"{state}; asked {whole(asked)}, last spoke of the node {whole(heard)}",
    )


@app.command(epilog="Example: liver nodes drain node-3 --in 120s")
def drain(
    node_id: Annotated[str, typer.Argument(help="Name of the node; see `liver nodes list`.", metavar="NODE")],
    within: Annotated[str, typer.Option("--in", help="When jobs must have left it: 90s, 5min or 2h.")] = "120s",
    undo: Annotated[bool, typer.Option("--undo", help="Let jobs use the node again.")] = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Have jobs leave a node, as if its cloud had announced that it goes. The node stays empty until --undo."""
    body = b"" if undo else json.dumps({"in_s": seconds_in(within, "--in")}).encode()
    path = f"/api/v1/nodes/{quote(node_id, safe='')}/{'undrain' if undo else 'drain'}"
    node = connect(service_url, token_file).post(path, content=body)
    if as_json:
        return print_json(node)
    state = "drained" if node["drained"] else node["state"]
    print_details((("node", node["node_id"]), ("state", state), ("notice", _notice(node))))


@notices.callback()
def of_notices() -> None:
    """Announcements that nodes will go."""


@notices.command("list", epilog="Example: liver notices list --node node-3")
def list_notices(
    node: Annotated[str | None, typer.Option("--node", help="Only of this node.", metavar="NODE")] = None,
    limit: Limit = LISTED,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List notices, newest first."""
    found = connect(service_url, token_file).listed("/api/v1/notices", limit=limit, every=every, node_id=node)
    if as_json:
        return print_json(found)
    rows = [
        (
            str(item["notice_id"]),
            item["node_id"],
            item["kind"],
            item["state"],
            since(item["first_seen_at"]),
            deadline(item["deadline_at"]),
            ", ".join(_with_lag(channel) for channel in item["channels"]),
        )
        for item in found
    ]
    print_table(NOTICES, rows, empty="no notices")


@notices.command(epilog="Example: liver notices end 7")
def end(
    notice_id: Annotated[int, typer.Argument(help="Its number; see `liver notices list`.", metavar="NOTICE", min=1)],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Let a notice count no more, whoever said it: jobs may use its node."""
    notice = connect(service_url, token_file).post(f"/api/v1/notices/{notice_id}/end", content=b"")
    if as_json:
        return print_json(notice)
    print_details((("node", notice["node_id"]), ("kind", notice["kind"]), ("state", notice["state"])))


def _with_lag(channel: dict[str, Any]) -> str:
    taken_back = " (taken back)" if channel["withdrawn_at"] else ""
    return channel["source"] + (f" +{channel['lag_s']:.1f} s" if channel["lag_s"] else "") + taken_back


def _with_remark(notice: Value, remark: str) -> Value:
    return Cell(f"{shown(notice)}; {remark}", f"{whole(notice)}; {remark}") if remark else notice


def _remark(node: dict[str, Any]) -> str:
    """What is odd about the node: an end that is still announced, a clock that is off by more than a second, a silence
    that may be the service's."""
    found, ahead_s, until = [], node["clock_ahead_s"] or 0.0, node["excused_until"]
    if node["announced"] and node["state"] != "gone":
        found.append("its end is still announced, without a time: it gets no ranks")
    if node["overdue"] and node["state"] != "gone":
        found.append("its announced end is past: used after all other nodes")
    if abs(ahead_s) > CLOCK_SHOWN_S:
        found.append(f"its clock is {span(abs(ahead_s))} {'fast' if ahead_s > 0 else 'slow'}")
    if until is not None and node["state"] == "silent" and datetime.fromisoformat(until) > datetime.now(UTC):
        at = datetime.fromisoformat(until).astimezone(UTC)
        found.append(f"not lost before {at:%H:%M:%S} UTC, for many fell silent together")
    return "; ".join(found)


@prices.command("list", epilog="Example: liver prices list --pool aws-us-west-2a")
def list_prices(
    pool: Annotated[str | None, typer.Option("--pool", help="All prices of this pool, newest first.")] = None,
    limit: Limit = LISTED,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List the present price of each pool, or all prices of one."""
    path = f"/api/v1/pools/{quote(pool, safe='')}/prices" if pool is not None else "/api/v1/pools/prices"
    found = connect(service_url, token_file).listed(path, limit=limit, every=every)
    if as_json:
        return print_json(found)
    rows = [
        (item["pool"], f"{item['price_usd_per_hour']:.4f}", since(item["effective_from"]), _per_gb(item))
        for item in found
    ]
    print_table(PRICES, rows, empty="no prices: pools are accounted as costing nothing")


@prices.command("set", epilog="Example: liver prices set aws-us-west-2a 12.24 --from 2026-01-31T12:00:00Z")
def set_price(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    usd_per_hour: Annotated[float, typer.Argument(min=0, help="Price of one node.", metavar="USD_PER_HOUR")],
    since_when: Annotated[
        str | None, typer.Option("--from", help="From when on, with its zone; now, if absent.", metavar="TIME")
    ] = None,
    egress: Annotated[
        float | None, typer.Option("--egress", min=0, help="Of 10^9 bytes that leave the pool.", metavar="USD_PER_GB")
    ] = None,
    on_demand: Annotated[
        float | None, typer.Option("--on-demand", min=0, help="Of such a node on demand.", metavar="USD_PER_HOUR")
    ] = None,
    *,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Set the price of a pool from now or another time on; what was spent before that keeps its price."""
    body = {
        "price_usd_per_hour": usd_per_hour,
        "effective_from": since_when,
        "egress_usd_per_gb": egress,
        "on_demand_usd_per_hour": on_demand,
    }
    given = {name: value for name, value in body.items() if value is not None}
    price = connect(service_url, token_file).put(f"/api/v1/pools/{quote(pool, safe='')}/price", given)
    if as_json:
        print_json(price)
    else:
        per_gb = f", {_per_gb(price)} USD per GB that leaves" if price["egress_usd_per_gb"] is not None else ""
        on_demand_usd = price["on_demand_usd_per_hour"]
        beside = "" if on_demand_usd is None else f", {on_demand_usd:.4f} on demand"
        typer.echo(f"{price['pool']}: {price['price_usd_per_hour']:.4f} USD per node hour{per_gb}{beside}")


def _per_gb(price: dict[str, Any]) -> str:
    return "-" if price["egress_usd_per_gb"] is None else f"{price['egress_usd_per_gb']:.4f}"


def _notice(node: dict[str, Any]) -> Value:
    """When the node goes, or that it is drained; else whether its notice source is being watched."""
    now, deadline = datetime.now(UTC), node["deadline_at"]
    if node["drained"] and deadline is not None and datetime.fromisoformat(deadline) < now:
        return Cell("drained", deadline)
    if node["leaving"]:
        return Cell(departure(deadline, now, is_gone=node["state"] == "gone"), deadline or "unknown")
    health = node["notice_source"]
    if health is None or node["state"] == "gone":
        return "-"
    if health["state"] == "watching":
        return "watching"
    at = datetime.fromisoformat(health["since_at"]).astimezone(UTC)
    return f"{health['state']} since {at:%H:%M:%S} UTC, because {health['reason']}"


clouds = typer.Typer(help="Channels by which clouds tell the service of machines.", no_args_is_help=True)
CLOUDS = (Column("CHANNEL"), Column("STATE"), Column("WHAT"), Column("WHY", below=True), Column("MEND", below=True))


@clouds.callback()
def of_clouds() -> None:
    """What the verbs of clouds share."""


@clouds.command(epilog="Example: liver cloud check")
def check(service_url: ServiceUrl = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Let the service look at each configured cloud. Exit status 1 if something is missing. Needs an admin's token."""
    found = connect(service_url, token_file).get("/api/v1/channels/check")
    if as_json:
        print_json(found)
    else:
        rows = []
        for one in found:
            rows += [
                (one["channel"], item["weight"], item["what"], item["why"], item["mend"]) for item in one["findings"]
            ]
            if not one["findings"]:
                rows.append((one["channel"], "works" if one["on"] else "off", one["turn_on"] or "-", "-", "-"))
        print_table(CLOUDS, rows, empty="there is no channel")
    if any(item["weight"] == "missing" for one in found for item in one["findings"]):
        raise typer.Exit(1)
