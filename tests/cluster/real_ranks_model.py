"""The small GPT that tests with real processes train, and the corpus it trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster.real_ranks import run_alone


def small_gpt(prefix: str, **changes: Any) -> dict[str, Any]:
    """Arguments of GptJob: 6 layers of 64; runs in TP 1, 2, 4, PP 1, 2, 3, 6 and DP up to 4 with a batch of 8 by 2."""
    return {
        "num_layers": 6,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 32,
        "padded_vocab_size": 264,
        "data_prefix": prefix,
        **changes,
    }


def build_corpus(folder: Path) -> str:
    """A few hundred KiB of the standard library's sources in Megatron's format. Returns the prefix."""
    prefix = str(folder / "stdlib")
    run_alone(_build, prefix)
    return prefix


def _build(prefix: str) -> int:
    from liver_core.training.corpus import build_standard_library_corpus

    return build_standard_library_corpus(prefix, bytes_max=300_000)
