"""A trial's plan: the same for the same seed, playable, and fair to kinds and victims."""

from collections import Counter
from dataclasses import replace

from agent.protocol.jobfile import JobFile
from liver_core.layout.parallel import ParallelLayout
from service.planner.feasibility import rule_violations
from tests.chaos.ground import names_of
from tests.chaos.plan import (
    EVERYWHERE,
    EXCHANGES_MAX,
    POINTS,
    POSSIBLE,
    RANKS_MAX,
    Action,
    Kind,
    Victim,
    job_file,
    plan_of,
)

SEEDS = range(1, 721)


def test_a_seed_always_gives_the_same_plan():
    assert [plan_of(seed) for seed in range(1, 50)] == [plan_of(seed) for seed in range(1, 50)]


def test_every_plan_is_a_job_that_the_service_accepts():
    for seed in SEEDS:
        plan = plan_of(seed)
        job = JobFile.model_validate(job_file(plan, data_prefix="/data", trail="/trail", checkpoints="/checkpoints"))
        assert rule_violations(job) == (), seed


def test_any_nodes_of_a_count_are_all_needed_by_its_layout_and_have_room_for_it():
    for seed in SEEDS:
        plan = plan_of(seed)
        slots = sorted((*plan.nodes, *plan.comes) if Kind.GROW in (plan.kind, plan.opens) else plan.nodes)
        for count, text in plan.layouts:
            ranks = ParallelLayout.parse(text).world_size
            assert ranks <= min(sum(slots[:count]), RANKS_MAX), seed
            assert ranks > sum(slots[len(slots) - count + 1 :]), seed


def test_no_layout_makes_steps_of_half_a_minute_on_two_cores():
    for seed in SEEDS:
        plan = plan_of(seed)
        for _, text in plan.layouts:
            layout = ParallelLayout.parse(text)
            micro_batches = plan.global_batch // plan.micro_batch // layout.dp
            assert (layout.tp - 1) * micro_batches * plan.model["num_layers"] <= EXCHANGES_MAX, seed


def test_kinds_take_turns_and_every_victim_is_struck_in_every_way():
    plans = [plan_of(seed, frozenset(Action)) for seed in SEEDS]
    assert set(Counter(plan.kind for plan in plans).values()) == {len(SEEDS) // len(Kind)}
    struck = Counter((strike.victim, strike.action) for plan in plans for strike in plan.strikes)
    assert set(struck) == {(victim, action) for action in Action for victim in POSSIBLE[action]}
    assert {len(plan.strikes) for plan in plans if plan.kind not in (Kind.LEAD, Kind.DECISION)} == {1, 2}


def test_every_node_that_a_trial_may_have_has_a_name_from_the_start():
    """Islands are made before it: their addresses go by these names."""
    for seed in SEEDS:
        plan = plan_of(seed)
        come = len(plan.comes) if plan.kind is Kind.REPLACEMENT else 1
        assert len(names_of(plan)) >= len(plan.nodes) + come, seed


def test_nothing_is_drawn_that_this_machine_cannot_do_and_all_else_stays():
    for seed in SEEDS:
        all_of_it, here = plan_of(seed, frozenset(Action)).strikes, plan_of(seed).strikes
        assert {strike.action for strike in here} <= EVERYWHERE
        instead = [Action.KILL if strike.victim is Victim.MACHINE else Action.STOP for strike in all_of_it]
        wanted = [
            strike.action if strike.action in EVERYWHERE else other
            for strike, other in zip(all_of_it, instead, strict=True)
        ]
        assert [replace(strike, action=action) for strike, action in zip(all_of_it, wanted, strict=True)] == [*here]


def test_nobody_is_struck_who_is_never_there():
    for seed in SEEDS:
        plan = plan_of(seed)
        for strike in plan.strikes:
            assert strike.victim not in (Victim.LEAVER, Victim.MACHINE) or plan.leave
            assert strike.victim is not Victim.NEWCOMER or plan.kind in (Kind.GROW, Kind.RESUME, Kind.REPLACEMENT)
            assert strike.victim is not Victim.SURVIVOR or plan.kind is not Kind.REPLACEMENT


def test_building_takes_long_in_half_of_the_trials_and_outlasts_some_notices_of_leads():
    slow = [plan for plan in map(plan_of, SEEDS) if plan.build_s]
    assert abs(len(slow) - len(SEEDS) / 2) < 60
    assert all(8.0 <= plan.build_s <= 12.0 for plan in slow)
    assert any(plan.kind is Kind.LEAD and plan.lead_notice_s < plan.build_s for plan in slow)


def test_who_leads_gets_a_notice_with_a_grow_open_and_with_another_notice_and_the_job_can_bear_all_of_them():
    plans = [plan for plan in map(plan_of, SEEDS) if plan.kind is Kind.LEAD]
    assert {(plan.opens, plan.leave) for plan in plans} == {(Kind.GROW, 0), (Kind.NOTICE, 1)}
    for plan in plans:
        assert plan.lead_notice_s and plan.nodes_min == len(plan.nodes) - plan.leave - 1, plan.seed
        assert all(strike.is_harmless for strike in plan.strikes), plan.seed
    assert not any(plan.opens or plan.lead_notice_s for plan in map(plan_of, SEEDS) if plan.kind is not Kind.LEAD)


def test_before_the_decision_one_leaver_is_struck_at_a_probe_and_for_good():
    strikes = {plan.seed: plan.strikes for plan in map(plan_of, SEEDS) if plan.kind is Kind.DECISION}
    assert {len(found) for found in strikes.values()} == {1}
    assert {(strike.victim, strike.point) for found in strikes.values() for strike in found} == {
        (victim, point) for victim in (Victim.LEAVER, Victim.MACHINE) for point in POINTS
    }
    others = [plan for plan in map(plan_of, SEEDS) if plan.kind is not Kind.DECISION]
    assert not any(strike.point for plan in others for strike in plan.strikes)
