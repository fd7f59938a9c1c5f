"""Whom the agent that leads a handoff takes for lost since it does not reach them, and who is to blame. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from liver_core.handoff import FailedPart, FailureCause, Reason
from liver_core.handoff.proposer_events import MemberLost
from liver_core.layout import Member


def lost_members(
    own: str, members: Iterable[Member], unreachable: Mapping[str, float], *, phase: str, now: float, lost_s: float
) -> Iterator[MemberLost]:
    """Those of `members` whose agents have not been reached for `lost_s`. `unreachable`: since when each node's agent
    has not been. Whoever reaches none of several others is cut off itself: its own node is named."""
    found = tuple(dict.fromkeys(members))
    others = {member.node_id for member in found} - {own}
    is_cut_off = len(others) > 1 and others <= unreachable.keys()
    for member in found:
        since = unreachable.get(member.node_id)
        if since is None or now - since <= lost_s:
            continue
        text = f"the agent of {member.node_id} has not been reached for {now - since:.0f} s"
        text = f"{text}, nor has any other: {own} is cut off" if is_cut_off else text
        node = own if is_cut_off else ""
        yield MemberLost(member, Reason(text, phase, node=node, cause=FailureCause(FailedPart.NODE)))
