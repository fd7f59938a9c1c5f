"""How many nodes a job should use of those it may, and where: by its policy, its budget and its deadline. Pure.

The best layout for each number of nodes is weighed on measured steps only: before the first, a job takes all nodes that
make it faster. So it does where a price is not known, which nothing can be weighed without. It is never stopped here.
A job with a `policy:` is decided by `service.policy`, as replays are; one without keeps to its budget and its deadline.
"""

from dataclasses import dataclass, replace

from agent.protocol.jobfile import PolicyRules
from service.planner.choices import Candidates
from service.planner.goals import Alert, CountOption, within_goals
from service.planner.inputs import PlanInputs, PlanNode
from service.planner.placement import preferred
from service.planner.weighing.count_options import candidates_of, count_options
from service.planner.weighing.policy_answer import nodes_to_run_on, wanted_of
from service.planner.weighing.policy_question import PolicyQuestion, grouped_by_place, in_one_place, question
from service.planner.weighing.wanted import WantedCapacity
from service.policy.choosing import UtilityPolicy
from service.policy.types import Candidate, PolicyDecision
from service.policy.utility import curve_of, value_of_token

POOLS_SHOWN_MAX = 3
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Weighed:
    """The inputs with the nodes that the job should use, and why these; what is wrong; what was weighed; what the job
    should have. `layout`: what the policy chose for these nodes; empty where the planner chooses."""

    inputs: PlanInputs
    reason: str = ""
    alerts: tuple[tuple[Alert, str], ...] = ()
    options: tuple[CountOption, ...] = ()
    wanted: WantedCapacity | None = None
    layout: str = ""


def weighed(inputs: PlanInputs, known: Candidates) -> Weighed | None:
    """None where the job asks for nothing, or nothing can be said."""
    policy, left = inputs.job.policy, inputs.remaining
    alone = in_one_place(inputs)
    ranked = preferred(inputs)
    unpriced = sorted({node.pool for node in ranked if node.usd_per_hour is None})
    alerts: tuple[tuple[Alert, str], ...] = ()
    if left is not None and left.usd is not None and unpriced:
        alerts = ((Alert.UNPRICED, f"its budget is not planned with: pool {unpriced[0]} has no price"),)
    if policy is not None and not unpriced and inputs.step_seconds:
        found = _by_policy(inputs, policy, ranked, known)
        if found is not None:
            return found
    if left is not None and inputs.step_seconds and len(alone.nodes) >= inputs.job.nodes.min:
        return _by_goals(alone, known, alerts)
    return Weighed(alone, alerts=alerts) if alerts or alone is not inputs else None


def _by_goals(inputs: PlanInputs, known: Candidates, alerts: tuple[tuple[Alert, str], ...]) -> Weighed | None:
    """By what is left of its time and its money: the number of nodes with the shortest step that both allow."""
    ranked, left = preferred(inputs), inputs.remaining
    candidates = candidates_of(inputs, [ranked], known)
    if not candidates or left is None:
        return None
    options = count_options(candidates, ranked)
    within = within_goals(options, left, _nodes_now(inputs))
    alerts += within.alerts
    best = min((each for each in options if each.nodes in within.counts), key=lambda each: (each.step_s, each.nodes))
    if within.counts == {option.nodes for option in options} or best.nodes == len(ranked):
        return Weighed(inputs, "", alerts, options)
    reason = f"{best.nodes} of {len(ranked)} nodes by what is left of its time and its budget"
    return Weighed(replace(inputs, nodes=ranked[: best.nodes]), reason, alerts, options)


def _by_policy(
    inputs: PlanInputs, policy: PolicyRules, ranked: tuple[PlanNode, ...], known: Candidates
) -> Weighed | None:
    """By the policy, of nodes that are up and of those that could be bought. None where no layout fits either."""
    groups = grouped_by_place(inputs, ranked)
    candidates = candidates_of(inputs, groups, known)
    if not candidates:
        return None
    asked = question(inputs, policy, ranked, candidates)
    decision = UtilityPolicy().decide(asked.asked)
    options, alerts = _looked_at(inputs, groups[0], candidates, decision)
    if asked.asked.goal.budget_left_usd > 0 and decision.alert and Alert.LATE not in dict(alerts):
        alerts += ((Alert.LATE, decision.alert),)
    kept = nodes_to_run_on(inputs, asked, ranked, decision)
    wanted = wanted_of(inputs, asked, ranked, kept, decision)
    said = f"; {wanted.reason}" if wanted is not None and wanted.reason else ""
    at = _value(asked)
    if kept is None:
        if len(ranked) < inputs.job.nodes.min:
            return Weighed(inputs, said.removeprefix("; "), alerts, options, wanted)
        alone = in_one_place(inputs)
        on = _by_goals(alone, known, ()) if inputs.remaining is not None else None
        reason = f"{_why_not(asked, decision, at)}, and the job goes on{said}"
        return Weighed(on.inputs if on is not None else alone, reason, alerts, options, wanted)
    count = "all of them are" if len(kept) == len(ranked) else f"{len(kept)} of {len(ranked)} nodes are"
    reason = f"{count} worth their price {at}{_lives(inputs)}{said}"
    layout = decision.option.layout if decision.option is not None and not inputs.job.layouts.pinned else ""
    return Weighed(replace(inputs, nodes=kept), reason, alerts, options, wanted, layout)


def _why_not(asked: PolicyQuestion, decision: PolicyDecision, at: str) -> str:
    """Why the policy would not run on what is up, for a reason."""
    best = decision.best
    if best is not None:
        return f"the policy waits for {best.layout} on {best.nodes} nodes"
    if asked.asked.goal.budget_left_usd <= 0 or not decision.alternatives:
        return decision.reason
    return f"no number of nodes is worth its price {at}"


def _looked_at(
    inputs: PlanInputs, nodes: tuple[PlanNode, ...], candidates: tuple[Candidate, ...], decision: PolicyDecision
) -> tuple[tuple[CountOption, ...], tuple[tuple[Alert, str], ...]]:
    """The numbers of nodes that are up, with what each is worth, and what a person should know of them."""
    up = tuple(each for each in candidates if each.nodes <= len(nodes))
    options = count_options(up, sorted(nodes, key=lambda node: node.usd_per_hour or 0.0))
    alerts: tuple[tuple[Alert, str], ...] = ()
    if options and inputs.remaining is not None:
        alerts = within_goals(options, inputs.remaining, _nodes_now(inputs)).alerts
    worth = {(each.layout, each.nodes): each.utility_usd_per_hour for each in reversed(decision.alternatives)}
    return tuple(replace(each, usd_per_hour_worth=worth.get((each.layout, each.nodes))) for each in options), alerts


def _nodes_now(inputs: PlanInputs) -> int | None:
    return len(inputs.world.node_ids()) if inputs.world else None


def _value(asked: PolicyQuestion) -> str:
    """What a token is worth, for a reason."""
    value, why = value_of_token(asked.asked, curve_of(asked.asked.candidates))
    if asked.asked.goal.usd_per_mtok is not None:
        return f"at {asked.asked.goal.usd_per_mtok:g} USD per million tokens"
    return f"at {value * 1e6:.3g} USD per million tokens ({why})"


def _lives(inputs: PlanInputs) -> str:
    """When the next losses are expected, for a reason: of the pools that lose nodes first."""
    known = sorted(
        (each.life_s, each.pool, f"{each.losses} losses in {each.watched_h:g} h")
        for each in inputs.markets
        if each.life_s is not None
    )
    told = (f"{pool} in {life_s / HOUR_S:.2g} h, after {seen}" for life_s, pool, seen in known[:POOLS_SHOWN_MAX])
    return f"; next losses expected of {', '.join(told)}" if known else ""
