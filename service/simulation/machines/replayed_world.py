"""The simulated world of a replay: nodes come and go as a trace says, and a policy says what to run on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from liver_core.handoff import FailedPart, FailureCause, LadderInputs, Order, ParticipantRecord, Reason
from liver_core.handoff.proposer_events import Proposal
from liver_core.layout import Member
from service.policy.types import Candidate
from service.simulation.machines.books import Books
from service.simulation.machines.change_times import ChangeTimes, LadderCase, ladder_of
from service.simulation.machines.enacted import handoff_id_of
from service.simulation.machines.replay_planner import ReplayPlanner
from service.simulation.machines.spent_time import Doing, SpentTime
from service.simulation.machines.steady import SteadyConditions
from service.simulation.replay_ledger import JOB
from service.simulation.replay_setup import ReplaySetup
from service.simulation.world.observer import Attempt, attempt_of
from service.simulation.world.parts import Agent, World
from service.simulation.world.reports import Planned, SteadyHost, Steps
from service.simulation.world.reports import Proposal as Wanted
from service.simulation.world.service import Hooks, SimJob, SimService, setting_s
from service.simulation.world.world import SimulatedWorld

HOP_S = 0.02
"""Of a message. None is lost."""
UNSEEN_AT_MOST_S = setting_s("silent_after_s")
"""So long a node that is gone may count as ready."""
FORGOTTEN_AFTER_S = 3_600.0
"""A node that is gone for so long is spoken of no more, unless the job counts on it."""


class ReplayedWorld(SimulatedWorld):
    """Of one job. `plan` may be asked at any moment. Layouts are named by their place among all."""

    job_id = JOB

    def __init__(
        self, times: ChangeTimes, setup: ReplaySetup, layouts: Sequence[Candidate], plan: Callable[[], Planned]
    ) -> None:
        self.times, self.setup, self.layouts, self.planned = times, setup, tuple(layouts), plan
        conditions = SteadyConditions(times, detect_s=setup.detect_s)
        super().__init__(conditions)
        self.observer = self.books = Books(
            self.clock,
            SpentTime(checkpoint_every_s=times.checkpoint_every_s),
            candidates=self.layouts,
            step_s=self._step_of,
            is_up=self.is_up,
        )
        conditions.order_of, conditions.ladder_of = self._order_of, self.ladder_of
        conditions.pause_left_s = self._pause_left_s
        self.network.least_s, self.network.delay_s = HOP_S, 0.0
        self._up: set[str] = set()
        self._gone_at: dict[str, float] = {}
        self._told_tokens: float | None = None
        self._ladder_for: tuple[Attempt, int] | None = None
        self._ladder_is: LadderInputs | None = None
        self.service = SimService(
            self.clock,
            self._planned_for_service,
            job=SimJob(JOB, saves_at_end=times.writes_checkpoints, ids=iter(self.new_handoff_id, "")),
            hooks=Hooks(changed=self.orders_changed, note=self.note),
            steady=SteadyHost(self._heard_at, self._steps),
        )

    # What happens outside.

    def node_comes(self, name: str) -> None:
        """A machine of this name is there, perhaps not the first one."""
        self._forget()
        before = self.agents.get(Member(name, 0))
        self._gone_at.pop(name, None)  # Those that went last are last.
        self._up.add(name)
        incarnation = 1 if before is None else before.incarnation + 1
        self.add_agent(Member(name, 0), ParticipantRecord(), incarnation=incarnation)

    def node_dies(self, name: str) -> None:
        """The machine is taken, with all that runs on it."""
        self._goes(name)
        self.service.node_went(name)

    def node_given_back(self, name: str) -> None:
        """Nothing of the job runs there."""
        if self.is_up(name):
            self._goes(name)
            self.service.node_left(name)

    def _goes(self, name: str) -> None:
        agent = self.agent(name)
        self._gone_at[name] = self.clock.now
        self._up.discard(name)
        self.announced.pop(name, None)
        self.books.lead_died(name)
        agent.node_dies()
        self.books.loses_node(name)
        for other in self.agents.values():
            rank = other.rank
            other.stir()
            if rank is not None and rank.waits_to_switch and rank.order and agent.member in rank.order.target.members:
                lost = Reason("a peer is gone", "train", rank.cutover_rank, cause=FailureCause(FailedPart.PEER))
                self.clock.after(self.conditions.detect_s, rank.break_down, lost)

    def _forget(self) -> None:
        """A replay may have thousands of nodes."""
        wanted, before_s = set(self.nodes_in_use()), self.clock.now - FORGOTTEN_AFTER_S
        for name in [name for name, at in self._gone_at.items() if at < before_s and name not in wanted]:
            del self._gone_at[name], self.agents[Member(name, 0)]

    # What is asked of it.

    def is_up(self, name: str) -> bool:
        """Whether the machine is there."""
        return name in self._up

    def unseen(self) -> tuple[str, ...]:
        """Nodes that are gone, and count as ready all the same."""
        recent_s = self.clock.now - UNSEEN_AT_MOST_S
        if not any(at >= recent_s for at in reversed(self._gone_at.values())):
            return ()
        return tuple(name for name in self.service.usable() if not self.is_up(name))

    def nodes_in_use(self) -> frozenset[str]:
        """Those that must not be given back: of the world, and of the next one."""
        standing, row = self.books.standing, self.service.rows.handoffs.open_row()
        used = set(self.books.nodes_wanted()) | set(() if row is None else row.target.node_ids())
        return frozenset(used | set(() if standing is None else standing.roster.node_ids()))

    def ladder(self, source: Sequence[str], target: Sequence[str], left_s: float | None) -> LadderInputs:
        """What the ladder is told of a handoff from the world that steps to the next one."""
        standing, spent = self.books.standing, self.books.spent
        step_s = 0.0 if standing is None else self._step_of(standing.layout)
        moment = LadderCase(
            source=source,
            target=target,
            step_s=step_s,
            to_boundary_s=step_s - spent.stepped_s(self.clock.now) % step_s if step_s else 0.0,
            left_s=left_s,
            nodes_least=min(each.nodes for each in self.layouts),
            checkpoint_age_steps=self._checkpoint_age_steps(),
            part_s=None if standing is None else self._part_of(standing.layout),
        )
        return ladder_of(self.times, moment)

    def ladder_of(self, order: Order) -> LadderInputs:
        """The same of a handoff, as it was when its ranks first asked."""
        key = attempt_of(order), order.target_revision
        if self._ladder_is is None or key != self._ladder_for:
            assert order.source is not None
            self._ladder_for = key
            self._ladder_is = self.ladder(order.source.node_ids(), order.target.node_ids(), None)
        return self._ladder_is

    def _order_of(self, member: Member) -> Order:
        rank = self.agents[member].rank
        assert rank is not None
        return rank.pending_order()

    def _pause_left_s(self, order: Order) -> float:
        return self.books.pause_ends_s(attempt_of(order)) - self.clock.now

    def _checkpoint_age_steps(self) -> int | None:
        spent = self.books.spent
        if spent.checkpoint_tokens is None or spent.layout is None:
            return None
        return max(0, int((spent.tokens_at(self.clock.now) - spent.checkpoint_tokens) / spent.layout.tokens_per_step))

    # Steps.

    def _step_of(self, layout: Candidate) -> float:
        """0 where steps do not count: then there is a boundary at every moment."""
        return layout.step_time_s if self.setup.counts_steps else 0.0

    def _part_of(self, layout: Candidate) -> float | None:
        share = self.times.part_of_step(layout.layout)
        return None if share is None or not self._step_of(layout) else share * self._step_of(layout)

    def step_s(self, world: World) -> float:
        """The first one of a start is over when its ranks have loaded and made it."""
        layout = self.books.layouts[world.generation]
        if world.is_begun:
            return self._step_of(layout)
        return max(0.0 if self.books.is_first_start(world.generation) else self.times.restart_s, layout.change_s)

    def part_s(self, world: World) -> float:
        """All of it where it cannot be dropped."""
        part_s = self._part_of(self.books.layouts[world.generation]) if world.is_begun else None
        return part_s or self.step_s(world)

    def value(self, version: int) -> int:
        """Nothing is moved, so that nothing can be wrong."""
        return version + 1

    # What the world asks for.

    def planner(self, agent: Agent) -> ReplayPlanner:
        """The policy."""
        return ReplayPlanner(self.planned, self.ladder, self.digest_of_layout)

    def new_handoff_id(self) -> str:
        """Numbers handoffs and starts, so that the same replay gives the same run."""
        self.ids += 1
        return handoff_id_of(self.ids)

    def layout_of(self, proposal: Proposal) -> Candidate:
        """Of the next world."""
        return self.layouts[int(proposal.plan_digest)]

    def digest_of(self, wanted: Wanted) -> str:
        """Of what the service proposes."""
        assert isinstance(wanted.layout, Candidate)
        return self.digest_of_layout(wanted.layout)

    def digest_of_layout(self, layout: Candidate) -> str:
        """Its place among all."""
        return str(self.layouts.index(layout))

    # What its service asks for, and tells.

    def orders_changed(self) -> None:
        """What the service does is in the books before anybody hears of it."""
        self.books.take_service(self.service)
        super().orders_changed()
        asked = self.service.orders().checkpoint_asked
        if asked and self.books.spent.doing is Doing.TRAINING:
            self.books.spent.save(self.clock.now)
            self.clock.after(HOP_S, self._tell_checkpoint, asked)

    def _planned_for_service(self) -> Planned:
        """It has heard of the newest checkpoint, whenever that was written."""
        self._tell_checkpoint()
        return self.planned()

    def _tell_checkpoint(self, asked: int = 0) -> None:
        tokens, generation = self.books.spent.checkpoint_tokens, self.service.rows.generations.active
        if tokens is not None and generation is not None and (asked or tokens != self._told_tokens):
            self._told_tokens = tokens
            step = int(tokens / self.layouts[0].tokens_per_step)
            self.service.checkpoint_published(generation, step, self.clock.now, asked=asked)

    def _heard_at(self, node: str) -> float:
        return self.clock.now if node in self._up else self._gone_at.get(node, 0.0)

    def _steps(self) -> Steps | None:
        """Counted by time."""
        spent, now = self.books.spent, self.clock.now
        if spent.layout is None:
            return None
        at = spent.trained_until_s(now)
        return Steps(int(spent.tokens_at(now) / self.layouts[0].tokens_per_step), at or None, spent.layout.step_time_s)
