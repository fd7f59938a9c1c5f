"""What may be missing between a cloud and the service, as people read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

from pydantic import BaseModel, Field

from agent.protocol.sync import Provider

SKEW_MAX_S = 30.0
"""A deadline of a notice is wrong by as much as the clocks differ; of 30 s more leaves nothing."""


class Weight(StrEnum):
    """Missing: notices are lost or come too late. Advice: it works, and could be better."""

    MISSING = "missing"
    ADVICE = "advice"


class Lack(BaseModel):
    """One thing that is missing."""

    weight: Weight
    what: str
    why: str = Field(description="What happens because of it.")
    mend: str = Field(description="What to do.")


class ChannelCheck(BaseModel):
    """One channel of an account, as it was found just now."""

    channel: str
    provider: Provider
    on: bool
    turn_on: str = Field(description="How to turn it on; empty where it is on.")
    findings: list[Lack]


@dataclass(frozen=True, slots=True)
class OwnView:
    """What the service knows itself before it looks. `troubles`: by channel, why its readers cannot ask it;
    `machines`: ids of some of our machines, by provider."""

    troubles: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[Provider, tuple[str, ...]] = field(default_factory=dict)


def reader_finding(trouble: str) -> list[Lack]:
    """That the service's own reader of the channel is in trouble, and why. Pure."""
    mend = "mend what it names; the service tries again by itself"
    return [missing(f"reader: {trouble}", "nothing of the channel is heard", mend)] if trouble else []


def clock_finding(date_header: str, now: datetime, cloud: str) -> list[Lack]:
    """Whether the cloud's clock, as in the header Date of an answer, and the service's differ by too much. Pure."""
    try:
        there = parsedate_to_datetime(date_header)
    except (ValueError, TypeError):
        return []
    if there.tzinfo is None:
        return []
    ahead_s = (now - there).total_seconds()
    if abs(ahead_s) <= SKEW_MAX_S:
        return []
    what = f"clock: the service's is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} {cloud}'s"
    why = "deadlines count by that much wrongly, and credentials and tokens are refused"
    return [Lack(weight=Weight.MISSING, what=what, why=why, mend="let NTP set the clock of the database's machine")]


def missing(what: str, why: str, mend: str) -> Lack:
    """One without which notices are lost or late."""
    return Lack(weight=Weight.MISSING, what=what, why=why, mend=mend)


def advice(what: str, why: str, mend: str) -> Lack:
    """One without which it works."""
    return Lack(weight=Weight.ADVICE, what=what, why=why, mend=mend)
