"""The smallest handoff with every part in it: PP2 on a and b to TP2 on b and a newcomer. a leaves, b survives.

Both layouts can be others of two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from liver_core.handoff.messages import CutoverDeadlines, Reason
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed

LEAVER, SURVIVOR = Member("a", 0), Member("b", 0)
UNHURRIED = CutoverDeadlines(target_s=15.0, source_s=20.0, store_s=30.0)
SHORT = CutoverDeadlines(target_s=5.0, source_s=7.5, store_s=10.0)
"""For what only a deadline can end. Long enough for two cores that others use too."""

PACE_S = 0.1


def trio_setup(corpus: str, **changes: Any) -> RankSetup:
    """Two layers, and a batch of two micro-batches: what is disturbed is the handoff, not the step."""
    settings = {"job_arguments": small_gpt(corpus, num_layers=2), "global_batch": 4, "trace": True, "pace_s": PACE_S}
    return RankSetup(**settings | changes)


class Trio(Cluster):
    """A job on a and b that is asked again and again to hand over to b and somebody new."""

    def __init__(self, setup: RankSetup, layout: str = "PP2", target: str = "TP2") -> None:
        super().__init__(setup)
        self.layout = layout
        self.target = target
        self.newcomers = 0

    def begin(self) -> None:
        self.launch(self.layout, "ab")
        self.await_step(SURVIVOR, 2)

    def attempt(
        self, *faults: Fault, cutover: CutoverDeadlines = UNHURRIED, deadline_s: float = 60.0
    ) -> tuple[Any, Member]:
        """Open a handoff whose newcomer has `faults`; returns the request and the newcomer."""
        self.newcomers += 1
        newcomer = Member(f"c{self.newcomers}", 0)
        self.faults[newcomer.node_id] = faults
        return self.open(self.target, ["b", newcomer.node_id], cutover=cutover, deadline_s=deadline_s), newcomer

    def ready(
        self, *faults: Fault, cutover: CutoverDeadlines = UNHURRIED, deadline_s: float = 60.0
    ) -> tuple[Any, Member]:
        """As `attempt`, until everybody is prepared; nobody has permission yet."""
        request, newcomer = self.attempt(*faults, cutover=cutover, deadline_s=deadline_s)
        self.await_stage(self.members(request), request, "prepared", 40)
        return request, newcomer

    def permit(self, request: Any) -> None:
        self.command(self.members(request), "permit", request.handoff_id, 1)

    def permit_newcomers(self, request: Any) -> None:
        """Newcomers wait for the boundary, which cannot come: the old world has no permission."""
        newcomers = [member for member in request.target.members if member not in request.source.members]
        self.command(newcomers, "permit", request.handoff_id, 1)

    def abort(self, request: Any, text: str = "the notice was withdrawn") -> None:
        self.command(self.members(request), "abort", request.handoff_id, Reason(text, "abort"))

    def reason(self, member: Member, request: Any, stage: str, timeout_s: float = 30) -> str:
        """Wait for a last stage of a member and return its reason."""

        def said() -> list[Any]:
            return [reason for name, reason, _ in self.stages(member, request.handoff_id) if name == stage]

        self.wait_for(lambda: bool(said()), timeout_s, f"{stage} of {member}")
        return str(said()[0])

    def ending(self, member: Member, timeout_s: float = 40) -> tuple[str, str]:
        """Wait until a rank's loop has ended; how, and its reason."""
        rank = self.ranks[member]
        self.wait_for(lambda: rank.result is not None, timeout_s, f"end of {member}")
        assert rank.result is not None
        return rank.result["how"], str(rank.result["reason"])

    def cause(self, member: Member) -> str | None:
        """What failed first, as a rank whose loop has ended knows; None: itself, or nothing."""
        self.ending(member)
        result = self.ranks[member].result
        assert result is not None
        return result["cause"]

    def trains_on(self, members: Iterable[Member] = (LEAVER, SURVIVOR)) -> None:
        """Everybody takes two more steps."""
        for member in members:
            self.await_step(member, self.steps(member)[-1][1] + 2)

    def is_aborted_at(self, point: str, **how: Any) -> None:
        """The notice is withdrawn while the survivor is held at `point`; `how` of `attempt`."""
        self.arm(SURVIVOR, point, "hold")
        request, newcomer = self.attempt(**how)
        self.await_passage(SURVIVOR, point)
        self.abort(request)
        self.command([SURVIVOR], "release")
        for member in (LEAVER, SURVIVOR, newcomer):
            assert "the notice was withdrawn" in self.reason(member, request, "aborted")
        self.ranks[SURVIVOR].events.remove(("held", point))
        self.trains_on()


def assert_trained_as_if_nothing_had_happened(trio: Trio) -> None:
    """Stop the job and compare every step's state on a and b, bit for bit, with a run that was left alone."""
    results = trio.stop()
    last = min(results[member]["step"] for member in (LEAVER, SURVIVOR))
    alone = run_undisturbed(trio.setup, trio.layout, last)
    for member in (LEAVER, SURVIVOR):
        ours, theirs = results[member]["trace"], alone.traces[member.node_id]
        changed = [step for step in theirs if ours[step][1] != theirs[step][1]]
        assert not changed, f"{member}: state differs from step {changed[0]} on"
        assert {row[1]: row[2:] for row in trio.steps(member)} == {row[1]: row[2:] for row in alone.steps}
        assert len(theirs) == last
