"""The table of a participant's transitions is complete, and is what the machine does. Pure."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import liver_core.handoff
from liver_core.handoff import Participant, Phase, Rung
from liver_core.handoff.messages import HandoffId
from liver_core.handoff.participant_events import (
    OrderReceived,
    ParticipantEvent,
    ParticipantState,
    RankStage,
)
from liver_core.handoff.participant_table import EVENTS, NEVER, TABLE, drawn, event_name
from tests.liver_core.handoff.samples import (
    H2,
    A,
    B,
    C,
    every_participant_event,
    order,
    participant,
    participant_in,
    rank_says,
    roster,
)

README = Path(liver_core.handoff.__file__).with_name("README.md")
BEGIN, END = "<!-- the table of a participant -->\n", "<!-- end of the table -->\n"


def machines(state: ParticipantState) -> Iterator[Participant]:
    """Participants in this state that came there in different ways."""
    for member in (A, B, C):
        yield participant_in(state, member) if state is not ParticipantState.IDLE else participant(member)
    if state is ParticipantState.RESTORING:
        for before in (ParticipantState.PERMITTED, ParticipantState.WITHDRAWING, ParticipantState.ABORTING):
            machine = participant(A, participant_in(before).record)
            machine.start(2.0)
            yield machine
    if state is ParticipantState.WITHDRAWING:
        machine = participant_in(ParticipantState.PERMITTED)  # Its rank has not said yet that it shows the tag.
        machine.handle(OrderReceived(order(Phase.WITHDRAW)), 2.0)
        yield machine


def events() -> list[ParticipantEvent]:
    following = order(handoff_id=H2, parent=2, generation=3, source=roster(2, A, C), target=roster(3, A, C))
    ours = rank_says(RankStage.TRAINING, handoff_id=HandoffId(""), generation=2)
    broken = rank_says(RankStage.BROKEN, handoff_id=HandoffId(""))
    late = order(Phase.PERMIT, rung=Rung.RESCUE)
    return [*every_participant_event(), OrderReceived(following), OrderReceived(late), ours, broken]


def test_the_table_has_every_event_in_every_state():
    assert set(TABLE) == {(state, event) for state in ParticipantState for event in EVENTS}
    assert set(NEVER) <= set(TABLE)


def test_the_table_says_what_the_machine_does():
    went: dict[tuple[ParticipantState, str], set[ParticipantState]] = defaultdict(set)
    for state in ParticipantState:
        for reached in machines(state):
            for event in events():
                for now in (3.0, 10_000.0):
                    machine = copy.copy(reached)
                    name = event_name(event, machine.record.promise)
                    machine.handle(event, now)
                    went[state, name].add(machine.state)
    assert {key: following for key, following in went.items() if following != TABLE[key]} == {}
    assert set(TABLE) - set(went) <= set(NEVER), "without a promise a rank speaks of other handoffs only"


def test_the_readme_has_the_table(request: pytest.FixtureRequest):
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    if request.config.getoption("--rewrite"):
        README.write_text(f"{before}{BEGIN}{drawn()}{END}{after}")
    else:
        assert rest.split(END)[0] == drawn()
