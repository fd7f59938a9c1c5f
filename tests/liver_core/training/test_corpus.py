"""Samples follow from the data that is there now, whatever an index cache says of other data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.real_ranks import run_alone

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def test_data_that_is_built_anew_under_its_prefix_is_read_whole(tmp_path: Path):
    """Larger, smaller, and as large in bytes but cut otherwise: each as a node reads it that has no cache."""
    forms = [[40] * 50, [40] * 200, [40] * 10, [20, 60] * 5]
    here = [(str(tmp_path / "here"), form) for form in forms]
    fresh = [(str(tmp_path / f"fresh-{number}"), form) for number, form in enumerate(forms)]
    found = run_alone(_read_each, here + fresh, timeout_s=150.0)
    assert found[: len(forms)] == found[len(forms) :]
    assert [samples for samples, _ in found[: len(forms)]] == [124, 499, 24, 24]
    assert len(list((tmp_path / "here-cache").glob("[!.]*"))) == 1, "the caches of data that is gone are removed"


def test_a_dataset_that_is_cut_short_is_refused_by_file_and_a_cache_that_is_cut_short_is_built_anew(tmp_path: Path):
    (of_index, of_tokens, of_nothing), before, after = run_alone(_read_cut, str(tmp_path / "cut"), timeout_s=150.0)
    assert "data_prefix: " in of_index and "cut.idx is not the whole index of a dataset (ValueError: " in of_index
    assert "cut.bin has 200 bytes, and by its index it must have 400" in of_tokens
    assert "cut.bin is empty" in of_nothing
    assert before == after


def _read_cut(prefix: str) -> tuple[list[str], Any, Any]:
    """What is said where the index, or the tokens, are cut in half, or the tokens are gone; what is read before and
    after the cache is cut in half."""
    whole = _read_each([(prefix, [40] * 5)])
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    said = [_said_of(index, 0.5), _said_of(tokens, 0.5), _said_of(tokens, 0.0)]
    for part in Path(f"{prefix}-cache").rglob("*.npy"):
        os.truncate(part, part.stat().st_size // 2)
    return said, whole, [_read(prefix)]


def _said_of(file: Path, kept: float) -> str:
    """Of a dataset with so much of this file."""
    content = file.read_bytes()
    os.truncate(file, int(len(content) * kept))
    try:
        _read(str(file.with_suffix("")))
    except ValueError as error:
        return str(error)
    finally:
        file.write_bytes(content)
    return "nothing"


def _read_each(datasets: list[tuple[str, list[int]]]) -> list[tuple[int, list[list[int]]]]:
    """Writes each dataset, given by prefix and the lengths of its documents; returns how many samples it has, and their
    tokens."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    found = []
    for prefix, lengths in datasets:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
        start = 0
        for length in lengths:
            builder.add_document(torch.arange(start, start + length) % 251, [length])
            start += length
        builder.finalize(f"{prefix}.idx")
        found.append(_read(prefix))
    return found


def _read(prefix: str) -> tuple[int, list[list[int]]]:
    from liver_core.training.corpus import SampleReader

    reader = SampleReader(prefix, seq_length=16, seed=1)
    samples = len(reader._dataset)
    return samples, reader.batch(range(samples))["tokens"].tolist()
