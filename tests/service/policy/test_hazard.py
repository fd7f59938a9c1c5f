"""Hazards by age, groups of losses and prices over time."""

import random
from math import inf

import pytest

from service.policy.hazard import (
    HOUR_S,
    PRIOR_PER_HOUR,
    ChangeEvents,
    LifeTable,
    expected_life_s,
    spells_of,
    volatility,
)
from service.policy.price_book import PriceError, read_prices, steps


def test_without_data_the_prior_counts_and_with_much_it_does_not() -> None:
    table = LifeTable()
    assert table.rates_per_hour() == pytest.approx(PRIOR_PER_HOUR)
    chance = random.Random(7)
    for _ in range(20_000):
        life_h = chance.expovariate(0.5)
        table.watch(0.0, life_h * HOUR_S, lost=True)
    assert table.rates_per_hour()[:4] == pytest.approx([0.5] * 4, rel=0.05)
    assert table.life_s(0.0, most_s=1e9) == pytest.approx(2 * HOUR_S, rel=0.06)


def test_spells_that_were_cut_or_seen_late_do_not_bias_the_rates() -> None:
    """Each life is seen from a random age on and for a random time: what is left out of the count is not at risk."""
    chance, table = random.Random(11), LifeTable(prior_weight_h=1e-9)
    for _ in range(30_000):
        life_h, seen_h, cut_h = chance.expovariate(0.5), chance.uniform(0, 1), chance.uniform(1, 4)
        if life_h > seen_h:
            table.watch(seen_h * HOUR_S, min(life_h, cut_h) * HOUR_S, lost=life_h <= cut_h)
    assert table.rates_per_hour()[:4] == pytest.approx([0.5] * 4, rel=0.06)


def test_a_decreasing_hazard_gives_old_capacity_a_longer_life() -> None:
    lives = [expected_life_s(PRIOR_PER_HOUR, age_h * HOUR_S, most_s=48 * HOUR_S) for age_h in (0, 1, 4, 16)]
    assert lives == sorted(lives)
    assert expected_life_s(PRIOR_PER_HOUR, 0.0, volatility=3.0, most_s=48 * HOUR_S) < lives[0]
    assert expected_life_s([0.0] * 8, 0.0, most_s=HOUR_S) == pytest.approx(HOUR_S)


def test_a_spell_must_not_end_before_it_begins() -> None:
    with pytest.raises(ValueError, match="which is before"):
        LifeTable().watch(10.0, 5.0, lost=True)


def test_the_last_spell_of_a_series_is_censored() -> None:
    assert spells_of([True, True, False, True], tick_s=60.0) == [(0.0, 120.0, True), (0.0, 60.0, False)]


def test_more_losses_than_expected_are_volatile_and_fewer_are_not_calm() -> None:
    assert volatility([], expected_per_hour=0.1) == 1.0
    assert 1.0 < volatility([1.0, 2.0, 3.0], expected_per_hour=0.1) <= 4.0


def test_losses_within_three_minutes_are_one_event() -> None:
    events = ChangeEvents(prior_events=0.0, prior_hours=0.0)
    for at_s, nodes in ((100.0, 1), (200.0, 2), (3_000.0, 1)):
        events.count(at_s, nodes)
    events.watch(2 * HOUR_S)
    assert events.group_sizes() == ((1, 0.5), (3, 0.5))
    assert events.life_s() == pytest.approx(HOUR_S)


def test_an_event_goes_on_as_long_as_each_loss_follows_the_one_before_within_three_minutes() -> None:
    events = ChangeEvents(prior_events=0.0, prior_hours=0.0)
    for at_s in (0.0, 150.0, 300.0, 481.0):
        events.count(at_s, 1)
    assert events.group_sizes() == ((1, 0.5), (3, 0.5))


def test_a_price_counts_from_its_time_on_and_the_first_before_it_too() -> None:
    book = read_prices("pool,from_s,usd_per_hour\na,3600,2\na,7200,4\n")
    assert [book.at("a", at) for at in (0.0, 3_600.0, 7_199.0, 7_200.0, inf)] == [2, 2, 2, 4, 4]
    assert book.pools["a"].usd(0.0, 3 * HOUR_S) == pytest.approx(2 + 2 + 4)
    assert steps([(0.0, 1.0), (5.0, 1.0), (9.0, 2.0)]).from_s == (0.0, 9.0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("pool,price\na,1\n", "must name the columns"),
        ("pool,from_s,usd_per_hour\na,0,-1\n", "row 2: usd_per_hour must be"),
        ("pool,from_s,usd_per_hour\na,soon,1\n", "row 2: 'soon' is neither"),
        ("pool,from_s,usd_per_hour,egress_usd_per_gb\na,0,1,\na,9,1,x\n", "row 3: egress_usd_per_gb must be .*'x'"),
        ("pool,from_s,usd_per_hour,egress_usd_per_gb\na,0,1,-0.1\n", "row 2: egress_usd_per_gb must be"),
        ("pool,from_s,usd_per_hour,egress_usd_per_gb\na,0,1,nan\n", "row 2: egress_usd_per_gb must be"),
        ("pool,from_s,usd_per_hour,egress_usd_per_gb\na,0,1,1\na,9,1,2\n", "row 3: egress.* must be 1 as before, is 2"),
    ],
)
def test_prices_that_cannot_be_read_name_row_and_column(text: str, rule: str) -> None:
    with pytest.raises(PriceError, match=rule):
        read_prices(text)


def test_what_leaves_a_pool_has_a_price_where_the_file_names_one() -> None:
    text = "pool,effective_from,usd_per_hour,egress_usd_per_gb\n"
    rows = "a,2026-01-01T00:00Z,2,0.02\na,2026-01-02T00:00Z,3,\nb,2026-01-01T00:00Z,1,0\nc,2026-01-01T00:00Z,1,\n"
    for book in (read_prices(text + rows), read_prices(text + rows).from_its_begin()):
        assert book.egress_usd_per_gb == {"a": 0.02, "b": 0.0}
    assert read_prices("pool,from_s,usd_per_hour\na,0,1\n").egress_usd_per_gb == {}


def test_a_pool_without_a_price_is_named() -> None:
    with pytest.raises(PriceError, match="pool 'b' has no price; there are prices of a"):
        read_prices("pool,from_s,usd_per_hour\na,0,1\n").at("b", 0.0)
