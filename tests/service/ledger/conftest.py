"""A job, two nodes in different pools, and leases of them that begin at START."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.orm import Session

from service.db.engine import Database
from service.jobs.tables import JobRow
from service.leases.operations import begin_lease
from service.leases.tables import LeaseRow
from service.nodes.tables import NodeRow

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    with database.sessions() as session:
        session.add(JobRow(job_id="j", name="j", spec={}, peer_key="", state="running", created_at=START,
                           state_changed_at=START, peer_key_at=START, next_generation=9))  # fmt: skip
        for name, pool in (("a", "p"), ("b", "q")):
            session.add(
                NodeRow(
                    node_id=name, provider="none", pool=pool, slots=2, peer_url="http://a", private_address="a",
                    device="cpu", agent_version="1", agent_incarnation="00000000-0000-0000-0000-000000000001",
                    report_seq=0, state="ready", first_seen_at=START, last_seen_at=START,
                )
            )  # fmt: skip
        session.flush()
        yield session


@pytest.fixture
def lease(session: Session) -> LeaseRow:
    return leased(session, "a", "p")


def leased(session: Session, node_id: str, pool: str) -> LeaseRow:
    return begin_lease(session, node_id=node_id, provider="none", pool=pool, slots=2, now=START)
