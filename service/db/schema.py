"""Imports every table, so that the metadata is whole. Alembic and the tests compare the database with it."""

from sqlalchemy import MetaData

from service.audit import tables as audit
from service.capacity import tables as capacity
from service.clouds import tables as clouds
from service.db.base import Base
from service.handoffs import tables as handoffs
from service.jobs import tables as jobs
from service.leases import tables as leases
from service.ledger import tables as ledger
from service.metrics import tables as metrics
from service.nodes import tables as nodes
from service.notices import tables as notices
from service.peer_keys import tables as peer_keys
from service.sessions import tables as sessions
from service.tokens import tables as tokens
from service.wires import tables as wires

NOUNS = (
    *(audit, capacity, clouds, handoffs, jobs, leases, ledger, metrics, nodes, notices, peer_keys, sessions, tokens),
    wires,
)


def metadata() -> MetaData:
    """The metadata of all tables."""
    return Base.metadata
