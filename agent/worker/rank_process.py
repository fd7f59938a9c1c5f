"""Entry of a rank process. The zygote forks it with a RankSpec; it ends when the job, or its part in it, ends.

Exit status: 0 finished, stopped or left; 3 aborted before it trained; 4 broken, the checkpoint rung is next; 5 failed,
nothing is next.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from agent.protocol import rank
from agent.protocol.jobfile import OnNonfinite
from agent.protocol.rank_status import Whereabouts
from agent.protocol.worker import RankSpec
from agent.supervisor.child_entry import LastStep
from agent.supervisor.process import own_identity
from agent.worker.control import ControlSocket, log
from agent.worker.whereabouts import main_thread_at
from liver_core.handoff.messages import Decision, FailureCause, Order, RankStage, Reason
from liver_core.layout import Member
from liver_core.layout.limits import NAME_CHARS_MAX, fitting
from liver_core.rank.after_step import CheckpointPlan, Ending
from liver_core.rank.checkpoint_writer import tellers
from liver_core.rank.droppable_step import DropRule
from liver_core.rank.loop import RankLoop
from liver_core.rank.prepare.prepare_settings import PrepareSettings
from liver_core.rank.step_boundary import StepTotals
from liver_core.rank.store_exchange import cause_of
from liver_core.state.checkpoint_files import COMPLETE_FILE, announce_start
from liver_core.state.replay_check import check_replay
from liver_core.state.small_state import TrainingProgress
from liver_core.state.step_counts import UnsupportedState
from liver_core.steady_clock import PROCESS_CLOCK, utc_now
from liver_core.streaming.header import HeaderError
from liver_core.training.entrypoint import load_job
from liver_core.transport.endpoint import make_endpoint, warm_up
from liver_core.transport.protocol import TransportError
from liver_core.worlds.megatron import prepare_process
from liver_core.worlds.peer_deaths import PeerDeath

if TYPE_CHECKING:
    from liver_core.rank.metrics.event_files import EventFiles

# A rank that hangs is named by the agent's watchdog long before; this only bounds a collective nobody watches.
_COLLECTIVE_S = 600.0

_WARM_UP_AFTER_S = 1.0
_FLUSH_S = 1.0
_EXIT = {
    Ending.FINISHED: 0,
    Ending.STOPPED: 0,
    Ending.LEFT: 0,
    Ending.ABORTED: 3,
    Ending.BROKEN: 4,
    Ending.FAILED: 5,
}


def run(spec: dict[str, Any], control: socket.socket, last_step: LastStep) -> int:
    """Train until there is no more to do. Returns the exit status; says why on stdout and to the agent."""
    worker = Worker(RankSpec.model_validate_json(json.dumps(spec)), control, last_step)
    try:
        return worker.run()
    except Exception as error:
        traceback.print_exc()
        worker.fail(f"{type(error).__name__}: {error}", cause_of(error))
        return 1
    finally:
        worker.control.flush(_FLUSH_S)
        for fact in worker.control.facts():
            log(f"\n{rank.LAST_SAID}{fact.model_dump_json()}")  # On a line of its own, whatever a job left unfinished.
        time.sleep(0.2)  # The last lines are on their way to the agent; the process exit would cut them off.


class Worker:
    """Glue between one RankLoop and its agent: messages in, messages out, nothing decided here."""

    def __init__(self, spec: RankSpec, control: socket.socket, last_step: LastStep) -> None:
        PROCESS_CLOCK.zero = spec.clock_zero
        self.spec = spec
        self.member = Member(spec.node_id, spec.slot)
        self.control = ControlSocket(control, self._hello, self._obey)
        self.last_step = last_step
        self.stage_now = RankStage.STARTING
        self.generation = spec.order.generation
        self.rank = spec.rank
        self.step_now = 0
        self.first_prepare: list[Order] = []
        self.ordered = ("", 0.0)
        """The last handoff that this rank was asked to prepare, and when it was first asked."""
        self.leased_until = 0.0
        """A start makes no step before its agent has given it a lease: an older world may step on beside it."""
        self.relay = ""
        """Of the handoff that was asked for last."""
        self.warmed = False
        self.loop: RankLoop | None = None

    def run(self) -> int:
        self.control.start()
        prepare_process()
        file = self.spec.spec
        settings = PrepareSettings(
            host=self.spec.private_address,
            transport=lambda name, store: make_endpoint(name, self.spec.private_address, store, self.relay),
            collective_s=_COLLECTIVE_S,
            extra_bytes_max=file.extra_bytes_max,
            host_bytes_max=file.host_bytes_max or 0,
        )
        rule = file.checkpoint
        loop = RankLoop(
            load_job(
                file.entrypoint,
                file.job_args(),
                global_batch=file.global_batch,
                micro_batch=file.micro_batch,
                seed=file.seed,
                workdir=file.workdir,
            ),
            self.member,
            settings,
            self,
            last_step=file.stop.steps,
            checkpoints=None if rule is None else CheckpointPlan(rule.path, rule.every_steps, rule.keep),
            drop_rule=None if file.drop_step is None else DropRule(file.drop_step.every_micro_batches),
            validate_every=file.validate_every_steps,
            stops_at_nonfinite=file.on_nonfinite is OnNonfinite.STOP,
            event_files=self._event_files(),
        )
        is_start = self.spec.order.source is None
        if is_start:
            loop.requests.lease(0.0)
        self.loop = loop  # From here on the thread that reads commands gives it leases.
        if is_start:
            loop.requests.raise_lease(self.leased_until)
            self._announce_start()
        first = self._first_order()
        ended = loop.run(first)
        log(f"rank {self.rank} of generation {self.generation}: {ended.how} {ended.reason or ''}")
        if ended.how in (Ending.FINISHED, Ending.FAILED):
            failed = ended.reason if ended.how is Ending.FAILED else None
            self.control.say(rank.Finished(step=loop.progress.step, failed=failed))
        elif ended.how is Ending.BROKEN:
            self.fail(str(ended.reason), ended.reason.cause if ended.reason is not None else None)
        return _EXIT[ended.how]

    def _announce_start(self) -> None:
        rule, order = self.spec.spec.checkpoint, self.spec.order
        if rule is None or self.rank != 0:
            return
        try:
            announce_start(Path(rule.path), order.job_id, order.generation)
        except OSError as error:
            log(f"that generation {order.generation} has started cannot be noted in {rule.path}: {error}")

    def _event_files(self) -> EventFiles | None:
        file = self.spec.spec
        if file.tensorboard is None or file.checkpoint is None:
            return None
        # What writes them takes a while to import, and most jobs have none.
        from liver_core.rank.metrics.event_files import EventFiles, EventFolder

        return EventFiles(EventFolder(file.tensorboard, str(self.spec.order.job_id), file.checkpoint.path), log)

    def fail(self, text: str, cause: FailureCause | None) -> None:
        """Say that this rank cannot go on."""
        self.stage_now = RankStage.FAILED
        self.control.say(rank.Failed(reason=Reason(text, "training", self.rank, cause=cause)))

    def _first_order(self) -> Order:
        first = self.spec.order
        if first.source is not None:
            return self._await_prepare()
        # Nobody trains who could be disturbed: every rank of a first world goes as soon as all of them are there.
        assert self.loop is not None
        self.loop.permit(first.handoff_id, first.plan_revision)
        return first

    def _await_prepare(self) -> Order:
        deadline = self.spec.order.deadline_utc
        while not self.first_prepare:
            if utc_now() > deadline:
                handoff_id = self.spec.order.handoff_id
                raise TimeoutError(f"no prepare of handoff {handoff_id} from the agent before its deadline")
            time.sleep(0.005)
        return self.first_prepare[0]

    # Commands.

    def _obey(self, command: rank.RankCommand) -> None:
        loop = self.loop
        match command:
            case rank.Prepare(order=order, clock_zero=clock_zero, relay=relay):
                PROCESS_CLOCK.zero, self.relay = clock_zero, relay or ""
                self._prepare(order)
            case rank.Permit():
                if loop is not None:
                    loop.permit(str(command.handoff_id), command.plan_revision)
            case rank.Withdraw():
                if loop is not None:
                    loop.withdraw(str(command.handoff_id))
            case rank.Abort():
                if self.spec.order.source is not None and (loop is None or not self.first_prepare):
                    os._exit(0)  # A newcomer that has built nothing yet.
                if loop is not None:
                    loop.abort(str(command.handoff_id), command.reason)
            case rank.Retire():
                if loop is not None:
                    loop.requests.retire(str(command.handoff_id))
            case rank.WriteCheckpoint():
                if loop is not None:
                    loop.requests.checkpoint(command.number)
            case rank.Stop():
                if loop is None or loop.active is None:
                    os._exit(0)
                loop.requests.stop(command.reason)
            case rank.StepLease():
                self.leased_until = command.until_s
                if loop is not None:
                    loop.requests.lease(command.until_s)
            case rank.PeerDied():
                if loop is not None:
                    loop.peer_died(PeerDeath(command.generation, command.member, command.reason))
            case rank.WhereQuery():
                self.control.say(rank.WhereaboutsReport(where=self._whereabouts()))
            case rank.StatusQuery():
                pass
            case _:
                assert_never(command)

    def _prepare(self, order: Order) -> None:
        if self.ordered[0] != order.handoff_id:
            self.ordered = (order.handoff_id, utc_now())
        if self.loop is None or self.loop.active is None:
            self.rank = order.rank_of(self.member)
        if self.loop is None or not self.first_prepare:
            self.first_prepare[:] = [order]
        if self.loop is not None:
            self.loop.prepare(order)

    # What the loop says (liver_core.rank.loop.Listener).

    def stage(
        self, request: Order, stage: RankStage, *, reason: Reason | None, measures: dict[str, float], certificate: str
    ) -> None:
        if self.stage_now is RankStage.FAILED:
            return  # What a thread that still prepares says then would hide why the rank ends.
        self.stage_now = stage
        if stage is RankStage.ACTIVE:
            self._warm_up_once()
            self.generation = request.generation
            self.rank = request.target.members.index(self.member)
        which = f" (revision {request.plan_revision})" if request.plan_revision > 1 else ""
        text = f"handoff {request.handoff_id}{which} to generation {request.generation}: {stage}"
        log(f"{text}{f' ({reason})' if reason else ''}")
        if self.ordered[0] == request.handoff_id:
            measures = {**measures, "ordered_at_utc": self.ordered[1]}
        if stage is RankStage.PREPARED and request.source is None:
            self._tell_what_was_loaded(request)
        self.control.say(
            rank.StageReport(
                handoff_id=uuid.UUID(request.handoff_id),
                generation=request.generation,
                rank=request.rank_of(self.member),
                stage=self.stage_now,
                plan_revision=request.plan_revision,
                reason=reason,
                measures={name: float(value) for name, value in measures.items() if math.isfinite(value)},
                certificate=certificate or None,
                decision=self._decision(request),
            )
        )

    def _tell_what_was_loaded(self, request: Order) -> None:
        """Where a start found a later checkpoint than it was given, nobody else has heard of that one."""
        made = None if self.loop is None else self.loop.following
        if made is None or made.small is None or made.loaded == request.checkpoint:
            return
        if made.target_rank in tellers(request.target):
            said = {"path": made.loaded, "step": int(made.small["step"]), "generation": request.generation}
            finished_utc = utc_now()
            with contextlib.suppress(OSError):
                finished_utc = min(finished_utc, os.stat(Path(made.loaded, COMPLETE_FILE)).st_mtime)
            self.control.say(rank.Checkpointed(**said, finished_utc=finished_utc, loaded=True))

    def _warm_up_once(self) -> None:
        """Do once and soon what the first handoff would have to do under pressure."""
        if not self.warmed:
            self.warmed = True
            later = threading.Timer(_WARM_UP_AFTER_S, self._warm_up)
            later.daemon = True
            later.start()

    def _warm_up(self) -> None:
        """Load the transport, and find out whether this job's optimizer steps can be replayed."""
        try:
            warm_up(self.spec.private_address)
        except TransportError as error:
            log(f"one-sided reads are not possible here, handoffs of this job will copy state in the pause: {error}")
        active = self.loop.active if self.loop is not None else None
        if active is None:
            return
        try:
            check_replay(active.live)
        except (UnsupportedState, HeaderError) as error:
            log(f"handoffs of this job will copy state in the pause: {error}")

    def step(self, generation: int, progress: TrainingProgress, totals: StepTotals, seconds: float) -> None:
        self.step_now = progress.step
        self.last_step.write(generation, progress.step)
        at = datetime.now(UTC).isoformat()
        log(f"step {progress.step} generation {generation} loss {totals.loss:.6f} {seconds:.3f} s at {at}")
        self.control.say(
            rank.StepReport(
                generation=generation,
                step=progress.step,
                seconds=seconds,
                loss=totals.loss if math.isfinite(totals.loss) else None,
                consumed_samples=progress.cursor.consumed,
                sample_digest=f"{progress.digest:016x}",
                tokens=totals.tokens,
            )
        )

    def metrics(self, generation: int, step: int, values: Mapping[str, float | None]) -> None:
        self.control.say(rank.MetricsReport(generation=generation, step=step, values=dict(values)))

    def checkpointed(self, path: str, step: int, seconds: float, asked: int) -> None:
        size = None
        with contextlib.suppress(OSError):  # A shared folder may show it here only later.
            size = sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        when = {"generation": self.generation, "finished_utc": utc_now()}
        said = rank.Checkpointed(path=path, step=step, seconds=seconds, size_bytes=size, asked=asked, **when)
        self.control.say(said)

    def checkpoint_failed(self, path: str, step: int, text: str, asked: int) -> None:
        log(f"checkpoint {path} failed: {text}")
        when = {"generation": self.generation, "failed_utc": utc_now()}
        self.control.say(rank.CheckpointFailed(path=path, step=step, reason=fitting(text), asked=asked, **when))

    def _whereabouts(self) -> Whereabouts:
        at, waits = main_thread_at()
        running = self.loop.after_step.hook if self.loop is not None else None
        hook, since = running or ("", time.monotonic())
        return Whereabouts(hook=hook, hook_s=time.monotonic() - since, at=fitting(at, NAME_CHARS_MAX), waits=waits)

    def _decision(self, request: Order) -> Decision:
        """What the decision record of this handoff said, UNDECIDED until this rank has read it."""
        handoff_id, decision = ("", Decision.UNDECIDED) if self.loop is None else self.loop.decided
        return decision if handoff_id == request.handoff_id else Decision.UNDECIDED

    def _hello(self) -> rank.Hello:
        identity = own_identity()
        handoff_id = None if self.loop is None else self.loop.handoff_id
        idle = self.loop is not None and self.loop.active is not None and handoff_id is None
        return rank.Hello(
            job_id=self.spec.order.job_id,
            generation=self.generation,
            rank=self.rank,
            pid=identity.pid,
            start_time=identity.start_time,
            stage=RankStage.TRAINING if idle else self.stage_now,
            step=self.step_now,
            handoff_id=None if handoff_id is None else uuid.UUID(handoff_id),
        )
