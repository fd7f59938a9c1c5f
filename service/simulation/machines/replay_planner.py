"""The policy of a replay, as a leader asks it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from liver_core.handoff import LadderInputs, Proposal
from liver_core.handoff.leader_events import NoPlan, Plan, RungBasis, Wait
from liver_core.layout import Roster
from service.policy.types import Candidate
from service.simulation.world.reports import Planned

Ladder = Callable[[Sequence[str], Sequence[str], float | None], LadderInputs]


class ReplayPlanner:
    """The same for every leader: a policy knows what is held, and what goes. `planned`: what it wants now;
    `ladder`: what speaks for which rung from nodes to others, with so much time left; `digest_of`: what stands for a
    layout."""

    def __init__(self, planned: Callable[[], Planned], ladder: Ladder, digest_of: Callable[[Candidate], str]) -> None:
        self._planned, self._ladder, self._digest_of = planned, ladder, digest_of

    def candidates(self, source: Roster, leaving: Iterable[str]) -> tuple[str, ...]:
        """By rank; where every member goes, the nodes that come."""
        gone = set(leaving)
        staying = tuple(name for name in source.node_ids() if name not in gone)
        if staying:
            return staying
        target = self._planned().decision.target
        return () if target is None else tuple(name for name in target.node_ids() if name not in gone)

    def plan(
        self, source: Roster, leaving: frozenset[str], *, barred: frozenset[str], left_s: float, waited_s: float
    ) -> Plan | Wait | NoPlan:
        """What the policy wants at this moment. It knows the notices itself."""
        planned = self._planned()
        target, reason = planned.decision.target, planned.decision.reason
        if target is None or planned.layout is None:
            return NoPlan(reason)
        assert isinstance(planned.layout, Candidate)
        return Plan(target.layout, target.members, self._digest_of(planned.layout), reason)

    def ladder(self, wanted: Proposal, leaving: frozenset[str], left_s: float | None) -> RungBasis:
        """What an agent would tell its ladder."""
        target = tuple(dict.fromkeys(member.node_id for member in wanted.members))
        return RungBasis(self._ladder(wanted.source.node_ids(), target, left_s))
