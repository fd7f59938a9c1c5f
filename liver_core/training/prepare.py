"""Building one rank's part of the next world while the present one trains: everything that may happen before the pause.

Runs in a background thread of a survivor and in the main thread of a newcomer. Reads the present world's description,
writes nothing of it, draws no random number. The order of steps is the same on all ranks, since some are collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from liver_core.certificate import CertificatePlan
from liver_core.handoff.messages import StoreAddress
from liver_core.layout import Manifest, Member, ParameterSpec, Roster
from liver_core.reshard import RankPlan, missing_elements, plan_digest, plan_rank
from liver_core.tensors.checkpoint import load_checkpoint
from liver_core.tensors.megatron import (
    LiveState,
    adopt,
    allocate,
    describe_parameters,
    discover_kinds,
    distributed_optimizer,
    fill_initial,
    free,
    merge_manifest,
)
from liver_core.training.exchange import Cancelled, Exchange
from liver_core.training.job import TrainingJob, TrainState
from liver_core.training.request import Request
from liver_core.transport.protocol import Read, Transport
from liver_core.worlds.groups import connect_store, plainly
from liver_core.worlds.megatron import MegatronWorld, bring_up, building, retire
from liver_core.worlds.released import released, trim


class PrepareFailed(RuntimeError):
    """This rank cannot build its part; `phase` says where, the text why."""

    def __init__(self, phase: str, text: str) -> None:
        super().__init__(text)
        self.phase = phase
        self.text = text


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """`host`: local address for groups and transport. `extra_bytes_max`: budget for everything a handoff adds to this
    rank, None for no limit. `bring_up_s`: seconds that one group may take to come up, `collective_s` one collective.
    `transport`: makes this rank's endpoint from its name and the target generation's store."""

    host: str
    transport: Callable[[str, StoreAddress], Transport]
    extra_bytes_max: int | None = None
    bring_up_s: float = 20.0
    collective_s: float = 20.0


@dataclass(slots=True)
class ActiveWorld:
    """The world this rank trains in."""

    world: MegatronWorld
    state: TrainState
    live: LiveState


@dataclass(slots=True)
class NextWorld:
    """What preparation made: for a target its world, state, plan and endpoint; for a leaver only the endpoint.

    `small` is the small state of the checkpoint that was loaded, `boundary` what the source world posted at its
    boundary. `measures` are seconds per phase and bytes; `extra_bytes` is what this rank holds more than before.
    """

    request: Request
    exchange: Exchange
    transport: Transport | None
    source_rank: int | None
    target_rank: int | None
    manifest: Manifest | None = None
    world: MegatronWorld | None = None
    state: TrainState | None = None
    live: LiveState | None = None
    plan: RankPlan | None = None
    certificate: CertificatePlan | None = None
    source_certificate: CertificatePlan | None = None
    small: dict[str, Any] | None = None
    boundary: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    extra_bytes: int = 0

    def reads(self, kinds: Sequence[str]) -> list[Read]:
        """The remote reads of these kinds, all peers."""
        assert self.plan is not None
        return [Read(part.source_rank, kind, part.runs) for part in self.plan.remote for kind in kinds]

    def drop(self) -> None:
        """Give everything back; g is as if nothing had happened."""
        if self.transport is not None:
            self.transport.close()
        if self.world is not None:
            retire(self.world)
        if self.live is not None:
            free(self.live)
        self.state = self.live = None


def rank_in(roster: Roster | None, member: Member) -> int | None:
    """The rank of `member` in `roster`, None when it is not a member."""
    if roster is None or member not in roster.members:
        return None
    return roster.members.index(member)


class Preparation:
    """One preparation; `run` does it, and ends at its next wait once `aborted` says so."""

    def __init__(
        self,
        request: Request,
        member: Member,
        job: TrainingJob,
        active: ActiveWorld | None,
        settings: PrepareSettings,
        *,
        aborted: Callable[[], bool] = lambda: False,
        probe: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.request = request
        self.member = member
        self.job = job
        self.active = active
        self.settings = settings
        self.aborted = aborted
        self.probe = probe
        self.deadline = time.monotonic() + max(0.0, request.deadline_utc - time.time())
        self._phase = "connect"

    def run(self) -> NextWorld:
        """Build. Raises PrepareFailed naming the phase, or Cancelled; nothing is left behind in either case."""
        made: NextWorld | None = None
        try:
            made = self._connect()
            self._build(made)
            return made
        except Cancelled:
            self._drop(made)
            raise
        except Exception as error:
            self._drop(made)
            raise PrepareFailed(self._phase, f"{type(error).__name__}: {plainly(error)}") from error

    def _drop(self, made: NextWorld | None) -> None:
        if made is not None:
            made.drop()

    def _connect(self) -> NextWorld:
        store = connect_store(self.request.store, timeout_s=min(self._left(), self.settings.bring_up_s))
        exchange = Exchange(store, self.request.handoff_id, self.aborted)
        source_rank, target_rank = rank_in(self.request.source, self.member), rank_in(self.request.target, self.member)
        return NextWorld(self.request, exchange, None, source_rank, target_rank)

    def _build(self, made: NextWorld) -> None:
        steps: tuple[tuple[str, Callable[[NextWorld], None], bool], ...] = (
            ("offer state", self._offer, made.source_rank is not None),
            ("bring up groups", self._bring_up, made.target_rank is not None),
            ("build model", self._build_state, made.target_rank is not None),
            ("agree on the manifest", self._agree_manifest, True),
            ("warm up", self._warm_up, made.target_rank is not None and self.active is None),
            ("lay out state", self._lay_out, made.target_rank is not None),
            ("plan", self._plan, made.target_rank is not None and self.request.source is not None),
            (
                "connect to sources",
                self._reach_sources,
                made.target_rank is not None and self.request.source is not None,
            ),
            ("load state", self._load, made.target_rank is not None and self.request.source is None),
        )
        for phase, action, wanted in steps:
            if self.aborted():
                raise Cancelled(f"aborted before {phase}")
            self._phase = phase
            self.probe(phase)
            started = time.monotonic()
            if wanted:
                action(made)
                made.measures[phase.replace(" ", "_") + "_s"] = time.monotonic() - started

    def _offer(self, made: NextWorld) -> None:
        """Register this rank's live regions and publish where they are; nothing is read before the boundary."""
        assert self.active is not None and made.source_rank is not None
        live = self.active.live
        made.manifest = live.manifest
        made.transport = self._endpoint(f"s{made.source_rank}")
        made.transport.register(sources=live.regions)
        made.transport.start_progress()
        made.source_certificate = certificate_plan(live)
        made.exchange.post(f"address/{made.source_rank}", made.transport.address().decode())
        if made.source_rank == 0:
            made.exchange.post("manifest", live.manifest.to_json())

    def _endpoint(self, place: str) -> Transport:
        name = f"{self.request.job_id}/{self.request.generation}/{place}"
        return self.settings.transport(name, self.request.store)

    def _bring_up(self, made: NextWorld) -> None:
        # Only when all are there does gloo connect: it cannot be told to give up before its time is over.
        made.exchange.gather("bring_up", self.request.target.layout.world_size, self.deadline)
        # Groups need a store client of their own: gloo keeps it, and the exchange must not wait behind it.
        store = connect_store(self.request.store, timeout_s=self.settings.bring_up_s)
        assert made.target_rank is not None
        made.world = bring_up(
            self.request.target,
            made.target_rank,
            store,
            host=self.settings.host,
            timeout_s=min(self._left(), self.settings.bring_up_s),
            collective_s=self.settings.collective_s,
        )

    def _build_state(self, made: NextWorld) -> None:
        assert made.world is not None
        # A first world is filled at once, so it is built with memory; a next world waits without.
        hollow = contextlib.nullcontext() if self.request.source is None else released()
        with building(made.world), hollow as mode:
            made.state = self.job.build(made.world)
        if mode is not None:
            trim()
            made.measures["extra_bytes_peak"] = float(mode.peak_bytes)

    def _warm_up(self, made: NextWorld) -> None:
        self.job.warm_up()

    def _agree_manifest(self, made: NextWorld) -> None:
        """Newcomers take the manifest of the source world; a first world makes it from what its stages describe."""
        if self.request.source is None:
            made.manifest = self._first_manifest(made)
        elif made.manifest is None:
            made.manifest = Manifest.from_json(made.exchange.wait("manifest", self.deadline))
        if self.request.source is None:
            return
        mine = plan_digest(made.manifest, self.request.source, self.request.target)
        if made.source_rank == 0:
            made.exchange.post("plan_digest", mine)
        theirs = made.exchange.wait("plan_digest", self.deadline)
        if theirs != mine:
            raise ValueError(f"plan digest {mine} differs from source rank 0's {theirs}: manifests or rosters differ")

    def _first_manifest(self, made: NextWorld) -> Manifest:
        assert made.world is not None and made.state is not None
        part = describe_parameters(made.state.model, made.world)
        made.exchange.post(f"parameters/{made.target_rank}", [spec.to_json() for spec in part])
        stages = next(ranks for ranks in made.world.layout.groups("pp") if made.target_rank in ranks)
        parts = [
            tuple(ParameterSpec.from_json(spec) for spec in made.exchange.wait(f"parameters/{rank}", self.deadline))
            for rank in stages
        ]
        kinds = discover_kinds(distributed_optimizer(made.state.optimizer))
        return merge_manifest(parts, made.state.config.num_layers, kinds)

    def _lay_out(self, made: NextWorld) -> None:
        """Regions over the new structure, then their memory, checked against the budget first."""
        assert made.world is not None and made.state is not None and made.manifest is not None
        with released():
            made.live = adopt(made.state.model, made.state.optimizer, made.manifest, made.world)
        made.extra_bytes = needed = extra_bytes(made.live)
        # A first world is not extra: there is nothing beside it.
        budget = self.settings.extra_bytes_max if self.request.source is not None else None
        if budget is not None and needed > budget:
            raise MemoryError(
                f"extra_bytes_max: the next world needs {needed} bytes on rank {made.target_rank}, budget is {budget}"
            )
        allocated = allocate(made.live)
        made.measures["extra_bytes_peak"] = max(made.measures.get("extra_bytes_peak", 0.0), float(allocated))
        if budget is not None:
            made.measures["extra_bytes_budget"] = float(budget)
        for region in made.live.regions.values():
            # Touched now, so that the pause pays for no page fault.
            region.zero_()
        made.certificate = certificate_plan(made.live)

    def _plan(self, made: NextWorld) -> None:
        assert made.manifest is not None and self.request.source is not None and made.target_rank is not None
        inputs = (made.manifest, self.request.source, self.request.target, made.target_rank)
        made.plan = plan_rank(*inputs)
        bytes_per_element = made.manifest.bytes_per_element
        made.measures["bytes_planned"] = float(made.plan.remote_elements * bytes_per_element)
        made.measures["bytes_lower_bound"] = float(missing_elements(*inputs) * bytes_per_element)

    def _reach_sources(self, made: NextWorld) -> None:
        assert made.plan is not None and made.live is not None
        if made.transport is None:
            made.transport = self._endpoint(f"t{made.target_rank}")
            made.transport.start_progress()
        made.transport.register(targets=made.live.regions)
        for part in made.plan.remote:
            address = made.exchange.wait(f"address/{part.source_rank}", self.deadline)
            made.transport.connect(part.source_rank, address.encode(), self.deadline)

    def _load(self, made: NextWorld) -> None:
        """Without a living source: the state of a checkpoint, or a fresh one from global coordinates."""
        assert made.world is not None and made.state is not None and made.live is not None
        with building(made.world):
            if self.request.checkpoint is not None:
                made.small = load_checkpoint(self.request.checkpoint, made.world, made.state, made.live)
            else:
                fill_initial(made.live, self.job.initial_parameter, self.job.seed)

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handoff's deadline has passed")
        return left


def certificate_plan(live: LiveState) -> CertificatePlan:
    """Where in this rank's regions which element of which parameter lies, worked out before the pause.

    What tensor parallelism replicates is counted on its first rank only, so that sums over any layout are equal.
    """
    specs = {spec.name: spec for spec in live.manifest.parameters}
    first = live.layout.coordinates(live.rank).tp == 0
    counted = [box for box in live.resident() if first or specs[box.parameter].tp_dim is not None]
    return CertificatePlan(counted, {name: spec.shape for name, spec in specs.items()})


def extra_bytes(live: LiveState) -> int:
    """Bytes that a next world takes on this rank: parameter and gradient buffers, masters, moments."""
    buffer = live.optimizer.buffers[0]
    whole = [tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None]
    spans = {tensor.untyped_storage()._cdata for tensor in whole}
    apart = [region for region in live.regions.values() if region.untyped_storage()._cdata not in spans]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*whole, *apart))
