"""Which cause a slot's time has."""

from datetime import UTC, datetime, timedelta

import pytest

from liver_core.handoff import RankStage
from service.ledger.rules import Origin, Part, SlotFacts, Spent, StepTime, cause_of, clipped, painted, parts_of
from service.ledger.tables import Cause

START = datetime(2026, 1, 1, tzinfo=UTC)
IDLE = Spent(Cause.IDLE)


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
        (SlotFacts(RankStage.TRAINING, 1, 1, has_stepped=False), Cause.BOOTSTRAP),
        (SlotFacts(RankStage.TRAINING, 2, 2, from_checkpoint=True, has_stepped=False), Cause.FALLBACK_RESTART),
        (SlotFacts(RankStage.BROKEN, 1, 1, has_stepped=False), Cause.LOST),
        (SlotFacts(RankStage.BROKEN, 1, 1), Cause.LOST),
        (SlotFacts(RankStage.FAILED, 1, 1), Cause.LOST),
    ],
)
def test_a_slots_time_has_the_cause_that_its_rank_shows(facts, cause):
    assert cause_of(facts) is cause


def test_every_stage_has_a_cause():
    for stage in RankStage:
        assert cause_of(SlotFacts(stage, 1, 1)) in Cause


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def part(starts_s: float, ends_s: float, cause: Cause, generation: int | None = 1) -> Part:
    return Part(at(starts_s), at(ends_s), Spent(cause, "j", generation))


def steps(generation: int, *ends: tuple[int, float]) -> list[StepTime]:
    return [StepTime(generation, number, 0.5, at(end)) for number, end in ends]


def origins(**known: Origin):
    return lambda generation: known[f"g{generation}"]


FIRST = Origin(is_handoff=False, known=1)


def test_a_world_works_from_the_begin_of_its_first_step_to_the_end_of_its_last():
    found = parts_of("j", steps(1, (1, 1), (2, 2), (4, 9)), origins(g1=FIRST))
    assert found == [part(0.5, 9, Cause.PRODUCTIVE)]
    assert parts_of("j", [], origins()) == []


def test_a_world_that_took_over_by_a_handoff_goes_on_where_the_one_before_it_ended():
    made = steps(2, (3, 6)) + steps(1, (1, 1), (2, 2))
    found = parts_of("j", made, origins(g1=FIRST, g2=Origin(is_handoff=True, known=2)))
    assert found == [part(0.5, 2, Cause.PRODUCTIVE), part(2, 6, Cause.PRODUCTIVE, 2)]


@pytest.mark.parametrize(("from_checkpoint", "cause"), [(True, Cause.FALLBACK_RESTART), (False, Cause.BOOTSTRAP)])
def test_between_two_worlds_with_a_start_the_ranks_started(from_checkpoint, cause):
    later = Origin(is_handoff=False, from_checkpoint=from_checkpoint, known=11)
    found = parts_of("j", steps(1, (1, 1)) + steps(11, (2, 6)), origins(g1=FIRST, g11=later))
    assert found == [part(0.5, 1, Cause.PRODUCTIVE), part(1, 5.5, cause, 11), part(5.5, 6, Cause.PRODUCTIVE, 11)]


def test_steps_that_are_made_again_are_recomputation_up_to_the_last_of_them():
    again = Origin(is_handoff=False, repeats_until=2, known=1)
    found = parts_of("j", steps(1, (1, 1), (2, 2), (3, 3)), origins(g1=again))
    assert found == [part(0.5, 2, Cause.RECOMPUTE), part(2, 3, Cause.PRODUCTIVE)]


def test_what_is_known_is_painted_over_what_was_thought_and_neighbours_alike_are_one():
    span = Part(at(0), at(10), IDLE)
    over = [part(-3, 2, Cause.PRODUCTIVE), part(2, 3, Cause.PRODUCTIVE), part(5, 6, Cause.RECOMPUTE)]
    assert painted(span, over) == [
        part(0, 3, Cause.PRODUCTIVE), Part(at(3), at(5), IDLE), part(5, 6, Cause.RECOMPUTE), Part(at(6), at(10), IDLE)
    ]  # fmt: skip
    assert painted(span, []) == [span]
    assert painted(span, [part(-1, 11, Cause.PRODUCTIVE)]) == [part(0, 10, Cause.PRODUCTIVE)]
    assert clipped([part(0, 1, Cause.PRODUCTIVE)], after=at(1), until=at(2)) == []
