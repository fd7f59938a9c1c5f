"""Run the CPU patches with one of them left out: `python -m tests.liver_core.worlds.ablation PREFIX`. Prints JSON.

A fresh interpreter imports torch and Megatron unpatched, then forks one child for each patch. The scenarios name what a
patch is for: `train` builds a world and takes a step with several buckets and both overlaps, `checkpoint` saves it,
`Megatron's own way` gathers its optimizer's state as a run of Megatron alone does, `experts` and `experts over TP` take
a step of ranks that share experts out, or cut each of them too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch

from tests.cluster.real_ranks_model import small_gpt

NOTHING = "nothing"
OF_EXPERTS = (
    NOTHING,
    "grouped_gemm_of_transformer_engine",
    "splits_as_numbers",
    "streams",
    "uneven_collectives",
)
"""With which patches left out scenarios with experts run too: all others fail in `train` already."""
WAITS_S = 15


def main(prefix: str) -> None:
    import liver_core.state.checkpoint
    import liver_core.training.gpt  # noqa: F401
    from liver_core.worlds import cpu_compat

    torch.set_num_threads(1)
    found = {left_out: _in_child(left_out, prefix) for left_out in (NOTHING, *cpu_compat.PATCHES)}
    found["on a machine with CUDA"] = _child(_refused_on_cuda)
    print(json.dumps(found))


def _in_child(left_out: str, prefix: str) -> dict[str, str]:
    """Scenario -> "ok", or the error, with one patch left out."""

    def run() -> dict[str, str]:
        from liver_core.worlds import cpu_compat

        cpu_compat.apply(without=[] if left_out == NOTHING else [left_out])
        results: dict[str, str] = {}
        held: list[Any] = []
        scenarios: dict[str, Callable[[], None]] = {
            "train": lambda: held.append(_train(prefix)),
            "checkpoint": lambda: _save(held[0]),
            "Megatron's own way": lambda: _gather_as_megatron(held[0]),
        }
        if left_out in OF_EXPERTS:
            scenarios |= {
                "experts": lambda: _in_ranks(prefix, "DP2xEP2"),
                "experts over TP": lambda: _in_ranks(prefix, "TP2xDP2xEP2"),
            }
        for name, scenario in scenarios.items():
            try:
                scenario()
                results[name] = "ok"
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"[:300]
        return results

    return _child(run)


def _refused_on_cuda() -> dict[str, str]:
    from liver_core.worlds import cpu_compat

    torch.cuda.is_available = lambda: True
    try:
        cpu_compat.apply()
    except RuntimeError as error:
        return {"apply": str(error)}
    return {"apply": "ok"}


def _child(action: Callable[[], dict[str, str]]) -> dict[str, str]:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with os.fdopen(writer, "w") as pipe:
            json.dump(action(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def _train(prefix: str) -> tuple[Any, Any]:
    from torch.distributed import TCPStore

    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.state.optimizer_step import apply_step, measure_gradients
    from liver_core.training.cursor import DataCursor
    from liver_core.training.gpt import GptJob
    from liver_core.worlds.megatron import activate, bring_up, building, prepare_process, seed_streams

    prepare_process()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    roster = Roster("job", 1, ParallelLayout.parse("TP1"), (Member("a", 0),))
    world = bring_up(roster, 0, store, host="127.0.0.1", timeout_s=20)
    activate(world)
    seed_streams(world, seed=1, step=0)
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1}
    job = GptJob(small_gpt(prefix, num_layers=1, **overlaps), global_batch=2, micro_batch=1, seed=7)
    with building(world):
        state = job.build(world)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(0.01)
    job.step(state, world, DataCursor(0, 2, 1).batches(0, 1))
    apply_step(state, measure_gradients(state))
    return world, state


def _in_ranks(prefix: str, layout: str) -> None:
    """A step of all ranks of a layout, each in a child. Raises what the first that fails raised."""
    from liver_core.layout import ParallelLayout

    # Rank 0 serves the store. Its thread looks names up, and a child forked meanwhile waits for that lock forever.
    listening = socket.create_server(("127.0.0.1", 0))
    reader, writer = os.pipe()
    children = []
    for rank in range(ParallelLayout.parse(layout).world_size):
        if (child := os.fork()) == 0:
            try:
                _step_with_experts(prefix, layout, rank, listening)
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}"[:300].encode())
            finally:
                os._exit(0)
        children.append(child)
    os.close(writer)
    listening.close()
    # The others may wait for one that failed, for as long as nobody ends them.
    is_said, _, _ = select.select([reader], [], [], WAITS_S)
    said = os.read(reader, 300) if is_said else b"did not end"
    for child in children:
        if said:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(reader)
    if said:
        raise RuntimeError(said.decode(errors="replace"))


def _step_with_experts(prefix: str, layout: str, rank: int, listening: socket.socket) -> None:
    from torch.distributed import TCPStore

    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.state.optimizer_step import apply_step, measure_gradients
    from liver_core.training.cursor import DataCursor
    from liver_core.training.gpt import GptJob
    from liver_core.worlds.megatron import activate, bring_up, building, prepare_process, seed_streams

    prepare_process()
    parallel = ParallelLayout.parse(layout)
    roster = Roster("job", 1, parallel, tuple(Member(f"n{each}", 0) for each in range(parallel.world_size)))
    port, served = listening.getsockname()[1], listening.detach() if rank == 0 else None
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, master_listen_fd=served)
    world = bring_up(roster, rank, store, host="127.0.0.1", timeout_s=WAITS_S, collective_s=WAITS_S, name=layout)
    activate(world)
    seed_streams(world, seed=1, step=0)
    job = GptJob(small_gpt(prefix, num_layers=1, num_experts=4), global_batch=2, micro_batch=1, seed=7)
    with building(world):
        state = job.build(world)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    job.step(state, world, DataCursor(0, 2, 1).batches(world.coordinates.dp, world.layout.dp))
    apply_step(state, measure_gradients(state))


def _save(held: tuple[Any, Any]) -> None:
    from liver_core.state.checkpoint import snapshot, write

    world, state = held
    with tempfile.TemporaryDirectory() as folder:
        write(snapshot(world, state), {"step": 1}, f"{folder}/step-1", world.everyone)


def _gather_as_megatron(held: tuple[Any, Any]) -> None:
    from liver_core.state.optimizer_chain import optimizer_chain

    world, state = held
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": world.collection.dp_cp}
    model = state.model.module.sharded_state_dict(metadata=metadata)
    optimizer_chain(state.optimizer).parts[0].sharded_state_dict(model, metadata=metadata)


if __name__ == "__main__":
    main(sys.argv[1])
