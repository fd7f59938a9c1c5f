"""Makes a folder that Megatron-LM's own training loads with `--load`, out of a checkpoint of this product.

    python -m liver_core.state.megatron_export CHECKPOINT FOLDER

Both are Megatron's distributed format with fully reshardable optimizer state, so tensors are copied as they are. What
is added is what Megatron keeps beside them. Needs torch, but no GPU and no Megatron. The source is only read.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from liver_core.state.checkpoint_damage import damage_of
from liver_core.state.checkpoint_files import ARGUMENTS, COMMON_FILE, FILES_FILE, SMALL_STATE_FILE

TRACKER_FILE = "latest_checkpointed_iteration.txt"
NEEDED_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads", "global_batch_size")
# Counted in iterations here and in samples by Megatron's training.
COUNTED_IN_SAMPLES = ("num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
GIVEN_SCHEDULE = "--use-checkpoint-opt-param-scheduler"
SCHEDULE = ("max_lr", "min_lr", "lr_decay_style", "start_wd", "end_wd", "wd_incr_style", *COUNTED_IN_SAMPLES)
# Of the arguments in a checkpoint, Megatron's `--use-checkpoint-args` does not take these over.
TO_BE_GIVEN = (
    "micro_batch_size",
    "global_batch_size",
    "lr",
    "min_lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "norm_epsilon",
    "lr_warmup_init",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_style",
    "seed",
)
OF_EXPERTS = (
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_score_function",
    "moe_router_dtype",
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
)
"""Versions of Megatron differ in which of them they take over: all are given."""
EXPERT_SWITCHES = (
    *("moe_router_enable_expert_bias", "moe_router_pre_softmax", "moe_shared_expert_gate"),
    "moe_pad_expert_input_to_capacity",
)
OF_SEVERAL_WORDS = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
SWITCHES = ("bf16", "fp16", "qk_layernorm", "attention_softmax_in_fp32", "fp32_residual_connection", "quick_geglu")
# No such model has been exported. Its projections would need arguments of their own.
NOT_EXPORTED = ("multi_latent_attention",)


class ExportError(RuntimeError):
    """A checkpoint cannot be exported. The text names the path or field and the rule."""


class DamagedSource(ExportError):
    """The checkpoint itself cannot be loaded by anybody."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was made. `flags`: for `pretrain_gpt.py`. `remarks`: what Megatron will not do as the job did."""

    folder: str
    source: str
    iteration: int
    consumed_samples: int
    flags: list[str]
    remarks: list[str]


def export_checkpoint(source: Path, folder: Path) -> Exported:
    """Make `folder` out of the checkpoint `source`. It is complete or absent. Raises ExportError."""
    small = _small_state(source)
    if folder.exists() or folder.is_symlink():
        raise ExportError(f"--to {folder}: exists already; name a folder that does not")
    if not folder.parent.is_dir():
        raise ExportError(f"--to {folder}: {folder.parent} is not a folder; make it first")
    common = _read(source, COMMON_FILE, lambda path: torch.load(path, map_location="cpu", weights_only=True))
    arguments, remarks = _arguments(source, common), list[str]()
    if activation := arguments.pop("activation"):
        remarks.append(f"activation: Megatron's arguments cannot say {activation}; load it into a model of your own")
    schedule = _megatron_schedule(small, arguments["global_batch_size"])
    if schedule is None:
        remarks.append(
            "scheduler: the job's is not Megatron's, so Megatron goes on at the rate of this step; for a schedule, "
            f"replace {GIVEN_SCHEDULE} by --override-opt-param-scheduler and flags of your own"
        )
    if arguments.get("num_experts"):
        remarks.append(f"experts: {_chain_remark(len(_optimizers(common)))}")
    _add(common, small, arguments, schedule)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        _fill(partial, source, common)
        partial.chmod(0o777 & ~_umask())
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Exported(str(folder), str(source), small["step"], small["consumed_samples"], flags_of(arguments), remarks)


def _small_state(source: Path) -> dict[str, Any]:
    if not source.is_dir():
        raise ExportError(f"checkpoint {source}: is not a folder on this machine")
    if damage := damage_of(source):
        raise DamagedSource(f"checkpoint {source}: {damage}")
    return _read(source, SMALL_STATE_FILE, lambda path: json.loads(path.read_text()))


def _arguments(source: Path, common: dict[str, Any]) -> dict[str, Any]:
    """Taken out of `common`. Megatron keeps them there under another name."""
    arguments = common.pop(ARGUMENTS, None)
    if arguments is None:
        raise ExportError(
            f"checkpoint {source}: {COMMON_FILE} has no {ARGUMENTS}, an older version wrote it; "
            "resume the job with this version and write another with liver jobs checkpoint"
        )
    if absent := [name for name in NEEDED_ARGUMENTS if name not in arguments]:
        raise ExportError(f"checkpoint {source}: {ARGUMENTS} lacks {', '.join(absent)}, which Megatron needs")
    if found := [name for name in NOT_EXPORTED if arguments.get(name)]:
        said = f"{found[0]} is {arguments[found[0]]}"
        raise ExportError(f"checkpoint {source}: {said}; only models with plain attention can be exported")
    return arguments


def _read(source: Path, name: str, reader: Callable[[Path], Any]) -> Any:
    try:
        return reader(source / name)
    except Exception as error:
        # torch, pickle and json raise many kinds, some with pages of advice. A person needs to know which file it was.
        raise ExportError(f"checkpoint {source}: {name} cannot be read: {type(error).__name__}") from error


def _add(
    common: dict[str, Any], small: Mapping[str, Any], arguments: dict[str, Any], schedule: dict[str, Any] | None
) -> None:
    """Add to `common.pt`, which holds everything that is not cut into shards, what Megatron's training keeps there."""
    groups = [group for part in _optimizers(common) for group in part["optimizer"]["param_groups"]]
    for group in groups:
        _fit_any_adam(group)
    common["args"] = Namespace(
        **arguments,
        consumed_train_samples=small["consumed_samples"],
        consumed_valid_samples=0,
        skipped_train_samples=0,
        add_position_embedding=True,
        ckpt_format="torch_dist",
        dist_ckpt_optim_fully_reshardable=True,
        no_save_optim=False,
        # Random streams are derived anew from seed and step after every change of the world. None are kept.
        no_save_rng=True,
    )
    common["checkpoint_version"] = 3.0
    common["iteration"] = small["step"]
    common["num_floating_point_operations_so_far"] = 0
    common["opt_param_scheduler"] = schedule or _constant_schedule(groups, small["consumed_samples"])
    common["content_metadata"] = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _optimizers(common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of Megatron's chain: one for dense parameters and, with EP, one for experts."""
    whole = common["optimizer"]
    return [whole] if "optimizer" in whole else list(whole.values())


def _chain_remark(optimizers: int) -> str:
    """Megatron loads as many optimizers as were saved. Its tensors do not depend on that, but its loader does."""
    if optimizers > 1:
        return "written with EP; Megatron loads it with --expert-model-parallel-size above 1 only"
    return "written without EP; Megatron loads it with --expert-model-parallel-size 1 only"


def _fit_any_adam(group: dict[str, Any]) -> None:
    """Torch's Adam counts steps in floats and knows no `bias_correction`. The fused Adams of Apex and Transformer
    Engine count in ints and take their settings from the checkpoint."""
    if isinstance(step := group.get("step"), float) and step.is_integer():
        group["step"] = int(step)
    if "betas" in group:
        group.setdefault("bias_correction", True)


def _megatron_schedule(small: Mapping[str, Any], batch: int) -> dict[str, Any] | None:
    """The state of Megatron's scheduler in its training's units. None if the job's own scheduler is another."""
    saved = small["scheduler"]
    if saved is None or not set(SCHEDULE) <= saved.keys():
        return None
    return {name: saved[name] * batch if name in COUNTED_IN_SAMPLES else saved[name] for name in SCHEDULE}


def _constant_schedule(groups: list[dict[str, Any]], samples: int) -> dict[str, Any]:
    """Goes on at the rate that stands. Without a schedule Megatron loads no optimizer state either.

    Megatron prefers the limits of a parameter group to those of the schedule, so groups only keep them if they differ.
    """
    rates = {group["lr"] for group in groups}
    for group in groups:
        for name in ("max_lr", "min_lr"):
            group.pop(name, None)
        if len(rates) > 1:
            group.update(max_lr=group["lr"], min_lr=group["lr"])
    rate, decay = max(rates), max(group["weight_decay"] for group in groups)
    steps = {"lr_warmup_steps": 0, "lr_decay_steps": max(1, samples), "wd_incr_steps": max(1, samples)}
    styles = {"lr_decay_style": "constant", "wd_incr_style": "constant"}
    return {"max_lr": rate, "min_lr": rate, "start_wd": decay, "end_wd": decay, "num_steps": samples, **steps, **styles}


def _fill(folder: Path, source: Path, common: dict[str, Any]) -> None:
    iteration = folder / f"iter_{common['iteration']:07d}"
    shutil.copytree(source, iteration, ignore=lambda _folder, _names: {COMMON_FILE, SMALL_STATE_FILE, FILES_FILE})
    torch.save(common, iteration / COMMON_FILE)
    (folder / TRACKER_FILE).write_text(str(common["iteration"]))


def _umask() -> int:
    present = os.umask(0)
    os.umask(present)
    return present


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """For `pretrain_gpt.py`, of what `megatron_arguments` found."""
    names, on_off = TO_BE_GIVEN, SWITCHES
    if arguments.get("num_experts"):
        names, on_off = (*TO_BE_GIVEN, *OF_EXPERTS), (*SWITCHES, *EXPERT_SWITCHES)
    switches = [_flag(name) for name in on_off if arguments.get(name)]
    given = [f"{_flag(name)} {_value(name, arguments[name])}" for name in names if name in arguments]
    return ["--use-checkpoint-args", "--use-distributed-optimizer", GIVEN_SCHEDULE, *switches, *given]


def _value(name: str, value: Any) -> str:
    """On a command line: one word, but for a list of which Megatron takes a word each."""
    if name in OF_SEVERAL_WORDS and isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).replace(" ", "")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def main(arguments: list[str]) -> int:
    """Export, and say on standard output as JSON what was made or what is wrong."""
    source, folder = (Path(argument) for argument in arguments)
    try:
        said = asdict(export_checkpoint(source, folder))
    except (ExportError, OSError) as error:
        said = {"error": str(error), "damaged": isinstance(error, DamagedSource)}
    sys.stdout.write(json.dumps(said) + "\n")
    return int("error" in said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
