"""Which cause a slot's time has."""

import pytest

from liver_core.handoff import RankStage
from service.ledger.rules import SlotFacts, cause_of
from service.ledger.tables import Cause


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (SlotFacts(None, None, 1), Cause.IDLE),
        (SlotFacts(RankStage.LEFT, 1, 2), Cause.IDLE),
        (SlotFacts(RankStage.FINISHED, 1, 1), Cause.IDLE),
        (SlotFacts(RankStage.STARTING, 1, 1), Cause.BOOTSTRAP),
        (SlotFacts(RankStage.STARTING, 2, 2, from_checkpoint=True), Cause.FALLBACK_RESTART),
        (SlotFacts(RankStage.PREPARING, 2, 1), Cause.BOOTSTRAP),
        (SlotFacts(RankStage.PREPARING, 1, 1), Cause.PRODUCTIVE),
        (SlotFacts(RankStage.CUTTING_OVER, 1, 1), Cause.PRODUCTIVE),
        (SlotFacts(RankStage.TRAINING, 1, 1, step=9, repeats_until=9), Cause.PRODUCTIVE),
        (SlotFacts(RankStage.TRAINING, 2, 2, step=8, repeats_until=9), Cause.RECOMPUTE),
        (SlotFacts(RankStage.TRAINING, 1, 1, step=10, repeats_until=9), Cause.PRODUCTIVE),
        (SlotFacts(RankStage.BROKEN, 1, 1), Cause.LOST),
        (SlotFacts(RankStage.FAILED, 1, 1), Cause.LOST),
    ],
)
def test_a_slots_time_has_the_cause_that_its_rank_shows(facts, cause):
    assert cause_of(facts) is cause


def test_every_stage_has_a_cause():
    for stage in RankStage:
        assert cause_of(SlotFacts(stage, 1, 1)) in Cause
