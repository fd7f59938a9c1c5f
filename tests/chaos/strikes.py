"""Kills and stops: each strike of a trial in a thread of its own, at its moment, with what really happened."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.supervisor.process import ProcessIdentity, send_signal
from deploy.local.processes import DemoFailed
from tests.chaos.machines import Machines
from tests.chaos.plan import Action, Strike, Victim
from tests.chaos.trail_reader import HELD, TrailReader, hold_file
from tests.chaos.victims import Found, Roles, find

APPEARS_S = 12.0
"""How long a strike waits for its victim to exist."""
HELD_S = 90.0
"""How long one waits for its victim to come to a probe of the loop."""
LOOK_S = 0.1
LATE_S = 0.2
CLOCK_S = 300
CLOCK_BACK_BELOW_S = 20.0
"""Half of all strikes last less long: their clocks are put back, the others forward."""


@dataclass(slots=True)
class Struck:
    """One strike as it happened. Times by the machine's monotonic clock; `at` is None while the victim did not exist,
    or has not come to the `point` where it was to be struck.
    `until`: the end of a stop, or when the product's process manager had started the killed process again."""

    what: str
    node: str = ""
    rank: int | None = None
    pid: int = 0
    signal: str = ""
    after_s: float = 0.0
    at: float | None = None
    at_utc: float | None = None
    until: float | None = None
    harmless: bool = False
    point: str = ""
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the facts of the trial."""
        return asdict(self)


@dataclass(slots=True)
class Strikes:
    """All strikes of a trial. `begin` at the trigger; `over` is true when each has happened and ended."""

    machines: Machines
    roles: Roles
    planned: tuple[Strike, ...]
    struck: list[Struck] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """From now on their times count."""
        began = time.monotonic()
        for strike in self.planned:
            struck = Struck(strike.victim, signal=strike.how, harmless=strike.is_harmless, point=strike.point)
            self.struck.append(struck)
            thread = threading.Thread(target=self._run, args=(strike, struck, began), daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def over(self) -> bool:
        """Whether nothing is stopped any more, and what was killed and comes back is back."""
        return not any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """Cut short what still lasts."""
        self._ending.set()
        for thread in self._threads:
            thread.join(30.0)

    def _run(self, strike: Strike, struck: Struck, began: float) -> None:
        held = self._await_held(strike) if strike.point else None
        self._ending.wait(strike.after_s)
        found = None if strike.point and held is None else self._await_victim(strike)
        if found is None:
            return
        struck.node, struck.rank, struck.pid = found.node, found.rank, found.processes[0].pid
        struck.at, struck.at_utc = time.monotonic(), time.time()
        struck.after_s = round(struck.at - began, 2)
        try:
            self._do(strike, found, held)
        except (DemoFailed, OSError) as error:
            struck.problem = str(error)
        finally:
            self._let_go(held)
        struck.until = time.monotonic()

    def _await_victim(self, strike: Strike) -> Found | None:
        deadline = time.monotonic() + APPEARS_S
        while time.monotonic() < deadline and not self._ending.is_set():
            if found := find(strike.victim, self.machines, self.roles, strike.pick):
                return found
            self._ending.wait(LOOK_S)
        return None

    def _await_held(self, strike: Strike) -> Found | None:
        """The leaver's rank that has stopped at the probe. None if it has not come there."""
        held = self._await_victim(replace(strike, victim=Victim.LEAVER))
        if held is None:
            return None
        folder, pid = self._trail, held.processes[0].pid
        self._hold(pid, strike.point)
        trail, deadline = TrailReader(folder), time.monotonic() + HELD_S
        while time.monotonic() < deadline and not self._ending.is_set():
            trail.look()
            if any(line["event"] == HELD and line["pid"] == pid for line in trail.lines):
                return held
            self._ending.wait(LOOK_S)
        self._let_go(held)
        return None

    def _hold(self, pid: int, point: str) -> None:
        # Whoever finds the file finds the point in it.
        fresh = self._trail / f"holding-{pid}"
        fresh.write_text(point)
        fresh.rename(hold_file(self._trail, pid))

    def _let_go(self, held: Found | None) -> None:
        if held is not None:
            hold_file(self._trail, held.processes[0].pid).unlink(missing_ok=True)

    @property
    def _trail(self) -> Path:
        return self.machines.folder / "trail"

    def _do(self, strike: Strike, found: Found, held: Found | None) -> None:
        """Returns when all is as before. A rank that is `held` goes on as soon as the victim is struck."""
        match strike.action:
            case Action.KILL if strike.victim is Victim.MACHINE:
                self.machines.kill_node(found.node)
            case Action.KILL:
                # The database's first process ends the others.
                _send(found.processes[:1], signal.SIGKILL)
                self._let_go(held)
                self._come_back(strike, found)
            case Action.STOP:
                _send(found.processes, signal.SIGSTOP)
                self._ending.wait(strike.lasts_s)
                _send(found.processes, signal.SIGCONT)
            case Action.CUT:
                self.machines.cut(found.node)
                self._let_go(held)
                self._ending.wait(strike.lasts_s)
                self.machines.join(found.node)
            case Action.LATE:
                self.machines.delay(found.node, LATE_S)
                self._ending.wait(strike.lasts_s)
                self.machines.delay(found.node, 0.0)
            case Action.CLOCK:
                self.machines.shift_clock(found.node, CLOCK_S if strike.lasts_s > CLOCK_BACK_BELOW_S else -CLOCK_S)
                self._ending.wait(strike.lasts_s)
                self.machines.shift_clock(found.node, 0)
            case Action.FULL:
                self.machines.fill_disk(found.node)
                self._ending.wait(strike.lasts_s)
                self.machines.clear_disk(found.node)
                if strike.victim is not Victim.DATABASE and self.machines.agent_pid(found.node) is None:
                    self._come_back(strike, found)

    def _come_back(self, strike: Strike, found: Found) -> None:
        """What a process manager starts again."""
        match strike.victim:
            case Victim.SERVICE:
                self._ending.wait(strike.back_s)
                self.machines.restart_service()
            case Victim.AGENT | Victim.LEAD:
                self._ending.wait(strike.back_s)
                with self._starting:
                    # Two strikes on one agent end it once, and it is started once.
                    if self.machines.agent_pid(found.node) in (None, found.processes[0].pid):
                        self.machines.restart_agent(found.node)


def _send(processes: tuple[ProcessIdentity, ...], number: signal.Signals) -> None:
    for process in processes:
        send_signal(process, number)
