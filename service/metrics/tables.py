"""The numbers of each step of a job. Bounded for each job: the oldest steps are dropped."""

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, Json


class StepMetricsRow(Base):
    """One step, as the newest generation that made it says. `numbers`: by name; null for NaN and infinity."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    generation: Mapped[int]
    numbers: Mapped[Json]
    at: Mapped[datetime]
