"""What the job rule sees of a handoff's row."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from agent.protocol.values import HandoffState
from liver_core.handoff import Decision, Rung
from liver_core.layout import Member, ParallelLayout, Roster
from service.db.roster_rows import stored_roster
from service.handoffs.queries import as_open
from service.handoffs.tables import HandoffRow

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("rung", "decision", "expected"),
    [
        (Rung.RESCUE, Decision.UNDECIDED, True),
        (Rung.DROP_STEP, Decision.GO_REDO, True),
        (Rung.LIVE, Decision.GO, True),
        (Rung.LIVE, Decision.UNDECIDED, False),
        (Rung.LIVE, Decision.NO_GO, False),
        (Rung.LIVE, None, False),
    ],
)
def test_leaving_nodes_may_go_once_the_next_world_no_longer_needs_them(
    rung: Rung, decision: Decision | None, expected: bool
):
    row = HandoffRow(
        handoff_id=uuid4(),
        state=HandoffState.CUTTING_OVER,
        rung=rung,
        decision=decision,
        leaving=["b"],
        target=stored_roster(Roster("j", 2, ParallelLayout(), (Member("a", 0),))),
        opened_at=NOW,
        recorded_at=NOW,
        deadline_at=None,
    )
    assert as_open(row).may_lose_leavers is expected
