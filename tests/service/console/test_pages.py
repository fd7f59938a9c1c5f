"""What the pages of the console read: one job through a notice, a handoff and a loss, and figures that agree."""

import asyncio
import json
from datetime import timedelta

import pytest
from sqlalchemy import event

from agent.protocol.sync import HandoffMeasures, LogChunk
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage
from liver_core.layout import ParallelLayout
from service.events.feed import Feed
from service.events.queries import Seen, look
from service.jobs.tables import JobRow, JobStepRow
from service.reconcilers import jobs
from service.tokens.operations import Caller
from service.tokens.tables import Role
from tests.service.fake_agent import JOB, mirror, roster, step_row

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1\n    boom\nRuntimeError: boom\nmore\n'


@pytest.fixture
def story(client, context, make_agent, clock):
    """Four nodes train; b is announced to go; its job is handed over to the other three; then one more is heard of."""
    price = {"price_usd_per_hour": 3.6, "on_demand_usd_per_hour": 10.8, "egress_usd_per_gb": 0.5}
    client.put("/api/v1/pools/spot-a/price", json=price)
    agents = {name: make_agent(name) for name in "abcd"}
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]

    def round_(**parts) -> None:
        for name, agent in agents.items():
            agent.sync(**parts.get(name, {}))
        clock.advance(1)
        jobs.tick(context)

    def trains(step: int) -> dict:
        order = agents["a"].job_order()
        generation = order.roster.generation
        made = {}
        for name in order.roster.node_ids():
            rank = agents[name].rank(agents[name].job_order(), stage=RankStage.TRAINING, step=step)
            rows = tuple(step_row(job_id, generation, n, clock(), loss=5.0 / n, tokens=1_000) for n in (step - 1, step))
            made[name] = {"ranks": (rank,), "steps": rows if name == "a" else ()}
        return made

    round_()
    clock.advance(3)
    jobs.tick(context)
    round_()
    for step in (2, 4):
        round_(**trains(step))
    notice = agents["b"].notice(deadline_s=120)
    parts = trains(6)
    parts["b"]["notices"] = (notice,)
    round_(**parts)
    source = agents["a"].roster()
    target = roster(job_id, source.generation + 1, ParallelLayout(pp=3), "a", "c", "d")
    opened = mirror(source, target, clock(), leaving=("b",), state=HandoffState.STREAMING)
    round_(a={"handoffs": (opened,)})
    return {"job_id": job_id, "agents": agents, "round": round_, "trains": trains, "opened": opened, "notice": notice}


def complete(story, clock) -> None:
    measures = HandoffMeasures(
        phases_s={"plan": 0.1, "stream": 1.5, "to_ready": 2.0, "to_boundary": 0.25, "to_active": 0.5},
        pause_s=0.4, bytes_moved=2_000_000_000, notice_to_safe_s=3.0, cutover_step=6, certificate="same",
    )  # fmt: skip
    done = story["opened"].model_copy(
        update={"state": HandoffState.ACTIVE, "mirror_seq": 5, "changed_utc": clock(), "measures": measures}
    )
    story["round"](a={"handoffs": (done,)})


def test_the_pages_follow_one_notice_from_its_first_word_to_its_bill(client, story, clock):
    job_id = story["job_id"]
    fleet = client.get("/api/v1/fleet").json()
    [pending], [pool] = fleet["pending"], fleet["pools"]
    assert (pending["node_id"], pending["jobs"], pending["handoff_state"]) == ("b", [job_id], "streaming")
    assert fleet["usd_per_hour"] == pytest.approx(4 * 3.6) and pool["leaving"] == 1 and pool["busy"] == 4
    assert pool["interruptions"] == [0] * 47 + [1] and pool["unannounced"] == [0] * 48
    outlook = client.get(f"/api/v1/jobs/{job_id}/outlook").json()
    assert outlook["level"] == "busy" and outlook["now"].startswith("Training in TP2xPP2xDP1 on 4 nodes, step 6 of")
    assert "b goes in" in outlook["next"] and "The handoff to PP3" in outlook["next"].replace("TP1x", "")
    number = pending["incident_id"]
    assert outlook["incident_ids"] == [number]
    assert client.get(f"/api/v1/incidents/{number}").json()["outcome"] == "moving"

    complete(story, clock)
    incident = client.get(f"/api/v1/incidents/{number}").json()
    assert (incident["outcome"], incident["pause_s"], incident["lost_steps"]) == ("moved", 0.4, 0)
    assert incident["notice_to_safe_s"] == 3.0 and [item["source"] for item in incident["channels"]] == ["aws-imds"]
    # Three slots of a node at 3.6 dollars an hour stand for 0.4 s; two gigabytes at half a dollar.
    assert incident["costs"]["pause"] == pytest.approx(3 * 0.4 * 0.001)
    assert incident["dollars"] == pytest.approx(3 * 0.4 * 0.001 + 1.0)
    [answer] = incident["handoffs"]
    bars = {bar["name"]: bar for bar in answer["waterfall"]["bars"]}
    assert bars["to_boundary"]["starts_s"] == pytest.approx(bars["to_ready"]["starts_s"] + 2.0)
    assert answer["waterfall"]["critical_path"][-3:] == ["stream", "to_boundary", "to_active"]
    path = f"/api/v1/handoffs/{answer['handoff']['handoff_id']}/waterfall"
    assert client.get(path).json() == answer["waterfall"]
    summary = client.get("/api/v1/incidents", params={"job_id": job_id}).json()
    assert [item["incident_id"] for item in summary] == [number]
    assert {key: incident[key] for key in summary[0]} == summary[0]
    assert client.get("/api/v1/incidents", params={"job_id": "other"}).json() == []
    assert client.get("/api/v1/incidents/999").status_code == 404


@pytest.mark.thorough
def test_an_incident_keeps_what_it_did_when_its_notice_is_withdrawn_later(client, story, clock):
    complete(story, clock)
    before = client.get("/api/v1/incidents/1").json()
    for step in (8, 10):
        story["round"](**story["trains"](step))
    story["round"](b={"notices": (story["notice"].model_copy(update={"withdrawn_utc": clock()}),)})
    after = client.get("/api/v1/incidents/1").json()
    kept = ("jobs", "outcome", "handoff_ids", "pause_s", "bytes_moved", "dollars", "notice_to_safe_s", "decisions")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept} and after["jobs"]
    assert after["outcome_reason"] == before["outcome_reason"] + "; the notice was withdrawn later"
    assert after["withdrawn_at"] and not after["open"]


@pytest.mark.thorough
def test_what_is_done_after_a_notice_is_withdrawn_belongs_to_the_next_one(client, story, clock):
    agents, round_ = story["agents"], story["round"]
    ended = {"state": HandoffState.ABORTED, "mirror_seq": 5, "changed_utc": clock()}
    round_(a={"handoffs": (story["opened"].model_copy(update=ended),)})
    round_(b={"notices": (story["notice"].model_copy(update={"withdrawn_utc": clock()}),)})
    clock.advance(20)
    round_(b={"notices": (agents["b"].notice(),)})
    source = agents["a"].roster()
    target = roster(story["job_id"], source.generation + 2, ParallelLayout(pp=3), "a", "c", "d")
    second = mirror(source, target, clock(), leaving=("b",), measures=HandoffMeasures(pause_s=0.4))
    round_(a={"handoffs": (second,)})
    newer, older = client.get("/api/v1/incidents").json()
    assert (newer["outcome"], newer["pause_s"]) == ("moved", 0.4)
    assert (older["outcome"], older["pause_s"], older["jobs"]) == ("withdrawn", None, [story["job_id"]])


def test_the_course_of_a_job_adds_up_to_its_bill(client, story, clock):
    complete(story, clock)
    for step in (8, 10):
        story["round"](**story["trains"](step))
    job_id = story["job_id"]
    ledger = client.get("/api/v1/ledger", params={"job_id": job_id}).json()
    assert ledger["saved_dollars"] == pytest.approx(2 * ledger["dollars"])
    assert ledger["interruptions_dollars"] >= 1.0 and ledger["saved_unknown_slot_seconds"] == 0
    [mine] = client.get("/api/v1/ledger/jobs").json()
    assert {key: mine[key] for key in ledger} == ledger and mine["name"] == JOB["name"]
    course = client.get(f"/api/v1/jobs/{job_id}/timeline").json()
    spent: dict[str, float] = {}
    for bucket in course["buckets"]:
        for cause, seconds in bucket["slot_seconds"].items():
            spent[cause] = spent.get(cause, 0.0) + seconds
    assert spent == pytest.approx({item["cause"]: item["slot_seconds"] for item in ledger["causes"]})
    assert course["buckets"][-1]["dollars_until"] == pytest.approx(ledger["dollars"])
    assert [point["step"] for point in course["points"]][-1] == 10 and course["points"][-1]["loss"] == 0.5
    assert course["points"][-1]["tokens_per_s"] == pytest.approx(2_000)
    kinds = [(mark["kind"], mark["state"]) for mark in course["marks"]]
    assert kinds == [("start", "active"), ("handoff", "active")]
    assert course["marks"][1]["incident_id"] == client.get("/api/v1/incidents").json()[0]["incident_id"]
    thin = client.get(f"/api/v1/jobs/{job_id}/timeline", params={"points": 2}).json()
    assert len(thin["points"]) <= 2 and thin["thinned"]
    # By the hour, with the same sums.
    long = {"since": (clock() - timedelta(hours=9)).isoformat(), "until": (clock() + timedelta(hours=1)).isoformat()}
    hours = client.get(f"/api/v1/jobs/{job_id}/timeline", params=long).json()["buckets"]
    assert hours[-1]["dollars_until"] == pytest.approx(ledger["dollars"])
    wrong = {"since": long["until"], "until": long["since"]}
    assert client.get(f"/api/v1/jobs/{job_id}/timeline", params=wrong).status_code == 422


def test_ranks_stand_on_their_nodes_with_what_happens_if_one_goes(client, story, clock):
    job_id = story["job_id"]
    shown = client.get(f"/api/v1/jobs/{job_id}/ranks").json()
    dense = {"ep": None, "etp": None, "edp": None}
    assert shown["sizes"] == {"tp": 2, "pp": 2, "cp": 1, "dp": 1} | dense
    assert [rank["coordinates"] for rank in shown["ranks"]][3] == {"tp": 1, "pp": 1, "cp": 0, "dp": 0} | dense
    assert {rank["experts"] for rank in shown["ranks"]} == {None}
    leaving = [node for node in shown["nodes"] if node["leaving"]]
    assert [node["node_id"] for node in leaving] == ["b"] and leaving[0]["incident_id"]
    assert sorted(rank for node in shown["nodes"] for rank in node["ranks"]) == [0, 1, 2, 3]


def test_the_first_error_of_all_ranks_is_found_with_what_followed(client, story):
    job_id = story["job_id"]
    path = f"/api/v1/jobs/{job_id}/first-error"
    assert client.get(path).json()["line"] is None
    texts = {"c": "all is well, no error here\n" + TRACE[:40], "a": "ValueError: later\n"}
    for name, text in texts.items():
        rank = next(n for n, m in enumerate(story["agents"]["a"].roster().members) if m.node_id == name)
        pieces = (LogChunk(job_id=job_id, generation=1, rank=rank, offset=0, text=text),)
        if name == "c":
            pieces += (LogChunk(job_id=job_id, generation=1, rank=rank, offset=len(text), text=TRACE[40:]),)
        story["agents"][name].sync(logs=pieces)
    found = client.get(path).json()
    assert (found["node_id"], found["generation"], found["line"]) == ("c", 1, "RuntimeError: boom")
    assert found["excerpt"][0].startswith("Traceback") and client.get(f"{path}?generation=9").json()["line"] is None


@pytest.mark.thorough
def test_a_page_of_incidents_takes_as_many_statements_as_one(client, story, clock, context):
    for _ in range(3):
        clock.advance(400)
        story["round"](**{name: {"notices": (story["agents"][name].notice(),)} for name in "cd"})
    seen: list[str] = []

    def count(_connection, _cursor, statement, *_) -> None:
        seen.append(statement)

    event.listen(context.database.engine, "before_cursor_execute", count)
    numbers = []
    for limit in (2, 9):
        seen.clear()
        assert len(client.get(f"/api/v1/incidents?limit={limit}").json()) >= 2
        numbers.append(len(seen))
    event.remove(context.database.engine, "before_cursor_execute", count)
    assert numbers[1] <= numbers[0] + 1, seen


def numbers(client, **query) -> list[int]:
    """Of all pages."""
    found, path = [], "/api/v1/incidents"
    while path:
        answer = client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        found += [item["incident_id"] for item in answer.json()]
        link, query = answer.headers.get("Link", ""), None
        path = link.partition(">")[0].removeprefix("<")
    return found


@pytest.mark.thorough
def test_incidents_are_listed_by_whether_they_have_failed_and_whether_they_count(client, story, clock, monkeypatch):
    """Every one stands in exactly one half, in whatever pages they are read, also where a page judges only a few."""
    agents = story["agents"]
    aborted = story["opened"].model_copy(
        update={"state": HandoffState.ABORTED, "mirror_seq": 5, "changed_utc": clock()}
    )
    story["round"](a={"handoffs": (aborted,)})
    clock.advance(200)
    for _ in range(8):
        # Rebalance advice: it takes no node, and is over after a while.
        clock.advance(1_000)
        story["round"](**{name: {"notices": (agents[name].notice(),)} for name in "cd"})
    everything = client.get("/api/v1/incidents", params={"limit": 1_000}).json()
    failed = [item["incident_id"] for item in everything if item["outcome"] in ("failed", "restarted")]
    count = [item["incident_id"] for item in everything if item["open"]]
    all_ = [item["incident_id"] for item in everything]
    assert failed and count and len(failed) < len(all_) and len(count) < len(all_), everything
    monkeypatch.setattr("service.paging.BATCH_ROWS", 3)
    monkeypatch.setattr("service.incidents.queries.EXAMINED_MAX", 6)
    for limit in (1, 2, 5, 1_000):
        assert numbers(client, failed=True, limit=limit) == failed
        assert numbers(client, failed=False, limit=limit) == [each for each in all_ if each not in failed]
        assert numbers(client, open=True, limit=limit) == count
        assert numbers(client, open=False, limit=limit) == [each for each in all_ if each not in count]
        both = [each for each in failed if each in count]
        assert numbers(client, failed=True, open=True, limit=limit) == both
    assert client.get("/api/v1/incidents", params={"failed": "perhaps"}).status_code == 422


def test_a_stream_says_what_changes_and_goes_on_where_it_was_cut(context, story, clock):
    """The feed itself, in a loop of its own; looks are made by hand."""
    caller = Caller("abc", Role.VIEWER, "somebody")

    async def play() -> None:
        feed = Feed(context)

        async def looked() -> list[tuple[str, str, str | None]]:
            found = await asyncio.to_thread(feed._look, {story["job_id"]: 1})
            for item in found:
                feed.ring.add(*item)
            return found

        async with feed.subscribed(caller, [story["job_id"]], None) as stream:
            assert feed._looking is not None
            feed._looking.cancel()
            assert not stream.resumed and await looked() == []
            await asyncio.to_thread(complete, story, clock)
            await asyncio.to_thread(lambda: story["round"](**story["trains"](8)))
            names = [item[0] for item in await looked()]
            assert {"jobs", "handoffs", "steps"} <= set(names)
            events = {said.name: json.loads(said.data) for _, said in stream.next()}
            assert events["handoffs"]["handoffs"][0]["state"] == "active"
            assert events["jobs"]["jobs"][0]["last_step"] == 8
            assert [step["step"] for step in events["steps"]["steps"]][-1] == 8
            last_id = stream.id
            assert stream.next() == [] and not stream.missed()
            await asyncio.to_thread(lambda: story["round"](**story["trains"](10)))
            await looked()
            async with feed.subscribed(caller, [], last_id) as again:
                assert again.resumed
                seen = [said.name for _, said in again.next()]
                assert "jobs" in seen and "steps" not in seen
            for wrong in ("", "x", "other-1", f"{last_id}9", last_id.replace("-", "-x")):
                async with feed.subscribed(caller, [], wrong) as other:
                    assert not other.resumed

    asyncio.run(play())


def test_steps_that_end_at_the_same_time_are_said_in_their_order(client, context, clock):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    seen, said = Seen(), []
    with context.sessions.begin() as session:
        look(session, seen, {job_id: 1}, lambda *item: said.append(item), now=clock())
        ended = clock() + timedelta(seconds=1)
        for step in (3, 1, 2):
            session.add(JobStepRow(job_id=job_id, generation=1, step=step, seconds=1.0, finished_at=ended))
            session.flush()
        look(session, seen, {job_id: 1}, lambda *item: said.append(item), now=ended)
    [steps] = [data for name, data, _ in said if name == "steps"]
    assert [step.step for step in steps.steps] == [1, 2, 3]


def test_a_change_of_a_job_says_the_same_of_it_as_its_page(client, context, clock):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    seen, said = Seen(), []
    with context.sessions.begin() as session:
        look(session, seen, {}, lambda *item: said.append(item), now=clock())
        job = session.get_one(JobRow, job_id)
        job.no_orders_because, job.warning = "no slot is left", "a checkpoint failed"
        session.flush()
        look(session, seen, {}, lambda *item: said.append(item), now=clock())
    [brief] = [data.jobs[0].model_dump(mode="json") for name, data, _ in said if name == "jobs"]
    page = client.get(f"/api/v1/jobs/{job_id}").json()
    assert "no slot is left" in brief["reason"] and brief["warning"] == "a checkpoint failed"
    assert all(brief[name] == page[name] for name in brief.keys() & page.keys())


def test_the_outcome_of_what_nobody_needed_to_answer_is_said(client, context, make_agent, clock):
    agent = make_agent("lone")
    agent.sync(notices=(agent.notice(deadline_s=30),))
    [item] = client.get("/api/v1/incidents").json()
    assert (item["outcome"], item["outcome_reason"]) == ("nothing", "no job was on the node")
    assert (item["dollars"], item["pause_s"]) == (0.0, None)
    withdrawn = replace_withdrawn(agent, clock)
    agent.sync(notices=(withdrawn,))
    assert client.get("/api/v1/incidents").json()[0]["outcome"] == "withdrawn"


def replace_withdrawn(agent, clock):
    return agent.notice(deadline_s=30).model_copy(update={"withdrawn_utc": clock()})
