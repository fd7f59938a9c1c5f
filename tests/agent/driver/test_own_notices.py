"""What an agent remembers of its own node's notices: in its journal, for its jobs, and for the service."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from agent.driver.driver import Driver
from agent.driver.node_context import Node
from agent.journal import Journal, Table
from agent.link.outbox import Outbox
from agent.notices.source import Announced, Announcement, NoneSource, Nothing, Observation
from agent.notices.watcher import NoticeWatcher
from agent.protocol.notice_life import ends_utc
from agent.protocol.sync import NoticeFact, NoticeKind, SourceHealth

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
INTERRUPTED = Announced((Announcement(NoticeKind.INTERRUPTION, NOON + timedelta(seconds=120), "raw"),))


class Start:
    """One start of the agent of node d, as far as notices go: watcher, driver and journal."""

    def __init__(self, directory: Path, *, at_s: float = 0.0) -> None:
        self.now = NOON + timedelta(seconds=at_s)
        self.journal = Journal(directory).open()
        self.outbox, self.report_seq = Outbox(), 0
        self.driver = Driver()
        node = SimpleNamespace(journal=self.journal, outbox=self.outbox, sync_soon=lambda: None)
        self.driver.bind(cast(Node, node))
        self.watcher = NoticeWatcher(
            NoneSource(),
            node_id="d",
            known=self.driver.own_notices(),
            on_fact=self._take,
            on_over=self._forget,
            on_health=self._ignore,
            now=lambda: self.now,
        )

    def see(self, observation: Observation, at_s: float) -> None:
        self.now = NOON + timedelta(seconds=at_s)
        asyncio.run(self.watcher.take(observation))

    def told(self) -> list[NoticeFact]:
        """What the service is told, all of which it takes."""
        self.report_seq += 1
        facts = self.outbox.notices.batch(self.report_seq)
        self.outbox.acknowledge(self.report_seq)
        return list(facts)

    async def _take(self, fact: NoticeFact) -> None:
        self.driver.take_notice(fact)

    async def _forget(self, fact: NoticeFact) -> None:
        self.driver.forget_notice(fact)

    async def _ignore(self, health: SourceHealth) -> None:
        """The service's business."""


def test_a_withdrawal_survives_a_restart_and_the_next_notice_is_heard(tmp_path: Path) -> None:
    first = Start(tmp_path)
    first.see(INTERRUPTED, 0)
    first.see(Nothing(), 20)
    first.journal.close()
    second = Start(tmp_path, at_s=30)
    assert [fact.withdrawn_utc for fact in second.told()] == [NOON + timedelta(seconds=20)], "it may not have arrived"
    second.see(INTERRUPTED, 40)
    assert [(fact.first_seen_utc, fact.withdrawn_utc) for fact in second.told()] == [
        (NOON + timedelta(seconds=40), None)
    ]
    second.journal.close()
    third = Start(tmp_path, at_s=50)
    third.see(Nothing(), 51)
    assert third.told()[-1].withdrawn_utc == NOON + timedelta(seconds=51)
    third.journal.close()


def test_what_is_over_leaves_memory_and_journal(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.see(INTERRUPTED, 0)
    (fact,) = start.told()
    start.see(Nothing(), 20)
    assert start.driver.own_notices() and start.journal.items(Table.NOTICE)
    start.see(Nothing(), (ends_utc(fact) - NOON).total_seconds())
    assert (start.driver.own_notices(), start.journal.items(Table.NOTICE)) == ((), ())
    start.journal.close()
    again = Start(tmp_path, at_s=400)
    assert again.told() == []
    again.journal.close()


def test_a_record_of_an_earlier_agent_is_taken_over_and_forgotten_in_its_turn(tmp_path: Path) -> None:
    journal = Journal(tmp_path).open()
    fact = NoticeFact(
        node_id="d",
        kind=NoticeKind.INTERRUPTION,
        source="none",
        deadline_utc=NOON + timedelta(seconds=120),
        first_seen_utc=NOON,
    )
    record = json.loads(fact.model_dump_json(exclude={"withdrawn_utc"}))
    journal.put(Table.NOTICE, "d/interruption", record)
    journal.close()
    start = Start(tmp_path, at_s=10)
    assert start.told() == [fact]
    start.see(Nothing(), 301)
    assert start.journal.items(Table.NOTICE) == ()
    start.journal.close()
