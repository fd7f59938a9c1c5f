"""No case of `make test` takes long, as far as it is on record."""

from tests import tiers
from tests.durations import known_seconds


def test_no_case_of_make_test_takes_longer_than_any_may() -> None:
    found = {test: seconds for test, seconds in known_seconds().too_long.items() if test not in tiers.MAY_TAKE_LONGER}
    assert not found, f"longer than {tiers.CASE_MAX_S:.0f} s; move them to the thorough tier, or name them in tiers.py"


def test_few_cases_may_take_longer() -> None:
    assert len(tiers.MAY_TAKE_LONGER) <= tiers.LONGER_MOST and all(tiers.MAY_TAKE_LONGER.values())


def test_what_may_fail_beside_others_has_an_owner_and_a_reason() -> None:
    assert all(": " in why for why in tiers.UNSTEADY.values())
