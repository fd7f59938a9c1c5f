"""While a notice counts and a rung fits, some agent acts on it: by the leaders of all nodes of a replay."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.handoff import choose_rung
from liver_core.handoff.leader_events import LIVE_RUNGS
from liver_core.handoff.proposer import ProposerState
from service.policy.types import Candidate
from service.simulation.machines import ground
from service.simulation.machines.machine_replay import replay_by_machines
from service.simulation.machines.played_handoff import PlayedHandoff
from service.simulation.machines.played_lead import PlayedLead
from service.simulation.traces import CapacityTrace
from tests.service.simulation.test_machine_replay import POLICIES, change_times, setups, tables, traces


class Watched(PlayedLead):
    """Looks, after all agents have looked, whether one of them answers who goes."""

    def consider(self) -> None:
        super().consider()
        world, now = self._ground.world, self._ground.time.now
        if world is None or world.is_lost or not world.begun:
            return
        losses = [loss for loss in self._losses() if loss.safe_by > now and loss.node_id in world.roster.node_ids()]
        target = self._ground.facts.plan().decision.target
        if not losses or target is None:
            return
        left_s = min(loss.safe_by for loss in losses) - now
        inputs = self._ground.ladder(world.roster.node_ids(), target.node_ids(), left_s)
        waits = any(agent.leader.next_deadline > now for agent in self._agents.values() if agent.handoff is None)
        going = {loss.node_id for loss in losses}
        acts = any(self._answers(each, going) for each in self._open())
        assert acts or waits or choose_rung(inputs).rung not in LIVE_RUNGS, f"nobody answers that {going} go at {now}"

    def _answers(self, handoff: PlayedHandoff, going: set[str]) -> bool:
        """By itself, by its next revision, or because it is past its boundary or ends, by the one after it."""
        own = self._agents[handoff.leads].leader.own
        ends = own.proposer.tally.boundary_passed() or own.state in (ProposerState.WITHDRAWING, ProposerState.ABORTING)
        return ends or own.state is ProposerState.RETIRING or going <= handoff.leaving


@settings(max_examples=60, deadline=None)
@given(traces(), tables(), setups, change_times, st.sampled_from(POLICIES))
def test_while_a_notice_counts_and_a_rung_fits_somebody_acts(
    trace: CapacityTrace, candidates: tuple[Candidate, ...], setup, times, policy
) -> None:
    with patch.object(ground, "PlayedLead", Watched):
        replay_by_machines(trace, candidates, policy, setup=setup, times=times)
