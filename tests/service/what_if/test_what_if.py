"""What a job would have done, over the API: whose job, which trace, what is refused and how, and who waits for whom."""

import asyncio
import json

import pytest

from agent.protocol.jobfile_check import check_job_file
from service.problems import ProblemError
from service.simulation.traces import TraceFormat
from service.simulation.what_if import WhatIf, by_own_policy
from service.what_if.replaying import Replays
from service.what_if.rules import Question
from service.what_if.schemas import WhatIfKnobs
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB
from tests.tiers import sample

PATH = "/api/v1/what-if"
TRACE = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n600000,remove,b\n1200000,add,e\n1800000,remove,a\n"
JOB_FILE = json.dumps(JOB)


def ask(client, **more):
    given = {"job_file": JOB_FILE, "trace": {"name": "p3", "text": TRACE}} | more
    return client.post(PATH, json={name: value for name, value in given.items() if value is not None})


def refused(answer) -> list[tuple[str, str]]:
    assert answer.status_code == 422, answer.text
    return [(item["field"], item["rule"]) for item in answer.json()["errors"]]


def test_every_policy_is_answered_with_causes_that_sum_to_the_gap_and_a_curve_that_ends_with_its_tokens(client):
    answer = ask(client, knobs={"change_s": 2.0, "slots_per_node": 1})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [run["policy"] for run in found["policies"]] == ["liver", "hold_all", "reactive", "checkpoint_restart"]
    assert (found["trace"], found["nodes_most"], found["lost_s"], found["lost_s_source"]) == (
        "p3",
        4,
        2.0,
        "the request",
    )
    for run in found["policies"]:
        assert sum(run["tokens_lost_by"].values()) == pytest.approx(found["ideal_tokens"] - run["tokens"], rel=1e-6)
        assert run["curve"][-1]["tokens"] == pytest.approx(run["tokens"]) and len(run["curve"]) <= 500
        assert run["curve"][-1]["at_s"] == pytest.approx(found["hours"] * 3_600)
        assert all(point["used"] <= point["held"] <= point["offered"] for point in run["curve"])
    ours = found["policies"][0]
    assert 0 < ours["goodput"] < 1 and sum(ours["decisions"].values()) > 0 and not found["lost_s_is_guess"]


@pytest.mark.thorough
def test_the_machines_can_be_asked_to_carry_every_change_and_what_they_did_is_told(client):
    """A notice of 1 s is too short for them; at once, each change is taken to go through."""
    asked = {"job_file": json.dumps(JOB | {"prefer": "total"}), "knobs": {"change_s": 2.0, "notice_s": 1.0}}
    at_once, by_machines = (ask(client, **asked, machines=machines).json() for machines in (False, True))
    assert (at_once["enacted"], at_once["handoffs_refused"], at_once["not_followed"]) == (None, 0, [])
    assert by_machines["enacted"]["start active"] == 1
    assert sum(count for what, count in by_machines["enacted"].items() if what.startswith("restart")) > 0
    assert by_machines["policies"][0]["goodput"] < at_once["policies"][0]["goodput"]
    assert by_machines["gave_up"] == "" and "prefer: total" in by_machines["not_followed"][0]


@pytest.mark.thorough
def test_a_registered_job_is_meant_by_id_or_name_and_replayed_with_the_steps_it_has_made(client, training):
    job_id = client.get("/api/v1/jobs").json()[0]["job_id"]
    by_id, by_name = (ask(client, job_file=None, job=text).json() for text in (job_id, JOB["name"]))
    assert by_id["job"] == JOB["name"] and by_id == by_name
    assert client.get(f"/api/v1/jobs/{job_id}").json()["step_seconds"]
    assert by_id["policies"][0]["tokens"] != ask(client).json()["policies"][0]["tokens"]


@pytest.mark.thorough
def test_a_replay_goes_by_the_policy_of_the_job_and_by_what_is_asked_otherwise(client):
    policy = {"spares_max": 0, "gain_min": 0.5, "acquire_s": 900.0, "usd_per_mtok": 3e3}
    own = json.dumps(JOB | {"policy": policy})
    by_file, as_asked, plain, otherwise = (
        ask(client, job_file=job_file, knobs=knobs).json()
        for job_file, knobs in ((own, {}), (JOB_FILE, policy), (JOB_FILE, {}), (own, {"acquire_s": 60.0}))
    )
    assert by_file == as_asked and by_file["policies"] != plain["policies"]
    assert [found["acquire_s"] for found in (by_file, plain, otherwise)] == [900.0, 120.0, 60.0]


@pytest.mark.parametrize("asked", [None, 7.0])
def test_each_knob_of_a_jobs_policy_holds_in_a_replay_unless_another_value_is_asked(asked):
    policy = {"gain_min": 0.5, "usd_per_mtok": 3.0, "keep_tp": True, "spares_max": 1, "on_demand": False,
              "patience_s": 10.0, "start_s": 20.0, "acquire_s": 30.0}  # fmt: skip
    job = check_job_file(JOB | {"policy": policy})
    spares = None if asked is None else int(asked)
    setup, goal, knobs = by_own_policy(
        job, WhatIf(usd_per_mtok=asked, acquire_s=asked, spares_max=spares, gain_min=asked)
    )
    assert (setup.acquire_s, goal.usd_per_mtok) == (asked or 30.0, asked or 3.0)
    assert (knobs.gain_min, knobs.spares_max) == (asked or 0.5, spares or 1)
    assert (knobs.on_demand, knobs.patience_s, knobs.start_s, knobs.is_reproducible) == (False, 10.0, 20.0, True)


@pytest.mark.thorough
def test_the_nodes_that_the_service_has_had_are_a_trace_too(client, make_agent, clock):
    assert refused(ask(client, trace=None, builtin="own-2h")) == [("builtin", "the service had no node in own-2h")]
    for name in "abcd":
        make_agent(name).sync()
    clock.advance(3_600)
    found = ask(client, trace=None, builtin="own-2h").json()
    assert (found["nodes_most"], found["hours"]) == (4, 2.0)
    assert found["policies"][0]["curve"][-1]["offered"] == 4


@pytest.mark.thorough
def test_it_is_only_looked_at_so_that_a_viewer_may_ask_and_an_agent_may_not(client, settings, make_agent):
    made = client.post("/api/v1/tokens", json={"role": "viewer", "name": "v"}, headers=bearer(settings, "admin"))
    body = {"job_file": JOB_FILE, "trace": {"text": TRACE}}
    log = client.get("/api/v1/audit").json()
    headers = {"Authorization": f"Bearer {made.json()['token']}", "Idempotency-Key": "k"}
    first, again = (client.post(PATH, json=body, headers=headers) for _ in range(2))
    assert first.status_code == 200 and first.content == again.content
    assert client.post(PATH, json=body, headers=make_agent("a").headers).status_code == 403
    assert client.get("/api/v1/audit").json()[1:] == log


MISTAKES = [
    ({"trace": {"text": "0,add,a\n0,add,a\n"}}, "trace.text", "row 2: a came twice"),
    ({"trace": {"text": "0,add,a\nhello\n"}}, "trace.text", "line 2 must be ms,add|remove,node"),
    ({"trace": {"text": TRACE, "format": "counts"}}, "trace.text", "line 1 is not of format counts but of events"),
    ({"trace": {"text": TRACE, "format": "csv"}}, "trace.format", "'auto'"),
    ({"trace": {"text": "0,add,a\n99999999999999,remove,a\n"}}, "trace", "more than 500000 ticks"),
    ({"prices": "pool,usd_per_hour,from_s\nspot,-1,0\n"}, "prices", "row 2: usd_per_hour"),
    ({"prices": "pool,usd_per_hour,from_s\nspot,1,0\n"}, "prices", "pool 'on-demand' has no price"),
    ({"prices": "pool,usd_per_hour,from_s,egress_usd_per_gb\nspot,1,0,x\n"}, "prices", "row 2: egress_usd_per_gb"),
    ({"job_file": JOB_FILE.replace('"micro_batch"', '"micro"')}, "job_file.micro", "not a known field"),
    ({"job": "nobody", "job_file": None}, "job", "there is no job with the id or name 'nobody'"),
    ({"job": "x"}, "(whole)", "exactly one of job and job_file"),
    ({"builtin": "own-2h"}, "(whole)", "exactly one of trace and builtin"),
    ({"builtin": "other", "trace": None}, "builtin", "must be own-48h"),
    ({"knobs": {"notice_s": -1}}, "knobs.notice_s", "greater than or equal to 0"),
    ({"knobs": {"spares": 1}}, "knobs.spares", "not a known field"),
    ({"knobs": {"gang": 2_000}}, "knobs.gang", "the most nodes that a layout of the job uses, is 2000"),
]


@pytest.mark.parametrize(("given", "field", "rule"), sample(MISTAKES, *MISTAKES[::4]))
def test_what_cannot_be_replayed_is_refused_by_field_and_rule(client, given, field, rule):
    found = refused(ask(client, **given))
    assert field in [name for name, _ in found] and any(rule in text for _, text in found), found


def question(*, machines: bool = False) -> Question:
    return Question(check_job_file(JOB), "t", TraceFormat.AUTO, TRACE, None, WhatIfKnobs(), machines=machines)


@pytest.mark.parametrize("machines", [False, True])
def test_a_replay_that_takes_too_long_is_ended_and_says_what_to_change(machines):
    async def run() -> None:
        await Replays(at_once_max=1, within_s=0.01).run(question(machines=machines))

    with pytest.raises(ProblemError) as caught:
        asyncio.run(run())
    assert caught.value.problem.status == 422
    assert "within 0.01 s" in caught.value.problem.detail and "shorter trace" in caught.value.problem.detail
    assert ("without machines" in caught.value.problem.detail) is machines


@pytest.mark.thorough
def test_more_replays_than_run_at_a_time_are_refused_until_one_has_ended():
    async def run() -> list:
        replays = Replays(at_once_max=1, within_s=60)
        both = await asyncio.gather(*(replays.run(question()) for _ in range(2)), return_exceptions=True)
        return [*both, await replays.run(question())]

    first, second, third = asyncio.run(run())
    assert json.loads(first) == json.loads(third)
    assert (second.problem.status, second.headers["Retry-After"]) == (429, "15")
