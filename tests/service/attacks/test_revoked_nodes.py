"""A node whose key an admin has revoked, in the middle of its work: it has no part in its job from then on, and neither
has whoever joins under its name."""

import pytest
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert

from agent.protocol.errors import UNAUTHENTICATED
from service.jobs.tables import JobGrantRow, JobMemberRow, MemberRole
from service.problems import ProblemError
from service.reconcilers import jobs
from service.sync.operations import apply_report
from service.sync.reading import read_report
from service.tokens.operations import verify_token
from service.tokens.tables import Role, TokenRow
from tests.service.conftest import bearer
from tests.service.fake_agent import step_row


@pytest.fixture
def revoke(client, context, settings):
    def end(node_id: str) -> None:
        with context.sessions() as session:
            keys = select(TokenRow).where(TokenRow.role == Role.NODE_KEY, TokenRow.node_id == node_id)
            key = session.scalars(keys.where(TokenRow.revoked_at.is_(None))).one()
        answer = client.post(f"/api/v1/tokens/{key.token_id}/revoke", headers=bearer(settings, "admin"))
        assert answer.status_code == 200, answer.text

    return end


@pytest.fixture
def at_work(running, clock):
    job_id, a, b = running
    for agent in (a, b):
        agent.sync(ranks=(agent.rank(agent.job_order(), step=3),), steps=(step_row(job_id, 1, 3, clock()),))
    clock.advance(1)
    return job_id, a, b


def grants_of(context, node_id):
    with context.sessions() as session:
        rows = session.scalars(select(JobGrantRow).where(JobGrantRow.node_id == node_id).order_by(JobGrantRow.grant_id))
        return [(row.role, row.ends_at) for row in rows]


def test_its_part_in_its_job_ends_with_its_key(at_work, revoke, client, context, clock):
    job_id, _, b = at_work
    before = b.job_order()
    revoke("a")
    assert grants_of(context, "a")[-1] == (None, clock()), "without a grace"
    assert client.get("/api/v1/nodes/a").json()["state"] == "gone"
    b.sync(ranks=(b.rank(before, step=4),))
    assert b.job_order().lead_order == ("b",)
    jobs.tick(context)
    job = client.get(f"/api/v1/jobs/{job_id}").json()
    assert job["state"] == "suspending", "though it makes steps; one node is too few"
    assert "the key of a was revoked" in job["reason"]


def test_whoever_joins_under_its_name_gets_no_orders_of_its_job_and_learns_no_key(at_work, revoke, clock):
    job_id, a, b = at_work
    order = b.job_order()
    said = {"ranks": (a.rank(order, step=4),)}
    revoke("a")
    # The fake agent joins again once its token is refused, as another machine of that name would.
    for _ in range(3):
        clock.advance(1)
        b.sync(ranks=(b.rank(order, step=4),))
        answer = a.post(a.report(**said))
        assert answer.status_code == 200 and answer.json()["jobs"] == []
        assert [item["key"] for item in answer.json()["refusals"]] == [job_id]
        assert order.peer_key not in answer.text


def test_it_gets_a_part_again_with_the_next_world_that_is_placed_on_it(at_work, revoke, client, context, clock):
    job_id, a, b = at_work
    revoke("a")
    for _ in range(30):
        clock.advance(2)
        for agent in (a, b):
            agent.sync()
        jobs.tick(context)
        if client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] != 1:
            break
    a.sync()
    assert set(a.roster().node_ids()) == {"a", "b"}
    assert a.sync(ranks=(a.rank(a.job_order(), step=0),)).refusals == ()


def test_a_report_that_was_on_its_way_when_the_key_was_revoked_brings_nothing_back(at_work, revoke, client, context):
    _, a, _ = at_work
    report = a.report(ranks=(a.rank(a.job_order(), step=4),))
    reading = read_report(report.model_dump_json().encode())
    with context.sessions() as session:
        caller = verify_token(session, a.token, now=context.clock())
    assert caller is not None
    revoke("a")
    with pytest.raises(ProblemError) as refused, context.sessions.begin() as session:
        apply_report(session, reading, caller, silent_after_s=6.0, gone_after_s=30.0, now=context.clock())
    assert refused.value.problem.code == UNAUTHENTICATED
    assert client.get("/api/v1/nodes/a").json()["state"] == "gone"


def test_an_old_key_of_the_name_ends_nothing_of_the_machine_that_has_it_now(at_work, revoke, client, context, settings):
    _, a, _ = at_work
    revoke("a")
    a.sync()
    with context.sessions() as session:
        old = select(TokenRow).where(TokenRow.role == Role.NODE_KEY, TokenRow.revoked_at.is_not(None))
        key = session.scalars(old).one().token_id
    assert client.post(f"/api/v1/tokens/{key}/revoke", headers=bearer(settings, "admin")).status_code == 200
    assert client.get("/api/v1/nodes/a").json()["state"] == "ready"
    assert a.sync().jobs == ()


@pytest.mark.parametrize("is_calm", [True, False])
def test_a_place_among_the_members_is_worth_nothing_without_a_grant(at_work, make_agent, context, clock, is_calm):
    """Whatever put it there."""
    job_id, _, b = at_work
    stranger = make_agent("stranger")
    stranger.sync()
    with context.sessions.begin() as session:
        values = {"job_id": job_id, "node_id": "stranger", "role": MemberRole.SPARE.value}
        session.execute(insert(JobMemberRow).values(values))
    clock.advance(1)
    stranger.notice_source = None
    if not is_calm:
        stranger.watch()
    answer = stranger.post(stranger.report())
    assert answer.json()["jobs"] == [] and b.job_order().peer_key not in answer.text
