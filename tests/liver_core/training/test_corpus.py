"""Samples follow from the data that is there now, whatever an index cache says of other data."""

from __future__ import annotations

from pathlib import Path

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


def _read_each(datasets: list[tuple[str, list[int]]]) -> list[tuple[int, list[list[int]]]]:
    """Writes each dataset, given by prefix and the lengths of its documents; returns how many samples it has, and their
    tokens."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from liver_core.training.corpus import SampleReader

    found = []
    for prefix, lengths in datasets:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
        start = 0
        for length in lengths:
            builder.add_document(torch.arange(start, start + length) % 251, [length])
            start += length
        builder.finalize(f"{prefix}.idx")
        reader = SampleReader(prefix, seq_length=16, seed=1)
        samples = len(reader._dataset)
        found.append((samples, reader.batch(range(samples))["tokens"].tolist()))
    return found
