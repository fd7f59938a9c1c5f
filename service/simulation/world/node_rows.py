"""The nodes of a simulated service: what each has reported last, whether it is heard, and which will go. Pure.

When a node counts as silent or gone is decided by `service.nodes.rules`, when a notice counts by the wire contract.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from agent.protocol.notice_life import NoticeKey, bars_ranks, is_open, key_of, merge, moves_jobs, withdraw
from agent.protocol.sync import NoticeFact
from service.jobs.reported import NodeSeen
from service.jobs.view import Leaving
from service.nodes.listening import Listening
from service.nodes.rules import state_of
from service.nodes.skew import SAME_WITHIN
from service.nodes.tables import NodeState
from service.notices.rules import NOTICES_OF_LEASE_MAX, PEERS_SPEAK_AGAIN, aligned, over_at, takes_node
from service.simulation.world.moments import seconds_at, utc
from service.simulation.world.reports import AgentReport, RankSays

_WORSE = {state: place for place, state in enumerate((NodeState.READY, NodeState.SILENT, NodeState.GONE))}


@dataclass(slots=True)
class _Notice:
    fact: NoticeFact
    recorded_at: datetime
    told_in: str | None


@dataclass(slots=True)
class NodeRow:
    """One node. `since`: when its lease began; `order`: of its newest report, incarnation and when it was sent."""

    node_id: str
    last_seen_at: datetime
    since: datetime
    order: tuple[int, float] = (-1, float("-inf"))
    ranks: tuple[dict[str, Any], ...] = ()
    state: NodeState = NodeState.READY
    notices: dict[NoticeKey, _Notice] = field(default_factory=dict)


class NodeRows:
    """All nodes that the service has heard of. `heard_at`: when a node was heard last, where reports do not tell."""

    def __init__(
        self,
        job_id: str,
        listening: Listening,
        *,
        silent_after_s: float,
        gone_after_s: float,
        heard_at: Callable[[str], float] | None = None,
    ) -> None:
        self._job_id, self._listening, self._heard_at = job_id, listening, heard_at
        self._silent_after_s, self._gone_after_s = silent_after_s, gone_after_s
        self._rows: dict[str, NodeRow] = {}
        self._seen_at: datetime | None = None
        self._seen_then: list[NodeSeen] = []

    # What it hears.

    def hear(self, report: AgentReport, now: datetime) -> bool | None:
        """Keep what a node reports of its ranks. False: it is older than what is known; None: of an agent that has been
        replaced, so that the node is not even heard."""
        row, self._seen_at = self._row(report.node, now), None
        order = (report.incarnation, report.sent_at)
        if report.incarnation < row.order[0]:
            return None
        row.last_seen_at = now
        if order <= row.order:
            return False
        if row.state is NodeState.GONE and report.incarnation != row.order[0]:
            row.since = now  # Its agent has not lived on, and perhaps not its machine.
        row.order, row.state = order, NodeState.READY
        self.keep_ranks(report.node, report.ranks)
        return True

    def keep_ranks(self, node: str, ranks: tuple[RankSays, ...]) -> None:
        """What a known node says of its ranks."""
        self._rows[node].ranks = tuple(rank.as_reported(self._job_id) for rank in ranks)

    def came(self, node: str, now: datetime, *, incarnation: int = 0) -> None:
        """A new machine under this name: nothing that is known of the one before holds of it. Its agent's reports have
        this incarnation or later ones; earlier ones are of the machine before."""
        self._rows[node], self._seen_at = NodeRow(node, now, now, (incarnation, float("-inf"))), None

    def end(self, node: str, now: datetime) -> None:
        """It counts as gone, whether it is heard or not."""
        row, self._seen_at = self._rows.get(node), None
        if row is not None and row.state is not NodeState.GONE:
            row.state, row.since, row.ranks, row.notices = NodeState.GONE, now, (), {}

    def forget(self, node: str) -> None:
        """A node that is gone, and for which nothing waits."""
        self._rows.pop(node, None)
        self._seen_at = None

    def hear_notice(self, fact: NoticeFact, now: datetime, *, told_in: str | None = None) -> bool:
        """Whether it is news, of a node that is known. `told_in`: the job in which a peer told it, None where the node
        or its cloud did."""
        row = self._rows.get(fact.node_id)
        if row is None or (told_in is not None and not _may_be_told(row, fact, now)):
            return False
        key = key_of(fact)
        known = row.notices.get(key)
        if told_in is None and known is not None and known.told_in is not None:
            if fact.model_copy(update={"raw": known.fact.raw}) == known.fact:
                known.told_in = None
                return True
            _forget_hearsay(row, fact)
            known = None
        if known is not None and told_in is not None:
            fact = aligned(known.fact, fact, SAME_WITHIN)
        merged = merge(None if known is None else known.fact, fact)
        if known is not None and merged == known.fact:
            return False
        if known is None and len(row.notices) >= NOTICES_OF_LEASE_MAX:
            return False
        is_same = known is not None and merged.first_seen_utc == known.fact.first_seen_utc
        recorded_at = known.recorded_at if known is not None and is_same else _first_word(row, fact, told_in, now)
        row.notices.pop(key, None)  # What says more of a notice stands behind the others.
        row.notices[key] = _Notice(merged, recorded_at, told_in)
        return True

    def withdraw_notices(self, node: str, now: datetime) -> bool:
        """Whether any counted until now."""
        row = self._rows.get(node)
        if row is None:
            return False
        before = [each.fact for each in row.notices.values()]
        for each in row.notices.values():
            each.fact = withdraw(each.fact, now)
        return before != [each.fact for each in row.notices.values()]

    # What is known.

    def names(self) -> tuple[str, ...]:
        """Of all, in the order in which they came."""
        return tuple(self._rows)

    def ranks_of(self, node: str) -> tuple[dict[str, Any], ...]:
        """As the node reported them last."""
        row = self._rows.get(node)
        return () if row is None else row.ranks

    def state_of(self, node: str) -> NodeState:
        """As it was found last."""
        return self._rows[node].state

    def last_seen_at(self, node: str) -> datetime:
        """When the node was heard last."""
        if self._heard_at is not None:
            return utc(self._heard_at(node))
        return self._rows[node].last_seen_at

    def seen(self, now: datetime) -> list[NodeSeen]:
        """All nodes as they stand now. What one that is gone had reported is forgotten, and its notices too."""
        if self._heard_at is None:
            return [self._seen(row, now) for row in self._rows.values()]
        if self._seen_at != now:  # Else nothing has changed but what each change here forgets.
            self._seen_then, self._seen_at = [self._seen(row, now) for row in self._rows.values()], now
        return list(self._seen_then)

    def next_change_at(self, now: datetime) -> datetime | None:
        """When the first node counts as silent, or gone, if none is heard until then."""
        limits = (self._silent_after_s, self._gone_after_s)
        silences = (self._silence_s(row, now) for row in self._rows.values() if row.state is not NodeState.GONE)
        left = [limit_s - silent_s for silent_s in silences for limit_s in limits if limit_s > silent_s]
        return now + timedelta(seconds=min(left)) if left else None

    def noticed(self, now: datetime) -> tuple[Leaving, ...]:
        """The nodes that jobs must leave, and since when the service knows."""
        return tuple(
            Leaving(row.node_id, each.recorded_at, each.fact.deadline_utc)
            for row in self._rows.values()
            for each in self._open(row, now)
            if moves_jobs(each.fact, now)
        )

    def barred(self, now: datetime) -> frozenset[str]:
        """Nodes that get no new rank, since they will go."""
        rows = self._rows.values()
        return frozenset(row.node_id for row in rows for each in self._open(row, now) if bars_ranks(each.fact, now))

    def notices(self, now: datetime) -> tuple[NoticeFact, ...]:
        """All that agents are told of: withdrawn ones too, until they would be over."""
        found = (each.fact for row in self._rows.values() for each in self._open(row, now))
        return tuple(sorted(found, key=key_of))

    def notice_over_at(self, now: datetime) -> float | None:
        """When the next notice is over, in seconds of the virtual clock."""
        ends = (_over_at(each) for row in self._rows.values() for each in self._open(row, now))
        return min((seconds_at(end) for end in ends), default=None)

    def _row(self, node: str, now: datetime) -> NodeRow:
        if node not in self._rows:
            self._rows[node] = NodeRow(node, now, now)
        return self._rows[node]

    def _silence_s(self, row: NodeRow, now: datetime) -> float:
        return self._listening.silence_s(self.last_seen_at(row.node_id), now)

    def _seen(self, row: NodeRow, now: datetime) -> NodeSeen:
        silent_s = self._silence_s(row, now)
        state = state_of(silent_s, silent_after_s=self._silent_after_s, gone_after_s=self._gone_after_s)
        # Time in which nobody listened does not count, and makes nobody heard who was not.
        was = row.state
        stays = self._heard_at is None and _WORSE[state] < _WORSE[was]
        if not stays:
            row.state = state
        if row.state is NodeState.GONE:
            row.since = row.since if was is NodeState.GONE else now
            row.ranks, row.notices = (), {}
        return NodeSeen(row.node_id, row.state, self.last_seen_at(row.node_id), row.ranks)

    @staticmethod
    def _open(row: NodeRow, now: datetime) -> Iterable[_Notice]:
        return (each for each in row.notices.values() if now < _over_at(each))


def _may_be_told(row: NodeRow, fact: NoticeFact, now: datetime) -> bool:
    """Whether a peer's word of a notice counts: not a withdrawal, not one of the machine before, and not where the node
    itself has said something of it."""
    known = row.notices.get(key_of(fact))
    knows_better = known is not None and known.told_in is None and is_open(known.fact, now)
    return fact.withdrawn_utc is None and fact.first_seen_utc >= row.since and not knows_better


def _forget_hearsay(row: NodeRow, fact: NoticeFact) -> None:
    """What only peers have told of a notice's kind and source: the node itself says something else."""
    said = (fact.kind, fact.source)
    row.notices = {
        key: each
        for key, each in row.notices.items()
        if each.told_in is None or (each.fact.kind, each.fact.source) != said
    }


def _first_word(row: NodeRow, fact: NoticeFact, told_in: str | None, now: datetime) -> datetime:
    """From when on it counts: what peers tell, from their first word of a loss, or of advice."""
    if told_in is None:
        return now
    told = (each for each in row.notices.values() if each.told_in is not None)
    alike = (each for each in told if takes_node(each.fact.kind) is takes_node(fact.kind))
    return min((each.recorded_at for each in alike if now - each.recorded_at < PEERS_SPEAK_AGAIN), default=now)


def _over_at(notice: _Notice) -> datetime:
    return over_at(notice.fact, told_in=notice.told_in, recorded_at=notice.recorded_at)
