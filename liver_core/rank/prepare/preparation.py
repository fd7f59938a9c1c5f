"""Building one rank's part of the next world while the present one trains: everything that may happen before the pause.

Runs in a background thread of a survivor and in the main thread of a newcomer. Reads the present world's description,
writes nothing of it, draws no random number. The order of steps is the same on all ranks, since some are collective.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from liver_core.device import is_host
from liver_core.device.region import Region
from liver_core.handoff.messages import Order, PreparePhase, Rung
from liver_core.layout import Manifest, Member, from_json, to_json
from liver_core.layout.shards import check_share
from liver_core.memory.memory_budget import DEPTH_IN_HOST_MEMORY, DEPTH_LEAST, BudgetRefused, derive
from liver_core.rank.active_world import ActiveWorld, Verdict, rank_in, source_certificate_plan, target_certificate_plan
from liver_core.rank.next_world import NextWorld
from liver_core.rank.prepare.memory_plan import plan_memory
from liver_core.rank.prepare.next_groups import knows_of_groups, learn_of_groups, make_next_groups
from liver_core.rank.prepare.prepare_settings import PrepareSettings
from liver_core.rank.prepare.start_checkpoint import agreed_checkpoint
from liver_core.rank.store_exchange import Cancelled, Exchange, ExchangeTimeout
from liver_core.rank.stream.certify import Answers, Certifier, propose_verdict, read_verdict
from liver_core.rank.stream.source_stream import SourceStream
from liver_core.rank.stream.target_stream import LiveTarget, StreamRefused, TargetInputs
from liver_core.reshard import missing_bytes, plan_digest, plan_rank
from liver_core.state.buckets import bucket_rule
from liver_core.state.built_state import check_built
from liver_core.state.checkpoint import load_checkpoint
from liver_core.state.host_memory import wait_in_host_memory
from liver_core.state.live_state import LiveState, allocate
from liver_core.state.megatron_optimizer import (
    GRAD,
    Description,
    StateMismatch,
    adopt,
    describe,
    describing,
    fill_initial,
    merge_manifest,
)
from liver_core.state.optimizer_chain import discover_kinds, optimizer_chain
from liver_core.steady_clock import PROCESS_CLOCK
from liver_core.streaming.counters import UnorderedStores
from liver_core.streaming.ring import BEFORE_ANY, SourceRing
from liver_core.training.job import TrainingJob
from liver_core.transport.protocol import Transport, TransportError
from liver_core.transport.regions import landing_bytes
from liver_core.worlds.groups import connect_store, nothing_listens_at, plainly
from liver_core.worlds.megatron import MegatronWorld, building
from liver_core.worlds.released_storage import released


class PrepareFailed(RuntimeError):
    """This rank cannot build its part; `phase` says where, the text why."""

    def __init__(self, phase: PreparePhase, text: str) -> None:
        super().__init__(text)
        self.phase = phase


class Overtaken(RuntimeError):
    """What this rank built with failed because others have gone on to a newer plan revision."""


Steps = tuple[tuple[PreparePhase, Callable[[NextWorld], None], bool], ...]
_log = logging.getLogger(__name__)
STREAMING_SHARE = 0.6
"""Of the time to the deadline; after it the state is copied in the pause instead."""
_POLL_S = 0.04


class Preparation:
    """One preparation. `run` ends at its next wait once `aborted` returns True; if it is `superseded`, those who still
    build the same are told. `streaming` is called when the state begins to stream.
    `check_peers` raises RuntimeError for a world that is known to have lost a rank."""

    def __init__(
        self,
        request: Order,
        member: Member,
        job: TrainingJob,
        active: ActiveWorld | None,
        settings: PrepareSettings,
        *,
        aborted: Callable[[], bool] = lambda: False,
        superseded: Callable[[], bool] = lambda: False,
        streaming: Callable[[], None] = lambda: None,
        probe: Callable[[str], None] = lambda point: None,
        check_peers: Callable[[MegatronWorld], None] = lambda world: None,
    ) -> None:
        self.request = request
        self.member = member
        self.job = job
        self.active = active
        self.settings = settings
        self.probe = probe
        self.deadline = PROCESS_CLOCK.monotonic_at(request.boundary_by(member))
        self.made: NextWorld | None = None
        self._abort_requested = aborted
        self._superseded = superseded
        self._streaming = streaming
        self._check_peers = check_peers
        self._amending = threading.Lock()
        self._phase = PreparePhase.CONNECT

    def aborted(self) -> bool:
        """Whether there is no use in going on."""
        return self._abort_requested()

    def amend(self, request: Order) -> None:
        """A newer plan revision of the same target, with a nearer deadline; from any thread."""
        with self._amending:
            self.request, self.deadline = request, PROCESS_CLOCK.monotonic_at(request.boundary_by(self.member))
            if self.made is not None:
                self.made.request = request
                if self.made.target_stream is not None:
                    self.made.target_stream.set_deadline(self.deadline)

    def run(self) -> NextWorld:
        """Build. Raises PrepareFailed naming the phase, Overtaken, or Cancelled; nothing is left behind in any case."""
        try:
            made = self._connect()
            self._do(made, self._steps(made))
            return made
        except Cancelled:
            self._drop()
            raise
        except Exception as error:
            overtaken = self.made is not None and was_overtaken(self.made)
            self._drop()
            text = f"{type(error).__name__}: {plainly(error)}"
            raise (Overtaken(text) if overtaken else PrepareFailed(self._phase, text)) from error

    def _drop(self) -> None:
        made, self.made = self.made, None
        if made is not None and self._superseded():
            give_way(made)
        elif made is not None:
            made.drop()

    def _connect(self) -> NextWorld:
        exchange = self._own_exchange()
        source_rank, target_rank = rank_in(self.request.source, self.member), rank_in(self.request.target, self.member)
        with self._amending:
            made = self.made = NextWorld(self.request, exchange, None, source_rank, target_rank)
            made.account.device_bytes_max = self.settings.extra_bytes_max
            made.account.host_bytes_max = self.settings.host_bytes_max
            return made

    def _steps(self, made: NextWorld) -> Steps:
        """Each phase with what is done in it, and whether this rank does it."""
        beside = made.target_rank is not None and self.request.source is not None
        has_groups = knows_of_groups(self.request, made.target_rank, self.settings)
        return (
            (PreparePhase.OFFER_STATE, self._offer, made.source_rank is not None),
            (PreparePhase.GET_THE_MANIFEST, self._get_manifest, beside and made.source_rank is None),
            (PreparePhase.ESTIMATE_MEMORY, self._estimate_memory, beside),
            (PreparePhase.BRING_UP_GROUPS, self._bring_up, has_groups),
            (PreparePhase.BUILD_MODEL, self._build_state, made.target_rank is not None),
            (PreparePhase.AGREE_ON_THE_MANIFEST, self._agree_manifest, True),
            (PreparePhase.WARM_UP, self._warm_up, made.target_rank is not None and self.active is None),
            (PreparePhase.LAY_OUT_STATE, self._lay_out, made.target_rank is not None),
            (PreparePhase.OPEN_ENDPOINT, self._open_endpoint, made.source_rank is not None),
            (PreparePhase.PLAN, self._plan, beside),
            (PreparePhase.CONNECT_TO_SOURCES, self._reach_sources, beside),
            (PreparePhase.LOAD_STATE, self._load, made.target_rank is not None and self.request.source is None),
            (PreparePhase.STREAM, self._stream, self.request.streams),
        )

    def _do(self, made: NextWorld, steps: Steps) -> None:
        for phase, action, wanted in steps:
            self._phase = phase
            self.probe(phase)
            if self.aborted():
                raise Cancelled(f"aborted before {phase}")
            started = time.monotonic()
            if wanted:
                action(made)
                made.measures[f"{phase}_s"] = time.monotonic() - started

    def _offer(self, made: NextWorld) -> None:
        """As a source: say what there is."""
        assert self.active is not None
        live = self.active.live
        made.manifest = live.manifest
        made.source_certificate = source_certificate_plan(live, self.request.target.layout)
        if made.source_rank == 0:
            made.exchange.post("manifest", to_json(live.manifest))

    def _get_manifest(self, made: NextWorld) -> None:
        made.manifest = from_json(Manifest, made.exchange.wait("manifest", self.deadline))

    def _estimate_memory(self, made: NextWorld) -> None:
        """As a target: before anything is built, decide where it lies, or refuse."""
        assert made.target_rank is not None and made.manifest is not None
        present = None if self.active is None else self.active.live
        made.placement = plan_memory(self.request, made.manifest, made.target_rank, present, made.account)
        made.account.report_budgets()

    def _open_endpoint(self, made: NextWorld) -> None:
        """As a source: register this rank's live regions, and its ring, and publish where they are. After the next
        world's own memory, so that the ring gets what the budget leaves."""
        assert self.active is not None and made.source_rank is not None
        made.transport = self._endpoint(f"s{made.source_rank}")
        sources = dict(self.active.live.regions)
        if self.request.streams:
            sources |= self._open_ring(made, self.active.live)
        made.transport.register(sources=sources)
        made.transport.start_progress()
        made.exchange.post(f"address/{made.source_rank}", made.transport.address().decode())

    def _open_ring(self, made: NextWorld, live: LiveState) -> dict[str, Region]:
        """The ring of this source, which its steps fill from the next one on. Returns what to register, nothing where
        the budget has no room for a ring: then nobody streams."""
        assert made.source_rank is not None and made.source_certificate is not None
        gradients = live.regions[GRAD]
        try:
            sizes = derive(
                made.account.device_bytes_max,
                taken_bytes=made.account.device_bytes,
                gradient_bytes=gradients.bytes,
                target_numel=0 if made.live is None else made.live.shards.region_numel,
                depth_wanted=self.settings.stream.ring_depth
                or (DEPTH_IN_HOST_MEMORY if is_host(gradients.device) else DEPTH_LEAST),
                staged_kinds=made.placement.staged_kinds,
            )
            ring = SourceRing(gradients, sizes.depth, version=BEFORE_ANY)
        except (BudgetRefused, UnorderedStores) as refused:
            propose_verdict(made.exchange, Verdict(Rung.STOP_AND_COPY, f"source rank {made.source_rank}: {refused}"))
            made.exchange.post(f"ring/{made.source_rank}", 0)
            return {}
        made.measures |= {"ring_bytes": float(ring.bytes), "ring_depth": float(ring.depth)}
        made.account.take(ring.bytes)
        made.account.report_budgets()
        made.source_stream = SourceStream(
            live,
            made.source_certificate,
            ring,
            rank=made.source_rank,
            target=self.request.target.layout,
            probe=self.probe,
        )
        made.exchange.post(f"ring/{made.source_rank}", ring.depth)
        return ring.regions

    def _own_exchange(self) -> Exchange:
        """An exchange of its own for the thread that calls."""
        request, first_s = self.request, min(self._left(), self.settings.bring_up_s)

        def connect(timeout_s: float, answer_s: float) -> dist.Store:
            return connect_store(request.store, timeout_s=timeout_s, answer_s=answer_s)

        return Exchange(
            connect,
            request.handoff_id,
            request.target_revision,
            self.aborted,
            connect_s=first_s,
            refused=lambda: nothing_listens_at(request.store),
        )

    def _stream(self, made: NextWorld) -> None:
        """Have the state stream until it is certified; every rank of the handoff leaves with the same verdict."""
        self._streaming()
        targets = self.request.target.layout.world_size
        made.exchange.count("connected", int(made.target_rank is not None))
        all_connected = False
        certifier = None if made.target_rank is None else self._start_stream(made)
        streams = {f"source/{made.source_rank}": made.source_stream, f"target/{made.target_rank}": made.target_stream}
        answers = Answers(made.exchange, {name: stream for name, stream in streams.items() if stream is not None})
        begun = time.monotonic()
        while (verdict := read_verdict(made.exchange)) is None:
            if self.aborted():
                raise Cancelled("aborted while the state streamed")
            if not all_connected and made.exchange.count("connected", 0) >= targets:
                all_connected = True
                if made.transport is not None:
                    made.transport.calm()
            answers.advance()
            if certifier is not None:
                certifier.advance()
            late = time.monotonic() > begun + STREAMING_SHARE * (self.deadline - begun)
            problem = self._stream_problem(made, late=late)
            if problem:
                propose_verdict(made.exchange, Verdict(Rung.STOP_AND_COPY, problem))
            self._left()
            time.sleep(_POLL_S)
        made.verdict = verdict
        if made.target_stream is not None:
            made.measures |= made.target_stream.measures()
        if not made.streams:
            _log.warning("handoff %s: state is copied in the pause: %s", self.request.handoff_id, verdict.reason)
            made.end_streams()
            self._connect_again(made)
        elif made.target_stream is not None:
            made.target_stream.certified()
        if made.streams and made.transport is not None:
            # Everybody is connected and reads one-sidedly: from here on no thread has to serve.
            made.transport.stop_progress()

    def _stream_problem(self, made: NextWorld, *, late: bool) -> str:
        """Why this rank's part of the stream has failed, or nothing."""
        source, target = made.source_stream, made.target_stream
        if source is not None and source.failure:
            return f"source rank {made.source_rank}: {source.failure}"
        if target is not None and target.failure:
            return f"target rank {made.target_rank}: {target.failure}"
        if target is not None and late:
            return f"target rank {made.target_rank}: not certified in time: {target.describe()}"
        return ""

    def _start_stream(self, made: NextWorld) -> Certifier | None:
        """Have this target stream. Returns the one who certifies what arrives; None, and a verdict, where it cannot."""
        assert made.manifest is not None and made.target_rank is not None and self.request.source is not None
        try:
            made.target_stream = LiveTarget(
                self._stream_inputs(made), self.settings.stream, deadline=self.deadline, probe=self.probe
            )
        except StreamRefused as refused:
            verdict = Verdict(Rung.STOP_AND_COPY, f"target rank {made.target_rank}: {refused}", refused.phase)
            propose_verdict(made.exchange, verdict)
            return None
        made.measures["tile_elements"] = float(made.target_stream.tile_elements)
        return Certifier(
            made.exchange,
            made.target_stream,
            made.manifest,
            rank=made.target_rank,
            sources=self.request.source.layout.world_size,
            targets=self.request.target.layout.world_size,
            beside=made.source_stream,
            steps_outlast=self.request.rung is Rung.DROP_STEP,
        )

    def _stream_inputs(self, made: NextWorld) -> TargetInputs:
        live, plan, certificate, manifest = made.live, made.plan, made.certificate, made.manifest
        assert live is not None and plan is not None and certificate is not None and manifest is not None
        return TargetInputs(
            request=made.request,
            exchange=made.exchange,
            transport=made.transport,
            manifest=manifest,
            live=live,
            plan=plan,
            certificate=certificate,
            placement=made.placement,
            account=made.account,
            active=self.active,
            beside=made.source_stream,
        )

    @property
    def _name(self) -> str:
        """What groups and endpoints are called by: those of another target never meet with these."""
        return f"{self.request.job_id}/{self.request.generation}/{self.request.target_revision}"

    def _endpoint(self, place: str) -> Transport:
        name = f"{self._name}/{place}"
        return self.settings.transport(name, self.request.store)

    def _bring_up(self, made: NextWorld) -> None:
        if made.target_rank is None:
            learn_of_groups(made, self.deadline)
            return
        # Only when all are there does gloo connect. Even then one may die, and gloo waits for it to its timeout.
        made.exchange.gather("bring_up", self.request.target.layout.world_size, self.deadline)
        self.probe("connect_groups")
        timeout_s = min(self._left(), self.settings.bring_up_s)
        make_next_groups(made, self.settings, name=self._name, timeout_s=timeout_s, aborted=self.aborted)

    def _build_state(self, made: NextWorld) -> None:
        assert made.world is not None
        # A first world is filled at once, so it is built with memory; a next world waits without.
        hollow = contextlib.nullcontext() if self.request.source is None else released()
        with building(made.world), hollow as mode:
            made.state = check_built(self.job.build(made.world), made.world)
        if mode is not None:
            made.account.pass_through(mode.peak_bytes)

    def _warm_up(self, made: NextWorld) -> None:
        self.job.warm_up()

    def _agree_manifest(self, made: NextWorld) -> None:
        """A first world makes the manifest from what its stages describe; all others compare the plans made of it."""
        if self.request.source is None:
            made.manifest = self._first_manifest(made)
            return
        assert made.manifest is not None
        if made.target_rank is not None:
            check_share(made.manifest, self.request.target.layout, made.target_rank)
        mine = plan_digest(made.manifest, self.request.source, self.request.target)
        if made.source_rank == 0:
            made.exchange.post("plan_digest", mine)
        theirs = made.exchange.wait("plan_digest", self.deadline)
        if theirs != mine:
            raise ValueError(f"plan digest {mine} differs from source rank 0's {theirs}: manifests or rosters differ")

    def _first_manifest(self, made: NextWorld) -> Manifest:
        assert made.world is not None and made.state is not None
        ranks = describing(made.world.layout)
        part = describe(made.state.model, made.world)
        if made.target_rank in ranks:
            made.exchange.post(f"parameters/{made.target_rank}", to_json(part))
        said = (made.exchange.wait(f"parameters/{rank}", self.deadline) for rank in ranks)
        parts = [from_json(Description, each) for each in said]
        chain = optimizer_chain(made.state.optimizer)
        return merge_manifest(parts, made.state.config.num_layers, discover_kinds(chain), bucket_rule(chain))

    def _lay_out(self, made: NextWorld) -> None:
        """Regions over the new structure, then their memory, on the device or in that of the host."""
        assert made.world is not None and made.state is not None and made.manifest is not None
        with released():
            made.live = adopt(made.state.model, made.state.optimizer, made.manifest, made.world)
        _ = made.live.optimizer.form  # Found beside training, so that the pause need not.
        if self.request.source is not None and made.live.device_bytes != made.placement.world_bytes:
            text = f"{made.live.device_bytes} bytes on the device, estimated were {made.placement.world_bytes}"
            raise StateMismatch(f"next world of rank {made.target_rank}: {text}")
        made.account.take(host_bytes=wait_in_host_memory(made.live, made.placement.on_host))
        made.account.take(allocate(made.live))
        if self.request.source is not None:
            made.certificate = target_certificate_plan(made.live, self.request.source.layout)

    def _plan(self, made: NextWorld) -> None:
        assert made.manifest is not None and self.request.source is not None and made.target_rank is not None
        inputs = (made.manifest, self.request.source, self.request.target, made.target_rank)
        made.plan = plan_rank(*inputs)
        assert made.live is not None
        kinds = [kind.name for kind in made.manifest.kinds]
        planned = (landing_bytes(part.runs, made.live.regions[kind]) for part in made.plan.remote for kind in kinds)
        made.measures["bytes_planned"] = float(sum(planned))
        made.measures["bytes_lower_bound"] = float(missing_bytes(*inputs, kinds=kinds))

    def _reach_sources(self, made: NextWorld) -> None:
        assert made.plan is not None and made.live is not None
        if made.transport is None:
            made.transport = self._endpoint(f"t{made.target_rank}")
            made.transport.start_progress()
        made.transport.register(targets=made.live.regions)
        self._connect_sources(made)

    def _connect_sources(self, made: NextWorld) -> None:
        """Have this target, if it is one, reach all that it reads from. Whom it reaches already proves it again."""
        if made.plan is None or made.transport is None:
            return
        for part in made.plan.remote:
            self._connect_to(made.exchange, made.transport, part.source_rank, f"address/{part.source_rank}")

    def _connect_again(self, made: NextWorld) -> None:
        """After a stream has failed, which may have lost a source's connection and not the source. Whether it is gone
        is for the boundary to find out."""
        try:
            self._connect_sources(made)
        except TransportError as error:
            _log.warning("handoff %s: %s", self.request.handoff_id, error)

    def _connect_to(self, exchange: Exchange, endpoint: Transport, peer: int, name: str) -> None:
        address = exchange.wait(name, self.deadline)
        # It answers at once or is gone; a wait for the deadline could not be cancelled.
        answers_until = min(self.deadline, time.monotonic() + self.settings.bring_up_s)
        endpoint.connect(peer, address.encode(), answers_until)

    def _load(self, made: NextWorld) -> None:
        """Without a living source: the state of a checkpoint, or a fresh one from global coordinates."""
        assert made.world is not None and made.state is not None and made.live is not None
        with building(made.world):
            made.loaded = agreed_checkpoint(made, self.deadline)
            if made.loaded:
                made.small = load_checkpoint(made.loaded, self.job, made.world, made.state, made.live)
            else:
                fill_initial(made.live, self.job.initial_parameter, self.job.seed)

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handoff's deadline has passed")
        return left


def give_way(made: NextWorld) -> None:
    """Drop what was made for an older plan revision. Those who still build it are told first, in the store, so that
    they do not take it for a failure that their agent has to hear of."""
    with contextlib.suppress(ExchangeTimeout):
        made.exchange.post("overtaken", True)
    made.drop()


def was_overtaken(made: NextWorld) -> bool:
    """Whether a rank that built the same world has given way to a newer plan revision."""
    try:
        return made.exchange.peek("overtaken") is not None
    except ExchangeTimeout:
        return False
