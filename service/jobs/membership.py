"""Keeps a job's member list, the nodes that get its orders, up to date with its rows."""

from datetime import datetime

from sqlalchemy.orm import Session

from service.handoffs.queries import open_handoff, placement_of
from service.jobs.grants import cut_off
from service.jobs.operations import member_roles, set_members
from service.jobs.queries import active_row, roster_of
from service.jobs.tables import JobRow, JobState

HAS_MEMBERS = (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING, JobState.STOPPING)


def refresh_members(session: Session, job: JobRow, *, now: datetime) -> None:
    """Store the members: nodes of the active world, targets of an open handoff, spares of the standing plans and those
    for losses that follow each other. A node whose key was revoked since it got its place has none any more.

    A job that has ended or is suspended has no members, so that other jobs may use the nodes.
    """
    session.flush()
    if job.state not in HAS_MEMBERS:
        set_members(session, job, {}, now=now)
        return
    active = active_row(session, job)
    handoff = open_handoff(session, job.job_id)
    spares = [
        member["node_id"] for plan in job.standing_plans for member in (plan.get("target") or {}).get("members", ())
    ]
    spares += job.spares
    members = roster_of(active).node_ids() if active else ()
    targets = placement_of(handoff).node_ids() if handoff else ()
    if active:
        members = set(members) - cut_off(session, job.job_id, members, since=active.created_at)
    if handoff:
        targets = set(targets) - cut_off(session, job.job_id, targets, since=handoff.opened_at)
    roles = member_roles(members=members, targets=targets, spares=spares)
    set_members(session, job, roles, now=now)
