"""Whom the agent that leads a handoff takes for lost since it does not reach them, and who is to blame. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from liver_core.handoff.messages import FailedPart, FailureCause, Reason
from liver_core.handoff.proposer_events import Hindered, MemberLost
from liver_core.layout import Member

HINDERED_S = 5.0
"""Whoever reached nobody for so long may have missed what others would have done in time."""


def cut_off(own: str, members: Iterable[Member], unreachable: Mapping[str, float], *, now: float) -> Hindered | None:
    """That the leading agent has reached none of several others for a while, though none is lost yet."""
    others = _all_unreached(own, members, unreachable)
    if not others:
        return None
    for_s = now - max(unreachable[node_id] for node_id in others)
    text = f"{own}, which leads, reached no other node for {for_s:.0f} s"
    return _hindered(own, text) if for_s >= HINDERED_S else None


def started_again(own: str) -> Hindered:
    """That the leading agent's process was another one when the handoff was opened."""
    return _hindered(own, f"the agent of {own}, which leads, was started again meanwhile")


def _all_unreached(own: str, members: Iterable[Member], unreachable: Mapping[str, float]) -> set[str]:
    """The other nodes where there are several and none of them is reached; else none."""
    others = {member.node_id for member in members} - {own}
    return others if len(others) > 1 and others <= unreachable.keys() else set()


def _hindered(own: str, text: str) -> Hindered:
    return Hindered(Reason(text, "lead", node=own, cause=FailureCause(FailedPart.NODE)))


def lost_members(
    own: str, members: Iterable[Member], unreachable: Mapping[str, float], *, phase: str, now: float, lost_s: float
) -> Iterator[MemberLost]:
    """Those of `members` whose agents have not been reached for `lost_s`. `unreachable`: since when each node's agent
    has not been. Whoever reaches none of several others is cut off itself: its own node is named."""
    found = tuple(dict.fromkeys(members))
    is_cut_off = bool(_all_unreached(own, found, unreachable))
    for member in found:
        since = unreachable.get(member.node_id)
        if since is None or now - since <= lost_s:
            continue
        text = f"the agent of {member.node_id} has not been reached for {now - since:.0f} s"
        text = f"{text}, nor has any other: {own} is cut off" if is_cut_off else text
        node = own if is_cut_off else ""
        yield MemberLost(member, Reason(text, phase, node=node, cause=FailureCause(FailedPart.NODE)))
