"""A job goes on from what Megatron's training wrote: same bits, same losses, or an error that names the rule."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff.messages import Rung
from liver_core.layout import Member, ParallelLayout
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks import run_alone, run_ranks
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.rank.cutover.test_experts import BIAS, moe
from tests.liver_core.rank.support.chain import Chain, World, gather
from tests.liver_core.state.megatron_folder import BATCH, Saving, train_and_save
from tests.liver_core.trial.test_trial import trial
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
ITERATION = "iter_0000003"
Written = dict[str, tuple[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def setup(corpus: str) -> RankSetup:
    return RankSetup(small_gpt(corpus), global_batch=BATCH, last_step=5, record=True)


@pytest.fixture(scope="module")
def written(setup: RankSetup, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """By how the optimizer state is cut: the folder that was written, and what its ranks had and did."""
    found: Written = {}
    for sharding, ranks, layout in (("fully_reshardable", 2, "TP2"), ("dp_reshardable", 1, "TP1")):
        folder = tmp_path_factory.mktemp(sharding)
        ranks_said = run_ranks(train_and_save, ranks, setup, Saving(layout, str(folder), sharding))
        found[sharding] = (str(folder / ITERATION), ranks_said)
    return found


@pytest.mark.parametrize(("sharding", "layout"), [("fully_reshardable", "TP2"), ("dp_reshardable", "TP1")])
@pytest.mark.thorough
def test_in_the_same_layout_every_bit_and_the_next_losses_are_megatrons(
    setup: RankSetup, written: Written, sharding: str, layout: str
):
    path, ranks = written[sharding]
    chain = _go_on(setup, path, layout)
    records = chain.records[("switched", 1)]
    assert records.keys() == set(range(len(ranks)))
    for rank, said in enumerate(ranks):
        ours = records[rank]["megatron"]
        assert ours.keys() == said["megatron"].keys() and ours
        for name, tensors in said["megatron"].items():
            assert {"param", "exp_avg", "exp_avg_sq", "step"} <= tensors.keys() == ours[name].keys()
            for kind, tensor in tensors.items():
                assert tensor.tobytes() == ours[name][kind].tobytes(), f"rank {rank}: {kind} of {name}"
    assert chain.losses() == {step: ranks[0]["losses"][step] for step in (4, 5)}
    assert [row[3] for row in chain.steps] == [4 * BATCH, 5 * BATCH], "samples go on"


@pytest.mark.parametrize(("sharding", "layout"), [("fully_reshardable", "PP3"), ("dp_reshardable", "DP2")])
@pytest.mark.thorough
def test_in_another_layout_the_next_losses_are_megatrons_but_for_rounding(
    setup: RankSetup, written: Written, sharding: str, layout: str
):
    path, ranks = written[sharding]
    expected = {step: ranks[0]["losses"][step] for step in (4, 5)}
    assert _go_on(setup, path, layout).losses() == pytest.approx(expected, abs=5e-6)


@pytest.mark.thorough
def test_a_job_that_started_so_is_handed_over_live(corpus: str, written: Written):
    path, ranks = written["fully_reshardable"]
    with Cluster(RankSetup(small_gpt(corpus), global_batch=BATCH)) as cluster:
        cluster.launch("TP2", "ab", checkpoint=path)
        cluster.await_step(Member("a", 0), 4)
        cluster.handoff("PP2", "cd", rung=Rung.LIVE)
        cluster.await_step(Member("c", 0), max(row[1] for row in cluster.steps(Member("c", 0))) + 2)
        cluster.stop()
        chain = gather(cluster, (World("TP2", "ab"), World("PP2", "cd")))
    assert chain.losses()[5] == pytest.approx(ranks[0]["losses"][5], abs=5e-6)


@pytest.mark.parametrize(
    ("sharding", "layout", "exactly"),
    sample(
        [
            ("fully_reshardable", "DP2xEP2", True),
            ("fully_reshardable", "PP2", False),
            ("dp_reshardable", "DP2xEP2", True),
            ("dp_reshardable", "DP4xEP2", False),
        ],
        ("dp_reshardable", "DP2xEP2", True),
    ),
)
def test_a_job_with_experts_goes_on_with_and_without_ep(
    corpus: str, tmp_path: Path, sharding: str, layout: str, exactly: bool
):
    setup = RankSetup(moe(corpus, **BIAS), global_batch=BATCH, last_step=5, record=True)
    ranks = run_ranks(train_and_save, 2, setup, Saving("DP2xEP2", str(tmp_path), sharding))
    losses = _go_on(setup, str(tmp_path / ITERATION), layout).losses()
    # Each rank of the two knows the loss of its own samples.
    expected = {step: sum(rank["losses"][step] for rank in ranks) / 2 for step in (4, 5)}
    assert losses == pytest.approx(expected, abs=1e-7 if exactly else 5e-6)


@pytest.mark.thorough
def test_state_of_experts_that_is_not_cut_by_parameters_is_refused_in_another_ep(corpus: str, tmp_path: Path):
    setup = RankSetup(moe(corpus, **BIAS), global_batch=BATCH, last_step=5)
    run_ranks(train_and_save, 2, setup, Saving("DP2xEP2", str(tmp_path), "dp_reshardable"))
    with pytest.raises(AssertionError, match="loads only in TP1xPP1xEP2xETP1 without virtual stages, in any DP, and"):
        _go_on(setup, str(tmp_path / ITERATION), "DP2")


@pytest.mark.thorough
def test_state_that_only_fits_its_own_layout_is_refused_elsewhere_before_training(setup: RankSetup, written: Written):
    with pytest.raises(AssertionError, match="aborted") as failed:
        _go_on(setup, written["dp_reshardable"][0], "TP2")
    text = str(failed.value)
    assert "dp_reshardable, so it loads only in TP1xPP1" in text and "--dist-ckpt-optim-fully-reshardable" in text


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"padded_vocab_size": 272}, "padded_vocab_size is 264 there and 272 in the job's model; must be equal"),
        ({"num_layers": 5}, "num_layers is 6 there and 5 in the job's model"),
        ({"num_query_groups": 2}, "num_query_groups is 4 there and 2 in the job's model"),
        ({"precision": "bf16"}, "bf16 is False there and True in the job's model"),
        ({"decay_steps": 500}, "scheduler: lr_decay_steps is 10000 there and 500 in the job (in steps of the job's"),
    ],
)
@pytest.mark.thorough
def test_another_model_or_schedule_is_refused_by_field(
    corpus: str, written: Written, changes: dict[str, Any], rule: str
):
    setup = RankSetup(small_gpt(corpus, **changes), global_batch=BATCH)
    assert rule in run_ranks(_refusal, 1, setup, written["fully_reshardable"][0])[0]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"no_save_optim": True}, "has no optimizer state; write it without --no-save-optim"),
        ({"use_distributed_optimizer": False}, "write it with --use-distributed-optimizer"),
        ({"sharding": "dp_zero_gather_scatter"}, "distrib_optim_sharding_type is dp_zero_gather_scatter; must be"),
        ({"iteration": 12}, "iteration is 12 there; the folder must have its name"),
    ],
)
@pytest.mark.thorough
def test_what_cannot_be_loaded_is_refused_by_field(written: Written, tmp_path: Path, change: dict[str, Any], rule: str):
    copy = shutil.copytree(written["fully_reshardable"][0], tmp_path / ITERATION)
    assert rule in run_alone(_refusal_after, str(copy), change)


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "common.pt"])
@pytest.mark.thorough
def test_half_a_folder_is_refused_by_name(written: Written, tmp_path: Path, name: str):
    copy = Path(shutil.copytree(written["fully_reshardable"][0], tmp_path / ITERATION))
    (copy / name).unlink()
    assert f"start_from {copy}: {name} is missing" in run_alone(_refusal_after, str(copy), {})


@pytest.mark.thorough
def test_the_legacy_format_is_refused_by_name(tmp_path: Path):
    (tmp_path / ITERATION / "mp_rank_00").mkdir(parents=True)
    assert "ckpt_format is torch; write it with --ckpt-format torch_dist" in run_alone(
        _refusal_after, str(tmp_path / ITERATION), {}
    )


@pytest.mark.thorough
def test_other_gradient_buckets_are_refused_by_field_where_the_state_is_cut_by_them(corpus: str, written: Written):
    buckets = {"overlap_grad_reduce": True, "ddp_bucket_size": 20_000}
    with pytest.raises(AssertionError, match="aborted") as failed:
        _go_on(RankSetup(small_gpt(corpus, **buckets), global_batch=BATCH), written["dp_reshardable"][0], "TP1")
    assert "gradient buckets must be those that it was written with (ddp in the job file)" in str(failed.value)


@pytest.mark.thorough
def test_a_master_that_is_not_the_one_of_its_weight_is_refused(corpus: str, tmp_path: Path):
    setup = RankSetup(small_gpt(corpus, precision="bf16"), global_batch=BATCH, last_step=5)
    run_ranks(train_and_save, 1, setup, Saving("TP1", str(tmp_path), "dp_reshardable", spoiled=True))
    with pytest.raises(AssertionError, match="aborted") as failed:
        _go_on(setup, str(tmp_path / ITERATION), "TP1")
    assert "the fp32 master of " in str(failed.value) and "is not the one of its weight" in str(failed.value)


@pytest.mark.parametrize(
    ("sharding", "result", "text"),
    [
        ("fully_reshardable", "ok", "goes on after iteration 3 of Megatron's training"),
        ("dp_reshardable", "missing", "loads only in TP1xPP1 without virtual stages, in any DP, and not in TP2"),
    ],
)
@pytest.mark.thorough
def test_a_trial_says_whether_a_job_can_start_from_it(
    corpus: str, written: Written, sharding: str, result: str, text: str
):
    in_batches_half_as_large = {"warmup_steps": 20, "decay_steps": 20_000}
    changes = {
        "args": small_gpt(corpus, **in_batches_half_as_large),
        "layouts": ("TP1", "TP2"),
        "start_from": written[sharding][0],
    }
    said = trial("liver_core.training.gpt:GptJob", corpus, **changes)["start_from"]
    assert said["result"] == result and text in said["text"]


def _go_on(setup: RankSetup, path: str, layout: str) -> Chain:
    nodes = "abcd"[: ParallelLayout.parse(layout).world_size]
    with Cluster(setup) as cluster:
        cluster.launch(layout, nodes, checkpoint=path)
        cluster.finish()
        return gather(cluster, (World(layout, nodes),))


def _refusal(rank: int, port: int, setup: RankSetup, path: str) -> str:
    from liver_core.state.megatron_checkpoint import CheckpointError, read_megatron_checkpoint
    from liver_core.worlds.megatron import retire
    from tests.cluster.real_ranks_process import make_job
    from tests.liver_core.state.megatron_folder import world_of

    world, job = world_of(rank, port, "TP1"), make_job(setup)
    theirs = read_megatron_checkpoint(path)
    assert theirs is not None
    state = job.build(world)
    try:
        theirs.check(job, state, world)
    except CheckpointError as error:
        return str(error)
    finally:
        retire(world)
    return ""


def _refusal_after(path: str, change: dict[str, Any]) -> str:
    import torch

    from liver_core.state.megatron_checkpoint import CheckpointError, read_megatron_checkpoint

    if change:
        common = torch.load(file := Path(path) / "common.pt", weights_only=False)
        sharding, iteration = change.pop("sharding", None), change.pop("iteration", None)
        vars(common["args"]).update(change)
        common["content_metadata"]["distrib_optim_sharding_type"] = sharding or "fully_reshardable"
        common["iteration"] = iteration or 3
        torch.save(common, file)
    try:
        read_megatron_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return ""
