"""TensorBoard's files of a job: read back by TensorBoard's own reader. No rank, no torch process."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from liver_core.rank.metrics.event_files import EventFiles, EventFolder
from tests.liver_core.rank.support.event_reader import read_run


def write(
    folder: Path, generation: int, steps: range, *, value: float = 1.0, failed: Callable[[str], object] = print
) -> None:
    files = EventFiles(EventFolder(str(folder), "job", str(folder.parent)), failed, write_every_s=60.0)
    for step in steps:
        files.put(generation, step, {"loss": value, "own/nan": None})
    files.close(10.0)


def test_a_restart_and_a_late_writer_neither_double_a_step_nor_go_back(tmp_path: Path):
    folder = tmp_path / "tensorboard"
    write(folder, 1, range(1, 8))
    write(folder, 2, range(8, 12), value=2.0)
    write(folder, 100_001, range(6, 15), value=3.0)
    # A rank of a world that is over, and does not know it yet.
    write(folder, 3, range(12, 20), value=4.0)
    run = read_run(folder / "job")
    assert run.steps("loss") == [*range(1, 15)]
    assert run.values("loss") == [1.0] * 5 + [3.0] * 9
    assert all(math.isnan(value) for value in run.values("own/nan"))


def test_a_folder_that_a_link_leads_out_of_is_refused(tmp_path: Path):
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "tensorboard").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"tensorboard: must be a folder inside checkpoint\.path"):
        EventFiles(EventFolder(str(tmp_path / "place" / "tensorboard"), "job", str(tmp_path / "place")), print)


def test_a_disk_that_cannot_be_written_costs_numbers_and_says_so(tmp_path: Path):
    said: list[str] = []
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    write(tmp_path / "tensorboard", 1, range(1, 3), failed=said.append)
    assert len(said) == 1
    assert str(tmp_path / "tensorboard") in said[0]
