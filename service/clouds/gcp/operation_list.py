"""Asks Compute Engine for the operations that end machines, from where the last look ended, which PostgreSQL keeps.

The list is read a little further back than it was read before, as operations may appear late; which ones of those were
read is kept as well. Times of the cursor are the cloud's own, so that no difference of clocks leaves anything out.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from service.clouds.channel_worker import ChannelWorker
from service.clouds.gcp.log_entries import ENDS, inserted_at, read_operation
from service.clouds.gcp.subscription_worker import store
from service.clouds.tables import OperationCursorRow
from service.context import Context
from service.db.claims import claim_due, release, take_back
from service.notices.rules import GCP_OPERATIONS
from service.settings import ServiceSettings

PAGE, PAGES_MAX = 500, 200
CALL_S, CLAIM_S = 10.0, 60.0
LOOK_S = 0.5
"""How often a replica sees whether it is time to ask."""
OVERLAP = timedelta(minutes=2)
FIRST_LOOK, LONGEST_LOOK = timedelta(minutes=15), timedelta(hours=2)
"""So far back the list is read at first, and at most: what is older ended long ago."""
RECENT_MAX = 5_000
OFF = "operations of a GCP project are not listed: LIVER_SERVICE_GCP_PROJECT turns it on"
_log = logging.getLogger(__name__)


class ListIncomplete(Exception):
    """Some zones did not answer, or there is more than is read at once; what was read is stored."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Operations as REST writes them. `missing`: why others may be missing; empty if none is."""

    operations: tuple[Mapping[str, Any], ...]
    missing: str = ""


Lister = Callable[[str, str], Listed]
"""By project and filter."""


def make_lister(settings: ServiceSettings) -> Lister:
    """Of google-cloud-compute, by the ordinary chain. Raises DefaultCredentialsError where there are none."""
    # Takes seconds, and is not needed where no project is configured.
    from google.api_core.client_options import ClientOptions
    from google.cloud import compute_v1

    where = ClientOptions(api_endpoint=settings.gcp_endpoint_url) if settings.gcp_endpoint_url else None
    client = compute_v1.GlobalOperationsClient(client_options=where)

    def as_rest(operation: compute_v1.Operation) -> dict[str, Any]:
        text = compute_v1.Operation.to_json(
            operation, use_integers_for_enums=False, always_print_fields_with_no_presence=False
        )
        return json.loads(text)

    def ask(project: str, wanted: str) -> Listed:
        request = compute_v1.AggregatedListGlobalOperationsRequest(project=project, filter=wanted, max_results=PAGE)
        found, missing, number = [], "", 0
        for number, page in enumerate(client.aggregated_list(request=request, timeout=CALL_S, retry=None).pages):
            if number == PAGES_MAX:
                missing = f"there are more than {PAGES_MAX * PAGE} operations"
                break
            found += [as_rest(one) for scope in page.items.values() for one in scope.operations]
            if page.unreachables:
                missing = f"these do not answer: {', '.join(list(page.unreachables)[:10])}"
        return Listed(tuple(found), missing)

    return ask


def filter_since(since: datetime) -> str:
    """The filter of Compute Engine's list. It reads OR before AND (AIP-160); if it did not, it would find too many."""
    kinds = " OR ".join(f'(operationType = "{kind}")' for kind in ENDS)
    return f'{kinds} AND (insertTime >= "{since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")'


def since_of(inserted_until: datetime | None, now: datetime) -> datetime:
    """From when on the list is read."""
    if inserted_until is None:
        return now - FIRST_LOOK
    return max(inserted_until - OVERLAP, now - LONGEST_LOOK)


@dataclass(frozen=True, slots=True)
class ListProgress:
    """What follows from a list. `new`: not read before. `inserted_until`, `recent`: what the cursor says then."""

    new: tuple[Mapping[str, Any], ...]
    inserted_until: datetime | None
    recent: tuple[str, ...]


def advance(
    operations: Iterable[Mapping[str, Any]], *, inserted_until: datetime | None, recent: Sequence[str], is_whole: bool
) -> ListProgress:
    """How far the list was read. `is_whole`: nothing is missing; else the cursor stays, and only `recent` grows."""
    known = {name.partition(" ")[2]: name for name in recent}
    new = []
    for one in operations:
        name, at = str(one.get("id") or one.get("name")), inserted_at(one)
        kind = one.get("operationType")
        if isinstance(kind, str) and kind in ENDS and name not in known:
            known[name] = f"{(at or datetime.min.replace(tzinfo=UTC)).astimezone(UTC).isoformat()} {name}"
            new.append(one)
    times = [at for one in new if (at := inserted_at(one)) is not None]
    until = inserted_until
    if is_whole and times:
        until = max(times) if inserted_until is None else max(*times, inserted_until)
    oldest = "" if until is None else (until - OVERLAP).astimezone(UTC).isoformat()
    kept = sorted(name for name in known.values() if name >= oldest or not is_whole)
    return ListProgress(tuple(new), until, tuple(kept[-RECENT_MAX:]))


class OperationWorker(ChannelWorker):
    """The thread of one replica. Of several replicas one asks at a time."""

    def __init__(self, context: Context, *, lister: Callable[[ServiceSettings], Lister] = make_lister) -> None:
        super().__init__(context, GCP_OPERATIONS, "the list of operations of the GCP project")
        self._make_lister = lister
        self._lister: Lister | None = None

    def start(self) -> None:
        """Begin to ask. Does nothing, and says so once, where no project is configured."""
        if self._settings.gcp_project is None:
            _log.info(OFF)
            return
        self.begin({"gcp-operations": lambda: self.repeat(self._turn)})

    def _turn(self) -> None:
        if not self.look():
            self._stop.wait(LOOK_S)

    def look(self) -> bool:
        """Ask once if it is time. Whether it was. Raises what google-cloud-compute raises, and ListIncomplete."""
        project, token = self._settings.gcp_project or "", uuid4()
        with self._context.sessions.begin() as session:
            now = self._context.clock()
            is_due, until = _claim(session, project, token=token, now=now)
        if not is_due:
            return False
        try:
            if self._lister is None:
                self._lister = self._make_lister(self._settings)
            listed = self._lister(project, filter_since(since_of(until, now)))
            self.commit(lambda session, at: self._keep(session, project, token, listed, at))
        except Exception:
            self._give_up(project, token)
            raise
        if listed.missing:
            raise ListIncomplete(listed.missing)
        self.say_alive()
        return True

    def _keep(self, session: Session, project: str, token: Any, listed: Listed, now: datetime) -> None:
        row = take_back(session, OperationCursorRow, key=OperationCursorRow.project == project, token=token)
        if row is None:
            # Another replica has read the list meanwhile.
            return
        progress = advance(
            listed.operations, inserted_until=row.inserted_until, recent=row.recent, is_whole=not listed.missing
        )
        store(session, [read_operation(one) for one in progress.new], GCP_OPERATIONS, now=now)
        row.inserted_until, row.recent = progress.inserted_until, list(progress.recent)
        row.due_at = now + timedelta(seconds=self._settings.gcp_operations_every_s)

    def _give_up(self, project: str, token: Any) -> None:
        try:
            with self._context.sessions.begin() as session:
                release(session, OperationCursorRow, key=OperationCursorRow.project == project, token=token)
        except Exception:
            _log.debug("the claim could not be given back: it ends by itself", exc_info=True)


def _claim(session: Session, project: str, *, token: Any, now: datetime) -> tuple[bool, datetime | None]:
    values = {"project": project, "recent": [], "due_at": now}
    session.execute(insert(OperationCursorRow).values(values).on_conflict_do_nothing())
    due = (OperationCursorRow.project == project) & (OperationCursorRow.due_at <= now)
    order = OperationCursorRow.due_at
    rows = claim_due(
        session, OperationCursorRow, due=due, order_by=order, token=token, now=now, claim_s=CLAIM_S, most=1
    )
    return bool(rows), rows[0].inserted_until if rows else None
