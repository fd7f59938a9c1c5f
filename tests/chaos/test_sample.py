"""A short trial of `make chaos`, with real processes: a rank that stays is killed while the job leaves a node."""

from pathlib import Path

import pytest

from tests.chaos.ground import possible_actions
from tests.chaos.plan import plan_of
from tests.chaos.report import broken_rules
from tests.chaos.run import run_trial

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

SEEDS = (387,)
"""Three nodes with a rank each, and nothing that is stopped for long."""
NOT_ASKED = ("recovery", "reason")
"""A machine that is busy with other tests may be slow, and then another wait may be the first to end."""


@pytest.mark.parametrize("seed", SEEDS)
def test_no_step_no_sample_and_no_number_is_lost_and_nothing_is_left(seed: int, tmp_path: Path):
    said: list[str] = []
    record = run_trial(plan_of(seed, possible_actions()), keep=tmp_path, say=said.append)
    assert record["killed"] is not None, said
    assert [rule for rule in broken_rules(record) if not rule.startswith(NOT_ASKED)] == [], (record, said)
