"""Checkpoints are written while training goes on, appear whole or not at all, and are loaded into any layout."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff import FailedPart, FailureCause, LaterCheckpoints
from liver_core.handoff.generations import replacing
from liver_core.layout import Member, ParallelLayout, Roster
from liver_core.rank.store_exchange import cause_of
from liver_core.state.checkpoint_files import Author, NewerStart, announce_start, author_of, starts_in
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks import run_alone
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.rank.support.chain import Chain, World, gather, load_with_megatron
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

STEPS = 14
EVERY = 4
KEEP = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def setup(corpus: str) -> RankSetup:
    return RankSetup(small_gpt(corpus), trace=True, last_step=STEPS)


@pytest.fixture(scope="module")
def written(setup: RankSetup, folder: Path) -> tuple[Chain, list[tuple]]:
    """A run on PP2xDP2 that writes a checkpoint every few steps; also what it said about them."""
    chain, said = _run_writing(setup, folder)
    return chain, said


@pytest.fixture(scope="module")
def alone(setup: RankSetup) -> Chain:
    return run_undisturbed(setup, "PP2xDP2", STEPS)


def test_writing_in_the_background_does_not_change_training(written: tuple[Chain, list[tuple]], alone: Chain):
    chain, said = written
    assert [event[2] for event in said] == [EVERY, 2 * EVERY, 3 * EVERY, STEPS]
    assert chain.losses() == alone.losses()
    assert chain.traces == alone.traces


def test_the_first_rank_of_each_of_three_nodes_tells_of_a_checkpoint():
    from liver_core.rank.checkpoint_writer import tellers

    members = tuple(Member(node, slot) for node in "bacd" for slot in (0, 1))
    assert tellers(Roster("j", 1, ParallelLayout(dp=8), members)) == (0, 2, 4)
    assert tellers(Roster("j", 1, ParallelLayout(dp=2), members[:2])) == (0,)


def test_only_the_newest_whole_checkpoints_stay(written: tuple[Chain, list[tuple]], folder: Path):
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-000000012", "step-000000014"]
    for entry in folder.iterdir():
        assert json.loads((entry / "liver_small_state.json").read_text())["step"] == int(entry.name[-2:])
        assert author_of(entry) == Author("job", 1)


def test_a_job_comes_back_in_another_layout_with_what_megatrons_own_loader_makes_of_it(
    setup: RankSetup, written: tuple[Chain, list[tuple]], alone: Chain, folder: Path
):
    path = str(folder / "step-000000012")
    back = RankSetup(setup.job_arguments, record=True, last_step=STEPS)
    with Cluster(back) as cluster:
        cluster.launch("TP2", "xy", checkpoint=path)
        cluster.finish()
        chain = gather(cluster, (World("TP2", "xy"),))
    (oracle,) = load_with_megatron(back, [(path, "TP2")])
    for rank, loaded in oracle.items():
        ours = chain.records[("switched", 1)][rank]["megatron"]
        assert ours.keys() == loaded["megatron"].keys()
        for name, tensors in loaded["megatron"].items():
            for kind, tensor in tensors.items():
                assert tensor.tobytes() == ours[name][kind].tobytes(), f"rank {rank}: {kind} of {name}"
    assert [(row[1], row[3], row[4]) for row in chain.steps] == [
        (row[1], row[3], row[4]) for row in alone.steps if row[1] > 12
    ]
    for step, loss in chain.losses().items():
        assert abs(loss - alone.losses()[step]) <= 2e-5


def test_a_checkpoint_that_was_removed_meanwhile_replacing_the_newest_one_that_the_job_has_written_since(
    setup: RankSetup, written: tuple[Chain, list[tuple]], folder: Path, tmp_path: Path
):
    """Whoever asks for it was away while the job went on."""
    shutil.copytree(folder, tmp_path / "job")
    later = LaterCheckpoints(folder=str(tmp_path / "job"), above=EVERY)
    with Cluster(replace(setup, last_step=STEPS + 2)) as cluster:
        cluster.launch("TP2", "xy", checkpoint=str(tmp_path / "job" / f"step-{EVERY:09d}"), later=later)
        cluster.finish()
        chain = gather(cluster, (World("TP2", "xy"),))
    assert [row[1] for row in chain.steps] == [STEPS + 1, STEPS + 2]


def test_no_rank_begins_from_a_checkpoint_of_which_a_file_was_cut_in_half(
    setup: RankSetup, written: tuple[Chain, list[tuple]], folder: Path, tmp_path: Path
):
    path = tmp_path / "step-000000014"
    shutil.copytree(folder / path.name, path)
    largest = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with Cluster(setup) as cluster:
        with pytest.raises(AssertionError, match="aborted") as failed:
            cluster.launch("TP1", "x", checkpoint=str(path))
    half = f"{largest.name} has {largest.stat().st_size} of "
    assert f"load state: DamagedCheckpoint: checkpoint {path} cannot be loaded: {half}" in str(failed.value)


@pytest.mark.parametrize(
    ("error", "is_damage"),
    [
        (EOFError(), True),
        (pickle.UnpicklingError("Weights only load failed"), True),
        (RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory"), True),
        (RuntimeError("[/pytorch/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4001"), False),
        (MemoryError(), False),
        (FileNotFoundError(2, "No such file or directory"), False),
        (ValueError("Global shape mismatch for loaded and expected tensor"), False),
    ],
)
def test_only_what_the_bytes_of_a_file_are_makes_a_checkpoint_damaged(error: BaseException, is_damage: bool):
    from torch.distributed.checkpoint.api import CheckpointException

    from liver_core.state.checkpoint_damage import is_torn

    said: Any = {1: (error, None)}
    assert is_torn(error) == is_torn(CheckpointException("read", said)) == is_damage


@pytest.mark.parametrize("missing", ["metadata.json", "liver_small_state.json"])
def test_half_a_checkpoint_is_refused_by_name(tmp_path: Path, missing: str):
    half = tmp_path / "step-000000003"
    half.mkdir()
    for name in {"metadata.json", "liver_small_state.json"} - {missing}:
        (half / name).write_text("{}")
    text = run_alone(_refusal, str(half))
    assert f"checkpoint {half}" in text and missing in text and "not a complete checkpoint" in text


def test_the_checkpoint_of_another_model_is_refused_with_path_and_reason(
    setup: RankSetup, written: tuple[Chain, list[tuple]], corpus: str, folder: Path
):
    """By field: the tensors of a model with as many heads of half the size would fit."""
    other = RankSetup(small_gpt(corpus, num_attention_heads=8), last_step=STEPS)
    path = str(folder / "step-000000012")
    with Cluster(other) as cluster:
        with pytest.raises(AssertionError, match="aborted") as failed:
            cluster.launch("TP1", "x", checkpoint=path)
    text = str(failed.value)
    assert "rank 0, load state: CheckpointError" in text and path in text
    assert "num_attention_heads is 4 there and 8 in the job's model; must be equal" in text


def test_two_worlds_that_write_the_same_step_at_once_leave_one_whole_checkpoint(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    assert run_alone(_written_by_two, str(folder)) == (1.0, 1.0), "the last to be complete, whole"
    assert [entry.name for entry in folder.iterdir()] == ["step-000000004"]


def _written_by_two(folder: str) -> tuple[float, float]:
    """World 2 writes all of step 4 while world 1 is writing it; world 1 has what another world left. The values of the
    tensor and of the small state."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from liver_core.state import checkpoint

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, path, save = dist.group.WORLD, f"{folder}/step-000000004", dist_checkpointing.save
    assert group is not None
    Path(f"{folder}/step-000000002.partial-0").mkdir(parents=True)

    def tensors(value: float) -> dict[str, ShardedTensor]:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}

    def interrupted(sharded: dict[str, ShardedTensor], partial: str) -> None:
        dist_checkpointing.save = save
        save(sharded, partial)
        checkpoint.write(tensors(2.0), {"step": 4, "value": 2.0}, path, group, generation=2)

    dist_checkpointing.save = interrupted
    checkpoint.write(tensors(1.0), {"step": 4, "value": 1.0}, path, group, generation=1)
    checkpoint.prune(Path(path), 2, generation=1)
    loaded: Any = dist_checkpointing.load(tensors(0.0), path)
    return float(loaded["w"].max()), checkpoint.read_small_state(path)["value"]


def test_a_checkpoint_is_published_only_while_a_rank_of_its_world_holds_a_step_lease(tmp_path: Path):
    """A newer world may have written the same step, or have started from it."""
    folder = tmp_path / "checkpoints"
    said, asked = run_alone(_written_without_a_lease, str(folder))
    assert "step-000000004: not published, no rank here has a step lease" in said[0]
    assert said[1:] == [2.0, 1.0], "the newer world's, and then the one that got its lease back"
    assert asked == 4, "twice without a lease before its ranks are to end, then without and with one"


def _written_without_a_lease(folder: str) -> tuple[list[Any], int]:
    """A newer world has written step 4. What happens to an older world's, and whose value is there after that."""
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from liver_core.state import checkpoint
    from liver_core.state.checkpoint_files import LeaseStanding

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, path = dist.group.WORLD, f"{folder}/step-000000004"
    assert group is not None
    standings = iter(
        (
            LeaseStanding(False, False),
            LeaseStanding(False, True),
            LeaseStanding(False, False),
            LeaseStanding(True, True),
        )
    )
    asked = 0

    def write(value: float, **how: Any) -> None:
        tensors = {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}
        checkpoint.write(tensors, {"step": 4, "value": value}, path, group, **how)

    def standing() -> LeaseStanding:
        nonlocal asked
        asked += 1
        return next(standings)

    said: list[Any] = []
    write(2.0, generation=100_001)
    try:
        write(1.0, generation=1, standing=standing)
    except checkpoint.CheckpointError as error:
        said.append(str(error))
    said.append(checkpoint.read_small_state(path)["value"])
    write(1.0, generation=1, standing=standing)
    return [*said, checkpoint.read_small_state(path)["value"]], asked


def test_no_checkpoint_is_published_where_a_newer_start_of_the_same_job_has_announced_itself(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    refused, left = run_alone(_written_beside_a_start, str(folder))
    assert "step-000000004: not written, " in refused and refused.endswith("a newer start of the job writes there")
    assert left == [3.0, 2.0], "a handoff's world and another job's are published"


def _written_beside_a_start(folder: str) -> tuple[str, list[float]]:
    """What is said of the world of an older start, and what two others leave."""
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from liver_core.state import checkpoint

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, said, left = dist.group.WORLD, "", []
    assert group is not None
    announce_start(Path(folder), "job", 100_001)
    for value, job_id, generation in ((1.0, "job", 7), (3.0, "job", 100_003), (2.0, "other", 7)):
        path = f"{folder}/step-000000004"
        tensors = {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}
        try:
            checkpoint.write(tensors, {"value": value}, path, group, job_id=job_id, generation=generation)
        except checkpoint.CheckpointError as error:
            said = str(error)
        else:
            left.append(checkpoint.read_small_state(path)["value"])
    return said, left


def test_the_newest_start_of_each_job_is_known_beside_its_checkpoints(tmp_path: Path):
    for job_id, generation in (("job", 1), ("job", 100_001), ("other", 1), ("job-1", 200_001)):
        announce_start(tmp_path / "new", job_id, generation)
    assert starts_in(tmp_path / "new", "job") == (100_001,)
    assert starts_in(tmp_path / "new", "other") == (1,)
    assert replacing((1, 100_001), 5) and not replacing((1, 100_001), 100_002)


def test_a_start_that_could_publish_no_checkpoint_fails_with_the_number_of_the_newer_one(tmp_path: Path):
    """As after the service was restored from a backup: it uses numbers again."""
    for generation in (200_001, 200_001):
        announce_start(tmp_path, "job", generation)
    announce_start(tmp_path, "other", 100_001)
    with pytest.raises(NewerStart, match=r"generation 100001 could publish .* generation 200001 of the job") as raised:
        announce_start(tmp_path, "job", 100_001)
    assert cause_of(raised.value) == FailureCause(FailedPart.START, newer_start=200_001)
    assert starts_in(tmp_path, "job") == (200_001,)


def test_what_a_replaced_world_wrote_later_does_not_push_out_the_checkpoint_that_is_the_newest_now(tmp_path: Path):
    run_alone(_pruned, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000000006", "step-000000008"]


def _pruned(folder: str) -> None:
    """Four checkpoints; the third has just been written, one is kept."""
    from liver_core.state.checkpoint import prune
    from liver_core.state.checkpoint_files import SMALL_STATE_FILE

    path = Path(folder)
    for step in (2, 4, 6, 8):
        (path / f"step-{step:09d}").mkdir()
        (path / f"step-{step:09d}" / SMALL_STATE_FILE).write_text("{}")
    prune(path / "step-000000006", 1)


def test_what_cannot_be_removed_is_said_looks_complete_to_nobody_and_is_tried_again(tmp_path: Path):
    said, names, later = run_alone(_pruned_without_rights, str(tmp_path))
    assert said == [f"{tmp_path}/step-000000002.partial-7 (Operation not permitted)"]
    assert names == ["step-000000002.partial-7", "step-000000004", "step-000000006"]
    assert later == ["step-000000003", "step-000000006"], "one is kept; a link is somebody else's"


def _pruned_without_rights(folder: str) -> tuple[list[str], list[str], list[str]]:
    """Three checkpoints of which two are kept, while nothing can be removed; then one is kept and it can be."""
    import errno
    import os
    import shutil

    from liver_core.state.checkpoint import prune
    from liver_core.state.checkpoint_files import MEGATRON_FILES, SMALL_STATE_FILE

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    path, remove = Path(folder), shutil.rmtree
    for step in (2, 4, 6):
        (path / f"step-{step:09d}").mkdir()
        for name in (*MEGATRON_FILES, SMALL_STATE_FILE):
            (path / f"step-{step:09d}" / name).write_text("{}")
    shutil.rmtree = refuse  # type: ignore[assignment]
    said = prune(path / "step-000000006", 2, generation=7)
    names = sorted(entry.name for entry in path.iterdir())
    shutil.rmtree = remove
    (path / "step-000000003").symlink_to(path / "step-000000006")
    assert prune(path / "step-000000006", 1, generation=8) == []
    return said, names, sorted(entry.name for entry in path.iterdir())


def test_a_rank_writes_its_files_itself_and_says_which_it_could_not_write(tmp_path: Path):
    """A forked writer may hang, outlives its rank, and keeps its connections open."""
    assert "is written" in run_alone(_written_without_a_fork, str(tmp_path / "step-000000001"))
    text = run_alone(_written_without_a_fork, str(tmp_path / "step-000000002"), True)
    assert "No space left on device" in text
    assert not (tmp_path / "step-000000002").exists()


def _written_without_a_fork(path: str, full: bool = False) -> str:
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from liver_core.state import checkpoint
    from liver_core.state.error_texts import error_text

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.fork = refused  # type: ignore[assignment]
    if full:
        os.fsync = refused
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    tensors = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
    try:
        checkpoint.write(tensors, {"step": 1}, path, group)
    except BaseException as error:
        return error_text(error)
    return f"step {checkpoint.read_small_state(path)['step']} is written"


def _run_writing(setup: RankSetup, folder: Path) -> tuple[Chain, list[tuple]]:
    with Cluster(replace(setup, checkpoints=(str(folder), EVERY, KEEP))) as cluster:
        roster = cluster.launch("PP2xDP2", "abcd")
        cluster.finish()
        told = [cluster.ranks[member].events for member in roster.members]
        assert not [event for events in told for event in events if event[0] == "checkpoint_failed"]
        said = [[event for event in events if event[0] == "checkpointed"] for events in told]
        assert [[event[1:3] for event in events] for events in said[1:]] == [[event[1:3] for event in said[0]]] * 2 + [
            []
        ]
        return gather(cluster, (World("PP2xDP2", "abcd"),)), said[0]


def _refusal(path: str) -> str:
    from liver_core.state.checkpoint import CheckpointError, read_small_state

    try:
        read_small_state(path)
    except CheckpointError as error:
        return str(error)
    return "accepted"
