"""Measured wires of a job."""

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, JsonList


class WireRow(Base):
    """How one node reads another, as its agent measured last. `wire` is null where nothing could be read."""

    __tablename__ = "wires"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    target: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str] = mapped_column(primary_key=True)
    wire: Mapped[str | None]
    bytes_per_s: Mapped[float]
    latency_s: Mapped[float]
    refused: Mapped[JsonList]
    failed: Mapped[str]
    measured_at: Mapped[datetime]
