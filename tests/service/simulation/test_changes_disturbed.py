"""What becomes of a change in whose middle something happens: by the product's machines, on traces of a few events."""

from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from liver_core.handoff.suspending import EndTimes
from service.ledger.tables import Cause
from service.policy.plain_policies import ReactivePolicy
from service.policy.types import Candidate, Goal, PolicyDecision, PolicyInputs
from service.simulation.cluster_replay import ClusterRun, replay_cluster
from service.simulation.machines import machine_replay
from service.simulation.machines.change_times import ChangeTimes
from service.simulation.machines.machine_replay import replay_by_machines
from service.simulation.machines.replay_planner import ReplayPlanner
from service.simulation.machines.replayed_world import ReplayedWorld
from service.simulation.replay_setup import ReplaySetup
from service.simulation.traces import CapacityTrace, TraceEvent
from service.simulation.world.parts import Agent

SIX = tuple(f"n{number}" for number in range(1, 7))
SLOW_BUILD = ChangeTimes(build_s=40.0)


def linear(step_s: float = 8.0, *, change_s: float = 2.0, least: int = 1) -> tuple[Candidate, ...]:
    return tuple(Candidate(f"DP{n}", n, step_s / n, 1_000, change_s=change_s) for n in range(least, 9))


def trace(*events: tuple[float, str, str], end_s: float = 1_200.0) -> CapacityTrace:
    """Events as (when, nodes that come, nodes that go), names with blanks between."""
    found = (TraceEvent(at, tuple(added.split()), tuple(lost.split())) for at, added, lost in events)
    return CapacityTrace("short", tuple(found), end_s)


def run_of(
    found: CapacityTrace,
    setup: ReplaySetup,
    times: ChangeTimes | None = None,
    layouts: tuple[Candidate, ...] | None = None,
) -> ClusterRun:
    return replay_by_machines(found, layouts or linear(), ReactivePolicy(), setup=setup, times=times or ChangeTimes())


def story(run: ClusterRun) -> list[str]:
    return [f"{each.how} {each.ended}" for each in run.enacted]


def trained(run: ClusterRun, generation: int) -> list[tuple[float, float]]:
    made = (Cause.PRODUCTIVE, Cause.RECOMPUTE)
    return [(each.begin_s, each.end_s) for each in run.worlds if each.generation == generation and each.cause in made]


def with_silent(setup: ReplaySetup, *losses: bool) -> ReplaySetup:
    """The share and the seed with which just these losses, in the order of their notices, are unannounced."""
    for seed in range(10_000):
        random = Random(seed + 1)
        if tuple(random.random() < 0.5 for _ in losses) == losses:
            return replace(setup, unannounced_share=0.5, seed=seed)
    raise AssertionError("no seed is like that")


def test_another_notice_amends_the_handoff_that_is_being_prepared() -> None:
    found = trace((0.0, " ".join(SIX), ""), (300.0, "", "n6"), (312.0, "", "n5"))
    run = run_of(found, ReplaySetup(notice_s=120.0), SLOW_BUILD)
    assert story(run) == ["start active", "live active"]
    handoff = run.enacted[1]
    assert handoff.revisions == 2
    assert run.layouts[-1][1:3] == ("DP4", 4)
    # The second notice came 12 s after the first one; an amended target is built again.
    assert 192.0 + 40.0 <= trained(run, handoff.generation)[0][0] < 192.0 + 45.0


def test_another_notice_past_the_boundary_becomes_the_next_handoff() -> None:
    found = trace((0.0, " ".join(SIX), ""), (300.0, "", "n6"), (312.0, "", "n5"))
    slow = linear(change_s=30.0)
    run = run_of(found, ReplaySetup(notice_s=120.0), ChangeTimes(build_s=1.0), slow)
    assert story(run) == ["start active", "live active", "live active"]
    assert [layout[1] for layout in run.layouts] == ["DP6", "DP5", "DP4"]


def test_a_loss_before_the_commit_ends_the_handoff_and_the_job_restarts_under_a_number_of_its_own() -> None:
    """n5 goes unannounced at 200 s, while the next world is built without n6."""
    found = trace((0.0, " ".join(SIX), ""), (200.0, "", "n5"), (300.0, "", "n6"))
    times = ChangeTimes(build_s=40.0, checkpoint_every_s=50.0)
    run = run_of(found, with_silent(ReplaySetup(notice_s=120.0), True, False), times)
    assert story(run) == ["start active", "live aborted", "restart active"]
    assert [each.generation for each in run.enacted] == [1, 2, 100_001]
    assert not trained(run, 2)
    assert trained(run, 1)[-1][1] == pytest.approx(200.0)
    restarted_s = trained(run, 100_001)[0][0]
    # Felt after 5 s, the agents say within 1.5 s what failed, and a restart takes 55 s.
    assert restarted_s == pytest.approx(200.0 + 5.0 + 1.5 + 55.0, abs=1.0)
    # Checkpoints come every 50 s of training, which began at 2 s: the last one at 152 s.
    lost = dict(run.tokens_lost_by)["lost_work"]
    assert lost == pytest.approx(6 * 125 * (200 - 152), abs=6 * 125 * 12)
    assert run.layouts[-1][1] == "DP4"


def test_a_notice_that_is_too_short_to_build_first_is_answered_by_a_rescue_which_does_a_step_again() -> None:
    found = trace((0.0, " ".join(SIX), ""), (300.0, "", "n6"))
    run = run_of(found, ReplaySetup(notice_s=8.0, counts_steps=True), ChangeTimes(build_s=6.0))
    assert story(run) == ["start active", "rescue active"]
    assert run.enacted[1].decision == "go_redo"
    assert dict(run.tokens_lost_by)["lost_work"] == pytest.approx(1_000.0)
    paused_s = sum(each.end_s - each.begin_s for each in run.worlds if each.cause is Cause.PAUSE)
    assert paused_s == pytest.approx(6.0 + 2.0, abs=0.5)


def test_a_notice_that_ends_before_the_next_boundary_is_tried_by_a_rescue_and_costs_a_restart() -> None:
    """Steps of 60 s and a notice of 20 s: the shorthand loses the step, the product what came after the checkpoint."""
    layouts = linear(360.0)
    found = trace((0.0, " ".join(SIX), ""), (340.0, "", "n6"))
    setup, times = ReplaySetup(notice_s=20.0, counts_steps=True), ChangeTimes(checkpoint_every_s=120.0)
    run = run_of(found, setup, times, layouts)
    assert story(run) == ["start active", "rescue aborted", "restart active"]
    assert "the deadline passed before the boundary" in run.enacted[1].reason
    # It has trained since 2 s; checkpoints at 122 s and 242 s; the loss is at 340 s.
    assert dict(run.tokens_lost_by)["lost_work"] == pytest.approx((340 - 242) * 1_000 / 60, rel=0.01)
    shorthand = replay_cluster(found, layouts, ReactivePolicy(), setup=setup)
    assert dict(shorthand.tokens_lost_by)["lost_work"] == pytest.approx(((320 - 2) % 60) * 1_000 / 60)
    assert run.tokens < shorthand.tokens


def test_where_a_step_can_be_dropped_the_same_notice_costs_no_more_than_the_step_begun() -> None:
    layouts = linear(360.0)
    found = trace((0.0, " ".join(SIX), ""), (340.0, "", "n6"))
    times = ChangeTimes(parts_of_step=(("DP6", 1 / 30),))
    run = run_of(found, ReplaySetup(notice_s=20.0, counts_steps=True), times, layouts)
    assert story(run) == ["start active", "drop_step active"]
    assert run.enacted[1].decision == "go_redo"
    assert 0 < dict(run.tokens_lost_by)["lost_work"] < 1_000


def test_a_step_is_dropped_at_the_end_of_its_parts_the_last_of_which_is_shorter() -> None:
    """Steps of 60 s since 2 s, with parts of 0.3: they end at 18 s, at 36 s, at 54 s, and with the step."""
    times = ChangeTimes(parts_of_step=(("DP6", 0.3),), margin_s=0.0, usable_share=1.0, build_s=1.0)
    for noticed_s, notice_s, ends_s in ((310.0, 50.0, 18.0), (319.5, 38.0, 36.0), (352.0, 52.0, 60.0)):
        found = trace((0.0, " ".join(SIX), ""), (noticed_s + notice_s, "", "n6"))
        run = run_of(found, ReplaySetup(notice_s=notice_s, counts_steps=True), times, linear(360.0))
        assert story(run) == ["start active", "drop_step active"]
        paused_s = next(each.begin_s for each in run.worlds if each.cause is Cause.PAUSE and each.begin_s > 300)
        assert paused_s == pytest.approx(302.0 + ends_s, abs=0.1)


def test_a_job_that_writes_no_checkpoint_starts_at_its_first_step_again() -> None:
    """Also where it was suspended, and its ranks could have written one."""
    lost = trace((0.0, " ".join(SIX), ""), (300.0, "", "n6"))
    silent = ReplaySetup(notice_s=120.0, unannounced_share=1.0)
    never = ChangeTimes(checkpoint_every_s=None)
    run = run_of(lost, silent, never)
    assert story(run) == ["start active", "restart active"]
    assert dict(run.tokens_lost_by)["lost_work"] == pytest.approx((300.0 - 2.0) * 6 * 125, rel=0.01)
    assert "restart from its beginning (there is no checkpoint)" in run.enacted[1].reason
    often = run_of(lost, silent, ChangeTimes(checkpoint_every_s=100.0))
    assert dict(often.tokens_lost_by)["lost_work"] == pytest.approx((300.0 - 202.0) * 6 * 125, rel=0.01)
    few = trace((0.0, "n1 n2 n3 n4", ""), (300.0, "", "n3 n4"), (600.0, "n3 n4", ""))
    run = run_of(few, ReplaySetup(notice_s=120.0), never, linear(least=3))
    assert dict(run.tokens_lost_by)["lost_work"] == pytest.approx((180.0 - 2.0) * 4 * 125, rel=0.01)


def test_a_newcomer_that_dies_in_the_cutover_costs_a_pause_and_no_restart() -> None:
    """A state of 150 GB on links of 10 Gb/s: the gradients of the last step take 16 s of the pause."""
    times = ChangeTimes(state_bytes=150e9)
    layouts, setup = linear(240.0, change_s=20.0), ReplaySetup(notice_s=1.0, counts_steps=True, unannounced_share=1.0)
    first = (0.0, "n1 n2 n3 n4", ""), (100.0, "n5", "")
    calm = run_of(trace(*first), setup, times, layouts)
    assert story(calm) == ["start active", "live active"]
    boundary_s = next(each.begin_s for each in calm.worlds if each.cause is Cause.PAUSE and each.begin_s > 100)
    run = run_of(trace(*first, (boundary_s + 5.0, "", "n5"), end_s=3_600.0), setup, times, layouts)
    assert story(run)[:2] == ["start active", "live aborted"]
    assert run.enacted[1].decision == "no_go"
    assert "restart active" not in story(run)
    # The source has waited until nobody could come any more, and trains on.
    assert len(trained(run, 1)) == 2
    assert trained(run, 1)[1][0] > boundary_s + 20.0
    # What was built beside training came to nothing, and is charged with what the change would have cost.
    assert dict(run.tokens_lost_by)["lost_work"] == pytest.approx(20.0 * 1_000 / 60)


def test_a_state_that_cannot_be_copied_within_the_pause_costs_no_pause_again_and_again() -> None:
    """160 GB on one node's link of 10 Gb/s take 128 s, and steps are too short to follow them."""
    layouts, setup = linear(24.0, change_s=5.0), ReplaySetup(notice_s=120.0, counts_steps=True)
    found = trace((0.0, "n1", ""), (300.0, "n2 n3 n4 n5 n6", ""), end_s=7_200.0)
    run = run_of(found, setup, ChangeTimes(state_bytes=160e9), layouts)
    assert story(run) == ["start active"]
    made_s = sum(end_s - begin_s for begin_s, end_s in trained(run, 1))
    assert made_s > 0.98 * 7_200.0, "the job trains on as it was"


def test_the_number_of_a_handoff_that_came_to_nothing_is_not_used_again() -> None:
    """n5 is lost while it builds; a node that comes later is brought in under the next number."""
    found = trace((0.0, "n1 n2 n3 n4", ""), (100.0, "n5", ""), (110.0, "", "n5"), (600.0, "n6", ""))
    run = run_of(found, ReplaySetup(notice_s=1.0, unannounced_share=1.0), SLOW_BUILD)
    assert story(run) == ["start active", "live aborted", "live active"]
    assert [each.generation for each in run.enacted] == [1, 2, 3]
    assert run.layouts[-1][1] == "DP5"
    # Nobody speaks for a node that is gone: what was prepared with it ends once it has not been reached for 20 s.
    assert run.enacted[1].end_s == pytest.approx(110.0 + 20.0, abs=1.0)


def test_a_job_with_too_few_nodes_is_suspended_with_a_checkpoint_and_resumes_with_what_it_had() -> None:
    found = trace((0.0, "n1 n2 n3 n4", ""), (300.0, "", "n3 n4"), (600.0, "n3 n4", ""))
    run = run_of(found, ReplaySetup(notice_s=120.0), None, linear(least=3))
    assert story(run) == ["start active", "restart active"]
    assert dict(run.tokens_lost_by)["lost_work"] == 0
    assert dict(run.tokens_lost_by)["pause"] > 0
    needs_s = EndTimes(step_s=2.0, save_s=None).suspends_in_s
    assert trained(run, 1)[-1][1] == pytest.approx(300.0 - needs_s, abs=1.0), "it trains on until then"
    assert trained(run, 100_001)[0][0] == pytest.approx(600.0 + 55.0, abs=1.0)


def test_starts_that_lose_a_node_one_after_the_other_do_not_end_the_job() -> None:
    lost = [(10.0, "", "n6"), (40.0, "", "n5"), (75.0, "", "n4")]
    run = run_of(trace((0.0, " ".join(SIX), ""), *lost), ReplaySetup(notice_s=0.0), None, linear(change_s=30.0))
    assert run.gave_up == ""
    assert story(run) == ["start failed", "restart failed", "restart failed", "restart active"]
    ended, begun = [each.end_s for each in run.enacted], [each.at_s for each in run.enacted]
    assert ended[:-1] == begun[1:]
    assert trained(run, run.enacted[-1].generation)[0][0] == pytest.approx(begun[-1] + 55.0, abs=1.0)


def test_a_start_whose_node_is_announced_to_go_too_soon_is_replaced_at_the_notice() -> None:
    found = trace((0.0, " ".join(SIX), ""), (300.0, "", "n6"), (350.0, "", "n5"))
    times = ChangeTimes(checkpoint_every_s=100.0)
    run = run_of(found, ReplaySetup(notice_s=0.0), times)
    assert story(run) == ["start active", "restart failed", "restart active"]
    told = run_of(found, with_silent(ReplaySetup(notice_s=30.0), True, False), times)
    assert story(told) == story(run)
    assert told.enacted[-1].reason.startswith("n5 goes in ")
    assert told.enacted[-1].at_s == pytest.approx(320.0, abs=2.0)
    assert run.enacted[-1].at_s > 350.0


def test_starts_that_make_no_step_in_time_end_the_job_as_the_rule_says() -> None:
    found = trace((0.0, "n1 n2", ""), (100.0, "", "n2"), (110.0, "n2", ""))
    run = run_of(found, ReplaySetup(notice_s=0.0), None, linear(change_s=300.0))
    assert run.tokens == 0
    assert run.gave_up == "3 starts in a row failed; the last one: the start made no step within 270 s"
    assert story(run) == ["start failed", *["restart failed"] * 3], "the one that lost a node does not count"


def test_a_job_that_gave_up_asks_the_policy_no_more_and_pays_for_no_node() -> None:
    """The trace goes on for half an hour, in which nodes stay offered and others come."""
    asked: list[float] = []

    class Watched(ReactivePolicy):
        def decide(self, inputs: PolicyInputs) -> PolicyDecision:
            asked.append(inputs.goal.elapsed_s)
            return super().decide(inputs)

    found = trace((0.0, " ".join(SIX), ""), (1_000.0, "n7", ""), end_s=1_800.0)
    layouts, goal = linear(change_s=300.0), Goal(tokens_left=1e12)
    run = replay_by_machines(found, layouts, Watched(), setup=ReplaySetup(), times=ChangeTimes(), goal=goal)
    assert run.gave_up
    over_s = run.enacted[-1].end_s
    assert asked and max(asked) <= over_s
    # Nodes are given back where the replay looks next, at most a tick later.
    assert all(lease.end_s <= over_s + 60.0 for lease in run.leases)
    assert sum(tokens for _, tokens in run.tokens_lost_by) == pytest.approx(run.ideal_tokens)


def test_a_start_that_the_end_of_the_trace_cuts_off_is_shown_as_open() -> None:
    run = run_of(trace((0.0, "n1 n2", ""), end_s=20.0), ReplaySetup(), None, linear(change_s=30.0))
    assert story(run) == ["start open"]
    assert run.enacted[0].end_s == 20.0


def test_a_start_ends_with_its_first_step() -> None:
    run = run_of(trace((0.0, "n1 n2", "")), ReplaySetup(), None, linear(change_s=30.0))
    assert story(run) == ["start active"]
    assert run.enacted[0].end_s == pytest.approx(30.0, abs=0.5)


def test_a_node_that_comes_during_a_handoff_neither_amends_nor_delays_it() -> None:
    found = trace((0.0, " ".join(SIX), ""), (200.0, "n7", ""), (300.0, "", "n6"))
    run = run_of(found, ReplaySetup(notice_s=120.0), SLOW_BUILD)
    assert story(run) == ["start active", "live active", "live active"]
    assert [each.revisions for each in run.enacted] == [1, 1, 1]
    assert [layout[1] for layout in run.layouts] == ["DP6", "DP5", "DP6"]


def test_times_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="build_s must be a number of at least 0"):
        ChangeTimes(build_s=-1.0)
    with pytest.raises(ValueError, match="usable_share must be at most 1"):
        ChangeTimes(usable_share=1.5)
    with pytest.raises(ValueError, match="parts_of_step: of DP1 must be above 0 and below 1"):
        ChangeTimes(parts_of_step=(("DP1", 1.0),))
    with pytest.raises(ValueError, match="step_parts is parts_of_step of times"):
        run_of(trace((0.0, "n1", "")), ReplaySetup(step_parts=2))
    with pytest.raises(ValueError, match="checkpoint_every_s"):
        replay_by_machines(
            trace((0.0, "n1", "")),
            linear(),
            ReactivePolicy(),
            setup=ReplaySetup(checkpoint_every_s=60.0),
            times=ChangeTimes(),
        )


def test_a_handoff_that_the_end_of_the_trace_cuts_off_is_shown_as_open() -> None:
    found = trace((0.0, "n1 n2 n3 n4", ""), (100.0, "n5", ""), end_s=120.0)
    run = run_of(found, ReplaySetup(notice_s=120.0), SLOW_BUILD)
    assert story(run) == ["start active", "live open"]
    assert run.enacted[1].end_s == 120.0


def test_time_in_which_nothing_goes_on_costs_no_events() -> None:
    """Ten days of steps of 1.3 s on six nodes, with one node that is announced to go in the middle."""
    worlds: list[ReplayedWorld] = []

    class Kept(ReplayedWorld):
        def planner(self, agent: Agent) -> ReplayPlanner:
            worlds.append(self)
            return super().planner(agent)

    found = trace((0.0, " ".join(SIX), ""), (432_000.0, "", "n6"), end_s=864_000.0)
    with patch.object(machine_replay, "ReplayedWorld", Kept):
        run = run_of(found, ReplaySetup(notice_s=120.0, counts_steps=True))
    assert story(run) == ["start active", "live active"]
    looks = 864_000 / 600
    assert worlds[0].clock.events < looks + 2_000, "the policy is asked each ten minutes; the change takes the others"
