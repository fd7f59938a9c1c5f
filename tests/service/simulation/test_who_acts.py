"""While a notice counts and a rung fits, some agent acts on it: the rule of the seeds, in replays."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.handoff import LadderInputs
from liver_core.layout import Member, Roster
from service.policy.types import Candidate
from service.simulation.machines import machine_replay
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.machines.machine_replay import replay_by_machines
from service.simulation.machines.replayed_world import ReplayedWorld
from service.simulation.replay_setup import ReplaySetup
from service.simulation.traces import CapacityTrace
from service.simulation.world.agents import SimAgent
from service.simulation.world.reports import Planned
from tests.service.simulation.test_machine_replay import POLICIES, change_times, setups, tables, traces
from tests.simulation.notice_watch import NoticeWatch

LOOKS_EACH_S = 0.4


class ReplayWatch(NoticeWatch):
    """A machine that is gone for good disturbs nobody any more."""

    def _is_disturbed(self, agent: SimAgent) -> bool:
        return agent.node_up and super()._is_disturbed(agent)


class Watched(ReplayedWorld):
    """Somebody looks as long as any node will go."""

    def __init__(
        self, times: ChangeTimes, setup: ReplaySetup, layouts: Sequence[Candidate], plan: Callable[[], Planned]
    ) -> None:
        super().__init__(times, setup, layouts, plan)
        self._watch, self._watches = ReplayWatch(self, self._ladder), False

    def announce(self, name: str, ends_s: float, *, by_node: bool) -> None:
        super().announce(name, ends_s, by_node=by_node)
        if not self._watches:
            self._watches = True
            self._look()

    def node_dies(self, name: str) -> None:
        super().node_dies(name)
        for agent in self.agents.values():
            self._watch.disturbed(agent.name)

    def _look(self) -> None:
        self._watch.look()
        self._watches = bool(self.announced)
        if self._watches:
            self.clock.after(LOOKS_EACH_S, self._look)

    def _ladder(self, source: Roster, members: Sequence[Member], left_s: float | None) -> LadderInputs:
        return self.ladder(source.node_ids(), [member.node_id for member in members], left_s)


announced = setups.map(lambda each: replace(each, notice_s=each.notice_s or 60.0))


@settings(max_examples=60, deadline=None)
@given(traces(), tables(), announced, change_times, st.sampled_from(POLICIES))
def test_while_a_notice_counts_and_a_rung_fits_somebody_acts(
    trace: CapacityTrace, candidates: tuple[Candidate, ...], setup, times, policy
) -> None:
    with patch.object(machine_replay, "ReplayedWorld", Watched):
        replay_by_machines(trace, candidates, policy, setup=setup, times=times)
