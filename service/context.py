"""What every request and reconciler uses: settings, database, clock, wake hub; and who may call."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import contextmanager_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from agent.protocol import errors
from agent.protocol.errors import Problem
from service.db.engine import Database
from service.db.outage import is_outage
from service.db.wake import TOKENS, WakeHub
from service.db.writing import WriteCheck
from service.lanes import AGENTS_WAIT_S, PEOPLE_WAIT_S, Lane, Readers
from service.nodes.listening import Listening
from service.pressing import Pressing
from service.problems import ProblemError, unauthenticated, unknown
from service.repeats.operations import claim
from service.sessions.operations import find_session
from service.settings import ServiceSettings
from service.sync.answers import KeptOrders, ToldOrders
from service.sync.calm import CalmReports
from service.sync.news import News
from service.tokens.operations import Caller, verify_token
from service.tokens.recent import RecentNodes
from service.tokens.tables import PEOPLE, Role
from service.turns import Turns

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """This machine's own clock. The service goes by the database's."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Context:
    """One per application. `agents` and `people`: whose threads and connections a request uses. `listening`: when it
    could not serve."""

    settings: ServiceSettings
    database: Database
    hub: WakeHub
    clock: Clock
    recent_nodes: RecentNodes = field(default_factory=RecentNodes)
    pressing: Pressing = field(default_factory=Pressing)
    turns: Turns = field(default_factory=Turns)
    orders: KeptOrders = field(default_factory=KeptOrders)
    told: ToldOrders = field(default_factory=ToldOrders)
    listening: Listening = field(init=False)
    agents: Lane = field(init=False)
    people: Lane = field(init=False)
    readers: Readers = field(init=False)
    calm: CalmReports = field(init=False)
    news: News = field(init=False)
    writing: WriteCheck = field(init=False)

    def __post_init__(self) -> None:
        """Make the lanes of this database; nothing was heard before."""
        object.__setattr__(self, "listening", Listening(self.clock()))
        self.hub.call_at(TOKENS, self.recent_nodes.forget)
        base = self.database
        agents = Lane(
            base.sessions,
            base.looking,
            places=base.agents_max,
            wait_s=AGENTS_WAIT_S,
            whose="agents",
            outage=base.outage,
        )
        people = Lane(
            base.readers,
            base.readers_looking,
            places=base.readers_max,
            wait_s=PEOPLE_WAIT_S,
            whose="people and scripts",
            outage=base.outage,
        )
        object.__setattr__(self, "agents", agents)
        object.__setattr__(self, "people", people)
        object.__setattr__(self, "readers", Readers(agents, outage=base.outage))
        calm = CalmReports(agents, self.orders, self.told, self.clock, self.settings, self.pressing)
        object.__setattr__(self, "calm", calm)
        news = News(agents, self.orders, self.told, self.clock, self.pressing, lost_after_s=self.settings.lost_after_s)
        object.__setattr__(self, "news", news)
        data_dir = base.embedded.pgdata if base.embedded is not None else None
        object.__setattr__(self, "writing", WriteCheck(base.sessions, data_dir))

    @property
    def sessions(self) -> sessionmaker[Session]:
        """The session factory of the service's own threads. Requests use those of their lane."""
        return self.database.sessions


CALLER, ASK, SESSION, TURN = "liver.caller", "liver.ask", "liver.session", "liver.turn"
"""Where a request's scope names its caller; under which idempotency key it comes, if any; its transaction; and, of a
read, what ends its turn among the others."""


# This function and the checks below do not block. They are coroutines so that they need no threads.
async def of_request(request: Request) -> Context:
    """The context of the application that serves this request."""
    return request.app.state.context


ContextOf = Annotated[Context, Depends(of_request)]
_bearer = HTTPBearer(auto_error=False, description="liver_<id>_<secret>, from a token file")


async def transaction(request: Request, context: ContextOf) -> AsyncIterator[Session]:
    """One request is one transaction: committed before the response is sent, rolled back on any error. One that only
    reads needs none. Raises 503 where too many others are at work."""
    async with context.people.place():
        if request.method == "GET":
            # Neither its begin nor its end says anything to the database: no thread is needed for them.
            with context.people.reading() as session:
                yield session
            return
        async with contextmanager_in_threadpool(_transaction(request, context)) as session:
            yield session


@contextmanager
def _transaction(request: Request, context: Context) -> Iterator[Session]:
    with context.people.sessions() as session:
        ask = request.scope.get(ASK)
        if ask is not None:
            claim(session, ask, now=context.clock())
        request.scope[SESSION] = session
        yield session
        try:
            session.commit()
        except SQLAlchemyError as error:
            if not is_outage(error):
                raise
            # The server may have committed before it was lost, so that nobody knows what became of the change.
            context.database.outage.begins(error)
            raise ProblemError(unknown()) from error


# Function scope, or the commit would come after the response: persist before you answer. What a route reads of the
# body itself comes before it among its parameters: they are found in this order, and a client may be slow.
SessionOf = Annotated[Session, Depends(transaction, scope="function")]


async def caller_of(
    request: Request, _credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """The caller, as the gate before all routes found it."""
    return request.scope[CALLER]


async def takes_long(request: Request) -> None:
    """A read that waits for something else than the database: others have their turn meanwhile."""
    if TURN in request.scope:
        request.scope[TURN]()


async def find_caller(context: Context, token: str, lane: Lane) -> Caller:
    """The caller with this token. Raises 401 if it is not valid. Uses its own short transaction: streams must not keep
    one open."""
    caller = context.recent_nodes.find(token, now=context.clock())
    if caller is None:
        caller = await lane.run(_verify, context, lane, token)
    if caller is None:
        raise unauthenticated("send 'Authorization: Bearer TOKEN' with a token that is neither expired nor revoked")
    return caller


async def find_visitor(context: Context, secret: str) -> Caller:
    """The caller whose browser has this cookie. Raises 401 if its session, or the token behind it, has ended."""
    caller = await context.people.run(_visitor, context, secret)
    if caller is None:
        raise unauthenticated("this browser session has ended: log in again")
    return caller


def _visitor(context: Context, secret: str) -> Caller | None:
    with context.people.reading() as session:
        return find_session(session, secret, now=context.clock())


def _verify(context: Context, lane: Lane, token: str) -> Caller | None:
    now, seen = context.clock(), context.recent_nodes.times_forgotten
    with lane.reading() as session:
        caller = verify_token(session, token, now=now)
    if caller is not None:
        context.recent_nodes.keep(token, caller, now=now, seen=seen)
    return caller


CallerOf = Annotated[Caller, Depends(caller_of)]


def _require(caller: Caller, *roles: Role) -> Caller:
    if caller.role not in roles:
        raise ProblemError(
            Problem(
                title="Forbidden",
                status=403,
                code=errors.FORBIDDEN,
                detail=f"token {caller.name!r} has role {caller.role}; this needs {' or '.join(roles)}",
            )
        )
    return caller


async def require_node(caller: CallerOf) -> Caller:
    """Only the agent of a node, with a token for that node."""
    return _require(caller, Role.NODE)


async def require_node_key(caller: CallerOf) -> Caller:
    """Only the agent of a node, with the node's key."""
    return _require(caller, Role.NODE_KEY)


async def require_joiner(caller: CallerOf) -> Caller:
    """Only an agent whose node joins."""
    return _require(caller, Role.JOIN)


async def require_person(caller: CallerOf) -> Caller:
    """People and scripts, not agents: an agent's token must not be able to read other jobs."""
    return _require(caller, *PEOPLE)


async def require_operator(caller: CallerOf) -> Caller:
    """People and scripts that may act on jobs, nodes and prices."""
    return _require(caller, Role.OPERATOR, Role.ADMIN)


async def require_admin(caller: CallerOf) -> Caller:
    """People and scripts that may make and revoke tokens."""
    return _require(caller, Role.ADMIN)


PERSON_ONLY = Depends(require_person)
ADMIN_ONLY = Depends(require_admin)
NodeOf = Annotated[Caller, Depends(require_node)]
NodeKeyOf = Annotated[Caller, Depends(require_node_key)]
JoinerOf = Annotated[Caller, Depends(require_joiner)]
OperatorOf = Annotated[Caller, Depends(require_operator)]
AdminOf = Annotated[Caller, Depends(require_admin)]
