"""One run: a job of a few ranks, its agents, two proposers, and what its seed makes go wrong. Pure.

`Simulation(seed).run()` raises Violation when a rule of `truth` breaks, and when the job does not come to rest in time
after the faults have stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from liver_core.handoff import (
    Cutover,
    CutoverDeadlines,
    HandoffId,
    LadderInputs,
    Order,
    Participant,
    ParticipantRecord,
    Phase,
    Proposal,
    Proposer,
    ProposerRecord,
    Reason,
    Rung,
    StoreAddress,
    choose_rung,
)
from liver_core.handoff.cutover import BoundaryAgreed
from liver_core.handoff.participant_events import RankReported
from liver_core.handoff.pending import Pending
from liver_core.handoff.proposer import ProposerState
from liver_core.handoff.proposer_events import Amend, Cancel, Open
from liver_core.layout import Member, ParallelLayout, Roster
from tests.simulation.agents import ProposerHost, SimAgent, is_bound
from tests.simulation.barrier import Barrier
from tests.simulation.building import Building
from tests.simulation.checkpoints import Checkpoints
from tests.simulation.clock import Clock
from tests.simulation.convergence import Convergence
from tests.simulation.coverage import Coverage
from tests.simulation.listing import Listing
from tests.simulation.network import Network
from tests.simulation.plans import LEAD, SERVICE, Fault, Intent, Plan, draw_plan
from tests.simulation.ranks import SimRank
from tests.simulation.starts import Starts
from tests.simulation.store import SimStore
from tests.simulation.truth import CHECKPOINT_EVERY, NOT_BEGUN, Truth, Violation
from tests.simulation.worlds import Connecting, SimWorld

CUTOVER_DEADLINES = CutoverDeadlines(target_s=3.0, source_s=4.5, store_s=8.0, build_s=20.0)
REST_WITHIN_S = 260.0
THINK_S = 1.5
EVENTS_MAX = 20_000
BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines under test; a planted bug replaces one."""

    proposer: type[Proposer] = Proposer
    participant: type[Participant] = Participant
    cutover: type[Cutover] = Cutover
    pending: type[Pending] = Pending


class Simulation:
    """One seed."""

    job_id = "job"

    def __init__(self, seed: int, machines: Machines | None = None, plan: Plan | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.plan = plan if plan is not None else draw_plan(self.random, Random(f"builds of {seed}"))
        self.machines = machines or Machines()
        self.clock = Clock()
        self.truth = Truth()
        self.coverage = Coverage()
        self.network = Network(self)
        self.step_s = self.plan.step_s
        self.refused = 0
        self.notes: list[tuple[float, str]] | None = None  # a list when somebody wants to read along
        self.chaos = True
        self.orders: dict[tuple[str, Phase], Order] = {}
        self.stores: dict[str, SimStore] = {}
        self.barriers: dict[tuple[str, int], Barrier] = {}
        self.convergences: dict[tuple[str, int], Convergence] = {}
        self.buildings: dict[tuple[str, int], Building] = {}
        self.connectings: dict[tuple[str, int], Connecting] = {}
        self.worlds: dict[int, SimWorld] = {}
        self.armed: list[tuple[str, Member]] = []
        self.waiting_faults = [fault for fault in self.plan.faults if fault.trigger]
        self.handoffs = 0
        self.job_row = 1  # the service's: the highest generation of a start
        self.wanted: tuple[Member, ...] | None = None
        self.broken_since: float | None = None
        first = Roster(self.job_id, 1, ParallelLayout(dp=len(self.plan.first)), self.plan.first)
        self.stale_roster = Roster(self.job_id, 1, first.layout, tuple(reversed(first.members)))
        self.agents = {member: self._agent(member, first) for member in self.plan.members}
        lead = ProposerHost(self, LEAD, ProposerRecord(highest_generation=1))
        self.hosts = {LEAD: lead, SERVICE: ProposerHost(self, SERVICE, ProposerRecord())}
        self.checkpoints = Checkpoints(self)
        self.listing = Listing(self)
        self._start_world(first)
        self.starts = Starts(self)

    def run(self) -> Truth:
        """From the first step to rest."""
        plan = self.plan
        self.network.loss, self.network.repeat, self.network.delay_s = plan.network
        for intent in plan.intents:
            self.clock.after(intent.at_s, self._intend, intent)
        for fault in plan.faults:
            if not fault.trigger:
                self.clock.after(fault.delay_s, self._strike, fault)
        self.clock.after(plan.chaos_s, self._calm)
        self.clock.after(THINK_S, self._think)
        self.starts.begin()
        self.listing.begin()
        for _ in range(EVENTS_MAX):
            if not self.chaos and self._rests():
                self.listing.check()
                return self.truth
            if self.clock.now > plan.chaos_s + REST_WITHIN_S:
                break
            self.clock.run_next()
        raise Violation(f"no rest at {self.clock.now:.0f} s: {self._why_not()}")

    # Set-up.

    def _agent(self, member: Member, first: Roster) -> SimAgent:
        if member not in first.members:
            return SimAgent(self, member, ParticipantRecord())
        return SimAgent(self, member, ParticipantRecord(active=first, highest_generation=1))

    def _start_world(self, roster: Roster) -> None:
        world = SimWorld(self, roster, era=0)
        self.worlds[roster.generation] = world
        for member in roster.members:
            rank = SimRank(self, member)
            rank.trains_in(world)
            self.agents[member].rank = rank
            world.join(rank)

    def begin_world(self, roster: Roster) -> SimWorld:
        """A world that the service has started; its era begins with its first step."""
        world = self.worlds[roster.generation] = SimWorld(self, roster, NOT_BEGUN)
        return world

    # What the parts ask of the whole.

    def note(self, text: str) -> None:
        """Write down what happens, if anybody reads it."""
        if self.notes is not None:
            self.notes.append((self.clock.now, text))

    def remember(self, order: Order) -> None:
        """The newest order of each phase of each handoff, so that it can arrive once more at any time."""
        self.orders[order.handoff_id, order.phase] = order

    def store(self, order: Order) -> SimStore:
        """The store of this handoff's target generation."""
        if order.handoff_id not in self.stores:
            self.stores[order.handoff_id] = SimStore(self, order)
        store = self.stores[order.handoff_id]
        if order.plan_revision > store.order.plan_revision:
            store.order = order
        return store

    def barrier(self, order: Order) -> Barrier:
        """The barrier of the target world."""
        key = (order.handoff_id, order.target_revision)
        if key not in self.barriers:
            self.barriers[key] = Barrier(self, order)
        return self.barriers[key]

    def building(self, order: Order) -> Building:
        """Where the ranks of this target build it after a rescue."""
        key = (order.handoff_id, order.target_revision)
        if key not in self.buildings:
            self.buildings[key] = Building(self, order)
        return self.buildings[key]

    def convergence(self, order: Order) -> Convergence:
        """Where the ranks of this target agree how the state moves."""
        key = (order.handoff_id, order.target_revision)
        if key not in self.convergences:
            self.convergences[key] = Convergence(self, order)
        return self.convergences[key]

    def world_of(self, order: Order) -> SimWorld:
        """The target world, made by the first rank that switches to it."""
        if order.generation not in self.worlds:
            parent = self.worlds[order.parent]
            self.worlds[order.generation] = SimWorld(self, order.target, parent.era)
        return self.worlds[order.generation]

    def target_ranks(self, order: Order) -> dict[Member, SimRank]:
        """The processes of a target roster that hold this handoff, or held it until they were ended for a start."""
        held = {}
        for member in order.target.members:
            agent = self.agents[member]
            for rank in (agent.rank, *agent.given_up):
                if rank is not None and rank.order is not None and rank.order.handoff_id == order.handoff_id:
                    held[member] = rank
        return held

    def connecting(self, order: Order) -> Connecting:
        """Where the ranks of this target make their communicators."""
        key = (order.handoff_id, order.target_revision)
        if key not in self.connectings:
            self.connectings[key] = Connecting(self, order)
        return self.connectings[key]

    def connects_now(self, order: Order) -> None:
        """The store tells newcomers that the ranks of the source world make communicators now."""
        for newcomer in self._newcomers(order):
            if newcomer.pending.awaits_boundary:
                delay_s = 0.05 + 0.3 * self.random.random()
                self.clock.after(delay_s, self.connecting(order).enter, newcomer, newcomer.build_number)

    def boundary_posted(self, order: Order, boundary: BoundaryAgreed) -> None:
        """The store tells newcomers that the boundary is past. Each looks when it has permission."""
        self.store(order).boundary = boundary
        for newcomer in self._newcomers(order):
            delay_s = 0.05 + 0.3 * self.random.random()
            self.clock.after(delay_s, newcomer._look_for_boundary)

    def _newcomers(self, order: Order) -> list[SimRank]:
        ranks = [self.agents[member].rank for member in order.target.members]
        return [
            rank
            for rank in ranks
            if rank is not None and rank.alive and rank.world is None and rank.order is not None
            if rank.order.handoff_id == order.handoff_id
        ]

    def build_s(self, member: Member) -> float:
        """Seconds until the target world is built on a rank; a stalled one never is."""
        if self.takes_fault("build stalls", member):
            return 1e6
        return self.plan.slow_s + 0.3 + 2.5 * self.random.random()

    def connect_s(self, member: Member) -> float:
        """Seconds until a rank has made its endpoint, or is connected to those of others; a stalled one never is."""
        if self.random.random() < 0.5 and self.takes_fault("build stalls", member):
            return 1e6
        return 0.1 + 0.4 * self.random.random()

    def stream_s(self, member: Member) -> float:
        """Seconds until what streams to a rank has converged; a stalled stream never does."""
        if self.takes_fault("stream stalls", member):
            return 1e6
        return 0.2 + 2.0 * self.random.random()

    def read_s(self, rank: SimRank, until: float) -> float:
        """Seconds that a read takes; a slow one ends a little before or after its deadline."""
        if self.takes_fault("slow read", rank.member):
            return max(0.1, until - self.clock.now + 0.6 * self.random.random() - 0.2)
        return 0.1 + 0.8 * self.random.random()

    def rank_says(self, rank: SimRank, event: RankReported) -> None:
        """To the agent, in order."""
        if self.notes is not None:
            why = "" if event.reason is None else f": {event.reason}"
            self.note(f"{rank.member.node_id} {event.stage}{why}")
        rank.reports_until = max(rank.reports_until, self.clock.now + 0.01 + 0.05 * self.random.random())
        self.clock.after(rank.reports_until - self.clock.now, self.agents[rank.member].rank_reported, rank, event)
        for fault in self.waiting_faults:
            if fault.trigger == event.stage:
                self.waiting_faults.remove(fault)
                self.clock.after(fault.delay_s, self._strike, fault)
                break

    def rank_exited(self, rank: SimRank) -> None:
        self.note(f"{rank.member.node_id} rank exits")
        delay_s = max(rank.reports_until - self.clock.now, 0.0) + 0.02
        self.clock.after(delay_s, self.agents[rank.member].rank_exited, rank)

    def chance(self, probability: float) -> bool:
        """Something small that goes another way now and then, but not in a run that a script disturbs by itself."""
        return self.chaos and bool(self.plan.intents) and self.random.random() < probability

    def skew_s(self) -> float:
        """How far a host's clock is ahead: at most three seconds, so that two differ by up to as much."""
        return 3.0 * self.random.random() if self.plan.intents else 0.0

    def takes_fault(self, kind: str, member: Member) -> bool:
        """Whether a fault of this kind was armed for the member; it strikes once."""
        if not self.armed or (kind, member) not in self.armed:
            return False
        self.armed.remove((kind, member))
        return True

    # Faults.

    def _strike(self, fault: Fault) -> None:
        if not self.chaos:
            return
        self.note(f"fault: {fault.kind} ({fault.member.node_id})")
        agent = self.agents[fault.member]
        host = self.hosts[LEAD if fault.length_s < 7 else SERVICE]
        match fault.kind:
            case "another notice" if self.hosts[LEAD].proposer.record.proposal is not None:
                others = tuple(self.random.sample(self.plan.members, 2))
                self._amend(self.hosts[LEAD], self.hosts[LEAD].proposer.record.proposal, others)
                self._make_it_worse(agent)
                if self.random.random() < 0.5:
                    self.waiting_faults.append(fault)  # And again at the next one.
            case "agent crash":
                agent.crash(fault.length_s if fault.length_s > 4 else 0.02 * fault.length_s)
            case "agent crash between effects":
                agent.crash_after = int(fault.length_s) % 4
            case "host crash":
                host.crash(fault.length_s)
            case "host crash between effects":
                host.crash_after = int(fault.length_s) % 4
            case "rank breaks while its agent restarts":
                agent.crash(0.03)
                if agent.rank is not None:
                    agent.rank.break_down(Reason("the device failed", "train", 0))
            case "rank dies":
                if agent.rank is not None:
                    agent.rank.exit()
            case "node dies":
                agent.node_dies()
                self.clock.after(fault.length_s, self._node_returns, agent)
                for each in self.hosts.values():
                    self.clock.after(2 * self.random.random(), each.lose, agent.member, "the node is gone")
            case "store dies":
                for store in self.stores.values():
                    store.alive = False
            case "store cut off":
                for store in self.stores.values():
                    store.cut_off[agent.name] = self.clock.now + fault.length_s
            case "network storm":
                self.network.loss, self.network.delay_s = 0.6, 1.5
                self.clock.after(fault.length_s, self._storm_over)
            case "service gone":
                self.hosts[SERVICE].gone = True
                self.hosts[SERVICE].crash(1e9)
            case "service away":
                self.network.service_away = True
                self.clock.after(2 * fault.length_s, self._service_back)
            case "hello again":
                for index in range(8):
                    self.clock.after(index * 0.4 * self.random.random(), self._hello, agent)
            case "late order":
                self.repeat_old_orders(agent)
            case kind:
                self.armed.append((kind, fault.member))

    def _make_it_worse(self, agent: SimAgent) -> None:
        """While permission is taken back: nobody leads for a while and a rank breaks, or old orders come again."""
        worse = self.random.random()
        if worse < 0.2:
            self.clock.after(0.2, self.hosts[LEAD].crash, 4.0)
            if agent.rank is not None:
                reason = Reason("the device failed", "train", 0)
                self.clock.after(0.3 + self.random.random(), agent.rank.break_down, reason)
        elif worse < 0.5:
            for each in self.agents.values():
                self.repeat_old_orders(each)

    def _hello(self, agent: SimAgent) -> None:
        """The rank connects anew and says where it stands."""
        if agent.rank is not None and agent.rank.alive:
            agent.rank.status()

    def _node_returns(self, agent: SimAgent) -> None:
        agent.node_returns()

    def _storm_over(self) -> None:
        self.network.loss, _, self.network.delay_s = self.plan.network if self.chaos else (0.0, 0.0, 0.05)

    def _service_back(self) -> None:
        self.network.service_away = False

    def repeat_old_orders(self, agent: SimAgent) -> None:
        """Orders of any age arrive again."""
        for order in list(self.orders.values())[-8:]:
            self.clock.after(3 * self.random.random(), agent.receive, order)

    def _calm(self) -> None:
        """The faults stop; whoever is down comes back."""
        self.chaos = False
        self.network.loss, self.network.repeat, self.network.delay_s = 0.0, 0.0, 0.05
        self.network.service_away = False
        self.armed.clear()
        self.starts.calm()
        self.waiting_faults.clear()
        for agent in self.agents.values():
            agent.crash_after = 1_000_000
            agent.node_up = True
            agent.restart()
        for host in self.hosts.values():
            host.crash_after = 1_000_000
            if not host.gone:
                host.restart()
        for store in self.stores.values():
            store.cut_off.clear()

    # Who wants what.

    def current_world(self) -> SimWorld | None:
        """The newest world if all its ranks live in it."""
        world = self.worlds[max(self.worlds)]
        ranks = [self.agents[member].rank for member in world.roster.members]
        whole = not world.dead and all(rank is not None and rank.alive and rank.world is world for rank in ranks)
        return world if whole else None

    def _intend(self, intent: Intent) -> None:
        self.note(f"{intent.host} wants {intent.kind} {' '.join(member.node_id for member in intent.members)}")
        host = self.hosts[intent.host]
        current = host.proposer.record.proposal
        match intent.kind:
            case "handoff" if intent.host == LEAD:
                self.wanted = intent.members
                if current is not None:
                    self._another_notice(host, current, intent.members)
            case "cancel":
                host.handle(Cancel(Reason("another notice came", "supersede")))
            case "amend":
                self._amend(host, current, intent.members)
            case "stale":
                host.handle(Open(self._proposal(self.stale_roster, intent.members, Rung.STOP_AND_COPY)))
            case "restart":
                self._start(intent.members)
            case _:
                newest = self.worlds[max(self.worlds)].roster
                self._open_wanted(host, newest, intent.members)

    def _another_notice(self, host: ProposerHost, current: Proposal, members: tuple[Member, ...]) -> None:
        """As the driver does: amend until the boundary, then let it go on; or a mistake, or it is taken back."""
        if self.random.random() < 0.3:
            host.handle(Open(self._proposal(self.worlds[1].roster, members, Rung.STOP_AND_COPY)))
        elif host.proposer.state is ProposerState.PREPARING or self.random.random() < 0.8:
            self._amend(host, current, members)
        else:
            host.handle(Cancel(Reason("another notice came", "supersede")))

    def _amend(self, host: ProposerHost, current: Proposal | None, members: tuple[Member, ...]) -> None:
        """A nearer deadline, now and then a later one, which must be refused; the rung is chosen anew for it.

        Some bring the deadline nearer and change nothing else.
        """
        if current is None:
            host.handle(Amend(self._proposal(self.worlds[1].roster, members, Rung.STOP_AND_COPY)))
            return
        later_s = -2.0 + 2.6 * self.random.random()
        deadline_utc = current.deadline_utc + later_s
        rung = self.choose(members, deadline_utc - self.clock.now)
        if later_s < -1.5:
            members, rung = current.members, current.rung
        amended = self.amendment(current, members, min(deadline_utc, current.deadline_utc), rung)
        host.handle(Amend(replace(amended, deadline_utc=deadline_utc)))
        if amended in (host.proposer.record.proposal, host.proposer.record.pending):
            self.wanted = members

    def choose(self, members: tuple[Member, ...], left_s: float | None = None) -> Rung:
        """What the ladder says of a change to a world of `members` from the one that runs now."""
        link, step_s = self.plan.link, self.step_s
        source = self.worlds[max(self.worlds)].roster.members
        staying = len(set(source) & set(members))
        only_leaving = link.copy_s * (len(source) - staying) / len(source)
        inputs = LadderInputs(
            bytes_to_move=int(link.copy_s * BYTES_PER_S),
            bandwidth_bytes_per_s=BYTES_PER_S,
            prepare_s=self.plan.slow_s + 1.5,
            step_s=step_s,
            seconds_to_boundary=step_s,
            seconds_to_deadline=max(0.0, self.plan.deadline_s if left_s is None else left_s),
            margin_s=0.5,
            sources_whole=True,
            nodes_left=len(self.plan.members),
            nodes_least=2,
            checkpoint_age_steps=CHECKPOINT_EVERY,
            stream_share=0.5,
            follow_s=link.follow_share * step_s,
            one_sided=link.one_sided,
            replay_refusal=link.replay_refusal,
            stream_failure=self.truth.stream_failures.get(max(self.worlds), ""),
            bytes_only_leaving=int(only_leaving * BYTES_PER_S),
            endpoints_s=0.3,
            ranks_staying=staying,
            rescue_failure="",
            part_s=step_s / self.plan.parts if self.plan.parts > 1 else None,
        )
        choice = choose_rung(inputs)
        if self.plan.intents:
            self.note(f"ladder: {choice.reason}")
        return choice.rung

    def amendment(self, current: Proposal, members: tuple[Member, ...], deadline_utc: float, rung: Rung) -> Proposal:
        """The open proposal with another target."""
        return replace(
            current,
            layout=ParallelLayout(dp=len(members)),
            members=members,
            plan_digest=f"{current.plan_digest}+",
            deadline_utc=deadline_utc,
            rung=rung,
        )

    def _proposal(self, source: Roster, members: tuple[Member, ...], rung: Rung) -> Proposal:
        self.handoffs += 1
        return Proposal(
            handoff_id=HandoffId(f"h{self.handoffs}"),
            job_id=self.job_id,
            parent=source.generation,
            source=source,
            layout=ParallelLayout(dp=len(members)),
            members=members,
            plan_digest=f"d{self.handoffs}",
            store=StoreAddress("127.0.0.1", 1024 + self.handoffs),
            cause="notice",
            rung=rung,
            deadline_utc=self.clock.now + self.plan.deadline_s,
            cutover=CUTOVER_DEADLINES,
        )

    def _think(self) -> None:
        """The driver of the lead: opens what is wanted, and brings a broken job back from its checkpoint."""
        self.clock.after(THINK_S, self._think)
        host = self.hosts[LEAD]
        world = self.current_world()
        self.broken_since = None if world is not None else (self.broken_since or self.clock.now)
        if host.busy:
            return
        if world is not None:
            if self.wanted is not None and world.roster.members != self.wanted and self.chaos:
                self._open_wanted(host, world.roster, self.wanted)
            return
        if self.broken_since is not None and self.clock.now - self.broken_since > 4:
            self._restart_from_checkpoint()

    def _restart_from_checkpoint(self) -> None:
        up = [member for member, agent in self.agents.items() if agent.node_up]
        if len(up) >= 2:
            self._start(tuple(up[:2]))

    def _open_wanted(self, host: ProposerHost, source: Roster, members: tuple[Member, ...]) -> None:
        if self.worlds[source.generation].era == NOT_BEGUN:
            return  # A world that has made no step is not handed over.
        rung = self.choose(members)
        if rung is not Rung.CHECKPOINT:
            host.handle(Open(self._proposal(source, members, rung)))
        else:
            self._start(members)

    def _start(self, members: tuple[Member, ...]) -> None:
        """The service starts the job again, unless it is about to."""
        if not self.starts.is_busy:
            self.starts.want(members)

    # Rest.

    def _rests(self) -> bool:
        world = self.current_world()
        if world is None or world.steps < 2 or any(host.busy for host in self.hosts.values()):
            return False
        if self.starts.is_busy or any(agent.participant.record.replaced is not None for agent in self.agents.values()):
            return False
        if len(world.at_boundary) != len(world.roster.members) or not self.listing.is_settled:
            return False
        return not any(is_bound(agent) for agent in self.agents.values())

    def _why_not(self) -> str:
        world = self.current_world()
        bound = [f"{agent.member} {agent.participant.state}" for agent in self.agents.values() if is_bound(agent)]
        busy = [name for name, host in self.hosts.items() if host.busy]
        newest = self.worlds[max(self.worlds)]
        return f"world {world and world.generation} of {newest.generation}, bound {bound}, proposers {busy}"


def run_seed(seed: int, machines: Callable[[], Machines] = Machines) -> Simulation:
    """Run one seed to its end; raises Violation with the seed in it."""
    simulation = Simulation(seed, machines())
    try:
        simulation.run()
    except Violation as violation:
        raise Violation(f"seed {seed}, {simulation.clock.now:.2f} s: {violation}") from violation
    return simulation
