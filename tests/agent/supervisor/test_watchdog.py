"""What a rank's last steps say: how long one takes, how far they differ, and how old the last one is."""

from agent.supervisor.watchdog import HISTORY_STEPS, RankPulse


def test_steps_differ_by_what_they_lie_from_their_median_in_the_median_once_there_are_five():
    pulse = RankPulse(started_at=0.0)
    assert (pulse.median_s(), pulse.deviation_s()) == (0.0, None)
    found = []
    for step, seconds in enumerate((2.0, 1.5, 2.25, 9.0, 1.75), 1):
        pulse.stepped(float(step), step, seconds)
        found.append(pulse.deviation_s())
    assert found == [None, None, None, None, 0.25] and pulse.median_s() == 2.0
    for step in range(HISTORY_STEPS):
        pulse.stepped(10.0 + step, 6 + step, 2.0)
    assert pulse.deviation_s() == 0.0, "of the last steps only"


def test_a_rank_that_has_made_no_step_has_no_age():
    pulse = RankPulse(started_at=5.0)
    assert pulse.step_age_s(8.0) == 0.0
    pulse.stepped(7.0, 1, 1.0)
    assert pulse.step_age_s(7.5) == 0.5
