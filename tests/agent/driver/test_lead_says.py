"""What the leading side of a job measures, shows and logs."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from agent.protocol.peer import RankMeasures
from agent.protocol.sync import JobOrder
from liver_core.handoff.participant_events import RankStage
from tests.agent.driver.lead_scene import FOUR, Scene
from tests.agent.stub_service import StubService
from tests.agent.waiting import fake_job


@pytest.fixture
def job(tmp_path: Path) -> JobOrder:
    return StubService(fake_job(tmp_path), FOUR).order()


def test_from_the_notice_to_the_decision_and_to_the_first_order_of_a_rank_is_told(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        heard_at = now.now
        now.now += 0.04
        await now.answer({"d": (heard_at, heard_at + 60.0)})
        now.now += 0.02
        await now.settle()
        assert now.mirrors[-1].measures.notice_to_decided_s == pytest.approx(0.06, abs=1e-3)
        assert now.mirrors[-1].measures.notice_to_first_order_s is None
        now.now += 1.0
        stages = (RankStage.PREPARING, RankStage.PREPARED, RankStage.READY)
        for stage, ordered_s in zip(stages, (0.25, 0.2, 0.3), strict=True):
            measured = RankMeasures(measures={"ordered_at_utc": heard_at + ordered_s})
            await now.deliver(stage, measured=measured)
        await now.lead.tick({})
        measures = now.mirrors[-1].measures
        assert measures.notice_to_decided_s == pytest.approx(0.06, abs=1e-3)
        assert measures.notice_to_first_order_s == pytest.approx(0.2, abs=1e-3)
        assert "ordered_at_utc" not in measures.extra

    asyncio.run(run())


def test_a_refusal_is_shown_at_every_look_and_logged_once(job: JobOrder, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        now = Scene(job)
        caplog.set_level("INFO")
        for _ in range(20):
            await now.notice(-5.0, "d")
            now.now += 0.1
        assert "the deadline was 6.9 s ago" in now.lead.status
        assert not now.lead.open_id
        said = [record.getMessage() for record in caplog.records if "no live handoff" in record.getMessage()]
        assert len(said) == 1, said
        await now.notice(-5.0, "c")
        said = [record.getMessage() for record in caplog.records if "no live handoff" in record.getMessage()]
        assert len(said) == 2, "of another node it is news"

    asyncio.run(run())


def test_what_is_opened_is_on_disk_before_the_proposal_and_the_order_after_it(job: JobOrder) -> None:
    """An agent that is killed in between must still be able to tell of the handoff that it opened."""

    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        kept = list(cast(Any, now.lead._node.journal).kept)
        assert [table for table, _ in kept] == ["handoff", "proposer"]
        assert kept[0][1] == now.lead.open_id and now.sent

    asyncio.run(run())
