"""Which checkpoint the ranks of a start agree on, and when one counts as damaged."""

import json
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from liver_core.handoff import FailedPart, FailureCause, LaterCheckpoints
from liver_core.layout import Member, ParallelLayout, Roster
from liver_core.rank.next_world import NextWorld
from liver_core.rank.prepare import start_checkpoint
from liver_core.rank.prepare.start_checkpoint import agreed_checkpoint
from liver_core.rank.store_exchange import Exchange, cause_of
from liver_core.state.checkpoint_files import Author, CheckpointError, DamagedCheckpoint

WAIT_S = 20.0
NODES = ("a", "a", "b")


def made(folder: Path, *steps: int, lacks: str = "") -> str:
    """Checkpoints without tensors that job j wrote."""
    for step in steps:
        (path := folder / f"step-{step:09d}").mkdir()
        (path / "metadata.json").write_text("{}")
        (path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={}, storage_data={})))
        torch.save({}, path / "common.pt")
        (path / "liver_small_state.json").write_text(json.dumps(Author("j", 1).as_json()))
        (path / "liver_files.json").write_text(json.dumps({"common.pt": [(path / "common.pt").stat().st_size, "x"]}))
        if lacks:
            (path / lacks).unlink()
    return str(folder / f"step-{steps[-1]:09d}")


def cut(path: str) -> None:
    """As a disk that was full, or lost its last writes, leaves it: what is read of it still looks whole."""
    noted = Path(path, "liver_files.json")
    noted.write_text(json.dumps({"common.pt": [10_000_000, "x"]}))


def agreed(folder: Path, wanted: str, *, above: int | None = None) -> list[Any]:
    """What each of three ranks on two nodes is to load, or the error of each."""
    later = None if above is None else LaterCheckpoints(folder=str(folder), above=above)
    roster = Roster("j", 1, ParallelLayout(dp=3), tuple(Member(node, slot) for slot, node in enumerate(NODES)))
    request = SimpleNamespace(job_id="j", target=roster, checkpoint=wanted, later=later)
    store, said = dist.HashStore(), dict[int, Any]()

    def take(rank: int) -> None:
        exchange = Exchange(lambda *_: store, "h")
        made = cast(NextWorld, SimpleNamespace(target_rank=rank, request=request, exchange=exchange))
        try:
            said[rank] = agreed_checkpoint(made, time.monotonic() + WAIT_S)
        except Exception as error:
            said[rank] = error

    ranks = [threading.Thread(target=take, args=(rank,), name=NODES[rank]) for rank in range(len(NODES))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(WAIT_S)
    return [said[rank] for rank in range(len(NODES))]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checkpoint, "LATE_S", 0.3)
    monkeypatch.setattr(start_checkpoint, "_AGAIN_S", 0.02)


def seen_by(monkeypatch: pytest.MonkeyPatch, sees: Callable[[str], bool], function: str) -> None:
    """Nodes of which `sees` is not true do not see the folder."""
    whole = getattr(start_checkpoint, function)

    def look(folder: Path) -> str:
        return whole(folder) if sees(threading.current_thread().name) else "metadata.json is missing"

    monkeypatch.setattr(start_checkpoint, function, look)


def test_all_ranks_load_what_was_asked_for_where_it_is_whole(tmp_path: Path) -> None:
    path = made(tmp_path, 10)
    assert agreed(tmp_path, path) == [path] * 3
    assert agreed(tmp_path, "") == [""] * 3


def test_a_later_one_that_the_job_wrote_and_nobody_has_heard_of_is_loaded_by_all(tmp_path: Path) -> None:
    path, newest = made(tmp_path, 10), made(tmp_path, 30)
    cut(made(tmp_path, 40))
    assert agreed(tmp_path, path, above=10) == [newest] * 3, "the newest one that is whole"
    assert agreed(tmp_path, "", above=0) == [newest] * 3, "also where the job was to begin anew"
    assert agreed(tmp_path, path, above=30) == [path] * 3


def test_one_that_was_removed_meanwhile_gives_way_to_what_the_job_has_written_since(tmp_path: Path) -> None:
    newest = made(tmp_path, 20, 30)
    assert agreed(tmp_path, str(tmp_path / "step-000000010"), above=10) == [newest] * 3


def test_one_that_no_node_sees_whole_is_damaged_and_all_ranks_say_which(tmp_path: Path) -> None:
    cut(path := made(tmp_path, 10))
    said = agreed(tmp_path, path)
    assert all(isinstance(each, DamagedCheckpoint) for each in said)
    assert str(said[2]).startswith(f"checkpoint {path} cannot be loaded: common.pt has ")
    assert str(said[2]).endswith(" of 10000000 bytes")
    assert cause_of(said[1]) == FailureCause(FailedPart.CHECKPOINT, checkpoint=path)


def test_one_that_was_removed_by_hand_is_damaged_where_others_of_the_job_are_there(tmp_path: Path) -> None:
    made(tmp_path, 10)
    said = agreed(tmp_path, str(tmp_path / "step-000000020"), above=20)
    assert all(isinstance(each, DamagedCheckpoint) for each in said)


def test_where_nothing_of_the_job_is_in_sight_its_storage_is_missing_and_no_checkpoint_is_damaged(
    tmp_path: Path,
) -> None:
    (tmp_path / ".started-j.1").touch()
    first = agreed_alone(tmp_path, str(tmp_path / "step-000000020"), above=20)
    assert isinstance(first, CheckpointError) and not isinstance(first, DamagedCheckpoint)
    assert "no other checkpoint is in" in str(first) and cause_of(first) is None


def agreed_alone(folder: Path, wanted: str, *, above: int) -> Any:
    """Of rank 0: the others wait for it, until their agents hear that it has ended."""
    later = LaterCheckpoints(folder=str(folder), above=above)
    roster = Roster("j", 1, ParallelLayout(), (Member("a", 0),))
    request = SimpleNamespace(job_id="j", target=roster, checkpoint=wanted, later=later)
    exchange = Exchange(lambda *_: dist.HashStore(), "h")
    try:
        made = cast(NextWorld, SimpleNamespace(target_rank=0, request=request, exchange=exchange))
        return agreed_checkpoint(made, time.monotonic() + WAIT_S)
    except Exception as error:
        return error


def test_what_only_the_node_of_rank_0_does_not_see_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path, 10)
    seen_by(monkeypatch, lambda node: node == "b", "damage_of")
    said = agreed(tmp_path, path)
    assert not any(isinstance(each, DamagedCheckpoint) for each in said)
    assert all("another one sees no damage" in str(each) for each in said)
    assert cause_of(said[0]) is None


def test_a_node_that_cannot_tell_keeps_a_checkpoint_from_counting_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(path := made(tmp_path, 10))
    whole = start_checkpoint.damage_of

    def look(folder: Path) -> str:
        if threading.current_thread().name == "b":
            raise PermissionError(13, "Permission denied")
        return whole(folder)

    monkeypatch.setattr(start_checkpoint, "damage_of", look)
    assert not any(isinstance(each, DamagedCheckpoint) for each in agreed(tmp_path, path))


def test_what_shared_storage_shows_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, looks = made(tmp_path, 10), iter([False] * 3)
    seen_by(monkeypatch, lambda node: next(looks, True), "missing_file")
    assert agreed(tmp_path, path) == [path] * 3


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json", "liver_small_state.json"])
def test_a_file_that_holds_something_else_is_damage_and_is_named(tmp_path: Path, name: str) -> None:
    path = made(tmp_path, 10)
    size = Path(path, name).stat().st_size
    Path(path, name).write_bytes(bytes(size))  # As after a machine lost power: the length is right.
    assert start_checkpoint.damage_of(Path(path)).startswith(f"{name} cannot be read: ")


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "Input/output error")])
def test_that_this_machine_cannot_read_a_file_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    path = made(tmp_path, 10)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error)):
        start_checkpoint.damage_of(Path(path))
