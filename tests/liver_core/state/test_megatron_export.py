"""An exported checkpoint is what Megatron-LM loads: tracker, arguments, and every bit by Megatron's own loader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service.cli.main import app
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks import run_alone, start_ranks
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import local_weights, make_job, megatron_state
from tests.liver_core.rank.cutover.test_experts import BIAS, moe
from tests.liver_core.rank.support.chain import World, gather, load_with_megatron
from tests.liver_core.state.megatron_folder import world_of

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(240)]

EVERY, STEPS, BATCH = 3, 5, 8


@pytest.fixture(scope="module")
def setup(corpus: str) -> RankSetup:
    # Several buckets, grouped heads: what Megatron is told, and where a bucket is padded, has to be right.
    arguments = small_gpt(corpus, num_query_groups=2, overlap_grad_reduce=True, ddp_bucket_size=20_000)
    return RankSetup(arguments, global_batch=BATCH, last_step=STEPS)


@pytest.fixture(scope="module")
def trained(setup: RankSetup, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run on PP2xDP2: the folder of its checkpoints, after steps 3 and 5, and its loss of each step."""
    folder = tmp_path_factory.mktemp("written")
    with Cluster(replace(setup, checkpoints=(str(folder), EVERY, 3))) as cluster:
        cluster.launch("PP2xDP2", "abcd")
        cluster.finish()
        return folder, gather(cluster, (World("PP2xDP2", "abcd"),)).losses()


@pytest.fixture(scope="module")
def written(trained: tuple[Path, dict[int, float]]) -> Path:
    return trained[0]


@pytest.fixture(scope="module")
def exported(written: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The export of step 3, and what the command says about it."""
    target = tmp_path_factory.mktemp("exported") / "megatron"
    return target, json.loads(_export(written, target, "--step", str(EVERY), "--json").stdout)


def test_the_folder_holds_what_megatrons_training_looks_for(exported: tuple[Path, dict[str, Any]]):
    folder, said = exported
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(EVERY)
    assert sorted(entry.name for entry in folder.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]
    assert not list((folder / "iter_0000003").glob("liver_*"))
    assert run_alone(_damage, str(folder / "iter_0000003")) == "", "a job may start from it"
    assert said["iteration"] == EVERY and said["consumed_samples"] == EVERY * BATCH and said["remarks"] == []
    # Without --attention-softmax-in-fp32, Megatron's gradients in bfloat16 are others than the job's.
    expected = {"--use-checkpoint-args", "--attention-softmax-in-fp32", "--global-batch-size 8", "--adam-eps 1e-08"}
    assert expected <= set(said["flags"])
    assert not {"--bf16", "--qk-layernorm", "--quick-geglu"} & set(said["flags"])


def test_the_arguments_are_those_of_the_model_that_trained(exported: tuple[Path, dict[str, Any]]):
    common = run_alone(_common_state, str(exported[0] / "iter_0000003"))
    assert not common["left over"]
    expected = {
        "num_layers": 6, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
        "group_query_attention": True, "kv_channels": 16, "seq_length": 32, "max_position_embeddings": 32,
        "padded_vocab_size": 264, "position_embedding_type": "rope", "rotary_base": 10000, "normalization": "RMSNorm",
        "swiglu": True, "squared_relu": False, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "norm_epsilon": 1e-05, "bf16": False,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "data_parallel_size": 2, "world_size": 4,
        "global_batch_size": BATCH, "micro_batch_size": 2, "consumed_train_samples": EVERY * BATCH,
        "no_save_rng": True, "no_save_optim": False, "ckpt_format": "torch_dist",
    }  # fmt: skip
    assert {name: common["args"].get(name) for name in expected} == expected
    assert (common["iteration"], common["checkpoint_version"]) == (EVERY, 3.0)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    schedule = common["opt_param_scheduler"]
    assert (schedule["num_steps"], schedule["lr_warmup_steps"]) == (EVERY * BATCH, 10 * BATCH), "counted in samples"
    assert schedule["lr_decay_steps"] == 10_000 * BATCH and schedule["max_lr"] == 1e-3
    for group in common["groups"]:
        assert (group["step"], type(group["step"]), group["bias_correction"]) == (EVERY, int, True)


@pytest.mark.parametrize("layout", ["TP2", "PP3"])
def test_megatrons_loader_finds_every_key_and_no_other_and_every_bit(
    setup: RankSetup, written: Path, exported: tuple[Path, dict[str, Any]], layout: str
):
    ranks = int(layout[-1])
    running = start_ranks(_load_as_megatron, [(rank, setup, str(exported[0]), layout) for rank in range(ranks)])
    loaded = running.join()
    (oracle,) = load_with_megatron(setup, [(str(written / "step-000000003"), layout)])
    for rank, ours in enumerate(loaded):
        for name, tensors in oracle[rank]["megatron"].items():
            for kind, tensor in tensors.items():
                assert tensor.tobytes() == ours["megatron"][name][kind].tobytes(), f"rank {rank}: {kind} of {name}"
        for name, bits in oracle[rank]["weights"].items():
            assert bits.tobytes() == ours["weights"][name].tobytes(), f"rank {rank}: weight {name}"
        assert ours["schedule"]["num_steps"] == EVERY * BATCH
        # Three steps of ten to warm up, whatever they are counted in.
        assert all(rate == pytest.approx(1e-3 * EVERY / 10) for rate in ours["rates"]) and ours["rates"]


@pytest.mark.parametrize("layout", ["TP1", "TP2"])
def test_a_model_made_of_the_export_alone_has_the_losses_of_the_job_that_went_on(
    corpus: str, trained: tuple[Path, dict[int, float]], exported: tuple[Path, dict[str, Any]], layout: str
):
    ranks = int(layout[-1])
    running = start_ranks(_train_as_megatron, [(rank, corpus, str(exported[0]), layout) for rank in range(ranks)])
    losses = running.join()[0]
    assert sorted(losses) == [4, 5]
    # The sums of another layout differ in their last bits.
    assert losses == pytest.approx({step: trained[1][step] for step in losses}, abs=5e-6)


def test_experts_are_exported_with_their_bias_and_two_optimizers(corpus: str, tmp_path: Path):
    setup = RankSetup(moe(corpus, **BIAS), global_batch=BATCH, last_step=EVERY)
    with Cluster(replace(setup, checkpoints=(str(tmp_path / "written"), EVERY, 3))) as cluster:
        cluster.launch("DP2xEP2", "ab")
        cluster.finish()
    folder = tmp_path / "megatron"
    said = json.loads(_export(tmp_path / "written", folder, "--json").stdout)
    assert said["remarks"] == [
        "experts: written with EP; Megatron loads it with --expert-model-parallel-size above 1 only"
    ]
    given = {"--num-experts 4", "--moe-router-topk 2", "--moe-layer-freq 1", "--moe-router-score-function sigmoid"}
    assert given | {"--moe-router-enable-expert-bias"} <= set(said["flags"])
    running = start_ranks(_load_as_megatron, [(rank, setup, str(folder), "DP2xEP2") for rank in range(2)])
    (oracle,) = load_with_megatron(setup, [(str(tmp_path / "written" / "step-000000003"), "DP2xEP2")])
    for rank, ours in enumerate(running.join()):
        assert len(ours["bias"]) == 4 and all(any(values) for values in ours["bias"].values())
        for name, tensors in oracle[rank]["megatron"].items():
            for kind, tensor in tensors.items():
                assert tensor.tobytes() == ours["megatron"][name][kind].tobytes(), f"rank {rank}: {kind} of {name}"


def test_without_a_step_the_newest_checkpoint_is_taken_and_the_source_stays(written: Path, tmp_path: Path):
    before = _contents(written)
    done = _export(written, tmp_path / "newest")
    assert "iteration 5, 40 samples" in done.stdout and "--load" in done.stdout
    assert (tmp_path / "newest" / "iter_0000005" / "common.pt").is_file()
    assert _contents(written) == before


def test_what_cannot_be_exported_is_refused_by_name_and_leaves_nothing(written: Path, tmp_path: Path):
    step, target = written / "step-000000005", tmp_path / "megatron"
    assert "--step 4: " in (said := _export(written, target, "--step", "4").stderr) and "these steps: 3, 5" in said
    (tmp_path / "taken").mkdir()
    assert f"--to {tmp_path}/taken: exists already" in _export(step, tmp_path / "taken").stderr
    assert f"--to {tmp_path}/no/where: {tmp_path}/no is not a folder" in _export(step, tmp_path / "no" / "where").stderr
    assert "is not a folder on this machine" in _export(tmp_path / "gone", target).stderr
    half = Path(shutil.copytree(step, tmp_path / "half"))
    (half / ".metadata").unlink()
    assert f"checkpoint {half}: .metadata is missing" in _export(half, target).stderr
    broken = Path(shutil.copytree(step, tmp_path / "broken"))
    (broken / "common.pt").write_bytes(b"no zip")
    assert f"checkpoint {broken}: common.pt cannot be read" in _export(broken, target).stderr
    many = Path(shutil.copytree(step, tmp_path / "many"))
    run_alone(_set_argument, str(many), "multi_latent_attention", True)
    assert f"checkpoint {many}: multi_latent_attention is True; only models" in _export(many, target).stderr
    old = Path(shutil.copytree(step, tmp_path / "old"))
    run_alone(_forget_arguments, str(old))
    assert "has no megatron_arguments, an older version wrote it" in _export(old, target).stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["broken", "half", "many", "old", "taken"]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("liver_small_state.json", "liver_small_state.json cannot be read: JSONDecodeError"),
        (".metadata", ".metadata cannot be read: "),
        ("__0_0.distcp", "bytes"),
    ],
)
def test_a_file_that_was_cut_off_is_named(written: Path, tmp_path: Path, name: str, rule: str):
    damaged = Path(shutil.copytree(written / "step-000000005", tmp_path / "damaged"))
    (damaged / name).write_bytes((damaged / name).read_bytes()[:-100])
    done = _export(damaged, tmp_path / "megatron")
    assert done.exit_code == 1
    assert f"checkpoint {damaged}: {name} " in done.stderr and rule in done.stderr
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize("rates", [(4e-4, 4e-4), (4e-4, 1e-4)], ids=["one rate", "two rates"])
def test_a_schedule_that_is_not_megatrons_goes_on_at_its_rates_and_the_command_says_so(
    written: Path, tmp_path: Path, rates: tuple[float, float]
):
    own = _with_scheduler(written / "step-000000005", tmp_path / "own", {"mine": 3})
    run_alone(_set_rates, str(own), rates)
    done = _export(own, tmp_path / "megatron")
    assert done.exit_code == 0, done.output
    assert "note: scheduler: the job's is not Megatron's" in done.stderr
    assert "--use-checkpoint-opt-param-scheduler" in done.stdout
    assert run_alone(_rates_of_next_step, str(tmp_path / "megatron" / "iter_0000005")) == list(rates)


def _export(source: Path, target: Path, *more: str):
    return CliRunner().invoke(app, ["jobs", "export", str(source), "--to", str(target), *more])


def _contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def _with_scheduler(step: Path, copy: Path, state: dict[str, Any]) -> Path:
    """A copy of a checkpoint with the state of another scheduler."""
    shutil.copytree(step, copy)
    small = json.loads((copy / "liver_small_state.json").read_text())
    (copy / "liver_small_state.json").write_text(json.dumps(small | {"scheduler": state}))
    (copy / "liver_files.json").unlink()  # It says how long the files were.
    return copy


def _damage(path: str) -> str:
    from liver_core.state.checkpoint_damage import damage_of

    return damage_of(Path(path))


def _common_state(path: str) -> dict[str, Any]:
    """With Megatron's own reader. The arguments as a dict."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    common = load_common_state_dict(path)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    names = ("iteration", "checkpoint_version", "content_metadata", "opt_param_scheduler")
    more = {"args", "optimizer", "num_floating_point_operations_so_far"}
    found = {"args": vars(common["args"]), "groups": groups, "left over": sorted(common.keys() - {*names, *more})}
    return found | {name: common[name] for name in names}


def _set_argument(checkpoint: str, name: str, value: Any) -> None:
    with _changed_common(checkpoint) as common:
        common["megatron_arguments"][name] = value


def _forget_arguments(checkpoint: str) -> None:
    with _changed_common(checkpoint) as common:
        del common["megatron_arguments"]


def _set_rates(checkpoint: str, rates: tuple[float, float]) -> None:
    with _changed_common(checkpoint) as common:
        for group, rate in zip(common["optimizer"]["optimizer"]["param_groups"], rates, strict=True):
            group["lr"] = rate


@contextmanager
def _changed_common(checkpoint: str) -> Iterator[dict[str, Any]]:
    import torch

    path = Path(checkpoint) / "common.pt"
    common = torch.load(path, weights_only=True)
    yield common
    torch.save(common, path)
    (path.parent / "liver_files.json").unlink(missing_ok=True)  # It says how long the files were.


def _rates_of_next_step(path: str) -> list[float]:
    """What Megatron's scheduler makes of the exported groups, loaded and stepped as its training does."""
    from types import SimpleNamespace

    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    common = _common_state(path)
    optimizer: Any = SimpleNamespace(param_groups=common["groups"])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=0, lr_decay_steps=800,
        lr_decay_style="linear", start_wd=0.01, end_wd=0.01, wd_incr_steps=800, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
    )  # fmt: skip
    scheduler.load_state_dict(common["opt_param_scheduler"])
    scheduler.step(BATCH)
    return [group["lr"] for group in common["groups"]]


def _load_as_megatron(rank: int, port: int, setup: RankSetup, folder: str, layout: str) -> dict[str, Any]:
    """What the job of `setup` holds in a world of `layout` after Megatron's loader."""
    from liver_core.worlds.megatron import retire

    world = world_of(rank, port, layout)
    state = make_job(setup).build(world)
    _load(state, world, folder)
    found = {
        "megatron": megatron_state(state),
        "weights": local_weights(state),
        "bias": {name: buffer.tolist() for name, buffer in state.model.module.named_buffers() if "bias" in name},
        "schedule": state.scheduler.state_dict(),
        "rates": {group["lr"] for group in state.optimizer.param_groups},
    }
    retire(world)
    return found


def _train_as_megatron(rank: int, port: int, corpus: str, folder: str, layout: str) -> dict[int, float]:
    """Loss of each step that Megatron's optimizer and scheduler make after the load. Nothing is known but the folder
    and the text."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    from liver_core.training.cursor import DataCursor
    from liver_core.worlds.megatron import retire, seed_streams
    from tests.liver_core.state.exported_job import ExportedJob

    told = load_common_state_dict(_iteration_folder(folder))["args"]
    world, job = world_of(rank, port, layout), ExportedJob(told, corpus)
    state = job.build(world)
    seed_streams(world, seed=told.seed, step=0)
    first = _load(state, world, folder)["iteration"] + 1
    cursor, losses = DataCursor(told.consumed_train_samples, job.global_batch, job.micro_batch), dict[int, float]()
    for step in range(first, STEPS + 1):
        result = job.step(state, world, cursor.batches(world.coordinates.dp, world.layout.dp))
        state.optimizer.step()
        state.scheduler.step(increment=job.global_batch)
        cursor, losses[step] = cursor.advanced(), float(result.loss_sum) / max(1, result.loss_count)
    retire(world)
    return losses


def _load(state: Any, world: Any, folder: str) -> dict[str, Any]:
    """What megatron/training/checkpointing.py of Megatron-LM core_v0.16.1 calls to load.

    Its metadata come from the checkpoint, its optimizer's description from the outer optimizer, and a key that is
    missing or left over is an error.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from liver_core.state.megatron_optimizer import unwrapped
    from liver_core.state.optimizer_chain import optimizer_chain
    from liver_core.state.optimizer_checkpoint import load_optimizer
    from tests.liver_core.rank.support.chain import step_without_gradients

    step_without_gradients(state)
    iteration = _iteration_folder(folder)
    metadata: Any = dist_checkpointing.load_content_metadata(iteration)
    metadata["dp_cp_group"] = world.collection.dp_cp
    wanted: dict[str, Any] = {"model": unwrapped(state.model).sharded_state_dict(metadata=metadata)}
    wanted["optimizer"] = state.optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    loaded: Any = dist_checkpointing.load(wanted, iteration, strict=StrictHandling.RAISE_ALL)
    unwrapped(state.model).load_state_dict(loaded["model"])
    chain = optimizer_chain(state.optimizer)
    for part in chain.parts:
        load_optimizer(
            part, loaded["optimizer"] if len(chain.parts) == 1 else loaded["optimizer"][chain.number_of(part)]
        )
    # Megatron's own training counts in samples, as the checkpoint does; a job may count its own schedule in steps.
    state.scheduler.use_checkpoint_opt_param_scheduler = True
    state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    return loaded


def _iteration_folder(folder: str) -> str:
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    return f"{folder}/iter_{int(tracker.read_text()):07d}"
