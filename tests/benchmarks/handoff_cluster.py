"""Runs the changes of the handoff benchmark on real rank processes, and makes of each handoff one dict of numbers.

Every wait has a limit that follows from the model's size. A handoff that fails ends its processes and is told with its
reason; the next one starts a world of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from agent.driver.progress import SETTLED_STEPS, STEPS_AFTER, LostTime
from liver_core.handoff.messages import CutoverDeadlines, Rung
from liver_core.handoff.rung_costs import deviation
from liver_core.layout import Member
from tests.benchmarks.handoff_model import (
    GLOBAL_BATCH,
    SEED,
    Change,
    Model,
    extra_bytes_budget,
    step_s_at_most,
)
from tests.cluster.rank_cluster import Cluster, Rank
from tests.cluster.real_ranks_process import RankSetup

LEAD = Member("a", 0)
"""Is in every world of the benchmark's changes."""
STEPS_BEFORE = 6
_FAILURES = (AssertionError, OSError, EOFError, RuntimeError, ValueError)
_SUMMED = ("bytes_moved", "bytes_reread", "bytes_replayed", "bytes_planned", "bytes_lower_bound")
_PARTS = (
    "hash_source_s",
    "certify_source_s",
    "catch_up_s",
    "copy_local_s",
    "read_s",
    "read_state_s",  # all of the above, and waiting for the others
    "certify_target_s",
    "enter_barrier_s",
    "propose_decision_s",
    "read_decision_s",
    "switch_s",
)
"""Of a target. A leaver reads the decision late on purpose, and nobody waits for it."""


@dataclass(slots=True)
class Measured:
    """What one change gave: one dict of numbers a handoff, and the reasons of those that failed."""

    repeats: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class StampedCluster(Cluster):
    """A cluster that notes when its steps and stages arrived, seconds since 1970."""

    def __init__(self, setup: RankSetup) -> None:
        super().__init__(setup)
        self.step_ends: dict[Member, list[tuple[float, int, int]]] = defaultdict(list)
        self.prepared_at: dict[str, float] = {}

    @property
    def clock(self) -> Member:
        """Whose steps are those of the job: the first of the world that trains."""
        assert self.roster is not None
        return self.roster.members[0]

    def close(self) -> None:
        """Kill all ranks at once, so that none complains of another. Told to stop they would send all their state."""
        for rank in self.all_ranks:
            if rank.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGKILL)
        super().close()

    def _listen(self, rank: Rank) -> None:
        rank.pipe = _Stamping(rank.pipe, lambda event: self._note(rank.member, event))
        super()._listen(rank)

    def _note(self, member: Member, event: tuple) -> None:
        now = time.time()
        if event[0] == "step":
            self.step_ends[member].append((now, event[1], event[2]))
        if event[0] == "stage" and event[2] == "prepared":
            self.prepared_at[event[1]] = now


class _Stamping:
    """A pipe whose events are shown to `note` the moment they are read."""

    def __init__(self, pipe: Any, note: Callable[[tuple], None]) -> None:
        self._pipe = pipe
        self._note = note

    def recv(self) -> tuple:
        event = self._pipe.recv()
        self._note(event)
        return event

    def send(self, message: Any) -> None:
        self._pipe.send(message)


def rank_setup(model: Model, data_prefix: str, **changes: Any) -> RankSetup:
    """How the benchmark's ranks are started; their budget for extra bytes follows from the model."""
    settings: dict[str, Any] = {
        "global_batch": GLOBAL_BATCH,
        "micro_batch": model.micro_batch,
        "seed": SEED,
        "transport": "mixed",
        "job": model.entrypoint,
        "extra_bytes_max": extra_bytes_budget(model),
        "bring_up_s": 20 + 4 * step_s_at_most(model),
    }
    return RankSetup(model.arguments(data_prefix), **settings | changes)


def limit_s(model: Model) -> float:
    """Seconds that one handoff, or the steps around it, may take at most."""
    return 60 + 60 * step_s_at_most(model)


def run_changes(
    model: Model, data_prefix: str, rung: Rung, *, changes: Iterable[str], repeats: int, say: Callable[[str], None]
) -> dict[str, Measured]:
    """Go round all changes `repeats` times and measure those that are wanted. Never raises for what ranks do."""
    found = {name: Measured() for name in changes}
    cluster: StampedCluster | None = None
    try:
        for change in [change for _ in range(repeats) for change in model.changes]:
            wanted = found.get(change.name)
            if wanted is None and cluster is None:
                continue
            try:
                cluster = cluster or _launched(model, data_prefix, change)
                if wanted is None:
                    _hand_over(cluster, model, change, Rung.STOP_AND_COPY)
                    continue
                wanted.repeats.append(measure_handoff(cluster, model, change, rung))
                say(f"  {rung} {change}: pause {wanted.repeats[-1]['pause_s'] * 1000:.0f} ms")
            except _FAILURES as error:
                reason = f"{type(error).__name__}: {str(error).strip()[-600:]}"
                if wanted is not None:
                    wanted.failures.append(reason)
                say(f"  {rung} {change}: FAILED {reason}")
                if cluster is not None:
                    cluster.close()
                cluster = None
    finally:
        if cluster is not None:
            cluster.close()
    return found


def _launched(model: Model, data_prefix: str, change: Change) -> StampedCluster:
    cluster = StampedCluster(rank_setup(model, data_prefix))
    try:
        cluster.launch(change.source, change.source_nodes, timeout_s=limit_s(model))
        cluster.await_step(LEAD, STEPS_BEFORE + 4, limit_s(model))
    except BaseException:
        cluster.close()
        raise
    return cluster


def _hand_over(cluster: StampedCluster, model: Model, change: Change, rung: Rung) -> Any:
    longest = limit_s(model)
    slow = step_s_at_most(model)
    cutover = CutoverDeadlines(20 + 4 * slow, 30 + 6 * slow, 60 + 10 * slow)
    request = cluster.open(change.target, change.target_nodes, deadline_s=longest, cutover=cutover, rung=rung)
    cluster.await_stage(cluster.members(request), request, "prepared", longest)
    cluster.complete(request, timeout_s=longest)
    return request


def measure_handoff(cluster: StampedCluster, model: Model, change: Change, rung: Rung) -> dict[str, Any]:
    """One handoff from steps that run undisturbed to steps that do so again. Raises AssertionError with the reason."""
    assert cluster.roster is not None
    generation = cluster.roster.generation
    cluster.wait_for(
        lambda: len(_of(cluster, generation)) > STEPS_BEFORE, limit_s(model), f"{STEPS_BEFORE} undisturbed steps"
    )
    before = _of(cluster, generation)[-STEPS_BEFORE - 1 :]
    clock = cluster.clock
    request = _hand_over(cluster, model, change, rung)
    wanted = STEPS_AFTER + SETTLED_STEPS + 1
    cluster.wait_for(
        lambda: len(_of(cluster, request.generation)) > wanted, limit_s(model), f"{wanted} steps in the next world"
    )
    stages = {member: cluster.stages(member, request.handoff_id) for member in cluster.members(request)}
    ends = {*cluster.step_ends[clock], *cluster.step_ends[cluster.clock]}
    return summary(
        stages,
        before=before,
        steps=[step for step in sorted(ends) if step[0] > before[-1][0]],
        generation=request.generation,
        prepared_at=cluster.prepared_at[request.handoff_id],
        next_optimizer_s=_optimizer_s(cluster, request, limit_s(model)),
    )


def _optimizer_s(cluster: StampedCluster, request: Any, longest_s: float) -> float:
    """What `summary` calls `optimizer_s`, of the settled steps of the next world."""
    members = request.target.members
    cluster.command(members, "tell_optimizer")

    def said() -> list[float]:
        words = [word for member in members for word in list(cluster.ranks[member].events) if word[0] == "optimizer"]
        return [seconds for _, generation, seconds in words if generation == request.generation]

    cluster.wait_for(lambda: len(said()) >= len(members), longest_s, "optimizer seconds of the next world")
    return min(said())


def _of(cluster: StampedCluster, generation: int) -> list[tuple[float, int, int]]:
    return [step for step in list(cluster.step_ends[cluster.clock]) if step[1] == generation]


Step = tuple[float, int, int]


def summary(
    stages: Mapping[Any, Sequence[tuple[str, Any, dict[str, float]]]],
    *,
    before: Sequence[Step],
    steps: Sequence[Step],
    generation: int,
    prepared_at: float,
    next_optimizer_s: float | None = None,
) -> dict[str, Any]:
    """The numbers of one handoff. Pure.

    stages: of each member (stage, reason, measures). before: its last undisturbed steps, steps: all that came after,
    each (end in seconds since 1970, generation, step). Times in seconds, bytes over all ranks but for the extra bytes,
    which are those of the fullest rank; a part of the pause is that of the slowest rank. `next_optimizer_s`: what the
    optimizer takes in the next world, which applies the step handed over. `pause_s` takes off what it takes in the
    source world, as the product does; where layouts differ in it, `pause_less_next_optimizer_s` is what the handoff
    itself costs.
    """
    final = {member: next(m for stage, _, m in said if stage in ("active", "left")) for member, said in stages.items()}
    prepared = [(reason, m) for said in stages.values() for stage, reason, m in said if stage == "prepared"]
    targets = [next(m for s, _, m in said if s == "active") for said in stages.values() if said_active(said)]
    usual_s = [late[0] - early[0] for early, late in pairwise(before)]
    step_s = statistics.median(usual_s)
    reduced = [m["reduced_at_utc"] for m in final.values() if "reduced_at_utc" in m]
    usual = [m["optimizer_s"] for m in final.values() if "optimizer_s" in m]
    # The pause begins when the last rank has reduced. What the others take from there to the end of a usual step
    # includes waiting for that one, so the least of them is the optimizer's own time; the median would make a pause
    # short, even negative, where ranks are far apart.
    optimizer = min(usual)
    stood_s = max(m["first_forward_at_utc"] for m in targets) - max(reduced)
    pause_s = stood_s - optimizer
    after = [end for end, of, _ in steps if of == generation][STEPS_AFTER:]
    settled_s = statistics.median(late - early for early, late in pairwise(after))
    since = prepared_at - max(m.get("stream_s", 0.0) for _, m in prepared)
    streamed = any("stream_s" in m for _, m in prepared)
    boundary = max(reduced)
    steps_before = sum(1 for end, of, _ in steps if of != generation)
    fell = next((reason for reason, _ in prepared if reason), None)
    return {
        "pause_s": pause_s,
        "pause_steps": pause_s / step_s,
        "step_s": step_s,
        "step_deviation_s": deviation(usual_s),
        "next_step_s": settled_s,
        **_lost(before, steps, generation, since=since if streamed else None, pause_s=max(0.0, pause_s)),
        "lost_before_cutover_s": boundary - before[-1][0] + optimizer - (steps_before + 1) * step_s,
        "steps_before_cutover": steps_before,
        "open_to_boundary_s": boundary - before[-1][0],
        **_copied(targets),
        **_bytes(list(final.values()), targets),
        "torn_reads": sum(m.get("torn_reads", 0.0) for m in targets),
        "step_time_ratio_streaming": _streaming_ratio([before[-1], *steps], since, boundary, step_s),
        "first_step_ratio": max(m["first_step_s"] for m in targets) / settled_s,
        "rung_taken": _rung(targets) if fell is None else str(Rung.STOP_AND_COPY),
        "rung_reason": fell,
        "optimizer_s": optimizer,
        "next_optimizer_s": next_optimizer_s,
        "pause_less_next_optimizer_s": None if next_optimizer_s is None else stood_s - next_optimizer_s,
        "pause_parts_s": {name: max(m.get(name, 0.0) for m in targets) for name in _PARTS},
    }


def _lost(
    before: Sequence[Step], steps: Sequence[Step], generation: int, *, since: float | None, pause_s: float
) -> dict[str, Any]:
    """As the product counts it. `since`: when the state began to stream, None where it did not."""
    lost = LostTime(
        before[-1][0], before[-1][2], statistics.median(late[0] - early[0] for early, late in pairwise(before))
    )
    for end, of, step in steps:
        lost.stepped(of, generation, step, end)
    parts = lost.parts(since, pause_s)
    return {"lost_s": lost.lost_s, "lost_parts": None if parts is None else asdict(parts)}


def _copied(targets: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The first pass over all state while training goes on: seconds, and how fast it came to the slowest target.
    `converge_s`: until it had caught up with the steps as well."""
    copied = [(m["copied_s"], m["bytes_streamed"] / m["copied_s"]) for m in targets if m.get("copied_s")]
    longest = max((seconds for seconds, _ in copied), default=None)
    return {
        "targets": len(targets),
        "converge_s": max((m["converge_s"] for m in targets if "converge_s" in m), default=None),
        "copied_s": longest,
        "stream_bytes_per_s": min((rate for _, rate in copied), default=None),
    }


def _rung(targets: Sequence[dict[str, float]]) -> str:
    """Which one it was, of a handoff that did not fall to another one before the pause."""
    if any("gradient_bytes_at_cutover" in m for m in targets):
        return str(Rung.LIVE)
    return f"{Rung.LIVE}, batch redone" if any("converge_s" in m for m in targets) else str(Rung.STOP_AND_COPY)


def _bytes(final: Sequence[dict[str, float]], targets: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What moved, how fast in the pause alone (while training goes on a read gives way to the steps), what it took."""
    read_s = max(m.get("read_s", 0.0) for m in targets)
    read_in_pause = sum(m.get("gradient_bytes_at_cutover", m.get("bytes_moved", 0.0)) for m in targets)
    return {
        "gradient_bytes_at_cutover": sum(m.get("gradient_bytes_at_cutover", 0.0) for m in targets),
        **{name: sum(m.get(name, 0.0) for m in targets) for name in _SUMMED},
        "bandwidth_bytes_per_s": read_in_pause / read_s if read_s else None,
        "extra_bytes_peak": max(m.get("extra_bytes_peak", m.get("ring_bytes", 0.0)) for m in final),
        "extra_bytes_budget": max(
            (m["extra_bytes_budget"] for m in targets if "extra_bytes_budget" in m), default=None
        ),
        "ring_bytes": max(m.get("ring_bytes", 0.0) for m in final),
    }


def said_active(said: Sequence[tuple[str, Any, dict[str, float]]]) -> bool:
    """Whether a member trains in the next world."""
    return any(stage == "active" for stage, _, _ in said)


def _streaming_ratio(steps: Sequence[Step], since: float, until: float, step_s: float) -> float | None:
    """Median step that lies whole between the start of the stream and the cutover, over an undisturbed one."""
    during = [late[0] - early[0] for early, late in pairwise(steps) if early[0] >= since and late[0] <= until]
    return statistics.median(during) / step_s if during else None
