"""Runs the reconcilers, one thread each, until `stop`. A tick that fails is logged and retried."""

import logging
import threading
import time
from collections.abc import Callable

from service.context import Context
from service.db.outage import is_outage
from service.reconcilers import jobs, keys, planned_work
from service.reconcilers.nodes import NodeWatch
from service.reconcilers.upkeep import Upkeep

UPKEEP_S = 60.0
BEHIND_S = 1.0
KEYS_S, PLANNED_S = 10.0, 10.0
AFTER_ERROR_S = 1.0
STUCK_S = 120.0
"""A turn of these loops takes seconds, and a statement of the database is ended long before."""
WATCHED = ("jobs", "nodes")
_log = logging.getLogger(__name__)


class Reconcilers:
    """The background half of the service."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._turned_at: dict[str, float] = {}
        self._watch = NodeWatch(context)
        self._upkeep = Upkeep(context)

    def start(self) -> None:
        """Start every loop."""
        context, period_s = self._context, self._context.settings.reconcile_s
        loops: tuple[tuple[str, Callable[[], int], Callable[[], object]], ...] = (
            ("jobs", lambda: jobs.tick(context), lambda: context.hub.wait_for_reconcilers(period_s)),
            ("nodes", self._watch.tick, lambda: self._stop.wait(period_s)),
            ("keys", lambda: keys.tick(context), lambda: self._stop.wait(KEYS_S)),
            ("planned", lambda: planned_work.tick(context), lambda: self._stop.wait(PLANNED_S)),
            ("upkeep", self._upkeep.tick, lambda: self._stop.wait(BEHIND_S if self._upkeep.is_behind else UPKEEP_S)),
        )
        for name, tick, wait in loops:
            thread = threading.Thread(target=self._run, args=(name, tick, wait), name=f"reconcile-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop each loop after its current tick."""
        self._stop.set()
        self._context.hub.wake_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def alive(self) -> bool:
        """Whether every loop still runs."""
        return all(thread.is_alive() for thread in self._threads)

    def stuck(self) -> str:
        """Which loop has ended or hangs in one turn; empty while all that nobody can wait for turn."""
        if not self.alive():
            return "a reconciler has ended"
        now = time.monotonic()
        late = [name for name in WATCHED if now - self._turned_at.get(name, now) > STUCK_S]
        return f"reconciler {late[0]} hangs" if late else ""

    def doubts(self) -> list[str]:
        """Why some nodes that are not heard do not count as lost, and what of the upkeep fails."""
        return [self._watch.doubt, self._upkeep.doubt]

    def _run(self, name: str, tick: Callable[[], int], wait: Callable[[], object]) -> None:
        while not self._stop.is_set():
            self._turned_at[name] = time.monotonic()
            try:
                tick()
                self._context.database.outage.ends()
            except Exception as error:
                if is_outage(error):
                    self._context.database.outage.begins(error)
                else:
                    _log.exception("reconciler %s failed, retry in %.0f s", name, AFTER_ERROR_S)
                self._stop.wait(AFTER_ERROR_S)
            wait()
