"""Reads a job's outlook, its ranks by node, and its first error."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from agent.protocol.sync import NoticeKind
from agent.protocol.values import HandoffState
from liver_core.layout import Roster
from service.handoffs.queries import open_handoff, placement_of
from service.jobs import queries
from service.jobs.rules import next_action
from service.jobs.schemas import JobPace
from service.jobs.stalls import standstill
from service.jobs.tables import ENDED, GenerationRow, JobRow, JobState, RankLogRow
from service.jobs.view import JobLimits
from service.nodes.tables import NodeRow
from service.notices.queries import as_fact, open_notices
from service.notices.rules import earliest_deadline, takes_node
from service.notices.tables import NoticeRow
from service.outlook.rules import JobNow, OpenMove, Sentence, sentence

EXCERPT_LINES = 12
SEARCHED_MAX = 400
"""Pieces of logs that one search reads, of each generation that is searched."""
_ERROR = re.compile(
    r"^Traceback \(most recent call last\)|^\S*(?:Error|Exception)\b[:(]|\b(?:FATAL|fatal error|Segmentation fault|"
    r"CUDA error|NCCL error|out of memory|terminate called|Killed)\b",
    re.MULTILINE,
)
# The same, so that pieces that cannot have one are not read at all.
_MAY_HAVE = r"Traceback|Error|Exception|FATAL|fatal error|Segmentation|out of memory|terminate called|Killed"
_PIECES = text(
    """
    SELECT log_id FROM rank_logs WHERE job_id = :job_id AND generation = :generation AND text ~ :may_have
     ORDER BY log_id LIMIT :most
    """
)


@dataclass(frozen=True, slots=True)
class Outlook:
    """A job now. `incidents`: numbers of the notices of its nodes that count."""

    row: JobRow
    said: Sentence
    pace: JobPace
    deadline_at: datetime | None
    handoff_id: object
    incidents: tuple[int, ...]


def outlook_of(session: Session, row: JobRow, limits: JobLimits, *, poll_s: float, now: datetime) -> Outlook:
    """Everything that its sentence is made of."""
    active = queries.active_row(session, row)
    roster = queries.roster_of(active) if active is not None else None
    handoff = open_handoff(session, row.job_id)
    going = _going(session, roster, now)
    pace = JobPace.of(row, queries.steps_per_s(session, row))
    planned, still = "", None
    if row.state not in ENDED:
        view = queries.situation(session, row, poll_s=poll_s, now=now).view
        planned, still = next_action(view, limits).reason, standstill(view)
    target = placement_of(handoff) if handoff is not None else None
    said = sentence(
        JobNow(
            state=JobState(row.state),
            reason=row.reason,
            now=now,
            layout=active.layout if active is not None else None,
            nodes=len(roster.node_ids()) if roster is not None else 0,
            last_step=row.last_step,
            stop_steps=int(row.spec["stop"]["steps"]),
            remaining_s=pace.remaining_s,
            leaving=[(node, earliest_deadline(map(as_fact, rows))) for node, rows in going.items()],
            handoff=None
            if handoff is None or target is None
            else OpenMove(
                HandoffState(handoff.state), handoff.source_layout, handoff.target_layout, len(target.node_ids())
            ),
            paused=bool(row.paused_because),
            planned=planned,
            stale_s=None if still is None else (now - still.since).total_seconds(),
            hook="" if still is None else still.hook,
        )
    )
    notices = [notice for rows in going.values() for notice in rows]
    return Outlook(
        row=row,
        said=said,
        pace=pace,
        deadline_at=earliest_deadline(map(as_fact, notices)),
        handoff_id=handoff.handoff_id if handoff is not None else None,
        incidents=tuple(sorted({notice.occurrence_id or notice.notice_id for notice in notices})),
    )


def _going(session: Session, roster: Roster | None, now: datetime) -> Mapping[str, list[NoticeRow]]:
    found: dict[str, list[NoticeRow]] = defaultdict(list)
    if roster is not None:
        for notice in open_notices(session, now=now, node_ids=roster.node_ids()):
            if takes_node(NoticeKind(notice.kind)):
                found[notice.node_id].append(notice)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class WorldNow:
    """The ranks of a job's world, and its nodes with what is announced of them."""

    generation: int
    roster: Roster
    nodes: Mapping[str, NodeRow]
    going: Mapping[str, list[NoticeRow]]


def world_of(session: Session, row: JobRow, *, now: datetime) -> WorldNow | None:
    """Of the active generation; None while there is none."""
    active = queries.active_row(session, row)
    if active is None or row.active_generation is None:
        return None
    roster = queries.roster_of(active)
    statement = select(NodeRow).where(NodeRow.node_id.in_(roster.node_ids()))
    nodes = {node.node_id: node for node in session.scalars(statement)}
    return WorldNow(row.active_generation, roster, nodes, _going(session, roster, now))


@dataclass(frozen=True, slots=True)
class FirstError:
    """The first line among the logs of all ranks that says an error. `at`: when the service got it."""

    generation: int
    rank: int
    node_id: str | None
    log_id: int
    offset: int
    at: datetime
    line: str
    excerpt: Sequence[str]


def generations_with_errors(session: Session, job_id: str, generation: int | None) -> Sequence[GenerationRow]:
    """Whose logs are searched: the one that is asked for; else those that failed and the newest, newest first."""
    statement = select(GenerationRow).where(GenerationRow.job_id == job_id).order_by(GenerationRow.generation.desc())
    if generation is not None:
        return session.scalars(statement.where(GenerationRow.generation == generation)).all()
    failed = session.scalars(statement.where(GenerationRow.ended_by.is_not(None)).limit(1)).all()
    newest = session.scalars(statement.limit(1)).all()
    return list({row.generation: row for row in (*failed, *newest)}.values())


def first_error(session: Session, row: GenerationRow) -> FirstError | None:
    """In the logs of one generation, by the order in which the service got them."""
    values = {"job_id": row.job_id, "generation": row.generation, "may_have": _MAY_HAVE, "most": SEARCHED_MAX}
    for log_id in session.execute(_PIECES, values).scalars().all():
        piece = session.get_one(RankLogRow, log_id)
        found = _ERROR.search(piece.text)
        if found is not None:
            return _shown(session, row, piece, found.start())
    return None


def _shown(session: Session, row: GenerationRow, piece: RankLogRow, at: int) -> FirstError:
    """With the lines behind it, also those of the next pieces of the same rank."""
    begins = piece.text.rfind("\n", 0, at) + 1
    behind = piece.text[begins:]
    following = select(RankLogRow).where(
        RankLogRow.job_id == row.job_id,
        RankLogRow.generation == row.generation,
        RankLogRow.rank == piece.rank,
        RankLogRow.start_offset > piece.start_offset,
    )
    for more in session.scalars(following.order_by(RankLogRow.start_offset).limit(4)):
        behind += more.text
    lines = behind.splitlines()
    # Of a traceback, the line that says what went wrong is the first one behind it that is not indented.
    said = next((line for line in lines[1:40] if line and not line[0].isspace()), lines[0] if lines else "")
    is_trace = bool(lines) and lines[0].startswith("Traceback")
    members = row.roster["members"]
    return FirstError(
        generation=row.generation,
        rank=piece.rank,
        node_id=members[piece.rank]["node_id"] if piece.rank < len(members) else None,
        log_id=piece.log_id,
        offset=piece.start_offset + begins,
        at=piece.recorded_at,
        line=(said if is_trace else lines[0] if lines else "")[:500],
        excerpt=[line[:500] for line in lines[:EXCERPT_LINES]],
    )
