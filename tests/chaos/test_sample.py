"""Two short trials of `make chaos`, with real processes; the rules that hold in every trial hold in these."""

from pathlib import Path

import pytest

from tests.chaos.ground import possible_actions
from tests.chaos.plan import plan_of
from tests.chaos.report import broken_rules
from tests.chaos.run import run_trial

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

SEEDS = (5,)
"""Few nodes with few ranks, and nothing that is stopped for long."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trial_breaks_no_rule(seed: int, tmp_path: Path):
    said: list[str] = []
    record = run_trial(plan_of(seed, possible_actions()), keep=tmp_path, say=said.append)
    assert record["killed"] is not None, said
    # Not how long it took: the machine may be busy with other tests.
    assert [rule for rule in broken_rules(record) if not rule.startswith("recovery")] == [], (record, said)
