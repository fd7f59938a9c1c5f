"""What the supervisor knows of one slot's process and of one store child, and its form in the journal. Pure."""

from dataclasses import dataclass, field

from agent.protocol.process_end import STOPPED, ProcessEnd
from agent.protocol.values import Message
from agent.supervisor.process import ProcessIdentity
from agent.supervisor.watchdog import RankPulse
from liver_core.handoff import RankStage, Reason, StoreAddress
from liver_core.layout.limits import STRICT, FilePath, Generation, Rank, ShortText


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
    latest fact of each kind, which is told again and again."""

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
    heard: dict[type[Message], Message] = field(default_factory=dict)

    def look(self, now: float, *, stopped: bool) -> bool:
        """Note whether its process is stopped, and whether it hangs. Whether that is news."""
        self.pulse.look(now, stopped=stopped)
        stop, before = self.pulse.stop_reason(now), self.hang
        text = stop or self.pulse.hang_reason(now)
        self.hang = Reason(text, STOPPED if stop else "training", self.rank) if text else None
        return before is None and self.hang is not None

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
