"""What a cloud said of one machine, by whichever channel. Pure: parsers make these, `rules` judges them.

Nothing here is trusted: a fact is about a node only if the service knows the machine, see `operations`.
"""

import json
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from agent.protocol.sync import Provider
from liver_core.layout.limits import fitting

RAW_CHARS_MAX = 8_000
NAME_CHARS_MAX = 256


class FactKind(StrEnum):
    """What was said of a machine. Interruption, maintenance: it will be taken. Rebalance: it may be, which is advice.
    Going: it is being stopped right now. Gone: it is stopped or deleted. The last two come too late to save anything
    first; they tell of what nobody had announced."""

    INTERRUPTION = "interruption"
    MAINTENANCE = "maintenance"
    REBALANCE = "rebalance"
    GOING = "going"
    GONE = "gone"


class Disposition(StrEnum):
    """What was done with it. Acts: jobs leave the node because of it. Adds: they were leaving already, and this is one
    more channel that says so. Advice: it is known, and moves nobody. Withdraws: the channel takes back what it said.
    Noted: it changes nothing. Repeated: the channel had said so before. Late: what it announces is over. Foreign: it is
    about no machine of this installation. Malformed: nobody can tell what it says."""

    ACTS = "acts"
    ADDS = "adds"
    ADVICE = "advice"
    WITHDRAWS = "withdraws"
    NOTED = "noted"
    REPEATED = "repeated"
    LATE = "late"
    FOREIGN = "foreign"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class CloudFact:
    """One thing that a cloud said of one machine.

    `provider_id`: as in `NodeInfo`. `said_at`, `deadline_at`: by the cloud's clock; `deadline_at` is None where it
    names no time and none can be told. `channel`: which way it came, for example aws-queue; it is the source of the
    notice that follows. `message_id`: of the cloud's own event, the same for each delivery of it. `raw`: as received.
    `is_withdrawal`: the cloud takes back what it announced of this kind. `event_id`: what the cloud calls a planned
    event, of which one machine may have several: what is said of one says nothing of another. Empty for all else."""

    provider: Provider
    provider_id: str
    kind: FactKind
    said_at: datetime
    deadline_at: datetime | None
    channel: str
    message_id: str
    raw: str
    is_withdrawal: bool = False
    event_id: str = ""

    def bounded(self) -> "CloudFact":
        """The same, cut to what is stored."""
        return replace(
            self,
            provider_id=fitting(self.provider_id, NAME_CHARS_MAX),
            message_id=fitting(self.message_id, NAME_CHARS_MAX),
            raw=fitting(self.raw, RAW_CHARS_MAX),
        )


def json_of(text: str) -> Any:
    """What a message holds. Raises ValueError where it is no JSON, or where a text in it cannot be written in UTF-8:
    JSON may have halves of surrogate pairs, and no database takes one."""
    found = json.loads(text)
    json.dumps(found, ensure_ascii=False).encode()
    return found


@dataclass(frozen=True, slots=True)
class Unread:
    """A message that nobody can make sense of. `reason`: what is wrong with it, in plain words."""

    channel: str
    message_id: str
    reason: str
    raw: str
