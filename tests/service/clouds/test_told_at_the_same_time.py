"""One loss that several channels tell at the same moment, each in a transaction of its own, and the agent as well."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from sqlalchemy import func, select

from agent.protocol.sync import NoticeFact, NoticeKind, Provider
from service.clouds.cloud_facts import CloudFact, Disposition, FactKind
from service.clouds.operations import take_facts
from service.clouds.tables import HearingRow
from service.notices.tables import NoticeRow

CHANNELS = ("aws-queue", "aws-other", "aws-third")
ROUNDS = 6


def test_one_loss_told_by_all_channels_at_once_is_one_occurrence_on_which_one_of_them_acts(
    on_machines, context, client, clock
):
    """Were what is known read before the node is locked, two of them would each take themselves for the first."""
    _, a, b = on_machines
    for number in range(ROUNDS):
        clock.advance(3_600)
        a.sync()
        b.sync()
        told_at_once(context, clock, a, number)
    with context.sessions() as session:
        said = func.count(NoticeRow.source.distinct())
        of_loss = session.scalars(select(said).group_by(NoticeRow.occurrence_id)).all()
        assert of_loss == [len(CHANNELS) + 1] * ROUNDS
        acts = select(HearingRow.occurrence_id).where(HearingRow.disposition == Disposition.ACTS)
        acted = session.scalars(acts).all()
        assert len(acted) == len(set(acted)) == ROUNDS
        seen = select(NoticeRow.occurrence_id, NoticeRow.source, func.count(NoticeRow.first_seen_at.distinct()))
        times = session.execute(seen.group_by(NoticeRow.occurrence_id, NoticeRow.source)).all()
        assert {count for _, _, count in times} == {1}, "a channel's notice keeps its first sight"
    first = {agent.node_id: notices_of(agent) for agent in (a, b)}
    assert first["a"] == first["b"] and len(first["a"]) == len(CHANNELS) + 1


def told_at_once(context, clock, agent, number: int) -> None:
    begin = threading.Barrier(len(CHANNELS) * 2 + 1)

    def tell(channel: str) -> None:
        fact = CloudFact(
            provider=Provider.AWS, provider_id="i-a", kind=FactKind.INTERRUPTION, said_at=clock(),
            deadline_at=clock() + timedelta(seconds=120), channel=channel, message_id=f"{channel}-{number}", raw="{}",
        )  # fmt: skip
        begin.wait(10)
        with context.sessions.begin() as session:
            take_facts(session, [fact], now=clock())

    def report() -> None:
        begin.wait(10)
        agent.sync(notices=(agent.notice(deadline_s=119),))

    with ThreadPoolExecutor(len(CHANNELS) * 2 + 1) as pool:
        # Each channel twice, as where two replicas read it and a message was delivered again.
        tasks = [pool.submit(tell, channel) for channel in CHANNELS * 2] + [pool.submit(report)]
        for task in tasks:
            task.result(60)


def notices_of(agent) -> set[tuple[str, object, object]]:
    agent.sync()
    facts: tuple[NoticeFact, ...] = agent.job_order().notices
    assert {fact.kind for fact in facts} == {NoticeKind.INTERRUPTION}
    return {(fact.source, fact.first_seen_utc, fact.deadline_utc) for fact in facts}
