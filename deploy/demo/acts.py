"""The acts of the demo: a job starts, loses a node, gains one, loses two, and is stopped, without ever restarting."""

import time
from collections.abc import Callable
from typing import Any

from deploy.demo.display import Display, short
from deploy.demo.report import Newcomer
from deploy.demo.tracker import Tracker
from deploy.local.api import Api, interrupt, until
from deploy.local.cluster import Cluster
from deploy.local.processes import DemoFailed
from service.cli.output import seconds, size

START_S = 90.0
HANDOFF_S = 90.0
STOP_S = 40.0
STEPS_BEFORE = 10
"""Steps of each layout before the job leaves it: enough for a median step time."""

WARNING_S = 120.0
"""The warning that AWS gives."""

LOOK_S = 1.0
"""How often the demo queries the job: a query takes processor time from the ranks."""

BETWEEN_NOTICES_S = 10.0
NEWCOMER = "node-e"


class Acts:
    """One job on one cluster. `tracker` exists once `start` has submitted the job."""

    def __init__(self, cluster: Cluster, api: Api, display: Display) -> None:
        self._cluster = cluster
        self._api = api
        self._display = display
        self._generation = 0
        self.newcomer = Newcomer(NEWCOMER, 0.0)
        self._tracker: Tracker | None = None
        self.layout_after_first_loss = ""

    @property
    def tracker(self) -> Tracker:
        """The job as last seen."""
        assert self._tracker is not None
        return self._tracker

    def start(self, job_file: dict[str, Any], what: str) -> None:
        """Submit the job, which is `what` for people, and let it train for a while."""
        self._display.act(f"Train {what} with Megatron-Core on four nodes")
        submitted = self._api.post("/api/v1/jobs", job_file)
        self._tracker = Tracker(self._api, submitted["job_id"])
        self._until("the first steps", START_S, lambda: self.tracker.last_step >= STEPS_BEFORE)
        self._generation = self.tracker.job["active_generation"]
        self._display.say(f"job {self.tracker.job_id} trains as {short(self.tracker.job['layout'])}")

    def lose_a_node(self) -> None:
        """A spot notice for one node: the job leaves the node while it trains."""
        leaver = self.tracker.nodes[-1]
        self._display.act(f"A spot notice for {leaver}: four nodes become three")
        self._interrupt(leaver)
        self._until_moved(f"the handoff away from {leaver}", lambda: leaver not in self.tracker.nodes)
        self.layout_after_first_loss = short(self.tracker.job["layout"])
        self._cluster.end_node(leaver)
        self._display.say(f"{leaver} was terminated")
        self._train()

    def gain_a_node(self) -> None:
        """A node joins: the job grows onto it, in another layout than the first."""
        self._display.act(f"{NEWCOMER} joins: three nodes become four, in another layout than before")
        self.newcomer = Newcomer(NEWCOMER, time.time())
        self._cluster.start_node(NEWCOMER)
        self._until_moved(f"the handoff onto {NEWCOMER}", lambda: NEWCOMER in self.tracker.nodes)
        self._train()

    def lose_two_nodes(self) -> None:
        """Two notices, ten seconds apart."""
        first, second = self.tracker.nodes[1], self.tracker.nodes[2]
        self._display.act(f"Spot notices for {first} and, ten seconds later, {second}: four nodes become two")
        self._interrupt(first)
        again_at = time.monotonic() + BETWEEN_NOTICES_S
        self._until("the second notice", BETWEEN_NOTICES_S + 5, lambda: time.monotonic() >= again_at)
        self._interrupt(second)
        self._until_moved(
            f"the handoff away from {first} and {second}", lambda: not {first, second} & set(self.tracker.nodes)
        )
        for leaver in (first, second):
            self._cluster.end_node(leaver)
        self._display.say(f"{first} and {second} were terminated")

    def stop(self) -> None:
        """Stop the job and wait until its ranks have ended."""
        self._display.act("Stop the job")
        self._api.post(f"/api/v1/jobs/{self.tracker.job_id}/stop")
        self._until("the end of the job", STOP_S, lambda: self.tracker.job["state"] == "stopped", may_end=True)
        missing = set(range(1, self.tracker.last_step + 1)) - set(self.tracker.steps)
        if missing:
            raise DemoFailed(f"the service has no row for steps {sorted(missing)[:8]} of {self.tracker.last_step}")
        self._display.say(f"{self.tracker.last_step} steps, none of them twice, without a restart")

    def _interrupt(self, node_id: str) -> None:
        interrupt(self._cluster.nodes[node_id].imds_url, ends_in_s=WARNING_S)
        self._display.say(f"the metadata endpoint of {node_id} announces: terminate in {WARNING_S:.0f} s")

    def _until_moved(self, what: str, left: Callable[[], bool]) -> None:
        """Wait until the job has moved and its handoff is fully measured."""

        def moved() -> bool:
            done = self.tracker.measured(after_generation=self._generation)
            return left() and any(item["generation"] == self.tracker.job["active_generation"] for item in done)

        self._until(what, HANDOFF_S, moved)
        for item in self.tracker.handoffs:
            if (item["generation"] or 0) > self._generation:
                self._display.say(_outcome(item))
        self._generation = self.tracker.job["active_generation"]

    def _train(self) -> None:
        """Train some ordinary steps in the new layout."""
        enough = self.tracker.last_step + STEPS_BEFORE
        self._until("ordinary steps", START_S, lambda: self.tracker.last_step >= enough)

    def _until(self, what: str, timeout_s: float, condition: Callable[[], bool], *, may_end: bool = False) -> None:
        def look() -> bool:
            self.tracker.refresh()
            self._display.job(self.tracker)
            return condition()

        def check() -> None:
            self._cluster.check()
            if not may_end and self.tracker.job.get("state") in ("failed", "stopped", "finished"):
                raise DemoFailed(f"{what}: {self.tracker.why_not()}")

        try:
            until(what, timeout_s, look, check, poll_s=LOOK_S)
        except DemoFailed as error:
            raise DemoFailed(f"{error}; {self.tracker.why_not()}") from error


def _outcome(item: dict[str, Any]) -> str:
    where = f"{short(item['from'])} -> {short(item['to'])}"
    if item["state"] != "active":
        return f"{where} was {item['state']}: {item['reason']}"
    return (
        f"{where}: pause {seconds(item['pause_s'])} ({item['pause_steps']:.1f} steps), "
        f"{seconds(item['lost_s'])} lost in all, {size(item['bytes_moved'])} moved"
    )
