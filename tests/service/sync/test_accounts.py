"""What reports come to in the ledger: each slot-second of a lease once, by what the ranks did."""

from datetime import timedelta

import pytest
from sqlalchemy import select

from agent.protocol.sync import HandoffMeasures
from liver_core.handoff import RankStage
from liver_core.layout import ParallelLayout
from service.capacity.tables import InstanceRow
from service.leases.tables import LeaseRow
from service.ledger.tables import IntervalRow
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow
from service.reconcilers import jobs
from tests.service.fake_agent import JOB, mirror, roster, step_row


@pytest.fixture
def book(context):
    """Reads (lease, slot, cause, seconds) of a node; checks that its leases are tiled, and meet without overlap."""

    def read(node_id: str) -> list[tuple[int, int, str, float]]:
        with context.sessions() as session:
            leases = session.scalars(select(LeaseRow).where(LeaseRow.node_id == node_id).order_by(LeaseRow.lease_id))
            found, last_end = [], None
            for place, lease in enumerate(leases.all()):
                assert last_end is None or lease.started_at >= last_end
                for slot in range(lease.slots):
                    at = lease.started_at
                    of_slot = IntervalRow.lease_id == lease.lease_id, IntervalRow.slot == slot
                    for row in session.scalars(select(IntervalRow).where(*of_slot).order_by(IntervalRow.starts_at)):
                        assert row.starts_at == at
                        at = row.ends_at
                        found.append((place, slot, row.cause, (row.ends_at - row.starts_at).total_seconds()))
                    assert lease.ended_at in (None, at), "a lease ends where its account does"
                last_end = lease.ended_at
        return found

    return read


def gone(context, clock, node_id: str) -> None:
    with context.sessions.begin() as session:
        mark_gone(session, session.get_one(NodeRow, node_id), reason="test", now=clock())


@pytest.mark.parametrize("change", [{"slots": 3}, {"slots": 1}, {"pool": "another"}])
def test_a_node_that_comes_back_with_other_slots_or_another_pool_leaves_no_time_without_a_cause(
    make_agent, clock, book, change
):
    agent = make_agent("n", slots=2)
    agent.sync()
    clock.advance(5)
    agent.sync()
    clock.advance(7)
    again = make_agent("n", **({"slots": 2} | change))
    again.sync()
    clock.advance(2)
    again.sync()
    first = [(0, slot, "idle", 12.0) for slot in range(2)]
    assert book("n") == first + [(1, slot, "idle", 2.0) for slot in range(again.slots)]


def test_training_before_the_report_that_it_has_ended_was_training(running, clock, client):
    """Five seconds of it were accounted as idle."""
    job_id, agent, _ = running
    agent.sync(ranks=(agent.rank(agent.job_order(), step=1),))
    clock.advance(5)
    steps = tuple(step_row(job_id, 1, 2 + n, clock() - timedelta(seconds=4 - n), loss=1.0) for n in range(4))
    clock.advance(2)
    agent.sync(ranks=(agent.rank(agent.job_order(), stage=RankStage.FINISHED, step=5),), steps=steps)
    ledger = client.get("/api/v1/ledger", params={"job_id": job_id}).json()
    # A second before the first report here; from the first step of those that follow to the end of the last: 3.5 s.
    assert {item["cause"]: item["slot_seconds"] for item in ledger["causes"]} == {"productive": 1 + 3.5}


def test_a_rank_that_ended_a_step_further_was_training_also_where_no_step_is_reported(running, clock, client):
    job_id, agent, _ = running
    agent.sync(ranks=(agent.rank(agent.job_order(), step=1),))
    clock.advance(5)
    agent.sync(ranks=(agent.rank(agent.job_order(), stage=RankStage.FINISHED, step=5),))
    clock.advance(3)
    agent.sync(ranks=(agent.rank(agent.job_order(), stage=RankStage.FINISHED, step=5),))
    ledger = client.get("/api/v1/ledger", params={"job_id": job_id}).json()
    assert {item["cause"]: item["slot_seconds"] for item in ledger["causes"]} == {"productive": 6}


def test_what_ranks_did_while_their_node_counted_as_gone_is_put_right(running, context, clock, book):
    """The service was cut off from the node, whose ranks trained on. Its machine was leased all the time."""
    job_id, agent, _ = running
    agent.sync(ranks=(agent.rank(agent.job_order(), step=1),), steps=(step_row(job_id, 1, 1, clock()),))
    clock.advance(40)
    gone(context, clock, "a")
    assert book("a")[-1][2:] == ("lost", 40.0)
    clock.advance(20)
    steps = tuple(step_row(job_id, 1, 1 + n, clock() - timedelta(seconds=60 - n)) for n in range(1, 61))
    agent.sync(ranks=(agent.rank(agent.job_order(), step=61),), steps=steps)
    causes = [(lease, cause, seconds) for lease, _, cause, seconds in book("a")]
    assert causes[-3:] == [(0, "lost", 0.5), (0, "productive", 39.5), (1, "productive", 20.0)]


def made(job_id: str, generation: int, clock, *, first: int, count: int, ended_s_ago: float = 0.0):
    """Steps of a second each, the last of which ended some time ago."""
    at = [clock() - timedelta(seconds=ended_s_ago + count - 1 - n) for n in range(count)]
    return tuple(step_row(job_id, generation, first + n, when, seconds=1.0) for n, when in enumerate(at))


@pytest.mark.parametrize("is_gone_first", [True, False])
def test_what_a_node_did_that_is_gone_is_known_from_the_steps_that_others_report(
    running, context, clock, book, is_gone_first
):
    """The service was away; b died meanwhile, ten seconds before the end."""
    job_id, agent, other = running
    for each in (agent, other):
        each.sync(ranks=(each.rank(each.job_order(), step=1),), steps=made(job_id, 1, clock, first=1, count=1))
    clock.advance(40)
    rows = made(job_id, 1, clock, first=2, count=30, ended_s_ago=10)
    if is_gone_first:
        gone(context, clock, "b")
        assert book("b")[-1][2:] == ("lost", 40.0)
    agent.sync(ranks=(agent.rank(agent.job_order(), step=31),), steps=rows)
    if not is_gone_first:
        gone(context, clock, "b")
    assert [(cause, seconds) for *_, cause, seconds in book("b")[-2:]] == [("productive", 30.0), ("lost", 10.0)]
    assert sum(seconds for *_, cause, seconds in book("b") if cause == "lost") == 10.0


@pytest.mark.parametrize("is_gone_first", [True, False])
def test_nodes_of_worlds_that_came_and_went_without_the_service_are_accounted_by_what_others_pass_on(
    running, context, make_agent, grant, clock, book, client, is_gone_first
):
    """a and b train; then b and c; then c and d. Only c and d are left to tell, with all pauses."""
    job_id, a, b = running
    for each in (a, b):
        each.sync(ranks=(each.rank(each.job_order(), step=1),), steps=made(job_id, 1, clock, first=1, count=1))
    c, d = make_agent("c"), make_agent("d")
    for newcomer in (c, d):
        newcomer.sync()
        grant(job_id, newcomer.node_id)
    second, third = (roster(job_id, n, ParallelLayout(pp=2), *names) for n, names in ((2, "bc"), (3, "cd")))
    opened = clock()
    clock.advance(60)
    news = {
        "handoffs": (
            mirror(a.roster(), second, opened, measures=HandoffMeasures(pause_s=0.25)),
            mirror(second, third, opened, measures=HandoffMeasures(pause_s=0.5)),
        ),
        "steps": (
            *made(job_id, 1, clock, first=2, count=20, ended_s_ago=40),
            *made(job_id, 2, clock, first=22, count=20, ended_s_ago=20),
            *made(job_id, 3, clock, first=42, count=20),
        ),
    }
    if is_gone_first:
        for name in "ab":
            gone(context, clock, name)
    c.sync(**news)
    d.sync(steps=made(job_id, 3, clock, first=42, count=20))
    for each in (c, d):
        each.sync()
    if not is_gone_first:
        for name in "ab":
            gone(context, clock, name)
    assert [(cause, seconds) for *_, cause, seconds in book("a")[-2:]] == [("productive", 20.0), ("lost", 40.0)]
    of_b = {cause: sum(seconds for *_, kind, seconds in book("b") if kind == cause) for cause in ("pause", "lost")}
    assert of_b == {"pause": 0.25, "lost": 20.0}
    causes = client.get("/api/v1/ledger", params={"job_id": job_id}).json()["causes"]
    found = {item["cause"]: item["slot_seconds"] for item in causes}
    assert found["pause"] == 2 * 0.25 + 2 * 0.5


def test_no_step_and_no_pause_takes_time_from_before_its_job(client, context, make_agent, clock, book):
    agents = make_agent("a"), make_agent("b")
    for agent in agents:
        agent.sync()
    clock.advance(8)
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    for seconds in (0, 3):
        clock.advance(seconds)
        for agent in agents:
            agent.sync()
        jobs.tick(context)
    a, b = agents
    for agent in agents:
        agent.sync()
    long = step_row(job_id, 1, 1, clock(), seconds=7.5), step_row(job_id, 1, 2, clock(), seconds=1e9)
    (refusal,) = a.sync(ranks=(a.rank(a.job_order(), step=1),), steps=long).refusals
    assert refusal.reason == "seconds: nothing of the job took 1e+09 s, it was submitted 3 s ago"
    assert book("a")[0] == (0, 0, "idle", 8.0)
    second, measures = roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), HandoffMeasures(pause_s=7.5)
    b.sync(handoffs=(mirror(a.roster(), second, clock(), measures=measures),))
    assert book("b") == [(0, 0, "idle", 11.0)]
    with context.sessions() as session:
        due = [sum(lease.pauses_due.values()) for lease in session.scalars(select(LeaseRow)).all()]
    assert max(due) <= 3.0, "no later time pays for a pause that is longer than the start has lasted"


def test_a_started_world_has_worked_only_from_the_begin_of_its_first_step(running, clock, book):
    """Its ranks train from the first moment on, and their first step may take long."""
    job_id, agent, _ = running
    for after in (2, 3):
        clock.advance(after)
        agent.sync(ranks=(agent.rank(agent.job_order(), step=0),))
    assert {cause for *_, cause, _ in book("a")} <= {"idle", "bootstrap"}
    clock.advance(4)
    first = step_row(job_id, 1, 1, clock(), seconds=6.0)
    agent.sync(ranks=(agent.rank(agent.job_order(), step=1),), steps=(first,))
    assert sum(seconds for *_, cause, seconds in book("a") if cause == "productive") == 6.0


def test_the_lost_time_of_a_node_is_that_of_the_job_it_worked_for(running, context, clock, client):
    job_id, agent, _ = running
    agent.sync(ranks=(agent.rank(agent.job_order(), step=1),))
    clock.advance(40)
    gone(context, clock, "a")
    ledger = client.get("/api/v1/ledger", params={"job_id": job_id}).json()
    assert {item["cause"]: item["slot_seconds"] for item in ledger["causes"]}["lost"] == 40


def test_a_node_that_was_gone_and_comes_back_with_a_new_agent_has_no_lease_meanwhile(make_agent, context, clock, book):
    """Its machine may have been off."""
    make_agent("n").sync()
    clock.advance(5)
    gone(context, clock, "n")
    clock.advance(100)
    agent = make_agent("n")
    agent.sync()
    clock.advance(1)
    agent.sync()
    assert book("n") == [(0, 0, "lost", 5.0), (1, 0, "idle", 1.0)]


def test_a_pause_that_is_measured_longer_later_is_charged_in_full(running, clock, client):
    job_id, agent, other = running
    for step in (1, 2):
        clock.advance(5)
        for each in (agent, other):
            each.sync(ranks=(each.rank(each.job_order(), step=step),))
    target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
    first = mirror(agent.roster(), target, clock(), mirror_seq=1, measures=HandoffMeasures(pause_s=0.5))
    for seq, pause_s in ((1, 0.5), (2, 2.0), (3, 2.0)):
        agent.sync(
            handoffs=(first.model_copy(update={"mirror_seq": seq, "measures": HandoffMeasures(pause_s=pause_s)}),)
        )
    causes = client.get("/api/v1/ledger", params={"job_id": job_id}).json()["causes"]
    assert {item["cause"]: item["slot_seconds"] for item in causes}["pause"] == 2 * 2.0


def test_a_pause_is_charged_in_full_to_a_newcomer_that_has_not_reported_yet(running, make_agent, grant, client, clock):
    job_id, agent, other = running
    newcomer = make_agent("c")
    newcomer.sync()
    grant(job_id, "c")
    clock.advance(5)
    for each in (agent, other):
        each.sync(ranks=(each.rank(each.job_order(), step=1),))
    target = roster(job_id, 2, ParallelLayout(pp=3), "a", "b", "c")
    other.sync(handoffs=(mirror(other.roster(), target, clock(), measures=HandoffMeasures(pause_s=0.75)),))
    newcomer.sync()
    newcomer.sync(ranks=(newcomer.rank(newcomer.job_order(), step=1),))
    clock.advance(4)
    newcomer.sync(ranks=(newcomer.rank(newcomer.job_order(), step=2),))
    causes = client.get("/api/v1/ledger", params={"job_id": job_id}).json()["causes"]
    assert {item["cause"]: item["slot_seconds"] for item in causes}["pause"] == pytest.approx(3 * 0.75)


def test_steps_of_a_world_that_the_service_learns_of_later_count_once_it_does(running, clock, book, grant, make_agent):
    """The agents handed over without the service: the node that reports first knows nothing of how."""
    job_id, agent, other = running
    for each in (agent, other):
        each.sync(ranks=(each.rank(each.job_order(), step=1),))
    source = agent.roster()
    clock.advance(10)
    target = roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
    rank = agent.rank(agent.job_order(), step=12, generation=2)
    steps = tuple(step_row(job_id, 2, 2 + n, clock() - timedelta(seconds=10 - n)) for n in range(1, 11))
    agent.sync(ranks=(rank,), steps=steps)
    assert book("a")[-1][2:] == ("bootstrap", 10.0)
    other.sync(handoffs=(mirror(source, target, clock()),))
    assert [cause for _, _, cause, _ in book("a")][-2:] == ["bootstrap", "productive"]
    assert book("a")[-1][3] == 9.5


def test_each_machine_has_its_request_and_its_leases(make_agent, client, clock, context):
    agent = make_agent("n", slots=2)
    agent.sync()
    clock.advance(1)
    make_agent("n", slots=1).sync()
    found = client.get("/api/v1/instances", params={"node_id": "n"}).json()
    assert len(found) == 1 and found[0]["request"]["machines"] == 1
    assert (found[0]["provider"], found[0]["provider_id"], found[0]["paid_from"]) == ("aws", None, None)
    leases = client.get("/api/v1/leases", params={"node_id": "n"}).json()
    assert [lease["instance_id"] for lease in leases] == [found[0]["instance_id"]] * 2
    gone(context, clock, "n")
    stranger = make_agent("n")
    stranger.token = client.post(
        "/agent/v1/join", json={"node_id": "n", "secret": "f" * 64}, headers=stranger.join
    ).json()["token"]
    stranger.sync()
    again = client.get("/api/v1/instances", params={"node_id": "n"}).json()
    assert [item["released_at"] is None for item in again] == [True, False]


def test_the_paid_time_in_which_a_machine_boots_is_in_the_ledger(make_agent, client, context, clock, book):
    """A provider will say from when on it is paid; what people start does not."""
    agent = make_agent("n")
    agent.sync()
    gone(context, clock, "n")
    with context.sessions.begin() as session:
        before = session.scalars(select(InstanceRow)).one()
        before.released_at = clock()
        ordered = InstanceRow(
            request_id=before.request_id, provider="aws", provider_id="i-1", node_id="n", pool="spot-a",
            known_since=clock(), paid_from=clock(),
        )  # fmt: skip
        session.flush()
        session.add(ordered)
    clock.advance(90)
    agent = make_agent("n")
    agent.sync()
    clock.advance(1)
    agent.sync()
    assert book("n") == [(1, 0, "bootstrap", 90.0), (1, 0, "idle", 1.0)]
