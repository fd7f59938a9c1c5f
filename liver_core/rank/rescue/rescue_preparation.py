"""What a rank of a rescue prepares while the old world trains, and how the next one is built when leavers are gone.

Before the boundary there are only endpoints, and on survivors the host memory for what only leavers hold. The next
world is built by the steps that any other handoff builds it with, but in the main thread, while training stands still.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from liver_core.certificate import CertificatePlan
from liver_core.handoff.messages import PreparePhase
from liver_core.layout import Manifest, ResidentBox, Roster, copies_of, copy_counts
from liver_core.memory.memory_placement import MemoryPlacement, areas
from liver_core.rank.next_world import NextWorld
from liver_core.rank.prepare.preparation import Preparation, Steps
from liver_core.rank.rescue.saved_state import KEPT, Rescue
from liver_core.rank.store_exchange import Exchange, ExchangeTimeout
from liver_core.reshard import (
    Share,
    boxes_given,
    boxes_kept,
    missing_bytes,
    plan_after_rescue,
    plan_rescue,
)
from liver_core.state.live_state import LiveState, state_kinds
from liver_core.worlds.groups import plainly

FAILED = "rescue/failed"


class RescuePreparation(Preparation):
    """`run` prepares what is needed to release the leavers; `complete` then builds the next world."""

    def complete(self, until: float) -> None:
        """Build, until `until` (time.monotonic seconds), beside the world that stands still. Raises RuntimeError naming
        the phase; an abort comes too late, but what another rank says of a failure ends it."""
        made = self.made
        assert made is not None
        self.deadline, self._abort_requested = until, lambda: failure_of_others(made.exchange) != ""
        try:
            self._do(made, self._building_steps(made))
        except Exception as error:
            others = failure_of_others(made.exchange)
            phase = self._phase.replace("_", " ")
            raise RuntimeError(others or f"{phase}: {type(error).__name__}: {plainly(error)}") from error

    def _steps(self, made: NextWorld) -> Steps:
        gives, keeps = made.source_rank is not None, made.target_rank is not None
        return (
            (PreparePhase.OFFER_STATE, self._offer, gives),
            (PreparePhase.GET_THE_MANIFEST, self._get_manifest, not gives),
            (PreparePhase.AGREE_ON_THE_MANIFEST, self._agree_manifest, True),
            (PreparePhase.WARM_UP, self._warm_up, self.active is None),
            (PreparePhase.PLAN_THE_RESCUE, self._plan_rescue, True),
            (PreparePhase.OPEN_ENDPOINT, self._open_to_survivors, gives and not keeps),
            (PreparePhase.CONNECT_TO_LEAVERS, self._reach_leavers, gives and keeps),
        )

    def _building_steps(self, made: NextWorld) -> Steps:
        return (
            (PreparePhase.BRING_UP_GROUPS, self._bring_up, True),
            (PreparePhase.BUILD_MODEL, self._build_state, True),
            (PreparePhase.LAY_OUT_STATE, self._lay_out, True),
            (PreparePhase.OPEN_ENDPOINT, self._open_endpoint, made.source_rank is not None),
            (PreparePhase.PLAN, self._plan, True),
            (PreparePhase.CONNECT_TO_SOURCES, self._reach_sources, True),
        )

    # Before the boundary.

    def _plan_rescue(self, made: NextWorld) -> None:
        """Who takes what; on a survivor the memory for it, which together with that of the next world must fit."""
        manifest, source = made.manifest, self.request.source
        assert manifest is not None and source is not None
        plan = plan_rescue(manifest, source, self.request.target)
        made.rescue = Rescue(plan)
        rank, kinds = made.source_rank, state_kinds(manifest)
        if made.target_rank is not None:
            self._place(made, 0 if rank is None else 4 * len(kinds) * plan.region_numel(rank))
        if rank is None:
            return
        if made.target_rank is None:
            made.rescue.certificates = _certificates(manifest, source, plan.given_by(rank), given=True)
            return
        shares = plan.kept_by(rank)
        made.rescue.certificates = _certificates(manifest, source, shares, given=False)
        if shares:
            numel = plan.region_numel(rank)
            # Written to once here, so that the pause does not pay for page faults.
            made.rescue.regions = {kind: torch.empty(numel, dtype=torch.float32).fill_(0.0) for kind in kinds}
        made.measures["bytes_rescue_planned"] = float(made.rescue.bytes)
        made.account.take(**{"host_bytes" if made.account.host_bytes_max else "device_bytes": made.rescue.bytes})

    def _place(self, made: NextWorld, kept_bytes: int) -> None:
        """The next world goes on the device. What is kept lies in host memory: it counts against that budget where
        there is one, else with the next world's. Raises MemoryError with numbers."""
        account, rank, layout = made.account, made.target_rank, self.request.target.layout
        assert made.manifest is not None and rank is not None
        account.report_budgets()
        made.placement = MemoryPlacement(areas(made.manifest, layout, layout.coordinates(rank).pp), ())
        built = made.placement.device_bytes
        if account.host_bytes_max and kept_bytes > account.host_bytes_max:
            raise MemoryError(
                f"host_bytes_max: a rescue needs {kept_bytes} bytes of host memory on rank {rank} to keep what only "
                f"leavers hold, budget is {account.host_bytes_max}"
            )
        beside = 0 if account.host_bytes_max else kept_bytes
        if account.device_bytes_max is not None and beside + built > account.device_bytes_max:
            raise MemoryError(
                f"extra_bytes_max: a rescue needs {beside + built} bytes on rank {rank} ({beside} to keep what "
                f"only leavers hold, {built} for the next world), budget is {account.device_bytes_max}"
            )

    def _open_to_survivors(self, made: NextWorld) -> None:
        """As a leaver: have survivors read this rank's live regions."""
        assert self.active is not None and made.rescue is not None and made.manifest is not None
        endpoint = made.rescue.transport = self._endpoint(f"leaver{made.source_rank}")
        endpoint.register(sources={kind: self.active.live.regions[kind] for kind in state_kinds(made.manifest)})
        endpoint.start_progress()
        made.exchange.post(f"leaver/{made.source_rank}", endpoint.address().decode())

    def _reach_leavers(self, made: NextWorld) -> None:
        assert made.rescue is not None and made.source_rank is not None
        if not made.rescue.regions:
            return
        endpoint = made.rescue.transport = self._endpoint(f"keeper{made.source_rank}")
        endpoint.start_progress()
        endpoint.register(targets=made.rescue.regions)
        for leaver in sorted(made.rescue.certificates):
            self._connect_to(made.exchange, endpoint, leaver, f"leaver/{leaver}")

    # After the release.

    def _bring_up(self, made: NextWorld) -> None:
        super()._bring_up(made)
        # Training stands still, so there is no quieter moment.
        if made.world is not None:
            self._check_peers(made.world)
        made.connect()

    def _lay_out(self, made: NextWorld) -> None:
        assert made.rescue is not None
        super()._lay_out(made)
        if made.source_rank is not None and self.active is not None:
            made.rescue.whole = _whole(made, self.active.live)

    def _open_endpoint(self, made: NextWorld) -> None:
        """As a survivor: what it holds, and what it keeps for those who left."""
        assert self.active is not None and made.rescue is not None and made.manifest is not None
        made.transport = self._endpoint(f"s{made.source_rank}")
        sources = {kind: self.active.live.regions[kind] for kind in state_kinds(made.manifest)}
        sources |= {KEPT + kind: region for kind, region in made.rescue.regions.items()}
        made.transport.register(sources=sources)
        made.transport.start_progress()
        made.exchange.post(f"address/{made.source_rank}", made.transport.address().decode())

    def _plan(self, made: NextWorld) -> None:
        manifest, source, rescue = made.manifest, self.request.source, made.rescue
        assert manifest is not None and source is not None and rescue is not None and made.target_rank is not None
        inputs = (manifest, source, self.request.target, made.target_rank)
        made.plan, rescue.refill = plan_after_rescue(*inputs, rescue.plan)
        mine = () if made.source_rank is None else rescue.plan.kept_by(made.source_rank)
        kinds = state_kinds(manifest)
        elements = made.plan.remote_elements + rescue.refill.remote_elements
        made.measures["bytes_planned"] = 4.0 * len(kinds) * elements  # Masters and moments are fp32.
        least = missing_bytes(*inputs, kinds=kinds, kept=boxes_kept(manifest, source, mine))
        made.measures["bytes_lower_bound"] = float(least)

    def _reach_sources(self, made: NextWorld) -> None:
        assert made.plan is not None and made.live is not None and made.rescue is not None
        assert made.rescue.refill is not None and made.manifest is not None
        if made.transport is None:
            made.transport = self._endpoint(f"t{made.target_rank}")
            made.transport.start_progress()
        targets = {kind: made.live.regions[kind] for kind in state_kinds(made.manifest)}
        made.transport.register(targets=targets | {KEPT + kind: region for kind, region in targets.items()})
        peers = {part.source_rank for plan in (made.plan, made.rescue.refill) for part in plan.remote}
        for peer in sorted(peers):
            self._connect_to(made.exchange, made.transport, peer, f"address/{peer}")


def failure_of_others(exchange: Exchange) -> str:
    """What a rank that could not build the next world has said of it, empty where none has or none can be asked."""
    try:
        return str(exchange.peek(FAILED) or "")
    except ExchangeTimeout:
        return ""


def _certificates(
    manifest: Manifest, source: Roster, shares: Iterable[Share], *, given: bool
) -> dict[int, CertificatePlan]:
    """By the rank at the other side. Shares may begin inside a pair, so that elements are hashed one by one."""
    sides: dict[int, list[Share]] = {}
    for share in shares:
        sides.setdefault(share.survivor if given else share.leaver, []).append(share)
    boxes_of = boxes_given if given else boxes_kept
    shapes = _shapes(manifest)
    return {rank: CertificatePlan(boxes_of(manifest, source, part), shapes) for rank, part in sides.items()}


def _whole(made: NextWorld, live: LiveState) -> tuple[CertificatePlan, CertificatePlan]:
    """This survivor's part in what all survivors hold: of its live regions, and of its rescue regions.

    Of copies the first that survives counts, as often as the target world has it.
    """
    manifest, source, rescue, rank = made.manifest, made.request.source, made.rescue, made.source_rank
    assert manifest is not None and source is not None and rescue is not None and rank is not None
    survivors = rescue.plan.survivors

    def is_first(box: ResidentBox) -> bool:
        copies = copies_of(manifest, live.layout, rank, box.parameter)
        return next(each for each in copies if each in survivors) == rank

    counted = [box for box in live.resident() if is_first(box)]
    kept: list[ResidentBox] = boxes_kept(manifest, source, rescue.plan.kept_by(rank))
    times, shapes = copy_counts(manifest, made.request.target.layout), _shapes(manifest)
    return CertificatePlan(counted, shapes, times), CertificatePlan(kept, shapes, times)


def _shapes(manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in manifest.parameters}


def every_element(live: LiveState) -> CertificatePlan:
    """What a target holds, every copy counted, element by element as in `_certificates`."""
    return CertificatePlan(live.resident(), _shapes(live.manifest))
