"""Which checkpoints a start may take beside the one it was given, and what shows that one is damaged."""

import json
from pathlib import Path

import pytest

from liver_core.handoff import LaterCheckpoints
from liver_core.handoff.generations import replacing
from liver_core.state.checkpoint_files import (
    COMPLETE_FILE,
    FILES_FILE,
    MEGATRON_FILES,
    SMALL_STATE_FILE,
    Author,
    NewerStart,
    announce_start,
    author_of,
    later_ones,
    missing_file,
    noted_sizes,
    starts_in,
    step_of,
    wrong_size,
)


def made(folder: Path, *steps: int, job_id: str = "job", generation: int = 1) -> Path:
    for step in steps:
        (path := folder / f"step-{step:09d}").mkdir(exist_ok=True)
        for name in MEGATRON_FILES:
            (path / name).write_text("{}")
        (path / SMALL_STATE_FILE).write_text(json.dumps(Author(job_id, generation).as_json()))
    return folder / f"step-{steps[-1]:09d}"


def later(folder: Path, *, above: int = 0, since: int = 0, job_id: str = "job") -> list[int | None]:
    found = later_ones(job_id, LaterCheckpoints(folder=str(folder), above=above, since=since))
    return [step_of(entry) for entry in found]


def test_later_ones_are_those_that_the_job_wrote_after_a_step_the_newest_first(tmp_path: Path) -> None:
    made(tmp_path, 10, 30, 20)
    assert later(tmp_path, above=10) == [30, 20]
    assert later(tmp_path, above=30) == []
    assert later(tmp_path / "never") == []


def test_those_of_another_job_in_the_same_folder_are_none_and_neither_are_those_of_nobody(tmp_path: Path) -> None:
    made(tmp_path, 20, job_id="job")
    made(tmp_path, 30, job_id="other")
    (made(tmp_path, 40) / SMALL_STATE_FILE).write_text('{"step": 40}')
    (made(tmp_path, 50) / SMALL_STATE_FILE).write_text("cut o")
    (tmp_path / "step-000000060.partial-1").mkdir()
    (tmp_path / "iter_0000070").mkdir()
    assert later(tmp_path) == [20]


@pytest.mark.parametrize("number", [2**53 - 1, 10**30, 200_000, 200_002, 20_000 * 100_000 + 1])
def test_a_file_with_a_number_that_no_start_can_have_stops_none(tmp_path: Path, number: int) -> None:
    (tmp_path / f".started-job.{number}").touch()
    announce_start(tmp_path, "job", 100_001)
    assert not replacing(starts_in(tmp_path, "job"), 100_001)
    announce_start(tmp_path, "job", 300_001)
    with pytest.raises(NewerStart) as raised:
        announce_start(tmp_path, "job", 200_001)
    assert raised.value.generation == 300_001


def test_those_of_worlds_before_a_job_went_back_to_an_earlier_step_are_none(tmp_path: Path) -> None:
    made(tmp_path, 30, generation=7)
    made(tmp_path, 20, generation=100_001)
    assert later(tmp_path, above=10, since=100_000) == [20]


def test_who_wrote_a_checkpoint_is_known_where_it_says_so(tmp_path: Path) -> None:
    assert author_of(made(tmp_path, 10, job_id="mine", generation=3)) == Author("mine", 3)
    assert author_of(tmp_path / "step-000000011") is None


@pytest.mark.parametrize("name", [*MEGATRON_FILES, SMALL_STATE_FILE])
def test_a_checkpoint_without_one_of_its_files_is_not_complete(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path, 10)
    assert missing_file(folder) == ""
    (folder / name).unlink()
    assert missing_file(folder) == name


def test_one_of_megatrons_training_needs_no_file_of_ours(tmp_path: Path) -> None:
    folder = made(tmp_path, 10).rename(tmp_path / "iter_0000010")
    (folder / SMALL_STATE_FILE).unlink()
    assert missing_file(folder) == ""
    assert missing_file(tmp_path / "iter_0000020") == COMPLETE_FILE


def test_a_file_with_fewer_bytes_than_were_noted_is_named_with_both_numbers(tmp_path: Path) -> None:
    folder = made(tmp_path, 10)
    assert noted_sizes(folder) is None
    (folder / FILES_FILE).write_text(json.dumps({"a.distcp": [5, "x"], COMPLETE_FILE: [2, "y"]}))
    sizes = noted_sizes(folder) or []
    assert sizes == [("a.distcp", 5), (COMPLETE_FILE, 2)]
    assert wrong_size(folder, sizes) == "a.distcp has 0 of 5 bytes"
    (folder / "a.distcp").write_text("1234")
    assert wrong_size(folder, sizes) == "a.distcp has 4 of 5 bytes"
    (folder / "a.distcp").write_text("12345")
    assert wrong_size(folder, sizes) == ""


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', '{"a": []}', '{"a": ["b"]}', "{"])
def test_a_note_of_sizes_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = made(tmp_path, 10)
    (folder / FILES_FILE).write_text(text)
    with pytest.raises(ValueError):
        noted_sizes(folder)
