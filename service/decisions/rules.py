"""What of a decision is kept, when it differs from the one before, and who asked for it. Pure."""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from liver_core.layout.limits import fitting, listed
from service.jobs.queries import Situation
from service.jobs.tables import ENDED, JobState
from service.jobs.view import Action, Do
from service.planner.change_cost import expected_change
from service.planner.decision import alternatives, decide
from service.planner.inputs import Alternative, PlanInputs, PlannerDecision

BY_ITSELF = "the service"
KINDS_MAX, OPTIONS_MAX, STEPS_MAX, GIVEN_BACK_MAX = 64, 64, 64, 256
STOP, PAUSE, BEGIN = ("stop_job",), ("pause_job",), ("submit_job", "resume_job")
"""Names of the audit log: the newest row of these says who asked."""


@dataclass(frozen=True, slots=True)
class Considered:
    """What the planner wants and what it chose among."""

    decision: PlannerDecision
    inputs: PlanInputs

    @property
    def layout(self) -> str | None:
        """Where the job should go; None where it stays, or can go nowhere."""
        return str(self.decision.target.layout) if self.decision.target else None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of that layout."""
        return self.decision.target.node_ids() if self.decision.target else ()

    def alternatives(self) -> tuple[Alternative, ...]:
        """The layouts that were possible, with their scores."""
        return alternatives(self.inputs)


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision as it was made. `asked`: actions of the audit log that may have caused it; `noticed`: nodes whose
    notices did."""

    action: Action
    considered: Considered
    asked: tuple[str, ...]
    noticed: tuple[str, ...]

    def digest(self) -> str:
        """The same for what means the same: reasons, which name seconds that always change, do not count."""
        action, considered = self.action, self.considered
        what = [action.do, action.state, considered.decision.verdict, considered.layout, *considered.nodes]
        what += considered.decision.alerts
        if considered.decision.wanted is not None:
            what += considered.decision.wanted.what()
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def by(self, actor: str | None) -> str:
        """Who asked for it. `actor`: in the newest of the rows that `asked` names."""
        if self.asked and actor:
            return actor
        return fitting(f"notice of {listed(self.noticed)}") if self.noticed else BY_ITSELF


def made_from(inputs: PlanInputs) -> dict[str, Any]:
    """What a decision depended on, beside the job file: nodes that are alike are one entry with their number, the most
    first, at most KINDS_MAX of them."""
    world, job, errors = inputs.world, inputs.job, dict(inputs.step_errors)
    kinds = Counter(replace(node, node_id="") for node in inputs.nodes)
    nodes = [{"nodes": count} | _without_name(asdict(node)) for node, count in kinds.most_common(KINDS_MAX)]
    return {
        "nodes": nodes,
        "nodes_min": job.nodes.min,
        "nodes_max": job.nodes.max,
        "policy": job.policy.model_dump(mode="json") if job.policy else {},
        "world": {"generation": world.generation, "layout": str(world.layout), "nodes": len(world.node_ids())}
        if world
        else None,
        "steps": [
            {"layout": layout, "step_s": seconds, "error": errors.get(layout)}
            for layout, seconds in inputs.step_seconds[-STEPS_MAX:]
        ],
        "remaining": asdict(inputs.remaining) if inputs.remaining else None,
        "pools": [asdict(market) for market in inputs.markets[:KINDS_MAX]],
        "change": asdict(expected_change(job, inputs.changes, inputs.copy_s)) if inputs.markets else None,
    }


def wanted(decision: PlannerDecision) -> dict[str, Any] | None:
    """What the job should have, as it is kept and shown: at most GIVEN_BACK_MAX names and KINDS_MAX pools."""
    found = decision.wanted
    if found is None:
        return None
    kept = asdict(replace(found, gives_back=found.gives_back[:GIVEN_BACK_MAX], pools=found.pools[:KINDS_MAX]))
    return kept | {"weighed": [asdict(each) | {"spares": each.spares} for each in found.weighed]}


def _without_name(node: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "node_id"}


def considered(facts: Situation, without: tuple[str, ...] = ()) -> Considered:
    """What the planner would want if the nodes `without` were gone: of a job without ranks, a start."""
    runs = facts.view.state in (JobState.STARTING, JobState.RUNNING)
    inputs, decision = (facts.inputs, facts.view.decision) if runs else (facts.restart, facts.view.restart)
    if not without:
        return Considered(decision, inputs)
    inputs = replace(inputs, nodes=tuple(node for node in inputs.nodes if node.node_id not in without))
    return Considered(decide(inputs), inputs)


def decided(facts: Situation, action: Action) -> Decided | None:
    """The decision that an action comes from; None for a job that has ended, or whose ranks are awaited."""
    view = facts.view
    if view.state in ENDED or (action.do is Do.NOTHING and view.state in (JobState.SUSPENDING, JobState.STOPPING)):
        return None
    chosen = considered(facts)
    if action.do is Do.START:
        chosen = Considered(view.restart, facts.restart)
    asked: tuple[str, ...] = ()
    if view.stop_requested:
        asked = STOP
    elif view.paused_because:
        asked = PAUSE
    elif view.state is JobState.PENDING or (action.do is Do.START and view.state is JobState.SUSPENDED):
        asked = BEGIN
    return Decided(action, chosen, asked, tuple(item.node_id for item in view.leaving))
