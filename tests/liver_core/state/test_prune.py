"""What is removed beside a checkpoint that was written, and what is left alone."""

import json
from pathlib import Path

import pytest

from liver_core.state.checkpoint import _make_room, _publish, prune
from liver_core.state.checkpoint_files import (
    FILES_FILE,
    MEGATRON_FILES,
    SMALL_STATE_FILE,
    Author,
    announce_start,
    author_of,
)
from liver_core.worlds.agreed_work import CannotDo


def written(folder: Path, step: int, *, job: str = "a", lacks: int = 0) -> Path:
    """A checkpoint by names and sizes. `lacks`: bytes of a file of its tensors."""
    path = folder / f"step-{step:09d}"
    path.mkdir(parents=True)
    for name in MEGATRON_FILES:
        (path / name).write_text("{}")
    (path / SMALL_STATE_FILE).write_text(json.dumps(Author(job, 1).as_json()))
    (path / "__0_0.distcp").write_bytes(b"x" * (9 - lacks))
    (path / FILES_FILE).write_text(json.dumps({"__0_0.distcp": [9, ""]}))
    return path


def names(folder: Path) -> list[str]:
    return sorted(entry.name.lstrip("step-0") for entry in folder.iterdir())


def test_what_another_job_wrote_in_the_same_folder_stays(tmp_path: Path):
    for step, job in ((10, "a"), (20, "b"), (30, "a"), (40, "a")):
        written(tmp_path, step, job=job)
    assert prune(tmp_path / "step-000000040", 2, job_id="a", generation=1) == []
    assert names(tmp_path) == ["20", "30", "40"]


def test_a_damaged_checkpoint_counts_for_none_that_is_kept(tmp_path: Path):
    for step, lacks in ((5, 0), (10, 0), (20, 1), (30, 1), (40, 0)):
        written(tmp_path, step, lacks=lacks)
    prune(tmp_path / "step-000000040", 2, job_id="a", generation=1)
    assert names(tmp_path) == ["10", "20", "30", "40"], "10 and 40 are what a start can use"


def test_where_the_new_checkpoint_cannot_take_its_place_the_one_that_had_it_stays(tmp_path: Path, monkeypatch):
    from liver_core.state import checkpoint

    target, partial = written(tmp_path, 10), tmp_path / "step-000000010.partial-1"
    written(tmp_path / "other", 10).rename(partial)
    rename = checkpoint.os.replace

    def refused(source: Path, to: Path) -> None:
        if Path(source) == partial:
            raise OSError(5, "Input/output error")
        rename(source, to)

    monkeypatch.setattr(checkpoint, "damage_of", lambda folder: "")
    monkeypatch.setattr(checkpoint.os, "replace", refused)
    with pytest.raises(OSError, match="Input/output error"):
        _publish(partial, target, {"step": 10}, {}, Author("b", 2))
    assert author_of(target) == Author("a", 1)
    monkeypatch.setattr(checkpoint.os, "replace", rename)
    _publish(partial, target, {"step": 10} | Author("b", 2).as_json(), {}, Author("b", 2))
    assert author_of(target) == Author("b", 2)
    assert [entry.name for entry in tmp_path.glob("step-*")] == ["step-000000010"]


def test_what_a_start_could_not_load_is_not_published(tmp_path: Path):
    partial = tmp_path / "step-000000010.partial-1"
    written(tmp_path / "other", 10).rename(partial)
    with pytest.raises(CannotDo, match=r"cannot be read: .*, though it was written so: a start could not load it"):
        _publish(partial, tmp_path / "step-000000010", {"step": 10}, {}, Author("a", 1))
    assert not (tmp_path / "step-000000010").exists()


def test_a_start_that_announces_itself_while_the_disk_stands_still_is_the_only_one_that_publishes(
    tmp_path: Path, monkeypatch
):
    from liver_core.state import checkpoint

    partial = tmp_path / "step-000000010.partial-1"
    written(tmp_path / "other", 10).rename(partial)
    monkeypatch.setattr(checkpoint, "damage_of", lambda folder: announce_start(tmp_path, "a", 100_001))
    with pytest.raises(CannotDo, match="a newer start of the job writes there"):
        _publish(partial, tmp_path / "step-000000010", {"step": 10}, {}, Author("a", 1))
    assert not (tmp_path / "step-000000010").exists()
    _publish(partial, tmp_path / "step-000000010", {"step": 10}, {}, Author("a", 100_001))
    assert (tmp_path / "step-000000010").exists()


def test_before_a_checkpoint_is_written_what_earlier_starts_left_incomplete_makes_room(tmp_path: Path):
    for generation in (1, 100_001, 100_002, 200_001):
        (tmp_path / f"step-000000040.partial-{generation}").mkdir()
    _make_room(tmp_path / "step-000000050.partial-100002", 100_002)
    left = {entry.name.rpartition("-")[2] for entry in tmp_path.glob("step-000000040*")}
    assert left == {"100001", "100002", "200001"}, "a world that was handed over may still be writing"
