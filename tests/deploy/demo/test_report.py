"""The demo's report from made-up measurements: what is compared with what, and which bound notices which defect."""

import dataclasses
import json

import pytest

from deploy.demo.report import (
    HANDOFF_FIELDS,
    Measured,
    Newcomer,
    Reference,
    broken_bounds,
    build_report,
    missed_targets,
)


def handoff(number: int, **changes) -> dict:
    """An active handoff as the REST API says it."""
    fields = dict.fromkeys(HANDOFF_FIELDS) | {
        "handoff_id": f"id-{number}",
        "generation": number,
        "parent": number - 1,
        "state": "active",
        "cause": "notice",
        "from": "TP2xPP2xDP1",
        "to": "TP1xPP3xDP1",
        "target_nodes": ["node-a"],
        "opened_at": "2026-01-01T00:00:10+00:00",
        "pause_s": 0.1 * number,
        "pause_steps": 0.5,
        "lost_s": 0.5 * number,
    }
    return fields | changes


def step(number: int, generation: int, loss: float) -> dict:
    """A step row as the REST API says it."""
    return {
        "step": number,
        "generation": generation,
        "loss": loss,
        "seconds": 0.5,
        "sample_digest": f"d{number}",
        "finished_at": f"2026-01-01T00:00:{number:02d}+00:00",
    }


@pytest.fixture
def measured() -> Measured:
    losses = {number: 5.0 - number / 10 for number in range(1, 9)}
    # Live: exact in the first generation, a little off after it; the other layout is off by more from the start.
    steps = {n: step(n, 1 if n <= 4 else 2, loss + (0.0 if n <= 4 else 1e-6)) for n, loss in losses.items()}
    seconds = dict.fromkeys(losses, 0.5)
    digests = {number: f"d{number}" for number in losses}
    other = {number: loss + 2e-6 for number, loss in losses.items()}
    return Measured(
        handoffs=[handoff(2), handoff(3), handoff(4, state="aborted", pause_s=None, pause_steps=None, lost_s=None)],
        steps=steps,
        baseline={"as_today": {"downtime_s": 20.0}, "at_best": {"downtime_s": 5.0}},
        references=(
            Reference("TP2xPP2", losses, digests, seconds),
            Reference("PP3", other, digests, seconds),
        ),
        ledger={},
        newcomer=Newcomer("node-e", 0.0),
        versions={"python": "3"},
        device={"cores": 2},
        took_s=1.0,
    )


def test_a_good_run_breaks_no_bound_and_its_report_is_json(measured: Measured):
    report = build_report(measured)
    assert broken_bounds(report) == []
    assert json.loads(json.dumps(report)) == report


def test_only_active_handoffs_count_and_the_others_are_told_apart(measured: Measured):
    report = build_report(measured)
    assert [item["generation"] for item in report["handoffs"]] == [2, 3]
    assert [(item["generation"], item["state"]) for item in report["not_active"]] == [(4, "aborted")]
    assert set(HANDOFF_FIELDS) <= set(report["handoffs"][0])


def test_ratios_are_of_restarts_over_the_median_handoff(measured: Measured):
    ratios = build_report(measured)["ratios"]
    assert ratios["as_today_over_pause"] == pytest.approx(20.0 / 0.25)
    assert ratios["as_today_over_lost"] == pytest.approx(20.0 / 1.25)
    assert ratios["at_best_over_lost"] == pytest.approx(5.0 / 1.25)


def test_losses_are_compared_before_and_after_the_first_handoff(measured: Measured):
    undisturbed = build_report(measured)["undisturbed"]
    assert undisturbed["max_abs_loss_diff_before"] == 0.0
    assert undisturbed["max_abs_loss_diff_after"] == pytest.approx(1e-6)
    assert undisturbed["layout_noise"] == pytest.approx(2e-6)
    assert (undisturbed["steps_before"], undisturbed["steps_after"]) == (4, 4)


def test_the_smallest_difference_before_the_first_handoff_breaks_a_bound(measured: Measured):
    steps = measured.steps | {2: step(2, 1, measured.steps[2]["loss"] + 1e-9)}
    broken = broken_bounds(build_report(dataclasses.replace(measured, steps=steps)))
    assert len(broken) == 1 and "before the first handoff" in broken[0]


def test_a_drift_beyond_the_noise_of_layouts_breaks_a_bound(measured: Measured):
    steps = measured.steps | {8: step(8, 2, measured.steps[8]["loss"] + 1e-3)}
    broken = broken_bounds(build_report(dataclasses.replace(measured, steps=steps)))
    assert len(broken) == 1 and "after the first handoff" in broken[0]


def test_other_samples_than_those_of_an_undisturbed_run_break_a_bound(measured: Measured):
    steps = measured.steps | {8: measured.steps[8] | {"sample_digest": "other"}}
    assert "samples" in broken_bounds(build_report(dataclasses.replace(measured, steps=steps)))[0]


def test_a_long_pause_breaks_a_bound_and_a_poor_ratio_misses_a_target_with_their_numbers(measured: Measured):
    slow = dataclasses.replace(measured, handoffs=[handoff(2, pause_s=2.0, pause_steps=4.0, lost_s=3.0)])
    report = build_report(slow)
    assert ["4.00 median steps" in text for text in broken_bounds(report)] == [True]
    missed = missed_targets(report)
    assert "as_today_over_pause is 10.0" in missed[0] and "as_today_over_lost is 6.7" in missed[1]


def test_a_handoff_that_lost_nothing_has_no_ratio_and_misses_no_target(measured: Measured):
    free = dataclasses.replace(measured, handoffs=[handoff(2, pause_s=0.1, lost_s=-0.1)])
    report = build_report(free)
    assert report["ratios"]["as_today_over_lost"] is None
    assert missed_targets(report) == []


def test_the_start_of_a_newcomer_is_itemised(measured: Measured):
    joined = handoff(2, target_nodes=["node-a", "node-e"], opened_at="2026-01-01T00:00:07+00:00")
    started_at = 1767225600.0 + 3.5  # three and a half seconds after the first midnight of 2026
    newcomer = Newcomer("node-e", started_at)
    start = build_report(dataclasses.replace(measured, handoffs=[joined], newcomer=newcomer))["newcomer_start"]
    assert start["start_to_opening_s"] == pytest.approx(3.5)
    assert start["steps_meanwhile"] == 4
    assert start["lost_s"] == pytest.approx(3.5 - 4 * 0.5)
