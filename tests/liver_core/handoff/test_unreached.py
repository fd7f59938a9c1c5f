"""Whom a lead takes for lost, and whom it names."""

import pytest

from liver_core.handoff import FailedPart, FailureCause
from liver_core.handoff.unreached import HINDERED_S, cut_off, lost_members
from liver_core.layout import Member

MEMBERS = tuple(Member(node, slot) for node, slot in (("a", 0), ("b", 0), ("b", 1), ("c", 0)))


def found(away: dict[str, float], members: tuple[Member, ...] = MEMBERS) -> list[tuple[Member, str, str]]:
    lost = list(lost_members("a", members, away, phase="preparing", now=121.0, lost_s=20.0))
    assert all(each.reason.cause == FailureCause(FailedPart.NODE) for each in lost)
    return [(each.member, each.reason.node, each.reason.text) for each in lost]


def test_an_agent_that_is_not_reached_for_long_loses_all_its_ranks_and_is_named():
    text = "the agent of b has not been reached for 21 s"
    assert found({"b": 100.0, "elsewhere": 0.0}) == [(MEMBERS[1], "", text), (MEMBERS[2], "", text)]
    assert found({"b": 101.0}) == []


def test_a_lead_that_reaches_nobody_names_its_own_node():
    lost = found({"b": 100.0, "c": 119.0})
    assert [(member, node) for member, node, _ in lost] == [(MEMBERS[1], "a"), (MEMBERS[2], "a")]
    assert lost[0][2] == "the agent of b has not been reached for 21 s, nor has any other: a is cut off"


@pytest.mark.parametrize("members", [MEMBERS[:3], MEMBERS[:1]])
def test_of_two_nodes_nobody_can_tell_which_is_cut_off(members: tuple[Member, ...]):
    assert all(not node for _, node, _ in found({"b": 0.0}, members))


def test_a_lead_that_reached_nobody_for_a_while_knows_that_silence_says_nothing_of_the_others():
    now = 100.0 + HINDERED_S
    found = cut_off("a", MEMBERS, {"b": 90.0, "c": 100.0, "elsewhere": 0.0}, now=now)
    assert found is not None and (found.reason.node, found.reason.rank) == ("a", None)
    assert found.reason.text == "a, which leads, reached no other node for 5 s"
    assert found.reason.cause == FailureCause(FailedPart.NODE)
    assert cut_off("a", MEMBERS, {"b": 90.0, "c": 100.1}, now=now) is None, "not yet for long enough"
    assert cut_off("a", MEMBERS, {"b": 0.0}, now=now) is None, "c is reached"
    assert cut_off("a", MEMBERS[:3], {"b": 0.0}, now=now) is None, "of two nobody can tell"
