"""REST of nodes: list, show, drain."""

from collections import defaultdict
from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy.orm import Session

from liver_core.layout.limits import NodeId, ShortText
from service.audit.operations import note
from service.clouds.queries import channels_of
from service.context import PERSON_ONLY, ContextOf, OperatorOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.edge.rows import answer_with
from service.nodes.queries import jobs_of_nodes, list_nodes
from service.nodes.schemas import DrainIn, NodeOut
from service.nodes.tables import NodeRow, NodeState
from service.notices.operations import drain_node, undo_drain
from service.notices.queries import as_fact, open_notices
from service.notices.rules import takes_node
from service.paging import ManyPagesOf, in_batches
from service.problems import not_found

router = APIRouter(prefix="/api/v1/nodes", tags=["nodes"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


@router.get("", operation_id="list_nodes", summary="List nodes by name", response_model=list[NodeOut])
def list_all(
    context: ContextOf,
    session: SessionOf,
    response: Response,
    pages: ManyPagesOf,
    state: Annotated[
        list[NodeState] | None,
        Query(max_length=len(NodeState), description="Only in this state; may be given several times."),
    ] = None,
    pool: Annotated[ShortText | None, Query(description="Only of this pool.")] = None,
) -> Response:
    """Also nodes that are gone."""
    rows = list_nodes(session, pages, states=state or (), pool=pool)
    described = (node for batch in in_batches(rows) for node in describe(context, session, batch))
    return answer_with(described, NodeOut, response)


@router.get("/{node_id}", operation_id="show_node", summary="Show one node")
def show(context: ContextOf, session: SessionOf, node_id: NodeId) -> NodeOut:
    """With the ranks on it."""
    row = session.get(NodeRow, node_id)
    if row is None:
        raise not_found("node", node_id)
    return describe(context, session, [row])[0]


@router.post("/{node_id}/drain", operation_id="drain_node", summary="Have jobs leave a node")
def drain(context: ContextOf, session: SessionOf, actor: OperatorOf, node_id: NodeId, wanted: DrainIn) -> NodeOut:
    """As if its cloud had announced that it goes. It stays empty until `undrain`."""
    now = context.clock()
    drain_node(session, node_id, in_s=wanted.in_s, now=now)
    note(session, actor, "drain_node", node_id, now=now, in_s=wanted.in_s)
    return show(context, session, node_id)


@router.post("/{node_id}/undrain", operation_id="undrain_node", summary="Let jobs use a drained node again")
def undrain(context: ContextOf, session: SessionOf, actor: OperatorOf, node_id: NodeId) -> NodeOut:
    """A handoff that is open already goes on; the job may grow back afterwards."""
    now = context.clock()
    undo_drain(session, node_id, now=now)
    note(session, actor, "undrain_node", node_id, now=now)
    return show(context, session, node_id)


def describe(context: ContextOf, session: Session, rows) -> list[NodeOut]:
    """Nodes with their jobs and open notices."""
    noticed = defaultdict(list)
    for fact in map(as_fact, open_notices(session, now=context.clock(), node_ids=[row.node_id for row in rows])):
        if takes_node(fact.kind):
            noticed[fact.node_id].append(fact)
    jobs = jobs_of_nodes(session, [row.node_id for row in rows])
    channels = channels_of(session, rows, now=context.clock())
    return [
        NodeOut.of(
            row,
            jobs=jobs.get(row.node_id, []),
            notices=noticed[row.node_id],
            channels=channels.get(row.node_id, ()),
        )
        for row in rows
    ]
