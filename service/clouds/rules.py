"""What to do with a fact that a cloud told, given what is known of the machine. Pure.

When a notice counts is decided in `agent.protocol.notice_life`; here, whether a fact is one more notice.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from agent.protocol.notice_life import (
    GRACE_AFTER_DEADLINE,
    LEAD,
    MOVED_LEAST,
    WITHOUT_DEADLINE_LASTS,
    hear,
    is_open,
    key_of,
    withdraw,
)
from agent.protocol.sync import NoticeFact, NoticeKind
from liver_core.layout.limits import fitting
from service.clouds.cloud_facts import CloudFact, Disposition, FactKind
from service.notices.rules import ACCOUNT_CHANNELS, same_loss, takes_node

CHANNEL_LIVES = timedelta(seconds=90)
"""A channel that nobody could ask for so long is not alive."""
ADVICE_MEANS = "the cloud may take the machine: no job leaves it for that, but the planner chooses others before it"
PLANNED_MEANS = "work that is planned: advice until shortly before it begins, when it takes the node"
_KINDS = {
    FactKind.INTERRUPTION: NoticeKind.INTERRUPTION,
    FactKind.MAINTENANCE: NoticeKind.MAINTENANCE,
    FactKind.REBALANCE: NoticeKind.REBALANCE,
    FactKind.GOING: NoticeKind.INTERRUPTION,
}


@dataclass(frozen=True, slots=True)
class Life:
    """The time for which a machine has run without having been stopped, as far as leases tell. `former_until`: when its
    life before that ended, None if it had none."""

    since: datetime
    former_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The node that a fact is about. `has_lease`: it is not gone. `known`: the newest of each of its notices. `life`:
    since when the machine lives."""

    node_id: str
    has_lease: bool
    known: tuple[NoticeFact, ...] = ()
    life: Life | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """`notice`: what has to be stored of it, and told to the agents; None: nothing. `also`: what else, where a planned
    event was announced as advice and as what takes the node."""

    disposition: Disposition
    reason: str
    notice: NoticeFact | None = None
    also: NoticeFact | None = None

    @property
    def notices(self) -> tuple[NoticeFact, ...]:
        """All that has to be stored."""
        return tuple(item for item in (self.notice, self.also) if item is not None)


@dataclass(frozen=True, slots=True)
class NodeChannel:
    """One way by which a notice about a node would be heard. `reason`: why it would not. `asked_at`: when it was last
    known to work; `heard_at`: when it last said anything of the node."""

    name: str
    is_alive: bool
    reason: str
    asked_at: datetime | None
    heard_at: datetime | None


def judge(fact: CloudFact, machine: Machine | None, now: datetime) -> Judgement:
    """What to do with one fact. `now`: by the service's clock."""
    if machine is None:
        what = f"{fact.provider.value} machine {fitting(fact.provider_id, 80)}"
        return Judgement(Disposition.FOREIGN, f"no node of this installation is {what}")
    if not machine.has_lease:
        return Judgement(Disposition.LATE, f"node {machine.node_id} is gone already")
    fact = by_our_clock(fact, now)
    if machine.life is not None and _is_of_former_life(fact, machine.life):
        text = f"said {_ago(machine.life.since - fact.said_at)} before node {machine.node_id} joined, of a life before"
        return Judgement(Disposition.LATE, text)
    said = _as_notice(fact, machine.node_id, now)
    if said is None:
        return Judgement(Disposition.NOTED, _of_its_end(machine, now))
    if said.event_id:
        return _judge_event(fact, said, machine, now)
    known = next((item for item in machine.known if key_of(item) == key_of(said)), None)
    if fact.is_withdrawal:
        return _judge_withdrawal(fact, said, () if known is None else (known,))
    if late := _late(fact, now):
        return late
    if known is not None and known.withdrawn_utc is not None and fact.said_at <= known.withdrawn_utc:
        return Judgement(Disposition.REPEATED, f"{fact.channel} said it before it took it back")
    if known is not None and _is_of_known_loss(fact, known):
        return Judgement(Disposition.REPEATED, f"{fact.channel} said it before the end that it named since")
    return _judge_news(fact, hear(known, said), known, machine, now)


def _is_of_former_life(fact: CloudFact, life: Life) -> bool:
    """A machine can be stopped and started again under its name, and a copy of what was said before can come at any
    time. Planned work outlasts that; a warning was said to the life that it ended."""
    if fact.said_at >= life.since:
        return False
    if fact.kind is FactKind.GONE or (fact.deadline_at is not None and fact.deadline_at <= life.since):
        return True
    was_said_then = life.former_until is not None and fact.said_at <= life.former_until
    return was_said_then and fact.kind is not FactKind.MAINTENANCE


def by_our_clock(fact: CloudFact, now: datetime) -> CloudFact:
    """The fact with its times moved back where it seems to be said after it was heard: the cloud's clock is ahead by at
    least so much. What it says of the end is as much too late."""
    ahead = max(fact.said_at - now, timedelta(0))
    if not ahead:
        return fact
    deadline_at = None if fact.deadline_at is None else fact.deadline_at - ahead
    return replace(fact, said_at=now, deadline_at=deadline_at)


def begun(known: Iterable[NoticeFact], now: datetime) -> tuple[NoticeFact, ...]:
    """What was planned long ahead, by channels of accounts, and is near now: the notices by which it takes the node.
    Nothing that was told of already, or that a channel has taken back since. `known`: of one machine."""
    known, found = tuple(known), []
    for advice in known:
        ends = advice.deadline_utc
        is_planned = advice.kind is NoticeKind.REBALANCE and advice.source in ACCOUNT_CHANNELS and ends is not None
        if not is_planned or ends is None or advice.withdrawn_utc is not None or not now < ends <= now + LEAD:
            continue
        said = advice.model_copy(update={"kind": NoticeKind.MAINTENANCE, "first_seen_utc": now})
        before = next((one for one in known if key_of(one) == key_of(said)), None)
        if before is not None and before.withdrawn_utc is not None and before.withdrawn_utc >= advice.first_seen_utc:
            continue
        notice = hear(before, said)
        if notice is not None:
            found.append(notice)
    return tuple(found)


def over_at(fact: CloudFact) -> datetime:
    """From when on a fact announces nothing any more, whoever hears it first then."""
    if fact.deadline_at is None:
        return fact.said_at + WITHOUT_DEADLINE_LASTS
    return fact.deadline_at + GRACE_AFTER_DEADLINE


def is_alive(last_ok_at: datetime | None, now: datetime) -> bool:
    """Whether somebody could ask the channel lately."""
    return last_ok_at is not None and now - last_ok_at < CHANNEL_LIVES


def _as_notice(fact: CloudFact, node_id: str, now: datetime) -> NoticeFact | None:
    kind = _KINDS.get(fact.kind)
    if kind is None:
        return None
    if kind is NoticeKind.MAINTENANCE and fact.deadline_at is not None and fact.deadline_at - now > LEAD:
        # As the agents say it. A machine that was paid for is not given up weeks early.
        kind = NoticeKind.REBALANCE
    return NoticeFact(
        node_id=node_id,
        kind=kind,
        source=fact.channel,
        deadline_utc=fact.deadline_at,
        first_seen_utc=now,
        raw=fitting(fact.raw),
        event_id=fact.event_id,
        said_utc=fact.said_at if fact.event_id else None,
    )


def _judge_event(fact: CloudFact, said: NoticeFact, machine: Machine, now: datetime) -> Judgement:
    """Of a planned event the newest word counts, and says nothing of another event. One that is moved is announced
    anew; what announced it for another time, as advice or as what takes the node, is taken back."""
    same = tuple(item for item in machine.known if (item.source, item.event_id) == (said.source, said.event_id))
    counting = tuple(item for item in same if item.withdrawn_utc is None)
    said_last = max((item.said_utc or item.first_seen_utc for item in same), default=None)
    if said_last is not None and fact.said_at < said_last:
        return Judgement(Disposition.REPEATED, f"{fact.channel} has said something newer of this event")
    if fact.is_withdrawal:
        return (_late(fact, now) if not same else None) or _judge_withdrawal(fact, said, counting or same)
    if late := _late(fact, now):
        return late
    if same and not counting and fact.said_at == said_last:
        return Judgement(Disposition.REPEATED, f"{fact.channel} said it before it took it back")
    if counting and fact.deadline_at is None:
        return Judgement(Disposition.REPEATED, f"{fact.channel} names no other time")
    before = next((item for item in counting if item.kind is not said.kind and _is_apart(item, said)), None)
    also = None if before is None else _taken_back(before, fact)
    if also is not None and also.withdrawn_utc is not None:
        # What is planned for later begins then, though the same event was taken back now.
        said = said.model_copy(update={"first_seen_utc": max(now, also.withdrawn_utc + timedelta(microseconds=1))})
    known = next((item for item in same if item.kind is said.kind), None)
    found = _judge_news(fact, hear(known, said), known, machine, now)
    if found.notice is None:
        return found
    old = next((item for item in counting if _is_apart(item, found.notice)), None)
    moved = "" if old is None else f"moved from {_at(old.deadline_utc)} to {_at(found.notice.deadline_utc)}; "
    return replace(found, reason=moved + found.reason, also=also)


def _is_apart(one: NoticeFact, other: NoticeFact) -> bool:
    """Whether they name different times for the same event."""
    if one.deadline_utc is None or other.deadline_utc is None:
        return one.deadline_utc is not other.deadline_utc
    return abs(one.deadline_utc - other.deadline_utc) > MOVED_LEAST


def _late(fact: CloudFact, now: datetime) -> Judgement | None:
    if now < (ends := over_at(fact)):
        return None
    return Judgement(Disposition.LATE, f"what it is about was over {_ago(now - ends)} before it came")


def _judge_news(
    fact: CloudFact, notice: NoticeFact | None, known: NoticeFact | None, machine: Machine, now: datetime
) -> Judgement:
    if notice is None:
        return Judgement(Disposition.REPEATED, f"{fact.channel} has said so before")
    if not takes_node(notice.kind):
        is_planned = fact.kind is FactKind.MAINTENANCE
        return Judgement(Disposition.ADVICE, PLANNED_MEANS if is_planned else ADVICE_MEANS, notice)
    return _judge_notice(fact, notice, known, machine, now)


def _is_of_known_loss(fact: CloudFact, known: NoticeFact) -> bool:
    """Whether it was said before the end that is known, and overtaken by what named that: a machine that is stopped
    already has no later end, however late its warning comes."""
    if known.withdrawn_utc is not None or known.deadline_utc is None or fact.deadline_at is None:
        return False
    return fact.said_at <= known.deadline_utc <= fact.deadline_at


def _judge_withdrawal(fact: CloudFact, said: NoticeFact, known: tuple[NoticeFact, ...]) -> Judgement:
    if not known:
        # What it takes back may still come: then it is known not to count.
        notice = said.model_copy(update={"first_seen_utc": fact.said_at, "withdrawn_utc": fact.said_at})
        return Judgement(Disposition.WITHDRAWS, f"{fact.channel} takes back what was not heard yet", notice)
    if all(item.withdrawn_utc is not None for item in known):
        return Judgement(Disposition.REPEATED, f"{fact.channel} has taken it back before")
    notice, *more = (_taken_back(item, fact) for item in known)
    also = more[0] if more else None
    return Judgement(Disposition.WITHDRAWS, f"{fact.channel} takes it back; what others say stays", notice, also)


def _taken_back(known: NoticeFact, fact: CloudFact) -> NoticeFact:
    taken = withdraw(known, max(fact.said_at, known.first_seen_utc))
    return taken.model_copy(update={"said_utc": fact.said_at}) if known.event_id else taken


def _judge_notice(
    fact: CloudFact, notice: NoticeFact, known: NoticeFact | None, machine: Machine, now: datetime
) -> Judgement:
    others = [
        item
        for item in machine.known
        if item is not known and takes_node(item.kind) and is_open(item, now) and same_loss(item, notice)
    ]
    if fact.kind is FactKind.GOING and any(takes_node(item.kind) and is_open(item, now) for item in machine.known):
        return Judgement(Disposition.NOTED, "the machine is being stopped, as was announced")
    if known is not None and known.withdrawn_utc is None and known.first_seen_utc == notice.first_seen_utc:
        return Judgement(Disposition.ACTS, f"{fact.channel} names an earlier time than before", notice)
    if others:
        first = min(others, key=lambda item: item.first_seen_utc)
        after_s = max(0.0, (now - first.first_seen_utc).total_seconds())
        reason = f"{first.source} said so {after_s:.1f} s before{_nearer(notice, others)}"
        return Judgement(Disposition.ADDS, reason, notice)
    return Judgement(Disposition.ACTS, "the first to say so", notice)


def _nearer(notice: NoticeFact, others: Iterable[NoticeFact]) -> str:
    known = min((item.deadline_utc for item in others if item.deadline_utc is not None), default=None)
    if notice.deadline_utc is None or (known is not None and notice.deadline_utc >= known):
        return ""
    return "; this one names a time" if known is None else f", and left {_ago(known - notice.deadline_utc)} more"


def _of_its_end(machine: Machine, now: datetime) -> str:
    if any(takes_node(item.kind) and item.withdrawn_utc is None for item in machine.known):
        return "the machine has ended, as was announced"
    return "the machine has ended, and nobody had announced it"


def _at(moment: datetime | None) -> str:
    return "no known time" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _ago(span: timedelta) -> str:
    return f"{span.total_seconds():.0f} s"
