"""The trio of `trio`, handed over live: many small tiles, a ring deep enough for a target that is held for a moment."""

from __future__ import annotations

from typing import Any

from liver_core.handoff.messages import Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import RankSetup
from tests.liver_core.rank.support.trio import Trio, trio_setup

STREAM = {"tile_elements": 4096, "ring_depth": 8}


def live_setup(corpus: str, **changes: Any) -> RankSetup:
    return trio_setup(corpus, **{"stream": STREAM, "bring_up_s": 8.0, **changes})


class LiveTrio(Trio):
    """As Trio, but state streams."""

    def open(self, *arguments: Any, **named: Any) -> Any:
        return super().open(*arguments, **{"rung": Rung.LIVE, **named})

    def aborted(self, request: Any, text: str, *members: Member) -> None:
        """The proposer gives up; all of `members` say so in its words, and have nothing left of it."""
        self.abort(request, text)
        for member in members:
            assert text in self.reason(member, request, "aborted"), member

    def live(self, request: Any) -> None:
        """Everybody is prepared by a stream, not by falling back."""
        assert self.verdict(request.target.members[0], request) == (str(Rung.LIVE), "")
