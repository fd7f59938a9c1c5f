"""Passes on to peers what waits for the service: while it is away, who knows of a handoff or a checkpoint may go.

The peers have it wait in their outboxes too, and pass it on in their turn. Handoffs and checkpoints, without which a
job starts again from an older state, are passed on as soon as they wait; rows of steps only by a node that will go.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from agent.journal import Journal, Table
from agent.link.outbox import Outbox
from agent.protocol.peer import ROWS_PASSED_MAX, FactsBody
from agent.protocol.relays import PATIENCE_S, PEERS, concerns, is_news
from agent.protocol.sync import HandoffMirror
from liver_core.steady_clock import Clock

AGAIN_S = 5.0
"""After a peer did not answer."""
_NEEDED, _ROWS = ("handoffs", "checkpoints"), ("steps", "metrics")
_log = logging.getLogger(__name__)


class Relay:
    """Of one job on this node. `send` takes facts to a peer and says whether they arrived; `keep` journals a mirror."""

    def __init__(
        self,
        node_id: str,
        job_id: str,
        outbox: Outbox,
        journal: Journal,
        *,
        send: Callable[[str, FactsBody], Awaitable[bool]],
        keep: Callable[[Journal, HandoffMirror], None],
        service_is_there: Callable[[], bool],
        now: Clock,
    ) -> None:
        self._node_id, self._job_id = node_id, job_id
        self._outbox, self._journal = outbox, journal
        self._send, self._keep = send, keep
        self._service_is_there, self._now = service_is_there, now
        self._since: dict[tuple[str, object], float] = {}
        self._told: dict[str, dict[tuple[str, object], Any]] = {}
        self._silent_until: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def tick(self, peers: Iterable[str], is_going: bool) -> None:
        """About twice a second. `peers`: who stays, the first to be told first. `is_going`: this node does not."""
        waiting = self._waiting((*_NEEDED, *_ROWS) if is_going else _NEEDED)
        now = self._now()
        self._since = {key: self._since.get(key, now) for key in waiting}
        self._told = {
            name: {key: fact for key, fact in told.items() if waiting.get(key) is fact}
            for name, told in self._told.items()
        }
        if not waiting or (self._task is not None and not self._task.done()):
            return
        patience_s = PATIENCE_S if self._service_is_there() else 0.0
        due = {key: fact for key, fact in waiting.items() if now - self._since[key] >= patience_s}
        names = [name for name in peers if name != self._node_id]
        if any(self._untold(name, due) for name in self._chosen(names)):
            self._task = asyncio.create_task(self._tell(names, due))

    async def take(self, facts: FactsBody) -> None:
        """A peer's facts, which wait here from now on too. The newer mirror of a handoff counts, and one's own."""
        for mirror in facts.handoffs:
            kept = self._journal.get(Table.HANDOFF, str(mirror.handoff_id))
            known = None if kept is None else (kept["generation"], kept["mirror_seq"])
            if mirror.proposer == self._node_id or not is_news((mirror.generation, mirror.mirror_seq), known):
                continue
            self._outbox.put_handoff(mirror)
            await asyncio.to_thread(self._keep, self._journal, mirror)
        for checkpoint in facts.checkpoints:
            if self._outbox.checkpoints.get((checkpoint.job_id, checkpoint.path)) is None:
                self._outbox.put_checkpoint(checkpoint)
        for row in facts.steps:
            if self._outbox.steps.get((row.job_id, row.generation, row.step)) is None:
                self._outbox.put_step(row)
        for numbers in facts.metrics:
            if self._outbox.metrics.get((numbers.job_id, numbers.generation, numbers.step)) is None:
                self._outbox.put_metrics(numbers)

    async def close(self) -> None:
        """Stop telling others."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def work_of(self, facts: FactsBody) -> Callable[[], Awaitable[None]]:
        """What takes them in the job's turn. Raises ValueError where a fact is about another job than the message."""
        for part in (*_NEEDED, *_ROWS):
            for fact in getattr(facts, part):
                if fact.job_id != self._job_id:
                    raise ValueError(f"{part}: must be about job {self._job_id}, one is about {fact.job_id}")
        return lambda: self.take(facts)

    def _waiting(self, parts: Iterable[str]) -> dict[tuple[str, object], Any]:
        found = ((part, key, fact) for part in parts for key, fact in getattr(self._outbox, part).waiting())
        return {(part, key): fact for part, key, fact in found if fact.job_id == self._job_id}

    def _chosen(self, names: list[str]) -> list[str]:
        now = self._now()
        return [name for name in names if self._silent_until.get(name, now) <= now][:PEERS]

    def _untold(self, name: str, due: dict[tuple[str, object], Any]) -> dict[tuple[str, object], Any]:
        told = self._told.get(name, {})
        return {key: fact for key, fact in due.items() if told.get(key) is not fact and _concerns(name, fact)}

    async def _tell(self, names: list[str], due: dict[tuple[str, object], Any]) -> None:
        tried: set[str] = set()
        while left := [name for name in self._chosen(names) if name not in tried]:
            name = left[0]
            tried.add(name)
            for body, keys in _messages(self._untold(name, due)):
                if not await self._send(name, body):
                    _log.warning("job %s: %s cannot be told what waits for the service", self._job_id, name)
                    self._silent_until[name] = self._now() + AGAIN_S
                    break
                self._told.setdefault(name, {}).update({key: due[key] for key in keys})


def _concerns(name: str, fact: Any) -> bool:
    return not isinstance(fact, HandoffMirror) or concerns(name, fact.source, fact.target)


def _messages(facts: dict[tuple[str, object], Any]) -> Iterator[tuple[FactsBody, list[tuple[str, object]]]]:
    """A mirror each, since rosters are long; then the rest by part."""
    for part, most in (("handoffs", 1), *((part, ROWS_PASSED_MAX) for part in ("checkpoints", *_ROWS))):
        keys = [key for key in facts if key[0] == part]
        for at in range(0, len(keys), most):
            chosen = keys[at : at + most]
            yield FactsBody.model_validate({part: tuple(facts[key] for key in chosen)}), chosen
