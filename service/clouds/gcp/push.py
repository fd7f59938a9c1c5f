"""Where Pub/Sub pushes the messages of a GCP project, instead of the service pulling them.

Who comes is checked before the body is read. A message is acknowledged, with a 2xx, once it is stored; one that nobody
can read is stored as such and acknowledged too, or it would come again for ever.
"""

import hashlib

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from agent.protocol import errors
from agent.protocol.errors import Problem
from service.clouds.gcp.log_entries import ENTRY_BYTES_MAX, LogRead, read_push
from service.clouds.gcp.push_tokens import GoogleKeys, KeysUnknown, PushRefused, check_push
from service.clouds.gcp.subscription_worker import store
from service.clouds.operations import note_channel
from service.context import Context, ContextOf
from service.notices.rules import ACCOUNT_CHANNELS, GCP_PUBSUB
from service.problems import ProblemError, unavailable

PATH = "/push/gcp-pubsub"
BODY_BYTES_MAX = {PATH: 2 * ENTRY_BYTES_MAX}
OFF = "nothing is pushed here: LIVER_SERVICE_GCP_PUSH_AUDIENCE with LIVER_SERVICE_GCP_PUSH_ACCOUNT turns it on"
_TITLES = {401: ("Not authenticated", errors.UNAUTHENTICATED), 403: ("Forbidden", errors.FORBIDDEN)}
router = APIRouter(include_in_schema=False)


@router.post(PATH, status_code=204)
async def take_push(request: Request, context: ContextOf) -> Response:
    """One message. 401, 403: not from Pub/Sub, or for somebody else; 503: try again; 2xx: it is stored."""
    await run_in_threadpool(_admit, request, context)
    body = await request.body()
    reading = read_push(body, hashlib.sha256(body).hexdigest())
    # As urgent as what agents report, and as short.
    await context.agents.run(_keep, context, reading)
    return Response(status_code=204)


def _admit(request: Request, context: Context) -> None:
    settings, keys = context.settings, request.app.state.google_keys
    audience, account = settings.gcp_push_audience, settings.gcp_push_account
    if audience is None or account is None or not isinstance(keys, GoogleKeys):
        raise ProblemError(Problem(title="Not found", status=404, code=errors.NOT_FOUND, detail=OFF))
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    try:
        if kind.lower() != "bearer":
            raise PushRefused(401, "Authorization: Bearer TOKEN is required; let the subscription send an OIDC token")
        check_push(token.strip(), keys, audience=audience, account=account, now=context.clock())
    except PushRefused as refused:
        title, code = _TITLES[refused.status]
        raise ProblemError(Problem(title=title, status=refused.status, code=code, detail=str(refused))) from None
    except KeysUnknown as error:
        raise ProblemError(unavailable(str(error))) from None


def _keep(context: Context, reading: LogRead) -> None:
    with context.agents.sessions.begin() as session:
        now = context.clock()
        store(session, [reading], GCP_PUBSUB, now=now)
        note_channel(session, GCP_PUBSUB, ACCOUNT_CHANNELS[GCP_PUBSUB], now=now)
