"""Which ranks a node reports as missing: those that the service believes in and that did not leave by themselves."""

from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from agent.driver.lifecycle import MISSING_RANK_S, Births
from agent.protocol.sources import SourceHandoff, SourceInit
from agent.protocol.sync import DesiredState
from liver_core.handoff import Decision, FailedPart, Stage
from liver_core.handoff.messages import HandoffId
from liver_core.handoff.participant_events import EndedHandoff
from liver_core.layout import Member, ParallelLayout, Roster

ORIGIN = uuid4()
ROSTER = Roster(job_id="job", generation=1, layout=ParallelLayout(pp=1), members=(Member("a", 0),))


def ended(stage: Stage, generation: int) -> EndedHandoff:
    return EndedHandoff(HandoffId(str(uuid4())), generation, 1, stage, Decision.GO, None)


def reported(source: Any, *history: EndedHandoff, origin: Any = ORIGIN) -> list[int]:
    """The slots of node a that count as lost, long after its process has ended."""
    return list(told(source, *history, origin=origin))


def told(source: Any, *history: EndedHandoff, origin: Any = ORIGIN) -> dict[int, Any]:
    """What is told of each of them."""
    memory = SimpleNamespace(origin=str(origin), record=SimpleNamespace(active=None, ended=history))
    slots = SimpleNamespace(memory=lambda slot: memory, is_bound=lambda: False)
    host = SimpleNamespace(is_busy=lambda slot: False, states=dict)
    times = iter((0.0, MISSING_RANK_S + 1.0))
    node = SimpleNamespace(node_id="a", now=lambda: next(times), sync_soon=lambda: None)
    births = Births(cast(Any, node), "job", cast(Any, slots), cast(Any, host), cast(Any, None))
    order = SimpleNamespace(
        desired=DesiredState.RUN, generation=1, origin_id=ORIGIN, roster=ROSTER, source=source, checkpoint_asked=0
    )
    lost: dict[int, Any] = {}
    for _ in range(2):
        births._note_missing(cast(Any, order), ROSTER, [0], lost)
    return lost


SOURCES = [SourceInit(), SourceHandoff(handoff_id=ORIGIN)]


@pytest.mark.parametrize("source", SOURCES)
def test_a_rank_whose_process_is_gone_is_missing(source: Any):
    assert reported(source) == [0]
    assert reported(source, ended(Stage.ABORTED, 2)) == [0]


def test_a_rank_that_ended_while_nobody_looked_is_blamed_for_nothing():
    """It may have ended itself, as all ranks do that miss another one. Who saw a death outranks this word."""
    said = told(SourceInit())[0].reason
    assert said is not None and said.cause is not None and said.cause.what is FailedPart.PEER


@pytest.mark.parametrize("source", SOURCES)
def test_a_leaver_is_not_missing_however_long_the_next_world_takes_for_its_first_step(source: Any):
    assert reported(source, ended(Stage.LEFT, 2)) == []
    assert reported(source, ended(Stage.LEFT, 2), ended(Stage.ABORTED, 3)) == [], "other attempts came after it"
    assert reported(source, ended(Stage.LEFT, 1)) == [0], "it left an earlier world, and is in this one again"


def test_a_rank_that_is_still_to_be_started_is_not_missing():
    assert reported(SourceInit(), origin=uuid4()) == []
