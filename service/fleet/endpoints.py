"""REST of the fleet: everything that its first page shows."""

from fastapi import APIRouter

from service.context import PERSON_ONLY, ContextOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.fleet.queries import pending_now, pools_now, strip_since
from service.fleet.schemas import FleetNodes, FleetOut, PendingOut, PoolOut

router = APIRouter(prefix="/api/v1/fleet", tags=["fleet"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


@router.get("", operation_id="show_fleet", summary="The fleet now")
def show(context: ContextOf, session: SessionOf) -> FleetOut:
    """Nodes by pool with prices and with how many went in the last 48 hours; nodes that are about to go."""
    now = context.clock()
    pools = pools_now(session, now=now)
    shown = [PoolOut.of(pool, strip_since(now)) for pool in pools]
    return FleetOut(
        at=now,
        nodes=FleetNodes(
            ready=sum(pool.ready for pool in pools),
            silent=sum(pool.silent for pool in pools),
            leaving=sum(pool.leaving for pool in pools),
            idle=sum(pool.nodes - pool.busy for pool in pools),
            slots=sum(pool.slots for pool in pools),
        ),
        usd_per_hour=sum(pool.usd_per_hour for pool in shown),
        unpriced_nodes=sum(pool.nodes for pool in pools if pool.price is None),
        pools=shown,
        pending=[PendingOut.of(item) for item in pending_now(session, now=now)],
    )
