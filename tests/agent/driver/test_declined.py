"""What the lead does with a proposal of the service that its ladder refuses."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from agent.driver.planning import Learned
from agent.protocol.sync import HandoffOrder, JobOrder
from agent.protocol.values import HandoffCause, Placement, utc
from tests.agent.driver.lead_scene import ACTIVE, FOUR, START_S, Scene
from tests.agent.stub_service import StubService
from tests.agent.waiting import fake_job


@pytest.fixture
def job(tmp_path: Path) -> JobOrder:
    return StubService(fake_job(tmp_path), FOUR).order()


def proposed(**changes) -> HandoffOrder:
    """To go to a layout of the same size, because it is better."""
    target = Placement(layout=replace(ACTIVE.layout, tp=2, pp=1, dp=2), members=tuple(ACTIVE.members))
    values = {"handoff_id": uuid4(), "parent": 1, "cause": HandoffCause.GROW, "target": target, "reason": "better"}
    return HandoffOrder(**({**values, "proposed_utc": utc(START_S)} | changes))


def test_a_proposal_for_which_there_is_no_room_is_declined_once_with_the_reason(job: JobOrder) -> None:
    async def run() -> None:
        now, wanted = Scene(job), proposed()
        layout = str(wanted.target.layout)
        now.lead.planner.learned = Learned(memory_refusal="2 GB are missing", refused_in=1, refused_layout=layout)
        for _ in range(3):
            await now.propose(wanted)
            now.now += 0.5
        assert [(fact.handoff_id, fact.job_id) for fact in now.declined] == [(wanted.handoff_id, job.job_id)]
        assert now.declined[0].reason.startswith(f"no live handoff to {layout}: ")
        assert "2 GB are missing" in now.declined[0].reason
        another = proposed()
        await now.propose(another)
        assert now.declined[-1].handoff_id == another.handoff_id

    asyncio.run(run())


def test_growth_whose_copy_would_outlast_the_pause_is_declined_and_pauses_nothing(job: JobOrder) -> None:
    async def run() -> None:
        now, wanted = Scene(job), proposed()
        now.lead.planner.learned = Learned(bandwidth_bytes_per_s=1_000.0)
        await now.propose(wanted)
        assert [fact.handoff_id for fact in now.declined] == [wanted.handoff_id]
        assert "and the pause ends 120.0 s after the boundary" in now.declined[0].reason
        assert now.lead.is_idle and not now.sent

    asyncio.run(run())


def test_a_proposal_whose_time_is_over_is_declined_and_one_that_can_be_opened_is_not(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        without_d = Placement(layout=replace(ACTIVE.layout, tp=1, pp=3, dp=1), members=tuple(ACTIVE.members[:3]))
        notice = {"cause": HandoffCause.NOTICE, "leaving": ("d",), "target": without_d}
        late = proposed(**notice, deadline_utc=utc(START_S) - timedelta(seconds=5))
        await now.propose(late, d=-5.0)
        assert [fact.handoff_id for fact in now.declined] == [late.handoff_id]
        assert now.declined[0].reason.startswith("no live handoff without d: ")
        await now.propose(proposed(**notice, deadline_utc=utc(START_S + 90.0)), d=90.0)
        assert now.lead.open_id and len(now.declined) == 1

    asyncio.run(run())
