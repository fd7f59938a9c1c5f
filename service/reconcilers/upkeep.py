"""Keeps what is stored from growing without end: sums up the ledger, and deletes what `retention` names.

Each part is a short transaction of its own, and only one replica at a time does one.
"""

import logging
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

from service.context import Context
from service.ledger import sums
from service.ledger.egress import roll_egress
from service.reconcilers.retention import TASKS, Task
from service.settings import ServiceSettings

LOCK_KEY = 0x11FE_0002
PARTS_MAX = 20
"""Of each kind in one look; the next one follows soon where there is more."""
_log = logging.getLogger(__name__)


class Upkeep:
    """`is_behind`: the last look has left something to do."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.is_behind = False

    def tick(self) -> int:
        """Do what there is to do now, within limits. Returns how many rows were deleted."""
        self.is_behind = False
        summed = self._parts(Task("intervals", _sum_up))
        gone = {task.name: self._parts(task) for task in TASKS}
        done = [f"{rows} {name}" for name, rows in gone.items() if rows]
        if done:
            _log.info("deleted %s", ", ".join(done))
        if summed:
            _log.debug("summed up %d intervals", summed)
        return sum(gone.values())

    def _parts(self, task: Task) -> int:
        total = 0
        for _ in range(PARTS_MAX):
            rows = self._part(task)
            total += rows
            if not rows:
                return total
        self.is_behind = True
        return total

    def _part(self, task: Task) -> int:
        with self._context.sessions.begin() as session:
            if not session.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": LOCK_KEY}).scalar_one():
                return 0
            return task.work(session, self._context.settings, self._context.clock())


def _sum_up(session: Session, _settings: ServiceSettings, now: datetime) -> int:
    before = now - sums.ROLL_AFTER
    return sums.roll(session, before=before) + sums.merge(session) + roll_egress(session, before=before)


def tick(context: Context) -> int:
    """One look."""
    return Upkeep(context).tick()
