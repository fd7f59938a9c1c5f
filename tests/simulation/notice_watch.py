"""Whether some agent acts on what is known of nodes that will go. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from liver_core.handoff import LadderInputs, Phase, Rung, choose_rung
from liver_core.handoff.leader_events import LIVE_RUNGS, Plan, Wait
from liver_core.handoff.proposer import ProposerState
from liver_core.layout import Member, Roster
from service.simulation.world.moments import seconds_at, utc
from service.simulation.world.observer import Violation

if TYPE_CHECKING:
    from service.simulation.world.agents import SimAgent
    from service.simulation.world.world import SimulatedWorld
    from service.simulation.world.worlds import SimWorld

ACTS_WITHIN_S, OPENS_WITHIN_S = 1.0, 3.0
"""While a notice counts and a rung that fits exists, some agent acts on it within the first. What it opens is open, or
given up, within the second."""
DISTURBED_S = 3.0
"""So long after something has happened to a member nothing is expected of it."""
Ladder = Callable[[Roster, Sequence[Member], float | None], LadderInputs]
ENDING = (ProposerState.WITHDRAWING, ProposerState.ABORTING, ProposerState.RETIRING)


class NoticeWatch:
    """Looks several times a second. `ladder`: what an agent would tell its ladder."""

    def __init__(self, simulation: SimulatedWorld, ladder: Ladder) -> None:
        self._simulation, self._ladder = simulation, ladder
        self._since: float | None = None
        self._opening: dict[str, float] = {}  # a handoff that is being opened -> since when
        self._disturbed_at: dict[str, float] = {}
        self._calm_from = self._delivers_from = 0.0

    def network_disturbed(self) -> None:
        """Messages got lost until now."""
        self._calm_from = self._delivers_from = self._simulation.clock.now + DISTURBED_S

    def disturbed(self, name: str) -> None:
        """Something has happened on this node."""
        self._disturbed_at[name] = self._simulation.clock.now

    def look(self) -> None:
        """Raises Violation if nobody has acted for too long."""
        now = self._simulation.clock.now
        if self._simulation.network.loss:
            self.network_disturbed()
        if self._simulation.network.service_away:
            self._calm_from = now + DISTURBED_S
        why = self._unanswered() or self._comes_though_it_goes() or self._goes_untold()
        self._since = None if why is None else self._since if self._since is not None else now
        if why is not None and self._since is not None and now - self._since > ACTS_WITHIN_S:
            raise Violation(f"notice unanswered: {why}, and nobody has acted since {self._since:.2f} s")

    def _unanswered(self) -> str | None:
        """What some agent should act on now; None where all is well, or where nobody can be expected to."""
        sim = self._simulation
        if sim.clock.now < self._calm_from:
            return None
        world = sim.current_world()
        if world is None or not world.is_begun or not world.at_boundary:
            return None
        members = [sim.agents[member] for member in world.roster.members]
        if any(self._is_disturbed(agent) for agent in sim.agents.values()) or not all(a.link.runs for a in members):
            return None
        going = {name for name in world.roster.node_ids() if all(_knows(agent, name) for agent in members)}
        return self._nobody_acts(world, members, going) if going else None

    def _comes_though_it_goes(self) -> str | None:
        """A node that an open handoff is about to bring in will go, and its lead knows that."""
        sim = self._simulation
        if sim.clock.now < self._calm_from or any(self._is_disturbed(agent) for agent in sim.agents.values()):
            return None
        for agent in sim.agents.values():
            own = agent.leading.leader.own
            if own.state is ProposerState.PREPARING and own.led is not None and not own.led.superseded:
                going = sorted(name for name in own.coming if _knows(agent, name))
                if going and not _asks_the_service(agent):
                    return f"{going} will go, and {own.open_id} is to bring them in"
        return None

    def _goes_untold(self) -> str | None:
        """A member knows that its own node will go, and who is to answer that does not, also while the service is
        away."""
        sim, world = self._simulation, self._simulation.current_world()
        if sim.clock.now < self._delivers_from or world is None or not world.is_begun:
            return None
        if any(self._is_disturbed(agent) for agent in sim.agents.values()):
            return None
        for agent in (sim.agents[member] for member in world.roster.members):
            leader = agent.leading.leader
            is_free = agent.participant.record.promise is None and leader.own.is_idle
            if is_free and _knows(agent, agent.name) and _safe_by(agent, agent.name) > agent.now:
                going = [name for name in world.roster.node_ids() if _knows(agent, name)]
                for lead in leader.planner.candidates(world.roster, going)[:1]:
                    if not _knows(sim.agent(lead), agent.name):
                        return f"{agent.name} will go, and {lead} has not been told"
        return None

    def _is_disturbed(self, agent: SimAgent) -> bool:
        sim = self._simulation
        at = self._disturbed_at.get(agent.name)
        recent = at is not None and sim.clock.now - at < DISTURBED_S
        return recent or not agent.is_going or agent.name in sim.network.cut_off

    def _nobody_acts(self, world: SimWorld, members: list[SimAgent], going: set[str]) -> str | None:
        sim = self._simulation
        for agent in sim.agents.values():
            own, leader = agent.leading.leader.own, agent.leading.leader
            if not own.is_idle:
                answers = own.led is not None and going <= own.led.leaving
                proposal, phase = own.proposer.record.proposal, own.proposer.record.phase
                if proposal is not None and proposal.rung is Rung.RESCUE and phase is not Phase.PREPARE:
                    return None  # Its leavers may be released already: what it goes to has to be built.
                if answers or own.state in ENDING or own.proposer.tally.boundary_passed() or own.open_id == "":
                    return None
                if own.state is ProposerState.IDLE:
                    since = self._opening.setdefault(own.open_id, sim.clock.now)
                    return None if sim.clock.now - since < OPENS_WITHIN_S else f"{own.open_id} is still being opened"
            elif leader.next_deadline > agent.now and leader.next_deadline < float("inf"):
                return None  # It is tried again after a while.
        if any(agent.participant.record.promise is not None for agent in members) and not self._leads_any():
            return None  # Ranks are bound by a handoff whose lead is gone.
        staying = [agent for agent in members if agent.name not in going]
        lead = staying[0] if staying else None
        if lead is None:
            return None
        left_s = min(_safe_by(lead, name) for name in going) - lead.now
        asked_at = lead.leading.leader.own._no_plan_since
        waited_s = 0.0 if asked_at is None else lead.now - asked_at
        plan = lead.leading.leader.planner.plan(
            world.roster, frozenset(going), barred=frozenset(going), left_s=left_s, waited_s=waited_s
        )
        if left_s <= 0 or not isinstance(plan, Plan):
            return None
        if choose_rung(self._ladder(world.roster, plan.members, left_s)).rung not in LIVE_RUNGS:
            return None
        return f"{sorted(going)} will go, {left_s:.1f} s are left"

    def _leads_any(self) -> bool:
        return any(agent.leading.leader.own.proposer.record.proposal for agent in self._simulation.agents.values())


def _asks_the_service(agent: SimAgent) -> bool:
    """Whether a lead waits for what the service says of all that go, as it may for a tenth of the time that is left."""
    own, planner = agent.leading.leader.own, agent.leading.leader.planner
    proposal, since = own.proposer.record.proposal, own._no_plan_since
    if proposal is None or since is None:
        return False
    leaving = frozenset(name for name in proposal.source.node_ids() if _knows(agent, name))
    left_s = min((_safe_by(agent, name) for name in leaving), default=agent.now) - agent.now
    waited_s = agent.now - since
    found = planner.plan(proposal.source, leaving, barred=frozenset(), left_s=left_s, waited_s=waited_s)
    return isinstance(found, Wait)


def _knows(agent: SimAgent, name: str) -> bool:
    return any(fact.node_id == name for fact in agent.leading.notices.moving(utc(agent.now)))


def _safe_by(agent: SimAgent, name: str) -> float:
    facts = [fact for fact in agent.leading.notices.moving(utc(agent.now)) if fact.node_id == name]
    conditions = agent.simulation.conditions
    return min(
        conditions.safe_by(seconds_at(fact.first_seen_utc), seconds_at(fact.deadline_utc))
        for fact in facts
        if fact.deadline_utc is not None
    )
