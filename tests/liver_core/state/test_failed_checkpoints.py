"""A checkpoint that one rank cannot write is lost on all ranks at once, for one reason, and the next one is written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.rank_cluster import Cluster
from tests.cluster.real_ranks import run_ranks
from tests.liver_core.rank.test_after_step import setup_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

WAYS = {
    "its folder": (0, "NotADirectoryError"),
    "a folder that one rank does not see": (1, "FileNotFoundError"),
    "what only rank 0 writes": (0, "No space left on device"),
    "the tensors of rank 1": (1, "No space left on device"),
    "the list of tensors": (0, "No space left on device"),
    "what is read again": (1, r"__1_0.distcp: \d+ bytes were written"),
    "the last file": (0, "No space left on device"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, float]]]:
    """What each of two ranks was told of the checkpoint that failed in each way, and after how many seconds."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "way").mkdir()
    (folder / "file").touch()
    return run_ranks(_fail_in_each_way, 2, str(folder))


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_hear_at_once_why_one_cannot_write(said: list[dict[str, tuple[str, float]]], way: str):
    rank, reason = WAYS[way]
    texts = {text for told in said for text in [told[way][0]]}
    assert len(texts) == 1, texts
    assert f"not written, rank {rank}: " in (text := texts.pop())
    assert re.search(reason, text), text
    assert max(told[way][1] for told in said) < 20


def test_the_next_checkpoint_is_written_and_nothing_is_left_of_those_that_failed(said: list[Any]):
    assert [told["after it"][0] for told in said] == ["written"] * 2
    assert [told["left"] for told in said] == [["step-000000009"]] * 2


def test_every_file_of_a_checkpoint_is_listed_with_its_size_and_digest(said: list[Any]):
    listed, there = said[0]["files"]
    assert listed == {name: found for name, found in there.items() if name != "liver_files.json"}


def test_who_waits_for_a_rank_that_fails_in_no_foreseen_way_waits_no_longer(said: list[Any]):
    assert "boom" in said[1]["unforeseen"][0]
    assert "closed by peer" in said[0]["unforeseen"][0]
    assert max(told["unforeseen"][1] for told in said) < 10


def test_training_goes_on_while_one_rank_cannot_write_and_a_later_checkpoint_is_written(corpus: str, tmp_path: Path):
    job = "tests.liver_core.rank.support.hooked_job:StuckJob"
    more = {"checkpoints": (str(tmp_path), 2, 100), "checkpoint_waits_s": 0.1, "last_step": 30}
    setup = setup_of(corpus, tmp_path, job=job, hold_at=(), validate_every=None, **more)
    with Cluster(setup) as cluster:
        (first, other) = cluster.launch("DP2", "ab").members
        results = cluster.finish()
        said = {member: cluster.ranks[member].events for member in (first, other)}
    assert {result["how"] for result in results.values()} == {"finished"}
    failed = [event for event in said[first] if event[0] == "checkpoint_failed"]
    assert [(event[2], event[3]) for event in failed] == [("RuntimeError: a disk that comes back", 2)]
    written = [event[2] for event in said[first] if event[0] == "checkpointed"]
    assert min(written) > 6 and written[-1] == 30, "in a group that the ranks made anew"


def _fail_in_each_way(rank: int, port: int, folder: str) -> dict[str, Any]:
    from datetime import timedelta
    from unittest import mock

    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from liver_core.state import checkpoint

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    told: dict[str, Any] = {}

    def write(name: str, path: str) -> None:
        shard = ShardedTensor.from_rank_offsets("w", torch.full((4,), 1.0), (0, rank, 2), replica_id=0)
        began = time.monotonic()
        try:
            checkpoint.write({"model": {"w": shard}, "note": 1}, {"step": 1}, path, group)
            text = "written"
        except Exception as error:
            text = str(error)
        told[name] = text, time.monotonic() - began

    def failing(of_rank: int, where: Any, name: str, work: Callable[..., Any] | None = None) -> Any:
        real = getattr(where, name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise full

        return mock.patch.object(where, name, (work or fail) if rank == of_rank else real)

    path = f"{folder}/way/step-000000001"
    write("its folder", f"{folder}/file/step-000000001")
    makes, elsewhere = checkpoint._check_writable, Path(folder, "nowhere")
    with failing(1, checkpoint, "_check_writable", lambda _, rank: makes(elsewhere, rank)):
        write("a folder that one rank does not see", path)
    with failing(0, torch, "save"):
        write("what only rank 0 writes", path)
    with failing(1, filesystem_async, "_write_item"):
        write("the tensors of rank 1", path)
    with failing(0, os, "replace"):
        write("the last file", path)
    with failing(0, Path, "rename"):
        write("the list of tensors", path)
    with failing(1, checkpoint, "verify", _verify_other):
        write("what is read again", path)
    write("after it", path.replace("000001", "000009"))
    assert told["after it"][0] == "written", told
    told |= _left(Path(folder, "way"))
    dist.barrier()
    with failing(1, serialization, "save_preprocess", _explode):
        write("unforeseen", path)
    return told


def _left(folder: Path) -> dict[str, Any]:
    """What is there now, and the files of the checkpoint that was written with what it lists."""
    whole = folder / "step-000000009"
    there = {
        entry.name: [entry.stat().st_size, hashlib.sha256(entry.read_bytes()).hexdigest()] for entry in whole.iterdir()
    }
    listed = json.loads((whole / "liver_files.json").read_text())
    return {"left": sorted(os.listdir(folder)), "files": (listed, there)}


def _explode(*_: Any) -> None:
    raise RuntimeError("boom")


def _verify_other(folder: Path, files: Any) -> None:
    """As if the disk gave back less than was written."""
    from liver_core.state import checkpoint_files

    digest = checkpoint_files._digest
    checkpoint_files._digest = lambda path: (digest(path)[0] - 1, "")
    try:
        checkpoint_files.verify(folder, files)
    finally:
        checkpoint_files._digest = digest
