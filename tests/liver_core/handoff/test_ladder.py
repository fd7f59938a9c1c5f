"""The first rung that fits is taken, and it is said why the others are not. Pure."""

from dataclasses import replace

import pytest

from liver_core.handoff import LadderInputs, Rung, choose_rung

ROOMY = LadderInputs(
    bytes_to_move=10_000_000_000,
    bandwidth_bytes_per_s=1e9,
    prepare_s=20.0,
    step_s=5.0,
    seconds_to_boundary=3.0,
    seconds_to_deadline=105.0,
    margin_s=10.0,
    sources_whole=True,
    nodes_left=3,
    nodes_least=2,
    checkpoint_age_steps=40,
)


def test_with_time_enough_the_state_is_copied_at_a_boundary():
    choice = choose_rung(ROOMY)
    assert choice.rung is Rung.STOP_AND_COPY
    assert choice.estimate_s == 35.0
    assert choice.reason == (
        "live: not in this version; stop_and_copy: needs 35.0 s of the 105.0 s left, margin 10.0 s"
    )


def test_the_margin_counts():
    assert choose_rung(replace(ROOMY, seconds_to_deadline=45.0)).rung is Rung.STOP_AND_COPY
    assert choose_rung(replace(ROOMY, seconds_to_deadline=44.9)).rung is Rung.CHECKPOINT


def test_a_boundary_that_is_far_away_counts():
    assert choose_rung(replace(ROOMY, seconds_to_boundary=90.0)).rung is Rung.CHECKPOINT


def test_when_time_is_short_the_checkpoint_is_taken_and_the_loss_is_named():
    choice = choose_rung(replace(ROOMY, seconds_to_deadline=25.0))
    assert choice.rung is Rung.CHECKPOINT
    assert "stop_and_copy: needs 35.0 s and 10.0 s of margin, 25.0 s are left" in choice.reason
    assert "checkpoint: 40 steps (200.0 s) are done again" in choice.reason


def test_a_lost_source_leaves_only_the_checkpoint():
    choice = choose_rung(replace(ROOMY, sources_whole=False, checkpoint_age_steps=None))
    assert choice.rung is Rung.CHECKPOINT
    assert "a rank of the running world is lost" in choice.reason
    assert "none was written" in choice.reason


def test_without_a_measured_bandwidth_nothing_is_promised():
    assert "no bandwidth was measured" in choose_rung(replace(ROOMY, bandwidth_bytes_per_s=0.0)).reason


def test_nothing_presses_when_nobody_set_a_deadline():
    choice = choose_rung(replace(ROOMY, seconds_to_deadline=None, bytes_to_move=0, bandwidth_bytes_per_s=0.0))
    assert choice.rung is Rung.STOP_AND_COPY
    assert choice.reason.endswith("nothing presses")


def test_with_too_few_nodes_the_job_is_suspended():
    choice = choose_rung(replace(ROOMY, nodes_left=1))
    assert choice.rung is Rung.SUSPEND
    assert "1 nodes are left, the job needs 2" in choice.reason


def test_a_negative_number_is_refused_by_name():
    with pytest.raises(ValueError, match="step_s: must not be negative, is -1"):
        choose_rung(replace(ROOMY, step_s=-1))
