"""Lines of a trail are read once, also those that were not whole when they were looked at."""

import json

from tests.chaos.trail_reader import TrailReader


def line(step: int, *, generation: int = 1, at: float = 0.0, event: str = "applied") -> bytes:
    return json.dumps({"at": at, "event": event, "generation": generation, "step": step}).encode() + b"\n"


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    trail = tmp_path / "17.jsonl"
    second = line(2)
    trail.write_bytes(line(1) + second[:9])
    reader = TrailReader(tmp_path)
    reader.look()
    assert (reader.applied, reader.made) == (1, 1)
    with trail.open("ab") as more:
        more.write(second[9:])
    reader.look()
    reader.look()
    assert (reader.applied, reader.made, len(reader.lines)) == (2, 2, 2)


def test_a_step_done_again_counts_twice_and_once_however_many_ranks_made_it(tmp_path):
    (tmp_path / "17.jsonl").write_bytes(line(3, at=2.0) + line(4, event="batch"))
    (tmp_path / "18.jsonl").write_bytes(line(3, at=1.0) + line(3, generation=2, at=3.0))
    reader = TrailReader(tmp_path)
    reader.look()
    assert (reader.applied, reader.made) == (3, 2)
    assert [each["at"] for each in reader.lines][-3:] == [1.0, 2.0, 3.0]


def test_no_trail_yet_is_no_step(tmp_path):
    reader = TrailReader(tmp_path / "none")
    reader.look()
    assert (reader.applied, reader.made, reader.lines) == (0, 0, [])
