"""The agents that lead: whose turn it is, which rung is taken, what another notice does to what is open. Pure.

The rung and its limits come from the product's ladder, and the plan from the policy. What is played is the host of a
proposer (`agent.driver.lead`, `agent.driver.notice_response`): who leads, and when somebody tries again.
"""

from collections.abc import Sequence
from dataclasses import replace

from agent.protocol.values import HandoffCause
from liver_core.handoff import Proposal, Report, Rung, RungChoice, Stage, StoreAddress
from liver_core.handoff.ladder import choose_rung, cutover_deadlines, unhurried_s
from liver_core.handoff.messages import HandoffId
from liver_core.handoff.proposer import AMENDABLE, ProposerState
from liver_core.handoff.proposer_events import HandoffEnded, ReportReceived
from liver_core.layout import Member, ParallelLayout
from liver_core.retries import retry_in_s
from service.handoffs.rules import OpenHandoff
from service.policy.types import Candidate
from service.simulation.machines.enacted import Enacted, handoff_id_of
from service.simulation.machines.meeting import Meeting, PlayedWorld
from service.simulation.machines.played_handoff import PlayedHandoff
from service.simulation.machines.played_job import Agents, PlayedJob
from service.simulation.replay_ledger import JOB

LIVE_RUNGS = (Rung.LIVE, Rung.DROP_STEP, Rung.STOP_AND_COPY, Rung.RESCUE)
UNHURRIED_LEAST_S = 180.0
REFUSED_MAX = 10_000
PATIENCE_S = 5.0
"""How long a node that leads is given to make something of a notice, before the next one is told."""


class PlayedLead:
    """`enacted`: every handoff that was opened, once it is over; `refused`: when and why none could be opened, as many
    as are kept."""

    def __init__(self, ground: Meeting, job: PlayedJob) -> None:
        self.enacted: list[Enacted] = []
        self.refused: list[tuple[float, str]] = []
        self._ground, self._job = ground, job
        job.agents = Agents(self.mirror, self._drop, self.consider)
        self._open: PlayedHandoff | None = None
        self._lingering: list[PlayedHandoff] = []
        self._failures = 0
        self._retry_s = 0.0

    # What it hears.

    def receive(self, to: str, report: Report) -> None:
        for handoff in self._all():
            if handoff.leads == to:
                handoff.feed(ReportReceived(report))

    def node_died(self, name: str) -> None:
        """What was led from there is led no more."""
        for handoff in self._all():
            if handoff.leads == name:
                self.enacted.append(handoff.over(Stage.ABORTED, "the node that led is gone", ""))
                handoff.dies()
                self._forget(handoff)
            else:
                handoff.misses(name)

    def still_open(self) -> list[Enacted]:
        """At the end of the trace."""
        return [handoff.enacted("open", "the trace has ended", "") for handoff in self._all()]

    def nodes_wanted(self) -> tuple[str, ...]:
        return () if self._open is None else self._open.target

    def mirror(self) -> OpenHandoff | None:
        """What the service takes for the open handoff, also where it can only end."""
        return next((mirror for each in self._all() if (mirror := each.mirror()) is not None), None)

    def _drop(self, reason: str) -> None:
        for handoff in self._all():
            handoff.dropped = True
            handoff.cancel(reason, "dropped")

    def _all(self) -> tuple[PlayedHandoff, ...]:
        return (*([self._open] if self._open is not None else []), *self._lingering)

    def _forget(self, handoff: PlayedHandoff) -> None:
        self._lingering = [each for each in self._lingering if each is not handoff]
        self._open = None if self._open is handoff else self._open

    # What it does.

    def consider(self) -> None:
        """What is due now: after every notice, every proposal of the service, and every end of a handoff."""
        ground, world = self._ground, self._ground.world
        if world is None or world.is_lost or not world.begun:
            return
        leaving, proposed = self._leaving(world), self._job.proposed
        if self._open is not None and (leaving or proposed is not None):
            self._passes_over(self._open)
        if self._open is not None:
            if leaving:
                self._answer_another(self._open, leaving)
        elif leaving and ground.time.now < self._retry_s:
            ground.time.at(self._retry_s, self.consider)
        elif leaving:
            planned = ground.facts.plan()
            target, layout = planned.decision.target, planned.layout
            if target is not None and layout is not None:
                self._try(world, target.node_ids(), layout, leaving)
        elif proposed is not None:
            handoff, target, layout = proposed
            if refusal := self._try(world, target.node_ids(), layout, {}, str(handoff.handoff_id)):
                self._job.declined(refusal)

    def _passes_over(self, handoff: PlayedHandoff) -> None:
        """Whose handoff can only end, and does not, is given a moment; then it is the next one's turn."""
        until_s = handoff.ending_s + PATIENCE_S
        if self._ground.time.now >= until_s:
            self._open, self._lingering = None, [*self._lingering, handoff]
        elif until_s < float("inf"):
            self._ground.time.at(until_s, self.consider)

    def _leaving(self, world: PlayedWorld) -> dict[str, float]:
        """Each member that will go, and by when its state must be elsewhere. One whose time has run out does not take
        their time from the others."""
        now, share, members = self._ground.time.now, self._ground.times.usable_share, world.roster.node_ids()
        notices = self._ground.facts.notices()
        found = {
            name: heard_s + share * (gone_s - heard_s) for name, (heard_s, gone_s) in notices.items() if name in members
        }
        in_time = min((safe_s for safe_s in found.values() if safe_s > now), default=None)
        return {name: safe_s if safe_s > now or in_time is None else in_time for name, safe_s in found.items()}

    def _try(
        self,
        world: PlayedWorld,
        target: Sequence[str],
        layout: Candidate,
        leaving: dict[str, float],
        handoff_id: str = "",
    ) -> str:
        """Choose the rung, and open the handoff if it is a live one. Returns why not, empty if so."""
        now, safe_s = self._ground.time.now, min(leaving.values()) if leaving else None
        inputs = self._ground.ladder(world.roster.node_ids(), target, None if safe_s is None else safe_s - now)
        choice = choose_rung(inputs)
        if choice.rung not in LIVE_RUNGS:
            return self._refuses(f"no live handoff: {choice.reason}")
        proposal = Proposal(
            handoff_id=HandoffId(handoff_id or handoff_id_of(self._job.next_id())),
            job_id=JOB,
            parent=world.roster.generation,
            source=world.roster,
            layout=ParallelLayout(dp=len(target)),
            members=tuple(Member(name, 0) for name in target),
            plan_digest=self._ground.digest_of(layout),
            store=StoreAddress("replay", 1),
            cause=str(HandoffCause.NOTICE if leaving else HandoffCause.GROW),
            rung=choice.rung,
            deadline_utc=_unhurried(choice, now) if safe_s is None else safe_s,
            cutover=cutover_deadlines(inputs),
        )
        busy = {handoff.leads for handoff in self._lingering} | leaving.keys()
        candidates = (name for name in (*world.roster.node_ids(), *target) if name not in busy)
        leads = next((name for name in candidates if self._ground.is_up(name)), None)
        if leads is None:
            return self._refuses("nobody is there to lead")
        self._open = PlayedHandoff(self._ground, self._job, leads, frozenset(leaving), self._is_over)
        if refusal := self._open.open(proposal):
            self._open = None
            return self._refuses(refusal)
        return ""

    def _refuses(self, reason: str) -> str:
        if len(self.refused) < REFUSED_MAX:
            self.refused.append((self._ground.time.now, reason))
        return reason

    def _is_over(self, handoff: PlayedHandoff, ended: HandoffEnded) -> None:
        ground, is_active = self._ground, ended.stage is Stage.ACTIVE
        self.enacted.append(handoff.over(ended.stage, str(ended.reason), str(ended.decision)))
        self._forget(handoff)
        self._failures = 0 if is_active or handoff.superseded else self._failures + 1
        if self._failures:
            self._retry_s = ground.time.now + retry_in_s(self._failures)
        if ended.stage is Stage.ABORTED and not handoff.leaving and not handoff.superseded:
            self._job.aborted(str(ended.reason))
        roster = ground.world.roster if is_active and ground.world is not None else None
        roster = roster if roster is not None and roster.generation == ended.generation else None
        self._job.handoff_ended(handoff.parent, roster, ended.reason if ended.stage is Stage.BROKEN else None)
        ground.send(self.consider)

    # Another notice.

    def _answer_another(self, handoff: PlayedHandoff, leaving: dict[str, float]) -> None:
        """More nodes than the open handoff answers: amend it, else end it and make another. In a trace no notice is
        shortened, so that none of a node that is answered already changes anything."""
        proposer, more = handoff.proposer, leaving.keys() - handoff.leaving
        if not more or proposer.tally.boundary_passed() or proposer.state is ProposerState.WITHDRAWING:
            return
        amended = proposer.state in AMENDABLE and self._amend(handoff, leaving)
        if not amended and not handoff.superseded:
            handoff.superseded = True
            names = ", ".join(sorted(more))
            handoff.cancel(f"superseded: {names} will go too, one plan is made for all", "superseded")

    def _amend(self, handoff: PlayedHandoff, leaving: dict[str, float]) -> bool:
        current, ground = handoff.proposer.record.proposal, self._ground
        planned = ground.facts.plan()
        target, layout = planned.decision.target, planned.layout
        if current is None or current.source is None or target is None or layout is None:
            return False
        safe_s = min(*leaving.values(), current.deadline_utc)
        inputs = ground.ladder(current.source.node_ids(), target.node_ids(), safe_s - ground.time.now)
        choice = choose_rung(inputs)
        if choice.rung not in LIVE_RUNGS:
            return False
        amended = replace(
            current,
            layout=target.layout,
            members=target.members,
            plan_digest=ground.digest_of(layout),
            cause=str(HandoffCause.NOTICE),
            rung=current.rung if target.members == current.members else choice.rung,
            deadline_utc=safe_s,
        )
        return handoff.amend(amended, frozenset(leaving))


def _unhurried(choice: RungChoice, now: float) -> float:
    """Until when a handoff may take that nothing presses: several times what its rung is estimated to need."""
    return now + max(UNHURRIED_LEAST_S, unhurried_s(choice))
