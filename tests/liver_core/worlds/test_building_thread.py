"""A world with experts is built beside one that trains: the thread that builds it asks nothing of Megatron's globals,
which are of the world that trains."""

from __future__ import annotations

import pytest

from tests.cluster.real_ranks import run_alone

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_the_thread_that_builds_reads_none_of_the_groups_of_the_world_that_trains(corpus: str):
    asked, asked_in_training = run_alone(_build_beside, corpus, timeout_s=100.0)
    # Whether there is any world, which there is.
    assert set(asked) <= {"is_initialized"}
    # What moves these groups into the globals is needed: a step asks for them.
    assert "get_tensor_and_data_parallel_group" in asked_in_training


def _build_beside(prefix: str) -> tuple[list[str], list[str]]:
    """Functions of parallel_state that read a group of the active world: while a world is built, and in a step."""
    import sys
    import threading

    from megatron.core import parallel_state
    from torch.distributed import TCPStore

    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.training.cursor import DataCursor
    from liver_core.training.gpt import GptJob
    from liver_core.trial.layout_choice import build_one_rank
    from liver_core.worlds.megatron import (
        _GLOBAL_GROUPS,
        activate,
        bring_up,
        building,
        prepare_process,
        seed_streams,
    )
    from tests.cluster.real_ranks_model import small_gpt

    prepare_process()
    of_experts = {"num_experts": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    arguments = small_gpt(prefix, num_layers=2, moe_router_load_balancing_type="aux_loss", **of_experts)
    job = GptJob({**arguments, "moe_aux_loss_coeff": 1e-2}, global_batch=2, micro_batch=1, seed=7)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    roster = Roster("active", 1, ParallelLayout(), (Member("a", 0),))
    world = bring_up(roster, 0, store, host="127.0.0.1", timeout_s=20)
    with building(world):
        state = job.build(world)
    activate(world)
    seed_streams(world, seed=7, step=0)

    def listening(found: list[str]):
        def trace(frame, event, _argument):
            code = frame.f_code
            if frame.f_globals is vars(parallel_state) and _GLOBAL_GROUPS.keys() & set(code.co_names):
                found.append(code.co_name)

        return trace

    built: list[str] = []

    def build() -> None:
        sys.settrace(listening(built))
        try:
            for layout in ("DP2xEP2", "TP2xDP2xEP2xETP1", "PP2xDP2xEP2"):
                build_one_rank(job, ParallelLayout.parse(layout), name=layout)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=build)
    thread.start()
    stepped: list[str] = []
    sys.settrace(listening(stepped))
    job.step(state, world, DataCursor(0, 2, 1).batches(0, 1))
    sys.settrace(None)
    thread.join()
    return sorted(set(built)), sorted(set(stepped))
