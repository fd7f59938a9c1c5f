"""Runs of a job that nothing disturbs, trained once for all tests of a session and for all processes that share it."""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.liver_core.rank.support.chain import Chain, World, gather, world_size

STEP_S_MOST = 0.5
"""Of a run that is left alone, on a machine that does more than one thing."""

ELSEWHERE: dict[str, Any] = {
    "last_step": None,
    "record": False,
    "counts": False,
    "memory": False,
    "checkpoint_at_boundary": None,
    "checkpoints": None,
    "transport": "nixl",
    "extra_bytes_max": None,
    "host_bytes_max": 0,
    "bring_up_s": 20.0,
    "hold_at": (),
    "stream": {},
    "pace_s": 0.0,
    "islands": None,
}
"""Settings that change nothing of such a run: it is never handed over, saved or waited for."""

_folder: Path | None = None


def keep_in(folder: Path) -> None:
    """Where the processes of a session find each other's runs. Without it nothing is kept."""
    global _folder
    folder.mkdir(parents=True, exist_ok=True)
    _folder = folder


def run_undisturbed(setup: RankSetup, layout: str, last_step: int, *, record_steps: tuple[int, ...] = ()) -> Chain:
    """The job in one layout, never handed over, up to `last_step`, with the whole state after each of `record_steps`.
    Trained unless a run that is as long is known."""
    setup = replace(setup, **ELSEWHERE, record_steps=record_steps)
    if _folder is None:
        return _trained(setup, layout, last_step)
    # The corpus of every process has the same content.
    fields = asdict(setup) | {"job_arguments": setup.job_arguments | {"data_prefix": ""}, "layout": layout}
    path = _folder / hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:24]
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Whoever wants the same waits for it.
        chain = pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301  (of this session)
        if chain is None or chain.steps[-1][1] < last_step:
            chain = _trained(setup, layout, last_step)
            path.write_bytes(pickle.dumps(chain))
    return _up_to(chain, last_step)


def _trained(setup: RankSetup, layout: str, last_step: int) -> Chain:
    world = World(layout, "abcdefgh"[: world_size(layout)])
    with Cluster(replace(setup, last_step=last_step)) as cluster:
        cluster.launch(world.layout, world.nodes)
        cluster.finish(60 + last_step * STEP_S_MOST)
        return gather(cluster, (world,))


def _up_to(chain: Chain, last_step: int) -> Chain:
    """As if it had ended there. The state after a step is noted in the next step, and after the last one nowhere."""
    traces = {
        node: {step: said for step, said in trace.items() if step < last_step} for node, trace in chain.traces.items()
    }
    return replace(chain, steps=[row for row in chain.steps if row[1] <= last_step], traces=traces)
