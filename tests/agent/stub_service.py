"""A small real HTTP server in the place of the service: one job, orders derived from what agents report. No database.

It can be stopped and started again on its port, as a service that goes away and comes back with all it knew.
"""

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID, uuid4

from agent.protocol.jobfile import JobFile
from agent.protocol.joining import JOIN_PATH, NodeToken
from agent.protocol.notice_life import Notices
from agent.protocol.sources import GenerationSource, SourceHandoff, SourceInit
from agent.protocol.sync import (
    CheckpointFact,
    DesiredState,
    HandoffMirror,
    HandoffOrder,
    JobOrder,
    LayoutByCount,
    LayoutForCount,
    NodeInfo,
    RankStatus,
    SourceHealth,
    StandingPlan,
    StoreHosted,
    SyncOrders,
    SyncReport,
)
from agent.protocol.values import HandoffCause, HandoffState, Placement
from agent.protocol.wires import WireFact
from liver_core.handoff import Reason, StoreAddress
from liver_core.handoff.generations import next_start
from liver_core.layout import Member, ParallelLayout, Roster
from tests.cluster.net_islands import HUB, Islands, address_of

JOB_ID = "fake-job"
TOKEN, NODE_TOKEN = "join-secret", "node-secret"


class StubService:
    """What the service knows; every method is called under the lock."""

    def __init__(self, spec: JobFile, members: tuple[str, ...]) -> None:
        self.lock = threading.RLock()
        self.spec = spec
        self.desired = DesiredState.RUN
        self.generation = 1
        self.next_generation = 2
        self.origin = uuid4()
        self.source: GenerationSource = SourceInit()
        self.roster = roster_of(1, members)
        self.store: StoreAddress | None = None
        self.store_node: str | None = None
        self.told = set(members)
        self.spares: tuple[str, ...] = ()  # what standing plans take for who goes
        self.fits_least = 1  # so many ranks make a world
        self.peers: dict[str, str] = {}
        self.notices = Notices()
        self.handoff: HandoffOrder | None = None
        self.mirrors: dict[UUID, HandoffMirror] = {}
        self.ranks: dict[str, tuple[RankStatus, ...]] = {}
        self.stores: dict[str, tuple[StoreHosted, ...]] = {}  # by node, as last reported
        self.disowns = False  # the job is named to nobody any more
        self.failed: list[RankStatus] = []
        self.steps: dict[tuple[int, int], float | None] = {}
        self.wires: list[WireFact] = []
        self.logs: dict[tuple[int, int], str] = {}
        self.finished: list[int] = []
        self.causes: list[Reason] = []  # why a job failed by its own fault
        self.checkpoints: list[CheckpointFact] = []
        self.checkpoint_asked = 0
        self.suspends_utc: datetime | None = None
        self.nodes: dict[str, NodeInfo] = {}  # as last reported
        self.notice_sources: dict[str, SourceHealth] = {}
        self.keys: dict[str, tuple[str, str | None, int]] = {}  # by node: its orders name other keys than the first
        self.kept_keys: dict[str, int] = {}  # by node: the number of the key that it says it keeps
        self.seq = 0
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.away = False
        self.islands: Islands | None = None  # then it listens at their hub

    def start(self) -> "StubService":
        service = self
        self.away = False

        class Bound(_Handler):
            stub = service

        self._server = self._listen(Bound)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self.away = True
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def host(self) -> str:
        return "127.0.0.1" if self.islands is None else address_of(HUB, self.islands.names)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self._port}"

    def _listen(self, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        if self.islands is None:
            return _QuietServer((self.host, self._port), handler)
        with self.islands.thread_in(HUB) as there:
            return there.submit(_QuietServer, (self.host, self._port), handler).result()

    def handoffs(self, state: HandoffState) -> list[HandoffMirror]:
        with self.lock:
            return [mirror for mirror in self.mirrors.values() if mirror.state is state]

    def propose(self, nodes: tuple[str, ...]) -> UUID:
        """A handoff to these nodes, as the service does to grow."""
        with self.lock:
            self.told |= set(nodes)
            self.handoff = HandoffOrder(
                handoff_id=uuid4(),
                parent=self.generation,
                cause=HandoffCause.GROW,
                target=Placement(layout=ParallelLayout(pp=len(nodes)), members=members_of(nodes)),
                plan_digest="grow",
                proposed_utc=datetime.now(UTC),
                reason="more nodes",
            )
            return self.handoff.handoff_id

    def restart(self, nodes: tuple[str, ...], source: GenerationSource, generation: int | None = None) -> None:
        """A generation that the service starts, on these nodes; by default a new start."""
        with self.lock:
            self.generation = generation or next_start(self.next_generation - 1)
            self.next_generation = max(self.next_generation, self.generation + 1)
            self.origin, self.source = uuid4(), source
            self.roster = roster_of(self.generation, nodes)
            self.store, self.store_node = None, self.roster.node_ids()[0]
            self.desired = DesiredState.RUN

    def take(self, report: SyncReport) -> SyncOrders:
        with self.lock:
            self.seq += 1
            node_id = report.node.node_id
            self.nodes[node_id] = report.node
            self.peers[node_id] = report.node.peer_url
            if report.node.notice_source is not None:
                self.notice_sources[node_id] = report.node.notice_source
            self.ranks[node_id] = report.ranks
            self.failed += [rank for rank in report.ranks if rank.stage == "failed"]
            for fact in report.notices:
                self.notices.take(fact)
            self.finished += [item.step for item in report.finished]
            self.causes += [item.failed for item in report.finished if item.failed is not None]
            self.checkpoints += report.checkpoints
            self.wires += report.wires
            for row in report.steps:
                self.steps[(row.generation, row.step)] = row.loss or self.steps.get((row.generation, row.step))
            for kept in report.peer_keys:
                self.kept_keys[node_id] = kept.number
            for chunk in report.logs:
                key = (chunk.generation, chunk.rank)
                self.logs[key] = self.logs.get(key, "")[: chunk.offset] + chunk.text
            self.stores[node_id] = report.stores
            for hosted in report.stores:
                is_its_place = self.store is None and self.store_node in (None, node_id)
                if hosted.generation == self.generation and is_its_place:
                    self.store, self.store_node = StoreAddress(host=hosted.host, port=hosted.port), node_id
            for mirror in report.handoffs:
                self._take_mirror(mirror)
            told = not self.disowns and (
                node_id in self.told or node_id in self.roster.node_ids() or bool(report.ranks)
            )
            return SyncOrders(
                orders_seq=self.seq,
                orders_digest="",
                issued_utc=datetime.now(UTC),
                accepted_incarnation=report.agent_incarnation,
                accepted_report_seq=report.report_seq,
                jobs=(self.order(node_id),) if told else (),
                poll_s=0.25,
            )

    def _take_mirror(self, mirror: HandoffMirror) -> None:
        known = self.mirrors.get(mirror.handoff_id)
        if known is not None and known.mirror_seq >= mirror.mirror_seq:
            return
        self.mirrors[mirror.handoff_id] = mirror
        self.next_generation = max(self.next_generation, mirror.generation + 1)
        if self.handoff is not None and self.handoff.handoff_id == mirror.handoff_id:
            self.handoff = None
        if mirror.state is HandoffState.ACTIVE and mirror.generation > self.generation:
            self.generation, self.roster = mirror.generation, mirror.target
            self.origin, self.source = mirror.handoff_id, SourceHandoff(handoff_id=mirror.handoff_id)
            self.store, self.store_node = mirror.store, mirror.store_node

    def going(self) -> set[str]:
        """The nodes that a notice moves jobs from."""
        return {fact.node_id for fact in self.notices.moving(datetime.now(UTC))}

    def order(self, node_id: str = "") -> JobOrder:
        key, before, number = self.keys.get(node_id, ("p" * 43, None, 1))
        nodes = self.roster.node_ids()
        return JobOrder(
            job_id=JOB_ID,
            spec=self.spec,
            peer_key=key,
            peer_key_before=before,
            peer_key_number=number,
            desired=self.desired,
            suspends_utc=self.suspends_utc,
            generation=self.generation,
            origin_id=self.origin,
            source=self.source,
            roster=self.roster,
            next_generation=self.next_generation,
            peers=dict(self.peers),
            store_node=self.store_node,
            store=self.store,
            lead_order=tuple(sorted(nodes, key=lambda name: name in self.going())),
            standing_plans=self._standing_plans(),
            layouts_by_count=LayoutByCount(
                choices=tuple(
                    LayoutForCount(nodes=count, layout=ParallelLayout(pp=count), reason="pipeline only")
                    for count in range(1, 9)
                )
            ),
            handoff=self.handoff,
            checkpoint_asked=self.checkpoint_asked,
            saves_at_end=self.spec.checkpoint is not None,
            notices=tuple(fact for fact in self.notices.all() if fact.node_id in nodes),
        )

    def _standing_plans(self) -> tuple[StandingPlan, ...]:
        """For the loss of each node beside those that are known to go, as the service makes them."""
        nodes = self.roster.node_ids()
        going = tuple(name for name in nodes if name in self.going())
        losses = dict.fromkeys(tuple(dict.fromkeys((*going, name))) for name in nodes)
        return tuple(self._standing_plan(frozenset(leaving)) for leaving in losses)

    def _standing_plan(self, leaving: frozenset[str]) -> StandingPlan:
        nodes = self.roster.node_ids()
        spares = tuple(name for name in self.spares if name not in nodes)
        staying = (*(name for name in nodes if name not in leaving), *spares)
        layout, fits = ParallelLayout(pp=max(1, len(staying))), len(staying) >= self.fits_least
        target = Placement(layout=layout, members=members_of(staying)) if fits else None
        return StandingPlan(
            parent=self.generation,
            leaving=tuple(sorted(leaving)),
            target=target,
            plan_digest="standing",
            reason="one node less",
        )


def members_of(nodes: tuple[str, ...]) -> tuple[Member, ...]:
    return tuple(Member(node_id=name, slot=0) for name in nodes)


def roster_of(generation: int, nodes: tuple[str, ...]) -> Roster:
    return Roster(job_id=JOB_ID, generation=generation, layout=ParallelLayout(pp=len(nodes)), members=members_of(nodes))


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Agents that are killed drop their connections; that is no news."""


class _Handler(BaseHTTPRequestHandler):
    stub: StubService
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.stub.away:
            self.close_connection = True  # A connection that outlived its server; nothing is answered on it.
            return None
        joins = self.path == JOIN_PATH
        if self.headers["Authorization"] != f"Bearer {TOKEN if joins else NODE_TOKEN}":
            return self._answer(401, json.dumps({"code": "unauthenticated", "detail": "no such token"}))
        if joins:
            answer = NodeToken(key_id="k", token=NODE_TOKEN, expires_utc=datetime(2099, 1, 1, tzinfo=UTC))
            return self._answer(201, answer.model_dump_json())
        orders = self.stub.take(SyncReport.model_validate_json(body))
        return self._answer(200, orders.model_dump_json(by_alias=True))

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {NODE_TOKEN}":
            self._answer(401, json.dumps({"code": "unauthenticated", "detail": "no such token"}))
            return
        self._answer(404, "no wake stream here, agents poll")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""
