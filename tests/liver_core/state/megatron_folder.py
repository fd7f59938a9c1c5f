"""Writes a folder as Megatron-LM's own training does with `--save`: its arguments, its samples, no small state of ours.

`generate_state_dict`, `save_checkpoint` and `_build_sharded_state_dict_metadata` of megatron/training/checkpointing.py
(core_v0.16.1) say what is in it. Runs in rank processes.
"""

from __future__ import annotations

import math
import queue
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_core.layout import Member
from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks_process import make_job, megatron_state

BATCH = 8


@dataclass(frozen=True)
class Saving:
    """How to write. `sharding`: of the optimizer state. `spoiled`: with a master in fp32 changed without its weight."""

    layout: str
    folder: str
    sharding: str
    spoiled: bool = False


def train_and_save(rank: int, port: int, setup: RankSetup, saving: Saving) -> dict[str, Any]:
    """Train three steps, save, train two more. Returns the state that was saved, and the loss of each step."""
    from liver_core.training.cursor import DataCursor
    from liver_core.worlds.megatron import retire, seed_streams

    world, job = world_of(rank, port, saving.layout), make_job(setup)
    state = job.build(world)
    state.scheduler = _scheduler_in_samples(state.optimizer)
    initialise(state)
    seed_streams(world, seed=7, step=0)
    cursor, losses, found = DataCursor(0, BATCH, 2), dict[int, float](), {}
    for step in range(1, 6):
        result = job.step(state, world, cursor.batches(world.coordinates.dp, world.layout.dp))
        state.optimizer.step()
        state.scheduler.step(increment=BATCH)
        cursor, losses[step] = cursor.advanced(), float(result.loss_sum) / max(1, result.loss_count)
        if step == 3:
            if saving.spoiled:
                state.optimizer.chained_optimizers[0].shard_fp32_from_float16_groups[0][0].mul_(2)
            _save(state, world, saving, step)
            found = megatron_state(state)
    retire(world)
    return {"losses": losses, "megatron": found}


def world_of(rank: int, port: int, layout: str) -> Any:
    from liver_core.handoff.messages import StoreAddress
    from liver_core.layout import ParallelLayout, Roster
    from liver_core.worlds.groups import connect_store
    from liver_core.worlds.megatron import activate, bring_up

    parallel = ParallelLayout.parse(layout)
    members = tuple(Member(f"megatron-{index}", 0) for index in range(parallel.world_size))
    store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=60)
    world = bring_up(Roster("megatron", 1, parallel, members), rank, store, host="127.0.0.1", timeout_s=60)
    activate(world)
    return world


def _scheduler_in_samples(optimizer: Any) -> Any:
    """The reference job's schedule, counted as Megatron's training counts."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=10 * BATCH, lr_decay_steps=10_000 * BATCH,
        lr_decay_style="cosine", start_wd=0.01, end_wd=0.01, wd_incr_steps=100 * BATCH, wd_incr_style="constant",
    )  # fmt: skip


def initialise(state: Any) -> None:
    """Weights that depend on names and shapes alone."""
    import torch

    from liver_core.state.megatron_optimizer import unwrapped

    for name, parameter in unwrapped(state.model).named_parameters():
        generator = torch.Generator().manual_seed(math.prod(parameter.shape) + len(name))
        with torch.no_grad():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.02 * drawn if parameter.dim() > 1 else torch.ones_like(drawn))
    state.optimizer.reload_model_params()


def _save(state: Any, world: Any, saving: Saving, step: int) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from liver_core.state.megatron_optimizer import unwrapped

    filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]
    content = {
        "distrib_optim_sharding_type": saving.sharding,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    metadata: Any = {**content, "dp_cp_group": world.collection.dp_cp}
    saved: dict[str, Any] = {"args": _arguments(world.layout, state.config, step), "checkpoint_version": 3.0}
    saved |= {"iteration": step, "model": unwrapped(state.model).sharded_state_dict(metadata=metadata)}
    saved["optimizer"] = state.optimizer.sharded_state_dict(saved, metadata=metadata)
    saved |= {"opt_param_scheduler": state.scheduler.state_dict(), "num_floating_point_operations_so_far": 0}
    path = Path(saving.folder) / f"iter_{step:07d}"
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    dist_checkpointing.save(saved, str(path), content_metadata=content)
    if dist.get_rank() == 0:
        (path.parent / "latest_checkpointed_iteration.txt").write_text(str(step))


def _arguments(layout: Any, config: Any, step: int) -> Namespace:
    """Of the reference job. Also what LiveR does not look at, with types that only Megatron knows."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    of_experts = {name: getattr(config, name) for name in vars(config) if name.startswith("moe_")}
    return Namespace(
        **of_experts, expert_model_parallel_size=layout.ep, num_experts=config.num_moe_experts,
        num_layers=config.num_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=4, group_query_attention=False, num_query_groups=1, kv_channels=config.kv_channels,
        padded_vocab_size=264, vocab_size=263, max_position_embeddings=32,
        seq_length=32, position_embedding_type="rope", rotary_base=10000, rotary_percent=1.0, rotary_interleaved=False,
        normalization="RMSNorm", norm_epsilon=1e-5, apply_layernorm_1p=False, swiglu=True, squared_relu=False,
        quick_geglu=False, add_bias_linear=False, add_qkv_bias=False, qk_layernorm=False,
        untie_embeddings_and_output_weights=True, multi_latent_attention=False, bf16=config.bf16, fp16=False,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, data_parallel_size=layout.dp,
        virtual_pipeline_model_parallel_size=None, use_distributed_optimizer=True, no_save_optim=None,
        no_save_rng=None, ckpt_format="torch_dist", global_batch_size=BATCH, micro_batch_size=2, seed=7,
        consumed_train_samples=step * BATCH, attention_backend=AttnBackend.auto, params_dtype=torch.float32,
        model_type=ModelType.encoder_or_decoder,
    )  # fmt: skip
