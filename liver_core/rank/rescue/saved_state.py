"""What a rank saves of the state that only leavers hold, or gives of it: the plan, where it lies, and who reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from liver_core.certificate import CertificatePlan
from liver_core.reshard import RankPlan, RescuePlan
from liver_core.transport.protocol import Read, Transport

KEPT = "kept/"
"""Before the name of a state kind: the rescue region of that kind, as peers read it."""


@dataclass(slots=True)
class Rescue:
    """One rank's part. `regions`: kind -> what it keeps, on the host; empty on leavers and newcomers.

    `certificates`: for each rank at the other side, where its shares lie here. `whole` is the part of this rank in what
    all survivors hold, `refill` how it fills its next region from rescue regions. `transport`: between leavers and
    survivors, until the release.
    """

    plan: RescuePlan
    regions: dict[str, torch.Tensor] = field(default_factory=dict)
    certificates: dict[int, CertificatePlan] = field(default_factory=dict)
    whole: tuple[CertificatePlan, CertificatePlan] | None = None
    refill: RankPlan | None = None
    transport: Transport | None = None

    @property
    def bytes(self) -> int:
        """Host memory that it takes."""
        return sum(region.numel() * region.element_size() for region in self.regions.values())

    def reads(self, rank: int, kind: str) -> list[Read]:
        """How survivor `rank` reads its share."""
        shares = self.plan.kept_by(rank)
        leavers = sorted({share.leaver for share in shares})
        runs = {leaver: tuple(share.runs for share in shares if share.leaver == leaver) for leaver in leavers}
        return [Read(leaver, kind, runs[leaver]) for leaver in leavers]

    def close(self) -> None:
        """Nobody reads from a leaver, or what was kept, any more."""
        if self.transport is not None:
            self.transport.close()
        self.transport = None
        self.regions.clear()
