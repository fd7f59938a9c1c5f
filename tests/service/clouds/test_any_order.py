"""Whatever the order in which channels speak of the losses of a machine, and however often: the same occurrences."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.notice_life import is_open
from agent.protocol.sync import NoticeKind, Provider
from service.clouds.cloud_facts import CloudFact, Disposition, FactKind
from service.clouds.rules import Machine, judge
from service.notices.operations import LeaseNotices
from service.notices.rules import earliest_deadline
from service.notices.tables import NoticeRow

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CHANNELS = ("aws-queue", "gcp-pubsub", "gcp-operations")
APART_S = 100_000
"""Two losses of one machine are far apart in time; all that is said of one is within a minute."""


@dataclass
class Known:
    """What a service knows of one lease, as `take_facts` keeps it, without a database."""

    notices: LeaseNotices
    acts: int = 0
    stored: list[NoticeRow] = field(default_factory=list)

    def take(self, fact: CloudFact, now: datetime = NOW) -> Disposition:
        machine = Machine("a", has_lease=True, known=self.notices.known(now))
        judgement = judge(fact, machine, now)
        for notice in judgement.notices:
            self.notices.add(notice, lease_id=1, now=now)
        self.acts += judgement.disposition is Disposition.ACTS
        return judgement.disposition

    def store(self) -> None:
        """Number what was added, as the database would."""
        for row in self.notices.added:
            self.stored.append(row)
            row.notice_id = len(self.stored)
        self.notices.number()

    def occurrences(self) -> set[int | None]:
        self.store()
        return {row.occurrence_id for row in self.stored}


def fact(channel: str, kind: FactKind, in_s: float, *, ago_s: float = 0.0, takes_back: bool = False) -> CloudFact:
    return CloudFact(
        provider=Provider.AWS,
        provider_id="i-a",
        kind=kind,
        said_at=NOW - timedelta(seconds=ago_s),
        deadline_at=NOW + timedelta(seconds=in_s),
        channel=channel,
        message_id="m",
        raw="{}",
        is_withdrawal=takes_back,
    )


hearings = st.builds(
    fact,
    st.sampled_from(CHANNELS),
    st.sampled_from((FactKind.INTERRUPTION, FactKind.MAINTENANCE)),
    st.floats(30, 90),
    ago_s=st.floats(0, 20),
)
"""All of one loss."""
others = st.builds(
    fact,
    st.sampled_from(CHANNELS),
    st.sampled_from((FactKind.INTERRUPTION, FactKind.MAINTENANCE, FactKind.GOING, FactKind.REBALANCE)),
    st.sampled_from((60, 300, APART_S)),
    ago_s=st.floats(0, 20),
    takes_back=st.booleans(),
)
"""Of several losses, and withdrawals."""


@given(
    st.lists(hearings, min_size=1, max_size=6).flatmap(lambda said: st.tuples(st.just(said), st.permutations(said * 2)))
)
def test_one_loss_is_one_occurrence_with_the_earliest_deadline_in_any_order(case):
    said, heard = case
    known = Known(LeaseNotices())
    for item in heard:
        known.take(item)
    deadlines = [item.deadline_at for item in said]
    found = earliest_deadline(known.notices.known(NOW))
    assert found is not None and abs(found - min(deadlines)) <= timedelta(seconds=1)
    assert {(row.kind, row.source) for row in known.notices.added} == {(item.kind.value, item.channel) for item in said}
    assert len(known.occurrences()) == 1


@given(st.lists(st.tuples(hearings | others, st.booleans()), min_size=1, max_size=8))
def test_occurrences_are_the_same_however_much_is_stored_at_a_time(heard):
    at_once, in_parts = Known(LeaseNotices()), Known(LeaseNotices())
    for item, is_last_of_its_batch in heard:
        at_once.take(item)
        in_parts.take(item)
        if is_last_of_its_batch:
            in_parts.store()
    at_once.store()
    in_parts.store()
    assert [row.occurrence_id for row in in_parts.stored] == [row.occurrence_id for row in at_once.stored]


@given(st.permutations([fact(channel, FactKind.INTERRUPTION, 60) for channel in CHANNELS] * 3))
def test_of_one_loss_only_the_first_to_say_so_acts(heard):
    known = Known(LeaseNotices())
    first, *_ = [known.take(item) for item in heard]
    assert first is Disposition.ACTS and known.acts == 1


@given(st.permutations(["warning", "stopping", "warning", "stopping", "health"]))
def test_a_machine_that_is_announced_and_stopped_is_acted_on_once_in_any_order(order):
    said = {
        "warning": fact("aws-queue", FactKind.INTERRUPTION, 60, ago_s=60),
        "health": fact("aws-queue", FactKind.MAINTENANCE, 60, ago_s=60),
        "stopping": fact("aws-queue", FactKind.GOING, -10, ago_s=10),
    }
    known = Known(LeaseNotices())
    for name in order:
        known.take(said[name])
    assert known.acts == 1 and len(known.occurrences()) == 1


@given(st.lists(st.sampled_from(CHANNELS), min_size=1, max_size=5), st.sampled_from(CHANNELS), st.booleans())
def test_a_withdrawal_takes_back_only_what_its_own_channel_said(channels, who, is_first):
    known = Known(LeaseNotices())
    taken_back = fact(who, FactKind.INTERRUPTION, 60, takes_back=True)
    heard = [fact(channel, FactKind.INTERRUPTION, 60, ago_s=5) for channel in channels]
    for item in [taken_back, *heard] if is_first else [*heard, taken_back]:
        known.take(item)
    still = {item.source for item in known.notices.known(NOW) if is_open(item, NOW)}
    assert still == set(channels) - {who}


@given(st.permutations([(FactKind.MAINTENANCE, 60), (FactKind.INTERRUPTION, APART_S)]))
def test_two_losses_far_apart_are_two_in_either_order(heard):
    known = Known(LeaseNotices())
    assert [known.take(fact("aws-queue", *item)) for item in heard] == [Disposition.ACTS] * 2
    assert len(known.occurrences()) == 2


@given(hearings, st.lists(hearings, max_size=4))
def test_advice_and_what_is_late_change_nothing_of_what_takes_the_node(late, others):
    known = Known(LeaseNotices())
    for item in others:
        known.take(item)
    before = known.notices.known(NOW)
    assert known.take(replace(late, kind=FactKind.REBALANCE)) in (Disposition.ADVICE, Disposition.REPEATED)
    assert known.take(replace(late, deadline_at=NOW - timedelta(hours=1))) is Disposition.LATE
    assert tuple(item for item in known.notices.known(NOW) if item.kind is not NoticeKind.REBALANCE) == before
