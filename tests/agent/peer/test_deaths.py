"""The death of a rank is said to the ranks of its worlds, on every node, by its own agent and by no other."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.driver.job_driver import JobDriver
from agent.peer.deaths import Deaths
from agent.peer.peer_server import PeerRefused
from agent.protocol.peer import DeathBody
from agent.protocol.rank import PeerDied, StageReport
from agent.supervisor.records import RankRecord, RankState
from agent.supervisor.supervisor import ProcessIdentity
from agent.supervisor.watchdog import RankPulse
from liver_core.handoff import FailedPart, FailureCause, ParticipantRecord, Phase, Promise, RankStage, Reason
from liver_core.handoff.participant import Participant, ParticipantState
from liver_core.layout import Member
from tests.agent.cluster import JOB_ID, REAL_RANKS, Cluster, cluster
from tests.agent.driver.test_notice_response import Scene
from tests.agent.driver.test_participants import HANDOFF
from tests.agent.driver.test_participants import order as order_of
from tests.agent.stub_service import StubService, roster_of
from tests.agent.waiting import fake_job, real_job
from tests.cluster.real_ranks_model import build_corpus

FOUR = ("a", "b", "c", "d")
KILLED = Reason(
    "rank process (pid 7) was killed by SIGKILL after step 12",
    "training",
    3,
    cause=FailureCause(FailedPart.RANK, "SIGKILL", step=12),
)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(StubService(fake_job(tmp_path), FOUR).order(), "d")


def participant(active: Any, target: Any = None, *, had_permission: bool = False) -> Participant:
    order = None if target is None else replace(order_of(), target=target)
    phase = Phase.PERMIT if had_permission else Phase.PREPARE
    promise = None if order is None else Promise(order.handoff_id, order.generation, 1, phase)
    return restored(ParticipantRecord(active=active, order=order, promise=promise))


def restored(record: ParticipantRecord) -> Participant:
    return Participant(job_id=JOB_ID, member=Member("d", 0), agent_incarnation=1, record=record)


def told(who: Any) -> tuple[set[tuple[str, int, int | None]], list[int]]:
    """(node, generation, rank that died) of each message to another node, and the generations that ranks here hear."""
    sent: list[tuple[str, PeerDied]] = []
    here: list[PeerDied] = []

    async def say(death: PeerDied) -> None:
        here.append(death)

    deaths = Deaths("d", {0: who}, send=lambda to, body, subject: sent.append((to, body.death)), say=say)
    asyncio.run(deaths.tell(0, KILLED))
    assert all(death.reason.cause == KILLED.cause and death.reason.node == "d" for _, death in sent)
    return {(node, death.generation, death.reason.rank) for node, death in sent}, [each.generation for each in here]


def test_the_ranks_of_the_present_world_and_of_the_one_that_is_prepared_hear_of_it_on_every_node() -> None:
    elsewhere, here = told(participant(roster_of(4, FOUR), roster_of(5, ("d", "e"))))
    assert elsewhere == {("a", 4, 3), ("b", 4, 3), ("c", 4, 3), ("e", 5, 0)}
    assert here == [4, 5]


def test_a_leaver_is_missed_in_the_world_that_it_leaves_only_and_a_newcomer_in_the_next_one_only() -> None:
    elsewhere, _ = told(participant(roster_of(4, FOUR), roster_of(5, ("a", "b"))))
    assert {generation for _, generation, _ in elsewhere} == {4}
    elsewhere, _ = told(participant(None, roster_of(5, ("a", "d"))))
    assert elsewhere == {("a", 5, 1)}


def test_newcomers_hear_of_the_death_of_a_leaver_from_which_they_may_be_reading() -> None:
    elsewhere, here = told(participant(roster_of(4, ("a", "d")), roster_of(5, ("a", "e")), had_permission=True))
    assert elsewhere == {("a", 4, 1), ("e", 4, 1)}
    assert here == [4]


FELT = replace(KILLED, cause=FailureCause(FailedPart.PEER))


@pytest.mark.parametrize(
    ("ends", "heard", "told"),
    [
        ((FELT,), True, 0),  # By the agent of the rank that died first.
        ((KILLED, FELT), False, 1),
        ((FELT, FELT), False, 1),  # The first one's node is gone, and its agent with it.
        ((KILLED,), True, 1),
    ],
)
def test_a_rank_that_only_missed_another_is_told_to_other_nodes_only_where_the_loss_is_not_known_yet(
    ends: tuple[Reason, ...], heard: bool, told: int
) -> None:
    sent: list[str] = []
    here: list[PeerDied] = []

    async def say(death: PeerDied) -> None:
        here.append(death)

    slots = {slot: participant(roster_of(4, FOUR)) for slot in (0, 1)}
    deaths = Deaths("d", cast(Any, slots), send=lambda to, body, subject: sent.append(to), say=say)

    async def run() -> None:
        if heard:
            await deaths.work_of("a", PeerDied(generation=4, member=Member("a", 0), reason=KILLED))()
        for reason in ends:
            await deaths.tell(0, reason)

    asyncio.run(run())
    assert sorted(sent) == sorted(told * ["a", "b", "c"])
    assert len(here) == heard + len(ends)


def test_an_agent_is_believed_about_its_own_ranks_only(scene: Scene) -> None:
    job = JobDriver(scene.node, JOB_ID)
    for node_id, sender in (("c", "c"), ("c", "b")):
        death = PeerDied(generation=1, member=Member(node_id, 0), reason=KILLED)
        envelope = scene.node.envelope(JOB_ID, "d", DeathBody(death=death)).model_copy(update={"sender": sender})
        if sender == node_id:
            job.take_envelope(envelope)
            continue
        with pytest.raises(PeerRefused, match=r"death\.member: must be a rank of the sender b, is of c"):
            job.take_envelope(envelope)


@pytest.mark.parametrize(
    ("stage", "condemned", "hears"),
    [(RankStage.TRAINING, False, True), (RankStage.LEFT, False, False), (RankStage.TRAINING, True, False)],
)
def test_only_the_end_that_nobody_asked_for_is_a_death(
    scene: Scene, stage: RankStage, condemned: bool, hears: bool
) -> None:
    job = JobDriver(scene.node, JOB_ID)
    job.slots.participants[0] = participant(roster_of(1, FOUR))
    if condemned:
        job._host.condemn(0)
    record = RankRecord(ProcessIdentity(7, 1.0), "socket", "log", 1, 3, "origin")
    state = RankState(record, RankPulse(0.0), 1, 3, stage=stage)

    async def exits() -> None:
        job.slots.take_death = cast(Any, _nothing)
        await job._take_rank_exit(0, KILLED, state)

    asyncio.run(exits())
    assert bool(scene.peers.sent) is hears


@pytest.mark.parametrize(
    ("state", "is_told"), [(ParticipantState.CUTTING_OVER, True), (ParticipantState.PREPARING, False)]
)
def test_the_service_hears_how_a_newcomer_ended_that_was_past_the_boundary(
    scene: Scene, state: ParticipantState, is_told: bool
) -> None:
    """Others may step in its world by then. Before, its handoff says what became of it."""
    node = cast(Any, scene.node)
    node.supervisor = SimpleNamespace(states={}, stop=_nothing)
    job = JobDriver(scene.node, JOB_ID)
    job.slots.participants[0] = participant(None, roster_of(5, FOUR))
    job.slots.participants[0].state = state
    job.slots.take_death = cast(Any, _nothing)
    record = RankRecord(ProcessIdentity(7, 1.0), "socket", "log", 5, 3, "origin")
    asyncio.run(job._take_rank_exit(0, KILLED, RankState(record, RankPulse(0.0), 5, 3, stage=RankStage.CUTTING_OVER)))
    said = [(lost.generation, lost.rank, lost.stage, lost.reason) for lost in job._lost.values()]
    assert said == [(5, 3, RankStage.FAILED, KILLED)] * is_told


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (Reason("the world cannot go on: out of memory", "switch", 3), None),
        (replace(KILLED, rank=1, node="b"), FailureCause(FailedPart.PEER)),
        (None, None),
    ],
    ids=["by itself", "by another", "without a reason"],
)
def test_a_rank_that_says_itself_that_it_is_broken_is_dead_for_the_others_before_its_process_has_ended(
    scene: Scene, reason: Reason | None, cause: FailureCause | None
) -> None:
    node = cast(Any, scene.node)
    node.sync_with_progress = _nothing_now
    node.journal = SimpleNamespace(put=_nothing_now)
    node.supervisor = SimpleNamespace(states={}, stop=_nothing)
    job = JobDriver(scene.node, JOB_ID)
    job._host._slot(0).occupied = True
    source, target = roster_of(1, FOUR), roster_of(2, FOUR)
    order = replace(order_of(generation=2), parent=1, source=source, target=target, proposer_id="d")
    promise = Promise(order.handoff_id, 2, 1, Phase.PERMIT)
    job.slots._add(0, ParticipantRecord(active=source, highest_generation=2, order=order, promise=promise))
    job.slots.participants[0].state = ParticipantState.CUTTING_OVER
    said = StageReport(handoff_id=HANDOFF, generation=2, rank=3, stage=RankStage.BROKEN, reason=reason)
    asyncio.run(job._take_rank_event(0, said, None))
    bodies = [(envelope.receiver, envelope.body) for _, envelope in scene.peers.sent]
    deaths = [(to, body.death) for to, body in bodies if isinstance(body, DeathBody)]
    assert {(to, death.generation) for to, death in deaths} == {(to, world) for to in "abc" for world in (1, 2)}
    assert {(death.member, death.reason.node, death.reason.cause) for _, death in deaths} == {
        (Member("d", 0), "d", cause)
    }
    assert job.slots.participants[0].record.active is None
    assert job._host.is_condemned(0), "its end would be said again"


def test_a_newcomer_that_is_told_to_end_at_the_boundary_is_a_death_for_those_that_wait_for_it(scene: Scene) -> None:
    """The job is suspended, for one: the others may have agreed on the boundary before they hear of it."""
    job = JobDriver(scene.node, JOB_ID)
    order = replace(order_of(generation=2), parent=1, source=roster_of(1, FOUR[:3]), target=roster_of(2, FOUR))
    for phase in (Phase.PREPARE, Phase.PERMIT):
        promise = Promise(order.handoff_id, 2, 1, phase)
        record = ParticipantRecord(highest_generation=2, order=replace(order, phase=phase), promise=promise)
        job.slots.participants[0] = restored(record)
        job._host.condemn(0)
        process = RankRecord(ProcessIdentity(7, 1.0), "socket", "log", 2, 3, "origin")
        job.slots.take_death = cast(Any, _nothing)
        asyncio.run(job._take_rank_exit(0, KILLED, RankState(process, RankPulse(0.0), 2, 3, stage=RankStage.READY)))
        assert bool(scene.peers.sent) is (phase is Phase.PERMIT)


async def _nothing(*_: object) -> None:
    """The participant's part is tested elsewhere."""


def _nothing_now(*_: object) -> None:
    """The journal's part is tested elsewhere."""


@pytest.mark.real
@pytest.mark.timeout(180)
def test_ranks_on_other_nodes_hear_within_a_second_that_one_was_killed() -> None:
    with cluster("a", "b", "c") as nodes:
        nodes.wait_training(1, ("a", "b", "c"))
        victim = nodes.rank("c")
        assert victim is not None
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        nodes.wait(lambda: all("rank 2 on c" in _ranks_log(nodes, name) for name in "ab"), "the word of the agent", 10)
        assert time.monotonic() - began < 1.0
        assert "was killed by SIGKILL" in _ranks_log(nodes, "a")


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.real
@pytest.mark.timeout(240)
def test_ranks_that_train_end_with_the_name_of_the_one_that_was_killed(tmp_path: Path) -> None:
    args = {"data_prefix": build_corpus(tmp_path), "micro_batch_s": 0.05}
    job = real_job("deaths", "SlowJob", args, global_batch=8, micro_batch=2)
    with cluster("a", "b", job=job, ranks=REAL_RANKS) as nodes:
        nodes.wait_training(1, ("a", "b"))
        victim = nodes.rank("b")
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        lost = nodes.wait(lambda: (rank := nodes.rank("a")) and rank.stage is RankStage.FAILED and rank, "its end")
        assert lost.reason is not None and lost.reason.cause is not None
        assert lost.reason.cause.what is FailedPart.PEER, "it is not what failed first"
        assert "the world cannot go on: rank 1 on b is dead: rank process" in lost.reason.text
        assert "was killed by SIGKILL" in lost.reason.text


def _ranks_log(nodes: Cluster, name: str) -> str:
    return "".join(path.read_text() for path in (nodes.directory / name).glob("logs/**/*.log"))
