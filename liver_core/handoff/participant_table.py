"""Where a participant goes on which event: its transitions as one table, and those that no run can bring about. Pure.

The machine is `participant`; a test holds the two equal, and the simulator keeps to the table. README is drawn from it.
"""

from liver_core.handoff.messages import Promise
from liver_core.handoff.participant_events import (
    OrderReceived,
    ParticipantEvent,
    ParticipantState,
    RankReported,
)

STAYS = "="

_NEXT = {
    "Order.prepare": {
        "idle active": "= preparing",
        "preparing permitted withdrawing": "= aborting",
        "streaming ready": "= preparing aborting",
        "restoring replaced aborting cutting_over": "=",
    },
    "Order.permit": {
        "ready": "= permitted preparing aborting",
        "idle": "= preparing",
        "preparing": "= aborting",
        "streaming": "= preparing aborting",
        "restoring replaced permitted withdrawing aborting cutting_over active": "=",
    },
    "Order.withdraw": {
        "permitted": "= withdrawing",
        "idle restoring replaced preparing streaming ready withdrawing aborting cutting_over active": "=",
    },
    "Order.retire": {
        "active": "= idle",
        "idle restoring replaced preparing streaming ready permitted withdrawing aborting cutting_over": "=",
    },
    "Order.abort": {
        "preparing streaming ready permitted withdrawing": "= aborting",
        "idle restoring replaced aborting cutting_over active": "=",
    },
    "Rank.training": {
        "restoring": "idle preparing active",
        "permitted withdrawing aborting cutting_over": "= active",
        "idle replaced preparing streaming ready active": "=",
    },
    "Rank.preparing": {
        "restoring": "preparing aborting",
        "idle replaced preparing streaming ready permitted withdrawing aborting cutting_over active": "=",
    },
    "Rank.streaming": {
        "restoring": "streaming aborting",
        "preparing": "streaming",
        "idle replaced streaming ready permitted withdrawing aborting cutting_over active": "=",
    },
    "Rank.prepared": {
        "restoring": "ready permitted withdrawing aborting",
        "preparing streaming": "ready",
        "withdrawing": "= ready",
        "idle replaced ready permitted aborting cutting_over active": "=",
    },
    "Rank.ready": {
        "restoring": "ready permitted withdrawing aborting",
        "idle replaced preparing streaming ready permitted withdrawing aborting cutting_over active": "=",
    },
    "Rank.cutting_over": {
        "restoring preparing streaming ready permitted withdrawing aborting": "cutting_over",
        "idle replaced cutting_over active": "=",
    },
    "Rank.active": {
        "restoring preparing streaming ready permitted withdrawing aborting cutting_over": "active",
        "idle replaced active": "=",
    },
    "Rank.left": {
        "restoring preparing streaming ready permitted withdrawing aborting cutting_over": "idle",
        "idle replaced active": "=",
    },
    "Rank.aborted": {
        "restoring preparing streaming ready permitted withdrawing aborting cutting_over": "idle",
        "idle replaced active": "=",
    },
    "Rank.broken": {
        "restoring preparing streaming ready permitted withdrawing aborting cutting_over active": "idle",
        "idle replaced": "=",
    },
    "Rank.other": {
        "restoring": "idle preparing aborting cutting_over active",
        "preparing streaming ready permitted withdrawing aborting": "= idle cutting_over active",
        "cutting_over": "= idle active",
        "active": "= idle",
        "idle replaced": "=",
    },
    "StartReceived": {
        "idle restoring preparing streaming ready permitted withdrawing aborting cutting_over active": "= replaced",
        "replaced": "=",
    },
    "WorldReplaced": {
        "idle restoring preparing streaming ready permitted withdrawing aborting cutting_over active": "= replaced",
        "replaced": "=",
    },
    "RankDied": {
        "restoring replaced preparing streaming ready permitted withdrawing aborting cutting_over active": "idle",
        "idle": "=",
    },
    "Tick": {
        "preparing streaming ready permitted withdrawing": "= aborting",
        "active": "= idle",
        "idle restoring replaced aborting cutting_over": "=",
    },
}
"""By event and states: the states that may follow, `=` for the same one."""

_IN_ORDER = "a rank speaks in order, and it has said something that comes after this"
_PERMITTED_FIRST = "a rank shows no tag and reaches no boundary before it was permitted, and it says so in between"
_NOTHING_PROMISED = "without a promise every handoff is another one"
_BROKEN_IN_THE_CUTOVER = (
    "only a handoff that is past its boundary is broken, and its rank says before that it cuts over"
)
_NEVER: dict[tuple[str, str], str] = {
    ("idle replaced", "preparing streaming prepared ready cutting_over active left aborted"): _NOTHING_PROMISED,
    ("preparing", "active cutting_over left ready"): _PERMITTED_FIRST,
    ("streaming ready", "active cutting_over left ready"): _PERMITTED_FIRST,
    ("streaming ready", "preparing training other"): _IN_ORDER,
    ("ready", "streaming"): _IN_ORDER,
    ("permitted withdrawing", "active left preparing streaming training other"): _IN_ORDER,
    ("aborting", "active left"): _IN_ORDER,
    ("cutting_over", "prepared preparing ready streaming training other"): _IN_ORDER,
    ("idle replaced preparing streaming ready permitted withdrawing aborting active", "broken"): _BROKEN_IN_THE_CUTOVER,
    ("active", "aborted cutting_over left prepared preparing ready streaming other"): _IN_ORDER,
}

EVENTS = tuple(_NEXT)
"""Orders by phase; what a rank says of the promised revision, by stage, and of anything else; and what has one form."""
TABLE: dict[tuple[ParticipantState, str], frozenset[ParticipantState]] = {
    (state, event): frozenset(state if name == STAYS else ParticipantState(name) for name in following.split())
    for event, row in _NEXT.items()
    for states, following in row.items()
    for state in map(ParticipantState, states.split())
}
"""All that may follow in a state on an event, also where no run can bring it about: a host may be wrong."""
NEVER: dict[tuple[ParticipantState, str], str] = {
    (ParticipantState(state), f"Rank.{stage}"): reason
    for (states, stages), reason in _NEVER.items()
    for state in states.split()
    for stage in stages.split()
}
"""Why a right host never brings this event in this state."""


def event_name(event: ParticipantEvent, promise: Promise | None) -> str:
    """The row of the table for this event, where the participant is bound by `promise`."""
    match event:
        case RankReported() if not event.handoff_id:
            return f"Rank.{event.stage}"
        case RankReported():
            is_ours = promise is not None and event.handoff_id == promise.handoff_id
            is_ours = is_ours and promise is not None and event.plan_revision in (None, promise.plan_revision)
            return f"Rank.{event.stage}" if is_ours else "Rank.other"
        case OrderReceived(order=order):
            return f"Order.{order.phase}"
        case _:
            return event.__class__.__name__


def drawn() -> str:
    """The table in Markdown: a row per event, a column per state."""
    states = list(ParticipantState)
    lines = [f"| event | {' | '.join(map(str, states))} |", f"|---|{'---|' * len(states)}"]
    for event in EVENTS:
        cells = []
        for state in states:
            following = sorted(STAYS if each is state else str(each) for each in TABLE[state, event])
            cells.append("×" if (state, event) in NEVER else " ".join(following))
        lines.append(f"| `{event}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
