"""The agents that lead, each with the product's leader: when they look, and what they hear of each other. Pure.

Who leads, when again, and what another notice does to what is open is decided by the leaders. The rung and its limits
come from the product's ladder, and the plan from the policy.
"""

from collections.abc import Callable

from agent.protocol.values import HandoffCause
from liver_core.handoff import Order, Reason, Report, Stage
from liver_core.handoff.leader_events import (
    AskedToLead,
    ForwardNotices,
    HandoffWanted,
    Loss,
    LossesKnown,
    Plan,
    Promised,
    WorldStarted,
)
from liver_core.handoff.proposer_events import Cancel, HandoffEnded, ReportReceived
from service.handoffs.rules import OpenHandoff
from service.simulation.machines.enacted import Enacted
from service.simulation.machines.meeting import Meeting, PlayedWorld
from service.simulation.machines.played_agent import PlayedAgent
from service.simulation.machines.played_handoff import PlayedHandoff
from service.simulation.machines.played_job import Agents, PlayedJob

UNHURRIED_LEAST_S = 180.0
REFUSED_MAX = 10_000
LOOK_S = 1.0
"""How often agents look while nodes go or something is proposed. Whatever is new has them look at once."""


class PlayedLead:
    """`enacted`: every handoff that was opened, once it is over; `refused`: when and why none could be opened, as many
    as are kept. `promised`: what the rank of a node is promised to, and does not step in yet."""

    def __init__(self, ground: Meeting, job: PlayedJob, promised: Callable[[str], Order | None]) -> None:
        self.enacted: list[Enacted] = []
        self.refused: list[tuple[float, str]] = []
        self._ground, self._job, self._promised = ground, job, promised
        job.agents = Agents(self.mirror, self._drop, self.consider)
        self._agents: dict[str, PlayedAgent] = {}
        self._look_s = float("inf")

    # What it hears.

    def receive(self, to: str, report: Report) -> None:
        """A report reaches the agent of a node."""
        if (agent := self._agents.get(to)) is not None:
            agent.hear(ReportReceived(report))

    def node_died(self, name: str) -> None:
        """What was led from there is led no more."""
        dead = self._agents.pop(name, None)
        if dead is not None:
            dead.is_gone = True
            if dead.handoff is not None:
                self.enacted.append(dead.handoff.over(Stage.ABORTED, "the node that led is gone", ""))
        for agent in self._agents.values():
            agent.misses(name)

    def world_started(self, generation: int) -> None:
        """The service has started it: what leads to a successor of an older one ends."""
        for agent in tuple(self._agents.values()):
            agent.hear(WorldStarted(generation))

    def still_open(self) -> list[Enacted]:
        """At the end of the trace."""
        return [handoff.enacted("open", "the trace has ended", "") for handoff in self._open()]

    def nodes_wanted(self) -> tuple[str, ...]:
        """Those of the newest handoff."""
        newest = max(self._open(), key=lambda each: each.opened_s, default=None)
        return () if newest is None else newest.target

    def mirror(self) -> OpenHandoff | None:
        """What the service takes for the open handoff, also where it can only end."""
        newest_first = sorted(self._open(), key=lambda each: -each.opened_s)
        return next((mirror for each in newest_first if (mirror := each.mirror()) is not None), None)

    def _drop(self, reason: str) -> None:
        for agent in tuple(self._agents.values()):
            if agent.handoff is not None:
                agent.handoff.dropped = True
                agent.hear(Cancel(Reason(reason, "dropped")))

    def _open(self) -> list[PlayedHandoff]:
        return [agent.handoff for agent in self._agents.values() if agent.handoff is not None]

    def _agent(self, name: str) -> PlayedAgent | None:
        """From the first time on that somebody asks for it; None if its node is not there."""
        if name not in self._agents and self._ground.is_up(name):
            self._agents[name] = PlayedAgent(self._ground, self._job, name, self)
        return self._agents.get(name)

    # When they look.

    def consider(self) -> None:
        """What is due now: after every notice, every proposal of the service, and every end of a handoff."""
        world = self._ground.world
        if world is None or world.is_lost or not world.begun:
            return
        losses = self._losses()
        for name in self._who_looks(world, losses):
            self._look(name, world, losses)
        wanted = {name for each in self._open() for name in each.target}
        if any(loss.node_id in wanted.union(world.roster.node_ids()) for loss in losses) or self._job.proposed:
            self._look_at(self._ground.time.now + LOOK_S)

    def _look_at(self, at_s: float) -> None:
        if at_s < self._look_s:
            self._look_s = at_s
            self._ground.time.at(at_s, self._look_again, at_s)

    def _look_again(self, due_s: float) -> None:
        if due_s == self._look_s:
            self._look_s = float("inf")
            self.consider()

    def _who_looks(self, world: PlayedWorld, losses: tuple[Loss, ...]) -> tuple[str, ...]:
        """Members, those that lead, and where every member goes all that are there."""
        going, members = {loss.node_id for loss in losses}, world.roster.node_ids()
        leads = (agent.name for agent in self._agents.values() if agent.handoff is not None)
        others = self._ground.facts.nodes() if going.issuperset(members) else ()
        return tuple(dict.fromkeys((*members, *leads, *others)))

    def _look(self, name: str, world: PlayedWorld, losses: tuple[Loss, ...]) -> None:
        agent = self._agent(name)
        if agent is None:
            return
        order = self._promised(name)
        agent.hear(
            LossesKnown(
                world=world.roster,
                losses=losses,
                barred=frozenset(loss.node_id for loss in losses),
                promised=order and Promised(order.proposer_id, frozenset(order.target.node_ids())),
                used=self._job.highest,
            )
        )
        if self._job.proposed is not None:
            agent.hear(self._wanted(world, losses))
        self._look_at(
            agent.leader.next_deadline if agent.leader.next_deadline > self._ground.time.now else float("inf")
        )

    def _losses(self) -> tuple[Loss, ...]:
        """No more of a notice is used than what may be."""
        share, found = self._ground.times.usable_share, self._ground.facts.notices()
        safe = {name: heard_s + share * (gone_s - heard_s) for name, (heard_s, gone_s) in found.items()}
        return tuple(Loss(name, found[name][0], at_s, at_s, at_s) for name, at_s in safe.items())

    def _wanted(self, world: PlayedWorld, losses: tuple[Loss, ...]) -> HandoffWanted:
        assert self._job.proposed is not None, "it is proposed"
        handoff, target, layout = self._job.proposed
        leaving, now = frozenset(handoff.leaving), self._ground.time.now
        heard = [loss for loss in losses if loss.node_id in leaving]
        return HandoffWanted(
            handoff_id=str(handoff.handoff_id),
            parent=world.roster.generation,
            cause=str(HandoffCause.NOTICE if leaving else HandoffCause.GROW),
            plan=Plan(target.layout, target.members, self._ground.digest_of(layout), "proposed"),
            leaving=leaving,
            deadline_utc=min((loss.safe_by for loss in heard), default=now + UNHURRIED_LEAST_S),
            notice_at=min((loss.heard_at for loss in heard), default=None),
            is_heard=bool(heard),
        )

    # What agents have others hear.

    def tell(self, agent: PlayedAgent, notices: ForwardNotices) -> None:
        """The first that is there hears that it is its turn."""
        told = next((name for name in notices.to if self._ground.is_up(name)), "")
        missed = notices.to[: notices.to.index(told)] if told else notices.to
        self._ground.send(agent.take_forwarded, told, missed)
        if told:
            self._ground.send(self._asked_to_lead, told)

    def _asked_to_lead(self, name: str) -> None:
        agent, world = self._agent(name), self._ground.world
        if agent is not None and world is not None and world.begun and not world.is_lost:
            agent.hear(AskedToLead())
            self._look(name, world, self._losses())

    def refuses(self, reason: str) -> None:
        """No handoff is opened."""
        if len(self.refused) < REFUSED_MAX:
            self.refused.append((self._ground.time.now, reason))

    def is_over(self, agent: PlayedAgent, handoff: PlayedHandoff, ended: HandoffEnded) -> None:
        """A handoff has ended, and what is left to do may be begun."""
        ground, is_active = self._ground, ended.stage is Stage.ACTIVE
        self.enacted.append(handoff.over(ended.stage, str(ended.reason), str(ended.decision)))
        if ended.stage is Stage.ABORTED and not handoff.leaving and not handoff.superseded:
            self._job.aborted(str(ended.reason))
        roster = ground.world.roster if is_active and ground.world is not None else None
        roster = roster if roster is not None and roster.generation == ended.generation else None
        self._job.handoff_ended(handoff.parent, roster, ended.reason if ended.stage is Stage.BROKEN else None)
        ground.send(self.consider)
