"""(state, event) pairs that no run can give, each with its reason. The unit tests drive them all the same. Pure.

The simulator checks the claim: a run that meets one of these fails.
"""

from liver_core.handoff.participant_table import NEVER
from tests.simulation.coverage import CUTOVER_EVENTS, Pair

_NOT_ASKED = "an answer comes to a question, and nothing was asked"
_ASKED_ONCE = "every question is asked once and answered once"
_OVER = "the host stops asking and ticking when the cutover has ended"

_CUTOVER: dict[tuple[str, str], str] = {
    ("reading", "CertificateCompared ComparisonFailed BarrierPassed BarrierFailed DecisionRead"): _NOT_ASKED,
    ("reading", "StoreUnreachable TargetBuilt"): _NOT_ASKED,
    ("held", "StateRead"): _ASKED_ONCE,
    ("held", "BarrierPassed BarrierFailed DecisionRead StoreUnreachable TargetBuilt"): _NOT_ASKED,
    ("voted", "TargetBuilt"): _NOT_ASKED,
    ("building", "StateRead CertificateCompared ComparisonFailed"): _ASKED_ONCE,
    ("decided", "TargetBuilt"): _ASKED_ONCE,
    ("decided", "StateRead CertificateCompared ComparisonFailed BarrierPassed BarrierFailed"): _OVER,
    ("decided", "DecisionRead StoreUnreachable Tick"): _OVER,
    ("fell", " ".join(CUTOVER_EVENTS)): _OVER,
}

IMPOSSIBLE: dict[Pair, str] = {
    **{("participant", str(state), event): reason for (state, event), reason in NEVER.items()},
    **{("cutover", state, event): reason for (state, events), reason in _CUTOVER.items() for event in events.split()},
}
