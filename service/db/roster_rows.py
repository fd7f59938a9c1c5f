"""How the database keeps a roster: with one entry for each rank, as queries and views read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from liver_core.layout import Members, ParallelLayout, Roster, from_json, to_json
from liver_core.layout.limits import GENERATION_MAX, STRICT, Bound, JobId


@dataclass(frozen=True, slots=True)
class _RosterRow:
    __pydantic_config__ = STRICT

    job_id: JobId
    generation: Annotated[int, Bound(ge=0, le=GENERATION_MAX)]
    layout: ParallelLayout
    members: Members


def stored_roster(roster: Roster) -> dict[str, Any]:
    """What is written."""
    return to_json(_RosterRow(roster.job_id, roster.generation, roster.layout, tuple(roster.members)))


def roster_from(stored: Mapping[str, Any]) -> Roster:
    """What was written. Raises MessageError where it is no roster."""
    row = from_json(_RosterRow, stored)
    return Roster(row.job_id, row.generation, row.layout, row.members)
