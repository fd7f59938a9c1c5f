"""What a rank's last steps say: how long one takes, how far they differ, how old the last one is; and where it is."""

from agent.protocol.rank_status import Whereabouts
from agent.supervisor.process import ProcessIdentity
from agent.supervisor.records import RankRecord, RankState
from agent.supervisor.watchdog import HISTORY_STEPS, RankPulse
from liver_core.handoff import RankStage


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


def test_a_rank_that_says_nothing_is_asked_where_it_is_now_and_then() -> None:
    pulse = RankPulse(started_at=0.0)
    pulse.stepped(20.0, 1, 1.0)
    assert [second for second in range(20, 50) if pulse.asks(float(second))] == [30, 35, 40, 45]
    pulse.stepped(50.0, 2, 1.0)
    assert not pulse.asks(59.0) and pulse.asks(60.0)


def state_at(now: float) -> RankState:
    """Of a rank that made its last step, of a second, at 100 s."""
    record = RankRecord(ProcessIdentity(2**22, 1.0), "/s", "/log", 1, 2, "origin")
    state = RankState(record, RankPulse(0.0), 1, 2, RankStage.TRAINING)
    state.pulse.stepped(100.0, 7, 1.0)
    for second in range(100, int(now)):
        state.look(float(second), stopped=False)
    return state


def test_where_a_rank_is_counts_for_a_while_and_until_its_next_step() -> None:
    state = state_at(111.0)
    state.where, state.where_at = Whereabouts(at="samples (my_job.py:33)"), 110.0
    assert state.whereabouts(112.0) == state.where and state.whereabouts(126.0) is None
    assert state.status("j", 0, world=None, now=112.0).whereabouts == state.where
    state.pulse.stepped(113.0, 8, 1.0)
    assert state.whereabouts(114.0) is None
    state = state_at(111.0)
    state.where, state.where_at = Whereabouts(at="samples (my_job.py:33)"), 110.0
    state.look(112.0, stopped=True)
    assert state.whereabouts(113.0) is None, "a process that is stopped is nowhere else"


def test_a_rank_hangs_in_its_data_and_not_in_a_hook() -> None:
    state = state_at(140.0)
    state.where, state.where_at = Whereabouts(hook="validate", hook_s=30.0, at="validate (my_job.py:80)"), 139.0
    assert not state.look(140.0, stopped=False) and state.hang is None
    state.where = Whereabouts(at="samples (my_job.py:33)")
    assert state.look(141.0, stopped=False) and state.hang is not None
    assert state.hang.text.endswith("at a median step of 1.00 s; it is in samples (my_job.py:33)")
