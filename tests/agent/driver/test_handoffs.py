"""Handoffs across real agent processes; the ranks are real processes that train nothing.

What leaves a job so that it can go on shares one with other tests, in their order: starting agents takes longer than a
handoff.
"""

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from agent.main import EXIT_BROKEN
from agent.protocol.sync import DesiredState, SourceState
from agent.protocol.values import HandoffState
from agent.supervisor.process import is_alive
from liver_core.handoff import FailedPart, FailureCause, RankStage
from tests.agent.cluster import JOB_ID, Cluster, cluster, identity_of
from tests.tiers import sample

pytestmark = [pytest.mark.timeout(180), pytest.mark.real]
FOUR = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    """A job that two notices come to, one after the other."""
    with cluster(*FOUR) as nodes:
        yield nodes


def test_a_notice_moves_the_job_from_four_nodes_to_three_without_restarting_a_survivor(four: Cluster) -> None:
    nodes = four
    nodes.wait_training(1, FOUR)
    survivors = {name: identity_of(nodes.rank(name)) for name in FOUR[:3]}  # type: ignore[arg-type]
    nodes.announce("d")
    done = nodes.wait_handoff(HandoffState.ACTIVE)
    assert (done.parent, done.generation, done.leaving, str(done.target.layout)) == (1, 2, ("d",), "TP1xPP3xDP1")
    assert done.proposer == "a"
    nodes.wait_training(2, FOUR[:3])
    assert {name: identity_of(nodes.rank(name)) for name in FOUR[:3]} == survivors  # type: ignore[arg-type]
    nodes.wait(lambda: nodes.rank("d") is None, "the end of the leaver")
    done = nodes.wait(
        lambda: next(
            (
                m
                for m in nodes.service.handoffs(HandoffState.ACTIVE)
                if m.measures.lost_s is not None and m.measures.bytes_moved == 3_000
            ),
            None,
        ),
        "the lost time and the bytes of all three",
    )
    measures = done.measures
    assert measures.pause_s == 0.05
    assert measures.notice_to_safe_s is not None and measures.notice_to_safe_s < 30
    assert {"to_ready", "to_boundary", "to_active", "prepare"} <= set(measures.phases_s)
    assert "standing plan" in nodes.log_of("a")


def test_a_service_that_died_before_the_notice_learns_of_the_handoff_later(four: Cluster) -> None:
    """d has gone in the test before, which a led; a is rank 0."""
    nodes = four
    nodes.wait_training(2, FOUR[:3])
    nodes.service.stop()
    known = set(nodes.service.mirrors)
    nodes.announce("a")
    nodes.wait(lambda: "ended active" in nodes.log_of("b"), "the handoff without a service")
    assert set(nodes.service.mirrors) == known
    nodes.service.start()
    done = nodes.wait_handoff(HandoffState.ACTIVE, 2)
    assert (done.proposer, done.leaving, done.generation) == ("b", ("a",), 3)
    nodes.wait_training(3, ("b", "c"))
    logs = nodes.service.logs
    last_words = nodes.wait(lambda: [logs[key] for key in logs if key[1] == 0 and logs[key]], "the leaver's log")
    assert "stopped:" in last_words[0]


@pytest.mark.parametrize("victim", sample(["a", "b"], "a"))
def test_an_agent_killed_in_the_middle_of_a_handoff_comes_back_and_the_handoff_goes_on(victim: str) -> None:
    with cluster(*FOUR, faults={"c": "slow_prepare"}) as nodes:
        nodes.wait_training(1, FOUR)
        before = identity_of(nodes.rank(victim))  # type: ignore[arg-type]
        nodes.announce("d")
        opened = nodes.wait_handoff(HandoffState.PREPARING)
        for name in FOUR:  # One that has not heard of this handoff may lead another one meanwhile.
            journal = nodes.directory / name / "journal.jsonl"
            nodes.wait(lambda journal=journal: str(opened.handoff_id) in journal.read_text(), f"the order at {name}")
        nodes.kill_agent(victim)
        assert is_alive(before)
        nodes.start_agent(victim)
        done = nodes.wait_handoff(HandoffState.ACTIVE)
        assert done.generation == 2
        nodes.wait_training(2, FOUR[:3])
        assert identity_of(nodes.rank(victim)) == before  # type: ignore[arg-type]


def test_a_second_notice_amends_the_handoff_although_it_is_for_the_lead_and_one_generation_answers_both() -> None:
    with cluster(*FOUR, faults={"b": "slow_prepare"}) as nodes:
        nodes.wait_training(1, FOUR)
        nodes.announce("d")
        first = nodes.wait_handoff(HandoffState.PREPARING)
        assert first.proposer == "a"
        nodes.announce("a")
        done = nodes.wait_handoff(HandoffState.ACTIVE)
        assert (done.handoff_id, done.generation, done.plan_revision) == (first.handoff_id, 2, 2)
        assert (done.leaving, str(done.target.layout), done.superseded) == (("a", "d"), "TP1xPP2xDP1", False)
        assert len(nodes.service.mirrors) == 1
        nodes.wait_training(2, ("b", "c"))
        nodes.wait(lambda: nodes.rank("a") is None and nodes.rank("d") is None, "the end of both leavers")


@pytest.mark.thorough
def test_a_second_notice_after_permission_takes_it_back_and_amends_the_handoff() -> None:
    with cluster("a", "b", "c", spares=("e",), faults={"a": "long_step"}) as nodes:
        nodes.service.spares = ("e",)
        nodes.wait_training(1, ("a", "b", "c"))
        nodes.announce("c")
        first = nodes.wait_handoff(HandoffState.READY)
        assert first.target.node_ids() == ("a", "b", "e")
        newcomer = identity_of(nodes.wait(lambda: nodes.rank("e"), "the newcomer"))
        nodes.announce("b")
        done = nodes.wait_handoff(HandoffState.ACTIVE)
        assert (done.handoff_id, done.generation, done.plan_revision) == (first.handoff_id, 2, 2)
        assert (done.target.node_ids(), done.leaving, done.superseded) == (("a", "e"), ("b", "c"), False)
        assert len(nodes.service.mirrors) == 1
        nodes.wait_training(2, ("a", "e"))
        assert identity_of(nodes.rank("e")) == newcomer  # type: ignore[arg-type]


@pytest.mark.parametrize("service", sample(["is there", "is away"], "is away"))
def test_a_notice_for_every_node_of_a_job_is_answered_by_one_that_comes(service: str) -> None:
    with cluster("a", spares=("e",)) as nodes:
        nodes.service.spares = ("e",)
        nodes.wait_training(1, ("a",))
        if service == "is away":
            a, e = (nodes.directory / name / "journal.jsonl" for name in ("a", "e"))
            nodes.wait(lambda: "one node less" in e.read_text(), "the plan at the spare")
            nodes.wait(lambda: '"e":"http' in a.read_text(), "the address of the spare at the node that goes")
            nodes.wait(lambda: '"a":"http' in e.read_text(), "the address of the node that goes at the spare")
            nodes.service.stop()
        nodes.announce("a")
        nodes.wait(lambda: "ended active" in nodes.log_of("e"), "the handoff")
        if service == "is away":
            nodes.service.start()
        done = nodes.wait_retired()
        assert (done.proposer, done.leaving, done.target.node_ids()) == ("e", ("a",), ("e",))
        assert done.measures.notice_to_safe_s is not None and done.measures.lost_s is None, "e made no step before"
        nodes.wait_training(2, ("e",))
        nodes.wait(lambda: nodes.rank("a") is None, "the end of the leaver")


def test_a_rank_that_dies_while_preparing_aborts_the_handoff_with_its_name_and_the_world_is_told_lost() -> None:
    with cluster(*FOUR, faults={"b": "dies_preparing"}) as nodes:
        nodes.wait_training(1, FOUR)
        nodes.announce("d")
        aborted = nodes.wait_handoff(HandoffState.ABORTED)
        assert aborted.reason is not None
        assert aborted.reason.rank == 1
        assert "exit code 17" in aborted.reason.text
        failed = nodes.wait(lambda: nodes.service.failed, "the lost rank")
        assert (failed[0].rank, failed[0].generation) == (1, 1)


@pytest.mark.thorough
def test_a_rank_that_cannot_prepare_aborts_the_handoff_and_the_job_trains_on() -> None:
    with cluster(*FOUR, faults={"b": "cannot_prepare"}) as nodes:
        nodes.wait_training(1, FOUR)
        nodes.announce("d")
        aborted = nodes.wait_handoff(HandoffState.ABORTED)
        assert aborted.reason is not None and "planted: no memory" in aborted.reason.text
        steps = len(nodes.service.steps)
        nodes.wait(lambda: len(nodes.service.steps) > steps + 5, "further steps")
        nodes.wait_training(1, FOUR)


def test_a_store_that_dies_while_ranks_prepare_aborts_the_handoff_at_once_and_is_named() -> None:
    with cluster(*FOUR, faults={"b": "never_prepared"}) as nodes:
        nodes.wait_training(1, FOUR)
        nodes.announce("d")
        opened = nodes.wait_handoff(HandoffState.PREPARING)
        died_at = time.monotonic()
        os.kill(_store_pid(nodes, "a", opened.generation), signal.SIGKILL)
        aborted = nodes.wait_handoff(HandoffState.ABORTED)
        assert time.monotonic() - died_at < 3.0
        assert aborted.reason is not None
        assert aborted.reason.text == "the store of generation 2 on node a died"
        assert aborted.reason.cause == FailureCause(FailedPart.STORE)
        nodes.wait(lambda: any(mirror.generation == 3 for mirror in nodes.service.mirrors.values()), "another attempt")


@pytest.mark.thorough
def test_an_agent_whose_journal_cannot_be_written_ends_and_says_so_wherever_it_notices() -> None:
    """It opens a handoff, and it is a task of its own that finds the disk full. The next agent goes on."""
    with cluster(*FOUR) as nodes:
        nodes.wait_training(1, FOUR)
        nodes.fill_disk("a")
        nodes.announce("d")
        assert nodes.agents["a"].wait(timeout=20) == EXIT_BROKEN
        nodes.start_agent("a")
        assert nodes.wait_handoff(HandoffState.ACTIVE).leaving == ("d",)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["stopped", "not named any more"])
def test_no_store_is_left_of_a_job_that_ended_in_a_world_from_a_handoff(how: str) -> None:
    with cluster(*FOUR[:3]) as nodes:
        nodes.wait_training(1, FOUR[:3])
        nodes.announce("c")
        nodes.wait_handoff(HandoffState.ACTIVE)
        nodes.wait_training(2, FOUR[:2])
        nodes.service.desired = DesiredState.STOP
        nodes.wait(lambda: nodes.rank("a") is None and nodes.rank("b") is None, "the end of the ranks")
        nodes.service.disowns = how == "not named any more"
        nodes.wait(lambda: not any(nodes.service.stores[name] for name in FOUR[:3]), "the end of the stores", 10.0)


@pytest.mark.thorough
def test_a_stopped_job_ends_on_every_node_and_a_finished_one_says_so() -> None:
    with cluster("a", "b") as nodes:
        nodes.wait_training(1, ("a", "b"))
        nodes.service.desired = DesiredState.STOP
        nodes.wait(lambda: nodes.rank("a") is None and nodes.rank("b") is None, "the end of the ranks")
    with cluster("a", steps=60) as nodes:
        assert nodes.wait(lambda: nodes.service.finished, "the end of the job")[0] == 60
        assert nodes.wait(lambda: len([loss for loss in nodes.service.steps.values() if loss]) == 60, "all losses")


@pytest.mark.thorough
def test_a_node_whose_notice_is_withdrawn_is_used_again_and_its_next_notice_is_heard() -> None:
    """Its agent is killed in between: what it remembers comes from its journal."""
    with cluster("a", "b", "c", "d") as nodes:
        nodes.wait_training(1, FOUR)
        nodes.announce("d")
        nodes.wait_handoff(HandoffState.ACTIVE)
        nodes.wait(lambda: nodes.rank("d") is None, "the end of the leaver")
        nodes.metadata["d"].instance.change({"do": "clear"})
        nodes.wait(lambda: not nodes.service.going(), "the withdrawal")
        nodes.kill_agent("d")
        nodes.start_agent("d")
        nodes.service.propose(FOUR)
        assert nodes.wait_handoff(HandoffState.ACTIVE, 2).target.node_ids() == FOUR
        nodes.wait_training(3, FOUR)
        nodes.announce("c")
        done = nodes.wait_handoff(HandoffState.ACTIVE, 3)
        assert (done.leaving, done.superseded) == (("c",), False), "d stays"
        nodes.wait_training(4, ("a", "b", "d"))
        nodes.announce("d")
        done = nodes.wait_handoff(HandoffState.ACTIVE, 4)
        assert (done.leaving, done.generation) == (("d",), 5)
        assert not nodes.service.handoffs(HandoffState.ABORTED)


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """A job of two nodes; a third one runs an agent."""
    with cluster("a", "b", spares=("e",)) as nodes:
        yield nodes


def test_a_metadata_service_that_fails_is_reported_as_unknown(pair: Cluster) -> None:
    nodes = pair
    nodes.wait_training(1, ("a", "b"))
    nodes.metadata["a"].instance.change({"do": "mode", "mode": "error"})

    def state() -> SourceState:
        return nodes.service.notice_sources["a"].state

    nodes.wait(lambda: state() is SourceState.UNKNOWN, "the problem")
    assert "answered 500" in nodes.service.notice_sources["a"].reason
    nodes.metadata["a"].instance.change({"do": "mode", "mode": "ok"})
    nodes.wait(lambda: state() is SourceState.WATCHING, "the end of the problem")


def test_the_service_grows_a_job_to_a_new_node(pair: Cluster) -> None:
    nodes = pair
    nodes.wait_training(1, ("a", "b"))
    handoff_id = nodes.service.propose(("a", "b", "e"))
    done = nodes.wait_handoff(HandoffState.ACTIVE)
    assert (done.handoff_id, done.plan_digest, done.leaving) == (handoff_id, "grow", ())
    nodes.wait_training(2, ("a", "b", "e"))
    nodes.announce("e")
    nodes.wait_handoff(HandoffState.ACTIVE, 2)
    nodes.wait_training(3, ("a", "b"))


def test_a_rank_killed_from_outside_is_told_as_lost_and_not_started_again(pair: Cluster) -> None:
    """It has grown and shrunk in the test before."""
    nodes = pair
    nodes.wait_training(3, ("a", "b"))
    rank = nodes.rank("b")
    assert rank is not None
    os.kill(rank.pid, signal.SIGKILL)
    failed = nodes.wait(lambda: nodes.service.failed, "the lost rank")[0]
    assert failed.reason is not None and "SIGKILL" in failed.reason.text
    assert (failed.rank, failed.generation) == (1, 3)


def _store_pid(nodes: Cluster, name: str, generation: int) -> int:
    """The process of a store, from the journal of the node that hosts it."""
    lines = (nodes.directory / name / "journal.jsonl").read_text().splitlines()
    changes = [json.loads(line.partition(" ")[2]) for line in lines]
    (store,) = [each["v"] for each in changes if each["t"] == "store" and each["k"] == f"{JOB_ID}/{generation}"]
    return store["process"]["pid"]


@pytest.mark.thorough
def test_a_leaver_that_is_stopped_while_its_state_moves_counts_as_dead_before_its_deadline() -> None:
    with cluster(*FOUR, faults={"a": "long_step"}) as nodes:
        nodes.wait_training(1, FOUR)
        nodes.announce("d", 100.0)
        nodes.wait_handoff(HandoffState.READY)
        stopped = identity_of(nodes.rank("d"))  # type: ignore[arg-type]
        os.kill(stopped.pid, signal.SIGSTOP)
        nodes.wait(lambda: not is_alive(stopped), "the end of the rank")
        assert "on a node that goes, and was killed" in nodes.log_of("d")
        failed = nodes.wait(lambda: (rank := nodes.rank("d")) and rank.stage is RankStage.FAILED and rank, "its report")
        assert failed.ended is not None and failed.ended.signal == "SIGKILL"
