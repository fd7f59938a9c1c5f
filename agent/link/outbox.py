"""Facts that the service has not acknowledged yet. The queues are bounded; a fact is sent again until acknowledged.

Pure: times come with the facts. Not thread-safe: used in the agent's event loop only.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import UUID

from agent.protocol.notice_life import key_of
from agent.protocol.sync import (
    CHECKPOINTS_PER_REPORT_MAX,
    HANDOFFS_PER_REPORT_MAX,
    METRICS_PER_REPORT_MAX,
    NOTICES_PER_REPORT_MAX,
    STEPS_PER_REPORT_MAX,
    WIRES_PER_REPORT_MAX,
    CheckpointFact,
    HandoffDeclined,
    HandoffMirror,
    JobFinished,
    MetricsRow,
    NoticeFact,
    StepRow,
)
from agent.protocol.wires import WireFact

FactT = TypeVar("FactT")
STEPS_MAX = 50_000
HANDOFFS_MAX = 256
NOTICES_MAX = 256
CHECKPOINTS_MAX = 256
FINISHED_MAX = 64
METRICS_MAX = 16_384
WIRES_MAX = 256
SHARE_LEAST = 1.0 / 1_024

_log = logging.getLogger(__name__)


class Queue(Generic[FactT]):
    """Facts by key, oldest first. A newer fact replaces an older one with its key and needs its own acknowledgement."""

    def __init__(self, name: str, facts_max: int, per_report_max: int) -> None:
        self.dropped = 0
        self._name = name
        self._facts_max = facts_max
        self._per_report_max = per_report_max
        self._facts: OrderedDict[object, FactT] = OrderedDict()
        self._sent: dict[object, tuple[int, FactT]] = {}

    def put(self, key: object, fact: FactT) -> None:
        """Add a fact; if there are too many, drop the oldest."""
        self._facts[key] = fact
        while len(self._facts) > self._facts_max:
            oldest, _ = self._facts.popitem(last=False)
            self._sent.pop(oldest, None)
            self.dropped += 1
            if self.dropped == 1 or self.dropped % 1_000 == 0:
                _log.warning(
                    "%d %s dropped so far: more than %d wait for the service", self.dropped, self._name, self._facts_max
                )

    def waiting(self) -> tuple[tuple[object, FactT], ...]:
        """What is not acknowledged, by key, oldest first."""
        return tuple(self._facts.items())

    def get(self, key: object) -> FactT | None:
        """The fact that waits under this key."""
        return self._facts.get(key)

    def batch(self, report_seq: int, share: float = 1.0) -> tuple[FactT, ...]:
        """The oldest facts, as many as fit into one report, or that share of them. They count as sent with this
        report."""
        keys = list(self._facts)[: max(1, round(self._per_report_max * share))]
        for key in keys:
            self._sent[key] = (report_seq, self._facts[key])
        return tuple(self._facts[key] for key in keys)

    def acknowledge(self, report_seq: int) -> None:
        """Remove the facts that were sent up to this report, except those that have changed since."""
        for key, (sent_seq, fact) in tuple(self._sent.items()):
            if sent_seq <= report_seq:
                del self._sent[key]
                if self._facts.get(key) is fact:
                    del self._facts[key]

    def take_back(self, report_seq: int) -> None:
        """This report was refused as a whole: nothing was sent with it."""
        self._sent = {key: sent for key, sent in self._sent.items() if sent[0] != report_seq}

    def drop(self, key: object) -> None:
        """Remove a fact that the service rejects."""
        self._facts.pop(key, None)
        self._sent.pop(key, None)

    def __len__(self) -> int:
        return len(self._facts)


_PARTS = ("notices", "steps", "handoffs", "declined", "checkpoints", "finished", "metrics", "wires")


@dataclass(slots=True)
class Outbox:
    """Everything that waits for the service."""

    notices: Queue[NoticeFact] = field(default_factory=lambda: Queue("notices", NOTICES_MAX, NOTICES_PER_REPORT_MAX))
    steps: Queue[StepRow] = field(default_factory=lambda: Queue("steps", STEPS_MAX, STEPS_PER_REPORT_MAX))
    handoffs: Queue[HandoffMirror] = field(
        default_factory=lambda: Queue("handoffs", HANDOFFS_MAX, HANDOFFS_PER_REPORT_MAX)
    )
    declined: Queue[HandoffDeclined] = field(
        default_factory=lambda: Queue("declined handoffs", HANDOFFS_MAX, HANDOFFS_PER_REPORT_MAX)
    )
    checkpoints: Queue[CheckpointFact] = field(
        default_factory=lambda: Queue("checkpoints", CHECKPOINTS_MAX, CHECKPOINTS_PER_REPORT_MAX)
    )
    finished: Queue[JobFinished] = field(default_factory=lambda: Queue("endings", FINISHED_MAX, FINISHED_MAX))
    metrics: Queue[MetricsRow] = field(
        default_factory=lambda: Queue("steps' metrics", METRICS_MAX, METRICS_PER_REPORT_MAX)
    )

    wires: Queue[WireFact] = field(default_factory=lambda: Queue("measured wires", WIRES_MAX, WIRES_PER_REPORT_MAX))

    share: float = 1.0
    """Of what fits into one report by number. Less after one that was refused as a whole, perhaps for its size."""
    _acknowledged: int = 0

    def put_notice(self, fact: NoticeFact) -> None:
        """What is known of one notice; what is known later replaces it."""
        self.notices.put(key_of(fact), fact)

    def put_step(self, row: StepRow) -> None:
        """One step of one generation; a newer row replaces an older one."""
        key = (row.job_id, row.generation, row.step)
        self.steps.put(key, row)

    def put_metrics(self, row: MetricsRow) -> None:
        """The numbers of one step."""
        self.metrics.put((row.job_id, row.generation, row.step), row)

    def put_handoff(self, mirror: HandoffMirror) -> None:
        """The newest copy of a handoff."""
        self.handoffs.put(mirror.handoff_id, mirror)

    def put_declined(self, fact: HandoffDeclined) -> None:
        """One proposal of the service that is not opened here."""
        self.declined.put(fact.handoff_id, fact)

    def put_checkpoint(self, fact: CheckpointFact) -> None:
        """One complete checkpoint."""
        self.checkpoints.put((fact.job_id, fact.path), fact)

    def put_finished(self, fact: JobFinished) -> None:
        """One job that has ended here."""
        self.finished.put((fact.job_id, fact.generation), fact)

    def put_wire(self, fact: WireFact) -> None:
        """One wire to this node, as it was last measured."""
        self.wires.put((fact.job_id, fact.source), fact)

    def acknowledge(self, report_seq: int) -> bool:
        """The service has stored everything that was sent up to this report. Whether that is news; orders that come
        without a report say it again."""
        if report_seq <= self._acknowledged:
            return False
        self._acknowledged = report_seq
        self.share = min(1.0, 2.0 * self.share)
        for queue in self._queues():
            queue.acknowledge(report_seq)
        return True

    def take_back(self, report_seq: int) -> None:
        """The service has refused this report as a whole: the next one holds half as much."""
        self.share = max(SHARE_LEAST, self.share / 2.0)
        for queue in self._queues():
            queue.take_back(report_seq)

    def batches(self, report_seq: int) -> dict[str, Any]:
        """What this report says of each, by the name of its part."""
        return {name: getattr(self, name).batch(report_seq, self.share) for name in _PARTS}

    def _queues(self) -> Iterator[Queue[Any]]:
        return (getattr(self, name) for name in _PARTS)

    def drop_handoff(self, handoff_id: UUID) -> None:
        """The service rejects this handoff: do not send it again."""
        self.handoffs.drop(handoff_id)
