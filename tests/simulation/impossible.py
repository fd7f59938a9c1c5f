"""(state, event) pairs that no run can give, each with its reason. The unit tests drive them all the same. Pure.

The simulator checks the claim: a run that meets one of these fails.
"""

from liver_core.handoff.participant_table import NEVER
from tests.simulation.coverage import CUTOVER_EVENTS, Pair

_NOT_ASKED = "an answer comes to a question, and nothing was asked"
_ASKED_ONCE = "every question is asked once and answered once"
_READ_BY_THEN = "reads end, or are ended, before their rank votes without them (`until`)"
_OVER = "the host stops asking and ticking when the cutover has ended"
_GIVES_UP_FIRST = "an agent gives up the older world, and only then takes the start that it has heard of with it"
_NOTHING_OPEN = "a leader opens a handoff only where it has none open"
_AMENDABLE = "a leader amends what prepares or has permission, and nothing else"
_NO_CANCEL = "a leader has nothing to cancel where nothing is open"
_SILENT = "who is silent counts as lost only while ranks prepare, or drop what they have (SILENT_IS_LOST)"
_BOUND = "preparing streaming ready permitted withdrawing aborting cutting_over active restoring"

_DECLARED: dict[tuple[str, str, str], str] = {
    ("cutover", "reading", "CertificateCompared ComparisonFailed BarrierPassed BarrierFailed DecisionRead"): _NOT_ASKED,
    ("cutover", "reading", "StoreUnreachable TargetBuilt"): _NOT_ASKED,
    ("cutover", "held", "StateRead"): _ASKED_ONCE,
    ("cutover", "held", "BarrierPassed BarrierFailed DecisionRead StoreUnreachable TargetBuilt"): _NOT_ASKED,
    ("cutover", "voted", "TargetBuilt"): _NOT_ASKED,
    ("cutover", "voted", "StateRead"): _READ_BY_THEN,
    ("cutover", "building", "DecisionRead StoreUnreachable"): _NOT_ASKED,
    ("cutover", "building", "StateRead CertificateCompared ComparisonFailed"): _ASKED_ONCE,
    ("cutover", "decided", "TargetBuilt"): _ASKED_ONCE,
    ("cutover", "decided", "StateRead CertificateCompared ComparisonFailed BarrierPassed BarrierFailed"): _OVER,
    ("cutover", "decided", "DecisionRead StoreUnreachable Tick"): _OVER,
    ("cutover", "fell", " ".join(CUTOVER_EVENTS)): _OVER,
    ("participant", _BOUND, "StartReceived"): _GIVES_UP_FIRST,
    ("proposer", "preparing permitted withdrawing aborting retiring", "Open"): _NOTHING_OPEN,
    ("proposer", "idle withdrawing aborting retiring", "Amend"): _AMENDABLE,
    ("proposer", "idle", "Cancel"): _NO_CANCEL,
    ("proposer", "permitted withdrawing retiring", "MemberLost"): _SILENT,
}
"""By machine, states and events."""

IMPOSSIBLE: dict[Pair, str] = {
    **{("participant", str(state), event): reason for (state, event), reason in NEVER.items()},
    **{
        (machine, state, event): reason
        for (machine, states, events), reason in _DECLARED.items()
        for state in states.split()
        for event in events.split()
    },
}
