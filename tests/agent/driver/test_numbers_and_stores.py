"""What all agents of a job must agree on, whatever each has heard: numbers of worlds, and where a start's store is."""

import asyncio
import logging
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.driver.job_driver import JobDriver
from agent.driver.lifecycle import Births
from agent.peer.asking import PeersHeard
from agent.protocol.rank import Checkpointed
from agent.protocol.step_leases import HIGHEST_FIELD
from agent.protocol.sync import JobOrder
from agent.supervisor.process import ProcessIdentity
from agent.supervisor.records import RankRecord, RankState, StoreKey
from agent.supervisor.watchdog import RankPulse
from liver_core.handoff import ParticipantRecord, ProposerRecord, Reason, StoreAddress
from liver_core.handoff.participant_events import RankStage
from liver_core.handoff.proposer import ProposerState
from tests.agent.driver.lead_scene import ACTIVE, FOUR, all_say
from tests.agent.driver.lead_scene import Scene as LeadScene
from tests.agent.driver.test_notice_response import Scene
from tests.agent.stub_service import JOB_ID


def test_a_lead_takes_no_number_that_a_rank_of_its_node_has_seen_another_lead_use(order: JobOrder) -> None:
    job = JobDriver(Scene(order, "d").node, JOB_ID)
    assert job.lead.next_generation(order, ACTIVE) == 2
    seen = ParticipantRecord(active=ACTIVE, highest_generation=6)
    job.slots.participants[0] = cast(Any, SimpleNamespace(record=seen))
    assert job.lead.next_generation(order, ACTIVE) == 7


def test_a_job_tells_other_nodes_which_number_has_been_used(order: JobOrder) -> None:
    node = cast(Any, Scene(order, "d").node)
    node.service_heard_at = lambda: -math.inf
    job = JobDriver(node, JOB_ID)
    job.lead._proposer.record = ProposerRecord(highest_generation=5)
    assert job.summary()[HIGHEST_FIELD] == 5
    job.slots.participants[0] = cast(Any, SimpleNamespace(record=ParticipantRecord(highest_generation=6)))
    assert job.summary()[HIGHEST_FIELD] == 6
    job.order = order.model_copy(update={"next_generation": 200_002})
    assert job.summary()[HIGHEST_FIELD] == 200_001, "of a start in which this node has no part the service has told"


def test_a_lead_that_may_be_cut_off_opens_nothing_takes_no_number_and_says_so_once(
    order: JobOrder, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        scene = LeadScene(order)
        scene.heard = PeersHeard(too_few="a may be cut off: no answer from b, c, d")
        for _ in range(3):
            await scene.notice(60.0, "b")
            assert (scene.lead.open_id, scene.stores.asked, scene.sent, scene.mirrors) == ("", [], [], [])
        assert scene.lead.status == "no handoff could be opened: a may be cut off: no answer from b, c, d"
        assert [record.message for record in caplog.records] == [f"job {JOB_ID}: {scene.lead.status}"]
        scene.heard = PeersHeard()
        await scene.notice(60.0, "b")
        assert {sent.generation for _, sent in scene.sent} == {2}

    caplog.set_level(logging.INFO, "agent.driver.lead")
    asyncio.run(scenario())


def test_a_lead_asks_others_but_for_the_first_attempt_that_another_node_has_just_asked_for(order: JobOrder) -> None:
    async def scenario() -> None:
        scene = LeadScene(order)
        await scene.notice(60.0, "b", in_touch=True)
        assert (scene.questions, {sent.generation for _, sent in scene.sent}) == (0, {2})
        await scene.lead.cancel(Reason("the store died", "store"))
        await all_say(scene, RankStage.ABORTED)
        assert scene.state is ProposerState.IDLE
        scene.now += 10.0
        scene.heard, scene.sent = PeersHeard(too_few="a may be cut off"), []
        await scene.notice(60.0, "b", in_touch=True)
        assert (scene.questions, scene.sent) == (1, []), "an attempt failed: it may be cut off since"
        scene.heard = PeersHeard()
        await scene.notice(60.0, "b")
        assert (scene.questions, {sent.generation for _, sent in scene.sent}) == (2, {3})

    asyncio.run(scenario())


def test_a_number_that_is_about_to_be_used_is_told_to_who_asks(order: JobOrder) -> None:
    async def scenario() -> None:
        scene = LeadScene(order)
        await scene.answer({"b": (scene.now, scene.now + 60.0)}, place=2)
        assert scene.state is ProposerState.IDLE and scene.lead.used() == 4
        await scene.lead.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("lead_order", [FOUR, ("c", "b", "d", "a"), ()])
@pytest.mark.parametrize("told", [None, "b"])
def test_one_node_hosts_the_store_of_a_start_whatever_each_agent_has_heard_of_notices(
    order: JobOrder, lead_order: tuple[str, ...], told: str | None
) -> None:
    hosts: list[str] = []
    start = order.model_copy(update={"lead_order": lead_order, "store_node": told, "store": None})
    roster = start.roster
    assert roster is not None

    async def ask(node_id: str) -> None:
        async def host(key: StoreKey, address: str) -> StoreAddress:
            hosts.append(node_id)
            return StoreAddress(host=address, port=4_000)

        stores = SimpleNamespace(host=host, address=lambda key: None)
        others = {"sync_soon": lambda: None, "now": lambda: 0.0}
        node = SimpleNamespace(node_id=node_id, private_address="h", stores=stores, **others)
        memory = SimpleNamespace(record=ParticipantRecord())
        slots = SimpleNamespace(memory=lambda slot: memory)
        births = Births(cast(Any, node), JOB_ID, cast(Any, slots), cast(Any, None), cast(Any, None))
        await births._store_for(start, roster)

    async def run() -> None:
        for node_id in FOUR:
            await ask(node_id)

    asyncio.run(run())
    assert hosts == [told or "a"]


@pytest.mark.parametrize(("said_hello", "world"), [(False, 6), (True, 2)])
def test_a_checkpoint_is_of_the_world_in_which_its_rank_ended_whether_or_not_an_agent_was_there(
    order: JobOrder, said_hello: bool, world: int
) -> None:
    """The journal's record of a process names the world that it was started for; it may have been handed on since."""
    scene = Scene(order, "d")
    facts: list[Any] = []
    cast(Any, scene.node).outbox = SimpleNamespace(put_checkpoint=facts.append)
    job = JobDriver(scene.node, JOB_ID)
    active = SimpleNamespace(active=SimpleNamespace(generation=6))
    job.slots.memory = cast(Any, lambda slot: SimpleNamespace(record=active))
    record = RankRecord(ProcessIdentity(7, 1.0), "socket", "log", 2, 3, "origin")
    state = RankState(record, RankPulse(0.0), 2, 3, hello_received=said_hello)
    job._host.state = cast(Any, lambda slot: state)
    job.take_rank_event(0, Checkpointed(path="/checkpoints/7", step=7))
    job._host.state = cast(Any, lambda slot: None)

    async def turn() -> None:
        await job._inbox.get_nowait()()

    asyncio.run(turn())
    assert [(fact.generation, fact.step) for fact in facts] == [(world, 7)]
