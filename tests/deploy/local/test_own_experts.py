"""A job of a user's own module, with experts, through a whole fleet: it grows, hears a notice, is drained, loses a node
without one, comes back from its checkpoint, is suspended, goes on in another layout, and is exported. Its losses are
those of one process of Megatron alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.local.api import Api, interrupt
from deploy.local.cluster import Cluster
from deploy.local.processes import Processes
from service.cli.main import app
from tests.cluster.real_ranks import run_alone
from tests.deploy.demo.test_unannounced_loss import job, last_step, trains_on, wait

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(900)]

ARGUMENTS = {"num_layers": 6, "num_experts": 4}
BATCH, SEED = 8, 3
LAYOUTS = {4: "DP4xEP4", 3: "PP3", 2: "DP2xEP2", 1: "TP1"}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path / "logs")
    yield made
    made.close()


def job_file(folder: Path) -> dict[str, Any]:
    return {
        "name": "own-moe",
        "entrypoint": "own_moe:OwnMoe",
        "workdir": str(folder / "own"),
        "model": {
            "num_layers": ARGUMENTS["num_layers"],
            "num_experts": ARGUMENTS["num_experts"],
            "hidden_size": 32,
            "num_attention_heads": 4,
            "padded_vocab_size": 128,
            "seq_length": 32,
            "moe_ffn_hidden_size": 24,
        },
        "args": {},
        "global_batch": BATCH,
        "micro_batch": 1,
        "seed": SEED,
        "nodes": {"min": 1, "max": 4},
        "layouts": {"pinned": [{"nodes": count, "layout": layout} for count, layout in LAYOUTS.items()]},
        "checkpoint": {"path": str(folder / "checkpoints"), "every_steps": 10},
        "stop": {"steps": 100_000},
    }


def test_a_job_of_its_own_with_experts_lives_through_a_fleet(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    shutil.copy(Path(__file__).with_name("own_moe.py"), tmp_path / "own" / "own_moe.py")
    cluster = Cluster(tmp_path, processes)
    cluster.start_service()
    api = cluster.await_service()
    for node_id in ("node-a", "node-b"):
        cluster.start_node(node_id)
    wait(120, lambda: len(cluster.ready_nodes(api)) == 2, "two ready nodes")
    job_id = api.post("/api/v1/jobs", job_file(tmp_path))["job_id"]
    moves(api, job_id, {"node-a", "node-b"}, "DP2xEP2")
    for node_id in ("node-c", "node-d"):
        cluster.start_node(node_id)
    moves(api, job_id, {"node-a", "node-b", "node-c", "node-d"}, "DP4xEP4")

    leaver = sorted(job(api, job_id)["nodes"])[-1]
    interrupt(cluster.nodes[leaver].imds_url, ends_in_s=120.0)
    wait(120, lambda: leaver not in job(api, job_id)["nodes"], f"the handoff away from {leaver}")
    cluster.end_node(leaver)
    moves(api, job_id, set(job(api, job_id)["nodes"]), "PP3")
    drained = sorted(job(api, job_id)["nodes"])[-1]
    api.post(f"/api/v1/nodes/{drained}/drain", {"in_s": 120})
    wait(120, lambda: drained not in job(api, job_id)["nodes"], f"the handoff away from {drained}")
    moves(api, job_id, set(job(api, job_id)["nodes"]), "DP2xEP2")
    assert not job(api, job_id)["lost_steps"], "three handoffs and no restart"
    said = [(row["state"], row["rung"]) for row in api.handoffs(job_id) if row["state"] == "active"]
    assert len(said) >= 3 and {rung for _, rung in said} == {"live"}, api.handoffs(job_id)

    lost = sorted(job(api, job_id)["nodes"])[-1]
    cluster.end_node(lost)
    wait(180, lambda: lost not in job(api, job_id)["nodes"] and job(api, job_id)["state"] == "running", "a restart")
    moves(api, job_id, set(job(api, job_id)["nodes"]), "TP1")
    (last,) = job(api, job_id)["nodes"]
    interrupt(cluster.nodes[last].imds_url, ends_in_s=40.0)
    wait(60, lambda: job(api, job_id)["state"] == "suspended", "the suspension")
    cluster.end_node(last)
    lost_steps = job(api, job_id)["lost_steps"]
    for node_id in ("node-e", "node-f"):
        cluster.start_node(node_id)
    moves(api, job_id, {"node-e", "node-f"}, "DP2xEP2")
    assert job(api, job_id)["lost_steps"] == lost_steps, "a job that is suspended saves its last step"
    api.post(f"/api/v1/jobs/{job_id}/stop")
    wait(90, lambda: job(api, job_id)["state"] == "stopped", "the end of the job")

    losses = {row["step"]: row["loss"] for row in api.steps(job_id, after=0)}
    assert sorted(losses) == list(range(1, max(losses) + 1))
    steps = min(max(losses), 150)
    alone = run_alone(losses_alone, steps, timeout_s=200.0)
    assert max(abs(losses[step] - alone[step]) for step in alone) < 2e-4
    exported = CliRunner().invoke(
        app, ["jobs", "export", str(tmp_path / "checkpoints"), "--to", str(tmp_path / "megatron"), "--json"]
    )
    assert exported.exit_code == 0, exported.output
    assert "--num-experts 4" in json.loads(exported.stdout)["flags"]


def moves(api: Api, job_id: str, nodes: set[str], layout: str) -> None:
    """Wait until the job trains there, and for twelve steps more."""
    wait(150, lambda: trains_on(api, job_id, nodes), f"steps on {sorted(nodes)}")
    assert layout in str(job(api, job_id)["layout"]) or layout == "TP1", job(api, job_id)["layout"]
    before = last_step(api, job_id)
    wait(120, lambda: last_step(api, job_id) >= before + 12, "twelve steps more")


def losses_alone(steps: int) -> dict[int, float]:
    """One process, Megatron's own optimizer step, no handoff and no loop of ours."""
    from torch.distributed import TCPStore

    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.state import megatron_optimizer as megatron
    from liver_core.state.buckets import bucket_rule
    from liver_core.state.optimizer_chain import discover_kinds, optimizer_chain
    from liver_core.state.optimizer_step import refresh_weights
    from liver_core.training.cursor import DataCursor
    from liver_core.worlds.megatron import activate, bring_up, building, prepare_process, seed_streams
    from tests.deploy.local.own_moe import OwnMoe

    prepare_process()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    roster = Roster("alone", 1, ParallelLayout(), (Member("a", 0),))
    world = bring_up(roster, 0, store, host="127.0.0.1", timeout_s=20)
    job = OwnMoe(ARGUMENTS, global_batch=BATCH, micro_batch=1, seed=SEED)
    with building(world):
        state = job.build(world)
        manifest = megatron.merge_manifest(
            [megatron.describe(state.model, world)],
            ARGUMENTS["num_layers"],
            discover_kinds(chain := optimizer_chain(state.optimizer)),
            bucket_rule(chain),
        )
        live = megatron.adopt(state.model, state.optimizer, manifest, world)
        megatron.fill_initial(live, job.initial_parameter, SEED)
    activate(world)
    refresh_weights(state)
    seed_streams(world, seed=SEED, step=0)
    cursor, losses = DataCursor(0, BATCH, 1), dict[int, float]()
    for step in range(1, steps + 1):
        result = job.step(state, world, cursor.batches(0, 1))
        state.optimizer.step()
        cursor, losses[step] = cursor.advanced(), float(result.loss_sum) / result.loss_count
    return losses
