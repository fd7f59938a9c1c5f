"""Two worlds live side by side in one process: building the next one is not felt by the present one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks import run_alone, run_ranks
from tests.cluster.real_ranks_model import small_gpt

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def test_a_build_in_the_background_leaves_random_state_and_globals_alone(corpus: str):
    changed, built = run_ranks(_build_in_background, 1, corpus)[0]
    assert changed == []
    assert built


def test_only_the_building_thread_sees_the_next_worlds_default_group():
    seen = run_ranks(_default_groups, 1)[0]
    assert seen == {"main": 1, "building": 2, "autograd thread of main": 1, "alone": None, "after": 1}


def test_a_script_that_made_its_default_group_itself_can_be_alone_too():
    assert run_alone(_alone_under_torchrun) == [True, False, True]


def test_destroying_the_old_worlds_groups_leaves_the_new_ones_registered_and_working():
    assert run_ranks(_destroy_the_first, 2) == [(3.0, True, 0)] * 2


def test_collectives_of_a_group_run_one_after_the_other_in_one_thread():
    """Two threads on the same connections free each other's buffers now and then, and the process dies."""
    groups, threads = run_ranks(_collective_threads, 2)[0]
    assert groups > 0
    assert threads == groups


def test_a_rank_that_comes_late_to_a_limited_collective_finds_the_group_dead():
    on_time, late = run_ranks(_late, 2)
    assert on_time == ("timed out", "dead", True)
    assert late == ("dead", "dead", True)


def test_random_streams_depend_on_seed_step_and_place_only():
    first, again, other_step = run_alone(_streams, 3), run_alone(_streams, 3), run_alone(_streams, 4)
    assert first == again
    assert first != other_step
    assert len(set(first)) == len(first), "two places of the layout draw the same numbers"


def test_training_gets_the_interpreter_back_at_once_from_a_thread_that_builds():
    """By Python's default no hand-over takes less than 5 ms, and a step has hundreds of them."""
    assert run_alone(_quickest_turn) < 0.004


def test_a_missing_private_name_is_reported_by_name_and_version():
    texts = run_alone(_private_names)
    assert "_update_default_pg" in texts["torch"] and "supports torch" in texts["torch"]
    assert "_EMBEDDING_GROUP" in texts["megatron"] and "megatron-core" in texts["megatron"]


@pytest.mark.thorough
def test_a_dozen_handoffs_leave_no_descriptor_no_thread_and_no_group_behind(corpus: str):
    arguments = small_gpt(corpus, num_layers=1, hidden_size=32, ffn_hidden_size=32)
    with Cluster(RankSetup(arguments, counts=True)) as cluster:
        roster = cluster.launch("TP2", "ab")
        first = roster.members[0]
        counts = []
        for number in range(12):
            cluster.handoff("DP2" if number % 2 == 0 else "TP2", "ab")
            counts.append(_settled(cluster, first, counts[number - 2] if number >= 4 else None))
    for name in counts[0]:
        assert counts[11][name] <= counts[3][name], (name, [count[name] for count in counts])


def _settled(cluster: Cluster, member: Any, limit: dict[str, int] | None) -> dict[str, int]:
    """Counts of a rank once the old world is retired, which is done in the background."""
    events = cluster.ranks[member].events
    seen = len(events)

    def said() -> list[dict[str, int]]:
        return [event[3] for event in events[seen:] if event[0] == "resident"]

    def retired() -> bool:
        enough = said()[-1:] if limit is None else [row for row in said() if all(row[k] <= limit[k] for k in limit)]
        return (len(said()) >= 5 and bool(enough)) or len(said()) >= 100

    cluster.wait_for(retired, 30, f"retirement at {member}")
    rows = said()
    return {name: min(row[name] for row in rows) for name in rows[0]}


def _world(number: int, layout: str, rank: int, port: int) -> Any:
    from liver_core.handoff.messages import StoreAddress
    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.worlds.groups import connect_store
    from liver_core.worlds.megatron import bring_up

    parallel = ParallelLayout.parse(layout)
    members = tuple(Member(str(index), 0) for index in range(parallel.world_size))
    store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
    return bring_up(Roster("job", number, parallel, members), rank, store, host="127.0.0.1", timeout_s=30)


def _build_in_background(rank: int, port: int, corpus: str) -> tuple[list[str], bool]:
    import random
    import threading

    import numpy
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from liver_core.worlds.megatron import activate, building, seed_streams
    from liver_core.worlds.released_storage import released
    from tests.cluster.real_ranks_process import make_job

    def observe() -> dict[str, Any]:
        streams: Any = get_cuda_rng_tracker()
        numpy_state: Any = numpy.random.get_state()
        tracker = {name: state.numpy().tobytes() for name, state in streams.get_states().items()}
        found = {f"parallel_state.{name}": id(value) for name, value in vars(parallel_state).items()}
        return found | {
            "torch generator": torch.get_rng_state().numpy().tobytes(),
            "python generator": random.getstate(),
            "numpy generator": numpy_state[1].tobytes(),
            "tracker": tracker,
            "default group": id(dist.group.WORLD),
        }

    activate(first := _world(1, "TP1", rank, port))
    seed_streams(first, seed=5, step=0)
    job = make_job(RankSetup(small_gpt(corpus)))
    job.build(first)
    before, built = observe(), []

    def build() -> None:
        world = _world(2, "TP1", rank, port)
        with building(world), released():
            built.append(job.build(world))

    thread = threading.Thread(target=build)
    thread.start()
    thread.join(60)
    after = observe()
    return [name for name in before if before[name] != after[name]], bool(built)


def _default_groups(rank: int, port: int) -> dict[str, int | None]:
    import threading

    import torch
    import torch.distributed as dist

    from liver_core.worlds.groups import alone
    from liver_core.worlds.megatron import activate, building

    first, second = _world(1, "TP1", rank, port), _world(2, "TP1", rank, port)
    numbers = {id(first.everyone): 1, id(second.everyone): 2, id(None): None}
    activate(first)
    seen: dict[str, int | None] = {}

    def note(name: str) -> None:
        seen[name] = numbers[id(dist.group.WORLD)]

    inside, looked = threading.Event(), threading.Event()

    def build() -> None:
        with building(second):
            note("building")
            inside.set()
            looked.wait(10)

    thread = threading.Thread(target=build)
    thread.start()
    assert inside.wait(10)
    note("main")
    leaf = torch.ones(1, requires_grad=True)
    (leaf * 2).register_hook(lambda grad: note("autograd thread of main"))
    doubled = leaf * 2
    doubled.register_hook(lambda grad: note("autograd thread of main"))
    doubled.backward()
    with alone():
        note("alone")
    looked.set()
    thread.join(10)
    note("after")
    return seen


def _alone_under_torchrun() -> list[bool]:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from liver_core.worlds.groups import alone

    c10d._world.__class__ = c10d._World  # as torch has it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen = [dist.is_initialized()]
    with alone():
        seen.append(dist.is_initialized())
    return [*seen, dist.is_initialized()]


def _destroy_the_first(rank: int, port: int) -> tuple[float, bool, int]:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from liver_core.worlds.megatron import activate, retire

    first, second = _world(1, "TP2", rank, port), _world(2, "DP2", rank, port)
    activate(first)
    dist.all_reduce(torch.ones(1), group=first.everyone)
    activate(second)
    retire(first)
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    named = all(c10d._resolve_process_group(group.group_name) is not None for group in second.groups)
    return value.item(), named, sum(group in c10d._world.pg_map for group in first.groups)


def _collective_threads(rank: int, port: int) -> tuple[int, int]:
    """Groups of several ranks, and threads in which gloo runs collectives, by the names that torch gives them."""
    from pathlib import Path

    import torch
    import torch.distributed as dist

    world = _world(1, "DP2", rank, port)
    for group in world.groups:
        dist.all_reduce(torch.ones(1), group=group)
    of_several = [group for group in world.groups if group.size() > 1]
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return len(of_several), names.count("pt_gloo_runloop")


def _late(rank: int, port: int) -> tuple[str, str, bool]:
    import threading

    import torch
    import torch.distributed as dist

    from liver_core.worlds.groups import limited

    group = _world(1, "DP2", rank, port).everyone
    dist.all_reduce(torch.ones(1), group=group)
    backend = group._get_backend(torch.device("cpu"))
    before = backend.options._timeout
    if rank == 1:
        threading.Event().wait(2.0)
    said = []
    for limit_s in (0.5, 5.0):
        try:
            with limited(group, limit_s):
                dist.all_reduce(torch.ones(1), group=group)
            said.append("worked")
        except RuntimeError as error:
            said.append("timed out" if "Timed out" in str(error) else "dead")
    return said[0], said[1], backend.options._timeout == before


def _quickest_turn() -> float:
    """Seconds, the least of fifty: however busy the machine, one finds a free core."""
    import threading
    import time

    done = threading.Event()

    def build() -> None:
        while not done.is_set():
            sum(range(1000))

    threading.Thread(target=build, daemon=True).start()
    turns = []
    for _ in range(50):
        began = time.perf_counter()
        done.wait(0.001)  # Gives the interpreter up, for long enough that the other thread takes it.
        turns.append(time.perf_counter() - began)
    done.set()
    return min(turns[1:])


def _streams(step: int) -> list[float]:
    import torch

    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.worlds.megatron import MegatronWorld, seed_streams

    layout = ParallelLayout.parse("TP2xPP2xDP2")
    roster = Roster("job", 1, layout, tuple(Member(str(rank), 0) for rank in range(8)))
    drawn = []
    for rank in range(8):
        world = MegatronWorld(roster, rank, *[None] * 6)  # type: ignore[arg-type]
        seed_streams(world, seed=11, step=step)
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        streams: Any = get_cuda_rng_tracker()
        with streams.fork():
            drawn.append(float(torch.rand(1)))
    return drawn


def _private_names() -> dict[str, str]:
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d as c10d

    from liver_core.worlds import groups, megatron

    texts = {}
    for name, check, module, attribute in (
        ("torch", groups.check_private_names, c10d, "_update_default_pg"),
        ("megatron", megatron.check_private_names, parallel_state, "_EMBEDDING_GROUP"),
    ):
        delattr(module, attribute)
        try:
            check()
        except groups.PrivateApiMoved as error:
            texts[name] = str(error)
    return texts
