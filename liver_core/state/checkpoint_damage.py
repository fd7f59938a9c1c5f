"""Whether a checkpoint can be loaded at all, by what its files hold and not by what a job wants of them. With torch."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from liver_core.state.checkpoint_files import (
    COMMON_FILE,
    COMPLETE_FILE,
    FILES_FILE,
    SMALL_STATE_FILE,
    TENSORS_FILE,
    THEIRS,
    missing_file,
    noted_sizes,
    wrong_size,
)

_TORN = ("EOFError", "UnpicklingError")
"""What torch raises where a file does not begin or end as it should."""
_TORN_ARCHIVE = "PytorchStreamReader"
"""In the text of the RuntimeError by which torch refuses an archive."""


def damage_of(folder: Path) -> str:
    """What shows that nobody can load this checkpoint: a file that is missing, too short, or not what it should be.
    Empty where nothing does. Raises OSError and MemoryError where that cannot be told from here."""
    if missing := missing_file(folder):
        return f"{missing} is missing, so it is not a complete checkpoint"
    for name, reader in _readers(folder):
        try:
            reader(folder / name)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            # torch, pickle and json raise many kinds, some with pages of advice. A person needs to know which file.
            return f"{name} cannot be read: {type(error).__name__}"
    return wrong_size(folder, noted_sizes(folder) or tensor_sizes(folder))


def tensor_sizes(folder: Path) -> list[tuple[str, int]]:
    """The files of tensors, and the bytes that each must have at least to hold them."""
    ends = dict[str, int]()
    for part in FileSystemReader(folder).read_metadata().storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    return sorted(ends.items())


def is_torn(error: BaseException) -> bool:
    """Whether a load failed since a file does not hold what it was written with, by the errors of all ranks."""
    found = [failed[0] for failed in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return any(type(each).__name__ in _TORN or _TORN_ARCHIVE in str(each) for each in found)


def _readers(folder: Path) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Each file that every rank reads, and how. In a checkpoint of Megatron's training one holds objects of Megatron,
    and is read when it is loaded."""
    yield COMPLETE_FILE, _read_json
    yield TENSORS_FILE, lambda path: FileSystemReader(path.parent).read_metadata()
    if not folder.name.startswith(THEIRS):
        yield SMALL_STATE_FILE, _read_json
        yield COMMON_FILE, lambda path: torch.load(path, map_location="cpu", weights_only=True)
        yield FILES_FILE, lambda path: noted_sizes(path.parent)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())
