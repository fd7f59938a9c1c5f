"""A rank process without torch: forked by the real zygote, speaks the real rank protocol, trains nothing.

What real ranks agree on by an all-reduce and the decision record, these agree on in a locked file of a shared directory
(`args["shared"]` of the job file). `args["faults"]` maps a node id to how its rank misbehaves.
"""

import fcntl
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from agent.protocol.rank import (
    Abort,
    Checkpointed,
    Failed,
    Finished,
    Hello,
    PeerDied,
    Permit,
    Prepare,
    RankCommand,
    Retire,
    StageReport,
    StatusQuery,
    StepReport,
    Stop,
    WhereaboutsReport,
    WhereQuery,
    Withdraw,
    WriteCheckpoint,
    decode_command,
    encode_line,
)
from agent.protocol.rank_status import Whereabouts
from agent.protocol.values import Message
from agent.protocol.worker import RankSpec
from agent.supervisor.child_entry import LastStep
from agent.supervisor.process import own_identity
from liver_core.handoff import Decision, Order, RankStage, Reason

STEP_S = 0.05
SLOW_S = 3.0
IN_DATA = Whereabouts(at="samples (fake_job.py:1)")


def run(spec: dict[str, Any], control: socket.socket, last_step: LastStep) -> int:
    """The zygote's entry."""
    return FakeRank(RankSpec.model_validate(spec, strict=False), control, last_step).loop()


def crash(spec: dict[str, Any], control: socket.socket, last_step: LastStep) -> int:
    """An entry that prints and raises."""
    print(f"about to crash on {spec['node_id']}")
    raise RuntimeError("a bug in the user's code")


def end_with_seven(spec: dict[str, Any], control: socket.socket, last_step: LastStep) -> int:
    """As `run`, but a SIGTERM makes it exit with code 7."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    return run(spec, control, last_step)


def write_checkpoint(path: Path, step: int) -> None:
    """All that a fake checkpoint holds is its step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(step))


class FakeRank:
    def __init__(self, spec: RankSpec, control: socket.socket, last_step: LastStep) -> None:
        self.spec = spec
        self.last_step = last_step
        self.fault = spec.spec.args.get("faults", {}).get(spec.node_id, "")
        self.world = spec.order.target
        self.generation = spec.order.generation
        self.step = int(Path(spec.order.checkpoint).read_text()) if spec.order.checkpoint else 0
        self.waiting = spec.order.source is not None
        self.stage = RankStage.STARTING if self.waiting else RankStage.TRAINING
        self.order: Order | None = None
        self.permitted = False
        self.prepared_at = 0.0
        self.saved = 0
        self.listener = control
        self.clients: list[socket.socket] = []
        self.buffer = b""
        self.unsaid: list[Message] = []
        self.shared = Path(spec.spec.args["shared"])

    def loop(self) -> int:
        while True:
            ready, _, _ = select.select([self.listener, *self.clients], [], [], STEP_S)
            for source in ready:
                if source is self.listener:
                    client, _ = self.listener.accept()
                    self.clients.append(client)
                    unsaid, self.unsaid = self.unsaid, []
                    for message in (self.hello(), *unsaid):
                        self.say(message)
                elif source in self.clients and (code := self.read(source)) is not None:
                    return code
            code = self.advance()
            if code is not None:
                return code

    @property
    def member(self) -> tuple[str, int]:
        return (self.spec.node_id, self.spec.slot)

    def rank_in(self, roster: Any) -> int | None:
        members = [(member.node_id, member.slot) for member in roster.members]
        return members.index(self.member) if self.member in members else None

    def hello(self) -> Hello:
        own = own_identity()
        return Hello(
            job_id=self.spec.order.job_id,
            generation=self.generation,
            rank=self.rank_in(self.world) or 0,
            pid=own.pid,
            start_time=own.start_time,
            stage=self.stage,
            step=self.step,
            handoff_id=UUID(self.order.handoff_id) if self.order else None,
        )

    def read(self, client: socket.socket) -> int | None:
        try:
            data = client.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.clients.remove(client)
            client.close()
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            code = self.take(decode_command(line))
            if code is not None:
                return code
        return None

    def take(self, command: RankCommand) -> int | None:
        match command:
            case Prepare(order=order):
                same = self.order is not None and self.order.handoff_id == order.handoff_id
                if not (same and self.order and self.order.plan_revision == order.plan_revision):
                    self.order, self.permitted = order, False
                    self.turn(RankStage.PREPARING)
                if self.fault == "never_prepared":
                    return None
                if self.fault == "slow_prepare" and self.stage is RankStage.PREPARING:
                    self.prepared_at = time.monotonic() + SLOW_S
                    return None
                if self.fault == "cannot_prepare":
                    self.turn(RankStage.ABORTED, Reason(text="planted: no memory", rank=0, phase="prepare"))
                    return None
                if self.fault == "dies_preparing":
                    os._exit(17)
                self.turn(RankStage.READY if self.permitted else RankStage.PREPARED)
            case Permit() if self.order is not None and self.stage in (RankStage.PREPARED, RankStage.READY):
                self.permitted = True
                # A step that is long: the boundary of the first plan does not come while anybody waits for it.
                steps_long = self.fault == "long_step" and self.order.plan_revision == 1
                if self.rank_in(self.order.source) is not None and not steps_long:
                    self.vote(True)
                self.turn(RankStage.READY)
            case Withdraw() if self.permitted and self.stage is RankStage.READY and self.vote(False):
                self.permitted = False
                self.turn(RankStage.PREPARED)
            case Abort() if self.order is not None and self.order.handoff_id == str(command.handoff_id):
                if self.stage not in (RankStage.ACTIVE, RankStage.LEFT) and self.vote(False):
                    self.permitted = False
                    self.turn(RankStage.ABORTED, command.reason)
                    self.order = None
                    self.stage = RankStage.TRAINING
                    if self.waiting:
                        return 0
            case Stop():
                print(f"stopped: {command.reason}")
                self.save()
                return 0
            case WhereQuery():
                self.say(WhereaboutsReport(where=IN_DATA))
            case StatusQuery():
                self.say(self.hello())
                if self.order is not None:
                    self.turn(self.stage)
            case PeerDied():
                print(f"rank {command.reason.rank} on {command.member.node_id}: {command.reason.text}", flush=True)
            case WriteCheckpoint() if command.number > self.saved:
                self.saved = command.number
                self.save(command.number)
            case Retire():
                self.order = None
                self.stage = RankStage.TRAINING
            case _:
                pass
        return None

    def advance(self) -> int | None:
        """One step, and the boundary after it."""
        if self.stage is RankStage.PREPARING and 0 < self.prepared_at <= time.monotonic():
            self.prepared_at = 0.0
            self.turn(RankStage.PREPARED)
        if self.order is not None and self.stage is RankStage.READY and self.decided():
            self.cut_over(self.order)
        if self.waiting or self.stage is RankStage.LEFT:
            return None
        if self.fault == "dies_training" and self.step >= 20:
            self.say(Failed(reason=Reason("planted: device lost", "training", self.rank_in(self.world))))
            return 9
        if self.fault == "fails" and self.step >= 20:
            self.say(Finished(step=self.step, failed=Reason("planted: the loss is nan", "training", 1)))
            return 5
        self.step += 1
        self.last_step.write(self.generation, self.step)
        rank = self.rank_in(self.world)
        self.say(
            StepReport(
                generation=self.generation,
                step=self.step,
                seconds=STEP_S,
                loss=1.0 / self.step if rank == 0 else None,
                consumed_samples=self.step * self.spec.spec.global_batch,
            )
        )
        if self.step >= self.spec.spec.stop.steps:
            self.say(Finished(step=self.step))
            return 0
        return None

    def cut_over(self, order: Order) -> None:
        self.turn(RankStage.CUTTING_OVER)
        if self.fault == "slow_cutover":
            time.sleep(1.0)
        rank = self.rank_in(order.target)
        if rank is None:
            self.turn(RankStage.LEFT)
            return
        self.world, self.generation, self.waiting = order.target, order.generation, False
        self.turn(RankStage.ACTIVE)

    def turn(self, stage: RankStage, reason: Reason | None = None) -> None:
        self.stage = stage
        assert self.order is not None
        moved = {"prepare_s": 0.1, "bytes_moved": 1000.0, "pause_s": 0.05} if stage is RankStage.ACTIVE else {}
        self.say(
            StageReport(
                handoff_id=UUID(self.order.handoff_id),
                generation=self.order.generation,
                rank=next(
                    rank for rank in (self.rank_in(self.order.target), self.rank_in(self.world), 0) if rank is not None
                ),
                stage=stage,
                reason=reason,
                plan_revision=self.order.plan_revision,
                decision=Decision.GO if stage in (RankStage.ACTIVE, RankStage.LEFT) else Decision.UNDECIDED,
                measures=moved,
            )
        )

    def save(self, asked: int = 0) -> None:
        rule = self.spec.spec.checkpoint
        if rule is not None and not self.waiting and self.rank_in(self.world) == 0:
            path = f"{rule.path}/step-{self.step:09d}"
            write_checkpoint(Path(path), self.step)
            self.say(Checkpointed(path=path, step=self.step, asked=asked))

    def vote(self, ready: bool) -> bool:
        """Set or take back this rank's ready tag; False when all had it set before, which is the boundary."""
        order = self.order
        assert order is not None
        with self.locked(order) as votes:
            if votes.get("decided"):
                return False
            if ready:
                votes["/".join(map(str, self.member))] = True
            else:
                votes.pop("/".join(map(str, self.member)), None)
            sources = () if order.source is None else order.source.members
            votes["decided"] = all(str(member) in votes for member in sources)
            if not ready:
                votes["decided"] = False
            return True

    def decided(self) -> bool:
        assert self.order is not None
        with self.locked(self.order) as votes:
            return bool(votes.get("decided"))

    def locked(self, order: Order) -> "Votes":
        return Votes(self.shared / f"votes-{order.handoff_id}-{order.plan_revision}.json")

    def say(self, message: Message) -> None:
        if not self.clients:
            self.unsaid = [*self.unsaid[-1_000:], message]
        for client in tuple(self.clients):
            try:
                client.sendall(encode_line(message))
            except OSError:
                self.clients.remove(client)


class Votes:
    """A JSON object in a file, changed under a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> dict[str, Any]:
        self.file = self.path.open("a+")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.file.seek(0)
        text = self.file.read()
        self.votes: dict[str, Any] = json.loads(text) if text else {}
        return self.votes

    def __exit__(self, *_: object) -> None:
        self.file.seek(0)
        self.file.truncate()
        self.file.write(json.dumps(self.votes))
        self.file.close()
