"""A machine that was stopped and started again under its name: what was said to its life before ends no later one."""

from datetime import UTC, datetime, timedelta

import pytest

from agent.protocol.sync import Provider
from service.clouds.cloud_facts import CloudFact, Disposition, FactKind
from service.clouds.rules import Life, Machine, judge
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


BACK = Machine("a", has_lease=True, life=Life(at(0), former_until=at(-20)))
ONLY = Machine("a", has_lease=True, life=Life(at(0)))


def said(machine: Machine, kind: FactKind, said_s: float, ends_s: float | None) -> Disposition:
    deadline = None if ends_s is None else at(ends_s)
    fact = CloudFact(Provider.AWS, "i-a", kind, at(said_s), deadline, "aws-queue", "m", "{}")
    return judge(fact, machine, at(5)).disposition


@pytest.mark.parametrize(
    ("machine", "kind", "said_s", "ends_s"),
    [
        (BACK, FactKind.INTERRUPTION, -45, 75), (BACK, FactKind.INTERRUPTION, -45, None),
        (BACK, FactKind.REBALANCE, -45, None), (BACK, FactKind.GOING, -30, -30), (BACK, FactKind.GONE, -25, None),
        (BACK, FactKind.MAINTENANCE, -300, -10), (ONLY, FactKind.INTERRUPTION, -150, -30),
        (ONLY, FactKind.GOING, -30, -30),
    ],
)  # fmt: skip
def test_what_was_said_to_a_life_before_is_late(machine: Machine, kind: FactKind, said_s: float, ends_s: float | None):
    assert said(machine, kind, said_s, ends_s) is Disposition.LATE


def test_what_this_life_was_told_or_will_be_taken_by_counts():
    assert said(BACK, FactKind.INTERRUPTION, -10, 110) is Disposition.ACTS, "the machine was up, its agent not yet"
    assert said(BACK, FactKind.INTERRUPTION, 1, 121) is Disposition.ACTS
    assert said(ONLY, FactKind.INTERRUPTION, -45, 75) is Disposition.ACTS
    assert said(BACK, FactKind.MAINTENANCE, -300, 60) is Disposition.ACTS, "planned work outlasts a stop"
    assert said(Machine("a", has_lease=True), FactKind.INTERRUPTION, -150, -30) is Disposition.ACTS


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_copy_of_an_old_warning_takes_the_node_only_if_its_machine_has_lived_on(
    on_machines, tell, client, context, clock, make_agent, is_restarted
):
    _, agent, _ = on_machines
    assert tell("i-a", in_s=120).disposition is Disposition.ACTS
    clock.advance(30)
    with context.sessions.begin() as session:
        mark_gone(session, session.get_one(NodeRow, "a"), reason="test", now=clock())
    clock.advance(15)
    if is_restarted:
        agent = make_agent("a")
        agent.provider_id = "i-a"
    agent.sync()
    taken = tell("i-a", in_s=75, ago_s=45)
    assert taken.disposition is (Disposition.LATE if is_restarted else Disposition.ACTS)
    assert client.get("/api/v1/nodes/a").json()["leaving"] is not is_restarted
    assert tell("i-a", in_s=120).disposition in (Disposition.ACTS, Disposition.REPEATED)
