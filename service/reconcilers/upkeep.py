"""Keeps what is stored from growing without end: sums up the ledger, and deletes what `retention` names.

Each part is a short transaction of its own, and only one replica at a time does one. A task that fails holds up no
other; where its part takes the database too long, the next one is half as large.
"""

import logging

from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from service.context import Context
from service.db.outage import first_line, is_outage
from service.reconcilers.retention import SUMS, TASKS, Task

LOCK_KEY = 0x11FE_0002
PARTS_MAX = 20
"""Of each kind in one look; the next one follows soon where there is more."""
_log = logging.getLogger(__name__)


class Upkeep:
    """`is_behind`: the last look has left something to do. `doubt`: what could not be done; empty while all can."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._most: dict[str, int] = {}
        self._failed: dict[str, str] = {}
        self.is_behind = False
        self.doubt = ""

    def tick(self) -> int:
        """Do what there is to do now, within limits. Returns how many rows were deleted. Raises what says that the
        database is away."""
        self.is_behind = False
        summed = {task.name: self._parts(task) for task in SUMS}
        gone = {task.name: self._parts(task) for task in TASKS}
        self.doubt = "; ".join(f"the upkeep of {name} fails: {why}" for name, why in self._failed.items())
        for level, what, done in ((logging.INFO, "deleted", gone), (logging.DEBUG, "summed up", summed)):
            named = [f"{rows} {name}" for name, rows in done.items() if rows]
            if named:
                _log.log(level, "%s %s", what, ", ".join(named))
        return sum(gone.values())

    def _parts(self, task: Task) -> int:
        """Of one task, until nothing is left or there were enough. Returns how many rows they took."""
        total, most = 0, self._most.get(task.name, task.most)
        try:
            for _ in range(PARTS_MAX):
                rows = self._part(task, most)
                total += rows
                if not rows:
                    break
            else:
                self.is_behind = True
        except Exception as error:
            if is_outage(error):
                raise
            self._failed[task.name] = first_line(error)
            if isinstance(error, OperationalError) and most > 1:
                self._most[task.name], self.is_behind = most // 2, True
                _log.warning(
                    "the upkeep of %s did not get through, next with half as much: %s", task.name, first_line(error)
                )
            else:
                _log.exception("the upkeep of %s failed", task.name)
        else:
            self._failed.pop(task.name, None)
            self._most[task.name] = min(task.most, 2 * most)
        return total

    def _part(self, task: Task, most: int) -> int:
        with self._context.sessions.begin() as session:
            if not session.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": LOCK_KEY}).scalar_one():
                return 0
            return task.work(session, self._context.settings, self._context.clock(), most)


def tick(context: Context) -> int:
    """One look."""
    return Upkeep(context).tick()
