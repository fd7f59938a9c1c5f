"""Auto Scaling groups that wait with the end of a machine: kept waiting while a job leaves it, then told to go on.

One row each, so that a restart of the service, or another replica, goes on where one has stopped.
"""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from liver_core.layout.limits import fitting
from service.clouds.aws.events import Hook
from service.clouds.tables import HookRow
from service.context import Context
from service.db.claims import claim_due, take_back
from service.leases.tables import LeaseRow
from service.ledger.rules import OVER
from service.nodes.queries import jobs_of_nodes
from service.nodes.tables import NodeRow

LOOK_EVERY = timedelta(seconds=2)
BEAT_EVERY = timedelta(seconds=15)
"""Less than half of the shortest time that a hook can be set to wait, 30 s."""
HEARTBEATS_MAX = 100
"""More than so many Auto Scaling does not take (Auto Scaling User Guide)."""
BATCH = 32
CLAIM_S = 30.0
_log = logging.getLogger(__name__)


class HookDo(StrEnum):
    """What a hook is told now."""

    WAIT = "wait"
    BEAT = "beat"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class HookView:
    """What is known of the machine that a hook keeps. `has_lease`: its node is not gone. `has_ranks`: it runs some, or
    a job counts on it."""

    has_lease: bool
    has_ranks: bool
    heartbeats: int
    beat_at: datetime | None


def next_step(view: HookView, now: datetime) -> tuple[HookDo, str]:
    """What to tell the group, and why. Pure."""
    if not view.has_lease:
        return HookDo.COMPLETE, "the node is gone"
    if not view.has_ranks:
        return HookDo.COMPLETE, "no job has a rank on the node"
    if view.heartbeats >= HEARTBEATS_MAX:
        return HookDo.WAIT, f"a job is still on the node; Auto Scaling takes no more than {HEARTBEATS_MAX} heartbeats"
    if view.beat_at is None or now - view.beat_at >= BEAT_EVERY:
        return HookDo.BEAT, "a job is leaving the node"
    return HookDo.WAIT, "a job is leaving the node"


def store_hook(session: Session, hook: Hook, *, node_id: str, lease_id: int | None, now: datetime) -> None:
    """Look after this hook from now on. One that is known stays as it is."""
    values = {
        "token": hook.token,
        "group_name": hook.group,
        "hook_name": hook.hook,
        "provider_id": hook.provider_id,
        "node_id": node_id,
        "lease_id": lease_id,
        "heard_at": now,
        "heartbeats": 0,
        "due_at": now,
        "reason": "",
    }
    session.execute(insert(HookRow).values(values).on_conflict_do_nothing())


def tick(context: Context, autoscaling: Any) -> int:
    """Look at each hook that is due once. Returns how many there were."""
    now, token = context.clock(), uuid4()
    with context.sessions.begin() as session:
        due = {"due": HookRow.due_at <= now, "order_by": HookRow.due_at}
        rows = claim_due(session, HookRow, **due, token=token, now=now, claim_s=CLAIM_S, most=BATCH)
        seen = [(row.token, _call_of(row), next_step(_view(session, row), now)) for row in rows]
    for name, call, (do, reason) in seen:
        # Outside of any transaction: a cloud that is slow holds no lock.
        trouble = _tell(autoscaling, call, do)
        with context.sessions.begin() as session:
            row = take_back(session, HookRow, key=HookRow.token == name, token=token)
            if row is not None:
                _note(row, do, fitting(trouble or reason), is_over=_is_over(trouble), failed=bool(trouble), now=now)
    return len(seen)


def _view(session: Session, row: HookRow) -> HookView:
    lease = session.get(LeaseRow, row.lease_id) if row.lease_id is not None else None
    node = session.get_one(NodeRow, row.node_id)
    return HookView(
        has_lease=lease is not None and lease.ended_at is None,
        has_ranks=any(rank["stage"] not in OVER for rank in node.ranks) or bool(jobs_of_nodes(session, [row.node_id])),
        heartbeats=row.heartbeats,
        beat_at=row.beat_at,
    )


def _call_of(row: HookRow) -> dict[str, str]:
    return {
        "AutoScalingGroupName": row.group_name,
        "LifecycleHookName": row.hook_name,
        "LifecycleActionToken": row.token,
        "InstanceId": row.provider_id,
    }


def _tell(autoscaling: Any, call: dict[str, str], do: HookDo) -> str:
    """Why it could not be told; empty if it was, or if there is nothing to tell."""
    try:
        if do is HookDo.BEAT:
            autoscaling.record_lifecycle_action_heartbeat(**call)
        elif do is HookDo.COMPLETE:
            autoscaling.complete_lifecycle_action(**call, LifecycleActionResult="CONTINUE")
    except (ClientError, BotoCoreError) as error:
        _log.warning("hook %s of group %s: %s", call["LifecycleHookName"], call["AutoScalingGroupName"], error)
        return str(error)
    return ""


def _is_over(trouble: str) -> bool:
    """The group waits no more: its time is over, or somebody else has told it to go on."""
    return "No active Lifecycle Action" in trouble


def _note(row: HookRow, do: HookDo, reason: str, *, is_over: bool, failed: bool, now: datetime) -> None:
    row.reason = reason
    if do is HookDo.BEAT and not failed:
        row.heartbeats, row.beat_at = row.heartbeats + 1, now
    is_done = do is HookDo.COMPLETE and not failed
    row.due_at = None if is_done or is_over else now + LOOK_EVERY
