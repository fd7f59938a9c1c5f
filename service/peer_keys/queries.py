"""Reads of what decides about a job's peer keys."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import DateTime, bindparam, text
from sqlalchemy.orm import Session

ANSWERED_WITHIN = timedelta(seconds=30)
"""An answer to a report that came before a grant ended may be made so much later, and name a newer key."""
NAMES_MAX = 9

# A grant that ended since the key was made. The node had a part in the job until then, so it may know the key.
_ENDED = """
    SELECT ended.node_id FROM job_grants AS ended
     WHERE ended.job_id = jobs.job_id AND ended.role IS NULL
       AND ended.ends_at > jobs.peer_key_at - CAST(:answered_within AS interval)
       AND ended.ends_at <= CAST(:now AS timestamptz) - CAST(:answered_within AS interval)
       AND NOT EXISTS (SELECT FROM job_grants AS later
                        WHERE later.job_id = ended.job_id AND later.node_id = ended.node_id
                          AND later.grant_id > ended.grant_id AND later.at < ended.ends_at)
"""
# Nodes with a part in the job that have not said that they keep the current key.
_WAITING = """
    SELECT part.node_id
      FROM (SELECT members.node_id FROM job_members AS members WHERE members.job_id = jobs.job_id
            UNION
            SELECT ends.node_id FROM job_grants AS ends
             WHERE ends.job_id = jobs.job_id AND ends.role IS NULL AND ends.ends_at > :now
               AND NOT EXISTS (SELECT FROM job_grants AS later
                                WHERE later.job_id = ends.job_id AND later.node_id = ends.node_id
                                  AND later.grant_id > ends.grant_id)) AS part
     WHERE NOT EXISTS (SELECT FROM peer_key_holders AS holder
                        WHERE holder.job_id = jobs.job_id AND holder.node_id = part.node_id
                          AND holder.number = jobs.peer_key_number)
"""
_NOW = bindparam("now", type_=DateTime(timezone=True))
_DUE = text(
    f"""
    SELECT job_id FROM jobs
     WHERE due_at IS NOT NULL AND ((peer_key_before IS NULL AND EXISTS ({_ENDED}))
                                   OR (peer_key_before IS NOT NULL AND NOT EXISTS ({_WAITING})))
     ORDER BY job_id LIMIT :most
    """
).bindparams(_NOW)
_ENDED_OF = text(
    f"SELECT DISTINCT found.node_id FROM jobs CROSS JOIN LATERAL ({_ENDED}) AS found"
    " WHERE jobs.job_id = :job_id ORDER BY found.node_id LIMIT :most"
).bindparams(_NOW)
_WAITING_OF = text(
    f"SELECT found.node_id FROM jobs CROSS JOIN LATERAL ({_WAITING}) AS found"
    " WHERE jobs.job_id = :job_id ORDER BY found.node_id LIMIT :most"
).bindparams(_NOW)


def due_jobs(session: Session, *, now: datetime, most: int) -> Sequence[str]:
    """Jobs that have not ended and whose keys may have to change."""
    return session.scalars(_DUE, {"now": now, "answered_within": ANSWERED_WITHIN, "most": most}).all()


def ended_since_key(session: Session, job_id: str, *, now: datetime) -> Sequence[str]:
    """Some of the nodes whose grant has ended since the current key was made, by name."""
    values = {"job_id": job_id, "now": now, "answered_within": ANSWERED_WITHIN, "most": NAMES_MAX}
    return session.scalars(_ENDED_OF, values).all()


def without_key(session: Session, job_id: str, *, now: datetime) -> Sequence[str]:
    """Some of the nodes with a part in the job that may not have the current key, by name."""
    return session.scalars(_WAITING_OF, {"job_id": job_id, "now": now, "most": NAMES_MAX}).all()
