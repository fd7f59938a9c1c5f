"""What the leader of a job asks about it, by the newest order, by how the job steps, and by what handoffs measured."""

from collections.abc import Callable, Iterable

from agent.driver.planning import Learned, Pulse, ladder_inputs, lead_candidates, plan_loss
from agent.protocol.sync import JobOrder
from liver_core.handoff import MeasuredCost, Proposal
from liver_core.handoff.leader_events import NoPlan, Plan, RungBasis, Wait
from liver_core.layout import Roster


class JobPlanner:
    """Of one job on this node. `order`: what the service wants, set before the leader asks; `learned`: what earlier
    handoffs measured; `wire_bytes_per_s`: what one node gets of another by a measurement, None where there is none."""

    def __init__(
        self,
        *,
        pulse: Callable[[], Pulse],
        service_is_there: Callable[[], bool],
        costs: Callable[[], tuple[MeasuredCost, ...]],
    ) -> None:
        self.order: JobOrder | None = None
        self.learned = Learned()
        self.wire_bytes_per_s: Callable[[], float | None] = lambda: None
        self._pulse = pulse
        self._service_is_there = service_is_there
        self._costs = costs

    def candidates(self, source: Roster, leaving: Iterable[str]) -> tuple[str, ...]:
        """Who may lead, first choice first."""
        return lead_candidates(self._newest, source, leaving)

    def plan(
        self, source: Roster, leaving: frozenset[str], *, barred: frozenset[str], left_s: float, waited_s: float
    ) -> Plan | Wait | NoPlan:
        """The world without these nodes."""
        return plan_loss(
            self._newest,
            source,
            leaving,
            left_s=left_s,
            waited_s=waited_s,
            service_is_there=self._service_is_there(),
            barred=barred,
        )

    def ladder(self, wanted: Proposal, leaving: frozenset[str], left_s: float | None) -> RungBasis:
        """What speaks for which rung."""
        order, pulse = self._newest, self._pulse()
        plan = Plan(wanted.layout, wanted.members, wanted.plan_digest, "")
        known = {"pulse": pulse, "learned": self.learned, "wire_bytes_per_s": self.wire_bytes_per_s()}
        inputs = ladder_inputs(order, wanted.source, plan, leaving, left_s, **known)
        return RungBasis(inputs, order.spec.prefer, self._costs())

    @property
    def _newest(self) -> JobOrder:
        assert self.order is not None, "a job without an order opens nothing"
        return self.order
