"""What the job of a seed's run is to run on: by the service, and by an agent that leads. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agent.protocol.values import Placement
from liver_core.handoff import LadderInputs, Proposal
from liver_core.handoff.leader_events import NoPlan, Plan, RungBasis, Wait
from liver_core.layout import Member, ParallelLayout, Roster
from service.planner.inputs import PlannerDecision, PlannerVerdict

if TYPE_CHECKING:
    from service.simulation.world.parts import Agent
    from tests.simulation.simulation import Simulation

NODES_LEAST = 2
BYTES_PER_S = 1e9
ENDPOINTS_S, BUILD_S, MARGIN_S = 0.3, 1.5, 0.5


class SeedPlanner:
    """What the leader of one agent asks."""

    def __init__(self, simulation: Simulation, agent: Agent) -> None:
        self._simulation, self._agent = simulation, agent

    def candidates(self, source: Roster, leaving: Iterable[str]) -> tuple[str, ...]:
        """In rank order; where every member goes, the spares that the service has named."""
        gone = set(leaving)
        staying = tuple(name for name in source.node_ids() if name not in gone)
        return staying or tuple(name for name in self._simulation.spares if name not in gone)

    def plan(
        self, source: Roster, leaving: frozenset[str], *, barred: frozenset[str], left_s: float, waited_s: float
    ) -> Plan | Wait | NoPlan:
        """Who stays, and a spare for each that goes, as far as there are any."""
        if len(leaving) > 1 and waited_s < min(3.0, 0.1 * left_s) and self._agent.link.is_answered:
            return Wait("the service is asked")
        staying = [member for member in source.members if member.node_id not in leaving]
        taken = {*source.node_ids(), *leaving, *barred}
        spares = [Member(name, 0) for name in self._simulation.spares if name not in taken]
        members = (*staying, *spares[: len(source.members) - len(staying)])
        if len(members) < NODES_LEAST:
            return NoPlan(f"{len(members)} nodes stay, the job needs {NODES_LEAST}")
        return Plan(ParallelLayout(dp=len(members)), members, f"d{len(members)}", f"{len(members)} nodes stay or come")

    def ladder(self, wanted: Proposal, leaving: frozenset[str], left_s: float | None) -> RungBasis:
        """What speaks for which rung."""
        return RungBasis(ladder_inputs(self._simulation, wanted.source, wanted.members, left_s))


def ladder_inputs(
    simulation: Simulation, source: Roster, members: Iterable[Member], left_s: float | None
) -> LadderInputs:
    """Of a change from `source` to a world of `members`, as an agent measures it."""
    plan, conditions = simulation.plan, simulation.conditions
    link, staying = plan.link, len({*source.members} & {*members})
    only_leaving = link.copy_s * (len(source.members) - staying) / len(source.members)
    return LadderInputs(
        bytes_to_move=int(link.copy_s * BYTES_PER_S),
        bandwidth_bytes_per_s=BYTES_PER_S,
        prepare_s=plan.slow_s + BUILD_S,
        step_s=conditions.step_s,
        seconds_to_boundary=conditions.step_s,
        seconds_to_deadline=None if left_s is None else max(0.0, left_s),
        margin_s=MARGIN_S,
        sources_whole=True,
        nodes_left=len(plan.members),
        nodes_least=NODES_LEAST,
        checkpoint_age_steps=conditions.checkpoint_every,
        stream_share=0.5,
        follow_s=link.follow_share * conditions.step_s,
        one_sided=link.one_sided,
        replay_refusal=link.replay_refusal,
        stream_failure=simulation.truth.stream_failures.get(source.generation, ""),
        bytes_only_leaving=int(only_leaving * BYTES_PER_S),
        endpoints_s=ENDPOINTS_S,
        ranks_staying=staying,
        rescue_failure="",
        part_s=conditions.step_s / plan.parts if plan.parts > 1 else None,
    )


def decision(nodes: int, ready: Iterable[str], source: Roster | None, leaving: Iterable[str]) -> PlannerDecision:
    """What the service's planner would say: so many of the nodes that are ready, those first that hold the state."""
    gone = set(leaving)
    held = () if source is None else source.node_ids()
    staying = [name for name in held if name in set(ready) and name not in gone]
    others = [name for name in ready if name not in gone and name not in held]
    chosen = [*staying, *others][:nodes]
    if len(chosen) < NODES_LEAST:
        verdict = PlannerVerdict.STAY if source is not None and not gone & set(held) else PlannerVerdict.SUSPEND
        return PlannerDecision(verdict, f"{len(chosen)} nodes are ready, the job needs {NODES_LEAST}")
    members = tuple(Member(name, 0) for name in chosen)
    if source is not None and set(members) == set(source.members):
        return PlannerDecision(PlannerVerdict.STAY, "as it is")
    target = Placement(layout=ParallelLayout(dp=len(members)), members=members)
    verdict = PlannerVerdict.START if source is None else PlannerVerdict.MOVE
    return PlannerDecision(verdict, f"{len(members)} nodes", target)
