"""How long a step takes, as an agent knows it that has ranks of the job, or none."""

import asyncio
import math
from collections.abc import Collection
from typing import Any, cast
from uuid import uuid4

from agent.driver.job_driver import JobDriver
from agent.driver.pace import Pace
from agent.peer.asking import STEP_FIELD
from agent.protocol.rank import StageReport
from agent.protocol.sync import JobOrder
from agent.supervisor.watchdog import RankPulse
from liver_core.handoff.messages import RankStage
from liver_core.layout import Member, ParallelLayout, Roster
from tests.agent.driver.lead_scene import ACTIVE
from tests.agent.driver.test_notice_response import Scene as ResponseScene
from tests.agent.stub_service import JOB_ID


def world(generation: int = 1) -> Roster:
    return Roster("job", generation, ParallelLayout(dp=2), (Member("a", 0), Member("b", 0)))


class Scene:
    """Agent b of the job. `answer`: what the others tell."""

    def __init__(self, answer: float = 0.8, *seconds: float) -> None:
        self.answer = answer
        self.asked: list[Collection[str]] = []
        self.looks = 0
        self.pulses = [RankPulse(0.0)]
        for step, each in enumerate(seconds, start=1):
            self.pulses[0].stepped(0.0, step, each)
        self.pace = Pace("b", pulses=lambda: self.pulses, ask=self._ask, look_again=self._look)

    async def _ask(self, nodes: Collection[str]) -> float:
        self.asked.append(nodes)
        await asyncio.sleep(0)
        return self.answer

    def _look(self) -> None:
        self.looks += 1

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


def test_an_agent_without_a_rank_that_has_stepped_asks_the_others_once_for_each_world() -> None:
    async def run() -> None:
        scene = Scene()
        assert not scene.pace.is_known(world()) and not scene.pace.is_known(world())
        await scene.settle()
        assert (scene.asked, scene.looks, scene.pace.is_known(world())) == ([["a"]], 1, True)
        assert scene.pace.pulse().median_step_s == 0.8
        scene.answer = 0.3
        assert not scene.pace.is_known(world(2))
        assert scene.pace.pulse().median_step_s == 0.8, "better than nothing, until they have answered"
        await scene.settle()
        assert (len(scene.asked), scene.pace.pulse().median_step_s) == (2, 0.3)

    asyncio.run(run())


def test_where_nobody_tells_nothing_waits_any_longer() -> None:
    async def run() -> None:
        scene = Scene(0.0)
        assert not scene.pace.is_known(world())
        await scene.settle()
        assert (scene.pace.is_known(world()), scene.pace.pulse().median_step_s, scene.looks) == (True, 0.0, 1)

    asyncio.run(run())


def test_ranks_of_this_node_know_best_and_nobody_is_asked() -> None:
    scene = Scene(9.0, 0.4, 0.6)
    scene.pace.take(7.0, 1)
    scene.pace.take_checkpoint(1, 2.5)
    scene.pulses.append(RankPulse(0.0))
    assert scene.pace.is_known(world())
    pulse = scene.pace.pulse()
    assert (pulse.step, pulse.median_step_s, pulse.checkpoint_step, pulse.save_s) == (2, 0.5, 1, 2.5)
    assert scene.asked == []


def test_what_comes_with_a_notice_is_not_asked_for_and_who_does_not_know_tells_nothing() -> None:
    scene = Scene()
    scene.pace.take(0.7, 1)
    scene.pace.take(0.0, 1)
    assert scene.pace.is_known(world()) and scene.pace.pulse().median_step_s == 0.7


def test_how_long_building_takes_is_known_from_the_newest_world_that_a_rank_here_has_built(order: JobOrder) -> None:
    def said(generation: int, **measures: float) -> StageReport:
        where = {"handoff_id": uuid4(), "generation": generation, "rank": 0, "stage": RankStage.PREPARED}
        return StageReport(**where, measures=measures)

    async def run() -> None:
        node = cast(Any, ResponseScene(order, "e").node)
        node.sync_with_progress = lambda: None
        job = JobDriver(node, JOB_ID)
        assert job.pace.pulse().build_s == 0.0
        for generation, measures, build_s in (
            (1, {"build_model_s": 8.0, "lay_out_state_s": 1.0, "bring_up_groups_s": 30.0}, 9.0),
            (2, {"connect_to_sources_s": 3.0}, 9.0),
            (3, {"build_model_s": 4.0}, 4.0),
        ):
            await job._take_rank_event(0, said(generation, **measures), None)
            assert job.pace.pulse().build_s == build_s
        await job.close()

    asyncio.run(run())


def test_a_job_asks_the_agents_of_members_and_tells_others_what_it_knows(order: JobOrder) -> None:
    asked: list[str] = []

    async def status(job_id: str, node_id: str) -> dict[str, Any]:
        asked.append(node_id)
        return {STEP_FIELD: 0.8}

    async def run() -> None:
        node = cast(Any, ResponseScene(order, "e").node)
        node.peers.status, node.service_heard_at = status, lambda: -math.inf
        job = JobDriver(node, JOB_ID)
        assert job.summary()[STEP_FIELD] == 0.0
        assert not job.pace.is_known(ACTIVE)
        await asyncio.sleep(0.05)
        assert job.pace.is_known(ACTIVE) and job.summary()[STEP_FIELD] == 0.8
        assert set(asked) <= set(ACTIVE.node_ids()) and asked
        await job.close()

    asyncio.run(run())
