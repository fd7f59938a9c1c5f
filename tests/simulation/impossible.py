"""(state, event) pairs that no run can give, each with its reason. The unit tests drive them all the same. Pure.

The simulator checks the claim: a run that meets one of these fails.
"""

from tests.simulation.coverage import CUTOVER_EVENTS, Pair

_IN_ORDER = "a rank speaks in order, and it has said something that comes after this"
_PERMITTED_FIRST = "a rank shows no tag and reaches no boundary before it was permitted, and it says so in between"
_NOTHING_PROMISED = "without a promise every handoff is another one"
_NOT_ASKED = "an answer comes to a question, and nothing was asked"
_ASKED_ONCE = "every question is asked once and answered once"
_OVER = "the host stops asking and ticking when the cutover has ended"

_PARTICIPANT: dict[tuple[str, str], str] = {
    ("aborting", "active left"): _IN_ORDER,
    ("active", "aborted cutting_over left prepared preparing ready streaming other"): _IN_ORDER,
    ("cutting_over", "prepared preparing ready streaming training other"): _IN_ORDER,
    ("idle", "preparing streaming prepared ready cutting_over active left aborted"): _NOTHING_PROMISED,
    ("replaced", "preparing streaming prepared ready cutting_over active left aborted"): _NOTHING_PROMISED,
    ("permitted", "active left preparing streaming training other"): _IN_ORDER,
    ("preparing", "active cutting_over left ready"): _PERMITTED_FIRST,
    ("ready", "active cutting_over left ready"): _PERMITTED_FIRST,
    ("ready", "preparing streaming training other"): _IN_ORDER,
    ("streaming", "active cutting_over left ready"): _PERMITTED_FIRST,
    ("streaming", "preparing training other"): _IN_ORDER,
    ("withdrawing", "active left preparing streaming training other"): _IN_ORDER,
}
_CUTOVER: dict[tuple[str, str], str] = {
    ("reading", "CertificateCompared ComparisonFailed BarrierPassed BarrierFailed DecisionRead"): _NOT_ASKED,
    ("reading", "StoreUnreachable TargetBuilt"): _NOT_ASKED,
    ("held", "StateRead"): _ASKED_ONCE,
    ("held", "BarrierPassed BarrierFailed DecisionRead StoreUnreachable TargetBuilt"): _NOT_ASKED,
    ("voted", "TargetBuilt"): _NOT_ASKED,
    ("building", "StateRead CertificateCompared ComparisonFailed"): _ASKED_ONCE,
    ("decided", "TargetBuilt"): _ASKED_ONCE,
    ("decided", "StateRead CertificateCompared ComparisonFailed DecisionRead StoreUnreachable Tick"): _OVER,
    ("fell", " ".join(CUTOVER_EVENTS)): _OVER,
}

IMPOSSIBLE: dict[Pair, str] = {
    ("participant", state, f"Rank.{stage}"): reason
    for (state, stages), reason in _PARTICIPANT.items()
    for stage in stages.split()
} | {("cutover", state, event): reason for (state, events), reason in _CUTOVER.items() for event in events.split()}
