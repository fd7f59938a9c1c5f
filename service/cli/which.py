"""Which job or handoff a person means: an id, the beginning of one, or a job's name. Short ids for tables."""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, NoReturn

import typer

from service.cli.client import ServiceClient, fail
from service.cli.columns import Cell

JobId = Annotated[
    str, typer.Argument(help="Id of the job, the beginning of it, or its name; see `liver jobs list`.", metavar="JOB")
]
CANDIDATES_SHOWN = 10
MATCHES_MAX = 1_000
ENDED = ("stopped", "finished", "failed")
_LENGTHS = (8, 13, 18, 23, 36)
"""A handoff's id is cut where its groups end."""


def find_job(client: ServiceClient, text: str) -> str:
    """The id of the one job that is meant. Fails naming the candidates where there are several."""
    if not text:
        fail("JOB: must be an id, its beginning, or a name; is empty")
    found = meant_jobs(client.get("/api/v1/jobs", match=text, limit=MATCHES_MAX), text)
    if not found:
        fail(f"there is no job {text!r}; liver jobs list shows them")
    if len(found) > 1:
        _fail_ambiguous(text, [f"{job['job_id']}  {job['state']}" for job in found], "jobs")
    return found[0]["job_id"]


def meant_jobs(jobs: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """A whole id wins over a name, and a name over a beginning. Of several jobs of one name the one that goes on is
    meant, if there is only one such."""
    whole = [job for job in jobs if job["job_id"] == text]
    named = [job for job in jobs if job["name"] == text]
    going_on = [job for job in named if job["state"] not in ENDED]
    begun = [job for job in jobs if job["job_id"].startswith(text) or random_part(job["job_id"]).startswith(text)]
    return whole or (going_on if len(going_on) == 1 else named) or begun


def find_handoff(client: ServiceClient, text: str) -> str:
    """The id of the one handoff that is meant."""
    if not text:
        fail("HANDOFF: must be an id or its beginning; is empty")
    found = [item["handoff_id"] for item in client.get("/api/v1/handoffs", match=text, limit=MATCHES_MAX)]
    matching = [handoff_id for handoff_id in found if _digits(text) and _digits(handoff_id).startswith(_digits(text))]
    if not matching:
        fail(f"there is no handoff {text!r}; liver handoffs list shows them")
    if len(matching) > 1:
        _fail_ambiguous(text, matching, "handoffs")
    return matching[0]


def random_part(job_id: str) -> str:
    """What a job's id has behind its name."""
    return job_id.rpartition("-")[2]


def short_jobs(job_ids: Iterable[str]) -> dict[str, Cell]:
    """Each job by the random part of its id, as long as no other one listed has the same."""
    every = set(job_ids)
    times = Counter(map(random_part, every))
    return {job_id: Cell(part if times[part := random_part(job_id)] == 1 else job_id, job_id) for job_id in every}


def short_handoffs(handoff_ids: Iterable[str]) -> dict[str, Cell]:
    """Each handoff by as much of its id as no other one listed begins with."""
    every = set(handoff_ids)
    times = Counter(handoff_id[:length] for handoff_id in every for length in _LENGTHS)
    return {
        handoff_id: Cell(next(handoff_id[:n] for n in _LENGTHS if times[handoff_id[:n]] == 1), handoff_id)
        for handoff_id in every
    }


def _digits(text: str) -> str:
    return text.replace("-", "").lower()


def _fail_ambiguous(text: str, candidates: list[str], what: str) -> NoReturn:
    shown = [f"\n  {candidate}" for candidate in candidates[:CANDIDATES_SHOWN]]
    if len(candidates) > CANDIDATES_SHOWN:
        shown.append(f"\n  and {len(candidates) - CANDIDATES_SHOWN} more")
    fail(f"{text!r} may be any of these {len(candidates)} {what}, give more of the id:{''.join(shown)}")
