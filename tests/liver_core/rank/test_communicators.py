"""Communicators of the next world are made at one boundary that all ranks agree on, and never in the pause. Ranks here
take themselves for ranks with a GPU each, over a model of NCCL that refuses what would hang."""

from __future__ import annotations

import pytest

from tests.cluster.rank_cluster import Cluster, Rank, RankSetup
from tests.cluster.real_ranks_model import small_gpt

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def test_survivors_newcomers_and_leavers_make_them_together_while_training_stands_at_a_boundary(corpus: str):
    with Cluster(RankSetup(small_gpt(corpus), model_nccl=True, trace=True)) as cluster:
        first = cluster.launch("DP2", "ab")
        leaver, survivor = (cluster.ranks[member] for member in first.members)
        at_start = [len(_made(rank)) for rank in (leaver, survivor)]
        request = cluster.handoff("TP2", "bc")
        newcomer = cluster.ranks[request.target.members[1]]
        assert at_start == [1, 1], "that of the first world"
        assert [len(_made(rank)) for rank in (leaver, survivor, newcomer)] == [1, 2, 1]
        for rank in (leaver, survivor, newcomer):
            assert all(not paused and stands for _, _, paused, stands in _made(rank))
        said = [event[0] if event[0] != "stage" else event[2] for event in survivor.events]
        made_at = len(said) - 1 - said[::-1].index("communicator")
        assert said.index("prepared", said.index("active")) < made_at < said.index("cutting_over", made_at)


def test_a_rank_that_cannot_make_them_aborts_the_handoff_and_training_goes_on(corpus: str):
    with Cluster(RankSetup(small_gpt(corpus), model_nccl=True)) as cluster:
        first = cluster.launch("DP2", "ab")
        cluster.command(first.members, "refuse_communicators")
        request = cluster.open("TP2", "ab")
        cluster.await_stage(first.members, request, "prepared", 60)
        cluster.command(first.members, "permit", request.handoff_id, 1)
        cluster.await_stage(first.members, request, "aborted", 60)
        for member in first.members:
            rank = cluster.ranks[member]
            reason = next(event[3] for event in rank.events if event[0] == "stage" and event[2] == "aborted")
            assert "communicators: no memory for a communicator" in reason
            steps = len([event for event in rank.events if event[0] == "step"])
            cluster.wait_for(
                lambda rank=rank, steps=steps: len([event for event in rank.events if event[0] == "step"]) > steps,
                30,
                f"a step of {member}",
            )


def _made(rank: Rank) -> list[tuple]:
    return [event for event in rank.events if event[0] == "communicator"]
