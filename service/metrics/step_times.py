"""How long a job's steps take in each layout that it ran in, from the steps that are kept."""

from itertools import groupby

from sqlalchemy import text
from sqlalchemy.orm import Session

from service.planner.measured_steps import EDGE_STEPS, LayoutStep, WorldSteps, as_of_now

WORLDS_MAX = 12
"""So many generations of a job are looked at, the newest."""
LONGEST_OF_STEPS = 1_000
"""Of so many steps the longest says how long one may take."""

_STEPS_OF_WORLDS = text(
    """
    WITH worlds AS (
      SELECT g.generation, g.layout,
             coalesce((SELECT min(h.opened_at) FROM handoffs h
                        WHERE h.job_id = g.job_id AND h.parent = g.generation AND h.state NOT IN ('aborted', 'broken')),
                      'infinity') AS until
        FROM job_generations g WHERE g.job_id = :job_id ORDER BY g.generation DESC LIMIT :worlds)
    SELECT worlds.generation, worlds.layout, edge.seconds
      FROM worlds CROSS JOIN LATERAL (
        (SELECT step, seconds FROM steps
          WHERE job_id = :job_id AND generation = worlds.generation AND finished_at <= worlds.until AND seconds > 0
          ORDER BY step LIMIT :edge)
        UNION
        (SELECT step, seconds FROM steps
          WHERE job_id = :job_id AND generation = worlds.generation AND finished_at <= worlds.until AND seconds > 0
          ORDER BY step DESC LIMIT :edge)) AS edge
     ORDER BY worlds.generation DESC, edge.step
    """
)
_LONGEST = text(
    """
    SELECT coalesce(max(seconds), 0) FROM (
           SELECT seconds FROM steps WHERE job_id = :job_id ORDER BY finished_at DESC LIMIT :most) AS newest
    """
)


def longest_step_s(session: Session, job_id: str) -> float:
    """Seconds of the longest of the job's newest steps; 0 before the first."""
    return session.execute(_LONGEST, {"job_id": job_id, "most": LONGEST_OF_STEPS}).scalar_one()


def step_seconds(session: Session, job_id: str) -> tuple[tuple[str, float], ...]:
    """Seconds of a step by layout, as measured and as they would be now."""
    return tuple((item.layout, item.seconds) for item in measured_steps(session, job_id))


def measured_steps(session: Session, job_id: str) -> tuple[LayoutStep, ...]:
    """Steps by layout, as measured and as they would be now."""
    limits = {"job_id": job_id, "worlds": WORLDS_MAX, "edge": EDGE_STEPS}
    rows = session.execute(_STEPS_OF_WORLDS, limits).all()
    worlds = (tuple(group) for _, group in groupby(rows, key=lambda row: row.generation))
    return as_of_now([WorldSteps(world[0].layout, tuple(row.seconds for row in world)) for world in worlds])
