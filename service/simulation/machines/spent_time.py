"""What the job did at every moment of a replay by the machines, and how far that brought it. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from service.policy.types import Candidate


class Doing(StrEnum):
    """Nothing: it has no ranks. Starting: for the first time, restarting: from a checkpoint. Standing: a rank of its
    world is gone."""

    NOTHING = "nothing"
    TRAINING = "training"
    PAUSED = "paused"
    STARTING = "starting"
    RESTARTING = "restarting"
    STANDING = "standing"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which the job did one thing. `redone_s`: so much of its begin went into steps made before."""

    begin_s: float
    end_s: float
    doing: Doing
    layout: Candidate | None
    generation: int
    nodes: tuple[str, ...]
    redone_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class SpentTime:
    """`tokens`: made and not lost again; `lost_tokens`: of steps that were dropped or are behind a checkpoint.
    `checkpoint_tokens`: how far the newest checkpoint is; None before the first. With no `checkpoint_every_s` none is
    written by itself."""

    def __init__(self, *, checkpoint_every_s: float | None) -> None:
        self.doing = Doing.NOTHING
        self.layout: Candidate | None = None
        self.tokens = self.lost_tokens = 0.0
        self.checkpoint_tokens: float | None = None
        self._every_s, self._since_checkpoint_s = checkpoint_every_s, 0.0
        self._begin_s = self._stepped_s = self._redo_tokens = 0.0
        self._what: tuple[Doing, Candidate | None, int, tuple[str, ...]] = (Doing.NOTHING, None, 0, ())
        self._done: list[Stretch] = []
        self._trained_until_s = 0.0

    def change(
        self,
        at_s: float,
        doing: Doing,
        layout: Candidate | None = None,
        *,
        generation: int = 0,
        nodes: tuple[str, ...] = (),
    ) -> None:
        """From now on it does this. Steps begin anew, at a boundary."""
        self._close(at_s)
        self._what, self.doing, self.layout = (doing, layout, generation, nodes), doing, layout
        self._stepped_s = 0.0

    def until(self, at_s: float) -> tuple[Stretch, ...]:
        """What it did since it was asked last."""
        self._close(at_s)
        done, self._done = tuple(self._done), []
        return done

    def stepped_s(self, at_s: float) -> float:
        """Training time in this world since its steps last began at a boundary."""
        return self._stepped_s + (at_s - self._begin_s if self.doing is Doing.TRAINING else 0.0)

    def trained_until_s(self, at_s: float) -> float:
        """When it trained last."""
        return at_s if self.doing is Doing.TRAINING else self._trained_until_s

    def tokens_at(self, at_s: float) -> float:
        rate = self.layout.tokens_per_s if self.layout is not None and self.doing is Doing.TRAINING else 0.0
        return self.tokens + rate * (at_s - self._begin_s)

    def drop(self, at_s: float, seconds: float) -> None:
        """So much training in the present layout counts for nothing."""
        self._close(at_s)
        if self.layout is not None:
            self._lose(min(self.tokens, seconds * self.layout.tokens_per_s))

    def save(self, at_s: float) -> None:
        """A checkpoint of what is done."""
        self._close(at_s)
        self.checkpoint_tokens, self._since_checkpoint_s = self.tokens, 0.0

    def back_to_checkpoint(self, at_s: float) -> None:
        """What came after the newest one is to be made again."""
        self._close(at_s)
        lost = max(0.0, self.tokens - (self.checkpoint_tokens or 0.0))
        self._lose(lost)
        self._redo_tokens, self._since_checkpoint_s = self._redo_tokens + lost, 0.0

    def _lose(self, tokens: float) -> None:
        self.tokens -= tokens
        self.lost_tokens += tokens

    def _close(self, at_s: float) -> None:
        doing, layout, generation, nodes = self._what
        seconds, redone_s = at_s - self._begin_s, 0.0
        if seconds <= 0:
            return
        if doing is Doing.TRAINING and layout is not None:
            rate = layout.tokens_per_s
            self.tokens += rate * seconds
            self._stepped_s, self._trained_until_s = self._stepped_s + seconds, at_s
            redone_s = min(seconds, self._redo_tokens / rate)
            self._redo_tokens = max(0.0, self._redo_tokens - rate * seconds)
            self._since_checkpoint_s += seconds
            if self._every_s is not None and self._since_checkpoint_s >= self._every_s:
                self._since_checkpoint_s %= self._every_s
                self.checkpoint_tokens = self.tokens - rate * self._since_checkpoint_s
        self._done.append(Stretch(self._begin_s, at_s, doing, layout, generation, nodes, redone_s))
        self._begin_s = at_s
