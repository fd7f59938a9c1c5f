"""How long a pool goes on without a loss: spells, groups, what is censored and what was seen late."""

from hypothesis import given, settings
from hypothesis import strategies as st

from service.policy.hazard import HOUR_S, PRIOR_PER_HOUR
from service.policy.pool_lives import LeaseSeen, life_of

DAY_S = 24 * HOUR_S


def test_a_pool_that_nobody_has_watched_lasts_as_the_prior_says_and_longer_the_older_it_is():
    young = life_of([LeaseSeen(0.0)], since_s=0.0, now_s=60.0)
    old = life_of([LeaseSeen(0.0)], since_s=0.0, now_s=DAY_S)
    assert young.losses == 0 and young.group_sizes == ((1, 1.0),)
    assert HOUR_S / PRIOR_PER_HOUR[0] < young.life_s < old.life_s < DAY_S


def test_losses_within_three_minutes_are_one_and_what_was_drained_is_none():
    leases = [
        LeaseSeen(0.0, HOUR_S, was_lost=True),
        LeaseSeen(0.0, HOUR_S + 100, was_lost=True),
        LeaseSeen(0.0, 3 * HOUR_S, was_lost=True),
        LeaseSeen(0.0, 2 * HOUR_S),
        LeaseSeen(0.0),
    ]
    found = life_of(leases, since_s=0.0, now_s=DAY_S)
    assert (found.losses, found.watched_h, found.group_sizes) == (2, 24.0, ((1, 0.5), (2, 0.5)))
    kept = life_of([LeaseSeen(each.began_s, each.ended_s) for each in leases], since_s=0.0, now_s=DAY_S)
    assert kept.losses == 0 and kept.life_s > found.life_s


def test_time_without_nodes_is_not_watched_and_a_spell_that_was_seen_late_counts_from_the_age_it_had():
    gap = [LeaseSeen(0.0, HOUR_S, was_lost=True), LeaseSeen(10 * HOUR_S)]
    assert life_of(gap, since_s=0.0, now_s=12 * HOUR_S).watched_h == 3.0
    # The same lease, lost at the age of ten hours, seen from its begin and seen for its last hour only.
    lease = [LeaseSeen(0.0, 10 * HOUR_S, was_lost=True), LeaseSeen(10 * HOUR_S)]
    whole = life_of(lease, since_s=0.0, now_s=10 * HOUR_S + 60)
    late = life_of(lease, since_s=9 * HOUR_S, now_s=10 * HOUR_S + 60)
    assert (whole.losses, late.losses) == (1, 1) and round(late.watched_h, 2) == 1.02
    # That it lasted nine hours was not seen, so that the young classes of age are as the prior has them.
    assert late.life_s < whole.life_s


def test_a_burst_of_losses_makes_the_next_one_expected_sooner():
    calm = [LeaseSeen(at * DAY_S, (at + 1) * DAY_S, was_lost=True) for at in range(10)]
    burst = [LeaseSeen(10 * DAY_S + at * 600.0, 10 * DAY_S + at * 600.0 + 590, was_lost=True) for at in range(8)]
    now_s = 10 * DAY_S + 2 * HOUR_S
    quiet = life_of([*calm, LeaseSeen(10 * DAY_S)], since_s=0.0, now_s=now_s)
    shaken = life_of([*calm, *burst, LeaseSeen(10 * DAY_S)], since_s=0.0, now_s=now_s)
    assert quiet.volatility < shaken.volatility and shaken.life_s < quiet.life_s


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.floats(-DAY_S, DAY_S), st.floats(0, DAY_S), st.booleans(), st.booleans()), min_size=1, max_size=20
    )
)
def test_whatever_was_leased_a_life_is_finite_and_no_more_is_watched_than_has_passed(drawn):
    leases = [
        LeaseSeen(begin, min(begin + lasts, DAY_S) if ends else None, was_lost=lost and ends)
        for begin, lasts, ends, lost in drawn
    ]
    found = life_of(leases, since_s=0.0, now_s=DAY_S)
    assert 0 < found.life_s <= DAY_S and 0 <= found.watched_h <= 24 + 1e-6 and found.volatility >= 1
    assert found.losses <= sum(lease.was_lost for lease in leases)
    assert abs(sum(share for _, share in found.group_sizes) - 1) < 1e-9
