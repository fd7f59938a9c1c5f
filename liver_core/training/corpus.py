"""Byte-level corpus of the Python standard library in Megatron's indexed format, and samples from such a dataset.

`python -m liver_core.training.corpus --out PREFIX` builds the corpus on which the demo and the tests train: real text
that every machine has. Any other dataset in the same format works too.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from liver_core.installation import lacking

if __name__ == "__main__" and (lacks := lacking("core")):
    sys.exit(f"error: python -m liver_core.training.corpus {lacks}")

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from liver_core.worlds.groups import alone

BYTE_VOCABULARY = 257
END_OF_DOCUMENT = 256
_log = logging.getLogger(__name__)
_CACHE_NAME = re.compile(r"[0-9a-f]{32}")


class ByteTokenizer:
    """The tokenizer that GPTDataset needs: token ids are bytes, 256 ends a document."""

    vocab_size = BYTE_VOCABULARY
    eod = END_OF_DOCUMENT
    pad = -1
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "liver ByteTokenizer"}


class SampleReader:
    """Samples by position in one endless shuffled sequence. Position p is dataset item p modulo its length."""

    def __init__(self, prefix: str, *, seq_length: int, seed: int) -> None:
        self._dataset = _open(prefix, seq_length, seed)

    def batch(self, sample_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """tokens, labels, position_ids: int64 [batch, sequence]; loss_mask: float32 [batch, sequence]."""
        items = [self._dataset[sample % len(self._dataset)] for sample in sample_ids]
        return {
            name: torch.stack([item[name] for item in items])
            for name in ("tokens", "labels", "position_ids", "loss_mask")
        }


def build_standard_library_corpus(prefix: str, *, bytes_max: int = 8_000_000) -> int:
    """Write PREFIX.bin and PREFIX.idx from the standard library's sources, one document per file. Returns bytes.

    Files are sorted, so the same Python gives the same corpus. Each output is written under another name and then
    renamed, so a reader never sees a partial file.
    """
    target = Path(prefix)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial{os.getpid()}")
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=numpy.uint16)
    total = 0
    for source in _sources():
        content = source.read_bytes()
        if not content or total + len(content) > bytes_max:
            continue
        tokens = torch.from_numpy(numpy.frombuffer(content, dtype=numpy.uint8).astype(numpy.int64))
        builder.add_document(torch.cat([tokens, torch.tensor([END_OF_DOCUMENT])]), [len(content) + 1])
        total += len(content)
    builder.finalize(f"{partial}.idx")
    os.replace(f"{partial}.bin", f"{target}.bin")
    os.replace(f"{partial}.idx", f"{target}.idx")
    return total


def _sources() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts and path.stat().st_size < 400_000:
            yield path


def _open(prefix: str, seq_length: int, seed: int) -> GPTDataset:
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise FileNotFoundError(f"data_prefix: {prefix}{suffix} does not exist; it must name an indexed dataset")
    caches = Path(f"{prefix}-cache")
    caches.mkdir(exist_ok=True)
    # The first process of a node to get the lock builds the missing index, whatever its rank. The others find it.
    with _locked(caches / ".lock"), alone():
        indexed = _indexed(prefix)
        documents = numpy.arange(indexed.document_indices.shape[0] - 1, dtype=numpy.int32)
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            split="1,0,0",
            path_to_cache=str(_cache_of(prefix, caches)),
            tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            mid_level_dataset_surplus=0.005,
        )
        return GPTDataset(indexed, prefix, documents, None, Split.train, config)


def _indexed(prefix: str) -> IndexedDataset:
    """The dataset. Raises ValueError that names the file where one of its two is not whole."""
    size = Path(f"{prefix}.bin").stat().st_size
    if not size:
        raise ValueError(f"data_prefix: {prefix}.bin is empty; build the dataset again")
    try:
        indexed = IndexedDataset(prefix, multimodal=False, mmap=True)
    except OSError:
        raise
    except Exception as error:  # Megatron, numpy and struct raise many kinds, most of them without a name.
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"data_prefix: {prefix}.idx is not the whole index of a dataset ({text})") from error
    index = indexed.index
    ends = index.sequence_pointers[-1:] + index.sequence_lengths[-1:].astype(numpy.int64) * index.dtype_size
    if size < (needed := int(ends.max(initial=0))):
        raise ValueError(f"data_prefix: {prefix}.bin has {size} bytes, and by its index it must have {needed}")
    return indexed


def _cache_of(prefix: str, caches: Path) -> Path:
    """The folder for what Megatron derives from this dataset. Its name is a digest of the .idx file, which says how
    long each document is: Megatron knows a dataset by its path only. Folders of other data that was here are removed,
    and so is a file that is not whole: Megatron builds it again.
    """
    with Path(f"{prefix}.idx").open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    for folder in caches.iterdir():
        if folder.name != digest and _CACHE_NAME.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    cache = caches / digest
    cache.mkdir(exist_ok=True)
    for part in cache.glob("*.npy"):
        try:
            numpy.load(part, mmap_mode="r")
        except (ValueError, EOFError) as error:
            _log.warning("%s is not whole and is built again: %s", part, error)
            part.unlink()
    return cache


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets in one process of a node at a time. Megatron itself has rank 0 build the index, then uses a barrier."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the byte-level corpus of the Python standard library.")
    parser.add_argument("--out", required=True, help="prefix of the dataset, for example build/corpus/stdlib")
    parser.add_argument("--bytes-max", type=int, default=8_000_000)
    arguments = parser.parse_args()
    total = build_standard_library_corpus(arguments.out, bytes_max=arguments.bytes_max)
    print(f"{arguments.out}: {total} bytes")


if __name__ == "__main__":
    main()
