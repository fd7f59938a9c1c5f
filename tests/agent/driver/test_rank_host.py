"""The rank processes of one job, where a process is only just being started."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from agent.driver.lifecycle import Births
from agent.driver.rank_host import STOPPED_LEAVER_S, Launch, RankHost
from agent.protocol.peer import SuspensionBody
from agent.protocol.sources import SourceHandoff
from agent.protocol.sync import DesiredState
from agent.supervisor.records import SlotKey
from agent.supervisor.watchdog import RankPulse
from liver_core.handoff import FailedPart, FailureCause, Order, ParticipantRecord, RankStage, start_order
from liver_core.handoff.generations import next_start
from tests.agent.driver.test_participants import ACTIVE, STORE, WHY, Scene, order
from tests.agent.stub_service import JOB_ID, roster_of
from tests.agent.waiting import fake_job

KEY = SlotKey("job", 0)


class Supervisor:
    """A fork takes until `may_start` is set. `stopped`: the processes that were told to end."""

    def __init__(self) -> None:
        self.states: dict[SlotKey, Any] = {}
        self.may_start = asyncio.Event()
        self.stopped: list[SlotKey] = []

    async def launch(self, spec: Any, origin: str) -> None:
        await self.may_start.wait()
        self.states[KEY] = SimpleNamespace(pulse=SimpleNamespace(median_s=lambda: 0.0))

    async def stop(self, key: SlotKey, reason: str, grace_s: float) -> None:
        assert key in self.states, "there was no process yet to be told anything"
        self.stopped.append(key)


@pytest.mark.parametrize("wish", [DesiredState.STOP, DesiredState.SUSPENDED])
def test_a_job_that_is_ended_while_its_rank_is_being_started_ends(wish: DesiredState):
    async def run() -> list[SlotKey]:
        supervisor = Supervisor()

        async def cancel(reason: Any) -> None:
            return None

        host = RankHost("job", cast(Any, supervisor), unexpected)
        lead = SimpleNamespace(cancel=cancel)
        node = SimpleNamespace(node_id="a", now=lambda: 0.0)
        births = Births(cast(Any, node), "job", cast(Any, None), host, cast(Any, lead))
        host.launch(Launch(cast(Any, SimpleNamespace(slot=0, rank=0)), str(uuid4())))
        await asyncio.sleep(0)
        await births.consider(cast(Any, SimpleNamespace(desired=wish, saves_at_end=False)), {})
        supervisor.may_start.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*host._slot(0).tasks)
        await host.close()
        return supervisor.stopped

    assert asyncio.run(run()) == [KEY]


def test_only_a_rank_that_has_been_stopped_for_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, str]] = []
    supervisor = SimpleNamespace(states={}, kill=lambda key, text: killed.append((key.slot, text)))
    now = 1_000.0
    monkeypatch.setattr("agent.driver.rank_host.time.monotonic", lambda: now)
    for slot, stopped_s in enumerate((0.0, STOPPED_LEAVER_S - 0.1, STOPPED_LEAVER_S, 60.0)):
        pulse = RankPulse(0.0)
        if stopped_s:
            pulse.look(now - stopped_s, stopped=True)
        supervisor.states[SlotKey("job", slot)] = SimpleNamespace(pulse=pulse)
    supervisor.states[SlotKey("other", 0)] = supervisor.states[SlotKey("job", 3)]
    gone_on = RankPulse(0.0)
    gone_on.look(now - 60.0, stopped=True)
    gone_on.look(now - 1.0, stopped=False)
    supervisor.states[SlotKey("job", 4)] = SimpleNamespace(pulse=gone_on)
    RankHost("job", cast(Any, supervisor), unexpected).kill_stopped()
    assert [slot for slot, _ in killed] == [2, 3]
    assert killed[0][1] == "its process was stopped for 15 s on a node that goes, and was killed"


class Slow:
    """Forks at once; a process ends only when it is let go."""

    def __init__(self) -> None:
        self.states: dict[SlotKey, Any] = {}
        self.launched: list[int] = []
        self.stopped: list[int] = []

    async def launch(self, spec: Any, origin: str) -> None:
        assert not self.states, "one process a slot"
        pulse = SimpleNamespace(median_s=lambda: 0.0)
        self.states[SlotKey(JOB_ID, 0)] = SimpleNamespace(
            order=spec.order, pulse=pulse, stage=RankStage.TRAINING, handoff_id=""
        )
        self.launched.append(spec.order.generation)

    async def stop(self, key: SlotKey, reason: str, grace_s: float) -> None:
        self.stopped.append(self.states[key].order.generation)

    async def send(self, key: SlotKey, command: Any) -> bool:
        return key in self.states


def launch_of(generation: int) -> Launch:
    order = SimpleNamespace(generation=generation)
    return Launch(cast(Any, SimpleNamespace(slot=0, rank=0, order=order)), "origin")


async def unexpected(slot: int, reason: Any) -> None:
    raise AssertionError(reason)


WORLD = ParticipantRecord(active=roster_of(4, ("a", "b")), highest_generation=4)


def hosted(node_id: str = "a", record: ParticipantRecord = WORLD) -> tuple[Slow, RankHost, Scene]:
    """The slots of one node, and what carries out what they want."""
    slow = Slow()
    host = RankHost(JOB_ID, cast(Any, slow), unexpected)
    scene = Scene(node_id, spec=fake_job(Path("/nowhere")), host=host)
    scene.restore(record)
    return slow, host, scene


def born() -> Order:
    """The service starts generation 5."""
    return start_order(ACTIVE, STORE, "born", deadline_utc=2e9, issued_at=1.7e9, proposer_id="a")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("before", ["runs", "is only just being started"])
def test_the_rank_of_a_world_that_starts_is_not_replaced_by_a_newcomer_of_a_handoff_from_it(before: str):
    """A notice comes while the world starts: the order that answers it names a rank which has no process yet."""

    async def run() -> list[int]:
        slow, host, scene = hosted()
        host.launch(launch_of(4))
        if before == "runs":
            await settled()
        await scene.slots.take_start(0, born())
        await scene.slots.take_order(0, order())
        await settled()
        assert slow.stopped == [4], "the world before it is over"
        slow.states.clear()
        assert host.ended(0)
        await scene.slots.take_death(0, WHY)
        await scene.slots.take_order(0, order())
        await settled()
        await host.close()
        return slow.launched

    assert asyncio.run(run()) == [4, 5]


def test_a_world_starts_until_its_rank_has_made_a_step():
    async def run() -> list[bool]:
        slow, host, scene = hosted()
        host.launch(launch_of(4))
        await settled()
        assert not scene.slots.is_starting(), "no world of the service's"
        await scene.slots.take_start(0, born())
        found = [scene.slots.is_starting()]
        slow.states.clear()
        host.ended(0)
        await scene.slots.take_death(0, WHY)
        await settled()
        for handoff_id, stage in (
            ("", RankStage.STARTING),
            ("born", RankStage.PREPARING),
            ("born", RankStage.READY),
            ("born", RankStage.ACTIVE),
            ("born", RankStage.TRAINING),
            ("next", RankStage.PREPARING),
        ):
            slow.states[SlotKey(JOB_ID, 0)] = SimpleNamespace(handoff_id=handoff_id, stage=stage)
            found.append(scene.slots.is_starting())
        await host.close()
        return found

    assert asyncio.run(run()) == [True, True, True, True, False, False, False]


def births_of(host: RankHost, scene: Scene) -> tuple[Births, list[Any]]:
    """And why handoffs that this node leads were cancelled, or for which start they gave way."""
    cancelled: list[Any] = []

    async def cancel(reason: Any) -> None:
        cancelled.append(reason)

    async def give_way(started: int) -> None:
        if started not in cancelled:
            cancelled.append(started)

    async def take_store_death(generation: int) -> None:
        return None

    node = SimpleNamespace(node_id=scene.node_id, now=lambda: scene.now, sync_soon=lambda: None)
    lead = SimpleNamespace(cancel=cancel, give_way=give_way, take_store_death=take_store_death)
    return Births(cast(Any, node), JOB_ID, scene.slots, host, cast(Any, lead)), cancelled


@pytest.mark.parametrize("is_launched", [False, True])
def test_ranks_of_a_start_whose_store_dies_are_lost_at_once_and_no_others(is_launched: bool):
    """By themselves they would wait half a minute for it, and the agent knows at once."""

    async def run() -> tuple[list[int], dict[int, Any]]:
        slow, host, scene = hosted(record=ParticipantRecord())
        births, _ = births_of(host, scene)
        lost: dict[int, Any] = {}
        await scene.slots.take_start(0, born())
        if is_launched:
            await settled()
            slow.states[SlotKey(JOB_ID, 0)].stage = RankStage.STARTING
        await births.take_store_death(4, lost)
        assert not lost, "the store of another world"
        await births.take_store_death(5, lost)
        await settled()
        stopped = [*slow.stopped]
        await host.close()
        return stopped, lost

    stopped, lost = asyncio.run(run())
    assert stopped == [5]
    reason = lost[0].reason
    assert (lost[0].stage, lost[0].generation, reason.cause) == (RankStage.FAILED, 5, FailureCause(FailedPart.STORE))
    assert reason.text == "the store of generation 5 on node a died"


def test_ranks_that_step_need_the_store_of_their_start_no_more():
    async def run() -> tuple[list[int], dict[int, Any]]:
        slow, host, scene = hosted(record=ParticipantRecord())
        births, _ = births_of(host, scene)
        lost: dict[int, Any] = {}
        await scene.slots.take_start(0, born())
        await settled()
        slow.states[SlotKey(JOB_ID, 0)] = SimpleNamespace(handoff_id="born", stage=RankStage.TRAINING)
        await births.take_store_death(5, lost)
        await settled()
        await host.close()
        return slow.stopped, lost

    assert asyncio.run(run()) == ([], {})


@pytest.mark.parametrize(
    ("after_s", "leads", "is_bound", "wanted"),
    [
        (-1, False, False, DesiredState.RUN),
        (0, False, False, DesiredState.SUSPENDED),
        (5, True, False, DesiredState.RUN),
        (5, False, True, DesiredState.RUN),
    ],
)
def test_a_suspension_whose_time_has_come_leaves_a_handoff_alone(
    after_s: float, leads: bool, is_bound: bool, wanted: DesiredState
):
    at = datetime(2026, 1, 1, tzinfo=UTC)
    node = SimpleNamespace(node_id="a", now=lambda: at.timestamp() + after_s)
    active = SimpleNamespace(generation=3)
    slots = SimpleNamespace(is_bound=lambda: is_bound, active=lambda: active)
    lead = SimpleNamespace(is_idle=not leads)
    births = Births(cast(Any, node), JOB_ID, cast(Any, slots), cast(Any, None), cast(Any, lead))

    def wanted_by(desired: DesiredState, suspends_utc: datetime | None, generation: int = 3) -> DesiredState:
        order = SimpleNamespace(desired=desired, suspends_utc=suspends_utc, generation=generation)
        return births.wanted(cast(Any, order))

    assert wanted_by(DesiredState.RUN, at) is wanted
    assert wanted_by(DesiredState.STOP, at) is DesiredState.STOP
    assert wanted_by(DesiredState.RUN, None) is DesiredState.RUN
    asyncio.run(births.alone.take(SuspensionBody(generation=3, at_utc=at, reason="told by agents", goes="b")))
    assert wanted_by(DesiredState.RUN, None) is wanted
    assert wanted_by(DesiredState.RUN, at + timedelta(hours=1)) is DesiredState.RUN, "what the service says counts"
    assert wanted_by(DesiredState.RUN, None, generation=4) is DesiredState.RUN, "a newer world is not meant"


ENDS = [SimpleNamespace(desired=wish, saves_at_end=False) for wish in (DesiredState.STOP, DesiredState.SUSPENDED)]


@pytest.mark.parametrize("wish", ENDS, ids=lambda wish: wish.desired)
def test_a_rank_whose_start_waited_for_the_process_before_it_is_ended_if_its_job_was_to_end_meanwhile(wish: Any):
    async def run() -> None:
        slow, host, scene = hosted()
        births, cancelled = births_of(host, scene)
        host.launch(launch_of(4))
        await settled()
        await scene.slots.take_start(0, born())
        for _ in range(2):
            await births.consider(wish, {})
            await settled()
        assert set(slow.stopped) == {4}
        slow.states.clear()
        assert host.ended(0)
        await scene.slots.take_death(0, WHY)
        await settled()
        for _ in range(2):
            await births.consider(wish, {})
            await settled()
        assert slow.launched == [4, 5] and slow.stopped.count(5) == 1, "it ends, and is told so once"
        assert len(cancelled) == 1
        await host.close()

    asyncio.run(run())


@pytest.mark.parametrize("wish", ENDS, ids=lambda wish: wish.desired)
def test_a_newcomer_of_a_handoff_that_comes_after_its_job_was_to_end_is_ended(wish: Any):
    async def run() -> list[int]:
        slow, host, scene = hosted("c", ParticipantRecord())
        births, _ = births_of(host, scene)
        await births.consider(wish, {})
        await scene.slots.take_order(0, order())
        await settled()
        await births.consider(wish, {})
        await settled()
        assert slow.launched == [6]
        await host.close()
        return slow.stopped

    assert asyncio.run(run()) == [6]


def handed_on(generation: int) -> Any:
    """What the service wants while a world of b and c runs that a handoff has made."""
    return SimpleNamespace(
        desired=DesiredState.RUN,
        suspends_utc=None,
        generation=generation,
        roster=roster_of(generation, ("b", "c")),
        source=SourceHandoff(handoff_id=uuid4()),
        origin_id=uuid4(),
        checkpoint_asked=0,
    )


def test_who_missed_a_start_gives_up_the_world_before_it_when_it_hears_of_a_handoff_that_followed():
    async def run() -> None:
        slow, host, scene = hosted()
        births, cancelled = births_of(host, scene)
        host.launch(launch_of(4))
        await settled()
        world = handed_on(next_start(4) + 1)
        for _ in range(2):
            await births.consider(world, {})
            await settled()
        assert (slow.stopped, cancelled) == ([4], [next_start(4)])
        slow.states.clear()
        assert host.ended(0)
        await scene.slots.take_death(0, WHY)
        joins = order(generation=world.generation + 1, parent=world.roster)
        await scene.slots.take_order(0, joins)
        await settled()
        await host.close()
        assert scene.record.promise is not None and slow.launched == [4, joins.generation], "it takes part again"

    asyncio.run(run())


def test_members_of_a_world_that_a_handoff_made_after_a_start_keep_it():
    async def run() -> None:
        world = handed_on(next_start(4) + 1)
        slow, host, scene = hosted("b", ParticipantRecord(active=world.roster, highest_generation=world.generation))
        births, _ = births_of(host, scene)
        host.launch(launch_of(world.generation))
        await settled()
        await births.consider(world, {})
        await settled()
        await host.close()
        assert slow.stopped == [] and scene.record.active == world.roster

    asyncio.run(run())
