"""One job taken through several layouts in a row, with everything recorded that exactness is judged by."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from liver_core.handoff.messages import Rung
from liver_core.layout import Manifest, Member, from_json
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks import start_ranks
from tests.cluster.real_ranks_process import local_weights, make_job, megatron_state
from tests.liver_core.rank.support.global_state import assemble, assemble_weights


@dataclass(frozen=True)
class World:
    """One link of a chain: a layout and the nodes of its ranks, rank 0 first."""

    layout: str
    nodes: str

    @property
    def first(self) -> Member:
        return Member(self.nodes[0], 0)


@dataclass
class Chain:
    """What a run left: `records[(role, generation)][rank]`, the steps that rank 0 of each world reported."""

    worlds: tuple[World, ...]
    manifest: Manifest
    records: dict[tuple[str, int], dict[int, dict[str, Any]]]
    steps: list[tuple[int, int, float, int, int]]
    measures: dict[int, list[dict[str, float]]]
    traces: dict[str, dict[int, tuple[int, str]]]
    opened_at: dict[int, int]

    def state(self, role: str, generation: int) -> dict[str, Any]:
        """Masters, moments (and gradients where recorded) in global coordinates."""
        ranks = self.records[(role, generation)]
        return assemble({rank: record["regions"] for rank, record in ranks.items()}, self.manifest, ranks[0]["layout"])

    def weights(self, role: str, generation: int) -> dict[str, Any]:
        ranks = self.records[(role, generation)]
        weights = {rank: record["weights"] for rank, record in ranks.items()}
        return assemble_weights(weights, self.manifest, ranks[0]["layout"])

    def pause_s(self, generation: int) -> float:
        """Of the handoff to this generation."""
        return pause_of(self.measures[generation])

    def losses(self) -> dict[int, float]:
        return {step: loss for _, step, loss, _, _ in self.steps}

    def digests(self) -> dict[int, int]:
        return {step: digest for _, step, _, _, digest in self.steps}

    def handed_step(self, generation: int) -> int:
        """The step that this generation applied first, with the gradients of the one before."""
        return min(step for number, step, *_ in self.steps if number == generation)


def pause_of(said: Sequence[Mapping[str, float]]) -> float:
    """Latest first forward minus latest end of gradient reduction, minus an ordinary step's optimizer time; seconds.
    `said`: the measures of all members."""
    reduced = max(measures["reduced_at_utc"] for measures in said if "reduced_at_utc" in measures)
    optimizer = max(measures.get("optimizer_s", 0.0) for measures in said)
    return max(measures["first_forward_at_utc"] for measures in said) - reduced - optimizer


def run_chain(
    setup: RankSetup,
    worlds: tuple[World, ...],
    *,
    steps_each: int = 3,
    steps_last: int = 3,
    rung: Rung | tuple[Rung, ...] = Rung.STOP_AND_COPY,
) -> Chain:
    """Launch the first world and hand the job over to each of the others after a few steps.

    `rung`: how, or one for each handoff.
    """
    rungs = (rung,) * (len(worlds) - 1) if isinstance(rung, Rung) else rung
    measures: dict[int, list[dict[str, float]]] = {}
    opened_at: dict[int, int] = {}
    with Cluster(setup) as cluster:
        cluster.launch(worlds[0].layout, worlds[0].nodes)
        step = 0
        for (world, following), how in zip(itertools.pairwise(worlds), rungs, strict=True):
            cluster.await_step(world.first, step + steps_each)
            opened_at[cluster.generation + 1] = cluster.steps(world.first)[-1][1]
            request = cluster.handoff(following.layout, following.nodes, rung=how)
            stages = [cluster.stages(member, request.handoff_id)[-1] for member in request.target.members]
            measures[request.generation] = [said for _, _, said in stages]
            step = max(row[1] for row in cluster.steps(following.first))
        cluster.await_step(worlds[-1].first, step + steps_last)
        cluster.stop()
        return replace(gather(cluster, worlds), measures=measures, opened_at=opened_at)


def gather(cluster: Cluster, worlds: tuple[World, ...]) -> Chain:
    """Put together what all ranks of a finished cluster returned, also those that left earlier."""
    results = {rank.member.node_id: rank.result for rank in cluster.all_ranks if rank.result is not None}
    records: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for result in results.values():
        for (role, number, rank), record in result["records"].items():
            records.setdefault((role, number), {})[rank] = record
    steps: dict[int, tuple[int, int, float, int, int]] = {}
    for world in worlds:
        for row in cluster.steps(world.first):
            steps.setdefault(row[1], row)
    manifest = next(result["manifest"] for result in results.values() if result["manifest"])
    traces = {node: result["trace"] for node, result in results.items()}
    rows = [steps[number] for number in sorted(steps)]
    return Chain(worlds, from_json(Manifest, manifest), records, rows, {}, traces, {})


def world_size(layout: str) -> int:
    from liver_core.layout import ParallelLayout

    return ParallelLayout.parse(layout).world_size


# The oracle: Megatron's own checkpoint loader in fresh processes, with no mapping of ours.


def load_with_megatron(setup: RankSetup, checkpoints: list[tuple[str, str]]) -> list[dict[int, dict[str, Any]]]:
    """For each (path, layout): rank -> what Megatron's loader puts into a fresh world of that layout.

    One set of fresh processes builds the worlds one after the other.
    """
    most = max(world_size(layout) for _, layout in checkpoints)
    running = start_ranks(_load_all, [(rank, setup, checkpoints) for rank in range(most)], timeout_s=150)
    by_rank = running.join()
    return [
        {rank: loaded[index] for rank, loaded in enumerate(by_rank) if loaded[index] is not None}
        for index in range(len(checkpoints))
    ]


def assert_as_megatron_loads(
    oracle: dict[int, dict[str, Any]], switched: dict[int, Any], gathered: dict[int, Any] | None
):
    """What Megatron's loader made of every rank is what the recorded ranks of a handoff hold, bit for bit.

    `gathered`: None where some had no weights before the pause was over.
    """
    assert oracle.keys() == switched.keys()
    for rank, loaded in oracle.items():
        ours = switched[rank]["megatron"]
        assert ours.keys() == loaded["megatron"].keys() and ours
        for name, tensors in loaded["megatron"].items():
            assert tensors.keys() == ours[name].keys() == {"param", "exp_avg", "exp_avg_sq", "step"}
            for kind, tensor in tensors.items():
                assert tensor.tobytes() == ours[name][kind].tobytes(), f"rank {rank}: {kind} of {name}"
        if gathered is not None:
            for name, bits in loaded["weights"].items():
                assert bits.tobytes() == gathered[rank]["weights"][name].tobytes(), f"rank {rank}: weight {name}"


def _load_all(rank: int, port: int, setup: RankSetup, checkpoints: list[tuple[str, str]]) -> list[Any]:
    from liver_core.handoff.messages import StoreAddress
    from liver_core.layout import ParallelLayout, Roster
    from liver_core.worlds.groups import connect_store
    from liver_core.worlds.megatron import activate, bring_up, retire

    found: list[Any] = []
    for number, (path, layout) in enumerate(checkpoints, start=1):
        parallel = ParallelLayout.parse(layout)
        if rank >= parallel.world_size:
            found.append(None)
            continue
        members = tuple(Member(f"oracle-{index}", 0) for index in range(parallel.world_size))
        store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=60)
        world = bring_up(Roster("oracle", number, parallel, members), rank, store, host="127.0.0.1", timeout_s=60)
        activate(world)
        state = make_job(setup).build(world)
        load_by_megatron_alone(world, state, path)
        found.append({"megatron": megatron_state(state), "weights": local_weights(state)})
        retire(world)
    return found


def load_by_megatron_alone(world: Any, state: Any, path: str) -> None:
    """Megatron's `sharded_state_dict`, `dist_checkpointing.load`, `load_state_dict`; nothing of ours decides a place.
    Each optimizer asks for the tensors of its own parameters, whatever chain wrote them.

    The moments are made by the optimizer itself, in one step with zero gradients that the load overwrites.
    `load_optimizers` only works around two defects of the loader with torch's optimizers.
    """
    from megatron.core import dist_checkpointing

    from liver_core.state.megatron_optimizer import unwrapped
    from liver_core.state.optimizer_chain import optimizer_chain
    from liver_core.state.optimizer_checkpoint import load_optimizers

    module = unwrapped(state.model)
    step_without_gradients(state)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": world.collection.dp_cp}
    chain = optimizer_chain(state.optimizer)
    model = module.sharded_state_dict(metadata=metadata)
    parts = {
        chain.number_of(part): part.sharded_state_dict(model, is_loading=True, metadata=metadata)
        for part in chain.parts
    }
    loaded: Any = dist_checkpointing.load({"model": model, "parts": parts}, path)
    module.load_state_dict(loaded["model"])
    load_optimizers(chain, loaded["parts"], loaded["optimizer"], metadata["distrib_optim_sharding_type"])


def step_without_gradients(state: Any) -> None:
    """Have the optimizer make its moments, as Megatron's loader expects them."""
    import torch

    from liver_core.state.optimizer_chain import optimizer_chain

    for inner in optimizer_chain(state.optimizer).inner:
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
