"""Real agent processes on loopback with fake ranks, a stub service, and one metadata server per node."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.app import Agent
from agent.protocol.jobfile import JobFile
from agent.protocol.sync import HandoffMirror, Provider, RankStatus
from agent.protocol.values import HandoffState
from agent.settings import DEFAULT_PRELOAD, DEFAULT_RANK_ENTRY, DEFAULT_STORE_ENTRY, AgentSettings
from agent.supervisor.process import ProcessIdentity, read_start_time
from deploy.local.metadata_server import ImdsServer
from tests.agent.stub_service import JOB_ID, TOKEN, StubService
from tests.agent.waiting import fake_job, quick_directory
from tests.cluster.net_islands import Islands, address_of

FAKE_RANKS = ("tests.agent.fake_rank,tests.agent.fake_store", "tests.agent.fake_rank:run", "tests.agent.fake_store:run")
REAL_RANKS = (DEFAULT_PRELOAD, DEFAULT_RANK_ENTRY, DEFAULT_STORE_ENTRY)
"""What a node imports once, the entry of a rank and that of a store."""
START_S = 120.0
ANSWER_S = 45.0
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Start:
    """How agents are started: a command that starts them, options and environment of their own. `islands`: each as a
    machine of its own, with a network and pids that no other shares; then no cloud tells of notices."""

    through: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    islands: Islands | None = None

    def machine_of(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What comes before the agent's command for this node, and the options of its machine."""
        if self.islands is None:
            return self.through, ("--provider", "aws")
        pids = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        return (*self.islands.inside(name), *pids, *self.through), ("--host", address_of(name, self.islands.names))


class Cluster:
    """Nodes by name, started one by one."""

    def __init__(
        self, directory: Path, service: StubService, ranks: tuple[str, str, str] = FAKE_RANKS, start: Start = Start()
    ) -> None:
        self.directory = directory
        self.start = start
        self.service = service
        self.ranks = ranks
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.metadata: dict[str, ImdsServer] = {}
        (directory / "token").write_text(TOKEN + "\n")

    def start_agent(self, name: str) -> None:
        """A new agent for the node; it takes over what the one before left."""
        if name not in self.metadata:
            self.metadata[name] = ImdsServer().start()
        preload, rank_entry, store_entry = self.ranks
        before, machine = self.start.machine_of(name)
        command = [
            *before,
            *(sys.executable, "-m", "agent.main", "--service-url", self.service.url, "--node-id", name),
            *("--token-file", str(self.directory / "token"), "--run-dir", str(self.directory / name)),
            *("--preload", preload, "--rank-entry", rank_entry, *machine, *self.start.options),
        ]
        environment = {
            **os.environ,
            **dict(self.start.environment),
            "LIVER_AGENT_AWS_IMDS_URL": self.metadata[name].url,
            "LIVER_AGENT_NOTICE_INTERVAL_S": "0.1",
            "LIVER_AGENT_STORE_ENTRY": store_entry,
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def kill_agent(self, name: str) -> None:
        """kill -9: nothing is tidied up."""
        agent = self.agents.pop(name)
        agent.kill()
        agent.wait(timeout=30)

    def fill_disk(self, name: str) -> None:
        """From now on the node's agent can make no file larger: neither its journal nor its log."""
        pid = self.agents[name].pid
        journal = self.directory / name / "journal.jsonl"
        size = journal.stat().st_size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))

    def announce(self, name: str, ends_in_s: float = 60.0) -> None:
        """The node will go."""
        assert not self.metadata[name].instance.change({"do": "interrupt", "ends_in_s": ends_in_s})

    def rank(self, name: str) -> RankStatus | None:
        """The node's rank as the service knows it."""
        ranks = self.service.ranks.get(name, ())
        return ranks[-1] if ranks else None

    def log_of(self, name: str) -> str:
        """What the node's agents wrote."""
        return (self.directory / f"{name}.log").read_text()

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = ANSWER_S) -> Any:
        """The first true value; fails with the end of every agent's log."""
        limit = time.monotonic() + timeout_s
        waiter = _Pause()
        while not (value := condition()):
            if time.monotonic() > limit:
                logs = "\n".join(f"--- {name}\n{self.log_of(name)[-2500:]}" for name in sorted(self.metadata))
                raise AssertionError(f"{what} did not happen in {timeout_s:g} s\n{logs}")
            waiter.pause()
        return value

    def wait_training(self, generation: int, names: tuple[str, ...]) -> None:
        """Every node's rank steps in this generation. Before the first the agents import what ranks need, which takes
        most of a minute on a machine whose disk is cold."""

        def stepping() -> bool:
            ranks = [self.rank(name) for name in names]
            return all(rank and rank.generation == generation and rank.stage == "training" for rank in ranks)

        what = f"training in generation {generation} on {', '.join(names)}"
        self.wait(stepping, what, START_S if generation == 1 else ANSWER_S)

    def wait_handoff(self, state: HandoffState, number: int = 1) -> HandoffMirror:
        """The newest handoff in this state, once there are so many."""
        found = self.wait(
            lambda: len(self.service.handoffs(state)) >= number and self.service.handoffs(state), f"{number} {state}"
        )
        return found[-1]

    def wait_retired(self, number: int = 1) -> HandoffMirror:
        """The newest of so many active handoffs that answer notices, once its leavers have said that they left. That
        may be later than its end, since they free themselves."""

        def retired() -> HandoffMirror | None:
            found = self.service.handoffs(HandoffState.ACTIVE)
            is_whole = len(found) >= number and found[-1].measures.notice_to_safe_s is not None
            return found[-1] if is_whole else None

        return self.wait(retired, f"{number} handoffs whose leavers are gone")

    def close(self) -> None:
        """End agents, then what they leave behind."""
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM if self.start.islands is None else signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait(timeout=30)
        if self.start.islands is None:  # Else their pids are gone, and all that had one.
            asyncio.run(self._stop_ranks())
        for server in self.metadata.values():
            server.stop()
        self.service.stop()

    async def _stop_ranks(self) -> None:
        """What `liver-agent --stop-ranks` does, for every node at once."""
        await asyncio.gather(*(Agent(settings_of(self.directory / name)).stop_ranks() for name in self.metadata))


class _Pause:
    """A short wait on something that never happens, so that polling costs nothing."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def pause(self) -> None:
        self._event.wait(0.03)


def settings_of(run_dir: Path) -> AgentSettings:
    """Enough to find what an agent left in its run directory."""
    return AgentSettings(
        service_url="http://127.0.0.1",
        token="",
        node_id=run_dir.name,
        slots=1,
        provider=Provider.NONE,
        pool="default",
        run_dir=run_dir,
        socket_dir=run_dir / "s",
        host="127.0.0.1",
    )


@contextmanager
def cluster(
    *names: str,
    spares: tuple[str, ...] = (),
    faults: dict[str, str] | None = None,
    steps: int = 1_000_000,
    job: JobFile | None = None,
    ranks: tuple[str, str, str] = FAKE_RANKS,
    start: Start = Start(),
) -> Iterator[Cluster]:
    """A job on these nodes, by default one of fake ranks; `spares` run agents but hold no rank yet."""
    directory = quick_directory()
    service = StubService(job or fake_job(directory, faults=faults, steps=steps), names)
    service.islands = start.islands
    service.start()
    service.told |= set(spares)
    this = Cluster(directory, service, ranks, start)
    try:
        for name in (*names, *spares):
            this.start_agent(name)
        yield this
    finally:
        this.close()
        shutil.rmtree(directory)


def identity_of(rank: RankStatus) -> ProcessIdentity:
    """The process behind a rank that is reported."""
    return ProcessIdentity(rank.pid, read_start_time(rank.pid) or -1.0)


__all__ = ["JOB_ID", "REAL_RANKS", "Cluster", "Start", "cluster", "identity_of"]
