"""The state that only leavers have: what this rank saves or gives of it, where it lies, and which rank reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from liver_core.certificate import CertificatePlan
from liver_core.reshard import RankPlan, RescuePlan
from liver_core.transport.protocol import Read, Transport

KEPT = "kept/"
"""Prefix of a state kind: peers read the rescue region of that kind under this name."""


@dataclass(slots=True)
class Rescue:
    """One rank's part. `regions`: kind -> what it saves, in host memory; empty on leavers and newcomers.

    `certificates`: for each rank at the other side, where the shares with it lie here. `whole`: this rank's part of
    what all survivors have. `refill`: how it fills its next region from rescue regions. `transport`: between leavers
    and survivors, until the release.
    """

    plan: RescuePlan
    regions: dict[str, torch.Tensor] = field(default_factory=dict)
    certificates: dict[int, CertificatePlan] = field(default_factory=dict)
    whole: tuple[CertificatePlan, CertificatePlan] | None = None
    refill: RankPlan | None = None
    transport: Transport | None = None

    @property
    def bytes(self) -> int:
        """Host memory that the regions take."""
        return sum(region.numel() * region.element_size() for region in self.regions.values())

    def reads(self, rank: int, kind: str) -> list[Read]:
        """The reads by which survivor `rank` gets its share."""
        shares = self.plan.kept_by(rank)
        leavers = sorted({share.leaver for share in shares})
        runs = {leaver: tuple(share.runs for share in shares if share.leaver == leaver) for leaver in leavers}
        return [Read(leaver, kind, runs[leaver]) for leaver in leavers]

    def close(self) -> None:
        """Nothing reads from a leaver or from rescue regions any more: close the transport, free the regions."""
        if self.transport is not None:
            self.transport.close()
        self.transport = None
        self.regions.clear()
