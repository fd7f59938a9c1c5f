"""A node's key that is revoked: every service is told, and none goes by what it has looked up before."""

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from service.app import create_app
from service.tokens.tables import Role, TokenRow
from tests.service.conftest import bearer
from tests.service.waiting import until


@pytest.fixture
def other(settings, clock, database):
    """Another replica of the service."""
    with TestClient(create_app(settings, clock=clock, database=database)) as client:
        yield client


def test_a_revoked_key_ends_the_nodes_token_in_every_service(make_agent, client, other, context, settings):
    agent = make_agent("a")
    agent.sync()

    def status(service: TestClient) -> int:
        return service.post("/agent/v1/sync", content="{}", headers=agent.headers).status_code

    # The report is wrong, but the token is read first, and kept.
    assert [status(service) for service in (client, other)] == [409, 409]
    with context.sessions() as session:
        key = session.scalars(select(TokenRow).where(TokenRow.role == Role.NODE_KEY)).one()
    revoked = client.post(f"/api/v1/tokens/{key.token_id}/revoke", headers=bearer(settings, "admin"))
    assert revoked.status_code == 200
    for service in (client, other):
        until(lambda at=service: status(at) == 401)
