"""What a checkpoint's files are called, for those that write, load and export them. Without torch and Megatron."""

import hashlib
import os
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from liver_core.handoff.generations import may_replace

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
"""Size in bytes and SHA-256 of each other file of a checkpoint of ours, by name."""
_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
ARGUMENTS = "megatron_arguments"
"""Their name among what is not cut into shards."""


@dataclass(frozen=True, slots=True)
class LeaseStanding:
    """Of one rank: whether it holds a step lease, and whether it was asked to end."""

    has_lease: bool
    ends: bool


STEP = "step-"
"""Begins the name of a checkpoint's folder; the number of its step follows."""
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
    if newer := _replacing(starts_in(folder, job_id), generation):
        raise NewerStart(folder, generation, max(newer))
    (folder / f"{STARTED}{job_id}.{generation}").touch()
    for older in starts_in(folder, job_id):
        if older < generation:
            (folder / f"{STARTED}{job_id}.{older}").unlink(missing_ok=True)


def starts_in(folder: Path, job_id: str) -> tuple[int, ...]:
    """The generations of the job's starts that were announced in `folder`, and not replaced by newer ones yet."""
    found = (entry.name.rpartition(".") for entry in folder.glob(f"{STARTED}{job_id}.*"))
    return tuple(int(number) for name, _, number in found if name == f"{STARTED}{job_id}" and number.isdecimal())


def is_replaced_by(starts: Iterable[int], generation: int) -> bool:
    """Whether one of these starts is newer than that of `generation`. A number that no start can have by now does not
    count: whoever may write in the folder can name a file so."""
    return bool(_replacing(starts, generation))


def _replacing(starts: Iterable[int], generation: int) -> list[int]:
    return [other for other in starts if may_replace(other, generation)]


def whole_or_later(path: str, job_id: str) -> str:
    """`path` where it is a complete checkpoint. Else the newest complete one of a later step beside it, where this job
    writes: it went on and removed this one, and who asks for it had not heard of those that came after it. `path` where
    there is none."""
    folder = Path(path)
    if is_complete(folder) or not folder.name.startswith(STEP) or not starts_in(folder.parent, job_id):
        return path
    beside = (entry for entry in folder.parent.glob(f"{STEP}*") if entry.name[len(STEP) :].isdecimal())
    return str(max((entry for entry in beside if entry > folder and is_complete(entry)), default=folder))


def is_complete(folder: Path) -> bool:
    """Whether it holds a complete checkpoint of ours."""
    return all((folder / name).is_file() for name in NEEDED_FILES)


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
