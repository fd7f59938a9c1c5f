"""The machines of the demo, all on loopback: one service, and nodes that each have an agent and a metadata endpoint."""

import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from agent.gpus import CPU
from agent.protocol.sync import Provider
from deploy.local.api import Api, until
from deploy.local.processes import Processes, Started

SERVICE_START_S = 60.0
NODE_START_S = 30.0
READY_S = 120.0
CORPUS_S = 120.0
CORPUS_BYTES = 2_000_000
SERVICE = "service"
POOL = "demo-spot"
# The demo grows onto a new node sooner than the default: here no fleet has to settle.
SERVICE_ENVIRONMENT = {"LIVER_SERVICE_GROW_SETTLE_S": "1"}


@dataclass(frozen=True, slots=True)
class LocalNode:
    """One machine of the demo. `imds_url`: where its metadata endpoint listens."""

    node_id: str
    agent: Started
    imds: Started
    imds_url: str


class Cluster:
    """`folder` gets everything: database, tokens, run directories, logs. `service_nice`: of the service; above 0 it
    gets next to no processor time while anything else on the machine wants it. `service_environment`: its settings,
    LIVER_SERVICE_*, beside those of the demo. `device`: of every agent, as its setting."""

    def __init__(
        self,
        folder: Path,
        processes: Processes,
        *,
        service_nice: int = 0,
        service_environment: Mapping[str, str] | None = None,
        device: str = CPU,
    ) -> None:
        self.folder = folder
        self.device = device
        self._service_nice = service_nice
        self._service_environment = SERVICE_ENVIRONMENT | dict(service_environment or {})
        self._processes = processes
        self.nodes: dict[str, LocalNode] = {}
        self.url = ""
        self.service: Started | None = None

    def start_corpus(self) -> tuple[str, Started | None]:
        """The prefix of the corpus, and the process that builds it if it does not exist yet."""
        prefix = corpus_prefix(self.folder)
        if all(Path(prefix + suffix).is_file() for suffix in (".bin", ".idx")):
            return prefix, None
        command = [sys.executable, "-m", "liver_core.training.corpus", "--out", prefix]
        command += ["--bytes-max", str(CORPUS_BYTES)]
        return prefix, self._processes.start("corpus", "corpus", command)

    def start_service(self) -> None:
        """A real `liver serve` on a free port of loopback."""
        command = [sys.executable, "-m", "service.cli.main", "serve", "--port", "0", "--data-dir", str(self.folder)]
        self.service = self._processes.start(SERVICE, "service", command, self._service_environment)

    def await_service(self) -> Api:
        """Its API once it answers."""
        service = self.service
        assert service is not None
        self.url = until("the start of the service", SERVICE_START_S, lambda: _service_url(service.log), service.check)
        until("the service", SERVICE_START_S, lambda: httpx.get(f"{self.url}/readyz").is_success, service.check)
        self._processes.lower_priority(SERVICE, self._service_nice)
        return Api(self.url, self.folder / "tokens" / "operator.token")

    def start_node(self, node_id: str, provider: Provider = Provider.AWS, *, gcp_notice_s: int = 0) -> LocalNode:
        """An agent with one slot and its own metadata endpoint. `gcp_notice_s`: as the agent's setting."""
        imds = self._processes.start(node_id, f"{node_id}-imds", self._metadata_command(node_id))
        url = until(f"the metadata endpoint of {node_id}", NODE_START_S, lambda: _first_url(imds.log), imds.check)
        # Where the agent finds the endpoint, whatever its provider.
        environment = {
            "LIVER_AGENT_AWS_IMDS_URL": url,
            "LIVER_AGENT_GCP_METADATA_URL": url,
            "LIVER_AGENT_GCP_NOTICE_S": str(gcp_notice_s),
        }
        agent = self._start_agent(node_id, self._agent_command(node_id, provider), environment)
        node = self.nodes[node_id] = LocalNode(node_id, agent, imds, url)
        return node

    def end_node(self, node_id: str) -> None:
        """Take the machine away: end agent, ranks, stores and metadata endpoint at once."""
        self.nodes.pop(node_id)
        self._processes.end(node_id)

    def ready_nodes(self, api: Api) -> set[str]:
        """Nodes that the service could place ranks on."""
        return {node["node_id"] for node in api.get("/api/v1/nodes") if node["state"] == "ready"}

    def check(self) -> None:
        """Raises DemoFailed when the service or an agent has ended."""
        for started in (self.service, *(node.agent for node in self.nodes.values())):
            if started is not None:
                started.check()

    def _metadata_command(self, node_id: str) -> list[str]:
        return [sys.executable, "-m", "deploy.local.metadata_server", "--port", "0", "--instance-id", f"i-{node_id}"]

    def _start_agent(self, node_id: str, command: list[str], environment: dict[str, str]) -> Started:
        return self._processes.start(node_id, node_id, command, environment)

    def _agent_command(self, node_id: str, provider: Provider) -> list[str]:
        token_file = self.folder / "tokens" / "join.token"
        command = [sys.executable, "-m", "agent.main", "--service-url", self.url, "--token-file", str(token_file)]
        command += ["--node-id", node_id, "--slots", "1", "--provider", provider.value, "--pool", POOL]
        command += ["--device", self.device]
        return [*command, "--run-dir", str(self.folder / "nodes" / node_id)]


def corpus_prefix(folder: Path) -> str:
    """Under build/ of a source tree, where later demos find it again; else in the data directory."""
    python = f"python{sysconfig.get_python_version()}"
    if Path("pyproject.toml").is_file() and Path("liver_core").is_dir() and os.access(".", os.W_OK):
        return str(Path("build").resolve() / "demo-corpus" / python / "stdlib")
    return str(folder / "corpus" / python / "stdlib")


def _service_url(log: Path) -> str:
    found = re.search(r"^service: (http://\S+)", log.read_text(), re.MULTILINE)
    return found[1] if found else ""


def _first_url(log: Path) -> str:
    found = re.search(r"^(http://\S+)$", log.read_text(), re.MULTILINE)
    return found[1] if found else ""
