"""What to do when nodes will go: whose turn it is to lead, which world comes next, until when, and on which rung.

Pure: everything known comes in, a decision with its reason comes out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from agent.driver.wire import core_layout, core_members
from agent.protocol.jobfile import ModelShape
from agent.protocol.sync import JobOrder
from liver_core.layout import Member, ParallelLayout, Roster

SERVICE_WAIT_S = 3.0
"""How long a plan that no standing plan covers is left to the service, before the layouts by count are used."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The world to go to, and why. `digest` is that of the service's plan, empty for one made here."""

    layout: ParallelLayout
    members: tuple[Member, ...]
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again in a moment."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoPlan:
    """There is no world to go to live; what is left, checkpoint rung or suspension, the service decides."""

    reason: str


def lead_candidates(order: JobOrder, active: Roster, leaving: Iterable[str]) -> tuple[str, ...]:
    """Who may lead, first choice first: the service's order, then rank order; never a node that will go."""
    gone = set(leaving)
    members = active.node_ids()
    ordered = [node_id for node_id in order.lead_order if node_id in members]
    return tuple(node_id for node_id in dict.fromkeys((*ordered, *members)) if node_id not in gone)


def plan_loss(
    order: JobOrder, active: Roster, leaving: frozenset[str], *, waited_s: float, service_is_there: bool
) -> Plan | Wait | NoPlan:
    """The world without these nodes: the standing plan for exactly them, or one made from the layouts by count."""
    for plan in order.standing_plans:
        if plan.parent == active.generation and frozenset(plan.leaving) == leaving:
            if plan.target is None:
                return NoPlan(f"standing plan: {plan.reason}")
            layout, members = core_layout(plan.target.layout), core_members(plan.target.members)
            return Plan(layout, members, plan.plan_digest, f"standing plan: {plan.reason}")
    if service_is_there and waited_s < SERVICE_WAIT_S:
        return Wait(f"no standing plan covers the loss of {_names(leaving)}; the service is asked")
    return _plan_by_count(order, active, leaving)


def estimate_parameters(model: ModelShape) -> int:
    """Upper estimate of a gated GPT's parameters: what the ladder needs to guess a time, not what memory needs."""
    ffn = model.ffn_hidden_size or 4 * model.hidden_size
    layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * ffn * (model.num_experts or 1)
    return model.num_layers * layer + 2 * model.padded_vocab_size * model.hidden_size


def _plan_by_count(order: JobOrder, active: Roster, leaving: frozenset[str]) -> Plan | NoPlan:
    staying = tuple(member for member in active.members if member.node_id not in leaving)
    nodes = len({member.node_id for member in staying})
    if nodes < order.spec.nodes.min:
        return NoPlan(f"{nodes} nodes stay without {_names(leaving)}, the job needs {order.spec.nodes.min}")
    choice = next((choice for choice in order.layouts_by_count.choices if choice.nodes == nodes), None)
    if choice is None:
        return NoPlan(f"no layout is known for {nodes} nodes")
    if choice.layout is None:
        return NoPlan(f"nothing feasible on {nodes} nodes: {choice.reason}")
    layout = core_layout(choice.layout)
    if layout.world_size > len(staying):
        return NoPlan(f"{layout} needs {layout.world_size} slots, {len(staying)} stay without {_names(leaving)}")
    # In the order of the old ranks, so that most of what a survivor needs it holds already.
    reason = f"layout for {nodes} nodes, made without the service: {choice.reason}"
    return Plan(layout, staying[: layout.world_size], "", reason)


def _names(nodes: Iterable[str]) -> str:
    names = sorted(nodes)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
