"""Which checkpoint a start takes where the one that it was given is gone."""

from pathlib import Path

import pytest

from liver_core.state.checkpoint_files import (
    COMPLETE_FILE,
    SMALL_STATE_FILE,
    NewerStart,
    announce_start,
    is_replaced_by,
    starts_in,
    whole_or_later,
)


def made(folder: Path, *steps: int, lacks: str = "") -> None:
    for step in steps:
        (path := folder / f"step-{step:09d}").mkdir()
        for name in {COMPLETE_FILE, SMALL_STATE_FILE} - {lacks}:
            (path / name).touch()


def taken(folder: Path, step: int, job_id: str = "job") -> int:
    return int(whole_or_later(str(folder / f"step-{step:09d}"), job_id)[-9:])


def test_the_one_that_was_asked_for_is_taken_where_it_is_whole(tmp_path: Path) -> None:
    announce_start(tmp_path, "job", 1)
    made(tmp_path, 10, 20)
    assert taken(tmp_path, 10) == 10


@pytest.mark.parametrize("lacks", [COMPLETE_FILE, SMALL_STATE_FILE])
def test_where_it_is_gone_the_newest_whole_one_is_taken_and_never_an_earlier_one(tmp_path: Path, lacks: str) -> None:
    announce_start(tmp_path, "job", 1)
    made(tmp_path, 5, 30, 40)
    made(tmp_path, 10, 50, lacks=lacks)
    (tmp_path / "step-000000060.partial-1").mkdir()
    assert taken(tmp_path, 10) == 40
    assert taken(tmp_path, 50) == 50, "nothing whole comes after it: it is refused by its name"


def test_only_where_the_job_itself_writes_and_only_by_our_own_names(tmp_path: Path) -> None:
    announce_start(tmp_path, "other", 1)
    made(tmp_path, 20)
    assert taken(tmp_path, 10) == 10
    announce_start(tmp_path, "job", 1)
    assert taken(tmp_path, 10) == 20
    elsewhere = str(tmp_path / "iter_0000010")
    assert whole_or_later(elsewhere, "job") == elsewhere


@pytest.mark.parametrize("number", [2**53 - 1, 10**30, 200_000, 200_002, 20_000 * 100_000 + 1])
def test_a_file_with_a_number_that_no_start_can_have_stops_none(tmp_path: Path, number: int) -> None:
    (tmp_path / f".started-job.{number}").touch()
    announce_start(tmp_path, "job", 100_001)
    assert not is_replaced_by(starts_in(tmp_path, "job"), 100_001)
    announce_start(tmp_path, "job", 300_001)
    with pytest.raises(NewerStart) as raised:
        announce_start(tmp_path, "job", 200_001)
    assert raised.value.generation == 300_001
