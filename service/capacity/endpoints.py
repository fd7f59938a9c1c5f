"""REST of machines and of the requests that they came from."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from agent.protocol.sync import Provider
from liver_core.layout.limits import NodeId
from service.capacity.queries import list_instances
from service.capacity.tables import InstanceRow, RequestRow
from service.context import PERSON_ONLY, SessionOf
from service.edge.routes import PeoplesRoute
from service.paging import PagesOf
from service.policy.types import Market

router = APIRouter(prefix="/api/v1/instances", tags=["capacity"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class RequestOut(BaseModel):
    """Machines that somebody asked for."""

    request_id: int
    provider: Provider
    provider_id: str | None = Field(description="The provider's own name of the request.")
    pool: str
    machines: int
    market: Market | None = Field(description="How they are sold; null where a person asked.")
    place: str = Field(description="The zone or pool that they must be in; empty where any will do.")
    asked_by: str
    asked_at: datetime
    ended_at: datetime | None = Field(description="Nothing more comes of it since then.")
    end_reason: str


class InstanceOut(BaseModel):
    """One machine: it has a lease for each time in which it was a node."""

    instance_id: int
    provider: Provider
    provider_id: str | None = Field(description="The provider's own name of the machine; null if not known here.")
    zone: str | None = Field(description="The provider's zone that it is in; null if not known here.")
    node_id: str | None = Field(description="Null until its agent has reported.")
    pool: str
    known_since: datetime
    paid_from: datetime | None = Field(description="From then on it is paid, and boots; null if not known.")
    paid_until: datetime | None
    released_at: datetime | None = Field(description="Since then it is none of ours; null while it is.")
    request: RequestOut | None = Field(description="Null once it is kept no longer.")

    @classmethod
    def of(cls, row: InstanceRow, request: RequestRow | None) -> "InstanceOut":
        """From its rows."""
        values = {name: getattr(row, name) for name in cls.model_fields if name != "request"}
        if request is None:
            return cls(**values, request=None)
        return cls(**values, request=RequestOut(**{name: getattr(request, name) for name in RequestOut.model_fields}))


@router.get("", operation_id="list_instances", summary="List machines, newest first")
def list_all(
    session: SessionOf,
    pages: PagesOf,
    node_id: Annotated[NodeId | None, Query(description="Only of this node.")] = None,
) -> list[InstanceOut]:
    """Each with the request that it came from, as long as that is kept. Today people start the machines."""
    return [InstanceOut.of(*found) for found in list_instances(session, pages, node_id=node_id)]
