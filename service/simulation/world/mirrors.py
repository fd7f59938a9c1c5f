"""What an agent tells the service of the handoffs that it leads. Pure.

As `agent.driver.mirrors`: each news of a handoff is a copy with a higher number, kept on the node's disk and sent until
the service has taken it. What an agent that was killed has not told is decided by `untold_ends`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agent.protocol import handoff_ends
from agent.protocol.relays import PATIENCE_S, PEERS, concerns, is_news
from agent.protocol.values import HandoffState
from liver_core.handoff import ProposerRecord
from liver_core.handoff.leader_events import Purpose
from liver_core.handoff.own_handoffs import Led, OwnHandoffs
from liver_core.handoff.proposer_events import HandoffEnded, Proposal
from liver_core.layout import Roster
from service.handoffs.rules import is_open
from service.simulation.world.parts import Agent
from service.simulation.world.reports import Mirror
from service.simulation.world.whole import Whole

NEWS_S = 10.0
"""An open handoff is told again so often."""
KEPT_MAX = 64


class Mirrors:
    """Of one agent. `kept` is on its disk, `waiting` in its memory: the newest copy of each handoff."""

    def __init__(self, agent: Agent, simulation: Whole) -> None:
        self._agent, self._sim = agent, simulation
        self.kept: dict[str, Mirror] = {}
        self.waiting: dict[str, Mirror] = {}
        self.told_late: set[str] = set()  # of which the end is told since the agent started
        self._said_at = 0.0
        self._of_others: dict[str, Mirror] = {}  # what others have led, on this disk too
        self._since: dict[str, float] = {}  # when what waits began to
        self._told: dict[str, tuple[Mirror, ...]] = {}

    def opens(self, proposal: Proposal, generation: int, purpose: Purpose) -> None:
        """The first copy of a handoff, kept before the proposal itself: one that is killed in between tells of it."""
        agent = self._agent
        self._say(
            Mirror(
                handoff_id=proposal.handoff_id,
                parent=proposal.parent,
                generation=generation,
                state=HandoffState.PREPARING,
                target=Roster(proposal.job_id, generation, proposal.layout, proposal.members),
                mirror_seq=0,
                proposer=agent.name,
                opened_s=agent.now,
                source=proposal.source,
                leaving=tuple(sorted(purpose.leaving)),
                deadline_s=proposal.deadline_utc,
                rung=proposal.rung,
                cause=proposal.cause,
                store_node=agent.name,
                layout=self._sim.layout_of(proposal),
            )
        )

    def say_open(self, own: OwnHandoffs) -> None:
        """The next copy of the open handoff, as its proposer stands."""
        record, led, tally = own.proposer.record, own.led, own.proposer.tally
        proposal = record.proposal
        if proposal is None or (before := self.kept.get(proposal.handoff_id)) is None:
            return
        state = handoff_ends.state_of_open(record.phase, is_past=tally.boundary_passed(), streams=False)
        self._say(
            replace(
                before,
                state=state,
                plan_revision=record.plan_revision,
                target=Roster(proposal.job_id, record.generation, proposal.layout, proposal.members),
                leaving=before.leaving if led is None else tuple(sorted(led.leaving)),
                deadline_s=proposal.deadline_utc,
                rung=proposal.rung,
                superseded=before.superseded or (led is not None and led.superseded),
                decision=tally.decision(),
                reason=record.reason,
                layout=self._sim.layout_of(proposal),
            )
        )

    def say_ended(self, ended: HandoffEnded) -> None:
        """How one ended."""
        if (before := self.kept.get(ended.handoff_id)) is not None:
            self._say(_ended_copy(before, ended))

    def say_stale(self, own: OwnHandoffs) -> None:
        """The same where its newest copy is old."""
        if own.proposer.record.proposal is not None and self._agent.now - self._said_at > NEWS_S:
            self.say_open(own)

    def take_answer(self, taken: tuple[Mirror, ...]) -> None:
        """The service has taken these."""
        for mirror in taken:
            if self.waiting.get(mirror.handoff_id) == mirror:
                del self.waiting[mirror.handoff_id]

    def relay(self, to: Iterable[str]) -> None:
        """As `agent.link.relay`: what waits for the service is told to two others, the first of these that are reached;
        at once where it is away, and where it is there only what it has not taken for long."""
        agent, network, link = self._agent, self._sim.network, self._agent.link
        self._since = {name: self._since.get(name, agent.now) for name in self.waiting}
        patience_s = PATIENCE_S if link.is_answered else 0.0
        due = [each for name, each in self.waiting.items() if agent.now - self._since[name] >= patience_s]
        reached = [name for name in to if name != agent.name and network.reaches(agent.name, name)] if due else []
        for name in reached[:PEERS]:
            news = tuple(
                each
                for each in due
                if concerns(name, each.source, each.target) and each not in self._told.get(name, ())
            )
            if news:
                self._told[name] = (*self._told.get(name, ()), *news)[-KEPT_MAX:]
                network.tell(agent.name, name, self._sim.agent(name).take_relayed, news)

    def take_relayed(self, mirrors: tuple[Mirror, ...]) -> None:
        """What another node has led is told from here too, and kept."""
        for mirror in mirrors:
            kept = self._of_others.get(mirror.handoff_id)
            known = None if kept is None else (kept.generation, kept.mirror_seq)
            if mirror.proposer != self._agent.name and is_news((mirror.generation, mirror.mirror_seq), known):
                self._of_others[mirror.handoff_id] = self.waiting[mirror.handoff_id] = mirror
                while len(self._of_others) > KEPT_MAX:
                    del self._of_others[next(iter(self._of_others))]

    def restart(self, record: ProposerRecord) -> None:
        """Only what was kept is left. It is sent again, and what had ended by then is told."""
        self.waiting = self._of_others | self.kept
        self._since, self._told = {}, {}
        open_id = None if record.proposal is None else record.proposal.handoff_id
        unfinished = [name for name, mirror in self.kept.items() if is_open(mirror.state)]
        self.told_late = set()
        for ended in handoff_ends.untold_ends(unfinished, record.ended, open_id=open_id):
            # On disk it stays as it was: one that is killed again tells the same again.
            before = self.kept[ended.handoff_id]
            self.waiting[ended.handoff_id] = replace(_ended_copy(before, ended), mirror_seq=before.mirror_seq + 1)
            self.told_late.add(ended.handoff_id)

    def led(self, record: ProposerRecord) -> Led | None:
        """What was kept of the open handoff."""
        kept = None if record.proposal is None else self.kept.get(record.proposal.handoff_id)
        if kept is None:
            return None
        return Led(frozenset(kept.leaving), kept.opened_s, record.plan_revision, superseded=kept.superseded)

    def _say(self, mirror: Mirror) -> None:
        mirror = replace(mirror, mirror_seq=mirror.mirror_seq + 1)
        self.kept[mirror.handoff_id] = self.waiting[mirror.handoff_id] = mirror
        self._said_at = self._agent.now
        self._agent.link.tell_news()
        while len(self.kept) > KEPT_MAX:
            del self.kept[next(iter(self.kept))]


def _ended_copy(before: Mirror, ended: HandoffEnded) -> Mirror:
    return replace(before, state=handoff_ends.state_of_end(ended), reason=ended.reason, decision=ended.decision)
