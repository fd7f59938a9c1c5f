"""`liver prices`: list, set."""

from typing import Annotated

import typer

from service.cli.client import DEFAULT_URL, LISTED, AsJson, Every, Limit, ServiceUrl, TokenFile, connect
from service.cli.columns import Column
from service.cli.output import print_json, print_table, since

app = typer.Typer(help="What a node of each pool costs.", no_args_is_help=True)
LIST = (Column("POOL"), Column("USD PER NODE HOUR", right=True), Column("SINCE"))


@app.command("list", epilog="Example: liver prices list")
def list_all(
    limit: Limit = LISTED,
    every: Every = False,
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List the present price of each pool."""
    found = connect(service_url, token_file).listed("/api/v1/pools/prices", limit=limit, every=every)
    if as_json:
        return print_json(found)
    rows = [(item["pool"], f"{item['price_usd_per_hour']:.4f}", since(item["effective_from"])) for item in found]
    print_table(LIST, rows, empty="no prices: pools are accounted as costing nothing")


@app.command("set", epilog="Example: liver prices set aws-us-west-2a 12.24")
def set_one(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    usd_per_hour: Annotated[float, typer.Argument(min=0, help="Price of one node.", metavar="USD_PER_HOUR")],
    service_url: ServiceUrl = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Set the price of a pool from now on; what was spent before keeps its price."""
    client = connect(service_url, token_file)
    price = client.put(f"/api/v1/pools/{pool}/price", {"price_usd_per_hour": usd_per_hour})
    if as_json:
        print_json(price)
    else:
        typer.echo(f"{price['pool']}: {price['price_usd_per_hour']:.4f} USD per node hour")
