"""What the supervisor knows of one slot's process and of one store child, and its form in the journal. Pure."""

from dataclasses import dataclass, field
from uuid import UUID

from agent.protocol.process_end import STOPPED, ProcessEnd
from agent.protocol.rank_status import RankStatus, Whereabouts
from agent.protocol.values import Message
from agent.supervisor.process import ProcessIdentity
from agent.supervisor.watchdog import ASKED_EVERY_S, RankPulse
from liver_core.handoff import RankStage, Reason, StoreAddress
from liver_core.layout import Roster
from liver_core.layout.limits import STRICT, FilePath, Generation, Rank, ShortText

WHERE_COUNTS_S = 3 * ASKED_EVERY_S
"""An answer of a rank that does not answer any more says nothing after so long."""


@dataclass(frozen=True, slots=True, order=True)
class SlotKey:
    """A slot of this node runs at most one process of a job; the process keeps the slot from world to world."""

    job_id: str
    slot: int

    def __str__(self) -> str:
        return f"{self.job_id}/{self.slot}"

    @classmethod
    def parse(cls, text: str) -> "SlotKey":
        """The inverse of `str`."""
        job_id, _, slot = text.rpartition("/")
        return cls(job_id, int(slot))


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The journal's record of a rank process: enough for the next agent to find exactly this process. `process` is
    UNKNOWN while it is being forked: then it is the one that listens at `socket_path`, if any does."""

    __pydantic_config__ = STRICT

    process: ProcessIdentity
    socket_path: FilePath
    log_path: FilePath
    generation: Generation
    rank: Rank
    origin: ShortText


@dataclass(slots=True)
class RankState:
    """The last known state of a rank process. `generation` and `rank` are those of the world it trains in. `heard`: the
    latest fact of each kind, which is told again and again. `where`: what it said at `where_at` of where it is."""

    record: RankRecord
    pulse: RankPulse
    generation: int
    rank: int
    stage: RankStage = RankStage.STARTING
    hello_received: bool = False
    loss: float | None = None
    handoff_id: str = ""
    reason: Reason | None = None
    ended: ProcessEnd | None = None
    hang: Reason | None = None
    where: Whereabouts | None = None
    where_at: float = 0.0
    heard: dict[type[Message], Message] = field(default_factory=dict)

    def look(self, now: float, *, stopped: bool) -> bool:
        """Note whether its process is stopped, and whether it hangs. Whether that is news."""
        self.pulse.look(now, stopped=stopped)
        stop, before = self.pulse.stop_reason(now), self.hang
        where = self.whereabouts(now)
        text = stop or ("" if where is not None and where.hook else self.pulse.hang_reason(now))
        if text and not stop and where is not None and where.at:
            text = f"{text}; it is in {where.at}"
        self.hang = Reason(text, STOPPED if stop else "training", self.rank) if text else None
        return before is None and self.hang is not None

    def whereabouts(self, now: float) -> Whereabouts | None:
        """Where it is, by its last answer; None once it makes steps again, and where it has not answered lately."""
        is_old = now - self.where_at > WHERE_COUNTS_S or self.pulse.beat_at >= self.where_at
        return None if is_old or self.pulse.is_stopped else self.where

    def status(self, job_id: str, slot: int, *, world: Roster | None, now: float) -> RankStatus:
        """As it is reported. `world`: in which it trains, whatever it prepares."""
        # One that dropped what it prepared trains on in its own world.
        is_back = self.stage is RankStage.ABORTED and world is not None
        return RankStatus(
            job_id=job_id,
            generation=self.generation,
            rank=self.rank,
            slot=slot,
            pid=self.record.process.pid,
            stage=RankStage.TRAINING if is_back else self.stage,
            step=self.pulse.step,
            loss=self.loss,
            seconds=self.pulse.seconds[-1] if self.pulse.seconds else None,
            layout=str(world.layout) if world is not None and world.generation == self.generation else "",
            handoff_id=UUID(self.handoff_id) if self.handoff_id else None,
            reason=self.shown_reason,
            ended=self.ended,
            whereabouts=self.whereabouts(now),
        )

    def note_last_step(self, made: tuple[int, int] | None) -> None:
        """Generation and number of the last step that it has made by its own account, said or not."""
        if made is not None:
            self.generation, self.pulse.step = max(self.generation, made[0]), max(self.pulse.step, made[1])

    @property
    def shown_reason(self) -> Reason | None:
        """Why it hangs, as its agent sees it, or else what it has reported last; this where that is its end."""
        return self.reason if self.hang is None or self.stage is RankStage.FAILED else self.hang


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The journal's record of a store child."""

    __pydantic_config__ = STRICT

    process: ProcessIdentity
    socket_path: FilePath
    address: StoreAddress


@dataclass(frozen=True, slots=True, order=True)
class StoreKey:
    """One store per generation; it is never started a second time."""

    job_id: str
    generation: int

    def __str__(self) -> str:
        return f"{self.job_id}/{self.generation}"

    @classmethod
    def parse(cls, text: str) -> "StoreKey":
        """The inverse of `str`."""
        job_id, _, generation = text.rpartition("/")
        return cls(job_id, int(generation))
