"""The judge of trials finds what is planted: in facts as a trial writes them, of a job of two worlds."""

from typing import Any

import pytest

from tests.chaos.facts import Facts, read_agent_logs, read_rank_logs
from tests.chaos.judge import partly_lost, record_of, unreported
from tests.chaos.machines import fold_journal
from tests.chaos.report import broken_rules, load, lost_as_computed, save, targets
from tests.cluster.undisturbed import undisturbed_samples

BATCH = 8
START_UTC = 1_800_000_000.0
KILLED_AT = 100.0 + 6.5


def utc(at: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(START_UTC + at, UTC).isoformat()


def facts(**changes: Any) -> Facts:
    """Ten steps of a second each in generation 1; the last two are done again in generation 2, from a checkpoint."""
    expected = undisturbed_samples(14, micro_batch=1, global_batch=BATCH)
    worlds = [(1, step, 100.0 + step) for step in range(1, 11)]
    worlds += [(2, step, 116.0 + step - 9) for step in range(9, 14)]
    trail: list[dict[str, Any]] = []
    for generation, step, at in worlds:
        ids = list(range((step - 1) * BATCH, step * BATCH))
        trail.append({"event": "batch", "at": at - 0.5, "generation": generation, "dp": 0, "ids": ids})
        trail.append({"event": "applied", "at": at, "generation": generation, "step": step, "rank": 0})
    rows = [
        {"generation": generation, "step": step, "consumed_samples": expected[step][0]}
        | {"sample_digest": f"{expected[step][1]:016x}"}
        for generation, step, _ in worlds
    ]
    reason = "rank 1 of node-2: rank process (pid 7) was killed by SIGKILL; restart from checkpoint of step 8"
    started = [
        {"generation": 1, "origin_id": "a", "source": "init", "created_at": utc(100.0), "reason": "start"},
        {"generation": 2, "origin_id": "b", "source": "checkpoint", "created_at": utc(112.0), "reason": reason},
    ]
    made = Facts(
        seed=1,
        global_batch=BATCH,
        kind="nothing",
        struck=[struck("survivor's rank", node="node-2", rank=1)],
        triggered_at=106.0,
        triggered_utc=START_UTC + 106.0,
        job={"state": "stopped", "lost_steps": 2, "generations": started},
        steps=rows,
        trail=trail,
        logged=[[generation, step] for generation, step, _ in worlds],
        births=[[1, "a"], [2, "b"]],
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def struck(what: str, *, node: str = "", rank: int | None = None, until: float = KILLED_AT) -> dict[str, Any]:
    found = {"what": what, "node": node, "rank": rank, "signal": "SIGKILL", "after_s": 0.5}
    return found | {
        "harmless": what == "agent",
        "problem": "",
        "point": "",
        "pid": 8,
        "at": KILLED_AT,
        "at_utc": START_UTC + KILLED_AT,
        "until": until,
    }


def test_a_restart_after_a_kill_is_judged_right():
    record = record_of(facts())
    assert record["outcome"] == "restarted" and record["rung"] == "checkpoint"
    killed = {"what": "survivor's rank", "node": "node-2", "signal": "SIGKILL", "after_s": 0.5, "harmless": False}
    assert record["killed"] == killed
    assert (record["lost_steps"], record["lost_steps_computed"]) == (2, 2)
    assert record["samples_ok"] and not record["generation_reused"] and record["reason_names_killed"]
    assert record["recovery_s"] == 6.0, "from the last step of the old world, which was later than the kill"
    assert broken_rules(record) == []


def test_recovery_counts_from_the_end_of_a_stop_and_from_when_there_were_nodes_again():
    stopped = struck("survivor's rank", node="node-2", until=113.0)
    assert record_of(facts(struck=[stopped]))["recovery_s"] == 3.0
    assert record_of(facts(capacity_at=115.5))["recovery_s"] == 0.5


def test_a_quick_restart_has_a_recovery_too():
    made = facts()
    for line in made.trail:
        line["at"] -= 5.0 if line["generation"] == 2 else 0.0
    assert record_of(made)["recovery_s"] == 1.0


def test_a_kill_that_stopped_nothing_has_no_recovery_and_no_cause():
    record = record_of(facts(trail=facts().trail[:20], job=facts().job | {"generations": [], "lost_steps": 0}))
    assert record["recovery_s"] is None and record["reason_names_killed"] is None and record["cause"] is None


def test_a_reason_that_names_another_node_is_found():
    record = record_of(facts(struck=[struck("agent", node="node-3")]))
    assert record["reason_names_killed"] is False and "reason" in broken_rules(record)


def test_the_typed_cause_of_a_world_outranks_the_words_of_the_next():
    made = facts()
    typed = {"what": "rank", "node": "node-2", "rank": 1, "signal": "SIGKILL", "exit_code": None, "step": 10}
    made.job["generations"][0]["ended_by"] = typed
    made.job["generations"][1]["reason"] = "restart from checkpoint of step 8"
    record = record_of(made)
    assert record["reason_names_killed"] and record["cause"] == typed
    typed["node"] = "node-3"
    assert record_of(made)["reason_names_killed"] is False


@pytest.mark.parametrize(("gone_s", "names"), [(2.0, True), (8.0, False)])
def test_a_world_that_ended_with_a_node_of_the_scenario_has_the_right_cause(gone_s: float, names: bool):
    made = facts(struck=[struck("store", node="node-1")], taken={"node-2": KILLED_AT + gone_s})
    typed = {"what": "node", "node": "node-2", "rank": None, "signal": None, "exit_code": None, "step": 10}
    made.job["generations"][0]["ended_by"] = typed
    assert record_of(made)["reason_names_killed"] is names
    typed["node"] = "node-3"
    assert record_of(made)["reason_names_killed"] is False


def test_steps_lost_that_the_job_has_not_made_again_before_its_end_are_lost():
    made = facts()
    made.logged = [item for item in made.logged if item[0] == 1 or item[1] == 9]
    assert record_of(made)["lost_steps_computed"] == 2
    assert partly_lost(made.logged, [[1, 10]]) == 1


@pytest.mark.parametrize(
    ("why", "is_elsewhere"),
    [
        ("(rank 3, decision: go: this rank has no part in the target world)", True),
        ("(rank process (pid 7) was killed by SIGKILL)", False),
    ],
)
def test_an_attempt_after_its_rank_has_left_by_another_one_has_not_failed(why: str, is_elsewhere: bool):
    made = facts()
    reason = f"source: this member runs no rank of generation 1 {why}"
    refused = {"state": "aborted", "superseded": False, "generation": 3, "reason": reason, "ended_by": None}
    refused |= {"changed_at": utc(KILLED_AT + 1.0), "reason_detail": {"phase": "refused", "rank": 3}}
    made.handoffs.append(refused)
    assert (record_of(made) == record_of(facts())) is is_elsewhere


def test_an_attempt_whose_ranks_take_part_in_another_one_has_not_failed_of_what_was_struck():
    made = facts()
    detail = {"phase": "refused", "rank": 2}
    lost = {"state": "aborted", "superseded": False, "generation": 3, "reason_detail": detail, "ended_by": None}
    made.handoffs.append(
        lost | {"changed_at": "2100-01-01T00:00:00Z", "reason": "promised to handoff x of generation 2"}
    )
    assert record_of(made) == record_of(facts())


def test_an_attempt_that_the_end_of_the_trial_came_upon_has_not_failed():
    made = facts()
    open_ = {"state": "aborted", "superseded": False, "generation": 3, "reason_detail": None, "ended_by": None}
    made.handoffs.append(open_ | {"changed_at": utc(KILLED_AT + 1.0), "reason": "the job is stopped"})
    assert record_of(made) == record_of(facts())


@pytest.mark.parametrize(
    ("until", "phase", "is_late"),
    [(108.5, "out of time", True), (109.5, "out of time", False), (108.5, "ready", False)],
)
def test_an_attempt_that_only_ran_out_of_time_while_the_job_trained_on_has_not_failed(until, phase, is_late):
    made = facts(struck=[struck("agent", node="node-3", until=until)], job={"state": "stopped", "lost_steps": 0})
    detail = {"phase": phase, "rank": None}
    late = {"state": "aborted", "superseded": False, "generation": 3, "reason_detail": detail, "ended_by": None}
    made.handoffs.append(late | {"changed_at": utc(109.2), "reason": "the deadline passed before the boundary"})
    assert record_of(made)["reason_names_killed"] is (None if is_late else False)


def test_a_step_made_as_its_node_was_taken_away_may_not_have_been_reported():
    made = facts()
    line = next(line for line in made.trail if line["event"] == "applied")
    made.taken = {"node-2": line["at"] + 1.0}
    assert [line["generation"], line["step"]] in unreported(made)
    made.taken = {"node-2": line["at"] + 2.0}
    assert [line["generation"], line["step"]] not in unreported(made)


def test_steps_lost_to_an_agent_are_against_the_rules():
    record = record_of(facts(struck=[struck("agent", node="node-2")]))
    assert "lost 2 steps to a agent" in broken_rules(record)


def test_a_lost_step_that_only_some_ranks_had_made_counts_either_way():
    made = facts()
    generation, step = made.logged[0]
    repeated = [[generation, step], [generation + 1, step]]
    assert (partly_lost(repeated, [[generation, step]]), partly_lost(repeated, [[generation + 1, step]])) == (1, 0)
    record = {"lost_steps": 5, "lost_steps_computed": 6, "lost_steps_partly": 1}
    assert lost_as_computed(record)
    assert not lost_as_computed(record | {"lost_steps_partly": 0})
    assert not lost_as_computed(record | {"lost_steps": 7})
    assert not lost_as_computed(record | {"lost_steps": None})


@pytest.mark.parametrize("wrong", [0, 3])
def test_lost_steps_that_differ_from_the_logs_are_found(wrong: int):
    assert f"lost {wrong}, computed 2" in broken_rules(record_of(facts(job=facts().job | {"lost_steps": wrong})))


def test_a_number_that_two_attempts_had_is_found():
    assert record_of(facts(births=[[1, "a"], [2, "b"], [2, "c"], [2, "b"]]))["generation_reused"]


def test_a_world_of_which_a_rank_was_started_again_is_found():
    assert not record_of(facts(started=[[1, 0], [1, 1], [100001, 0]]))["generation_reused"]
    assert record_of(facts(started=[[1, 0], [1, 1], [1, 1]]))["generation_reused"]


def test_a_step_with_a_wrong_digest_is_found():
    made = facts()
    made.steps[6]["sample_digest"] = "0" * 16
    assert not record_of(made)["samples_ok"]


def test_a_step_whose_samples_nobody_computed_whole_is_found():
    made = facts()
    for line in made.trail:
        if line["event"] == "batch" and line["ids"][0] == 2 * BATCH:
            line["ids"].pop()
    record = record_of(made)
    assert not record["samples_ok"] and "step 3" in record["problem"]


def test_a_batch_shared_by_data_parallel_ranks_is_whole():
    made = facts()
    for line in [line for line in made.trail if line["event"] == "batch"]:
        made.trail.append(line | {"dp": 1, "ids": line["ids"][1::2]})
        line["ids"] = line["ids"][::2]
    assert record_of(made)["samples_ok"]


def test_a_world_that_steps_on_beside_a_newer_one_is_found():
    made = facts()
    made.trail.append({"event": "applied", "at": 118.0, "generation": 1, "step": 11, "rank": 0})
    assert record_of(made)["outcome"] == "mixed"


def test_a_stopped_rank_that_writes_late_is_no_second_world():
    made = facts()
    made.trail.append({"event": "applied", "at": 118.0, "generation": 1, "step": 10, "rank": 1})
    assert record_of(made)["outcome"] == "restarted"


def test_what_was_waited_for_in_vain_and_what_is_left_break_the_rules():
    record = record_of(facts(problem="waited 90 s for steps in vain", leaked=["node-1: process 7"]))
    assert {"hung", "leaked"} <= set(broken_rules(record))


def test_records_are_merged_by_seed_and_counted_against_the_targets(tmp_path):
    path, record = tmp_path / "reports" / "chaos.json", record_of(facts())
    save(path, {3: record | {"seed": 3}, 1: record})
    save(path, load(path) | {2: record | {"seed": 2, "outcome": "mixed"}})
    assert list(load(path)) == [1, 2, 3]
    met = {what: met for what, met, _ in targets(load(path).values())}
    assert not met["never mixed"] and met["all samples right"] and not met["at least 15 of each kind"]


def test_a_file_that_is_no_report_is_refused_by_name(tmp_path):
    (tmp_path / "chaos.json").write_text("[]")
    with pytest.raises(ValueError, match=r"chaos\.json: is no report"):
        load(tmp_path / "chaos.json")


def test_logs_of_ranks_and_journals_of_agents_are_read(tmp_path):
    log = tmp_path / "g1-r0-s0.log"
    log.write_text("step 7 generation 2 loss 1.5 0.3 s\nhandoff x-1 (revision 2) to generation 3: ready\nstep x\n")
    assert read_rank_logs([log]) == ([[2, 7]], [], [[3, "x-1"]])
    other = tmp_path / "g1-r1-s0.log"
    other.write_text("step 7 generation 2 loss 1.5 0.3 s\nstep 8 generation 2 loss 1.5 0.3 s\n")
    assert read_rank_logs([log, other])[:2] == ([[2, 7], [2, 8]], [[2, 8]])
    log.write_text("10:00 INFO agent.driver.lifecycle: job j-1: starting rank 0 of generation 100001\n")
    assert read_agent_logs([log]) == [[100001, 0]]
    lines = [b'00 {"t": "rank", "k": "j/0", "v": {"rank": 1}}', b'00 {"t": "store", "k": "j/1", "v": {}}']
    lines += [b'00 {"t": "store", "k": "j/1", "v": null}', b'00 {"t": "ra']
    assert fold_journal(b"\n".join(lines)) == {"rank": {"j/0": {"rank": 1}}, "store": {}}


def lead_notice(ends_in_s: float) -> dict[str, Any]:
    return {"node": "node-1", "opened_at": KILLED_AT - 5.0, "at": KILLED_AT, "ends_in_s": ends_in_s}


@pytest.mark.parametrize(
    ("ends_in_s", "build_s", "others", "is_broken"),
    [
        (6.5, 0.0, [], True),
        (6.0, 0.0, [], False),
        (6.5, 0.0, ["store"], False),
        (6.5, 4.0, [], True),
        (6.5, 9.0, [], False),
        (10.5, 9.0, ["agent"], True),
        (9.5, 9.0, ["agent"], False),
    ],
)
def test_steps_lost_to_a_notice_for_the_lead_that_left_time_for_a_rescue_are_against_the_rules(
    ends_in_s: float, build_s: float, others: list[str], is_broken: bool
):
    struck_too = [struck(what, node="node-2") for what in others]
    record = record_of(facts(lead_notice=lead_notice(ends_in_s), struck=struck_too, build_s=build_s))
    assert ("lost 2 steps to a notice for the lead" in broken_rules(record)) is is_broken
    assert ("lost 2 steps to a agent" in broken_rules(record)) is (is_broken and others == ["agent"])
    assert record["outcome"] != "not struck", "the notice is what is tried"


@pytest.mark.parametrize(("node", "names"), [("node-1", True), ("node-3", False)])
def test_what_had_no_time_because_of_the_notice_for_the_lead_may_name_its_node(node: str, names: bool):
    made = facts(lead_notice=lead_notice(5.0), struck=[struck("zygote", node="node-2")])
    made.job["generations"][0]["ended_by"] = {"what": "rank", "node": node, "rank": 0}
    assert record_of(made)["reason_names_killed"] is names


def at_probe(*ready: int, rung: str = "live") -> Facts:
    """Process 8, a leaver, is killed at its probe. Of 5 and 6, which stay, those that are `ready` have the state."""
    made = facts(struck=[struck("leaver's rank", node="node-2") | {"point": "norm"}])
    passed = [(8, "state read", False), (8, "norm", False), *((pid, "state read", True) for pid in ready)]
    for pid, point, target in passed:
        line = {"event": "probe", "handoff": "h", "point": point, "pid": pid, "target": target, "ranks": 2}
        made.trail.append(line | {"at": KILLED_AT - 0.1})
    made.trail.append({"event": "held", "at": KILLED_AT - 0.1, "pid": 8, "point": "norm"})
    made.handoffs = [{"handoff_id": "h", "rung": rung, "state": "active", "superseded": False}]
    made.handoffs[0] |= {"changed_at": utc(110.0), "opened_at": utc(100.0)}
    return made


def test_a_restart_after_a_loss_that_all_ranks_of_the_next_world_can_bear_is_against_the_rules():
    record = record_of(at_probe(5, 6))
    assert record["bearable"] and "a loss before the decision not borne" in broken_rules(record)
    for made, bearable in ((at_probe(5), False), (at_probe(5, 6, rung="rescue"), None), (facts(), None)):
        record = record_of(made)
        assert record["bearable"] is bearable and broken_rules(record) == []


def test_slow_building_has_its_time_beside_a_recovery():
    times = {"recovery_s": 40.0, "build_s": 9.0}
    assert "recovery 40 s" in broken_rules(record_of(facts()) | times)
    assert broken_rules(record_of(facts()) | times | {"build_s": 11.0}) == []
