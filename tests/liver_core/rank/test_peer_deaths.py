"""A rank that is told of a dead peer stops waiting for it, within a second, and says who it was.

The words are those of an agent. NCCL is a model in which a collective comes back when its communicator is aborted.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from liver_core.handoff.messages import FailedPart, FailureCause, Reason
from liver_core.layout import Member, ParallelLayout, Roster
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
SECOND = 1.0
A, B = Member("a", 0), Member("b", 0)
KILLED = FailureCause(FailedPart.RANK, "SIGKILL", step=3)


def death(generation: int = 1, member: Member = B, cause: FailureCause = KILLED, text: str = "it was killed") -> Any:
    from liver_core.worlds.peer_deaths import PeerDeath

    return PeerDeath(generation, member, Reason(text, "training", 1, node=member.node_id, cause=cause))


def world(generation: int = 1) -> Any:
    said: list[str] = []
    roster = Roster("job", generation, ParallelLayout(dp=2), (A, B))
    return SimpleNamespace(roster=roster, nccl=SimpleNamespace(abandon=said.append), said=said)


def test_only_the_communicators_of_the_world_that_lost_a_rank_are_ended() -> None:
    from liver_core.worlds.peer_deaths import PeerDeaths, PeerGone

    deaths, before, active, gloo = PeerDeaths(), world(1), world(2), world(2)
    gloo.nccl = None
    deaths.note(death(2), (before, active, gloo))
    deaths.note(death(2, Member("z", 0)), (before, active, gloo))
    assert (before.said, active.said) == ([], ["rank 1 on b is dead: it was killed"])
    deaths.check(before)
    for lost in (active, gloo):
        with pytest.raises(PeerGone, match="rank 1 on b is dead"):
            deaths.check(lost)


def test_the_rank_that_died_by_itself_is_named_before_those_that_only_missed_it() -> None:
    from liver_core.worlds.peer_deaths import PeerDeaths

    deaths, felt = PeerDeaths(), FailureCause(FailedPart.PEER)
    deaths.note(death(member=A, cause=felt, text="it missed a peer"), ())
    deaths.note(death(), ())
    named = deaths.named(Reason("closed by peer", "boundary", 0, cause=felt), world().roster)
    assert (named.rank, named.node, named.cause) == (1, "b", KILLED)
    assert named.text == "rank 1 on b is dead: it was killed"


def test_a_rank_that_misses_a_peer_waits_a_little_for_the_word_of_its_agent_and_no_other_rank_does() -> None:
    from liver_core.worlds.peer_deaths import NAMED_WITHIN_S, PeerDeaths

    deaths, own = PeerDeaths(), Reason("out of memory", "training", 0)
    began = time.monotonic()
    assert deaths.named(own, world().roster) == own
    assert time.monotonic() - began < NAMED_WITHIN_S / 2
    missed = replace(own, cause=FailureCause(FailedPart.PEER))
    threading.Timer(NAMED_WITHIN_S / 4, deaths.note, (death(), ())).start()
    assert deaths.named(missed, world().roster).node == "b"
    began = time.monotonic()
    assert deaths.named(missed, world(5).roster) == missed
    assert time.monotonic() - began < 2 * NAMED_WITHIN_S


def test_a_world_that_takes_over_while_a_death_is_noted_is_not_missed() -> None:
    from liver_core.rank.loop import RankLoop
    from liver_core.worlds.peer_deaths import PeerDeaths

    class Switching:
        """The next world takes over between the look at one and the look at the other."""

        deaths = PeerDeaths()

        def __init__(self) -> None:
            self.pending, self.before, self.next = self, world(1), world(2)
            self.looked_at_active = self.switched = False

        def worlds(self) -> tuple[Any, ...]:
            self.switched = True
            return () if self.looked_at_active else (self.next,)

        @property
        def active(self) -> Any:
            self.looked_at_active = True
            return SimpleNamespace(world=self.next if self.switched else self.before)

    rank: Any = Switching()
    RankLoop.peer_died(rank, death(2))
    assert rank.next.said and not rank.before.said


def test_a_rescue_makes_no_communicators_with_a_rank_that_is_known_to_be_dead() -> None:
    from liver_core.rank.prepare.preparation import Preparation
    from liver_core.rank.rescue.rescue_preparation import RescuePreparation
    from liver_core.worlds.peer_deaths import PeerDeaths, PeerGone

    deaths, connected = PeerDeaths(), []
    deaths.note(death(2), ())
    rescue: Any = object.__new__(RescuePreparation)
    rescue._check_peers = deaths.check
    made: Any = SimpleNamespace(world=world(2), connect=lambda *since: connected.append(since))
    with mock.patch.object(Preparation, "_bring_up"), pytest.raises(PeerGone, match="rank 1 on b is dead"):
        rescue._bring_up(made)
    assert connected == []


def test_a_rank_that_waits_in_nccl_for_a_dead_one_ends_within_a_second_of_the_word_and_names_it(corpus: str) -> None:
    with Cluster(RankSetup(small_gpt(corpus), model_nccl=True)) as cluster:
        a, b = cluster.launch("DP2", "ab").members
        cluster.arm(a, "reduced", "wait in NCCL")
        cluster.await_passage(a, "reduced")
        cluster.kill(b)
        cluster.await_death(b)
        waits = cluster.ranks[a]
        waits.process.join(SECOND)
        assert waits.result is None and waits.process.is_alive(), "the model ended a collective by itself"
        told = time.monotonic()
        cluster.command([a], "peer_died", death(member=b))
        cluster.wait_for(lambda: waits.result is not None, 10, "the end of the survivor")
        assert time.monotonic() - told < SECOND
        assert waits.result is not None
        assert (waits.result["how"], waits.result["cause"]) == ("broken", "peer")
        assert "the world cannot go on: rank 1 on b is dead: it was killed" in waits.result["reason"]


def test_ranks_over_gloo_name_the_one_that_was_killed_within_a_second(corpus: str) -> None:
    with Cluster(RankSetup(small_gpt(corpus), global_batch=12, pace_s=0.05)) as cluster:
        a, b, c = cluster.launch("DP3", "abc").members
        cluster.kill(c)
        cluster.await_death(c)
        told = time.monotonic()
        cluster.command([a, b], "peer_died", death(member=c))
        for member in (a, b):
            rank = cluster.ranks[member]
            cluster.wait_for(lambda rank=rank: rank.result is not None, 10, f"the end of {member}")
            assert rank.result is not None and rank.result["how"] == "broken"
            assert "rank 1 on c is dead: it was killed" in rank.result["reason"], rank.result["reason"]
        assert time.monotonic() - told < SECOND


def test_a_leaver_that_dies_in_the_pause_costs_little_time_although_only_its_neighbours_notice(corpus: str) -> None:
    """The others would wait for it as long as the pause may take, 14 s here."""
    with Cluster(RankSetup(small_gpt(corpus), global_batch=24)) as cluster:
        world = cluster.launch("DP4", "abcd")
        leaver = world.members[3]
        word = death(1, leaver)
        request = cluster.open("DP3", "abc")
        everyone = cluster.members(request)
        cluster.await_stage(everyone, request, "prepared", 60)
        cluster.arm(leaver, "norm", "hold")
        for member in request.target.members:
            cluster.arm(member, "state read", "tell")
        cluster.command(everyone, "permit", request.handoff_id, 1)
        cluster.await_passage(leaver, "norm")
        for member in request.target.members:
            cluster.await_passage(member, "state read")
        cluster.kill(leaver)
        cluster.await_death(leaver)
        told = time.monotonic()
        cluster.command(request.target.members, "peer_died", word)
        for member in request.target.members:
            cluster.await_stage([member], request, "active", 40)
        assert time.monotonic() - told < 2.0


def test_a_rank_of_the_next_world_that_dies_while_communicators_are_made_ends_the_handoff_and_is_named(
    corpus: str,
) -> None:
    with Cluster(RankSetup(small_gpt(corpus), global_batch=12, model_nccl=True)) as cluster:
        cluster.launch("DP2", "ab")
        request = cluster.open("DP3", "abc")
        everyone = cluster.members(request)
        cluster.await_stage(everyone, request, "prepared", 60)
        newcomer = everyone[2]
        cluster.kill(newcomer)
        cluster.await_death(newcomer)
        survivors = everyone[:2]
        cluster.command(survivors, "peer_died", death(2, newcomer))
        cluster.command(survivors, "permit", request.handoff_id, 1)
        cluster.await_stage(survivors, request, "aborted", 20)
        for member in survivors:
            reason = next(why for stage, why, _ in cluster.stages(member, request.handoff_id) if stage == "aborted")
            assert "connect: rank 1 on c is dead: it was killed" in reason
            done = len(cluster.steps(member))
            cluster.wait_for(lambda m=member, n=done: len(cluster.steps(m)) > n, 30, f"a step of {member} after it")
