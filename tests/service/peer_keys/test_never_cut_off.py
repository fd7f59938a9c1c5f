"""Whatever happens: nodes of a job have a key in common, and who has left soon knows none that is valid."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from service.jobs.grants import GRACE_S
from service.jobs.operations import set_members, touch
from service.jobs.tables import JobRow, MemberRole
from service.peer_keys.queries import ANSWERED_WITHIN
from service.reconcilers import keys
from tests.service.fake_agent import JOB_OF_MANY, FakeAgent

EXAMPLES = 30
NODES = ("a", "b", "c", "d")
node = st.sampled_from(NODES)
events = st.one_of(
    st.tuples(st.just("sync"), node),
    st.tuples(st.just("sync"), node),
    st.tuples(st.just("members"), st.sets(node, min_size=1)),
    st.tuples(st.just("wait"), st.sampled_from((1.0, GRACE_S / 3, GRACE_S + 40.0))),
    st.tuples(st.just("look")),
    st.tuples(st.just("ask")),
)


@dataclass
class Fleet:
    """`has`: the valid keys in the orders of each node that has a part in the job. `ever`: all that it has ever had."""

    client: Any
    context: Any
    clock: Any
    job_id: str
    agents: dict[str, FakeAgent]
    has: dict[str, set[str]] = field(default_factory=dict)
    ever: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in NODES})

    def sync(self, name: str) -> None:
        jobs = self.agents[name].sync().jobs
        self.has.pop(name, None)
        for order in jobs:
            self.has[name] = {key for key in (order.peer_key, order.peer_key_before) if key is not None}
            self.ever[name] |= self.has[name]

    def members(self, names: set[str]) -> None:
        with self.context.sessions.begin() as session:
            job = session.get_one(JobRow, self.job_id)
            set_members(session, job, dict.fromkeys(sorted(names), MemberRole.MEMBER), now=self.clock())
            touch(session, job, now=self.clock())

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def look(self) -> None:
        keys.tick(self.context)

    def ask(self) -> None:
        assert self.client.post(f"/api/v1/jobs/{self.job_id}/rotate-key").status_code in (200, 409)

    def granted(self) -> set[str]:
        statement = text(
            "SELECT node_id FROM (SELECT DISTINCT ON (node_id) node_id, role, ends_at FROM job_grants"
            " WHERE job_id = :job_id ORDER BY node_id, grant_id DESC) newest WHERE role IS NOT NULL OR ends_at > :now"
        )
        with self.context.sessions() as session:
            return set(session.scalars(statement, {"job_id": self.job_id, "now": self.clock()}))

    def valid(self) -> set[str]:
        with self.context.sessions() as session:
            job = session.get_one(JobRow, self.job_id)
            return {key for key in (job.peer_key, job.peer_key_before) if key is not None}

    def check(self) -> None:
        granted = self.granted()
        self.has = {name: held for name, held in self.has.items() if name in granted}
        for one, held in self.has.items():
            assert held & self.valid(), f"{one} has no valid key"
            for other, theirs in self.has.items():
                assert held & theirs, f"{one} and {other} have no key in common"


@pytest.fixture
def fleet(client, context, clock, make_agent):
    def make() -> Fleet:
        with context.sessions.begin() as session:
            for (job_id,) in session.execute(text("SELECT job_id FROM jobs")).all():
                set_members(session, session.get_one(JobRow, job_id), {}, now=clock())
        agents = {name: make_agent(name) for name in NODES}
        for agent in agents.values():
            agent.sync()
        job_id = client.post("/api/v1/jobs", json=JOB_OF_MANY).json()["job_id"]
        made = Fleet(client, context, clock, job_id, agents)
        made.members({"a", "b"})
        return made

    return make


@pytest.mark.thorough
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(happened=st.lists(events, min_size=4, max_size=25))
def test_nodes_of_a_job_always_have_a_key_in_common_and_former_ones_lose_theirs(fleet, happened):
    made = fleet()
    for what, *rest in happened:
        getattr(made, what)(*rest)
        made.check()
    # Those that have a part are heard again, and nobody leaves any more.
    for _ in range(4):
        made.wait(GRACE_S + ANSWERED_WITHIN.total_seconds() + 1.0)
        for _ in range(3):
            for name in sorted(made.granted()):
                made.sync(name)
            made.look()
            made.check()
    for name in set(NODES) - made.granted():
        assert not made.ever[name] & made.valid(), f"{name} still has a valid key"
    assert len(made.valid()) == 1
