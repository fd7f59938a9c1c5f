"""One run: a job of a few ranks, its agents and its service, and what its seed makes go wrong. Pure.

`Simulation(seed).run()` raises Violation when a rule of `truth` breaks, and when the job does not come to rest in time
after the faults have stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from liver_core.handoff import (
    CutoverDeadlines,
    HandoffId,
    Order,
    ParticipantRecord,
    Phase,
    Proposal,
    Reason,
    Rung,
    StoreAddress,
    choose_rung,
)
from liver_core.handoff.participant_events import RankReported
from liver_core.layout import Member, ParallelLayout, Roster
from service.jobs.view import JobLimits
from service.simulation.world.agents import SimAgent, is_bound
from service.simulation.world.observer import Violation
from service.simulation.world.parts import Agent, Rank
from service.simulation.world.ranks import SimRank
from service.simulation.world.reports import Planned
from service.simulation.world.service import Hooks, ServicePeriods, SimJob, SimService
from service.simulation.world.whole import Machines
from service.simulation.world.world import SimulatedWorld
from service.simulation.world.worlds import SimWorld
from tests.simulation.conditions import SeededConditions
from tests.simulation.planning import SeedPlanner, decision, ladder_inputs
from tests.simulation.plans import CUT_OFF_TIMES, Fault, Notice, Plan, Wish, draw_plan
from tests.simulation.truth import Truth

CUTOVER_DEADLINES = CutoverDeadlines(target_s=3.0, source_s=4.5, store_s=8.0, build_s=20.0)
REST_WITHIN_S = 400.0
EVENTS_MAX = 60_000
LIMITS = JobLimits(
    propose_after_s=1.5,
    open_within_s=8.0,
    propose_again_s=6.0,
    handoff_quiet_s=40.0,
    grow_settle_s=1.0,
    lost_after_s=16.0,
    start_within_s=60.0,
    stop_within_s=20.0,
    checkpoint_within_s=10.0,
    starts_max=1_000,
    crashes_max=1_000,
)
"""As in the product, but that a run is short; and a job that fails again and again is not given up."""
PERIODS = ServicePeriods(LIMITS, silent_after_s=8.0, gone_after_s=30.0, overdue_after_s=2.0, start_order_s=40.0)
HEARD_AGAIN_S = 2.0
"""After a cut the service has heard everybody again within that."""
DEADLINE_S = 10.0
"""Of a handoff that is opened whatever the leader says."""
BREAKS_WHEN_ABORTED = 0.05


class Simulation(SimulatedWorld):
    """One seed."""

    def __init__(self, seed: int, machines: Machines | None = None, plan: Plan | None = None) -> None:
        self.seed = seed
        self.random, self.aborts = Random(seed), Random(f"aborts of {seed}")
        self.plan = plan if plan is not None else draw_plan(Random(f"plan of {seed}"))
        self.conditions: SeededConditions
        self.truth = Truth(self)
        super().__init__(SeededConditions(seed, self.random, self.plan), self.truth, machines)
        self.conditions.clock, self.conditions.strikes = self.clock, self.truth.struck
        self.coverage = self.truth.coverage
        self.waiting_faults = [fault for fault in self.plan.faults if fault.trigger]
        self.nodes_wished = len(self.plan.first)
        self.cut_until = -HEARD_AGAIN_S
        self.taken: set[str] = set()  # machines that will not come back
        first = Roster(self.job_id, 1, ParallelLayout(dp=len(self.plan.first)), self.plan.first)
        self.stale_roster = Roster(self.job_id, 1, first.layout, tuple(reversed(first.members)))
        self.forced: tuple[Member, ...] = ()  # the members of the next start, where somebody says so
        self.service = SimService(
            self.clock,
            self._planned,
            job=SimJob(self.job_id, ids=iter(self.new_handoff_id, "")),
            periods=PERIODS,
            hooks=Hooks(self.orders_changed, self.truth.job_lost, self._started, self.note),
        )
        for member in self.plan.members:
            record = ParticipantRecord(active=first, highest_generation=1) if member in first.members else None
            self.add_agent(member, record or ParticipantRecord())
        self._start_world(first)
        self.service.begin_with(first)
        for agent in self.agents.values():
            agent.link.take_orders(self.service.orders())

    @property
    def chaos(self) -> bool:
        """Whether things still go wrong."""
        return self.conditions.chaos

    def run(self) -> Truth:
        """From the first step to rest."""
        plan = self.plan
        self.network.loss, self.network.repeat, self.network.delay_s = plan.network
        for notice in plan.notices:
            self.clock.after(notice.at_s, self._announce, notice)
        for wish in plan.wishes:
            self.clock.after(wish.at_s, self._wish, wish)
        for fault in plan.faults:
            if not fault.trigger:
                self.clock.after(fault.delay_s, self.strike, fault)
        self.clock.after(plan.chaos_s, self.calm)
        self.clock.after(1.0, self.truth.look)
        for _ in range(EVENTS_MAX):
            if not self.chaos and self.rests():
                self.truth.at_rest()
                return self.truth
            if self.clock.now > plan.chaos_s + REST_WITHIN_S:
                break
            self.clock.run_next()
        raise Violation(f"no rest at {self.clock.now:.0f} s: {self.why_not()}")

    @property
    def is_cut(self) -> bool:
        """Whether the service may know less than there is to know, since it did not hear all nodes."""
        return self.network.service_away or self.clock.now < self.cut_until + HEARD_AGAIN_S

    # What the world asks for.

    def planner(self, agent: Agent) -> SeedPlanner:
        """What the leader of this agent asks about the job."""
        return SeedPlanner(self, agent)

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes without a rank that the service would use."""
        members = self.worlds[max(self.worlds)].roster.node_ids()
        return tuple(name for name in self.service.usable() if name not in members)

    def _planned(self) -> Planned:
        """What the service's planner says now."""
        ready, going, roster = self.service.usable(), self.service.going(), self.service.roster
        wanted = decision(self.nodes_wished, ready, roster, going)
        restart = decision(self.nodes_wished, ready, None, going)
        if self.forced:
            restart = decision(len(self.forced), [member.node_id for member in self.forced], None, ())
        return Planned(wanted, restart)

    def _started(self, generation: int) -> None:
        self.note(f"the service starts generation {generation}")
        self.forced = ()
        self.truth.started(generation)

    def start_on(self, members: tuple[Member, ...]) -> None:
        """The service is to start the job again, on these."""
        self.forced, self.truth.was_asked_for = members, True
        roster = self.service.roster
        if roster is not None:
            self.truth.struck(roster.node_ids()[0])
            self.service.start_again(roster.node_ids()[0])

    def remember(self, order: Order) -> None:
        """Now and then a rank breaks while it is told to drop what it prepares, and nobody sees that."""
        super().remember(order)
        is_faulty = order.phase is Phase.ABORT and self.plan.faults and not self.plan.scripted
        if is_faulty and self.aborts.random() < BREAKS_WHEN_ABORTED:
            member = self.aborts.choice(order.target.members)
            breaks = Fault("rank breaks while its agent restarts", "", 0.0, member, 1.0)
            self.clock.after(0.15 * self.aborts.random(), self.strike, breaks)

    def rank_says(self, rank: Rank, event: RankReported) -> None:
        """To the agent, in order. Some faults wait for it."""
        super().rank_says(rank, event)
        for fault in self.waiting_faults:
            if fault.trigger == event.stage:
                self.waiting_faults.remove(fault)
                self.clock.after(fault.delay_s, self.strike, fault)
                break

    def _start_world(self, roster: Roster) -> None:
        world = SimWorld(self, roster, is_begun=True)
        self.worlds[roster.generation] = world
        for member in roster.members:
            rank = SimRank(self, member)
            rank.trains_in(world)
            self.agents[member].rank = rank
            world.join(rank)

    # What happens.

    def _wish(self, wish: Wish) -> None:
        self.nodes_wished = wish.nodes
        self.service.wake()

    def _announce(self, notice: Notice) -> None:
        if not self.chaos:
            return
        name = self._node_of(notice.of) or notice.node
        ends_s = self.clock.now + notice.lead_s
        self.note(f"notice: {name} goes in {notice.lead_s:.1f} s")
        self.truth.touched[name] = self.clock.now
        self.announce(name, ends_s, by_node=notice.by_itself)
        if notice.withdrawn_s is not None:
            self.clock.after(notice.withdrawn_s, self.withdraw, name)
        else:
            self.clock.after(notice.lead_s - notice.dies_s, self._taken, name)

    def _taken(self, name: str) -> None:
        """The machine is gone, as was said. It may come back much later, as another one of the same name."""
        if self.chaos:
            self.note(f"{name} is taken")
            self.truth.struck(name)
            self.agent(name).node_dies()
            self.taken.add(name)

    def _node_of(self, role: str) -> str | None:
        """The node that has this part in the newest open handoff."""
        lead = self.leads()
        if lead is None:
            return None
        proposal = lead.leading.leader.own.proposer.record.proposal
        assert proposal is not None
        source, target = proposal.source.node_ids(), [member.node_id for member in proposal.members]
        found = {
            "lead": [lead.name],
            "comes": [name for name in target if name not in source],
            "newcomer": [name for name in target if name not in source],
            "stays": [name for name in source if name in target and name != lead.name],
            "leaves": [name for name in source if name not in target],
            "leaver": [name for name in source if name not in target],
        }.get(role, [])
        return self.random.choice(found) if found else None

    def leads(self) -> SimAgent | None:
        """The agent that leads the newest open handoff."""
        leading = [agent for agent in self.living() if agent.leading.leader.own.proposer.record.proposal]
        return max(leading, key=lambda agent: agent.leading.leader.own.proposer.record.generation, default=None)

    # Faults.

    def strike(self, fault: Fault) -> None:
        """It happens now."""
        if not self.chaos:
            return
        name = self._node_of(fault.of) if fault.of else None
        agent = self.agents[fault.member] if name is None else self.agent(name)
        self.note(f"fault: {fault.kind} ({agent.name})")
        if not self._strike_node(agent, fault):
            self._strike_other(agent, fault)

    def _strike_node(self, agent: SimAgent, fault: Fault) -> bool:
        """Whether it is one that strikes an agent, its rank or its machine."""
        struck = True
        match fault.kind:
            case "another notice":
                self._another_notice(agent, fault)
            case "agent crash":
                self.truth.struck(agent.name)
                agent.crash(fault.length_s if fault.length_s > 4 else 0.02 * fault.length_s)
            case "agent crash between effects":
                self.truth.struck(agent.name)
                agent.crash_after = int(fault.length_s) % 4
            case "agent stands still":
                self.truth.struck(agent.name)
                agent.stand_still(fault.length_s)
            case "rank breaks while its agent restarts":
                self.truth.struck(agent.name)
                agent.crash(0.03)
                if agent.rank is not None:
                    agent.rank.break_down(Reason("the device failed", "train", 0))
            case "rank dies":
                self.truth.struck(agent.name)
                if agent.rank is not None:
                    agent.rank.exit()
            case "node dies":
                self.truth.struck(agent.name)
                agent.node_dies()
                self.clock.after(3.0 * fault.length_s, agent.node_returns)
            case _:
                struck = False
        return struck

    def _strike_other(self, agent: SimAgent, fault: Fault) -> None:
        match fault.kind:
            case "store dies":
                for store in self.stores.values():
                    if store.alive:
                        self.truth.struck(store.order.proposer_id)
                        store.die()
            case "store cut off":
                for store in self.stores.values():
                    store.cut_off[agent.name] = self.clock.now + fault.length_s
            case "network storm":
                self.network.loss, self.network.delay_s = 0.6, 1.5
                self.clock.after(fault.length_s, self._storm_over)
            case "service away":
                self.set_service_away(True)
                self.clock.after(2 * fault.length_s, self.set_service_away, False)
            case "cut off from the service" | "cut off from everybody":
                self.cut_off(
                    (agent.name,), everybody=fault.kind.endswith("everybody"), seconds=CUT_OFF_TIMES * fault.length_s
                )
            case "world cut off":
                names = self.worlds[max(self.worlds)].roster.node_ids()
                self.cut_off(names, everybody=fault.length_s % 1 < 0.3, seconds=CUT_OFF_TIMES * fault.length_s)
            case "start again":
                self.start_on(())
            case "start elsewhere":
                others = [member for member in self.plan.members if member not in self.plan.first]
                self.start_on(tuple(self.random.sample(others, 2)))
            case "stale proposal":
                self.propose_anyway(agent, self.stale_roster, self.plan.first)
            case "second proposer":
                others = tuple(self.random.sample(self.plan.members, 2))
                self.propose_anyway(agent, self.worlds[max(self.worlds)].roster, others)
            case "hello again":
                for index in range(8):
                    self.clock.after(index * 0.4 * self.random.random(), self._hello, agent)
            case "late order":
                self.repeat_old_orders(agent)
            case kind:
                self.conditions.armed.append((kind, agent.member))

    def _another_notice(self, agent: SimAgent, fault: Fault) -> None:
        """And often worse: nobody leads for a while and a rank breaks, or old orders come again; or one more notice."""
        self._announce(Notice(self.clock.now, agent.name, 6.0 + 8.0 * self.random.random()))
        worse, lead = self.random.random(), self.leads()
        if worse < 0.2 and lead is not None:
            self.truth.struck(lead.name)
            self.clock.after(0.2, lead.crash, 4.0)
            if agent.rank is not None:
                self.truth.struck(agent.name)
                reason = Reason("the device failed", "train", 0)
                self.clock.after(0.3 + self.random.random(), agent.rank.break_down, reason)
        elif worse < 0.5:
            for each in self.agents.values():
                self.repeat_old_orders(each)
        if self.random.random() < 0.3:
            self.waiting_faults.append(fault)

    def propose_anyway(self, agent: SimAgent, source: Roster, members: tuple[Member, ...]) -> None:
        """What an agent with old knowledge, or one that has not heard of others, would open."""
        own = agent.leading.leader.own
        if not agent.is_going or not own.is_idle:
            return
        proposal = self.proposal(source, members)
        self.truth.anyway.add(proposal.handoff_id)
        agent.leading.open_anyway(proposal)

    def proposal(self, source: Roster, members: tuple[Member, ...], rung: Rung | None = None) -> Proposal:
        """A handoff to these, on the rung that the ladder takes."""
        found = choose_rung(ladder_inputs(self, source, members, DEADLINE_S)).rung
        found = Rung.STOP_AND_COPY if found in (Rung.CHECKPOINT, Rung.SUSPEND) else found
        name = self.new_handoff_id()
        return Proposal(
            handoff_id=HandoffId(name),
            job_id=self.job_id,
            parent=source.generation,
            source=source,
            layout=ParallelLayout(dp=len(members)),
            members=members,
            plan_digest=f"d{name}",
            store=StoreAddress("127.0.0.1", 1024 + self.ids),
            cause="notice",
            rung=rung or found,
            deadline_utc=self.clock.now + DEADLINE_S,
            cutover=CUTOVER_DEADLINES,
        )

    def _hello(self, agent: SimAgent) -> None:
        """The rank connects anew and says where it stands."""
        if agent.rank is not None and agent.rank.alive:
            agent.rank.status()

    def _storm_over(self) -> None:
        self.network.loss, _, self.network.delay_s = self.plan.network if self.chaos else (0.0, 0.0, 0.05)

    def cut_off(self, names: Iterable[str], *, everybody: bool, seconds: float) -> None:
        """The service does not hear these nodes for a while, nor, if `everybody`, do other agents."""
        self.cut_until = max(self.cut_until, self.clock.now + seconds)
        for name in names:
            self.note(f"{name} is cut off from {'everybody' if everybody else 'the service'}")
            self.truth.struck(name)
            self.network.cut_off[name] = everybody
            self.clock.after(seconds, self._heard_again, name)

    def _heard_again(self, name: str) -> None:
        self.network.cut_off.pop(name, None)

    def calm(self) -> None:
        """The faults stop; whoever is down comes back, and nobody goes any more."""
        self.conditions.chaos = False
        self.network.loss, self.network.repeat, self.network.delay_s = 0.0, 0.0, 0.05
        self.network.cut_off.clear()
        self.set_service_away(False)
        self.conditions.armed.clear()
        self.waiting_faults.clear()
        for index in range(len(self.taken)):
            self.add_agent(Member(f"m{index}", 0), ParticipantRecord())
        for agent in self.living():
            agent.crash_after = 1_000_000
            agent.stands_until = self.clock.now
            agent.node_up = True
            agent.restart()
        for name in set(self.announced) - self.taken:
            self.withdraw(name)
        for store in self.stores.values():
            store.cut_off.clear()

    def living(self) -> list[SimAgent]:
        """Those of machines that may still come back."""
        return [agent for agent in self.agents.values() if agent.name not in self.taken]

    # Rest.

    def rests(self) -> bool:
        """Whether the job trains, and nothing is left to be done."""
        if self.service.has_ended:
            return True
        world = self.current_world()
        if world is None or world.steps < 2 or not world.is_begun or not self.service.is_settled:
            return False
        if any(agent.participant.record.replaced is not None for agent in self.living()):
            return False
        if len(world.at_boundary) != len(world.roster.members) or any(a.mirrors.waiting for a in self.living()):
            return False
        return self.leads() is None and not any(is_bound(agent) for agent in self.living())

    def why_not(self) -> str:
        """What is left to be done."""
        world = self.current_world()
        bound = [f"{agent.member} {agent.participant.state}" for agent in self.living() if is_bound(agent)]
        lead, newest = self.leads(), self.worlds[max(self.worlds)]
        who = None if lead is None else lead.name
        said = f"world {world and world.generation} of {newest.generation}, bound {bound}, {who} leads"
        return f"{said}, the service: {self.service.state} {self.service.reason}"


def run_seed(seed: int, machines: Callable[[], Machines] = Machines) -> Simulation:
    """Run one seed to its end; raises Violation with the seed in it."""
    simulation = Simulation(seed, machines())
    try:
        simulation.run()
    except Violation as violation:
        raise Violation(f"seed {seed}, {simulation.clock.now:.2f} s: {violation}") from violation
    return simulation
