"""What a step costs while no handoff runs: seconds inside our own code, and bytes that our transport or ring copied.

`SpannedJob` runs in the rank process: it puts clocks around the functions of the training loop that are ours and
counts the bytes of every read and of every gradient put into a ring. Ranks meet in a barrier before the first of our
two all-reduces, so that waiting for a slower rank is not taken for a cost of ours. A handoff at the end shows that the
byte counter counts.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from liver_core.handoff.messages import Rung
from liver_core.rank import loop
from liver_core.rank import step_boundary as boundary
from liver_core.rank.after_step import AfterStep
from liver_core.rank.pending_handoff import PendingHandoff
from liver_core.streaming.ring import SourceRing
from liver_core.training.gpt import GptJob
from liver_core.transport.nixl import NixlTransport
from tests.benchmarks.handoff_cluster import LEAD, StampedCluster, limit_s, rank_setup
from tests.benchmarks.handoff_model import Model

STEPS_AWAY, STEPS_SEEN = 5, 20
_BOOKKEEPING = ("_maintain", "_advance", "_check_finite", "_do_put_off", "_note_first_forward", "_note_first_step")


@dataclass(slots=True)
class Spent:
    """Since the process began, of one rank: seconds by the wall clock and of the thread's CPU, bytes copied."""

    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    copied_bytes: int = 0


class SpannedJob(GptJob):
    """The reference job with clocks; writes what was spent when step `STEPS_AWAY`, the last one seen, and any later
    one ends."""

    def __init__(self, args: dict[str, Any], *, global_batch: int, micro_batch: int, seed: int) -> None:
        folder = Path(args["spans_folder"])
        inner = {name: value for name, value in args.items() if name != "spans_folder"}
        super().__init__(inner, global_batch=global_batch, micro_batch=micro_batch, seed=seed)
        self._folder = folder
        self._spent = Spent(defaultdict(float), defaultdict(float))
        _put_clocks(self._spent)

    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        if step == STEPS_AWAY or step >= STEPS_AWAY + STEPS_SEEN:
            line = {
                "step": step,
                "generation": world.generation,
                "at": time.monotonic(),
                "wall_s": dict(self._spent.wall_s),
                "cpu_s": dict(self._spent.cpu_s),
                "copied_bytes": self._spent.copied_bytes,
                "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
            }
            with (self._folder / f"{world.generation}-{world.rank}.jsonl").open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def _put_clocks(spent: Spent) -> None:
    """Wrap what is ours in the loop. Raises AttributeError where the loop has no such part any more."""
    module: Any = loop
    module.start_total = _aligned(_clocked(module.start_total, "step totals", spent))
    boundary.Totalling.wait = _clocked(boundary.Totalling.wait, "step totals", spent)
    module.agree = _clocked(module.agree, "boundary", spent)
    module.digest_part = _clocked(module.digest_part, "bookkeeping", spent)
    for name in _BOOKKEEPING:
        setattr(loop.RankLoop, name, _clocked(getattr(loop.RankLoop, name), "bookkeeping", spent))
    AfterStep.do = _clocked(AfterStep.do, "bookkeeping", spent)
    for name in ("chain", "word", "settle", "stream"):
        setattr(PendingHandoff, name, _clocked(getattr(PendingHandoff, name), "bookkeeping", spent))
    publish, read = SourceRing.publish, NixlTransport.read

    def counted_publish(self: Any, gradients: Any, header: Any) -> None:
        spent.copied_bytes += gradients.numel() * gradients.element_size()
        publish(self, gradients, header)

    def counted_read(self: Any, reads: Any, deadline: float) -> Any:
        report = read(self, reads, deadline)
        spent.copied_bytes += report.bytes
        return report

    SourceRing.publish, NixlTransport.read = counted_publish, counted_read  # type: ignore[method-assign]


def _clocked(function: Callable[..., Any], name: str, spent: Spent) -> Callable[..., Any]:
    """Adds up; a call inside another clocked call is a part of that one and does not count twice."""

    def timed(*args: Any, **options: Any) -> Any:
        if _Inside.depth:
            return function(*args, **options)
        _Inside.depth += 1
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **options)
        finally:
            _Inside.depth -= 1
            spent.wall_s[name] += time.perf_counter() - wall
            spent.cpu_s[name] += time.thread_time() - cpu

    return timed


class _Inside:
    """Only the main thread of a rank runs what is clocked, but for `_stream`, which no other thread calls."""

    depth = 0


def _aligned(function: Callable[..., Any]) -> Callable[..., Any]:
    def aligned(result: Any, digest_part: int, group: Any, chain: Any) -> Any:
        dist.barrier(group=group)
        return function(result, digest_part, group, chain)

    return aligned


def measure_steady(model: Model, data_prefix: str, folder: Path) -> dict[str, Any]:
    """Seconds of a step, those of ours in it (of the slowest rank), and bytes copied. Raises AssertionError."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = rank_setup(model, data_prefix, job="tests.benchmarks.handoff_spans:SpannedJob")
    setup.job_arguments["spans_folder"] = str(folder)
    change = model.changes[0]
    last = STEPS_AWAY + STEPS_SEEN
    with StampedCluster(setup) as cluster:
        roster = cluster.launch(change.source, change.source_nodes, timeout_s=limit_s(model))
        cluster.await_step(LEAD, last, limit_s(model))
        cluster.handoff(
            change.target,
            change.target_nodes,
            rung=Rung.LIVE,
            timeout_s=limit_s(model),
            deadline_s=limit_s(model),
        )
        first_own = cluster.steps(LEAD)[-1][1] + 2
        cluster.await_step(LEAD, first_own, limit_s(model))
        ranks = [_lines(folder / f"{roster.generation}-{rank}.jsonl") for rank in range(len(roster.members))]
        after = [
            _lines(path)[-1] for path in folder.glob("*.jsonl") if not path.name.startswith(f"{roster.generation}-")
        ]
    parameters = sum(lines[0]["parameters"] for lines in ranks)
    # Norms are on every tensor parallel rank and count once in the model.
    assert model.parameters <= parameters <= 1.02 * model.parameters, f"{parameters} parameters, not {model.parameters}"
    windows = [(lines[0], next(line for line in lines if line["step"] == last)) for lines in ranks]
    return steady_summary(model.state_bytes, windows, sum(line["copied_bytes"] for line in after))


def steady_summary(
    state_bytes: int, windows: list[tuple[dict[str, Any], dict[str, Any]]], copied_in_handoff: int
) -> dict[str, Any]:
    """What lies between the two lines of each rank, for one step. Pure."""
    steps = windows[0][1]["step"] - windows[0][0]["step"]
    step_s = max(late["at"] - early["at"] for early, late in windows) / steps
    names = sorted({name for _, late in windows for name in late["wall_s"]})

    def spans(clock: str, name: str) -> float:
        return max(late[clock].get(name, 0.0) - early[clock].get(name, 0.0) for early, late in windows) / steps

    wall = {name: spans("wall_s", name) for name in names}
    cpu = {name: spans("cpu_s", name) for name in names}
    return {
        "state_bytes": state_bytes,
        "steps": steps,
        "step_s": step_s,
        "span_s": wall,
        "span_cpu_s": cpu,
        "span_share": sum(wall.values()) / step_s,
        "span_cpu_share": sum(cpu.values()) / step_s,
        "bytes_copied_idle": sum(late["copied_bytes"] - early["copied_bytes"] for early, late in windows),
        "bytes_copied_in_a_handoff": copied_in_handoff,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the rank may be writing one."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
