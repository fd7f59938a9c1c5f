"""A job of real ranks whose handoffs are amended, and what it must hold in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from liver_core.handoff.messages import Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks import run_alone
from tests.cluster.undisturbed import undisturbed_samples
from tests.liver_core.rank.support.stream_random import Link, Story, first_difference, told_by_stop_and_copy


def member(node: str) -> Member:
    return Member(node, 0)


class AmendedJob(Cluster):
    """Remembers the worlds that it went through."""

    def __init__(self, setup: RankSetup) -> None:
        super().__init__(setup)
        self.links: list[Link] = []

    def begin(self, layout: str, nodes: Sequence[str]) -> None:
        self.launch(layout, nodes)
        self.links.append(Link(layout, tuple(nodes), {}, 0))
        self.trains_on(3)

    def live(self, layout: str, nodes: Sequence[str], **named: Any) -> Any:
        return self.open(layout, nodes, rung=Rung.LIVE, **named)

    def prepared(self, request: Any) -> None:
        self.await_stage(self.members(request), request, "prepared", 40)

    def ends_in(self, request: Any, layout: str, nodes: Sequence[str]) -> None:
        """The newest revision streams, is permitted, and its world trains."""
        self.prepared(request)
        assert self.verdict(request.target.members[0], request) == (str(Rung.LIVE), "")
        self.switches_to(request, layout, nodes)

    def switches_to(self, request: Any, layout: str, nodes: Sequence[str]) -> None:
        self.complete(request)
        assert request.target.members == tuple(member(node) for node in nodes)
        self.links.append(Link(layout, tuple(nodes), {}, 0))
        self.trains_on(3)

    def trains_on(self, steps: int) -> None:
        assert self.roster is not None
        first = self.roster.members[0]
        self.await_step(first, self.steps(first)[-1][1] + steps)

    def said(self, who: Member, request: Any, plan_revision: int) -> list[str]:
        return [stage for stage, *_ in self.stages(who, request.handoff_id, plan_revision)]

    def let_go(self, who: Member, point: str) -> None:
        """Release a rank that is held, and forget that it was."""
        self.command([who], "release")
        self.ranks[who].events.remove(("held", point))

    def held_what_stop_and_copy_gives(self, story: Story) -> None:
        """Stop. Every step's state is, bit for bit, what the same job has that is handed over by stop-and-copy at the
        same steps; every step's samples are what the cursor alone says; each handoff has used one generation."""
        self.stop()
        ended = [rank for rank in self.all_ranks if rank.result and rank.result["trace"]]
        rows = {row[1]: (row[0], *row[3:]) for rank in ended for row in self.steps(rank.member)}
        assert {step: row[1:] for step, row in rows.items()} == run_alone(
            undisturbed_samples, len(rows), self.setup.micro_batch
        )
        firsts: dict[int, int] = {}
        for step in sorted(rows):
            firsts.setdefault(rows[step][0], step)
        assert list(firsts) == list(range(1, len(self.links) + 1)), "an amended handoff uses one generation"
        handed_at = {generation: step - 1 for generation, step in firsts.items() if generation > 1}
        setup = replace(self.setup, trace=True, counts=False, pace_s=0.0, stream={})
        copied = told_by_stop_and_copy(replace(story, links=tuple(self.links)), setup, handed_at)
        traces = {rank.member.node_id: rank.result["trace"] for rank in ended if rank.result}
        assert not first_difference(traces, copied.traces)
