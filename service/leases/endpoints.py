"""REST of leases, and of pools: what a node of each costs."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from agent.protocol.errors import FieldProblem
from agent.protocol.values import WrittenUtc
from liver_core.layout.limits import Identifier, NodeId
from service.audit.operations import note
from service.context import PERSON_ONLY, ContextOf, OperatorOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.edge.tags import PreconditionOf, version_of
from service.leases.operations import lock_pool, set_price
from service.leases.queries import current_prices, list_leases, price_of, prices_of
from service.leases.tables import LeaseRow, PoolPriceRow
from service.ledger.repricing import move_to_price
from service.ledger.sums import Unsplittable
from service.paging import PagesOf
from service.problems import invalid, not_found

router = APIRouter(prefix="/api/v1/pools", tags=["pools"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
leases = APIRouter(prefix="/api/v1/leases", tags=["leases"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class LeaseOut(BaseModel):
    """One life of one node, from the time for which its machine is paid, or else its first report, until it is gone."""

    lease_id: int
    node_id: str
    instance_id: int = Field(description="Its machine, see `GET /api/v1/instances`.")
    pool: str
    slots: int
    started_at: datetime
    ended_at: datetime | None = Field(description="Null while it lasts.")
    end_reason: str

    @classmethod
    def of(cls, row: LeaseRow) -> "LeaseOut":
        """From its row."""
        return cls.model_validate(row, from_attributes=True)


class PriceIn(BaseModel):
    """A price from a moment on."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"examples": [{"price_usd_per_hour": 3.1}]},
    )

    price_usd_per_hour: float = Field(ge=0, le=100_000, description="Of one node.")
    egress_usd_per_gb: float | None = Field(
        default=None, ge=0, le=1_000, description="Of 10^9 bytes that leave the pool; as before, if absent."
    )
    on_demand_usd_per_hour: float | None = Field(
        default=None, ge=0, le=100_000, description="Of such a node on demand; as before, if absent."
    )
    effective_from: WrittenUtc | None = Field(default=None, description="Now, if absent.")


class PriceOut(BaseModel):
    """What a pool costs from a moment on."""

    pool: str
    price_usd_per_hour: float = Field(description="Of one node.")
    egress_usd_per_gb: float | None = Field(description="Of 10^9 bytes that leave the pool; null if not known.")
    on_demand_usd_per_hour: float | None = Field(description="Of such a node on demand; null if not known.")
    effective_from: datetime

    @classmethod
    def of(cls, row: PoolPriceRow) -> "PriceOut":
        """From its row."""
        egress, on_demand = row.egress_usd_per_gb, row.on_demand_usd_per_hour
        return cls(
            pool=row.pool,
            price_usd_per_hour=float(row.price_usd_per_hour),
            egress_usd_per_gb=None if egress is None else float(egress),
            on_demand_usd_per_hour=None if on_demand is None else float(on_demand),
            effective_from=row.effective_from,
        )


@leases.get("", operation_id="list_leases", summary="List leases, newest first")
def list_leases_of(
    session: SessionOf,
    pages: PagesOf,
    node_id: Annotated[NodeId | None, Query(description="Only of this node.")] = None,
) -> list[LeaseOut]:
    """Also those that have ended, with the reason."""
    return [LeaseOut.of(row) for row in list_leases(session, pages, node_id=node_id)]


@router.get("/prices", operation_id="list_prices", summary="Current price of each pool")
def list_all(context: ContextOf, session: SessionOf, pages: PagesOf) -> list[PriceOut]:
    """A pool without a price costs nothing in the ledger, which says for how much time it knew none."""
    return [PriceOut.of(row) for row in current_prices(session, pages, now=context.clock())]


@router.get("/{pool}/prices", operation_id="list_prices_of_pool", summary="All prices of a pool, newest first")
def history(session: SessionOf, pages: PagesOf, pool: Annotated[Identifier, Path()]) -> list[PriceOut]:
    """Also those to come. Each counts until the next one begins; the first also counts for the time before it."""
    return [PriceOut.of(row) for row in prices_of(session, pages, pool)]


@router.get("/{pool}/price", operation_id="show_price", summary="Current price of a pool")
def show(context: ContextOf, session: SessionOf, pool: Annotated[Identifier, Path()], response: Response) -> PriceOut:
    """Its ETag is good for If-Match when the price is set."""
    row = price_of(session, pool, now=context.clock())
    if row is None:
        raise not_found("price of pool", pool)
    response.headers["ETag"] = _version(row)
    return PriceOut.of(row)


@router.put("/{pool}/price", operation_id="set_price", summary="Set the price of a pool")
def put(
    context: ContextOf,
    session: SessionOf,
    actor: OperatorOf,
    known: PreconditionOf,
    pool: Annotated[Identifier, Path()],
    price: PriceIn,
) -> PriceOut:
    """Prices are appended: what was spent before `effective_from` keeps its price, and what is spent after it has the
    new one, also where that lies in the past."""
    lock_pool(session, pool)
    present = price_of(session, pool, now=context.clock())
    known.check(f"the price of pool {pool}", None if present is None else _version(present))
    effective_from = price.effective_from or context.clock()
    try:
        move_to_price(session, pool, effective_from)
    except Unsplittable as error:
        raise invalid(FieldProblem(field="effective_from", rule=str(error))) from None
    row = set_price(session, pool=pool, effective_from=effective_from, **price.model_dump(exclude={"effective_from"}))
    given = price.model_dump(exclude={"effective_from"}, exclude_none=True)
    note(session, actor, "set_price", pool, now=context.clock(), **given)
    return PriceOut.of(row)


def _version(row: PoolPriceRow) -> str:
    return version_of(row.price_usd_per_hour, row.egress_usd_per_gb, row.on_demand_usd_per_hour, row.effective_from)
