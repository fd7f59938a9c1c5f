"""What the lead does when a handoff fails, is given up or ends, and what it measures of one."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from agent.driver.journal_records import keep_mirror
from agent.driver.planning import Learned
from agent.journal import Journal, Table
from agent.protocol.handoff_ends import NOT_OPENED
from agent.protocol.peer import RankMeasures
from agent.protocol.sync import JobOrder
from agent.protocol.values import HandoffState
from liver_core.handoff import FailedPart, FailureCause, Prefer, Reason, Rung
from liver_core.handoff.participant_events import RankStage
from liver_core.handoff.proposer import PEER_LOST_S, ProposerState
from liver_core.layout import Member
from liver_core.retries import RETRY_MAX_S
from tests.agent.driver.lead_scene import FOUR, START_S, TO_THE_END, Scene, all_say
from tests.agent.stub_service import JOB_ID, StubService
from tests.agent.waiting import fake_job


@pytest.fixture
def job(tmp_path: Path) -> JobOrder:
    return StubService(fake_job(tmp_path), FOUR).order()


def test_the_phases_of_a_handoff_are_measured_from_its_opening_and_from_the_notice(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        await all_say(now, *TO_THE_END, seconds=2.0)
        await now.deliver()
        now.now += 3.0
        await now.deliver()
        measures = now.mirrors[-1].measures
        assert now.mirrors[-1].state is HandoffState.ACTIVE
        assert measures.phases_s == pytest.approx(
            {"to_ready": 2.0, "to_boundary": 4.0, "to_active": 2.0, "to_retired": 0.0}, abs=1e-3
        )
        assert measures.notice_to_active_s == pytest.approx(8.0, abs=1e-3)
        assert measures.notice_to_safe_s == pytest.approx(8.0, abs=1e-3)

    asyncio.run(run())


def test_what_the_steps_after_a_handoff_show_is_told_once_it_is_known(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        await all_say(now, *TO_THE_END)
        await now.deliver()
        told = len(now.mirrors)
        for step in range(101, 113):
            now.now += 0.5
            now.lead.mirrors.take_step(2, step)
        assert len(now.mirrors) == told, "soon, and not at each step"
        await now.lead.tick({})
        assert len(now.mirrors) == told + 1
        assert now.mirrors[-1].measures.cutover_step == 101
        assert now.mirrors[-1].measures.lost_s == pytest.approx(0.1, abs=1e-3)
        await now.lead.tick({})
        assert len(now.mirrors) == told + 1

    asyncio.run(run())


@pytest.mark.parametrize("killed_at", ["the mirror", "the proposal"])
def test_an_agent_that_was_killed_before_it_told_an_end_tells_it_when_it_is_back(job: JobOrder, killed_at: str) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        opened = now.mirrors[-1]
        if killed_at == "the proposal":
            now.journal.delete(Table.PROPOSER, JOB_ID)
        else:
            ended = dict(now.journal.kept)
            await now.lead.cancel(Reason("a person said so", "cancel"))
            await now.deliver(RankStage.ABORTED)
            assert now.mirrors[-1].state is HandoffState.ABORTED
            for key in ended.keys() - {(Table.PROPOSER, JOB_ID)}:
                now.journal.put(*key, ended[key])
        again = Scene(job, now.journal)
        again.lead.restore()
        said = again.mirrors[-1]
        assert (said.handoff_id, said.state, said.reason and said.reason.text) == (
            opened.handoff_id,
            HandoffState.ABORTED,
            NOT_OPENED.text if killed_at == "the proposal" else "a person said so",
        )
        assert said.mirror_seq > opened.mirror_seq and again.lead.is_idle
        assert again.lead.mirrors.has_told_late(str(opened.handoff_id)), "nothing is opened again under this name"

    asyncio.run(run())


def test_the_handoff_of_another_agent_is_not_ended_by_one_that_only_passes_it_on(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        theirs = now.mirrors[-1].model_copy(update={"proposer": "b"})
        keep_mirror(cast(Journal, now.journal), theirs)
        now.journal.delete(Table.PROPOSER, JOB_ID)
        again = Scene(job, now.journal)
        again.lead.restore()
        assert [mirror.state for mirror in again.mirrors] == [HandoffState.PREPARING]

    asyncio.run(run())


def test_by_total_the_rung_that_cost_less_is_taken_once_a_handoff_was_measured_also_by_an_agent_that_was_restarted(
    job: JobOrder,
) -> None:
    by_total = job.model_copy(update={"spec": job.spec.model_copy(update={"prefer": Prefer.TOTAL})})

    async def run() -> None:
        now = Scene(by_total)
        await now.notice(60.0, "d")
        first = now.mirrors[-1]
        assert first.rung is Rung.LIVE, "nothing was measured"
        assert first.reason is not None and "not measured yet" in first.reason.text
        assert [(cost.rung, cost.measured) for cost in first.measures.rung_costs] == [
            (Rung.LIVE, 0), (Rung.STOP_AND_COPY, 0), (Rung.CHECKPOINT, 0)
        ]  # fmt: skip
        await all_say(now, RankStage.PREPARED, RankStage.READY, seconds=4.0)
        for step in range(101, 105):
            now.lead.mirrors.take_step(1, step)
        measured = RankMeasures(measures={"stream_s": 3.0, "pause_s": 0.1})
        await now.deliver(RankStage.CUTTING_OVER)
        await now.deliver(RankStage.ACTIVE, measured=measured)
        await now.deliver()
        for step in range(105, 116):
            now.now += 0.5
            now.lead.mirrors.take_step(2, step)
        await now.lead.tick({})
        done = now.mirrors[-1].measures
        assert done.lost_parts is not None and done.lost_s == pytest.approx(done.lost_parts.total_s)
        assert done.lost_parts.streaming_s > 1.0 and done.lost_parts.pause_s == 0.1
        assert done.rung_costs == first.measures.rung_costs, "what was expected stays, to be compared"

        again = Scene(by_total)
        again.journal.kept = {key: kept for key, kept in now.journal.kept.items() if key[0] == Table.HANDOFF}
        again.lead.restore()
        await again.notice(60.0, "d")
        second = again.mirrors[-1]
        live, copied, _ = second.measures.rung_costs
        assert (live.measured, live.guessed, live.parts) == (1, (), done.lost_parts)
        assert copied.guessed == ("pause",) and copied.total_s < live.total_s
        assert second.rung is Rung.STOP_AND_COPY and second.reason is not None
        assert f"live: costs {live}; stop_and_copy: costs {copied}" in second.reason.text

    asyncio.run(run())


def test_an_agent_that_is_not_reached_for_long_ends_what_is_being_prepared_and_not_what_has_permission(
    job: JobOrder,
) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(600.0, "d")
        away = {"c": START_S, "elsewhere": START_S - 1_000.0}
        now.now += PEER_LOST_S
        await now.lead.tick(away)
        assert now.state is ProposerState.PREPARING
        now.now += 1.0
        await now.lead.tick(away)
        assert now.state is ProposerState.ABORTING
        reason = now.mirrors[-1].reason
        assert reason is not None and reason.text == "the agent of c has not been reached for 21 s"
        permitted = Scene(job)
        await permitted.notice(600.0, "d")
        await permitted.deliver(RankStage.PREPARED)
        permitted.now += 2 * PEER_LOST_S
        await permitted.lead.tick(away)
        assert permitted.state is ProposerState.PERMITTED

    asyncio.run(run())


def test_a_lead_that_was_cut_off_or_started_again_blames_itself_and_nobody_who_is_just_silent(job: JobOrder) -> None:
    async def run() -> None:
        away: dict[str, float] = dict.fromkeys("bcd", START_S)
        cut = Scene(job)
        await cut.notice(30.0, "d")
        cut.now += 18.0
        await cut.lead.tick(away)
        await cut.lead.tick({})
        again = Scene(job, cut.journal)
        again.lead.restore()
        for scene, text in (
            (cut, "the deadline passed before all were ready; a, which leads, reached no other node for 18 s"),
            (
                again,
                "the deadline passed before all were ready; the agent of a, which leads, was started again meanwhile",
            ),
        ):
            scene.now = START_S + 31.0
            await scene.lead.tick({})
            reason = scene.lead._proposer.record.reason
            assert reason is not None and reason.text == text
            assert (reason.node, reason.rank, reason.cause) == ("a", 0, FailureCause(FailedPart.NODE))

    asyncio.run(run())


def test_an_agent_that_is_gone_since_the_boundary_leaves_no_handoff_broken_that_all_others_have_dropped(
    job: JobOrder,
) -> None:
    """Its last word was that it cuts over. Nobody tells more of it, and the job that trains on was started again."""

    async def run() -> None:
        now = Scene(job)
        await now.notice(600.0, "d")
        for stage in (RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER):
            await now.deliver(stage)
        del now.participants[Member("d", 0)]
        now.sent = [(member, order) for member, order in now.sent if member.node_id != "d"]
        await now.deliver(RankStage.ABORTED, reason=Reason("not all came", "barrier"))
        assert now.state is ProposerState.ABORTING
        await now.lead.tick({"d": now.now - PEER_LOST_S - 1.0})
        assert now.state is ProposerState.IDLE
        assert now.mirrors[-1].state is HandoffState.ABORTED

    asyncio.run(run())


def test_the_store_of_the_newest_world_that_was_made_here_is_known_and_that_of_a_failed_handoff_is_not(
    job: JobOrder,
) -> None:
    async def run() -> None:
        now = Scene(job)
        assert now.lead.mirrors.newest_store(since=1) is None
        await now.notice(60.0, "d")
        await now.deliver(RankStage.PREPARING)
        await now.deliver(RankStage.ABORTED, reason=Reason("it broke", "prepare"))
        assert now.lead.mirrors.newest_store(since=1) is None, "nobody steps in a world that it made"
        now.now += 2 * RETRY_MAX_S
        await now.notice(60.0, "d")
        await all_say(now, *TO_THE_END)
        await now.deliver()
        assert now.lead.is_idle and now.lead.mirrors.newest_store(since=1) == ("127.0.0.1", 4_000)
        assert now.lead.mirrors.newest_store(since=3) == ("127.0.0.1", 4_000), "the service has heard of that world"
        assert now.lead.mirrors.newest_store(since=4) is None, "another world has followed it"

    asyncio.run(run())


def test_a_handoff_whose_store_died_is_ended_and_the_death_of_another_store_is_nothing_to_it(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.lead.take_store_death(2)
        await now.notice(60.0, "d")
        for generation in (1, 3):
            await now.lead.take_store_death(generation)
            assert now.state is ProposerState.PREPARING
        await now.lead.take_store_death(2)
        assert now.state is ProposerState.ABORTING
        reason = now.mirrors[-1].reason
        assert reason is not None and (reason.phase, reason.text) == (
            "store",
            "the store of generation 2 on node a died",
        )

    asyncio.run(run())


def test_a_notice_that_no_live_plan_can_answer_in_time_ends_the_open_handoff(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.notice(60.0, "d")
        now.lead.planner.learned = Learned(rescue_failure="it broke", rescue_failed_in=1)
        await now.notice(0.1, "c", "d")
        assert now.mirrors[-1].superseded and now.state is ProposerState.ABORTING
        assert now.lead._proposer.record.plan_revision == 1

    asyncio.run(run())


def test_a_cancel_after_the_boundary_is_refused_and_said(job: JobOrder) -> None:
    async def run() -> None:
        now = Scene(job)
        await now.lead.cancel(Reason("nobody wants it", "cancel"))
        assert now.lead.status == "", "there is nothing to cancel"
        await now.notice(60.0, "d")
        await all_say(now, RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER)
        await now.lead.cancel(Reason("nobody wants it", "cancel"))
        assert now.state is ProposerState.PERMITTED
        assert now.lead.status.startswith("refused: ")

    asyncio.run(run())
