"""What every message of the product has in common: strict models, and the words that only agents and service share.

Pure: pydantic only, no torch, no input or output. What belongs to a handoff itself (reasons, rungs, rosters, stages)
is that of liver_core; it stands once.
"""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from liver_core.layout import Members, ParallelLayout, check_members
from liver_core.layout.limits import (
    BUILT_IN_METRICS,
    COUNT_MAX,
    METRICS_PER_STEP_MAX,
    UTC_LEAST,
    UTC_MOST,
    Bound,
    MetricName,
)

URL_PATTERN = r"^https?://[^\s\x00]+$"
Url = Annotated[str, Bound(pattern=URL_PATTERN, max_length=512)]
Step = Annotated[int, Bound(ge=0, le=COUNT_MAX)]
Amount = Annotated[float, Bound(ge=0.0, le=1e18)]
"""A quantity that is no time, such as bytes in a second."""
MetricValues = Annotated[dict[MetricName, float | None], Bound(max_length=METRICS_PER_STEP_MAX + len(BUILT_IN_METRICS))]
"""Numbers of one step by name; null: not a number, or infinite."""
Utc = Annotated[
    AwareDatetime,
    Bound(ge=datetime.fromtimestamp(UTC_LEAST, UTC), lt=datetime.fromtimestamp(UTC_MOST, UTC)),
    Field(description="A time with its zone, in the years 2000 to 2099."),
]


def shifted(moment: datetime | None, by: timedelta) -> datetime | None:
    """The time so much later, within what a message may say; None stays."""
    if moment is None or not by:
        return moment
    seconds = min(max(moment.timestamp() + by.total_seconds(), UTC_LEAST), UTC_MOST - 1.0)
    return moment + by if UTC_LEAST < seconds < UTC_MOST - 1.0 else datetime.fromtimestamp(seconds, UTC)


def _written(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("must be a time with its time zone, such as 2030-01-31T12:00:00Z")
    return value


WrittenUtc = Annotated[Utc, Field(strict=False), BeforeValidator(_written)]
"""The same in a body that FastAPI reads: there a time is text too, and never a number."""


class Message(BaseModel):
    """Base of every message: unknown fields are refused, nothing is coerced, and a message never changes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Placement(Message):
    """A layout and who holds each rank, not yet bound to a generation (standing plans and proposals)."""

    layout: ParallelLayout
    members: Members

    @model_validator(mode="after")
    def _one_slot_for_each_rank(self) -> Self:
        check_members(self.layout, self.members)
        return self

    def node_ids(self) -> tuple[str, ...]:
        """The nodes used, each once, in rank order."""
        return tuple(dict.fromkeys(member.node_id for member in self.members))


class HandoffState(StrEnum):
    """The state machine of one handoff; `aborted` is reached from the first three only, `broken` only after them."""

    PROPOSED = "proposed"
    PREPARING = "preparing"
    STREAMING = "streaming"
    READY = "ready"
    CUTTING_OVER = "cutting_over"
    ACTIVE = "active"
    ABORTED = "aborted"
    BROKEN = "broken"


class HandoffCause(StrEnum):
    """What made somebody propose a handoff; the last two have no live world to take over."""

    NOTICE = "notice"
    GROW = "grow"
    REQUEST = "request"
    REBALANCE = "rebalance"
    START = "start"
    CHECKPOINT = "checkpoint"


def utc(seconds: float) -> datetime:
    """Seconds since 1970 as an aware time."""
    return datetime.fromtimestamp(seconds, UTC)
