"""How many seconds of a notice can be used: a policy per provider, from reference figures until measured ones exist.

Pure. Usable are about 105 s of AWS's 120 s, about 25 s of GCP's default 30 s and about 115 s of its optional 120 s.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from agent.protocol.sync import Provider


@dataclass(frozen=True, slots=True)
class WarningBudget:
    """`announced_s`: nominal time from announcement to the end. `usable_s`: the part of it that remains after delays.

    A shorter announcement (a late one, a test) reserves the same share for delays.
    """

    announced_s: float
    usable_s: float
    reason: str

    def node_gone_utc(self, first_seen_utc: datetime, deadline_utc: datetime | None) -> datetime:
        """When the node may vanish. If the source names no time: `announced_s` after the first sight."""
        nominal = first_seen_utc + timedelta(seconds=self.announced_s)
        return nominal if deadline_utc is None else deadline_utc

    def safe_by_utc(self, first_seen_utc: datetime, deadline_utc: datetime | None) -> datetime:
        """By when the state must be off the leaving node: the end minus the share reserved for delays."""
        gone = self.node_gone_utc(first_seen_utc, deadline_utc)
        left_s = max(0.0, (gone - first_seen_utc).total_seconds())
        share = self.usable_s / self.announced_s
        reserve_s = min(self.announced_s - self.usable_s, left_s * (1.0 - share))
        return gone - timedelta(seconds=reserve_s)


def warning_budget(provider: Provider, gcp_notice_s: int = 0) -> WarningBudget:
    """The policy of one node. `gcp_notice_s` is the instance's `preemptionNoticeDuration`: 0 or 120."""
    match provider:
        case Provider.AWS:
            return WarningBudget(120.0, 105.0, "AWS announces 120 s ahead, first seen about 12 s late")
        case Provider.GCP if gcp_notice_s >= 120:
            return WarningBudget(120.0, 115.0, "GCP with preemptionNoticeDuration=120s")
        case Provider.GCP:
            return WarningBudget(30.0, 25.0, "GCP's default: 30 s until the machine is off")
        case Provider.NONE:
            return WarningBudget(120.0, 105.0, "no provider is set: AWS's figures are used")
