"""Waits between tries grow up to a limit, however many there have been. Pure."""

import pytest

from liver_core.retries import RETRY_MAX_S, doubled_s, retry_in_s


def test_the_wait_doubles_with_every_failure_up_to_its_limit():
    assert [retry_in_s(failures) for failures in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, RETRY_MAX_S, RETRY_MAX_S]


@pytest.mark.parametrize("failures", [1_023, 1_024, 5_000, 10**9])
def test_a_job_whose_handoffs_fail_for_days_waits_the_longest_and_no_longer(failures: int):
    assert retry_in_s(failures) == RETRY_MAX_S
    assert doubled_s(60.0, failures, 960.0) == 960.0
