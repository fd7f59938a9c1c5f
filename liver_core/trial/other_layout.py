"""The job once more in a layout of several ranks, each a forked process: its first step must be that of one rank.

What only shows with neighbours (groups, stages, split parameters) shows here: a job that is right in each layout gives
the same loss and the same gradient norm but for rounding.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from liver_core.layout import ParallelLayout
from liver_core.trial.findings import Finding, FindingResult, missing, ok, raised, warning
from liver_core.trial.single_process import TrialPlan
from liver_core.trial.trial_world import TrialWorld
from liver_core.worlds.megatron import prepare_process

LOSS_SHARE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
NORM_SHARE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""What rounding may change in the first step, as a share of it."""
_POLL_S = 0.02


def try_layout(plan: TrialPlan, expected: dict[str, Any], *, timeout_s: float) -> Finding:
    """Run the plan's steps in its layout and compare with `expected`, the losses and norms of one rank, and whether its
    steps draw random numbers."""
    layout = ParallelLayout.parse(plan.layout)
    with tempfile.TemporaryDirectory(prefix="liver-try-") as folder:
        children = {
            fork(lambda rank=rank: _rank(plan, layout, rank, folder)): rank for rank in range(layout.world_size)
        }
        try:
            failed = _wait(children, time.monotonic() + timeout_s)
        finally:
            end(children)
        if failed is not None:
            return _failure(folder, failed)
        found = json.loads((Path(folder) / "rank-0.json").read_text())
    if expected["draws"]:
        return warning(
            f"{layout} runs; its losses cannot be compared with those of one rank, since each layout draws other "
            "random numbers: set dropout to 0 for a trial"
        )
    dtype = torch.bfloat16 if found["bf16"] else torch.float32
    for name, share in (("losses", LOSS_SHARE[dtype]), ("norms", NORM_SHARE[dtype])):
        here, there = found[name][0], expected[name][0]
        if not abs(here - there) <= share * abs(there):
            what = "loss" if name == "losses" else "gradient norm"
            return missing(
                f"{what} of the first step is {here:.6f}, with one rank {there:.6f}; the job must compute the same in "
                "every layout: pass world.collection to all that takes groups, and count losses and gradients once"
            )
    furthest = max(abs(one - other) for one, other in zip(found["losses"], expected["losses"], strict=True))
    return ok(f"{layout} gives the losses of one rank, but for {furthest:.2g}", losses=found["losses"])


def fork(entry: Callable[[], None]) -> int:
    """A child that runs `entry` and exits; returns its pid. Only from a process that has one thread."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        entry()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(children: dict[int, Any]) -> None:
    """Kill what is left, by pid."""
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    children.clear()


def _wait(children: dict[int, int], deadline: float) -> int | None:
    """Until all have ended well. Returns the rank that did not; -1 where time is over."""
    while children:
        for pid, rank in list(children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del children[pid]
                if status:
                    return rank
        if time.monotonic() > deadline:
            return -1
        time.sleep(_POLL_S)
    return None


def _failure(folder: str, rank: int) -> Finding:
    if rank < 0:
        return missing("its ranks did not end in time: one waits in a collective that another one does not enter")
    errors = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("error-*.json"))]
    if not errors:
        return missing(f"rank {rank} died")
    # Who fails because a peer is gone fails later.
    first = min(errors, key=lambda error: error["at"])
    return Finding(FindingResult.MISSING, f"rank {first['rank']}: {first['text']}", first["traceback"])


def _rank(plan: TrialPlan, layout: ParallelLayout, rank: int, folder: str) -> None:
    try:
        found = _steps(plan, layout, rank, dist.FileStore(f"{folder}/store", layout.world_size))
    except Exception as error:
        found = raised(error)
        told = {"rank": rank, "at": time.time(), "text": found.text, "traceback": found.details}
        (Path(folder) / f"error-{rank}.json").write_text(json.dumps(told))
        os._exit(1)
    if rank == 0:
        (Path(folder) / "rank-0.json").write_text(json.dumps(found))


def _steps(plan: TrialPlan, layout: ParallelLayout, rank: int, store: dist.Store) -> dict[str, Any]:
    prepare_process()
    job = plan.new_job()
    job.check_layout(layout)
    world = TrialWorld(job, layout, rank, store, "try-layout")
    world.build()
    world.lay_out(world.describe())
    job.warm_up()
    world.fill()
    steps = [asdict(world.step()) for _ in range(plan.steps)]
    return {
        "losses": [step["loss"] for step in steps],
        "norms": [step["norm"] for step in steps],
        "bf16": any(parameter.dtype == torch.bfloat16 for parameter in world.state.model.parameters()),
    }
