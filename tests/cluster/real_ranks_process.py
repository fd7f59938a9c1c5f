"""What runs inside a rank process of `rank_cluster`: the loop, its listener, and a recorder at its probe points.

The recorder copies state where a test wants to compare it, writes Megatron's own checkpoint at boundaries, and causes
the faults a test has armed: kill, stall (SIGSTOP), or hold until released. Everything it returns is numpy or plain.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from liver_core.layout import Member, to_json
from tests.cluster.net_islands import address_of, enter

HOLD_S_MAX = 60.0
HURRYING, HURRIED_STEPS = {"permit", "abort", "stop"}, 2
"""Commands that are obeyed at the next boundary or the one after it, which then come without a pause."""

CLONE_NEWPID, PR_SET_PDEATHSIG = 0x20000000, 1  # linux/sched.h, linux/prctl.h

EVERY_TIME = 0


@dataclass(frozen=True)
class Fault:
    """At the `nth` passage of `point` from now on, or EVERY_TIME. "tell" reports it; "hold" waits for a release."""

    point: str
    action: str  # one of those in Recorder._cause
    nth: int = 1


@dataclass(frozen=True)
class RankSetup:
    """What rank processes are started with.

    record: copy state at every cutover (boundary, barrier, switch, first step) and give it back at the end.
    trace: digest of this rank's state after every step. checkpoint_at_boundary: folder for Megatron's own checkpoints.
    """

    job_arguments: dict[str, Any]
    global_batch: int = 8
    micro_batch: int = 2
    seed: int = 7
    last_step: int | None = None
    record: bool = False
    record_steps: tuple[int, ...] = ()
    trace: bool = False
    counts: bool = False  # tell descriptors, threads and groups at the same point of every step
    memory: bool = False  # tell resident bytes too, for which the kernel takes as long as a small step does
    checkpoint_at_boundary: str | None = None
    checkpoints: tuple[str, int, int] | None = None  # (path, every_steps, keep)
    checkpoint_waits_s: float = 60.0
    transport: str = "nixl"
    extra_bytes_max: int | None = None
    host_bytes_max: int = 0
    bring_up_s: float = 20.0
    hold_at: tuple[int, ...] = ()  # held after these steps with the next step's gradients reduced, until released
    stream: dict[str, Any] = field(default_factory=dict)  # of StreamSettings
    pace_s: float = 0.0  # waited in every step that no test waits for, so that what is not looked at costs little
    drop_every: int | None = None  # micro-batches between two places at which a step can be dropped
    drop_reserve_s: float = 1e6  # so that every deadline is too near
    stops_at_nonfinite: bool = True
    validate_every: int | None = None
    tensorboard: str | None = None  # a folder in that of the checkpoints
    job: str = "liver_core.training.gpt:GptJob"
    islands: tuple[str, tuple[str, ...]] | None = None  # (prefix, names) of `net_islands`: each node is on its own
    relays: dict[str, str] = field(default_factory=dict)  # node -> its relay; each node is then a machine of its own
    model_nccl: bool = False  # each rank takes itself for one with a GPU of its own, over a model of NCCL
    gpus: tuple[str, ...] = ()  # of this machine; the first is that of node "a", the second that of node "b"

    def host_of(self, node_id: str) -> str:
        """The address that a node's ranks bind to."""
        return "127.0.0.1" if self.islands is None else address_of(node_id, self.islands[1])


def rank_process(pipe: Any, member: Member, request: Any, setup: RankSetup, faults: tuple[Fault, ...]) -> None:
    """Entry of the process: its last word is ("result", ...) or ("error", traceback)."""
    listener = PipeListener(pipe)
    try:
        if setup.islands is not None:
            enter(setup.islands[0], member.node_id)
        if setup.relays:
            be_another_machine()
        if setup.gpus:
            from liver_core.gpu_environment import rank_environment

            os.environ |= rank_environment(ord(member.node_id[0]) - ord("a"), setup.gpus)
        listener.send("result", _run_rank(pipe, listener, member, request, setup, faults))
    except BaseException:
        listener.send("error", traceback.format_exc())
    finally:
        os._exit(0)


def be_another_machine() -> None:
    """From here on no process of another node can be named by this one, nor name it. It ends with its parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "no pid namespace can be made here")
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class PipeListener:
    """Sends what the rank says up the pipe; several threads may speak."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, *event: Any) -> None:
        with self._lock:
            self._pipe.send(event)

    def stage(self, request: Any, stage: str, *, reason: Any, measures: dict[str, float], certificate: str) -> None:
        why = None if reason is None else str(reason)
        self.send("stage", request.handoff_id, stage, why, measures, certificate, request.plan_revision)

    def step(self, generation: int, progress: Any, totals: Any, seconds: float) -> None:
        self.send("step", generation, progress.step, totals.loss, progress.cursor.consumed, progress.digest)

    def metrics(self, generation: int, step: int, values: Any) -> None:
        self.send("metrics", generation, step, dict(values))

    def checkpointed(self, path: str, step: int, seconds: float, asked: int) -> None:
        self.send("checkpointed", path, step, seconds, asked)

    def checkpoint_failed(self, path: str, step: int, text: str, asked: int) -> None:
        self.send("checkpoint_failed", path, text, step, asked)


def _run_rank(
    pipe: Any, listener: PipeListener, member: Member, request: Any, setup: RankSetup, faults: tuple[Fault, ...]
) -> dict[str, Any]:
    from liver_core.rank.after_step import CheckpointPlan
    from liver_core.rank.droppable_step import DropRule
    from liver_core.rank.loop import RankLoop
    from liver_core.rank.prepare.prepare_settings import PrepareSettings
    from liver_core.rank.stream.target_stream import StreamSettings

    job = make_job(setup)
    recorder = Recorder(setup, listener, faults)
    settings = PrepareSettings(
        host=setup.host_of(member.node_id),
        transport=make_transport(setup.transport, setup.host_of(member.node_id), setup.relays.get(member.node_id, "")),
        extra_bytes_max=setup.extra_bytes_max,
        host_bytes_max=setup.host_bytes_max,
        bring_up_s=setup.bring_up_s,
        collective_s=setup.bring_up_s,
        stream=StreamSettings(**setup.stream),
    )
    rule = None if setup.checkpoints is None else CheckpointPlan(*setup.checkpoints, waits_s=setup.checkpoint_waits_s)
    files = None
    if setup.tensorboard is not None:
        from liver_core.rank.metrics.event_files import EventFiles, EventFolder

        where = EventFolder(setup.tensorboard, request.job_id, rule.path if rule is not None else "")
        files = EventFiles(where, lambda text: listener.send("event_files_failed", text), write_every_s=0.1)
    recorder.model_nccl = model_nccl(listener, recorder, member) if setup.model_nccl else None
    if setup.model_nccl:
        settings = replace(settings, place=lambda: recorder.model_nccl)
    loop = RankLoop(
        job,
        member,
        settings,
        listener,
        last_step=setup.last_step,
        checkpoints=rule,
        drop_rule=None if setup.drop_every is None else DropRule(setup.drop_every, setup.drop_reserve_s),
        stops_at_nonfinite=setup.stops_at_nonfinite,
        validate_every=setup.validate_every,
        event_files=files,
        probe=recorder.probe,
    )
    recorder.loop = loop
    threading.Thread(target=_obey, args=(pipe, loop, recorder), daemon=True).start()
    ended = loop.run(request)
    cause = None if ended.reason is None or ended.reason.cause is None else str(ended.reason.cause.what)
    reason = None if ended.reason is None else str(ended.reason)
    return {"how": ended.how, "reason": reason, "cause": cause, **recorder.result()}


def make_job(setup: RankSetup) -> Any:
    """The job of a setup."""
    module, _, name = setup.job.partition(":")
    factory = getattr(importlib.import_module(module), name)
    return factory(setup.job_arguments, global_batch=setup.global_batch, micro_batch=setup.micro_batch, seed=setup.seed)


def model_nccl(listener: PipeListener, recorder: Recorder, member: Member) -> Any:
    """Where this rank trains. It says when a communicator is made: the step, whether training pauses for a cutover, and
    whether it waits for communicators."""
    import torch

    from liver_core.worlds.nccl_groups import NcclGroups, TrainsOn
    from tests.liver_core.worlds.nccl_model import ModelNccl

    def looks() -> None:
        loop = recorder.loop
        main = sys._current_frames()[threading.main_thread().ident or 0]
        waits = any(frame.f_code is NcclGroups.connect.__code__ for frame, _ in traceback.walk_stack(main))
        listener.send("communicator", loop.progress.step, loop.pending.is_cutting_over, waits)

    return TrainsOn(f"GPU-{member}", torch.device("cpu"), ModelNccl(looks))


def make_transport(name: str, host: str = "127.0.0.1", relay: str = "") -> Callable[[str, Any], Any]:
    """What makes a rank's endpoint from its name."""
    if name == "nixl":
        from liver_core.device.rank_device import own_device
        from liver_core.transport.nixl import NixlTransport
        from liver_core.transport.ucx import Ucx

        return lambda endpoint, _store: NixlTransport(endpoint, Ucx(host_memory_only=own_device().type == "cpu"))
    if name == "mixed":
        from liver_core.transport.endpoint import make_endpoint

        return lambda endpoint, store: make_endpoint(endpoint, host, store, relay)
    if name == "gloo":
        from liver_core.transport.endpoint import make_far

        return lambda endpoint, store: make_far(endpoint, host, store)
    raise ValueError(name)


def _obey(pipe: Any, loop: Any, recorder: Recorder) -> None:
    while True:
        try:
            name, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        target = next(part for part in (recorder, loop, loop.requests) if hasattr(part, name))
        getattr(target, name)(*arguments)
        if name in HURRYING:
            recorder.hurry(loop.progress.step + HURRIED_STEPS)


class Recorder:
    """Looks at a rank from inside its probe points. `arm` and `release` are commands of the test."""

    def __init__(self, setup: RankSetup, listener: PipeListener, faults: tuple[Fault, ...]) -> None:
        self.setup = setup
        self.listener = listener
        self.loop: Any = None
        self.model_nccl: Any = None
        self.armed: list[list[Any]] = [[fault, 0] for fault in faults]
        self.released = threading.Event()
        self.records: dict[tuple[str, int, int], dict[str, Any]] = {}
        self.trace: dict[int, tuple[int, str]] = {}
        self._generation_seen = -1
        self._hurried_to = 0
        self._hurried = threading.Event()

    def hurry(self, step: int) -> None:
        """No pause before this step: somebody waits for it."""
        self._hurried_to = max(self._hurried_to, step)
        self._hurried.set()

    def arm(self, fault: Fault) -> None:
        self.armed.append([fault, 0])
        self.listener.send("armed", fault)

    def disarm(self) -> None:
        self.armed.clear()

    def release(self) -> None:
        self.released.set()

    def refuse_communicators(self) -> None:
        """From now on no communicator can be made."""
        self.model_nccl.library.fails = "no memory for a communicator"

    def set_stream(self, settings: dict[str, Any]) -> None:
        """How the next handoff streams."""
        from liver_core.rank.stream.target_stream import StreamSettings

        self.loop.settings = replace(self.loop.settings, stream=StreamSettings(**settings))

    def set_budget(self, extra_bytes_max: int | None, host_bytes_max: int = 0) -> None:
        """What the next handoff may take."""
        budgets = {"extra_bytes_max": extra_bytes_max, "host_bytes_max": host_bytes_max}
        self.loop.settings = replace(self.loop.settings, **budgets)

    def tell_verdict(self) -> None:
        """Say how the state of the prepared handoff moves, and why."""
        following = self.loop.following
        verdict = None if following is None else following.verdict
        if following is not None:
            said = ("", "") if verdict is None else (str(verdict.rung), verdict.reason)
            self.listener.send("verdict", following.request.handoff_id, *said)

    def tell_rescue(self) -> None:
        """Say how many bytes are kept for leavers of the last handoff."""
        retirement = self.loop.retirement
        rescue = None if retirement is None else retirement.following.rescue
        self.listener.send("rescue", -1 if rescue is None else rescue.bytes)

    def tell_steps(self) -> None:
        """Say how long the latest steps of the active world took, seconds."""
        active, taken = self.loop.active, list(self.loop.timings.steps)
        if active is not None:
            self.listener.send("steps", active.world.generation, taken)

    def tell_optimizer(self) -> None:
        """Say how long the part of a step after its boundary takes in the active world, seconds."""
        active, taken = self.loop.active, list(self.loop.timings.optimizer)
        if active is not None and taken:
            self.listener.send("optimizer", active.world.generation, statistics.median(taken))

    def probe(self, point: str) -> None:
        if point == "boundary" and self.loop.active is not None:
            self._at_boundary()
        if point == "barrier" and self.setup.record and self.loop.following.request.source is not None:
            self._at_barrier()
        if point == "barrier" and self.setup.record and self.loop.following.request.checkpoint:
            self._at_barrier()
        if point == "switched" and self.setup.record:
            self._at_switch()
        if point == "switched" and self.setup.memory:
            self._tell_memory("resident at the switch")
        if point == "reduced":
            self._at_step()
            self._pause()
            if self.loop.progress.step in self.setup.hold_at:
                self._hold(f"step {self.loop.progress.step}")
        for entry in list(self.armed):
            if entry[0].point == point:
                entry[1] += 1
                if entry[0].nth in (entry[1], EVERY_TIME):
                    self._cause(entry[0])

    def _pause(self) -> None:
        self._hurried.clear()
        if self.loop.progress.step >= self._hurried_to:
            self._hurried.wait(self.setup.pace_s)

    def _cause(self, fault: Fault) -> None:
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stall":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "tell":
                self.listener.send("passed", fault.point)
            case "hold":
                self._hold(fault.point)
            case "wait in NCCL":
                self.listener.send("passed", fault.point)
                self.model_nccl.library.backends[0].collective()
            case "hold communicators":
                self.model_nccl.library.looks = lambda: self._hold(fault.point)
            case "corrupt":
                made = self.loop.following or self.loop.preparation.made
                made.live.regions["exp_avg"].window(3, 4).add_(1.0)
            case "corrupt share":
                self.loop.following.rescue.regions["exp_avg"].view(-1)[3] += 1.0
            case "corrupt replica":
                made = self.loop.following or self.loop.preparation.made
                whole = {spec.name for spec in made.manifest.parameters if spec.tp_dim is None}
                part = next(part for part in made.live.shards.parameters if part.name in whole and part.numel)
                made.live.regions["exp_avg"].window(part.region_offset, part.region_offset + 1).add_(1.0)
            case "corrupt counts":
                self.loop.following.boundary["small"]["element_scalars"]["step"] += 1.0
            case "corrupt bias":
                following = self.loop.following
                both = following.step_tensors
                damaged = {name: "AAAA" + text[4:] for name, text in both.before.items()}
                following.step_tensors = type(both)(damaged, both.after)
            case "corrupt gradients":
                made = self.loop.following or self.loop.preparation.made
                made.live.regions["grad"].window(3, 4).add_(1.0)
            case "corrupt slot":
                made = self.loop.following or self.loop.preparation.made
                ring = made.source_stream.ring
                newest = int(ring.small["slots"].max()) // 2
                ring.slots[f"ring{newest % ring.depth}"].tensors[0].add_(1.0)
                self.listener.send("passed", fault.point)
            case "lose the result":
                lose_the_result()
            case "raise":
                raise ValueError(f"planted at {fault.point}")
            case _:
                raise ValueError(fault.action)

    def _hold(self, point: str) -> None:
        self.released.clear()
        self.listener.send("held", point)
        if not self.released.wait(HOLD_S_MAX):
            raise AssertionError(f"held at {point} and never released")

    def _at_boundary(self) -> None:
        active = self.loop.active
        from liver_core.state.checkpoint import snapshot, write
        from liver_core.state.small_state import collect

        if self.setup.record:
            record = self._keep("source", active.world, active.live, active.live.regions)
            record["weights"] = local_weights(active.state)
            record["small"] = collect(self.loop.job, active.state, active.live, self.loop.progress)
        if self.setup.checkpoint_at_boundary:
            small = collect(self.loop.job, active.state, active.live, self.loop.progress)
            path = f"{self.setup.checkpoint_at_boundary}/generation-{active.world.generation}"
            write(snapshot(active.world, active.state), small, path, active.world.everyone)

    def _at_barrier(self) -> None:
        """What the next world holds before GO, and the weights that its own gather makes of its masters."""
        from liver_core.state.optimizer_step import refresh_weights
        from liver_core.worlds.megatron import building

        following = self.loop.following
        record = self._keep("target", following.world, following.live, following.live.regions)
        if self.setup.host_bytes_max:
            return  # On some of the ranks, nothing that a gather could be made into has memory yet.
        with building(following.world):
            refresh_weights(following.state)
        record["weights"] = local_weights(following.state)

    def _at_switch(self) -> None:
        from liver_core.state.small_state import collect

        active = self.loop.active
        record = self._keep("switched", active.world, active.live, {})
        if active.live.optimizer.has_stepped:
            record["small"] = collect(self.loop.job, active.state, active.live, self.loop.progress)
            record["megatron"] = megatron_state(active.state)

    def _at_step(self) -> None:
        """Gradients of the next step are reduced; masters and moments are those after the last applied step."""
        active, step = self.loop.active, self.loop.progress.step
        regions = {kind: region for kind, region in active.live.regions.items() if kind != "grad"}
        first = active.world.generation != self._generation_seen
        self._generation_seen = active.world.generation
        if self.setup.memory or self.setup.counts:
            self._tell_memory()
        if self.setup.trace:
            self.trace[step] = (active.world.generation, digest_of(regions, active.live.step_tensors))
        if (self.setup.record and first) or step in self.setup.record_steps:
            record = self._keep("stepped", active.world, active.live, regions)
            record["step"] = step
            if step in self.setup.record_steps:
                self.records[("step", step, active.world.rank)] = record

    def _tell_memory(self, name: str = "resident") -> None:
        # What malloc keeps of the last step would drown what is looked for.
        trim()
        resident = resident_bytes() if self.setup.memory else None
        self.listener.send(name, self.loop.progress.step, resident, counts())

    def _keep(self, role: str, world: Any, live: Any, regions: dict[str, Any]) -> dict[str, Any]:
        copies = {kind: whole(region) for kind, region in regions.items()}
        both = live.step_tensors.encoded()
        beside = {"before": dict(both.before), "after": dict(both.after)}
        record = {"regions": copies, "layout": str(world.layout), "step_tensors": beside}
        self.records[(role, world.generation, world.rank)] = record
        return record

    def result(self) -> dict[str, Any]:
        active = self.loop.active
        if active is None:
            return {"records": self.records, "trace": self.trace, "manifest": None}
        progress = self.loop.progress
        return {
            "records": self.records,
            "trace": self.trace,
            "final": {kind: whole(region) for kind, region in active.live.regions.items()},
            "manifest": to_json(active.live.manifest),
            "rank": active.world.rank,
            "step": progress.step,
            "consumed": progress.cursor.consumed,
            "digest": progress.digest,
        }


def lose_the_result() -> None:
    """The next comparison of certificates ends on the other ranks, and fails here."""
    from liver_core.rank.cutover import cutover_run

    compare = cutover_run.count

    def lost(*arguments: Any) -> Any:
        cutover_run.count = compare
        compare(*arguments)
        return compare(*arguments)  # Nobody else comes: the collective times out and closes its connections.

    cutover_run.count = lost


def counts() -> dict[str, int]:
    """What of this process must not grow from handoff to handoff."""
    from torch.distributed import distributed_c10d as c10d

    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(c10d._world.pg_map),
        "group names": len(c10d._world.tags_to_pg.get("", [])),
    }


def trim() -> None:
    """Have the C library return what it keeps of freed memory, where it can."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def resident_bytes() -> int:
    """Resident bytes of this process, from the kernel."""
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Rss:"))


def on_host(tensor: Any) -> Any:
    """A copy as numpy."""
    return tensor.detach().clone().cpu().numpy()


def whole(region: Any) -> Any:
    """All elements of a region as fp32 in numpy; bf16 numbers are fp32 numbers too."""
    import torch

    return on_host(torch.cat([tensor.float() for tensor in region.tensors]))


def digest_of(regions: dict[str, Any], step_tensors: Any) -> str:
    """One digest over the raw bits of regions, and over what steps change beside them, before this step and after."""
    digest = hashlib.sha256(repr(step_tensors.encoded()).encode())
    for kind in sorted(regions):
        digest.update(kind.encode())
        digest.update(whole(regions[kind]).tobytes())
    return digest.hexdigest()


def local_weights(state: Any) -> dict[str, Any]:
    """Model weights by Megatron's own local names, as raw bits (bfloat16 has no numpy type)."""
    import torch

    from liver_core.state.megatron_optimizer import unwrapped

    bits = {4: torch.int32, 2: torch.int16}
    return {
        name: on_host(parameter.detach().view(bits[parameter.element_size()]))
        for name, parameter in unwrapped(state.model).named_parameters()
    }


def megatron_state(state: Any) -> dict[str, dict[str, Any]]:
    """Local parameter name -> what Megatron's optimizer holds of it on this rank, asked of Megatron alone."""
    from liver_core.state.megatron_optimizer import unwrapped
    from liver_core.state.optimizer_chain import optimizer_chain

    parts, held = optimizer_chain(state.optimizer).parts, {}
    for name, parameter in unwrapped(state.model).named_parameters():
        for part in parts:
            if parameter in part.model_param_group_index_map:
                tensors = part._get_main_param_and_optimizer_states(parameter)
                held[name] = {kind: on_host(value) for kind, value in tensors.items()}
    return held


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll inside a rank process; raises AssertionError after the deadline."""
    deadline, tick = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {timeout_s} s")
        tick.wait(0.01)
