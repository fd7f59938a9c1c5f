"""What is due after a step is due after one that is handed over too: its checkpoint, the user's hook, the job's end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff.messages import Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.rank.support.chain import World, gather
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.rank.support.hooked_job import notes_of
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

HANDED = 12
"""The step that is handed over: the sources are held with its gradients reduced until everybody is ready. Late enough
that state has streamed before, which it does only while steps are made."""
WORLDS = (World("PP2", "ab"), World("TP2", "bc"))
JOB = "tests.liver_core.rank.support.hooked_job:HookedJob"


def hand_over_step(cluster: Cluster, rung: Rung = Rung.STOP_AND_COPY, layout: str = "TP2", nodes: str = "bc") -> Any:
    """Hand over exactly the step HANDED; returns the order once everybody has permission."""
    assert cluster.roster is not None
    sources = cluster.roster.members
    request = _prepared(cluster, rung, layout, nodes) if rung is Rung.LIVE else None
    if request is None:  # Whoever streams has to follow the steps.
        cluster.command(sources, "hurry", HANDED)
    for member in sources:
        cluster.await_passage(member, f"step {HANDED - 1}")
    request = request or _prepared(cluster, rung, layout, nodes)
    members = cluster.members(request)
    cluster.command(members, "permit", request.handoff_id, 1)
    cluster.await_stage(members, request, "ready", 20)
    cluster.command(sources, "release")
    return request


def _prepared(cluster: Cluster, rung: Rung, layout: str, nodes: str) -> Any:
    request = cluster.open(layout, nodes, rung=rung)
    cluster.await_stage(cluster.members(request), request, "prepared", 40)
    if rung is Rung.LIVE:
        assert cluster.verdict(request.target.members[0], request) == (str(rung), "")
    return request


def setup_of(corpus: str, folder: Path, **changes: Any) -> RankSetup:
    notes = folder / "notes"
    notes.mkdir()
    arguments = small_gpt(corpus, num_layers=2) | {"notes": str(notes)}
    settings = {
        "job": JOB,
        "global_batch": 4,
        "hold_at": (HANDED - 1,),
        "validate_every": HANDED,
        "checkpoints": (str(folder), 1, 100),
    }
    return RankSetup(arguments, **settings | changes)


@pytest.mark.parametrize(
    ("rung", "layout"), sample([(Rung.STOP_AND_COPY, "TP2"), (Rung.LIVE, "DP2")], (Rung.LIVE, "DP2"))
)
def test_the_step_handed_over_has_its_checkpoint_and_its_hooks_after_the_pause(
    corpus: str, tmp_path: Path, rung: Rung, layout: str
):
    setup = setup_of(corpus, tmp_path, record=True)
    if layout == "DP2":
        # Between a step and the next forward pass a rank has only its own part of the weights.
        setup = replace(setup, pace_s=0.8)
        setup.job_arguments.update(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=20_000)
    with Cluster(setup) as cluster:
        cluster.launch(WORLDS[0].layout, WORLDS[0].nodes)
        request = hand_over_step(cluster, rung, layout)
        cluster.await_stage(request.target.members, request, "active", 40)
        cluster.command(cluster.members(request), "retire", request.handoff_id)
        cluster.roster = request.target
        cluster.await_step(WORLDS[1].first, HANDED + 2)
        cluster.stop()
        chain = gather(cluster, WORLDS)
        measures = [cluster.stages(member, request.handoff_id)[-1][2] for member in request.target.members]
        checkpointed = [event[2] for event in cluster.ranks[WORLDS[1].first].events if event[0] == "checkpointed"]
    assert chain.handed_step(2) == HANDED
    last = chain.steps[-1][1]
    written = sorted(int(entry.name.removeprefix("step-")) for entry in tmp_path.glob("step-*"))
    assert written == list(range(1, last + 1))
    assert HANDED in checkpointed
    assert_holds_the_step_handed_over(setup, tmp_path, chain)
    assert_hooks_ran_outside_the_pause(tmp_path, chain, max(said["first_forward_at_utc"] for said in measures))


def assert_hooks_ran_outside_the_pause(folder: Path, chain: Any, pause_ends: float) -> None:
    last = chain.steps[-1][1]
    for rank in range(2):
        notes = notes_of(folder / "notes", 2, rank)
        hooks = {name: [note["step"] for note in notes if note["hook"] == name] for name in ("on_step", "validate")}
        assert hooks == {"on_step": [*range(HANDED, last + 1)], "validate": [HANDED]}
        handed = [note for note in notes if note["step"] == HANDED]
        assert [note["hook"] for note in handed] == ["on_step", "validate"]
        assert all(note["at"] >= pause_ends for note in handed)
        assert handed[0]["loss"] == chain.losses()[HANDED]
        # This job's steps draw nothing, and what its validation draws is put back.
        assert len({note["stream"] for note in notes if note["hook"] == "on_step"}) == 1


def assert_holds_the_step_handed_over(setup: RankSetup, folder: Path, chain: Any) -> None:
    """A world that begins from its checkpoint has the bits that the next world had after that step."""
    path = folder / f"step-{HANDED:09d}"
    small = json.loads((path / "liver_small_state.json").read_text())
    assert (small["step"], small["consumed_samples"]) == (HANDED, HANDED * setup.global_batch)
    with Cluster(RankSetup(setup.job_arguments, record=True, job=JOB, global_batch=4, last_step=HANDED + 1)) as again:
        again.launch("TP2", "xy", checkpoint=str(path))
        again.finish()
        back = gather(again, (World("TP2", "xy"),))
    held = {name: part for name, part in back.state("target", 1).items() if not name.startswith("grad")}
    assert differences(chain.state("stepped", 2), held) == []
    assert small.pop("author") == {"job_id": "job", "generation": 2}
    assert back.records[("switched", 1)][0]["small"] == small


def test_a_job_whose_last_step_is_handed_over_ends_with_it(corpus: str, tmp_path: Path):
    """The handoff is complete, the leaver may go, and no step is done beyond the last."""
    with Cluster(setup_of(corpus, tmp_path, last_step=HANDED)) as cluster:
        cluster.launch(WORLDS[0].layout, WORLDS[0].nodes)
        request = hand_over_step(cluster)
        cluster.await_stage(request.target.members, request, "active", 40)
        cluster.command(cluster.members(request), "retire", request.handoff_id)
        results = cluster.finish()
    ends = {member.node_id: (result["how"], result["step"]) for member, result in results.items()}
    assert {node: how for node, (how, _) in ends.items()} == {"a": "left", "b": "finished", "c": "finished"}
    assert {step for node, (_, step) in ends.items() if node != "a"} == {HANDED}
    assert (tmp_path / f"step-{HANDED:09d}" / "metadata.json").is_file()


def test_a_world_that_begins_where_the_job_ends_does_no_step(corpus: str, tmp_path: Path):
    with Cluster(setup_of(corpus, tmp_path, hold_at=(), last_step=2)) as cluster:
        cluster.launch("PP2", "ab")
        cluster.finish()
    path = str(tmp_path / "step-000000002")
    notes = tmp_path / "again"
    notes.mkdir()
    with Cluster(setup_of(corpus, notes, hold_at=(), last_step=2)) as cluster:
        cluster.launch("TP2", "xy", checkpoint=path)
        results = cluster.finish()
        assert cluster.steps(Member("x", 0)) == []
    assert {(result["how"], result["step"]) for result in results.values()} == {("finished", 2)}


def test_the_work_ends_with_a_checkpoint_when_it_is_done_and_when_it_is_stopped(corpus: str, tmp_path: Path):
    """And one that somebody asked for is written at once, by all ranks at the same step."""
    rare = {"checkpoints": (str(tmp_path), 1_000, 10), "hold_at": ()}
    with Cluster(setup_of(corpus, tmp_path, last_step=3, **rare)) as cluster:
        cluster.launch("PP2", "ab")
        cluster.finish()
    assert sorted(entry.name for entry in tmp_path.glob("step-*")) == ["step-000000003"]
    with Cluster(RankSetup(small_gpt(corpus, num_layers=2), global_batch=4, **rare)) as cluster:
        members = cluster.launch("TP2", "ab", checkpoint=str(tmp_path / "step-000000003")).members
        first = members[0]
        cluster.await_step(first, 5)
        cluster.command(members, "checkpoint", 1)
        events = cluster.ranks[first].events
        cluster.wait_for(lambda: any(event[0] == "checkpointed" for event in list(events)), 30, "a checkpoint")
        ends = {result["step"] for result in cluster.stop().values()}
        written = [(event[2], event[4]) for event in events if event[0] == "checkpointed"]
    (end,) = ends
    (asked, number), *at_end = written
    assert (number, 5 < asked < end, at_end) == (1, True, [(end, 0)])
    steps = {int(entry.name.removeprefix("step-")) for entry in tmp_path.glob("step-*")}
    assert steps == {3, asked, end}


def test_a_job_file_that_asks_for_a_validation_that_is_not_there_is_refused(corpus: str):
    setup = RankSetup(small_gpt(corpus, num_layers=2), validate_every=5)
    with Cluster(setup) as cluster, pytest.raises(AssertionError, match="GptJob has no method validate"):
        cluster.launch("TP1", "a")
