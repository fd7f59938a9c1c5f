"""The journal keeps what was put, whatever the moment of the crash."""

import errno
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from agent.journal import (
    FILE_NAME,
    FORMAT,
    FORMAT_KEY,
    LOCK_NAME,
    Journal,
    JournalError,
    RunDirectoryError,
    Table,
    _line,
)


def reopened(directory: Path) -> Journal:
    return Journal(directory).open()


def test_a_reopened_journal_holds_the_last_value_of_each_key(tmp_path: Path) -> None:
    journal = Journal(tmp_path).open()
    journal.put(Table.RANK, "job/0", {"pid": 1})
    journal.put(Table.RANK, "job/0", {"pid": 2})
    journal.put(Table.RANK, "job/1", {"pid": 3})
    journal.delete(Table.RANK, "job/1")
    journal.close()
    again = reopened(tmp_path)
    assert again.items(Table.RANK) == (("job/0", {"pid": 2}),)
    again.close()


def test_a_journal_says_its_format_and_keeps_saying_it_when_it_is_compacted(tmp_path: Path) -> None:
    journal = Journal(tmp_path).open()
    for number in range(2_000):
        journal.put(Table.PROPOSER, "a", {"generation": number})
    journal.close()
    first = (tmp_path / FILE_NAME).read_bytes().splitlines()[0]
    assert json.loads(first.partition(b" ")[2]) == {"t": "format", "k": "version", "v": {"number": FORMAT}}
    reopened(tmp_path).close()


@pytest.mark.parametrize(
    ("lines", "written"),
    [
        ([(Table.RANK, "job/0", {"pid": 1})], 1),
        ([(Table.FORMAT, FORMAT_KEY, {"number": FORMAT + 1}), (Table.RANK, "job/0", {"pid": 1})], FORMAT + 1),
    ],
)
def test_a_journal_of_another_format_is_refused_with_both_numbers_and_what_to_do(
    tmp_path: Path, lines: list, written: int
) -> None:
    content = b"".join(_line(*line) for line in lines)
    (tmp_path / FILE_NAME).write_bytes(content)
    what = rf"format {written}, this agent reads format {FORMAT}: .*--stop-ranks --run-dir"
    for _ in range(2):  # The directory is let go again.
        with pytest.raises(JournalError, match=what):
            reopened(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == content, "nothing is changed in what cannot be read"


def test_a_change_is_on_disk_when_put_or_delete_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path).open()
    path, synced = tmp_path / FILE_NAME, []
    sync = os.fsync

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor))

    monkeypatch.setattr(os, "fsync", note)
    changes = (lambda: journal.put(Table.RANK, "job/0", {"pid": 1}), lambda: journal.delete(Table.RANK, "job/0"))
    for change in changes:
        synced.clear()
        change()
        file = path.stat()
        assert any((each.st_ino, each.st_size) == (file.st_ino, file.st_size) for each in synced)
    journal.close()


def test_a_change_that_cannot_be_written_is_told_once_and_nothing_is_taken_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[JournalError] = []
    journal = Journal(tmp_path, on_failure=failures.append).open()
    journal.put(Table.PROPOSER, "a", {"generation": 7})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(JournalError, match="cannot be written: No space left"):
            journal.put(Table.PROPOSER, "a", {"generation": 8})
    assert len(failures) == 1
    with pytest.raises(JournalError, match="cannot be written"):
        journal.put(Table.PROPOSER, "a", {"generation": 9})
    assert journal.get(Table.PROPOSER, "a") == {"generation": 7}
    journal.close()
    again = reopened(tmp_path)
    assert again.get(Table.PROPOSER, "a") == {"generation": 7}
    again.close()


def test_a_compacted_file_that_may_be_gone_after_a_crash_ends_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records are in place, but the directory that names it could not be written."""
    failures: list[JournalError] = []
    journal = Journal(tmp_path, on_failure=failures.append).open()

    def broken(directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("agent.journal._sync_directory", broken)
    with pytest.raises(JournalError, match="cannot be written: Input/output error"):
        for number in range(1_200):
            journal.put(Table.PROPOSER, "job", {"generation": number})
    assert len(failures) == 1
    journal.close()


def test_a_half_written_line_that_cannot_be_taken_away_is_told_like_every_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[JournalError] = []
    journal = Journal(tmp_path, on_failure=failures.append).open()

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        patched.setattr(os, "ftruncate", broken)
        with pytest.raises(JournalError, match="cannot be written"):
            journal.put(Table.PROPOSER, "job", {"generation": 1})
    assert len(failures) == 1
    journal.close()


def test_a_journal_that_cannot_be_compacted_keeps_everything_and_goes_on(tmp_path: Path) -> None:
    failures: list[JournalError] = []
    journal = Journal(tmp_path, on_failure=failures.append).open()
    (tmp_path / FILE_NAME).with_suffix(".new").mkdir()
    for number in range(1_200):
        journal.put(Table.PROPOSER, "job", {"generation": number})
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) == 1_201
    (tmp_path / FILE_NAME).with_suffix(".new").rmdir()
    for number in range(1_200):
        journal.put(Table.PROPOSER, "job", {"generation": number})
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) < 600
    assert not failures
    journal.close()


def test_a_compaction_that_fails_is_tried_again_512_lines_later_and_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, tried_at = Journal(tmp_path).open(), []
    before = len(os.listdir("/proc/self/fd"))

    def fail(source: Path, target: Path) -> None:
        tried_at.append(len((tmp_path / FILE_NAME).read_bytes().splitlines()))
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail)
        for number in range(1_600):
            journal.put(Table.PROPOSER, "job", {"generation": number})
    assert tried_at == [513, 1_026, 1_539]
    assert len(os.listdir("/proc/self/fd")) == before
    journal.close()
    again = reopened(tmp_path)
    assert again.get(Table.PROPOSER, "job") == {"generation": 1_599}
    again.close()


def test_what_an_interrupted_compaction_left_is_not_kept_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.journal.COMPACT_ABOVE_LINES", 4)
    (tmp_path / FILE_NAME).with_suffix(".new").write_bytes(_line(Table.RANK, "job/0", {"pid": 1}) * 9)
    journal = Journal(tmp_path).open()
    for number in range(20):
        journal.put(Table.PROPOSER, "job", {"generation": number})
    journal.put(Table.PROPOSER, "other", {"generation": 3})
    journal.close()
    again = reopened(tmp_path)
    assert again.items(Table.RANK) == ()
    assert dict(again.items(Table.PROPOSER)) == {"job": {"generation": 19}, "other": {"generation": 3}}
    again.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_dropped_and_the_rest_is_kept(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path).open()
    journal.put(Table.PROPOSER, "a", {"generation": 7})
    journal.put(Table.PROPOSER, "a", {"generation": 8})
    journal.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-cut])
    again = reopened(tmp_path)
    assert again.get(Table.PROPOSER, "a") == {"generation": 7}
    again.put(Table.PROPOSER, "a", {"generation": 9})
    again.close()
    last = reopened(tmp_path)
    assert last.get(Table.PROPOSER, "a") == {"generation": 9}
    last.close()


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path).open()
    for number in range(3):
        journal.put(Table.PROPOSER, "a", {"generation": number})
    journal.close()
    path = tmp_path / FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"generation", b"generatiom")
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match="line 2 is damaged"):
        reopened(tmp_path)


@pytest.mark.parametrize("body", ["{}", "[]", "7", '{"t":"rank","k":"a"}', '{"t":"unknown","k":"a","v":{}}', "x"])
def test_a_line_that_is_no_change_of_a_table_is_damage_whatever_its_checksum(tmp_path: Path, body: str) -> None:
    journal = Journal(tmp_path).open()
    journal.put(Table.PROPOSER, "a", {"generation": 7})
    journal.close()
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(whole + f"{zlib.crc32(body.encode()):08x} {body}\n".encode())
    again = reopened(tmp_path)
    assert again.get(Table.PROPOSER, "a") == {"generation": 7}, "dropped as the last line"
    again.close()
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(f"{zlib.crc32(body.encode()):08x} {body}\n".encode() + _line(Table.RANK, "job/0", {"pid": 1}))
    with pytest.raises(JournalError, match="line 3 is damaged"):
        reopened(tmp_path)


def test_compaction_keeps_every_live_record_and_a_small_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path).open()
    journal.put(Table.ORDERS, "job", {"peer_key": "k" * 32})
    for number in range(1_200):
        journal.put(Table.PROPOSER, "job", {"generation": number})
    journal.close()
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) < 600
    again = reopened(tmp_path)
    assert again.get(Table.PROPOSER, "job") == {"generation": 1_199}
    assert again.get(Table.ORDERS, "job") == {"peer_key": "k" * 32}
    again.close()


def test_a_compacted_file_is_on_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.journal.COMPACT_ABOVE_LINES", 4)
    journal = Journal(tmp_path).open()
    notes: list[tuple[str, int, int]] = []
    sync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        notes.append(("sync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    def note_rename(source: Path, target: Path) -> None:
        notes.append(("rename", source.stat().st_ino, source.stat().st_size))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    for number in range(20):
        journal.put(Table.PROPOSER, "job", {"generation": number})
    renames = [place for place, (what, *_) in enumerate(notes) if what == "rename"]
    assert renames
    for place in renames:
        assert ("sync", *notes[place][1:]) in notes[:place]
        assert notes[place + 1][:2] == ("sync", tmp_path.stat().st_ino), "its new name is on disk too"
    journal.close()


def test_no_compaction_leaves_a_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.journal.COMPACT_ABOVE_LINES", 4)
    before = len(os.listdir("/proc/self/fd"))
    journal = Journal(tmp_path).open()
    opened = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        journal.put(Table.PROPOSER, "job", {"generation": number})
    assert len(os.listdir("/proc/self/fd")) == opened
    journal.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert reopened(tmp_path).get(Table.PROPOSER, "job") == {"generation": 39}


def test_a_torn_line_is_gone_from_the_disk_too_when_the_journal_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path).open()
    journal.put(Table.PROPOSER, "a", {"generation": 7})
    journal.close()
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(whole + b"0123")
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (sync(descriptor), synced.append(os.fstat(descriptor))))
    again = reopened(tmp_path)
    inode = (tmp_path / FILE_NAME).stat().st_ino
    assert [each.st_size for each in synced if each.st_ino == inode] == [len(whole)]
    again.close()


def test_what_a_full_disk_took_of_a_line_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path).open()
    journal.put(Table.RANK, "job/0", {"pid": 1})
    before, write = (tmp_path / FILE_NAME).read_bytes(), os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with (
        monkeypatch.context() as patched,
        pytest.raises(JournalError, match=r"journal.jsonl: cannot be written: No space left"),
    ):
        patched.setattr(os, "write", half)
        journal.put(Table.RANK, "job/0", {"pid": 2})
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert journal.get(Table.RANK, "job/0") == {"pid": 1}
    journal.close()


def test_a_new_journal_is_on_disk_under_its_name_when_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (sync(descriptor), synced.append(os.fstat(descriptor).st_ino)))
    journal = Journal(tmp_path).open()
    assert tmp_path.stat().st_ino in synced
    journal.close()


def test_a_last_line_that_is_whole_but_damaged_is_dropped_as_a_torn_one_is(tmp_path: Path) -> None:
    """A crash may leave a block of zeros before the end of a line."""
    journal = Journal(tmp_path).open()
    journal.put(Table.PROPOSER, "a", {"generation": 7})
    journal.close()
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + b"00000000 {}\n")
    again = reopened(tmp_path)
    assert again.get(Table.PROPOSER, "a") == {"generation": 7}
    assert path.read_bytes() == whole
    again.close()


def test_what_is_not_there_is_deleted_without_a_word_and_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path).open()
    before = (tmp_path / FILE_NAME).read_bytes()
    journal.delete(Table.RANK, "job/0")
    assert (tmp_path / FILE_NAME).read_bytes() == before
    journal.close()
    with pytest.raises(JournalError, match="is not open"):
        journal.put(Table.RANK, "job/0", {"pid": 1})
    journal.close()


def test_a_record_may_be_as_long_as_the_limit_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path).open()
    value = {"text": "x" * 100}
    size = len(_line(Table.RANK, "k", value))
    for limit in (size, size - 1):
        monkeypatch.setattr("agent.journal.LINE_BYTES_MAX", limit)
        if limit == size:
            journal.put(Table.RANK, "k", value)
            continue
        with pytest.raises(JournalError, match=f"a record of rank has {size} bytes, at most {limit}"):
            journal.put(Table.RANK, "k", value)
    journal.close()


def test_a_journal_is_compacted_above_the_least_and_above_four_lines_for_each_live_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format is a live record too."""
    monkeypatch.setattr("agent.journal.COMPACT_ABOVE_LINES", 10)
    for live, lines in ((1, [*range(2, 11), *range(2, 11), 2, 3]), (3, [*range(2, 17), *range(4, 9)])):
        journal = Journal(tmp_path / str(live)).open()
        for number, expected in enumerate(lines):
            journal.put(Table.PROPOSER, f"job-{number % live}", {"generation": number})
            assert len((tmp_path / str(live) / FILE_NAME).read_bytes().splitlines()) == expected
        journal.close()


def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        journal = Journal(tmp_path / "run").open()
        for number in range(600):
            modes = [(tmp_path / "run" / name).stat().st_mode & 0o777 for name in ("", FILE_NAME, LOCK_NAME)]
            assert modes == [0o700, 0o600, 0o600], f"after {number} lines"
            journal.put(Table.PROPOSER, "job", {"generation": number})
        journal.close()
    finally:
        os.umask(mask)


def test_a_directory_is_held_by_one_agent_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path).open()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(RunDirectoryError, match="in use by another agent"):
            Journal(tmp_path).open()
    assert len(os.listdir("/proc/self/fd")) == before
    journal.close()
    reopened(tmp_path).close()


def test_who_found_the_directory_held_closes_no_file_of_others_afterwards(tmp_path: Path) -> None:
    journal, refused = Journal(tmp_path).open(), Journal(tmp_path)
    with pytest.raises(RunDirectoryError):
        refused.open()
    # It gets the number that the lock of the refused one had.
    with (tmp_path / "other").open("w") as other:
        refused.close()
        other.write("still open")
    journal.close()


def test_a_directory_is_made_with_those_above_it_for_its_owner_only(tmp_path: Path) -> None:
    Journal(tmp_path / "a" / "b").open().close()
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_journal_that_is_refused_for_its_format_lets_its_directory_go(tmp_path: Path) -> None:
    journal = Journal(tmp_path).open()
    journal.put(Table.FORMAT, FORMAT_KEY, {"number": FORMAT + 1})
    journal.close()
    for _ in range(2):
        with pytest.raises(JournalError, match=f"is a journal of format {FORMAT + 1}"):
            Journal(tmp_path).open()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"^run directory .*/file/run cannot be written: Not a directory$"):
        Journal(tmp_path / "file" / "run").open()


def test_what_was_put_before_a_kill_is_there_afterwards(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from agent.journal import Journal, Table\n"
        "journal = Journal(pathlib.Path(sys.argv[1])).open()\n"
        "for number in range(100_000):\n"
        "    journal.put(Table.PROPOSER, 'job', {'generation': number})\n"
        "    print(number, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(20)][-1]
        os.kill(process.pid, signal.SIGKILL)
    journal = reopened(tmp_path)
    record = journal.get(Table.PROPOSER, "job")
    assert record is not None
    assert record["generation"] >= said
    journal.close()
