"""Plays one trial on real processes: a service, agents and ranks on loopback, a scenario, and the strikes of its plan.

Every wait has a limit, and everything that was started is ended by pid. What happened is left as `Facts`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from deploy.local.api import interrupt
from deploy.local.cluster import CORPUS_S
from deploy.local.processes import DemoFailed
from tests.chaos.facts import Facts, births_of_service, read_agent_logs, read_rank_logs
from tests.chaos.machines import Machines
from tests.chaos.plan import Kind, TrialPlan, job_file
from tests.chaos.remains import Remains
from tests.chaos.strikes import Strikes
from tests.chaos.trail_reader import TrailReader
from tests.chaos.victims import Roles, leads_now

START_S = 150.0
SUSPEND_S = 150.0
STRIKES_S = 120.0
RECOVER_S = 90.0
RECOVER_MOST_S = 400.0
GROWS_S = 30.0
OPENS_S = 60.0
STOP_S = 90.0
LEAK_S = 20.0
REQUEST_S = 3.0
LOOK_S = 0.3
SHARED_MEMORY_S = 2.0
STEPS_BEFORE = 4
STEPS_AFTER = 3
ENDED = ("stopped", "finished", "failed")


class Trial:
    """The folder of the machines gets everything that the trial writes."""

    def __init__(self, plan: TrialPlan, machines: Machines, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = machines.folder
        self._say = say
        self._machines = machines
        self._remains = Remains(self._machines)
        self._roles = Roles()
        self._trail = TrailReader(machines.folder / "trail")
        self._strikes = Strikes(self._machines, self._roles, plan.strikes)
        self._deadlines: dict[str, float] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._looked_at = 0.0
        self._job: dict[str, Any] = {}
        self._http = httpx.Client()
        self._pause = threading.Event()
        self.facts = Facts(plan.seed, plan.global_batch, plan.kind, build_s=plan.build_s)

    def play(self) -> Facts:
        """Never raises for what the product does: what did not happen in time is `problem` in the facts."""
        try:
            try:
                self._begin()
                self._run_scenario()
                self._recover()
                self._stop_job()
            except DemoFailed as error:
                self.facts.problem = str(error)
            self._collect()
        finally:
            self._strikes.end()
            self._http.close()
        return self.facts

    # The scenario.

    def _begin(self) -> None:
        """A service, nodes and a job that steps."""
        machines, plan = self._machines, self._plan
        machines.start_service()
        prefix, corpus = machines.start_corpus()
        machines.await_service().close()
        token = (self._folder / "tokens" / "operator.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=machines.url, headers=headers, timeout=REQUEST_S)
        for index, slots in enumerate(plan.nodes):
            machines.add_node(f"node-{index + 1}", slots)
        if corpus is not None:
            machines.processes.finish(corpus, CORPUS_S)
        self._until("ready nodes", START_S, lambda: self._ready() >= set(machines.nodes))
        places = {"trail": str(self._folder / "trail"), "checkpoints": str(self._folder / "checkpoints")}
        answer = self._http.post("/api/v1/jobs", json=job_file(plan, data_prefix=prefix, **places))
        if answer.status_code != 201:
            raise DemoFailed(f"the job was rejected: {answer.text[:500]}")
        self._roles.job_id = answer.json()["job_id"]
        self._until("the first steps", START_S, lambda: self._applied() >= STEPS_BEFORE)

    def _run_scenario(self) -> None:
        """Do what the kind says, and strike around it."""
        match self._plan.kind:
            case Kind.NOTHING:
                self._trigger()
            case Kind.NOTICE | Kind.SECOND_NOTICE | Kind.DECISION:
                self._give_notices()
                self._trigger()
            case Kind.REPLACEMENT:
                self._add_nodes()
                self._give_notices()
                self._trigger()
            case Kind.GROW:
                self._add_nodes()
                self._trigger()
            case Kind.LEAD:
                if self._plan.opens is Kind.GROW:
                    self._add_nodes()
                self._give_notices()
                self._give_lead_notice()
                self._trigger()
            case Kind.SUSPENSION:
                self._give_notices()
                self._trigger()
                self._suspended()
                self._add_node(self._machines.slots[self._roles.leavers[0]])
                self.facts.capacity_at = time.monotonic()
            case Kind.RESUME:
                self._give_notices()
                self._suspended()
                self._add_node(self._machines.slots[self._roles.leavers[0]])
                self.facts.capacity_at = time.monotonic()
                self._trigger()

    def _trigger(self) -> None:
        self.facts.triggered_at, self.facts.triggered_utc = time.monotonic(), time.time()
        self._strikes.begin()

    def _give_notices(self) -> None:
        """The first now, the second a little later."""
        staying = set(self._machines.nodes) - set(self._roles.newcomers)
        chosen = random.Random(self._plan.seed).sample(sorted(staying), self._plan.leave)
        for number, node in enumerate(chosen):
            self._later.append(
                (time.monotonic() + number * self._plan.gap_s, lambda node=node: self._give_notice(node))
            )
        self._tend()

    def _give_notice(self, node: str) -> None:
        self._announce(node, self._plan.notice_s)

    def _give_lead_notice(self) -> None:
        """To the node that leads, as soon as a handoff is open, or a little later where building takes long."""
        job_id = self._roles.job_id
        with suppress(DemoFailed):
            self._until("a handoff to be open", OPENS_S, lambda: leads_now(self._machines, job_id) is not None)
            opened_at = time.monotonic()
            self._pause.wait(self._plan.gap_s if self._plan.build_s else 0.0)
            if (node := leads_now(self._machines, job_id)) is not None:
                times = {"opened_at": opened_at, "at": time.monotonic(), "ends_in_s": self._plan.lead_notice_s}
                self.facts.lead_notice = {"node": node, **times}
                self._announce(node, self._plan.lead_notice_s)

    def _announce(self, node: str, ends_in_s: float) -> None:
        self._roles.leavers.append(node)
        self._deadlines[node] = time.monotonic() + ends_in_s
        with self._machines.beside(node):
            interrupt(self._machines.nodes[node].imds_url, ends_in_s=ends_in_s)
        self._say(f"notice for {node}, {ends_in_s:.0f} s")

    def _add_nodes(self) -> None:
        for slots in self._plan.comes:
            self._add_node(slots)

    def _add_node(self, slots: int) -> None:
        """Returns when the service could use it."""
        node = f"node-{len(self._machines.slots) + 1}"
        self._roles.newcomers.append(node)
        self._machines.add_node(node, slots)
        self._until(f"{node} to be ready", START_S, lambda: node in self._ready())
        self._say(f"{node} came")

    def _suspended(self) -> None:
        self._until("the job to be suspended", SUSPEND_S, lambda: self._state() == "suspended")
        for node in tuple(self._deadlines):
            self._end_node(node)

    # Afterwards.

    def _recover(self) -> None:
        """Wait until nothing is struck any more and the job steps where it should."""
        self._until("the strikes to be over", STRIKES_S, lambda: self._strikes.over and not self._later)
        if self._plan.kind is Kind.GROW:
            with suppress(DemoFailed):
                self._until("the job to grow", GROWS_S, lambda: set(self._roles.newcomers) <= self._members())
        enough = self._applied() + STEPS_AFTER

        def recovered() -> bool:
            state = self._state()
            goes_on = state == "running" and not self._leavers_at_work()
            return state in ENDED or (goes_on and self._applied() >= enough)

        # As long as steps are made, however slowly, it does not hang.
        began, before = time.monotonic(), -1
        while (made := self._made()) > before and time.monotonic() - began < RECOVER_MOST_S:
            before = made
            with suppress(DemoFailed):
                self._until("", RECOVER_S, recovered)
                return
        raise DemoFailed(f"step {enough} was not reached without leaving nodes, and no other within {RECOVER_S:.0f} s")

    def _leavers_at_work(self) -> bool:
        if self._plan.kind is Kind.RESUME:
            return False
        return bool(set(self._roles.leavers) & self._members())

    def _stop_job(self) -> None:
        """End the job by the API, and see what is left of it."""

        def asked() -> bool:
            answer = self._http.post(f"/api/v1/jobs/{self._roles.job_id}/stop")
            return answer.status_code in (200, 409)

        self._until("the service to take a stop", STOP_S, asked)
        self._until("the end of the job", STOP_S, lambda: self._state() in ENDED)
        with suppress(DemoFailed):
            self._until("nothing to be left", LEAK_S, lambda: not self._remains.left())
        self.facts.leaked += self._remains.left()

    def _collect(self) -> None:
        facts, job_id = self.facts, self._roles.job_id
        self._strikes.end()
        facts.struck = [struck.as_json() for struck in self._strikes.struck]
        facts.job = self._get(f"/api/v1/jobs/{job_id}") or self._job
        facts.steps = self._get(f"/api/v1/jobs/{job_id}/steps", limit=20_000) or []
        facts.handoffs = self._get("/api/v1/handoffs", job_id=job_id, limit=1_000) or []
        self._trail.look()
        facts.trail = self._trail.lines
        facts.logged, facts.partly, births = read_rank_logs(list(self._folder.glob(f"nodes/*/logs/{job_id}/*.log")))
        facts.started = read_agent_logs(list(self._folder.glob("logs/node-*.log")))
        facts.births = births + births_of_service(facts.job, facts.handoffs)

    # What is seen.

    def _until(self, what: str, timeout_s: float, condition: Callable[[], bool]) -> None:
        """Raises DemoFailed when the time is over. Tends to nodes meanwhile; no answer counts as not yet."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._tend()
            with suppress(httpx.TransportError):
                if condition():
                    return
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {timeout_s:.0f} s for {what} in vain")
            self._pause.wait(LOOK_S)

    def _tend(self) -> None:
        """Take nodes away when their time is over or nothing is on them, and do what is due."""
        now = time.monotonic()
        for item in [item for item in self._later if item[0] <= now]:
            self._later.remove(item)
            item[1]()
        for node, deadline in tuple(self._deadlines.items()):
            if now >= deadline:
                self._end_node(node)
        if now - self._looked_at > SHARED_MEMORY_S:
            self._looked_at = now
            self._remains.look()
            if self._deadlines and self._strikes.over and self._state() == "running":
                self._end_leavers()

    def _end_leavers(self) -> None:
        """End those that the job has left."""
        for node in tuple(self._deadlines):
            if node not in self._job["nodes"] and not self._machines.journal(node).get("rank"):
                self._end_node(node)

    def _end_node(self, node: str) -> None:
        self._deadlines.pop(node)
        if node not in self._machines.nodes:
            return  # A strike has killed its machine.
        self.facts.taken[node] = time.monotonic()
        self._machines.end_node(node)
        self._say(f"{node} was taken away")

    def _get(self, path: str, **params: Any) -> Any:
        try:
            answer = self._http.get(path, params=params)
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def _ready(self) -> set[str]:
        nodes = self._get("/api/v1/nodes") or ()
        return {node["node_id"] for node in nodes if node["state"] == "ready"}

    def _state(self) -> str:
        """Of the job, empty while the service does not answer."""
        found = self._get(f"/api/v1/jobs/{self._roles.job_id}")
        self._job = found or self._job
        return found["state"] if found else ""

    def _members(self) -> set[str]:
        return set(self._job.get("nodes", ())) if self._state() else set()

    def _made(self) -> int:
        self._trail.look()
        return self._trail.made

    def _applied(self) -> int:
        self._trail.look()
        return self._trail.applied
