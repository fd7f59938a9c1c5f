"""Carries out what a participant wants of its rank process: fork it, tell it, wait for the old one to go first.

A command that could not be delivered is kept as the slot's wish and said again at the next hello. Each says a whole
wanted state, so only the last one counts.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from agent.journal import JournalError
from agent.protocol.rank import PeerDied, StatusQuery, StepLease, WriteCheckpoint
from agent.protocol.secret_values import SecretError
from agent.protocol.values import Message
from agent.protocol.worker import RankSpec
from agent.supervisor.records import RankState, SlotKey
from agent.supervisor.supervisor import Supervisor
from agent.supervisor.zygote_client import ZygoteError
from liver_core.gpu_environment import GpuRefused
from liver_core.handoff import Reason

STOP_GRACE_S = 20.0
STOPPED_LEAVER_S = 15.0
"""A rank that is stopped for so long on a node that goes is given up."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start in a slot. `origin` names the birth of its first world."""

    spec: RankSpec
    origin: str


@dataclass(slots=True)
class Slot:
    """What is wanted of one slot.

    `occupied`: a process runs, or its end or its failed start has not been dealt with yet. `condemned`: it was told to
    end. `next`: what to start once it has. `launching`: its result is whether there is a process now.
    """

    occupied: bool = False
    wish: Message | None = None
    delivered: bool = False
    condemned: bool = False
    next: Launch | None = None
    launching: asyncio.Task[bool] | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class RankHost:
    """The rank processes of one job on this node. `on_failed` hears of a launch that came to nothing; to be answered
    with `ended`, as the exit of a process is."""

    def __init__(
        self, job_id: str, supervisor: Supervisor, on_failed: Callable[[int, Reason], Awaitable[None]]
    ) -> None:
        self._job_id = job_id
        self._supervisor = supervisor
        self._on_failed = on_failed
        self._slots: dict[int, Slot] = {}

    def restore(self) -> None:
        """Processes that the supervisor found again."""
        for number in self.states():
            self._slot(number).occupied = True

    def state(self, slot: int) -> RankState | None:
        """The process of a slot, None when it has none."""
        return self._supervisor.states.get(SlotKey(self._job_id, slot))

    def states(self) -> dict[int, RankState]:
        """All processes of the job on this node."""
        return {key.slot: state for key, state in self._supervisor.states.items() if key.job_id == self._job_id}

    def is_busy(self, slot: int) -> bool:
        """Whether a process runs in the slot or is about to."""
        return slot in self.busy()

    def busy(self) -> tuple[int, ...]:
        """The slots in which a process runs or is about to."""
        return tuple(
            number for number, slot in self._slots.items() if slot.occupied or (slot.launching or slot.next) is not None
        )

    def lasting(self) -> tuple[int, ...]:
        """The busy slots that stay so: their process was not told to end, or another one follows it."""
        return tuple(number for number in self.busy() if not self._slot(number).condemned or self._slot(number).next)

    def launch(self, launch: Launch) -> None:
        """Start a process, after the one that is in the slot has ended."""
        slot = self._slot(launch.spec.slot)
        if slot.occupied or slot.launching is not None:
            slot.next = launch
            return
        slot.launching = asyncio.create_task(self._start(slot, launch))

    def awaits(self, number: int, generation: int) -> bool:
        """Whether the rank of this world is to start in the slot once the process that is there has ended."""
        launch = self._slot(number).next
        return launch is not None and launch.spec.order.generation == generation

    async def tell(self, number: int, command: Message) -> None:
        """Say it now or at the next hello."""
        slot = self._slot(number)
        slot.wish, slot.delivered = command, False
        await self.deliver(number)

    async def deliver(self, number: int, *, again: bool = False) -> None:
        """Say the slot's wish if it has not been said; `again` for a rank that connected anew."""
        slot = self._slot(number)
        if slot.wish is None or (slot.delivered and not again) or slot.next is not None:
            return
        slot.delivered = await self._supervisor.send(SlotKey(self._job_id, number), slot.wish)

    def settle(self, number: int) -> None:
        """The rank is past what it was told; saying it again at a later hello would be about a handoff that is over."""
        slot = self._slot(number)
        if slot.next is None:
            slot.wish = None

    async def query(self, number: int) -> bool:
        """Ask the rank where it stands; False when there is no process."""
        key = SlotKey(self._job_id, number)
        if key not in self._supervisor.states:
            return False
        await self._supervisor.send(key, StatusQuery())
        return True

    async def give(self, number: int, lease: StepLease) -> None:
        """Send a step lease. It is no wish: the next one replaces it, and a late one must not be sent again."""
        await self._supervisor.send(SlotKey(self._job_id, number), lease)

    async def say_all(self, message: PeerDied) -> None:
        """Send to every rank what is no wish."""
        await asyncio.gather(*(self._supervisor.send(SlotKey(self._job_id, slot), message) for slot in self.states()))

    async def ask_checkpoint(self, request: WriteCheckpoint) -> None:
        """Pass the request on to every rank. It is no wish: the ranks keep what they were told of a handoff."""
        for number in self.states():
            await self._supervisor.send(SlotKey(self._job_id, number), request)

    def kill_stopped(self) -> None:
        """Kill the ranks whose processes have been stopped for long. Their node goes, so they would not come back, and
        all others wait for them: killed, they count as dead in time."""
        now = time.monotonic()
        for number, state in self.states().items():
            stopped_s = state.pulse.stopped_s(now)
            if state.pulse.is_stopped and stopped_s >= STOPPED_LEAVER_S:
                text = f"its process was stopped for {stopped_s:.0f} s on a node that goes, and was killed"
                self._supervisor.kill(SlotKey(self._job_id, number), text)

    def end(self, number: int, reason: str, grace_s: float) -> None:
        """Have the process of a slot end, in the background."""
        slot = self._slot(number)
        slot.wish, slot.next = None, None
        if not slot.occupied and slot.launching is None:
            return
        slot.condemned = True
        task = asyncio.create_task(self._end(slot, number, reason, grace_s))
        slot.tasks.add(task)
        task.add_done_callback(slot.tasks.discard)

    def ended(self, number: int) -> bool:
        """A process ended, or could not be started. Whether that is news to the participant: not if a next one is
        waiting for its place."""
        slot = self._slot(number)
        slot.occupied = slot.condemned = slot.delivered = False
        launch, slot.next = slot.next, None
        if launch is None:
            slot.wish = None
            return True
        slot.launching = asyncio.create_task(self._start(slot, launch))
        return False

    def is_condemned(self, number: int) -> bool:
        """Whether the process of the slot was told to end."""
        return self._slot(number).condemned

    def condemn(self, number: int) -> None:
        """The process ends by itself, for it was told to abort and has no world."""
        self._slot(number).condemned = True

    async def close(self) -> None:
        """Let go; processes live on."""
        tasks: list[asyncio.Task[Any]] = [
            task for slot in self._slots.values() for task in (slot.launching, *slot.tasks) if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, slot: Slot, launch: Launch) -> bool:
        number, failed = launch.spec.slot, None
        try:
            await self._supervisor.launch(launch.spec, launch.origin)
        except (ZygoteError, OSError, SecretError, GpuRefused) as error:
            failed = Reason(f"the rank could not be started: {error}", "start", launch.spec.rank)
        except JournalError:
            raise  # The agent ends.
        except Exception as error:
            # Whatever it is, a slot that waits for it would be busy for ever.
            _log.exception("job %s slot %d: its rank could not be started", self._job_id, number)
            text = f"the rank could not be started: {type(error).__name__}: {error}"
            failed = Reason(text, "start", launch.spec.rank)
        slot.launching, slot.occupied = None, True
        if failed is not None:
            _log.warning("job %s slot %d: %s", self._job_id, number, failed.text)
            await self._on_failed(number, failed)
        return failed is None

    async def _end(self, slot: Slot, number: int, reason: str, grace_s: float) -> None:
        if slot.launching is not None and not await asyncio.shield(slot.launching):
            return  # What runs in the slot now, if anything, is the next one.
        await self._supervisor.stop(SlotKey(self._job_id, number), reason, grace_s)

    def _slot(self, number: int) -> Slot:
        return self._slots.setdefault(number, Slot())
