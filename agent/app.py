"""One agent: connects journal, zygote, supervisor, driver, peer endpoint, notice watcher and link to the service."""

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any

from agent.driver.driver import Driver
from agent.driver.node_context import Node
from agent.gpus import CPU, hidden_gpus
from agent.journal import Journal, JournalError, Table
from agent.link.identity import NodeAuth
from agent.link.link import ServiceLink
from agent.link.log_shipper import LogShipper
from agent.link.outbox import Outbox
from agent.notices.aws import AwsImdsSource
from agent.notices.gcp import EVENT_S, EVENT_WITH_GPU_S, GcpMetadataSource
from agent.notices.metadata_read import Unreadable
from agent.notices.shutdown import ShutdownSource, system_is_stopping
from agent.notices.source import MachineName, NoneSource, NoticeSource
from agent.notices.warning_budget import warning_budget
from agent.notices.watcher import NoticeWatcher
from agent.peer.peer_client import PeerClient
from agent.peer.peer_server import PeerServer, bind, peer_app
from agent.protocol.sync import NodeInfo, NoticeFact, Provider, SourceHealth, SourceState, SyncOrders, SyncReport
from agent.protocol.values import utc
from agent.settings import AgentSettings
from agent.supervisor.job_user import JobUser
from agent.supervisor.stores import Stores
from agent.supervisor.stream_relays import RelaySettings, StreamRelays, uids_of_ranks
from agent.supervisor.supervisor import Supervisor, SupervisorSettings
from agent.supervisor.wire_checks import WireChecks
from agent.supervisor.zygote_client import Exited, ZygoteError
from agent.supervisor.zygote_host import ZygoteHost
from agent.wall_clock import WallClock
from liver_core.installation import release
from liver_core.steady_clock import PROCESS_CLOCK, utc_now
from liver_core.systemd_notify import ServiceManager

INCARNATION_KEY = "last"
PULSE_CHECK_S = 1.0
STOP_GRACE_S = 10.0
SHUTDOWN_CHECK_S = 0.1
MACHINE_AGAIN_S = 5.0
_log = logging.getLogger(__name__)


class PortInUse(Exception):
    """The peer endpoint cannot listen; the text names the options, the address and the cause."""


class Agent:
    """`run` returns after `stop`; ranks, stores and zygote keep running. `stop_ranks` ends those instead."""

    def __init__(self, settings: AgentSettings, manager: ServiceManager | None = None) -> None:
        self._settings = settings
        self._manager = manager or ServiceManager()
        self._journal = Journal(settings.run_dir)
        self._stopping = asyncio.Event()
        self._fatal: Exception | None = None
        self._driver = Driver()
        job_uid = None if settings.job_user is None else settings.job_user.uid
        self._relays = StreamRelays(
            RelaySettings(settings.host, settings.relay_ports, uids_of_ranks(job_uid), settings.run_dir / "relays.log")
        )
        self._outbox = Outbox()
        self._incarnation = 0
        self._incarnation_id = uuid.uuid4()
        self._shipper = LogShipper(settings.run_dir)
        self._health: SourceHealth | None = None
        self._machine: MachineName | None = None
        self._has_ranks: Callable[[], bool] = lambda: False
        self._shutdown = ShutdownSource(has_work=lambda: self._has_ranks(), now=_now)
        self._ending: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopping.set()

    def terminate(self) -> None:
        """As `stop`; but where the whole system stops, first have the ranks move to other nodes, in the time that is
        left. A second call stops at once."""
        if self._ending is not None:
            return self.stop()
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def run(self) -> None:
        """Raises JournalError, PortInUse, LinkRefused."""
        settings, loop = self._settings, asyncio.get_running_loop()
        self._journal.open()

        def journal_failed(error: JournalError) -> None:
            loop.call_soon_threadsafe(self._take_fatal, error)

        self._journal.on_failure = journal_failed
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._journal.close)
            last = self._journal.get(Table.INCARNATION, INCARNATION_KEY) or {}
            listener = _bind_peer(settings, int(last.get("peer_port", 0)))
            stack.callback(listener.close)
            port = listener.getsockname()[1]
            self._begin_incarnation(last, port)
            supervisor, stores, zygote = self._supervision()
            wires = self._wire_checks(zygote, supervisor)
            for part in (zygote, stores, supervisor):
                stack.push_async_callback(part.close)
            peers = PeerClient(self._driver.address_of, self._driver.keys_of, now=utc_now)
            stack.push_async_callback(peers.close)
            stack.push_async_callback(self._shutdown.close)
            link = self._link(port)
            supervisor.adopt()
            stores.adopt()
            stack.push_async_callback(self._relays.close)
            self._driver.bind(self._node(supervisor, stores, wires, peers, link))
            stack.push_async_callback(self._driver.close)
            link.ends_on_first_refusal = not self._driver.jobs
            app = peer_app(
                node_id=settings.node_id,
                keys_of=self._driver.keys_of,
                take=self._driver.take_envelope,
                status=self._peer_status,
                now=utc_now,
            )
            server = PeerServer(app)
            self._has_ranks = lambda: bool(supervisor.states)
            source = notice_source(settings)
            stack.push_async_callback(source.close)
            watchers = self._watchers(source, link)
            _log.info(
                "agent of node %s started (start %d), peer endpoint at %s:%d",
                settings.node_id,
                self._incarnation,
                settings.host,
                port,
            )
            _log.info("%s", _who_runs_jobs(settings.job_user))
            self._manager.ready(f"watches node {settings.node_id}")
            await self._serve(
                server.serve(sockets=[listener]),
                _link_once_ready(link, zygote, is_new=not supervisor.states),
                *(watcher.run() for watcher in watchers),
                self._check_pulses(supervisor),
                self._show_life(watchers),
                self._learn_machine(source, link),
            )
            self._manager.stopping("ranks stay and are adopted by the next agent")

    async def stop_ranks(self) -> None:
        """End every rank, every store and the zygote of the run directory. Works without the service."""
        self._journal.open()
        supervisor, stores, zygote = self._supervision()
        try:
            supervisor.adopt()
            stores.adopt()
            await supervisor.stop_all("liver-agent --stop-ranks ended it", STOP_GRACE_S)
            await stores.retire_all()
            await zygote.end_with_children()
        finally:
            await stores.close()
            await supervisor.close()
            await zygote.close()
            self._journal.close()

    async def _serve(self, *parts: Coroutine[Any, Any, None]) -> None:
        """Run the parts until `stop` is called. Raises the error of the first part that fails."""
        tasks = [asyncio.create_task(part) for part in parts]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            waiting = {stopping, *tasks}
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopping}:
                    task.result()
                if stopping in done:
                    break
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)
        if self._fatal is not None:
            raise self._fatal

    # The parts.

    def _begin_incarnation(self, last: dict, port: int) -> None:
        """Store the number of this start on disk before any message carries it."""
        self._incarnation = int(last.get("count", 0)) + 1
        record = {"count": self._incarnation, "uuid": str(self._incarnation_id), "peer_port": port}
        self._journal.put(Table.INCARNATION, INCARNATION_KEY, record)

    def _supervision(self) -> tuple[Supervisor, Stores, ZygoteHost]:
        settings = self._settings

        def note_exit(exited: Exited) -> None:
            supervisor.note_exit(exited)

        zygote = ZygoteHost(
            self._journal,
            run_dir=settings.run_dir,
            socket_path=str(settings.socket_dir / "z.sock"),
            preload=settings.preload,
            environment=hidden_gpus(settings.device),
            job_user=settings.job_user,
            on_exit=note_exit,
        )
        supervisor = Supervisor(
            SupervisorSettings(
                settings.run_dir, settings.socket_dir, settings.rank_entry, settings.secret_places, settings.gpus
            ),
            self._journal,
            zygote,
            on_event=self._driver.take_rank_event,
            on_exit=self._driver.take_rank_exit,
        )
        stores = Stores(
            self._journal,
            zygote,
            supervisor,
            log_path=str(settings.run_dir / "stores.log"),
            entry=settings.store_entry,
            on_exit=self._driver.take_store_exit,
        )
        return supervisor, stores, zygote

    def _wire_checks(self, zygote: ZygoteHost, supervisor: Supervisor) -> WireChecks:
        log, gpus = str(self._settings.run_dir / "wires.log"), bool(self._settings.gpus)
        return WireChecks(zygote, supervisor.socket_path, log, self._settings.host, gpus)

    def _node(
        self, supervisor: Supervisor, stores: Stores, wires: WireChecks, peers: PeerClient, link: ServiceLink
    ) -> Node:
        settings = self._settings
        return Node(
            node_id=settings.node_id,
            private_address=settings.host,
            slots=settings.slots,
            incarnation=self._incarnation,
            incarnation_id=self._incarnation_id,
            journal=self._journal,
            supervisor=supervisor,
            stores=stores,
            relays=self._relays,
            wires=wires,
            peers=peers,
            outbox=self._outbox,
            budget=warning_budget(settings.provider, settings.gcp_notice_s),
            sync_soon=link.sync_soon,
            sync_with_progress=link.sync_with_progress,
            service_url=settings.service_url,
            service_is_there=link.is_there,
            service_heard_at=lambda: link.heard_at,
            look_for_service=link.look_again,
            clock=PROCESS_CLOCK,
        )

    def _link(self, port: int) -> ServiceLink:
        info = NodeInfo(
            node_id=self._settings.node_id,
            provider=self._settings.provider,
            pool=self._settings.pool,
            slots=self._settings.slots,
            peer_url=f"http://{_url_host(self._settings.host)}:{port}",
            private_address=self._settings.host,
            device=self._settings.device,
            job_user=None if self._settings.job_user is None else self._settings.job_user.name,
        )

        async def make_report(report_seq: int) -> SyncReport:
            logs = await asyncio.to_thread(self._shipper.pieces, self._driver.logs(), report_seq, self._outbox.share)
            return SyncReport(
                agent_version=release(),
                agent_incarnation=self._incarnation_id,
                report_seq=report_seq,
                issued_utc=_now(),
                node=info.model_copy(
                    update={
                        "notice_source": self._health,
                        "provider_id": self._machine and self._machine.provider_id,
                        "zone": self._machine and self._machine.zone,
                    }
                ),
                ranks=self._driver.statuses(),
                logs=logs,
                stores=self._driver.stores(),
                answering=self._driver.answering(),
                peer_keys=self._driver.peer_keys(),
                **self._outbox.batches(report_seq),
            )

        return ServiceLink(
            service_url=self._settings.service_url,
            auth=NodeAuth(
                self._settings.service_url,
                node_id=self._settings.node_id,
                join_token=self._settings.token,
                run_dir=self._settings.run_dir,
            ),
            tls_ca=self._settings.tls_ca,
            node_id=self._settings.node_id,
            make_report=make_report,
            take_orders=self._take_orders,
            take_back=self._outbox.take_back,
        )

    def _watchers(self, source: NoticeSource, link: ServiceLink) -> tuple[NoticeWatcher, ...]:
        """Of the provider's metadata, and of the machine's own shutdown if that is wanted."""

        def report(health: SourceHealth) -> None:
            self._health = health
            link.sync_soon()

        metadata = self._watcher(source, report)
        self._health = metadata.health
        if not self._settings.shutdown_inhibitor:
            return (metadata,)
        return metadata, self._watcher(self._shutdown, lambda _: None)

    def _watcher(self, source: NoticeSource, report: Callable[[SourceHealth], None]) -> NoticeWatcher:
        async def on_fact(fact: NoticeFact) -> None:
            what = "announces" if fact.withdrawn_utc is None else "has withdrawn"
            _log.warning(
                "node %s: %s %s %s, deadline %s", fact.node_id, fact.source, what, fact.kind, fact.deadline_utc
            )
            self._driver.take_notice(fact)

        async def on_over(fact: NoticeFact) -> None:
            _log.info("node %s: the %s that %s announced is over", fact.node_id, fact.kind, fact.source)
            self._driver.forget_notice(fact)

        async def on_health(health: SourceHealth) -> None:
            is_fine = health.state is SourceState.WATCHING or source is self._shutdown
            reason = f": {health.reason}" * bool(health.reason)
            _log.log(
                logging.INFO if is_fine else logging.WARNING,
                "notice source %s is %s%s",
                health.source,
                health.state,
                reason,
            )
            report(health)

        # What a source told that is not watched any more, the other one sees end.
        apart = {self._shutdown.name} if self._settings.shutdown_inhibitor else set()
        is_apart = source.name in apart
        return NoticeWatcher(
            source,
            node_id=self._settings.node_id,
            known=[fact for fact in self._driver.own_notices() if (fact.source in apart) == is_apart],
            on_fact=on_fact,
            on_over=on_over,
            on_health=on_health,
            now=_now,
        )

    # Callbacks of the parts.

    async def _take_orders(self, orders: SyncOrders) -> None:
        is_ours = orders.accepted_incarnation == self._incarnation_id
        if is_ours and self._outbox.acknowledge(orders.accepted_report_seq):
            await asyncio.to_thread(self._shipper.acknowledge, orders.accepted_report_seq)
        for refusal in orders.refusals:
            if refusal.part == "handoffs":
                with contextlib.suppress(ValueError):
                    self._outbox.drop_handoff(uuid.UUID(refusal.key))
        self._driver.take_orders(orders)

    def _take_fatal(self, error: Exception) -> None:
        self._fatal = error
        self._stopping.set()

    def _peer_status(self, job_id: str) -> dict:
        job = self._driver.jobs.get(job_id)
        return {} if job is None else job.summary()

    async def _end(self) -> None:
        """Stop; while the whole system stops, only once no rank is here any more or the time is over."""
        if self._settings.shutdown_inhibitor and self._has_ranks() and await system_is_stopping():
            limit_s = self._settings.shutdown_s
            _log.warning("the system stops: ranks have %.0f s to go to other nodes", limit_s)
            self._shutdown.announce_stop(limit_s)
            for _ in range(round(limit_s / SHUTDOWN_CHECK_S)):
                await asyncio.sleep(SHUTDOWN_CHECK_S)
                if not self._has_ranks():
                    break
        self.stop()

    async def _learn_machine(self, source: NoticeSource, link: ServiceLink) -> None:
        """Which machine of the provider this is. Without that, the service cannot tell that a message of the cloud is
        about this node."""
        while True:
            try:
                self._machine = await source.machine()
            except Unreadable as error:
                _log.warning("which machine this is cannot be read: %s", error)
                await asyncio.sleep(MACHINE_AGAIN_S)
                continue
            if self._machine is not None:
                _log.info("this is machine %s in %s", self._machine.provider_id, self._machine.zone)
                link.sync_soon()
            return

    async def _show_life(self, watchers: tuple[NoticeWatcher, ...]) -> None:
        """Sign of life for the service manager, for as long as this loop runs and notices are read."""
        while self._manager.ping_s:
            stuck = [watcher.health.source for watcher in watchers if watcher.is_stuck()]
            if stuck:
                _log.error("notice source %s is stuck: the service manager may restart this agent", stuck[0])
            else:
                self._manager.alive()
            await asyncio.sleep(self._manager.ping_s)
        await asyncio.Event().wait()

    async def _check_pulses(self, supervisor: Supervisor) -> None:
        wall_clock = WallClock(PROCESS_CLOCK)
        while True:
            await asyncio.sleep(PULSE_CHECK_S)
            if news := wall_clock.check():
                _log.warning("%s", news)
            for key, reason in supervisor.check_pulses():
                self._driver.take_hang(key, reason)
            await supervisor.ask_silent()


def _now() -> datetime:
    return utc(utc_now())


def notice_source(settings: AgentSettings) -> NoticeSource:
    """The notice source of the node's provider."""
    match settings.provider:
        case Provider.AWS:
            return AwsImdsSource(
                settings.aws_imds_url,
                interval_s=settings.notice_interval_s,
                monotonic=time.monotonic,
                now=_now,
            )
        case Provider.GCP:
            budget = warning_budget(settings.provider, settings.gcp_notice_s)
            event_s = EVENT_S if settings.device == CPU else EVENT_WITH_GPU_S
            return GcpMetadataSource(settings.gcp_metadata_url, budget=budget, event_s=event_s, now=_now)
        case Provider.NONE:
            return NoneSource()


def _bind_peer(settings: AgentSettings, last_port: int) -> socket.socket:
    """Listen on --peer-port. Without one: on the port of the last start if it is free, else on any free port."""
    if not settings.peer_port and last_port:
        with contextlib.suppress(OSError):
            return bind(settings.host, last_port)
    try:
        return bind(settings.host, settings.peer_port)
    except OSError as error:
        where = f"{settings.host}:{settings.peer_port or 'any free port'}"
        raise PortInUse(f"--host, --peer-port: cannot listen on {where}: {os.strerror(error.errno or 0)}") from None


def _who_runs_jobs(job_user: JobUser | None) -> str:
    if job_user is not None:
        return f"code of jobs runs as {job_user.name} (uid {job_user.uid}), and those it started before as it did then"
    return (
        f"there is no --job-user: code of jobs runs as this agent's user (uid {os.getuid()}), and can read the token, "
        "the key and the journal of this node"
    )


async def _link_once_ready(link: ServiceLink, zygote: ZygoteHost, *, is_new: bool) -> None:
    """Run the link to the service. A node without ranks first waits for its zygote: otherwise the service could plan it
    into a handoff, which would then wait seconds for the node's imports. A node with ranks reports them at once."""
    if is_new:
        await link.check_token()
        await _warm(zygote)
        await link.run()
        return
    await asyncio.gather(link.run(), _warm(zygote))


async def _warm(zygote: ZygoteHost) -> None:
    """Start the zygote before the first rank needs it. A problem is logged here and raised at the first fork."""
    try:
        client = await zygote.ensure()
    except ZygoteError as error:
        _log.warning("the zygote is not ready, the first fork tries again: %s", error)
        return
    _log.info("zygote (pid %d) is ready, imports took %.1f s", client.identity.pid, client.hello["preload_s"])
    if client.hello["problem"]:
        _log.error("no rank can be started: %s", client.hello["problem"])


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
