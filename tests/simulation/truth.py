"""What must hold (handoff.md section 1), checked whenever something happens that could break it. Pure.

It sees everything at once, which no party of the real protocol can. A violation names the rule.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from agent.protocol import handoff_ends
from agent.protocol.values import HandoffState
from liver_core.handoff import OUT_OF_TIME, Decision, Order, Phase, Report, Rung, Stage
from liver_core.handoff.generations import start_of
from liver_core.handoff.leader import Leader
from liver_core.handoff.participant_events import ParticipantRecord, ParticipantState, RankStage
from liver_core.handoff.pending import PendingState
from liver_core.handoff.proposer_events import HandoffEnded, ProposerEffect, ProposerEvent, ProposerRecord
from liver_core.handoff.refusals import REFUSED
from service.handoffs.rules import is_open
from service.jobs.causes import FirstCause
from service.simulation.world.observer import Attempt, Observer, Violation, attempt_of, voters
from tests.simulation.coverage import Coverage
from tests.simulation.notice_watch import NoticeWatch
from tests.simulation.planning import ladder_inputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from liver_core.layout import Member
    from service.simulation.world.parts import Agent, Rank, RankInPause, World
    from tests.simulation.simulation import Simulation

BUSY = (
    RankStage.PREPARING,
    RankStage.STREAMING,
    RankStage.PREPARED,
    RankStage.READY,
    RankStage.CUTTING_OVER,
)


LOOK_S = 0.25
STORE_SEEN_S = 1.0
TOLD_WITHIN_S = 6.0
GIVES_UP_WITHIN_S = 5.0
BOUND = (ParticipantState.PREPARING, ParticipantState.STREAMING, ParticipantState.READY, ParticipantState.PERMITTED)
OPENS_IN_S, TAKEN_UP_WITHIN_S, END_TOLD_WITHIN_S = 3.0, 1.0, 6.0
SLOW = (
    "slow read",
    "barrier fails",
    "store cut off",
    "network storm",
    "agent stands still",
    "gradients late",
    "cut off from the service",
    "cut off from everybody",
    "world cut off",
)
"""Faults that make a pause long by themselves."""
_PAST = (RankStage.CUTTING_OVER, RankStage.ACTIVE)


class Truth(Observer):
    """The whole history that the rules speak about."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.coverage = Coverage()
        self.notices = NoticeWatch(simulation, partial(ladder_inputs, simulation))
        self.participant = self.coverage.participant  # type: ignore[method-assign]
        self.pending, self.cutover = self.coverage.pending, self.coverage.cutover  # type: ignore[method-assign]
        self.applied: dict[tuple[int, int], int] = {}  # (start, version) -> generation that stepped to it
        self.generation_owner: dict[int, str] = {}  # generation -> handoff that was decided GO with it
        self.burned: dict[tuple[str, int], str] = {}  # (proposer, generation) -> handoff
        self.numbers: dict[int, tuple[str, bool]] = {}  # generation -> who used it first, and whether that is a start
        self.promised: dict[tuple[Member, int], str] = {}  # (member, generation) -> handoff
        self.bound: dict[Member, tuple[str, float]] = {}  # member -> the handoff it is promised to, and since when
        self.revision_at_boundary: dict[Attempt, int] = {}
        self.rung_at_boundary: dict[Attempt, tuple[Rung, Rung]] = {}  # generation -> rung ordered, and rung taken
        self.dropped_at: set[Attempt] = set()  # generations for which a step was dropped
        self.deadlines: dict[tuple[Attempt, str], float] = {}  # of the newest revision of each lead
        self.permit_at: dict[tuple[Attempt, int], float] = {}  # when each revision had permission first
        self.parents: dict[Attempt, int] = {}  # generation -> generation of its source
        self.first_steps: dict[Attempt, set[Member]] = {}
        self.said_ready: set[tuple[Attempt, int, Member]] = set()
        self.ended: list[HandoffEnded] = []
        self.over: set[Attempt] = set()
        self.boundary_at: dict[Attempt, float] = {}
        self.touched: dict[str, float] = {}  # nodes on which something went wrong -> when last
        self.blamed: list[tuple[FirstCause | None, str]] = []
        self.was_asked_for = False  # a start that nobody needs
        self.attempts: dict[str, str] = {}  # each handoff that was opened -> its proposer
        self.led: dict[str, str] = {}  # each handoff that has ended for its lead -> that
        self.untold: dict[str, float] = {}  # since when its lead may tell that
        self.anyway: set[str] = set()  # those that a fault has opened
        self.absent: dict[Member, list[tuple[float, float]]] = {}  # since when it had no agent, and until when
        self.told: dict[Member, Order] = {}  # the newest revision that each rank was told of
        self.behind: dict[Member, float] = {}  # since when it holds an older one, though it may take it
        self.stream_failures: dict[int, str] = {}  # generation of the source -> why the live rung failed there
        self.steps = 0
        self.starts_by_service = 0
        self.begun = 0  # the newest generation that has made a step
        self.newest_start = 0  # the newest that has made a step
        self.fences: dict[Member, int] = {}  # member -> the newest start that its agent has heard of
        self.giving_up: dict[Member, bool] = {}  # member -> whether its disk says that its rank is being ended
        self.rank_started: set[tuple[Member, int]] = set()
        self.permitted: set[tuple[Member, str]] = set()  # a participant, and a handoff for which it had permission
        self.ended_here: set[tuple[Member, str]] = set()  # a participant, and a handoff that is over for it

    # Agents that lead, and what the service does about a loss.

    def leader_begins(self, agent: Agent, leader: Leader) -> None:
        """Its proposer's events are counted too."""
        proposer, handle = leader.own.proposer, leader.own.proposer.handle

        def counted(event: ProposerEvent, now: float) -> tuple[ProposerEffect, ...]:
            self.coverage.proposer(proposer.state, event)
            return handle(event, now)

        proposer.handle = counted  # type: ignore[method-assign]

    def struck(self, name: str) -> None:
        """Something has gone wrong on this node."""
        self.touched[name] = self.simulation.clock.now
        self.notices.disturbed(name)

    def look(self) -> None:
        """Several times a second: whether somebody acts on what is known."""
        now = self.simulation.clock.now
        self.simulation.clock.after(LOOK_S, self.look)
        self.notices.look()
        for agent in self.simulation.agents.values():
            if not agent.is_going:
                times = self.absent.setdefault(agent.member, [])
                began = times.pop()[0] if times and times[-1][1] > now - 2 * LOOK_S else now
                times.append((began, now))
            self._gives_up_in_time(agent)
            if agent.rank is not None and agent.rank.alive:
                self._takes_up_revisions(agent.rank)
        for handoff_id, lead in self.led.items():
            self._tells_its_end(handoff_id, lead)

    def _tells_its_end(self, handoff_id: str, lead: str) -> None:
        """The service hears of the end of each handoff, from who led it, also where that one was killed meanwhile."""
        sim = self.simulation
        row, is_there = sim.service.rows.handoffs.rows.get(handoff_id), sim.agent(lead).is_going
        if row is None or not is_open(row.state) or not is_there or not sim.network.reaches_service(lead):
            self.untold.pop(handoff_id, None)
        elif sim.clock.now - self.untold.setdefault(handoff_id, sim.clock.now) > END_TOLD_WITHIN_S:
            raise Violation(f"end untold: {handoff_id} has ended, and the service takes it for {row.state}")

    def _gives_up_in_time(self, agent: Agent) -> None:
        """Nobody is bound before the boundary for long after the deadline, whether the lead says so or not."""
        order, (_, back_at) = agent.participant.record.order, self.absent.get(agent.member, [(0.0, 0.0)])[-1]
        waits = agent.is_going and order is not None and agent.participant.state in BOUND
        if not waits or order is None or self.simulation.clock.now - back_at < GIVES_UP_WITHIN_S:
            return
        if (late_s := agent.now - order.boundary_by(agent.member)) > GIVES_UP_WITHIN_S:
            raise Violation(f"deadline ignored: {agent.name} is {agent.participant.state} {late_s:.1f} s after it")

    def _takes_up_revisions(self, rank: Rank) -> None:
        """A newer revision that a rank was told of, while it may still take one, does not wait for ever."""
        pending, held, told = rank.pending, rank.pending.order, self.told.get(rank.member)
        is_free = pending.state in (PendingState.BUILDING, PendingState.BUILT) and not pending.is_permitted
        now, newer = self.simulation.clock.now, 0
        if held is not None and told is not None and held.handoff_id == told.handoff_id:
            newer = told.plan_revision
        if held is None or not is_free or held.plan_revision >= newer:
            self.behind.pop(rank.member, None)
        elif now - self.behind.setdefault(rank.member, now) > TAKEN_UP_WITHIN_S:
            raise Violation(f"revision forgotten: {rank} holds {held.plan_revision} of {held.handoff_id}, not {newer}")

    def job_lost(self, cause: FirstCause | None, reason: str) -> None:
        """The service starts the job again since its world cannot go on. H7: whoever is named has failed."""
        self.blamed.append((cause, reason))
        if cause is not None and cause.node is not None and cause.node not in self.touched:
            raise Violation(f"H7: {cause.node} is blamed, and nothing has happened to it: {reason}")
        if (borne := self._could_be_borne()) is not None:
            raise Violation(f"restart for what can be borne: {borne} goes without who is lost: {reason}")

    def _could_be_borne(self) -> str | None:
        """The handoff past its boundary whose targets all live, while only leavers are gone."""
        sim = self.simulation
        if sim.is_cut or self.was_asked_for:
            return None
        for attempt in self.rung_at_boundary:
            order = sim.orders.get((attempt, Phase.PERMIT))
            if order is None or order.source is None or attempt in self.over:
                continue
            ranks = [sim.agents[member].rank for member in voters(order)]
            if order.generation < max(sim.worlds) and order.parent < max(sim.worlds):
                continue
            if not sim.store(order).alive or not sim.agent(order.proposer_id).node_up:
                continue  # Nothing can be decided any more.
            if all(rank is not None and rank.alive and _has_a_part(rank, order) for rank in ranks):
                return order.handoff_id
        return None

    def at_rest(self) -> None:
        """Nothing waits any more: each attempt is in the service's list, and as its proposer knows it."""
        sim = self.simulation
        ended = (end for agent in sim.living() for end in agent.leading.proposer_record.ended)
        known = {(str(end.handoff_id), end.generation): end for end in ended}
        for handoff_id, proposer in self.attempts.items():
            row = sim.service.rows.handoffs.rows.get(handoff_id)
            if row is None and proposer not in sim.taken:
                raise Violation(f"hidden attempt: the service's list has no {handoff_id}, which {proposer} led")
            end = None if row is None or row.generation is None else known.get((handoff_id, row.generation))
            if row is None or end is None:
                continue
            left = row.parent != sim.service.rows.generations.active
            if row.state is HandoffState.ABORTED and left:
                continue  # What comes of an attempt from a world that the job has left changes nothing.
            if row.state is not handoff_ends.state_of_end(end):
                raise Violation(f"hidden outcome: {handoff_id} ended {end.stage}, the service has {row.state}")

    # H3, H5: steps.

    def step_applied(self, rank: RankInPause, world: World, *, at_cutover: bool) -> None:
        """`rank` stepped from `rank.version - 1` to `rank.version` in `world`."""
        self.steps += 1
        if not world.is_begun:
            self._first_step_of_start(rank, world)
        self.begun = max(self.begun, world.generation)
        if rank.value != self.simulation.value(rank.version):
            raise Violation(f"H1: {rank} has a wrong state at version {rank.version} in generation {world.generation}")
        era = start_of(world.generation)
        if era < start_of(self.newest_start) and not (at_cutover and self.starts_by_service):
            raise Violation(f"H3: {rank} steps in generation {world.generation} beside a restarted world")
        owner = self.applied.setdefault((era, rank.version), world.generation)
        if owner != world.generation:
            raise Violation(f"H3: version {rank.version} was stepped to in generations {owner} and {world.generation}")

    def gradients_whole(self, rank: RankInPause) -> None:
        """`rank` is about to apply a step."""
        if rank.partial:
            raise Violation(f"H1: {rank} applies a step that was dropped before its gradients were whole")

    def checkpoint_published(self, generation: int, version: int) -> None:
        """A checkpoint of this version is complete; it replaces any other of the same version."""
        if start_of(generation) < start_of(self.begun):
            raise Violation(f"checkpoint: generation {generation} publishes version {version} beside {self.begun}")

    # Starts of the service.

    def started(self, generation: int) -> None:
        """The service starts a world with this number."""
        self.starts_by_service += 1
        if generation in self.numbers:
            raise Violation(f"H6: generation {generation} of a start was used before, by {self.numbers[generation][0]}")
        self.numbers[generation] = (f"start {generation}", True)

    def start_heard(self, member: Member, generation: int) -> None:
        """An agent has heard that the service has started `generation`, and has carried out what follows."""
        self.fences[member] = max(self.fences.get(member, 0), generation)

    def persisted(self, member: Member, record: ParticipantRecord, rank: Rank | None) -> None:
        """A participant has written its record. What had no permission cannot have met a boundary: it is not broken,
        unless its rank says so."""
        self.giving_up[member] = record.replaced is not None
        if record.promise is not None and record.promise.phase is Phase.PERMIT:
            self.permitted.add((member, record.promise.handoff_id))
        for ended in record.ended[-1:]:
            is_news = (member, ended.handoff_id) not in self.ended_here
            self.ended_here.add((member, ended.handoff_id))
            said_so = rank is not None and rank.stage is RankStage.BROKEN
            may_be_broken = said_so or (member, ended.handoff_id) in self.permitted
            if is_news and ended.stage is Stage.BROKEN and not may_be_broken:
                raise Violation(f"broken without permission: {ended.handoff_id} on {member}")

    def rank_starts(self, member: Member, generation: int, journal: ParticipantRecord) -> None:
        """A process of the start is made."""
        if journal.active is None or journal.active.generation != generation:
            raise Violation(f"start before persist: generation {generation} on {member}")
        if (member, generation) in self.rank_started:
            raise Violation(f"H6: the rank of generation {generation} on {member} is started twice")
        self.rank_started.add((member, generation))
        if generation < self.fences.get(member, 0):
            raise Violation(f"H6: {member} starts generation {generation}, it knows of {self.fences[member]}")

    def _first_step_of_start(self, rank: RankInPause, world: World) -> None:
        if world.generation < self.newest_start:
            raise Violation(f"H3: {rank} begins generation {world.generation} beside the newer {self.newest_start}")
        self.newest_start = world.generation

    # The decision.

    def step_after_boundary(self, rank: RankInPause, handoff_id: str, record: Decision, *, in_target: bool) -> None:
        """`rank` is about to apply the step that a cutover was about."""
        if rank.decision_read is Decision.UNDECIDED:
            raise Violation(f"step before the decision was read: {rank} in {handoff_id}")
        if rank.decision_read is not record:
            raise Violation(f"decision changed: {rank} read {rank.decision_read}, the record says {record}")
        if record.goes is not in_target:
            raise Violation(f"H3: {rank} steps in the {'target' if in_target else 'source'} world after {record}")

    def decided(self, order: Order, decision: Decision, held: Mapping[Member, Rank], version: int) -> None:
        """The decision record was written for the first time."""
        self._is_in_time(order)
        if not decision.goes:
            return
        handoff_id = self.generation_owner.setdefault(order.generation, order.handoff_id)
        if handoff_id != order.handoff_id:
            raise Violation(f"H6: generation {order.generation} goes for {order.handoff_id} and for {handoff_id}")
        for member in voters(order):
            rank = held.get(member)
            certified = member in self.simulation.certified.get(attempt_of(order), ())
            if rank is None or not certified or rank.held_value != self.simulation.value(version):
                raise Violation(f"certificate: {decision} of {order.handoff_id} without a certified state on {member}")

    def _is_in_time(self, order: Order) -> None:
        """Whoever waits for a rank that is dead is told by the agent that has seen it, and waits no more. Who has no
        agent for a while is not told, and sources of which no target lives wait for their own limit."""
        sim, now = self.simulation, self.simulation.clock.now
        if all(map(sim.is_gone, voters(order))):
            return
        members = {*(order.source.members if order.source else ()), *voters(order)}
        gone = [member for member in members if sim.is_gone(member)]
        dead = {member: sim.died_at[member] for member in gone if member in sim.died_at}
        began = self.boundary_at.get(attempt_of(order), now)
        slow = any(fault.kind in SLOW for fault in sim.plan.faults) or sim.network.loss or sim.network.cut_off
        seen = [at for at in dead.values() if at >= began]
        first = min(seen, default=now)
        away = [member for member in members if self._was_away(member, first)]
        if not slow and not away and len(seen) == len(gone) and now - first > TOLD_WITHIN_S:
            raise Violation(f"pause: {order.handoff_id} is decided {now - first:.1f} s after a death that was seen")

    def _was_away(self, member: Member, since: float) -> bool:
        """Whether it had no agent when it could have been told, or for long enough after."""
        return any(began < since + 2.0 and ended > since for began, ended in self.absent.get(member, ()))

    def fell(self, rank: RankInPause, order: Order) -> None:
        """`rank` can go on in no world. After a rescue has released its leavers, only a second failure may bring it so
        far; without a fault in the run there is none, unless the service has started the job again: that ends ranks.
        A rank that was certified and reads GO has all it needs."""
        if rank.decision_read is Decision.GO and rank.member in self.simulation.certified.get(attempt_of(order), ()):
            raise Violation(f"avoidable fall: {rank} holds a certified state, and {order.handoff_id} goes")
        if order.rung is not Rung.RESCUE or not rank.decision_read.goes:
            return
        simulation = self.simulation
        known = [simulation.agents[member].journal.highest_generation for member in order.target.members]
        if any(start_of(highest) > start_of(order.generation) for highest in known):
            return
        building, plan = simulation.building(order), simulation.plan
        complete = building.known_at <= simulation.clock.now
        early = simulation.clock.now < building.entered_at[rank.member] + order.cutover.build_s
        undisturbed = not plan.faults and not plan.network[0] and not any(map(simulation.is_gone, order.target.members))
        if not building.disturbed and (early or complete or undisturbed):
            raise Violation(f"lost after the release: {rank} falls in {order.handoff_id}, though nothing else failed")

    def boundary_passed(self, rank: RankInPause, order: Order, *, dropped: bool) -> None:
        """`rank` learned that the boundary of `order` was agreed."""
        if (rank.member, order.handoff_id) not in self.permitted:
            raise Violation(f"boundary without permission: {rank} cuts over in {order.handoff_id}")
        self.boundary_at.setdefault(attempt_of(order), self.simulation.clock.now)
        revision = self.revision_at_boundary.setdefault(attempt_of(order), order.plan_revision)
        if revision != order.plan_revision:
            raise Violation(f"amended: {rank} cuts over in revision {order.plan_revision}, others in {revision}")
        _, rung = self.rung_at_boundary.setdefault(attempt_of(order), (order.rung, rank.rung))
        if dropped:
            self.dropped_at.add(attempt_of(order))
        if dropped and order.rung is not Rung.DROP_STEP:
            raise Violation(f"ladder: {rank} drops a step for {order.handoff_id} on {order.rung}")
        if dropped is not (attempt_of(order) in self.dropped_at):
            raise Violation(f"mixed: {rank} cuts over at the end of a step that others dropped")
        if rung is not rank.rung:
            raise Violation(f"mixed rungs: {rank} cuts over {rank.rung}, others {rung}")

    def build_begins(self, rank: Rank) -> None:
        """`rank` takes memory for a next world: there is room for one."""
        if rank.worlds_dropping or rank.building:
            raise Violation(f"memory: {rank} builds a next world while another one has its memory")

    def newcomer_goes(self, rank: Rank) -> None:
        """`rank` cuts over to its first world: its participant must be able to say so."""
        order = rank.pending.order
        if order is None or rank.pending._permission != (order.handoff_id, order.plan_revision):
            raise Violation(f"boundary without permission: the newcomer {rank} cuts over")

    def stays(self, rank: Rank) -> None:
        """All ranks of its world have agreed to cut over, and `rank` does not."""
        raise Violation(f"left alone: {rank} trains on, and the others cut over")

    def streams(self, rank: Rank) -> None:
        """`rank` begins to stream."""
        if not self.simulation.plan.link.one_sided:
            raise Violation(f"ladder: {rank} streams over a transport that has no one-sided reads")

    def boundaries(self) -> list[str]:
        """The agreed boundaries of this run by rung, and by whether the plan was amended before."""
        return [
            f"{str(rung) if rung.streams else _copied(wanted)}"
            f"{' before the boundary' if attempt in self.dropped_at else ''}"
            f"{', amended' if self.revision_at_boundary[attempt] > 1 else ''}"
            for attempt, (wanted, rung) in self.rung_at_boundary.items()
        ]

    def first_step(self, rank: RankInPause, order: Order) -> None:
        """`rank` has made its first step in the world of `order`."""
        self.first_steps.setdefault(attempt_of(order), set()).add(rank.member)

    # Promises, the journal and words.

    def opened(self, handoff_id: str, proposer: str) -> None:
        """A proposer is about to open it. Where its own rank has long been promised to another, that is none of its
        business."""
        self.attempts[handoff_id] = proposer
        agent = self.simulation.agent(proposer)
        held, (other, since) = agent.journal.promise, self.bound.get(agent.member, ("", 0.0))
        if held is None or held.handoff_id != other or self.attempts.get(other) == proposer:
            return
        active = agent.journal.active
        is_over = active is not None and active.generation >= held.generation
        if not is_over and handoff_id not in self.anyway and self.simulation.clock.now - since > OPENS_IN_S:
            raise Violation(f"opened beside another: {proposer} opens {handoff_id}, bound to {other} at {since:.1f} s")

    def report_spoken(self, report: Report, journal: ParticipantRecord, rank: Rank | None) -> None:
        """A participant says something: all of it must be on its disk, and true of its rank."""
        if report.stage is Stage.READY:
            self.said_ready.add((attempt_of(report), report.plan_revision, report.member))
            self._ready_is_true(report, rank)
        if (
            report.stage is Stage.ABORTED
            and rank is not None
            and rank.alive
            and rank.holds(report.handoff_id, report.generation)
            and (report.reason is None or report.reason.phase != REFUSED)
        ):
            raise Violation(f"aborted is said while {rank} is {rank.stage} in {report.handoff_id}")
        if report.promise != journal.promise:
            raise Violation(f"spoke before persist: {report.member} says {report.promise}, disk {journal.promise}")
        if report.highest_generation > journal.highest_generation:
            raise Violation(f"spoke before persist: {report.member} says generation {report.highest_generation}")
        promise = report.promise
        if promise is None:
            self.bound.pop(report.member, None)
            return
        if promise.generation < self.fences.get(report.member, 0):
            known = self.fences[report.member]
            raise Violation(f"H6: {report.member} is bound to generation {promise.generation}, it knows of {known}")
        if self.bound.get(report.member, ("", 0.0))[0] != promise.handoff_id:
            self.bound[report.member] = promise.handoff_id, self.simulation.clock.now
        owner = self.promised.setdefault((report.member, promise.generation), promise.handoff_id)
        if owner != promise.handoff_id:
            raise Violation(f"H6: {report.member} took generation {promise.generation} for two handoffs")

    def _ready_is_true(self, report: Report, rank: Rank | None) -> None:
        """Ready: built, and certified where it streams; a fall to the next rung is named."""
        if rank is None or not rank.alive or rank.order is None or rank.order.handoff_id != report.handoff_id:
            return
        if rank.order.plan_revision != report.plan_revision:
            return
        if rank.stage in (RankStage.PREPARING, RankStage.STREAMING):
            raise Violation(f"ready is said while {rank} is {rank.stage} in {report.handoff_id}")
        fell = rank.order.rung.streams and not rank.rung.streams
        if fell and rank.stage in (RankStage.PREPARED, RankStage.READY) and report.reason is None:
            raise Violation(f"H7: {rank} fell to {rank.rung} in {report.handoff_id} without a reason")

    def agent_restored(self, member: Member, journal: ParticipantRecord) -> None:
        """A participant came back from its journal: no spoken promise may be forgotten."""
        self.struck(member.node_id)  # It was not heard for a while.
        if self.giving_up.get(member, False) and journal.replaced is None:
            raise Violation(f"given-up rank forgotten: {member} was ending it for a start")
        bound, _ = self.bound.get(member, (None, 0.0))
        if bound is None:
            return
        kept = journal.promise is not None and journal.promise.handoff_id == bound
        if not kept and not any(ended.handoff_id == bound for ended in journal.ended):
            raise Violation(f"promise forgotten: {member} was bound to {bound}")

    def order_spoken(self, order: Order, journal: ProposerRecord) -> None:
        """A proposer says something: all of it must be on its disk, and its numbers are used once."""
        if order.generation > journal.highest_generation:
            raise Violation(f"spoke before persist: {order.proposer_id} says generation {order.generation}")
        if order.phase is not Phase.ABORT and (order.phase is not journal.phase or journal.proposal is None):
            raise Violation(f"spoke before persist: {order.proposer_id} says {order.phase}")
        owner = self.burned.setdefault((order.proposer_id, order.generation), order.handoff_id)
        if owner != order.handoff_id:
            raise Violation(f"H6: {order.proposer_id} used generation {order.generation} for two handoffs")
        first, starts = self.numbers.setdefault(order.generation, (order.handoff_id, False))
        if starts:
            raise Violation(f"H6: generation {order.generation} is used by {first} and {order.handoff_id}")
        self.parents[attempt_of(order)] = order.parent
        by = attempt_of(order), order.proposer_id
        if order.deadline_utc > self.deadlines.get(by, order.deadline_utc):
            raise Violation(f"amended: the deadline of {order.handoff_id} is later in revision {order.plan_revision}")
        if order.phase is not Phase.ABORT:  # Whoever is dropped by a revision is told so under the one before.
            self.deadlines[by] = order.deadline_utc
        if order.phase is Phase.PERMIT:
            self.permit_at.setdefault((attempt_of(order), order.plan_revision), self.simulation.clock.now)
            self._all_said_ready(order)
            if attempt_of(order) not in self.rung_at_boundary:
                self._has_its_store(order)
        if order.phase is Phase.RETIRE and set(order.target.members) - self.first_steps.get(attempt_of(order), set()):
            raise Violation(f"retired before every rank of generation {order.generation} did its first step")
        passed = self.revision_at_boundary.get(attempt_of(order))
        if passed is not None and order.plan_revision != passed and order.phase is not Phase.ABORT:
            raise Violation(f"amended: {order.handoff_id} says revision {order.plan_revision} after the boundary")

    def rank_prepares(self, rank: Rank, order: Order) -> None:
        """A rank is told to prepare; only one handoff at a time, for the roster that it truly steps in."""
        held, told = rank.order, self.told.get(rank.member)
        if told is None or told.handoff_id != order.handoff_id or told.plan_revision < order.plan_revision:
            self.told[rank.member] = order
        busy = rank.stage in BUSY
        if held is not None and busy and held.handoff_id != order.handoff_id:
            raise Violation(f"two promises: {rank} prepares {order.handoff_id} while it holds {held.handoff_id}")
        if held is not None and rank.stage is RankStage.CUTTING_OVER and held.plan_revision != order.plan_revision:
            raise Violation(f"amended: {rank} is past the boundary of {order.handoff_id}")
        if rank.world is not None and order.source != rank.world.roster:
            raise Violation(f"stale roster: {rank} steps in generation {rank.world.generation}, not in {order.source}")

    def _has_its_store(self, order: Order) -> None:
        """A rescue that has permission goes on: its leavers may be released."""
        store, permitted_at = self.simulation.store(order), self.permit_at.get((attempt_of(order), order.plan_revision))
        if order.rung is Rung.RESCUE and permitted_at is not None and permitted_at <= store.died_at:
            return
        lead = self.simulation.agent(order.proposer_id)
        if not lead.is_going or self._was_away(lead.member, store.died_at):
            return
        if self.simulation.clock.now - store.died_at > STORE_SEEN_S:
            raise Violation(f"permission for {order.handoff_id} long after its store has died")

    def _all_said_ready(self, order: Order) -> None:
        source = order.source.members if order.source is not None else ()
        for member in {*source, *voters(order)}:
            if (attempt_of(order), order.plan_revision, member) not in self.said_ready:
                raise Violation(f"permission for {order.handoff_id} before {member} said that it is ready")

    def left(self, rank: RankInPause, handoff_id: str) -> None:
        """A rank leaves because it has no part in what goes on: it must know what that is."""
        if rank.decision_read is Decision.UNDECIDED:
            raise Violation(f"left before the decision was read: {rank} in {handoff_id}")

    def handoff_ended(self, ended: HandoffEnded) -> None:
        """H7: an ending names what, where and why. Nobody is named where only the time was too short."""
        self.ended.append(ended)
        if ended.handoff_id in self.attempts:
            self.led[ended.handoff_id] = self.attempts[ended.handoff_id]
        self.over.add((ended.handoff_id, ended.generation))
        if ended.stage not in (Stage.ACTIVE, Stage.ABORTED, Stage.BROKEN):
            raise Violation(f"H7: {ended.handoff_id} ended {ended.stage}")
        reason = ended.reason
        if reason.phase == "stream":
            self.stream_failures[self.parents[ended.handoff_id, ended.generation]] = reason.text
        asked_for = ended.stage is Stage.ACTIVE or reason.phase in ("superseded", "amend", "cancel")
        late = ended.stage is Stage.ABORTED and reason.phase == OUT_OF_TIME
        anonymous = reason.rank is None and not reason.node and reason.cause is None and not asked_for and not late
        if not reason.text or not reason.phase or anonymous:
            raise Violation(f"H7: {ended.handoff_id} ended {ended.stage} with a reason that names no rank: {reason}")


def _copied(wanted: Rung) -> str:
    if wanted is Rung.RESCUE:
        return "rescue"
    return f"stop_and_copy after {wanted}" if wanted.streams else "stop_and_copy"


def _has_a_part(rank: Rank, order: Order) -> bool:
    """Whether it cuts over, or has done so."""
    return rank.order is not None and rank.order.handoff_id == order.handoff_id and rank.stage in _PAST
