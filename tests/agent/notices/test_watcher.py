"""The watcher's bookkeeping, and the warning budget."""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from agent.notices import watcher as watcher_module
from agent.notices.source import Announced, Announcement, NoneSource, Nothing, Observation, Unknown
from agent.notices.warning_budget import warning_budget
from agent.notices.watcher import NoticeWatcher
from agent.protocol.notice_life import ends_utc
from agent.protocol.sync import NoticeFact, NoticeKind, Provider, SourceHealth, SourceState
from tests.agent import virtual_time

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


@dataclass
class Watched:
    """A watcher of the source `none`, its clock, and what it told."""

    known: Iterable[NoticeFact] = ()
    now: datetime = NOON
    facts: list[NoticeFact] = field(default_factory=list)
    over: list[NoticeFact] = field(default_factory=list)
    healths: list[SourceHealth] = field(default_factory=list)

    def __post_init__(self) -> None:
        async def on_fact(fact: NoticeFact) -> None:
            self.facts.append(fact)

        async def on_over(fact: NoticeFact) -> None:
            self.over.append(fact)

        async def on_health(health: SourceHealth) -> None:
            self.healths.append(health)

        self.watcher = NoticeWatcher(
            NoneSource(),
            node_id="a",
            known=self.known,
            on_fact=on_fact,
            on_over=on_over,
            on_health=on_health,
            now=lambda: self.now,
        )

    def see(self, observation: Observation, *, at_s: float = 0.0) -> list[NoticeFact]:
        """The facts that this observation makes, so many seconds after noon."""
        self.now = NOON + timedelta(seconds=at_s)
        before = len(self.facts)
        asyncio.run(self.watcher.take(observation))
        return self.facts[before:]


def watch(*observations: Observation) -> tuple[list[NoticeFact], list[SourceHealth]]:
    watched = Watched()
    for observation in observations:
        watched.see(observation)
    return watched.facts, watched.healths


def interruption(seconds: float) -> Announcement:
    return Announcement(NoticeKind.INTERRUPTION, NOON + timedelta(seconds=seconds), "raw")


def test_a_repeated_announcement_is_one_fact() -> None:
    facts, _ = watch(
        Announced((interruption(120),)), Announced((interruption(120.5),)), Announced((interruption(121),))
    )
    assert len(facts) == 1


def test_an_earlier_deadline_is_a_new_fact_with_the_first_sight_kept() -> None:
    facts, _ = watch(Announced((interruption(120),)), Announced((interruption(60),)))
    assert [fact.deadline_utc for fact in facts] == [NOON + timedelta(seconds=120), NOON + timedelta(seconds=60)]


def test_health_is_told_once_for_each_change_with_its_reason() -> None:
    _, healths = watch(Nothing(), Nothing(), Unknown("answered 500"), Unknown("answered 500"), Nothing())
    assert [(health.state, health.reason) for health in healths] == [
        (SourceState.WATCHING, ""),
        (SourceState.UNKNOWN, "answered 500"),
        (SourceState.WATCHING, ""),
    ]


def test_before_the_first_read_a_source_is_starting_and_announces_what_was_heard_of_it_before() -> None:
    assert Watched().watcher.health == SourceHealth(
        source="none", state=SourceState.STARTING, reason="not read yet", since_utc=NOON, announces=()
    )
    (heard,) = Watched().see(Announced((interruption(120),)))
    withdrawn = heard.model_copy(update={"kind": NoticeKind.REBALANCE, "withdrawn_utc": NOON})
    other = heard.model_copy(update={"source": "aws-imds", "kind": NoticeKind.REBALANCE})
    assert Watched(known=(heard, withdrawn, other)).watcher.health.announces == (NoticeKind.INTERRUPTION,)


def test_health_says_what_is_announced_now_and_keeps_a_bounded_part_of_its_reason() -> None:
    advice = Announcement(NoticeKind.REBALANCE, None, "raw")
    _, healths = watch(Announced((advice, interruption(120))), Announced((advice,)), Unknown("x" * 501, ()))
    assert [health.announces for health in healths] == [
        (NoticeKind.INTERRUPTION, NoticeKind.REBALANCE), (NoticeKind.REBALANCE,), (NoticeKind.REBALANCE,),
    ]  # fmt: skip
    assert healths[-1].reason == "x" * 500


def test_a_source_is_read_at_its_interval_until_the_watcher_is_cancelled_and_at_once_after_a_long_read() -> None:
    async def run() -> None:
        loop, takes_s, began = asyncio.get_running_loop(), [0.5, 3.0, 0.0, 0.0], []

        class Slow(NoneSource):
            interval_s = 2.0

            async def observe(self) -> Nothing:
                began.append(loop.time())
                await passed(takes_s[len(began) - 1])
                return Nothing()

        watched = Watched()
        watched.watcher._source = Slow()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(watched.watcher.run(), timeout=7.5)
        assert began == [0.0, 2.0, 5.0, 7.0]

    async def passed(seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=seconds)

    virtual_time.run(run())


def test_what_a_half_blind_source_heard_still_counts() -> None:
    facts, _ = watch(Unknown("rebalance answered 500", (interruption(120),)))
    assert len(facts) == 1


def test_the_usable_seconds_are_105_on_aws_and_25_or_115_on_gcp() -> None:
    for provider, notice_s, usable_s in ((Provider.AWS, 0, 105), (Provider.GCP, 0, 25), (Provider.GCP, 120, 115)):
        budget = warning_budget(provider, notice_s)
        safe_by = budget.safe_by_utc(NOON, None)
        assert safe_by == NOON + timedelta(seconds=usable_s)


def test_a_node_is_gone_at_its_deadline_and_without_one_after_what_its_provider_announces() -> None:
    for provider, notice_s, announced_s in ((Provider.AWS, 0, 120), (Provider.GCP, 119, 30), (Provider.GCP, 120, 120)):
        budget = warning_budget(provider, notice_s)
        assert budget.node_gone_utc(NOON, None) == NOON + timedelta(seconds=announced_s)
        assert budget.node_gone_utc(NOON, NOON + timedelta(seconds=7)) == NOON + timedelta(seconds=7)


def test_a_short_warning_keeps_the_same_share_in_reserve() -> None:
    safe_by = warning_budget(Provider.AWS).safe_by_utc(NOON, NOON + timedelta(seconds=40))
    assert safe_by == NOON + timedelta(seconds=35)


def test_where_the_deadline_has_passed_or_the_provider_is_unknown_nothing_is_in_reserve_beyond_its_share() -> None:
    budget = warning_budget(Provider.NONE)
    assert budget.safe_by_utc(NOON, NOON - timedelta(seconds=5)) == NOON - timedelta(seconds=5)
    assert budget.safe_by_utc(NOON, NOON + timedelta(seconds=600)) == NOON + timedelta(seconds=585)
    assert (budget.announced_s, budget.usable_s) == (120, 105)


def test_a_notice_that_its_source_does_not_announce_any_more_is_withdrawn_once() -> None:
    watched = Watched()
    (heard,) = watched.see(Announced((interruption(120),)))
    (withdrawn,) = watched.see(Nothing(), at_s=30)
    assert withdrawn == heard.model_copy(update={"withdrawn_utc": NOON + timedelta(seconds=30)})
    assert watched.see(Nothing(), at_s=32) == []


def test_another_kind_that_is_still_announced_withdraws_only_the_one_that_is_not() -> None:
    watched = Watched()
    advice = Announcement(NoticeKind.REBALANCE, None, "raw")
    watched.see(Announced((interruption(120), advice)))
    (withdrawn,) = watched.see(Announced((advice,)), at_s=5)
    assert withdrawn.kind is NoticeKind.INTERRUPTION and withdrawn.withdrawn_utc is not None


def test_a_source_that_cannot_be_read_withdraws_nothing() -> None:
    watched = Watched()
    watched.see(Announced((interruption(120),)))
    assert watched.see(Unknown("answered 500"), at_s=30) == []
    assert watched.healths[-1].announces == (NoticeKind.INTERRUPTION,)


def test_a_second_notice_is_heard_after_a_withdrawn_one() -> None:
    watched = Watched()
    watched.see(Announced((interruption(120),)))
    watched.see(Nothing(), at_s=30)
    (again,) = watched.see(Announced((interruption(120),)), at_s=40)
    assert (again.first_seen_utc, again.withdrawn_utc) == (NOON + timedelta(seconds=40), None)


def test_a_second_notice_is_heard_after_one_whose_deadline_has_passed() -> None:
    watched = Watched()
    watched.see(Announced((interruption(120),)))
    assert watched.see(Announced((interruption(120),)), at_s=200) == []
    (again,) = watched.see(Announced((interruption(400),)), at_s=280)
    assert again.first_seen_utc == NOON + timedelta(seconds=280)


def test_an_estimate_that_an_agent_makes_anew_after_its_start_is_not_another_notice() -> None:
    estimate = Announcement(NoticeKind.INTERRUPTION, NOON + timedelta(seconds=30), "TRUE", is_estimate=True)
    watched = Watched()
    (heard,) = watched.see(Announced((estimate,)))
    later = Announcement(NoticeKind.INTERRUPTION, NOON + timedelta(seconds=530), "TRUE", is_estimate=True)
    restarted = Watched(known=(heard,), now=NOON + timedelta(seconds=500))
    assert restarted.see(Announced((later,)), at_s=500) == []
    assert restarted.over == [], "it is remembered for as long as it is announced"


def test_an_estimate_is_another_notice_after_a_withdrawal() -> None:
    def estimate(seconds: float) -> Announced:
        deadline = NOON + timedelta(seconds=seconds)
        return Announced((Announcement(NoticeKind.INTERRUPTION, deadline, "TRUE", is_estimate=True),))

    watched = Watched()
    watched.see(estimate(30))
    assert watched.see(estimate(40), at_s=10) == []
    watched.see(Nothing(), at_s=20)
    (again,) = watched.see(estimate(60), at_s=30)
    assert again.first_seen_utc == NOON + timedelta(seconds=30)


def test_an_agent_that_was_away_withdraws_what_is_not_announced_any_more() -> None:
    first = Watched()
    (heard,) = first.see(Announced((interruption(120),)))
    second = Watched(known=(heard,), now=NOON + timedelta(seconds=60))
    assert second.watcher.health.announces == (NoticeKind.INTERRUPTION,)
    (withdrawn,) = second.see(Nothing(), at_s=61)
    assert withdrawn.withdrawn_utc == NOON + timedelta(seconds=61)
    third = Watched(known=(withdrawn,), now=NOON + timedelta(seconds=70))
    (again,) = third.see(Announced((interruption(120),)), at_s=71)
    assert again.withdrawn_utc is None and again.first_seen_utc > heard.first_seen_utc


def test_what_is_over_is_forgotten_once_its_source_has_stopped_announcing_it() -> None:
    watched = Watched()
    (heard,) = watched.see(Announced((interruption(120),)))
    end_s = (ends_utc(heard) - NOON).total_seconds()
    watched.see(Announced((interruption(120),)), at_s=end_s + 1)
    assert watched.over == []
    for _ in range(2):
        assert watched.see(Nothing(), at_s=end_s + 2) == [], "what is over needs no withdrawal"
        assert watched.over == [heard], "and is over once"


def test_what_another_source_told_is_forgotten_when_it_is_over() -> None:
    (heard,) = Watched().see(Announced((interruption(120),)))
    other = heard.model_copy(update={"source": "aws-imds"})
    watched = Watched(known=(other,))
    assert watched.see(Nothing(), at_s=10) == [] and watched.over == []
    watched.see(Nothing(), at_s=301)
    assert watched.over == [other]


def test_a_source_is_unknown_since_its_first_failure_whatever_the_later_ones_say() -> None:
    watched = Watched()
    watched.see(Nothing())
    watched.see(Unknown("answered 500"), at_s=10)
    watched.see(Unknown("did not answer in 2 s"), at_s=20)
    last = watched.healths[-1]
    assert (last.state, last.reason) == (SourceState.UNKNOWN, "did not answer in 2 s")
    assert last.since_utc == NOON + timedelta(seconds=10)


def test_a_source_is_stuck_when_a_read_takes_a_minute_more_than_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000.0]
    monkeypatch.setattr(watcher_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watched = Watched().watcher
    for after_s, is_stuck in ((0.0, False), (120.0, False), (120.5, True)):
        clock[0] = 1_000.0 + after_s
        assert watched.is_stuck() is is_stuck
