"""Which node keeps which peer key. The keys themselves are the job's (`service.jobs.tables`)."""

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base


class PeerKeyHolderRow(Base):
    """The newest of a job's peer keys that a node keeps, as it has said while two were valid."""

    __tablename__ = "peer_key_holders"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"), primary_key=True)
    number: Mapped[int]
