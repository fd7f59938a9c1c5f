"""What files a checkpoint has, for those that write, load and export them. Without torch and Megatron."""

import hashlib
import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_core.handoff.generations import replacing
from liver_core.handoff.messages import LaterCheckpoints

COMPLETE_FILE = "metadata.json"
TENSORS_FILE = ".metadata"
"""Which file holds which part of which tensor."""
COMMON_FILE = "common.pt"
"""Everything that is not cut into shards."""
MEGATRON_FILES = (COMPLETE_FILE, TENSORS_FILE, COMMON_FILE)
SMALL_STATE_FILE = "liver_small_state.json"
NEEDED_FILES = (COMPLETE_FILE, SMALL_STATE_FILE)
"""A checkpoint of ours is complete where it has both."""
FILES_FILE = "liver_files.json"
"""Size in bytes and SHA-256 of each other file, by its name. A checkpoint of an older version lacks it."""
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
ARGUMENTS = "megatron_arguments"
"""Their name among what is not cut into shards."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The text names the path and the rule."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that no world can load: what its own files hold shows it."""

    def __init__(self, path: str, damage: str) -> None:
        super().__init__(f"checkpoint {path} cannot be loaded: {damage}")
        self.path = path


@dataclass(frozen=True, slots=True)
class LeaseStanding:
    """Of one rank: whether it holds a step lease, and whether it was asked to end."""

    has_lease: bool
    ends: bool


STEP = "step-"
"""Begins the name of a checkpoint's folder; the number of its step follows."""
THEIRS = "iter_"
"""Begins the name of a folder that Megatron's training wrote."""
STARTED = ".started-"
"""Begins the name of a file beside the checkpoints of a job, which says that a world of this generation was started."""


class FilesDiffer(Exception):
    """A file does not hold what was written; the text names it."""


class NewerStart(Exception):
    """A start of the job whose number is greater has announced itself where this one was to write its checkpoints."""

    def __init__(self, folder: Path, generation: int, newer: int) -> None:
        text = f"generation {generation} could publish no checkpoint in {folder}: generation {newer} of the job was"
        super().__init__(f"{text} started there, which is newer. Was the service restored from a backup?")
        self.generation = newer


def announce_start(folder: Path, job_id: str, generation: int) -> None:
    """From now on worlds of older starts of the job publish no checkpoint in `folder`. Raises OSError, and NewerStart
    where this start could publish none itself."""
    folder.mkdir(parents=True, exist_ok=True)
    if newer := replacing(starts_in(folder, job_id), generation):
        raise NewerStart(folder, generation, max(newer))
    (folder / f"{STARTED}{job_id}.{generation}").touch()
    for older in starts_in(folder, job_id):
        if older < generation:
            (folder / f"{STARTED}{job_id}.{older}").unlink(missing_ok=True)


def starts_in(folder: Path, job_id: str) -> tuple[int, ...]:
    """The generations of the job's starts that were announced in `folder`, and not replaced by newer ones yet."""
    found = (entry.name.rpartition(".") for entry in folder.glob(f"{STARTED}{job_id}.*"))
    return tuple(int(number) for name, _, number in found if name == f"{STARTED}{job_id}" and number.isdecimal())


@dataclass(frozen=True, slots=True)
class Author:
    """The world that wrote a checkpoint, as its small state names it."""

    job_id: str
    generation: int

    def as_json(self) -> dict[str, Any]:
        """To be added to the small state."""
        return {"author": {"job_id": self.job_id, "generation": self.generation}}


def digested(folder: Path, rank: int, *, only: Container[str] | None = None) -> dict[str, tuple[int, str]]:
    """Name, size in bytes and SHA-256 of the files in `folder` that this rank wrote, and rank 0 also of those that
    belong to none; or of those named `only`. All of them are on disk then. Raises OSError."""
    found = {}
    for path in sorted(folder.iterdir()):
        of_rank = _OF_RANK.fullmatch(path.name)
        if path.name in only if only is not None else rank == (int(of_rank[1]) if of_rank else 0):
            sync_to_disk(path)
            found[path.name] = _digest(path)
    return found


def verify(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Read these files again, from the disk where the system lets go of its copy in memory. Raises OSError, and
    FilesDiffer where one is not what it was."""
    for name, wanted in files.items():
        with open(folder / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if (found := _digest(folder / name)) != wanted:
            raise FilesDiffer(f"{name}: {wanted[0]} bytes were written, {found[0]} are read again, or others")


def sync_to_disk(path: Path) -> None:
    """Return once this file or folder is on disk as it is now. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def author_of(folder: Path) -> Author | None:
    """Who wrote it; None where that cannot be read, and where an older version wrote it."""
    try:
        said = json.loads((folder / SMALL_STATE_FILE).read_text())["author"]
        return Author(str(said["job_id"]), int(said["generation"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def later_ones(job_id: str, later: LaterCheckpoints) -> Iterator[Path]:
    """The checkpoints that a start may take instead of the one it is given, the newest first; perhaps damaged."""
    found = ((step_of(entry), entry) for entry in Path(later.folder).glob(f"{STEP}*"))
    for step, entry in sorted(((step, entry) for step, entry in found if step is not None), reverse=True):
        if step <= later.above:
            return
        author = author_of(entry)
        if author is not None and author.job_id == job_id and author.generation >= later.since:
            yield entry


def step_of(folder: Path) -> int | None:
    """The step after which it was written, by its name; None where it is not one of our names."""
    number = folder.name.removeprefix(STEP)
    return int(number) if number != folder.name and number.isascii() and number.isdecimal() else None


def missing_file(folder: Path) -> str:
    """The first file that a complete checkpoint has and this one lacks, empty if it lacks none. Raises OSError where
    that cannot be told."""
    needed = MEGATRON_FILES if folder.name.startswith(THEIRS) else (*MEGATRON_FILES, SMALL_STATE_FILE)
    return next((name for name in needed if _size_of(folder / name) is None), "")


def wrong_size(folder: Path, sizes: Iterable[tuple[str, int]]) -> str:
    """What is wrong with the first of these files that has fewer bytes than it should. Empty if none has. Raises
    OSError where that cannot be told."""
    for name, expected in sizes:
        size = _size_of(folder / name)
        if size is None or size < expected:
            return f"{name} has {size or 0} of {expected} bytes"
    return ""


def noted_sizes(folder: Path) -> list[tuple[str, int]] | None:
    """The files of a checkpoint and how many bytes each had when it was written; None where nobody noted that. Raises
    OSError, and ValueError where the note cannot be read."""
    try:
        noted = json.loads((folder / FILES_FILE).read_text())
        return sorted((str(name), int(bytes_and_digest[0])) for name, bytes_and_digest in noted.items())
    except FileNotFoundError:
        return None
    except (AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
