"""Starts of a node's agent: an earlier one may not speak for the node, and not all that ever were are kept."""

from uuid import uuid4

from sqlalchemy import func, select

from service.nodes.operations import STARTS_KEPT_MAX
from service.nodes.tables import IncarnationRow, NodeRow


def test_of_very_many_starts_of_an_agent_the_newest_are_known(make_agent, context, clock):
    agent, starts = make_agent("a"), []
    for number in range(STARTS_KEPT_MAX + 5):
        # Some come within one moment of the clock: the present one stays all the same.
        clock.advance(number % 2)
        agent.incarnation, agent.seq, agent.orders = uuid4(), 0, None
        starts.append(agent.incarnation)
        agent.sync()
    with context.sessions() as session:
        assert session.scalar(select(func.count()).select_from(IncarnationRow)) == STARTS_KEPT_MAX
        assert session.get_one(NodeRow, "a").agent_incarnation == starts[-1]
        assert session.get(IncarnationRow, starts[-1]) is not None
    agent.incarnation = starts[-3]
    refused = agent.post(agent.report())
    assert refused.status_code == 409 and "was replaced and must end" in refused.json()["detail"]
