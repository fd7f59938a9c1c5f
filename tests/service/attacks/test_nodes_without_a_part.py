"""What a node tries that holds a token of its own and has no part in a job, no longer one, or only waits as a spare:
nothing of the job changes, nothing of it is shown, and the audit log names the node."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from uuid import uuid4

import pytest

from agent.protocol.joining import JOIN_PATH, JoinRequest
from agent.protocol.sync import (
    CheckpointFact,
    HandoffDeclined,
    JobFinished,
    LogChunk,
    NodeAnswers,
    NoticeFact,
    NoticeKind,
    RankStatus,
    StoreHosted,
)
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage, Reason
from liver_core.layout import ParallelLayout
from service.jobs.grants import GRACE_S
from service.jobs.rules import AHEAD_BY_OTHERS_S
from service.reconcilers import jobs, upkeep
from service.reconcilers.nodes import NodeWatch
from service.sync.held import HELD_FOR_S
from tests.service.conftest import bearer
from tests.service.fake_agent import mirror, roster, step_row
from tests.tiers import sample

ONE = ParallelLayout()


def rank_of(job_id, generation, rank, **more):
    return RankStatus(job_id=job_id, generation=generation, rank=rank, slot=0, pid=7, **more)


def lies(me, job_id, active, world, at):
    """Parts of reports by what each is meant to do. `active`: the job's generation; `world`: its roster."""
    own_world = roster(job_id, active + 1, ONE, me)
    beyond = roster(job_id, active + 5, world.layout, me, *world.node_ids()[1:])
    bye = Reason("bye", "training")
    checkpoint = {"job_id": job_id, "generation": active, "finished_utc": at}
    return {
        "end the job": {"finished": (JobFinished(job_id=job_id, generation=active, step=5, failed=bye),)},
        "finish the job": {"finished": (JobFinished(job_id=job_id, generation=active, step=1000),)},
        "end its next world": {"finished": (JobFinished(job_id=job_id, generation=active + 1, step=5, failed=bye),)},
        "replace the checkpoint": {"checkpoints": (CheckpointFact(**checkpoint, step=999, path="/checkpoints/x"),)},
        "another place": {"checkpoints": (CheckpointFact(**checkpoint, step=9, path="/evil/pickle"),)},
        "climb out": {"checkpoints": (CheckpointFact(**checkpoint, step=9, path="/checkpoints/../evil"),)},
        "move the store": {"stores": (StoreHosted(job_id=job_id, generation=active, host="6.6.6.6", port=6),)},
        "fail a rank": {"ranks": (rank_of(job_id, active, 0, stage=RankStage.FAILED, reason=bye),)},
        "train a rank": {"ranks": (rank_of(job_id, active, 0, stage=RankStage.TRAINING, step=900),)},
        "write steps": {"steps": (step_row(job_id, active, 900, at, loss=0.1),)},
        "write steps of a world to come": {"steps": (step_row(job_id, active + 3, 900, at, loss=0.1),)},
        "write logs": {"logs": (LogChunk(job_id=job_id, generation=active, rank=0, offset=0, text="lies"),)},
        "take the job": {"handoffs": (mirror(world, own_world, at, proposer=me),)},
        "take the job from a world of its own": {
            "handoffs": (mirror(beyond, roster(job_id, active + 6, ONE, me), at),)
        },
        "break the world": {"handoffs": (mirror(world, own_world, at, proposer=me, state=HandoffState.BROKEN),)},
        "open a handoff": {"handoffs": (mirror(world, own_world, at, proposer=me, state=HandoffState.PREPARING),)},
        "decline": {"declined": (HandoffDeclined(handoff_id=uuid4(), job_id=job_id, reason="no"),)},
        "answer for another": {"answering": (NodeAnswers(job_id=job_id, node_id=world.node_ids()[0]),)},
        "announce the end of another": {
            "notices": (
                NoticeFact(
                    node_id=world.node_ids()[0],
                    kind=NoticeKind.INTERRUPTION,
                    source="aws-imds",
                    deadline_utc=at + timedelta(seconds=30),
                    first_seen_utc=at,
                ),
            )
        },
    }


_SAMPLE = roster("demo-1", 1, ParallelLayout(pp=2), "a", "b")
LIES = sorted(lies("x", "demo-1", 1, _SAMPLE, datetime(2026, 1, 1, tzinfo=UTC)))
NOT_REFUSED = {"answer for another", "decline", "end its next world", "write steps of a world to come"}
"""Nothing is done on the word of this node: it waits for others, or is heard from members only."""


@pytest.fixture
def victims(running, clock):
    """The job's members, which go on reporting while they are attacked."""
    job_id, a, b = running

    def report(**more):
        for agent in (a, b):
            agent.sync(ranks=(agent.rank(agent.job_order(), step=3),), **more)

    clock.advance(1)
    report(steps=(step_row(job_id, 1, 3, clock(), loss=2.0),))
    return job_id, a, b, report


def seen(client, job_id, *agents):
    """What people and members see of the job, without times."""
    job = client.get(f"/api/v1/jobs/{job_id}").json()
    steps = client.get(f"/api/v1/jobs/{job_id}/steps").json()
    logs = client.get(f"/api/v1/jobs/{job_id}/logs").json()
    handoffs = client.get("/api/v1/handoffs").json()
    notices = client.get("/api/v1/notices").json()
    told = [
        agent.job_order().model_dump(exclude={"reason", "lost_after_s", "next_generation", "standing_plans"})
        for agent in agents
    ]
    parts = "state", "reason", "active_generation", "layout", "checkpoints", "last_step", "ranks", "lost_steps"
    return {part: job.get(part) for part in parts}, steps, logs, handoffs, notices, told


def audited(client, settings, name):
    rows = client.get("/api/v1/audit", headers=bearer(settings, "admin")).json()
    return [row for row in rows if row["action"] == "sync" and row["actor"] == name]


@pytest.mark.parametrize("aim", sample(LIES, *LIES[0::3]))
def test_a_stranger_changes_and_learns_nothing(victims, make_agent, client, settings, clock, aim):
    job_id, a, b, report = victims
    report()
    stranger = make_agent("stranger", pool="elsewhere")
    stranger.sync()
    before = seen(client, job_id, a, b)
    parts = lies("stranger", job_id, 1, a.roster(), clock())[aim]
    said = stranger.report(**parts)
    for answer in (stranger.post(said), stranger.post(said)):
        assert answer.status_code == 200, answer.text
        orders = answer.json()
        assert orders["jobs"] == []
        assert a.job_order().peer_key not in answer.text
    assert orders["refusals"] or aim == "announce the end of another", aim
    report()
    assert seen(client, job_id, a, b) == before
    assert audited(client, settings, "node stranger"), aim


@pytest.mark.parametrize("aim", sample(LIES, *LIES[1::3]))
def test_a_spare_changes_nothing(victims, make_agent, grant, client, context, settings, clock, aim):
    job_id, a, b, report = victims
    spare = make_agent("spare")
    spare.sync()
    grant(job_id, "spare")
    report()
    before = seen(client, job_id, a, b)
    spare.sync(**lies("spare", job_id, 1, a.roster(), clock())[aim])
    report()
    assert seen(client, job_id, a, b) == before
    clock.advance(HELD_FOR_S + 1)
    for agent in (spare, a, b):
        agent.sync()
    report()
    upkeep.tick(context)
    spare.sync()
    report()
    assert seen(client, job_id, a, b)[:3] == before[:3]
    if aim not in NOT_REFUSED:
        assert audited(client, settings, "node spare"), aim


@pytest.mark.parametrize("fails", sample(["one rank", "all ranks"], "one rank"))
def test_a_spare_that_says_it_trains_already_keeps_no_job_from_its_restart(
    victims, make_agent, grant, client, context, clock, fails
):
    job_id, a, b, _ = victims
    spare = make_agent("spare")
    spare.sync()
    grant(job_id, "spare")
    error = {"stage": RankStage.FAILED, "reason": Reason("ValueError: x", "training")}
    for _ in range(1 if fails == "one rank" else int(AHEAD_BY_OTHERS_S) + 5):
        clock.advance(1)
        spare.sync(ranks=(rank_of(job_id, 4, 0, stage=RankStage.TRAINING, step=900),))
        a.sync(ranks=(a.rank(a.job_order(), step=3, **error),))
        b.sync(ranks=(b.rank(b.job_order(), step=3, **(error if fails == "all ranks" else {})),))
    for _ in range(3):
        jobs.tick(context)
        clock.advance(1)
    job = client.get(f"/api/v1/jobs/{job_id}").json()
    assert job["state"] == "starting" and job["active_generation"] > 1, job["reason"]


@pytest.fixture
def moved_on(victims, make_agent, grant, clock):
    """The job has gone from nodes a and b to b and c: a is a former member."""
    job_id, a, b, _ = victims
    c = make_agent("c")
    c.sync()
    grant(job_id, "c")
    target = roster(job_id, 2, ParallelLayout(pp=2), "b", "c")
    assert a.sync(handoffs=(mirror(a.roster(), target, clock()),)).refusals == ()
    clock.advance(1)

    def report(**more):
        for agent in (b, c):
            agent.sync()
            agent.sync(ranks=(agent.rank(agent.job_order(), step=4),), **more)

    report(steps=(step_row(job_id, 2, 4, clock(), loss=2.0),))
    return job_id, a, b, c, report


@pytest.mark.parametrize("later_s", sample([1, GRACE_S + 1], GRACE_S + 1))
@pytest.mark.parametrize("aim", sample(LIES, *LIES[2::3]))
def test_a_former_member_changes_nothing(moved_on, client, settings, clock, aim, later_s):
    job_id, former, b, c, report = moved_on
    clock.advance(later_s)
    for agent in (former, b, c):
        agent.sync()
    report()
    before = seen(client, job_id, b, c)
    orders = former.sync(**lies("a", job_id, 2, b.roster(), clock())[aim])
    if later_s > GRACE_S:
        assert orders.jobs == ()
    report()
    assert seen(client, job_id, b, c) == before
    if aim not in NOT_REFUSED or later_s > GRACE_S:
        assert audited(client, settings, "node a"), aim


def test_a_former_member_may_still_report_its_last_steps_for_a_while(moved_on, client, clock):
    job_id, former, *_ = moved_on
    last = LogChunk(job_id=job_id, generation=1, rank=0, offset=0, text="bye")
    assert former.sync(steps=(step_row(job_id, 1, 4, clock(), loss=2.0),), logs=(last,)).refusals == ()
    assert "bye" in client.get(f"/api/v1/jobs/{job_id}/logs").text
    clock.advance(GRACE_S + 1)
    refusals = former.sync(steps=(step_row(job_id, 1, 5, clock(), loss=2.0),)).refusals
    assert [(item.part, item.key) for item in refusals] == [("jobs", job_id)]


def test_a_member_speaks_for_no_other_rank(victims, client, settings, clock):
    job_id, a, b, report = victims
    report()
    before = seen(client, job_id, a, b)
    for parts in (
        {"ranks": (rank_of(job_id, 1, 1, stage=RankStage.FAILED, reason=Reason("bye", "training")),)},
        {"logs": (LogChunk(job_id=job_id, generation=1, rank=1, offset=0, text="lies"),)},
    ):
        assert [item.part for item in a.sync(**parts).refusals] == list(parts)
    report()
    assert seen(client, job_id, a, b) == before
    assert {row["detail"]["part"] for row in audited(client, settings, "node a")} == {"ranks", "logs"}


@pytest.mark.thorough
def test_another_machine_of_the_name_takes_over_no_part(moved_on, make_agent, client, context, settings, clock):
    job_id, former, _, _, report = moved_on
    watch = NodeWatch(context)
    for _ in range(20):
        clock.advance(settings.stuck_after_s / 12)
        report()
        watch.tick()
    assert client.get("/api/v1/nodes/a").json()["state"] == "gone"
    wanted = JoinRequest(node_id="a", secret=sha256(b"another machine").hexdigest())
    answer = client.post(JOIN_PATH, json=wanted.model_dump(), headers=former.join)
    assert answer.status_code == 201, answer.text
    newcomer = make_agent("a")
    newcomer.token = answer.json()["token"]
    orders = newcomer.sync(ranks=(rank_of(job_id, 1, 0, stage=RankStage.TRAINING),))
    assert orders.jobs == () and orders.refusals[0].key == job_id


def test_the_same_overstep_stands_in_the_audit_log_once_an_hour(victims, make_agent, client, settings, clock):
    job_id, *_ = victims
    stranger = make_agent("stranger", pool="elsewhere")
    for _ in range(3):
        stranger.sync(steps=(step_row(job_id, 1, 4, clock()),))
    assert len(audited(client, settings, "node stranger")) == 1
    clock.advance(3601)
    stranger.sync(steps=(step_row(job_id, 1, 4, clock()),))
    assert len(audited(client, settings, "node stranger")) == 2
