"""Which modules decide, and which fast tests are nearest to them; and which mutations are not tried."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """Modules to mutate, a folder standing for those directly in it; and the tests that have to find the mutants."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


_DRIVER = ("planning", "progress", "handoff_measures", "lead", "mirrors", "notice_response", "participants")
_STREAMING = ("tiles", "follow", "header", "pace", "ring")
_NOUNS = ("handoffs", "jobs", "nodes", "notices")
PACKAGES = {
    "layout": Package(
        ("liver_core/layout",), ("tests/liver_core/layout", "tests/liver_core/reshard/test_scenarios.py")
    ),
    "reshard": Package(("liver_core/reshard",), ("tests/liver_core/reshard",)),
    # What else is in the folder reads and steps with torch; its tests train small models, or start ranks.
    "streaming": Package(
        tuple(f"liver_core/streaming/{name}.py" for name in _STREAMING),
        tuple(f"tests/liver_core/streaming/test_{name}.py" for name in _STREAMING),
    ),
    "memory": Package(("liver_core/memory",), ("tests/liver_core/memory",)),
    "handoff": Package(("liver_core/handoff",), ("tests/liver_core/handoff",)),
    "certificate": Package(
        ("liver_core/certificate",),
        ("tests/liver_core/test_certificate.py", "tests/liver_core/test_certificate_on_device.py"),
    ),
    # What else is in the folder starts processes and waits for them; its tests do so too.
    "driver": Package(tuple(f"agent/driver/{name}.py" for name in _DRIVER), ("tests/agent/driver",)),
    "notices": Package(("agent/notices",), ("tests/agent/notices",)),
    "journal": Package(("agent/journal.py",), ("tests/agent/journal",)),
    "notice_life": Package(("agent/protocol/notice_life.py",), ("tests/agent/protocol/test_notice_life.py",)),
    "service rules": Package(
        tuple(f"service/{noun}/rules.py" for noun in _NOUNS),
        (
            *(f"tests/service/{noun}/test_rules.py" for noun in _NOUNS),
            "tests/service/handoffs/test_suspending.py",
            "tests/service/jobs/test_lost_starts.py",
        ),
    ),
    # The statements that they send are text, and are not mutated.
    "calm reports": Package(
        ("service/sync/calm.py",), ("tests/service/sync/test_calm_rules.py", "tests/service/sync/test_calm.py")
    ),
    "planner": Package(("service/planner",), ("tests/service/planner",)),
    "ledger": Package(
        tuple(f"service/ledger/{name}.py" for name in ("rules", "operations", "queries", "restarts", "training_log")),
        ("tests/service/ledger",),
    ),
}

_ORDERED, _SAME = ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"), ("Is", "IsNot")
LEFT_OUT = {
    # Identity for equality and the reverse: members of an enumeration, None and small numbers are the same object where
    # they are equal, so that no test can tell. And members of an enumeration in alphabetical order: nobody means that.
    *(f"core/ReplaceComparisonOperator_{old}_{new}" for old in _ORDERED for new in _SAME),
    *(f"core/ReplaceComparisonOperator_{old}_{new}" for old in _SAME for new in _ORDERED),
    # Need the names of variables.
    "core/VariableReplacer",
    "core/VariableInserter",
}
"""Operators of cosmic-ray that are not used."""
