"""What Megatron's own layout function says of models of real size, as digests that tests compare with ours.

    python -m tests.liver_core.layout.upstream_layout CHECKOUT            compare the digests with a checkout's
    python -m tests.liver_core.layout.upstream_layout CHECKOUT --write    write them anew

Megatron-LM has had such a function since 0.18: it says of every parameter where it lies in which buffer and bucket,
from shapes and sizes. It is read out of the checkout, since importing all of it needs packages for GPUs, and shares
nothing with our layout but the list of a rank's parameters and their sizes on it.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import subprocess
import sys
import textwrap
import types
import typing
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from liver_core.layout import Manifest, ParallelLayout, shard_ranges
from liver_core.layout.local_parameters import LocalParameter, local_parameters
from liver_core.layout.manifest import FLOAT32, GRAD
from liver_core.layout.parallel import BufferClass
from liver_core.memory.transformer_shape import TransformerShape, manifest_of
from tests.liver_core.layout.expert_models import BUCKETS, deepseek_671b, qwen_235b

FIXTURES = Path(__file__).with_name("upstream_layouts.json")
RANKS, SEED = 16, 11
PADDED = replace(BUCKETS, high_bandwidth_padding=True)
_70B = TransformerShape(80, 8_192, 64, 8, 28_672, 128_256, 8_192, buckets=PADDED)
_405B = TransformerShape(126, 16_384, 128, 8, 53_248, 128_256, 8_192, gradients_fp32=False, buckets=BUCKETS)
_3B = TransformerShape(32, 3_072, 24, 8, 8_192, 128_256, 8_192, is_tied=True, buckets=BUCKETS)


@cache
def model(name: str) -> Manifest:
    """One of those that LAYOUTS names. What is said to be fp32 has a buffer of its own in its chunk."""
    match name:
        case "70b":
            return manifest_of(_70B)
        case "70b, fp32 norms":
            return _with_fp32(manifest_of(_70B), "norm")
        case "405b":
            return manifest_of(_405B)
        case "3b tied":
            return manifest_of(_3B)
        case "235b":
            return qwen_235b()
        case "235b, 96 layers":
            return qwen_235b(96)
        case "671b, 64 layers, fp32 routers":
            return _with_fp32(deepseek_671b(), "router")
    raise KeyError(name)


def _with_fp32(manifest: Manifest, part: str) -> Manifest:
    wide = (replace(each, dtype=FLOAT32) if part in each.name else each for each in manifest.parameters)
    return replace(manifest, parameters=tuple(wide))


LAYOUTS = (
    ("70b", "TP8xDP16"),
    ("70b", "TP8xPP4xDP32"),
    ("70b", "TP4xPP8xDP8xCP4"),
    ("70b", "TP8xPP4xDP32xVPP5"),
    ("70b, fp32 norms", "TP8xPP2xDP64"),
    ("70b, fp32 norms", "TP2xPP8xDP128"),
    ("405b", "TP8xPP9xDP7"),
    ("405b", "TP8xPP14xDP146"),
    ("405b", "TP16xPP7xDP64"),
    ("3b tied", "TP2xDP60"),
    ("3b tied", "TP1xDP512"),
    ("3b tied", "TP8xDP3"),
    ("235b", "TP8xDP32xEP32"),
    ("235b", "TP8xPP2xDP4"),
    ("235b", "TP4xPP2xDP32xEP16xETP2"),
    ("235b", "TP4xPP2xDP32xEP32xETP1"),
    ("235b, 96 layers", "TP2xPP8xDP64xEP16xETP1"),
    ("235b, 96 layers", "TP1xPP8xDP16xCP2xEP8xVPP4"),
    ("671b, 64 layers, fp32 routers", "TP1xPP16xDP128xEP64"),
    ("671b, 64 layers, fp32 routers", "TP2xPP8xDP64xEP32xVPP4xETP1"),
    ("671b, 64 layers, fp32 routers", "TP1xPP4xDP64xEP64xVPP4"),
    ("671b, 64 layers, fp32 routers", "TP2xPP16xDP4096xEP64xETP1"),
)


def drawn_ranks(layout: ParallelLayout) -> list[int]:
    """The ends of the first and of the last stage, and others."""
    size, stage = layout.world_size, layout.world_size // layout.pp
    drawn = random.Random(SEED).sample(range(size), min(RANKS, size))
    return sorted(list(dict.fromkeys([0, stage - 1, size - stage, size - 1, *drawn]))[:RANKS])


def digest(rank: int, buckets: list[list[Any]], parts: dict[str, list[int]]) -> str:
    """Of the dtypes and padded sizes of a rank's buckets, and of where each parameter that it owns a part of lies."""
    text = json.dumps([rank, buckets, [[name, *parts[name]] for name in sorted(parts)]])
    return sha256(text.encode()).hexdigest()[:16]


def _bucket(of: str, *rest: Any) -> list[Any]:
    return [*rest, of] if of == BufferClass.EXPERT else list(rest)


def ours(manifest: Manifest, layout: ParallelLayout, rank: int) -> str:
    """By the product's layout."""
    held = shard_ranges(manifest, layout, rank)
    buckets = [_bucket(*bucket.buffer, bucket.padded_numel) for bucket in held.buckets]
    parts = {part.name: [part.param_start, part.param_stop, part.region_offset] for part in held.parameters}
    return digest(rank, buckets, parts)


class Upstream:
    """Megatron's function, out of a checkout of Megatron-LM."""

    def __init__(self, checkout: Path) -> None:
        import torch

        core = checkout / "megatron" / "core"
        spec = importlib.util.spec_from_file_location("param_layout", core / "optimizer" / "param_layout.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["param_layout"] = module
        spec.loader.exec_module(module)
        scope: dict[str, Any] = {**vars(typing), **vars(module), "torch": torch}
        scope["_param_uses_quantized_storage"] = lambda parameter: False
        for path, name in (
            (core / "distributed" / "param_and_grad_buffer.py", "group_params_for_buffers"),
            (core / "optimizer" / "distrib_optimizer.py", "_compute_per_buffer_param_layout"),
            (core / "optimizer" / "distrib_optimizer.py", "compute_full_param_layout"),
        ):
            text = _function(path, name).replace("DistributedOptimizer._compute", "_compute")
            exec(text.replace("from ..optimizer.param_layout import BufferKey", "pass"), scope)
        self._torch, self._compute = torch, scope["compute_full_param_layout"]

    def digest(self, manifest: Manifest, layout: ParallelLayout, rank: int) -> str:
        """By Megatron's function, over parameters without memory."""
        at, rule, held = layout.coordinates(rank), manifest.bucket_rule, local_parameters(manifest, layout, rank)
        wide = next(kind for kind in manifest.kinds if kind.name == GRAD).dtype == FLOAT32
        config = types.SimpleNamespace(
            grad_reduce_in_fp32=wide, pad_buckets_for_high_nccl_busbw=rule.high_bandwidth_padding
        )
        dense = layout.dp * layout.cp, at.dp * layout.cp + at.cp
        same, in_stage = (layout.etp or layout.tp) * layout.ep, rank % (layout.tp * layout.cp * layout.dp)
        experts = layout.tp * layout.cp * layout.dp // same, in_stage // same
        laid_out = []
        for chunk in sorted({local.chunk for local in held}):
            made = [self._parameter(local, layout) for local in held if local.chunk == chunk]
            most = rule.elements_max_at(layout.dp) if at.pp == 0 and chunk == 0 else None
            found = self._compute(made, most, dense[0], config, experts[0])
            laid_out += [(chunk, key, buffer) for key, buffer in found.layouts.items()]
        buckets, parts, offset = [], {}, 0
        # As Megatron chains its optimizers.
        for chunk, key, buffer in sorted(laid_out, key=lambda each: each[1].is_expert_parallel):
            shards, shard = experts if key.is_expert_parallel else dense
            dtypes = [str(dtype).removeprefix("torch.") for dtype in (key.param_dtype, key.grad_dtype)]
            begins = []
            for first, last in buffer.bucket_indices:
                size = (last - first) // shards
                begins.append((first + shard * size, first + (shard + 1) * size, offset))
                buckets.append(_bucket("expert" if key.is_expert_parallel else "dense", chunk, *dtypes, last - first))
                offset += size
            for parameter, (first, last, bucket) in buffer.param_index_map.items():
                low, high, begin = begins[bucket]
                start, stop = max(low, first), min(high, last)
                if start < stop:
                    parts[parameter.named] = [start - first, stop - first, begin + start - low]
        return digest(rank, buckets, parts)

    def _parameter(self, local: LocalParameter, layout: ParallelLayout) -> Any:
        empty = self._torch.empty(local.shape, dtype=getattr(self._torch, local.spec.dtype), device="meta")
        made: Any = self._torch.nn.Parameter(empty)
        made.named, made.allreduce = local.name, not (local.spec.is_expert and layout.ep > 1)
        return made


def _function(path: Path, name: str) -> str:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
    raise SystemExit(f"{path} has no {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of NVIDIA/Megatron-LM")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    upstream, found = Upstream(options.checkout), {}
    for name, text in LAYOUTS:
        layout = ParallelLayout.parse(text)
        ranks = drawn_ranks(layout)
        found[f"{name} {text}"] = {str(rank): upstream.digest(model(name), layout, rank) for rank in ranks}
        print(f"{name} {text}: {len(ranks)} ranks", flush=True)
    asked = ["git", "-C", str(options.checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if options.write:
        FIXTURES.write_text(json.dumps({"megatron_lm": commit, "digests": found}, indent=1) + "\n")
        return 0
    known = json.loads(FIXTURES.read_text())
    unlike = [name for name in found if found[name] != known["digests"].get(name)]
    print(f"equal to those of {known['megatron_lm']}" if not unlike else f"other than {known['megatron_lm']}: {unlike}")
    return int(bool(unlike))


if __name__ == "__main__":
    sys.exit(main())
