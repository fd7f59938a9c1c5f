"""The slots of a job on one node: what is journalled first, what a rank's words count for, what its process is told."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from agent.driver.journal_records import SlotMemory
from agent.driver.node_context import Node
from agent.driver.participants import ABORT_GRACE_S, HELLO_ALONE_S, LEAVE_GRACE_S, JobSlots
from agent.driver.rank_host import Launch, RankHost
from agent.journal import Table
from agent.protocol.jobfile import JobFile
from agent.protocol.rank import Abort, Hello, Permit, Prepare, Retire, StageReport, Withdraw
from agent.supervisor.records import RankState, SlotKey
from agent.supervisor.watchdog import RankPulse
from liver_core.handoff import (
    OUT_OF_TIME,
    CutoverDeadlines,
    Decision,
    HandoffId,
    Order,
    ParticipantRecord,
    Phase,
    Promise,
    RankStage,
    Reason,
    Report,
    Rung,
    Stage,
    StoreAddress,
    start_order,
)
from liver_core.handoff.generations import next_start
from liver_core.handoff.participant import ParticipantState
from liver_core.handoff.participant_events import ENDED_UNSEEN, EndedHandoff
from liver_core.layout import Member, Roster, from_json, to_json
from tests.agent.stub_service import JOB_ID, roster_of
from tests.agent.waiting import fake_job

ACTIVE = roster_of(5, ("a", "b"))
TARGET = ("a", "c")
LATE = Reason("no permission before the deadline", OUT_OF_TIME)
HANDOFF, OTHER, START = UUID(int=7), UUID(int=8), UUID(int=9)
STORE = StoreAddress("127.0.0.1", 4_000)
START_S = 1_700_000_000.0
CLOCK_ZERO, RELAY = 1_000.0, "a relay"
WHY = Reason("because", "test")


class HostRecord:
    """Notes what is wanted of the processes. `busy`: the slots in which one runs."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes
        self.busy: set[int] = {0}
        self.condemned: set[int] = set()

    def state(self, slot: int) -> object | None:
        return object() if slot in self.busy else None

    def is_busy(self, slot: int) -> bool:
        return slot in self.busy

    def is_condemned(self, slot: int) -> bool:
        return slot in self.condemned

    def condemn(self, slot: int) -> None:
        self.condemned.add(slot)

    def awaits(self, slot: int, generation: int) -> bool:
        return False

    def launch(self, launch: Launch) -> None:
        self.notes.append(("launch", launch))

    def end(self, slot: int, reason: str, grace_s: float) -> None:
        self.notes.append(("end", slot, reason, grace_s))

    async def tell(self, slot: int, command: Any) -> None:
        self.notes.append(("tell", slot, command))

    async def deliver(self, slot: int, *, again: bool = False) -> None:
        if again:
            self.notes.append(("deliver again", slot))

    def settle(self, slot: int) -> None:
        self.notes.append(("settle", slot))

    async def query(self, slot: int) -> bool:
        self.notes.append(("query", slot))
        return slot in self.busy


class Scene:
    """One node of the job. `notes`: what was journalled, told and reported, in order."""

    def __init__(self, node_id: str = "a", spec: JobFile | None = None, host: RankHost | None = None) -> None:
        self.now, self.node_id = START_S, node_id
        self.notes: list[Any] = []
        self.kept: dict[str, dict] = {}
        self.host = HostRecord(self.notes)
        node = SimpleNamespace(
            node_id=node_id,
            incarnation=1,
            journal=SimpleNamespace(put=self._put, items=lambda table: tuple(self.kept.items())),
            rank_spec=lambda slot, order, spec, number: SimpleNamespace(slot=slot, rank=0, order=order, number=number),
            now=lambda: self.now,
            clock=SimpleNamespace(zero=CLOCK_ZERO),
        )
        self.slots = JobSlots(
            cast(Node, node),
            JOB_ID,
            host or cast(RankHost, self.host),
            spec_of=lambda: spec,
            relay_of=lambda order: RELAY,
            send_report=self._send_report,
        )

    def _put(self, table: Table, key: str, data: dict) -> None:
        assert table is Table.PARTICIPANT
        self.kept[key] = data
        self.notes.append(("persist", from_json(SlotMemory, data)))

    async def _send_report(self, to: str, report: Report) -> None:
        self.notes.append(("report", to, report))

    def restore(self, record: ParticipantRecord, *, job_id: str = JOB_ID, slot: int = 0) -> None:
        self.kept[str(SlotKey(job_id, slot))] = to_json(SlotMemory(record=record, origin="born", store=STORE))
        self.slots.restore()

    def taken(self, kind: str) -> list[Any]:
        """The notes of this kind since the last look, without the kind; all others are dropped."""
        found = [note[1:] if len(note) > 2 else note[1] for note in self.notes if note[0] == kind]
        self.notes.clear()
        return found

    @property
    def record(self) -> ParticipantRecord:
        return self.slots.participants[0].record

    @property
    def state(self) -> ParticipantState:
        return self.slots.participants[0].state


def prepare() -> Prepare:
    """What the rank is told of `order()`."""
    return Prepare(order=order(), clock_zero=CLOCK_ZERO, relay=RELAY)


def order(
    phase: Phase = Phase.PREPARE,
    *,
    generation: int = 6,
    revision: int = 1,
    handoff: UUID = HANDOFF,
    parent: Roster = ACTIVE,
) -> Order:
    """From generation 5 on a and b to the next one on a and c."""
    return Order(
        job_id=JOB_ID,
        handoff_id=HandoffId(str(handoff)),
        parent=parent.generation,
        generation=generation,
        plan_revision=revision,
        plan_digest="",
        phase=phase,
        source=parent,
        target=roster_of(generation, TARGET),
        target_revision=revision,
        store=STORE,
        cause="notice",
        rung=Rung.STOP_AND_COPY,
        deadline_utc=START_S + 100.0,
        cutover=CutoverDeadlines(),
        proposer_id="lead",
        agent_incarnation=1,
        report_seq=1,
        issued_at=START_S,
        reason=WHY if phase is Phase.ABORT else None,
    )


def said(
    stage: RankStage,
    *,
    handoff: UUID = HANDOFF,
    revision: int | None = 1,
    decision: Decision = Decision.UNDECIDED,
    reason: Reason | None = None,
) -> StageReport:
    return StageReport(
        handoff_id=handoff,
        generation=6,
        rank=0,
        stage=stage,
        plan_revision=revision,
        decision=decision,
        reason=reason,
    )


def hello(stage: RankStage = RankStage.TRAINING, generation: int = 5) -> Hello:
    return Hello(job_id=JOB_ID, generation=generation, rank=0, pid=1, start_time=1, stage=stage)


def running(active: Roster | None = ACTIVE, **known: Any) -> Scene:
    """A node whose rank steps in `active`."""
    scene = Scene(spec=fake_job(Path("/nowhere")))
    scene.restore(ParticipantRecord(active=active, highest_generation=5, **known))
    return scene


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


STARTED = next_start(9)


def start(generation: int = STARTED) -> Order:
    """The service starts the job on a and b."""
    target = roster_of(generation, ("a", "b"))
    return start_order(target, STORE, str(START), deadline_utc=START_S + 100.0, issued_at=START_S, proposer_id="a")


def test_a_start_by_the_service_does_not_forget_which_numbers_were_used() -> None:
    async def scenario() -> None:
        scene = Scene(spec=fake_job(Path("/nowhere")))
        ended = EndedHandoff(HandoffId(str(OTHER)), 9, 1, Stage.ABORTED, Decision.UNDECIDED, WHY)
        scene.restore(ParticipantRecord(highest_generation=9, ended=(ended,)))
        await scene.slots.take_start(0, start(9))
        assert scene.record.active is None, "a rank that died in a newer world than the service knows"
        await scene.slots.take_start(0, start())
        assert (scene.record.active, scene.record.highest_generation) == (start().target, STARTED)
        assert scene.record.ended == (ended,)
        assert (scene.slots.memory(0).origin, scene.slots.memory(0).store) == (str(START), STORE)
        assert scene.slots.has_ended(str(OTHER)) and not scene.slots.has_ended(str(HANDOFF))
        scene.notes.clear()
        await scene.slots.take_order(0, order(generation=8))
        ((to, refused),) = scene.taken("report")
        assert to == "lead" and refused.stage is Stage.ABORTED
        assert scene.record.promise is None

    run(scenario())


@pytest.mark.parametrize("lingers", [False, True])
def test_a_start_is_on_disk_before_its_process_starts_and_ends_one_that_lingers(lingers: bool) -> None:
    async def scenario() -> None:
        scene = Scene(spec=fake_job(Path("/nowhere")))
        scene.host.busy = {0} if lingers else set()
        await scene.slots.take_start(0, start())
        ends = ["end"] if lingers else []
        assert [note[0] for note in scene.notes] == ["persist", *ends, "launch"]
        assert scene.notes[0][1].record.active == start().target
        launch = scene.notes[-1][1]
        assert (launch.origin, launch.spec.order) == (str(START), start())

    run(scenario())


def test_the_newest_world_of_a_node_counts_also_after_its_end_and_what_was_aborted_does_not() -> None:
    async def run() -> None:
        for active, stages, newest in (
            (ACTIVE, (), 5), (None, (), 0), (None, (Stage.ACTIVE,), 9), (ACTIVE, (Stage.ABORTED,), 5),
            (ACTIVE, (Stage.ACTIVE, Stage.ABORTED), 9),
        ):  # fmt: skip
            scene = Scene()
            ended = tuple(
                EndedHandoff(HandoffId(str(OTHER)), 9 + at, 1, stage, Decision.UNDECIDED, WHY)
                for at, stage in enumerate(stages)
            )
            scene.restore(ParticipantRecord(active=active, highest_generation=9 + len(stages), ended=ended))
            assert scene.slots.newest_world() == newest

    asyncio.run(run())


def test_a_start_is_told_to_a_process_only_when_the_one_of_the_older_world_has_ended() -> None:
    async def scenario() -> None:
        scene = running()
        assert await scene.slots.give_up(STARTED) and not await scene.slots.give_up(STARTED)
        assert [note[0] for note in scene.notes] == ["persist", "end"]
        assert scene.notes[1] == ("end", 0, f"rank 0, start: the service has started generation {STARTED}", 0.0)
        await scene.slots.take_start(0, start())
        assert scene.taken("launch") == [] and scene.slots.is_starting()
        scene.host.busy = set()
        await scene.slots.take_death(0, WHY)
        assert [launch.spec.order for launch in scene.taken("launch")] == [start()]

    run(scenario())


def test_a_rank_of_an_older_world_that_has_no_process_any_more_holds_up_no_start() -> None:
    async def scenario() -> None:
        scene = running()
        scene.host.busy = set()
        await scene.slots.take_start(0, start())
        assert len(scene.taken("launch")) == 1 and scene.record.active == start().target

    run(scenario())


def test_a_slot_that_had_no_part_in_the_job_refuses_numbers_before_the_newest_start_as_well() -> None:
    async def scenario() -> None:
        scene = Scene("c", spec=fake_job(Path("/nowhere")))
        await scene.slots.give_up(STARTED)
        await scene.slots.take_order(0, order())
        ((_, refused),) = scene.taken("report")
        assert refused.stage is Stage.ABORTED and scene.record.promise is None

    run(scenario())


def test_a_promise_is_on_disk_before_the_rank_prepares_and_before_it_is_reported() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_order(0, order())
        assert [note[0] for note in scene.notes] == ["persist", "tell", "report"]
        assert scene.notes[0][1].record.promise is not None
        assert scene.notes[1] == ("tell", 0, prepare())
        assert scene.slots.is_bound() and scene.slots.promised_order() == order()

    run(scenario())


def test_a_stage_of_an_older_revision_does_not_settle_what_the_rank_was_told() -> None:
    async def scenario() -> None:
        for revision, settled in ((1, []), (2, [0]), (None, [0])):
            scene = running()
            await scene.slots.take_order(0, order(revision=2))
            await scene.slots.take_stage(0, said(RankStage.ABORTED, revision=revision))
            assert scene.taken("settle") == settled, revision

    run(scenario())


def test_only_a_stage_past_the_boundary_or_the_end_settles_what_the_rank_was_told() -> None:
    async def scenario() -> None:
        for stage in RankStage:
            scene = running()
            await scene.slots.take_order(0, order())
            await scene.slots.take_stage(0, said(stage))
            ends = {RankStage.CUTTING_OVER, RankStage.ACTIVE, RankStage.LEFT, RankStage.ABORTED, RankStage.BROKEN}
            assert bool(scene.taken("settle")) == (stage in ends), stage

    run(scenario())


@pytest.mark.parametrize(
    ("active", "phase", "stage", "why", "handoff", "ends"),
    [
        (None, Phase.PERMIT, RankStage.ABORTED, None, HANDOFF, True),
        (None, Phase.PREPARE, RankStage.ABORTED, None, HANDOFF, False),
        (None, Phase.PREPARE, RankStage.ABORTED, LATE, HANDOFF, True),
        (None, Phase.ABORT, RankStage.ABORTED, None, HANDOFF, True),
        (None, Phase.PERMIT, RankStage.ABORTED, LATE, OTHER, False),
        (ACTIVE, Phase.PERMIT, RankStage.ABORTED, LATE, HANDOFF, False),
        (ACTIVE, Phase.PERMIT, RankStage.BROKEN, None, HANDOFF, True),
    ],
)
def test_others_may_wait_for_a_rank_that_is_broken_and_for_a_newcomer_that_gives_up(
    active: Roster | None, phase: Phase, stage: RankStage, why: Reason | None, handoff: UUID, ends: bool
) -> None:
    """It had permission; or the others had, and the word of its own was lost."""
    asked = order(Phase.PREPARE if phase is Phase.PREPARE else Phase.PERMIT)
    scene = running(active, order=asked, promise=Promise(asked.handoff_id, 6, 1, phase))
    assert scene.slots.ends_with(0, said(stage, handoff=handoff, reason=why)) is ends
    assert not scene.slots.ends_with(1, said(RankStage.ABORTED)), "nothing is promised there"


def test_what_a_rank_says_of_another_handoff_counts_for_nothing() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_order(0, order())
        scene.notes.clear()
        await scene.slots.take_stage(0, said(RankStage.BROKEN, handoff=OTHER))
        await scene.slots.take_stage(1, said(RankStage.BROKEN))
        await scene.slots.take_death(1, WHY)
        assert scene.notes == [] and scene.state is ParticipantState.PREPARING

    run(scenario())


@pytest.mark.parametrize(
    ("read", "told"),
    [(Decision.UNDECIDED, Decision.GO), (Decision.GO, Decision.GO), (Decision.GO_REDO, Decision.GO_REDO)],
)
def test_a_rank_that_steps_in_the_next_world_or_left_for_it_has_read_that_it_was_decided(
    read: Decision, told: Decision
) -> None:
    async def scenario() -> None:
        scene = running()
        for step in (order(), said(RankStage.PREPARED), order(Phase.PERMIT), said(RankStage.CUTTING_OVER)):
            take: Any = scene.slots.take_order if isinstance(step, Order) else scene.slots.take_stage
            await take(0, step)
        assert {report.decision for _, report in scene.taken("report")} == {Decision.UNDECIDED}
        await scene.slots.take_stage(0, said(RankStage.ACTIVE, decision=read))
        _, report = scene.taken("report")[-1]
        assert (report.stage, report.decision) == (Stage.ACTIVE, told)
        assert (scene.slots.memory(0).origin, scene.slots.memory(0).store) == (str(HANDOFF), STORE)
        assert scene.slots.active() == roster_of(6, TARGET)

    run(scenario())


def test_permission_its_withdrawal_an_abort_and_the_end_are_told_to_the_rank() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_order(0, order())
        await scene.slots.take_stage(0, said(RankStage.PREPARED))
        scene.notes.clear()
        await scene.slots.take_order(0, order(Phase.PERMIT))
        assert scene.taken("tell") == [(0, Permit(handoff_id=HANDOFF, plan_revision=1))]
        await scene.slots.take_order(0, order(Phase.WITHDRAW))
        assert scene.taken("tell") == [(0, Withdraw(handoff_id=HANDOFF))]
        await scene.slots.take_order(0, order(Phase.ABORT))
        assert scene.taken("tell")[-1] == (0, Abort(handoff_id=HANDOFF, reason=WHY))
        assert scene.host.condemned == set(), "it goes on in its world"

    run(scenario())


def test_the_end_of_a_handoff_is_told_to_a_rank_that_stays_and_a_rank_that_left_is_ended() -> None:
    async def scenario() -> None:
        for node_id, last in (("a", RankStage.ACTIVE), ("b", RankStage.LEFT)):
            scene = Scene(node_id)
            scene.restore(ParticipantRecord(active=ACTIVE, highest_generation=5))
            for step in (order(), said(RankStage.PREPARED), order(Phase.PERMIT), said(RankStage.CUTTING_OVER)):
                take: Any = scene.slots.take_order if isinstance(step, Order) else scene.slots.take_stage
                await take(0, step)
            assert scene.slots.binding_order() == scene.slots.promised_order() is not None
            await scene.slots.take_stage(0, said(last))
            if last is RankStage.LEFT:
                ((slot, _, grace_s),) = scene.taken("end")
                assert (slot, grace_s) == (0, LEAVE_GRACE_S)
            else:
                scene.notes.clear()
                assert scene.slots.is_bound() and scene.slots.binding_order() is None, "it is free for another one"
                await scene.slots.take_order(0, order(Phase.RETIRE))
                assert scene.taken("tell") == [(0, Retire(handoff_id=HANDOFF))]
                assert not scene.slots.is_bound()

    run(scenario())


def test_a_newcomer_is_started_once_the_job_file_is_there_and_only_where_the_target_wants_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        for node_id, spec in (("c", fake_job(tmp_path)), ("c", None)):
            scene = Scene(node_id, spec)
            scene.host.busy = set()
            await scene.slots.take_order(0, order())
            launches = [note[1] for note in scene.notes if note[0] == "launch"]
            if spec is not None:
                (launch,) = launches
                assert (launch.spec.order, launch.spec.number, launch.origin) == (order(), "0-6", str(HANDOFF))
                assert scene.notes.index(("launch", launch)) < scene.notes.index(("tell", 0, prepare()))
            else:
                assert launches == [] and scene.taken("tell") == []
                assert scene.record.promise is None
                assert "the job file has not come" in str(scene.record.ended[-1].reason)

    run(scenario())


def test_a_newcomer_that_was_told_to_end_is_started_again_and_one_that_runs_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        for condemned in (set(), {0}):
            scene = Scene("c", fake_job(tmp_path))
            scene.host.condemned = set(condemned)
            await scene.slots.take_order(0, order())
            assert len(scene.taken("launch")) == len(condemned)

    run(scenario())


def test_a_newcomer_that_does_not_go_when_it_is_told_to_is_ended_after_a_while(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = Scene("c", fake_job(tmp_path))
        await scene.slots.take_order(0, order())
        await scene.slots.take_order(0, order(Phase.ABORT))
        assert scene.host.condemned == {0} and scene.state is ParticipantState.ABORTING
        scene.now += ABORT_GRACE_S
        await scene.slots.tick()
        assert scene.taken("end") == []
        scene.now += 0.1
        await scene.slots.tick()
        assert scene.taken("end") == [(0, "did not end after an abort", 0.0)]
        await scene.slots.tick()
        assert scene.taken("end") == [], "once"

    run(scenario())


def test_a_rank_with_a_world_is_not_ended_because_its_abort_takes_long() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_order(0, order())
        await scene.slots.take_order(0, order(Phase.ABORT))
        scene.now += 10 * ABORT_GRACE_S
        await scene.slots.tick()
        assert scene.taken("end") == [] and scene.state is ParticipantState.ABORTING

    run(scenario())


def test_an_abort_of_a_process_that_is_gone_is_the_end_of_that_rank() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_order(0, order())
        scene.host.busy = set()
        await scene.slots.take_order(0, order(Phase.ABORT))
        assert scene.taken("tell") == [(0, prepare())], "there is nobody to tell of the abort"
        assert scene.record.promise is None and scene.record.active is None

    run(scenario())


def test_after_a_restart_each_rank_is_asked_and_one_without_a_process_is_dead() -> None:
    async def scenario() -> None:
        for busy in (True, False):
            scene = running()
            scene.host.busy = {0} if busy else set()
            await scene.slots.start()
            assert scene.taken("query") == [0]
            assert scene.record.active == (ACTIVE if busy else None)
            assert (scene.state is ParticipantState.RESTORING) == busy
        ended = scene.record.reason
        assert ended is not None and ended.cause == ENDED_UNSEEN, "it may have ended itself because of another one"

    run(scenario())


def test_a_slot_of_another_job_is_not_taken_over() -> None:
    scene = Scene()
    scene.restore(ParticipantRecord(active=ACTIVE, highest_generation=5), job_id="another-job")
    assert scene.slots.participants == {} and list(scene.slots.memories()) == []
    assert (scene.slots.active(), scene.slots.highest_generation(), scene.slots.is_bound()) == (None, 0, False)


def test_a_rank_that_holds_nothing_of_a_handoff_says_so_by_a_hello_that_nothing_follows() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_order(0, order())
        scene = _restarted(scene)
        await scene.slots.start()
        await scene.slots.take_hello(0, hello())
        assert ("deliver again", 0) in scene.notes
        scene.now += HELLO_ALONE_S - 0.1
        await scene.slots.tick()
        assert scene.state is ParticipantState.RESTORING, "its stage may still come"
        scene.now += 0.2
        scene.notes.clear()
        await scene.slots.tick()
        assert scene.state is ParticipantState.PREPARING
        assert scene.taken("tell") == [(0, prepare())]

    run(scenario())


def test_a_hello_that_a_stage_follows_is_not_taken_for_a_rank_that_holds_nothing() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_order(0, order())
        scene = _restarted(scene)
        await scene.slots.start()
        await scene.slots.take_hello(0, hello())
        await scene.slots.take_stage(0, said(RankStage.PREPARED))
        scene.notes.clear()
        scene.now += 2 * HELLO_ALONE_S
        await scene.slots.tick()
        assert scene.state is ParticipantState.READY and scene.taken("tell") == []

    run(scenario())


def test_a_rank_without_a_promise_is_at_once_where_its_hello_says() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.start()
        await scene.slots.take_hello(1, hello())
        assert scene.state is ParticipantState.RESTORING
        await scene.slots.take_hello(0, hello())
        assert scene.state is ParticipantState.IDLE

    run(scenario())


def test_a_stage_of_no_handoff_does_not_say_where_a_rank_stands_in_one() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_order(0, order())
        scene = _restarted(scene)
        await scene.slots.start()
        await scene.slots.take_stage(0, said(RankStage.TRAINING))
        assert scene.state is ParticipantState.RESTORING

    run(scenario())


def test_the_death_of_a_rank_ends_its_world_on_disk() -> None:
    async def scenario() -> None:
        scene = running()
        await scene.slots.take_death(0, WHY)
        assert scene.record.active is None
        assert scene.taken("persist")[-1].record.active is None

    run(scenario())


def test_the_newest_world_of_the_slots_is_the_active_one() -> None:
    scene = Scene()
    newer = Roster(JOB_ID, 6, ACTIVE.layout, (Member("a", 1), Member("b", 0)))
    scene.restore(ParticipantRecord(active=newer, highest_generation=6), slot=1)
    scene.restore(ParticipantRecord(active=ACTIVE, highest_generation=7), slot=0)
    assert scene.slots.active() == newer and scene.slots.highest_generation() == 7


@pytest.mark.parametrize(
    ("heard", "generation", "seat"),
    [(False, 1, (6, 0)), (True, 5, (5, 3)), (False, 7, (7, 3))],
    ids=["ended unheard: as the journal has it", "heard: as it said", "ended unheard: by its own last step"],
)
def test_where_a_rank_was_when_it_ended(heard: bool, generation: int, seat: tuple[int, int]) -> None:
    """Its record is that of its start; its agent may have been away since."""
    scene = Scene()
    newer = Roster(JOB_ID, 6, ACTIVE.layout, (Member("a", 1), Member("b", 0)))
    scene.restore(ParticipantRecord(active=newer, highest_generation=6), slot=1)
    state = RankState(cast(Any, None), RankPulse(0.0), generation, 3, hello_received=heard)
    assert scene.slots.seat_of(1, state) == {"generation": seat[0], "rank": seat[1]}


def _restarted(scene: Scene) -> Scene:
    """The same node with a new agent."""
    again = Scene()
    again.kept = dict(scene.kept)
    again.slots.restore()
    return again


@pytest.mark.parametrize("stage", [RankStage.STARTING, RankStage.TRAINING])
def test_a_hello_of_a_rank_that_starts_names_no_world(stage: RankStage) -> None:
    """It knows the generation that it is for, and steps in none yet."""

    async def scenario() -> None:
        scene = running()
        for step in (order(), said(RankStage.PREPARED), order(Phase.PERMIT)):
            take: Any = scene.slots.take_order if isinstance(step, Order) else scene.slots.take_stage
            await take(0, step)
        scene = _restarted(scene)
        await scene.slots.start()
        await scene.slots.take_hello(0, hello(stage, generation=6))
        scene.now += 2 * HELLO_ALONE_S
        await scene.slots.tick()
        steps_in_it = stage is RankStage.TRAINING
        assert scene.slots.active() == (roster_of(6, TARGET) if steps_in_it else ACTIVE)

    run(scenario())
