"""When to look at a job again, and which jobs need no look although one is due: those that time alone cannot change,
and that nothing else has changed since the last look. A whole look takes some fifteen statements. Pure; rows come in.
"""

from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime

from service.jobs.queries import Situation
from service.jobs.stalls import is_late
from service.jobs.tables import JobRow, JobState
from service.jobs.view import Action, Do

PASSED_MAX = 2
"""However sure it seems, after so many looks left out there is a whole one."""
KEPT_MAX = 10_000
LOOK_AGAIN_S, SOONEST_S = 2.0, 0.05
"""The longest time between two looks at a live job, which a wake-up makes shorter, and the shortest."""
LOOK_AT_CALM_S = 30.0
"""The same for one that trains, of whose nodes all are heard and none will go: whatever changes that wakes it."""
LONG_LOOK_S, REST = 0.1, 2.0
"""After a look that took more of the processor the job rests `REST` times as long, at most `LOOK_AGAIN_S`. While a
thousand nodes start, each report makes their job due, and looks would take the time that their reports need."""


@dataclass(frozen=True, slots=True)
class _Looked:
    due_at: datetime | None
    orders_seq: int
    passed: int


class CalmJobs:
    """What the looks of this process have found. In one thread only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Looked] = OrderedDict()

    def note(self, job: JobRow, *, is_calm: bool) -> None:
        """The job has been looked at, and `due_at` and `orders_seq` of its row are as the look leaves them."""
        self._kept.pop(job.job_id, None)
        if is_calm:
            self._kept[job.job_id] = _Looked(job.due_at, job.orders_seq, 0)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def passes(self, job: JobRow, *, now: datetime, due_at: datetime) -> bool:
        """Whether the job, which is due, needs no look; then it is due again at `due_at`. One without a step for long
        may stand still."""
        known = self._kept.get(job.job_id)
        if known is None or (job.due_at, job.orders_seq) != (known.due_at, known.orders_seq):
            # Whatever changes a job makes it due, at another time than the look did, or gives it new orders.
            return False
        if known.passed >= PASSED_MAX or job.state != JobState.RUNNING or is_late(job, now):
            return False
        job.due_at = due_at
        self._kept[job.job_id] = _Looked(due_at, job.orders_seq, known.passed + 1)
        return True


class LongLooks:
    """Which jobs rest from a long look. In one thread only."""

    def __init__(self) -> None:
        self._rests_until: OrderedDict[str, float] = OrderedDict()

    def note(self, job_id: str, took_s: float, now_s: float) -> None:
        """The job was looked at, which took so many seconds of the processor."""
        self._rests_until.pop(job_id, None)
        if took_s > LONG_LOOK_S:
            self._rests_until[job_id] = now_s + min(REST * took_s, LOOK_AGAIN_S)
        while len(self._rests_until) > KEPT_MAX:
            self._rests_until.popitem(last=False)

    def rest_s(self, job_id: str, now_s: float) -> float:
        """How much longer it rests; 0: not at all."""
        return max(0.0, self._rests_until.get(job_id, now_s) - now_s)


def look_again_in_s(state: JobState, action: Action) -> float:
    """Seconds after which the job is looked at again if nothing wakes it before; `state`: before the action."""
    if state is JobState.RUNNING and action.do is Do.NOTHING and action.look_again_s is None:
        return LOOK_AT_CALM_S
    return max(SOONEST_S, min(action.look_again_s or LOOK_AGAIN_S, LOOK_AGAIN_S))


def time_changes_nothing(facts: Situation, action: Action) -> bool:
    """Whether nothing is to do, and the rule would find the same later if no row changes. Not so where money or a
    deadline counts, where a notice may be over, and where a node that becomes free would be taken."""
    spec, world = facts.inputs.job, facts.view.world
    return (
        action.do is Do.NOTHING
        and action.look_again_s is None
        and world is not None
        and len(world.node_ids()) >= spec.nodes.max
        and not facts.view.leaving
        and not any(node.is_at_risk for node in facts.inputs.nodes)
        and spec.budget_usd is None
        and spec.deadline is None
        and spec.policy is None
    )
