"""A real service process with an embedded PostgreSQL, and something in it that requests can find."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from tests.cluster.real_service import RealService, real_service, service_folder
from tests.service.fake_agent import JOB, FakeAgent, step_row

# The fuzzer asks as often as it can: budgets have a test of their own.
SETTINGS = {
    "REQUESTS_PER_S": "1000000",
    "AGENT_REQUESTS_PER_S": "1000000",
    "SILENT_AFTER_S": "3600",
    "GONE_AFTER_S": "3600",
}


@dataclass(frozen=True, slots=True)
class Ground(RealService):
    """A service that runs."""

    def headers(self, role: str | None) -> dict[str, str]:
        """What a caller of this role sends; none: nobody in particular."""
        if role is None:
            return {}
        return {"Authorization": f"Bearer {self.token(role)}"}

    def node(self, name: str) -> dict[str, str]:
        """What the agent of this node sends, which joins first."""
        with httpx.Client(base_url=self.url, timeout=30) as client:
            return FakeAgent(name, client, self.headers("join"), lambda: datetime.now(UTC)).headers

    def populate(self) -> str:
        """A job, its nodes, a step, a notice, a price. Returns the job's id."""
        with httpx.Client(base_url=self.url, headers=self.headers("operator"), timeout=30) as client:
            job_id = client.post("/api/v1/jobs", json=JOB).raise_for_status().json()["job_id"]
            client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 1.5}).raise_for_status()

            def now() -> datetime:
                return datetime.now(UTC)

            agents = [FakeAgent(name, client, self.headers("join"), now) for name in ("a", "b")]
            for agent in agents:
                agent.sync()
            agents[0].sync(notices=(agents[0].notice(),), steps=(step_row(job_id, 1, 1, now(), loss=1.0),))
        return job_id


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    """Starts and ends a service."""
    command = ("-m", "service.cli.main", "serve")
    with service_folder() as folder, real_service(Ground, folder, command, SETTINGS) as service:
        yield service
