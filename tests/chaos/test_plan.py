"""A trial's plan: the same for the same seed, playable, and fair to kinds and victims."""

from collections import Counter
from dataclasses import replace

from agent.protocol.jobfile import JobFile, parse_layout
from service.planner.feasibility import rule_violations
from tests.chaos.ground import names_of
from tests.chaos.plan import EVERYWHERE, EXCHANGES_MAX, POSSIBLE, RANKS_MAX, Action, Kind, Victim, job_file, plan_of

SEEDS = range(1, 421)


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
        slots = sorted((*plan.nodes, *plan.comes) if plan.kind is Kind.GROW else plan.nodes)
        for count, text in plan.layouts:
            ranks = parse_layout(text).world_size
            assert ranks <= min(sum(slots[:count]), RANKS_MAX), seed
            assert ranks > sum(slots[len(slots) - count + 1 :]), seed


def test_no_layout_makes_steps_of_half_a_minute_on_two_cores():
    for seed in SEEDS:
        plan = plan_of(seed)
        for _, text in plan.layouts:
            layout = parse_layout(text)
            micro_batches = plan.global_batch // plan.micro_batch // layout.dp
            assert (layout.tp - 1) * micro_batches * plan.model["num_layers"] <= EXCHANGES_MAX, seed


def test_kinds_take_turns_and_every_victim_is_struck_in_every_way():
    plans = [plan_of(seed, frozenset(Action)) for seed in SEEDS]
    assert set(Counter(plan.kind for plan in plans).values()) == {len(SEEDS) // len(Kind)}
    struck = Counter((strike.victim, strike.action) for plan in plans for strike in plan.strikes)
    assert set(struck) == {(victim, action) for action in Action for victim in POSSIBLE[action]}
    assert {len(plan.strikes) for plan in plans} == {1, 2}


def test_every_node_that_a_trial_may_have_has_a_name_from_the_start():
    """Islands are made before it: their addresses go by these names."""
    for seed in SEEDS:
        plan = plan_of(seed)
        come = len(plan.comes) if plan.kind in (Kind.GROW, Kind.REPLACEMENT) else 1
        assert len(names_of(plan)) >= len(plan.nodes) + come, seed


def test_nothing_is_drawn_that_this_machine_cannot_do_and_all_else_stays():
    for seed in SEEDS:
        all_of_it, here = plan_of(seed, frozenset(Action)).strikes, plan_of(seed).strikes
        assert {strike.action for strike in here} <= EVERYWHERE
        wanted = [strike.action if strike.action in EVERYWHERE else Action.STOP for strike in all_of_it]
        assert [replace(strike, action=action) for strike, action in zip(all_of_it, wanted, strict=True)] == [*here]


def test_nobody_is_struck_who_is_never_there():
    for seed in SEEDS:
        plan = plan_of(seed)
        for strike in plan.strikes:
            assert strike.victim is not Victim.LEAVER or plan.leave
            assert strike.victim is not Victim.NEWCOMER or plan.kind in (Kind.GROW, Kind.RESUME, Kind.REPLACEMENT)
            assert strike.victim is not Victim.SURVIVOR or plan.kind is not Kind.REPLACEMENT
