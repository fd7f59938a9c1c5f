"""What goes over the wire changes only with the protocol version: a party of another release refuses what it does not
know, and only the version tells a person why."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from agent.protocol import joining, peer, rank, sync, wake_up, worker
from liver_core.handoff import PROTOCOL_VERSION, FailedPart, FailureCause, Order, Reason, Report

FILE = Path(__file__).with_name("wire.json")
SAID: dict[str, Any] = {
    "join": joining.JoinRequest,
    "node token": joining.NodeToken,
    "report of a node": sync.SyncReport,
    "orders of a node": sync.SyncOrders,
    "wake-up": wake_up.WakeEvent,
    "between agents": peer.Envelope,
    "order": Order,
    "report": Report,
    "start of a rank": worker.RankSpec,
    "command": rank.RankCommand,
    "event": rank.RankEvent,
}


def shape_of(schema: dict[str, Any]) -> list[str]:
    """What must be said, what may be, and which words there are. Bounds and descriptions may change."""
    must = set(schema.get("required", ()))
    fields = [f"{name}{'' if name in must else '?'}" for name in schema.get("properties", ())]
    return sorted(fields) + sorted(str(word) for word in schema.get("enum", ()))


def wire() -> dict[str, Any]:
    parts: dict[str, list[str]] = {}
    for name, kind in SAID.items():
        schema = TypeAdapter(kind).json_schema(mode="validation")
        parts |= {part: shape_of(found) for part, found in schema.pop("$defs", {}).items()}
        parts[name] = shape_of(schema)
    return {"protocol_version": PROTOCOL_VERSION} | {name: shape for name, shape in sorted(parts.items()) if shape}


def test_what_is_said_between_agents_ranks_and_service_is_that_of_this_protocol_version(
    pytestconfig: pytest.Config,
) -> None:
    found = wire()
    if pytestconfig.getoption("--rewrite"):
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(FILE.read_text())
    changed = sorted(name for name in {*known, *found} if known.get(name) != found.get(name))
    assert not changed, (
        f"{changed} differ: raise PROTOCOL_VERSION, and FORMAT of the agent's journal, unless they were raised since "
        "the last release; then run this test with --rewrite, and commit wire.json"
    )


@pytest.mark.parametrize("said", [b'{"type": "later"}', b'{"type": "status", "later": null}'])
def test_a_rank_refuses_a_command_of_which_it_does_not_know_all(said: bytes) -> None:
    with pytest.raises(ValidationError, match="later"):
        rank.decode_command(said)


def test_a_field_that_an_agent_does_not_know_is_refused_also_deep_in_a_message_and_where_it_says_nothing() -> None:
    """As the field `peer` of a cause is by an agent before protocol version 4."""
    failed = rank.Failed(reason=Reason("gone", "prepare", cause=FailureCause(FailedPart.PEER)))
    said = json.loads(rank.encode_line(failed))
    assert said["reason"]["cause"]["peer"] is None, "it is said all the same"
    said["reason"]["cause"]["later"] = None
    with pytest.raises(ValidationError, match=r"reason\.cause\.later"):
        rank.decode_event(json.dumps(said).encode())
