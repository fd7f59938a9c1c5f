"""The rank-local planner: which source rank gives what to one target rank. Pure.

It looks only at the target rank's own boxes and at the few source ranks that can hold them, so its cost does not
grow with the size of the world. Every rank plans alone; equal inputs (`plan_digest`) give plans that fit together.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from liver_core.layout import Box, LayoutError, Manifest, ResidentBox, Roster, check_fits, copies_of, resident_boxes
from liver_core.reshard.copy_runs import join_runs, runs_between
from liver_core.reshard.plan import CopyRuns, PlanLimits, RankPlan, Transfer
from liver_core.reshard.plan_error import PlanError
from liver_core.reshard.replicas import ReplicaChoice
from liver_core.reshard.sources import Holding, holdings

# Runs are joined only once all are known; this bounds what is held until then.
_UNJOINED_FACTOR = 4


def plan_rank(
    manifest: Manifest,
    source: Roster,
    target: Roster,
    target_rank: int,
    limits: PlanLimits | None = None,
    *,
    gone: frozenset[int] = frozenset(),
) -> RankPlan:
    """The plan of one target rank. Equal members of the two rosters are the same process.

    Sources: the own process where it holds the element, else a process of the own node, else the replica that has the
    least to give. Source ranks that are `gone` give only what no other holds, and of several the first does. Raises
    PlanError beyond `limits`, and where the rosters are of different jobs or do not fit.
    """
    limits = limits or PlanLimits()
    _check_inputs(manifest, source, target, target_rank)
    pieces = [_without(piece, gone) for piece in _pieces(manifest, source, target, target_rank)]
    choice = ReplicaChoice(source=source, target=target, target_rank=target_rank)
    runs: defaultdict[int, list[CopyRuns]] = defaultdict(list)
    unjoined = 0
    # What has one holder is settled first, so that replicas are chosen knowing what each source gives anyway; then
    # the large ones, as the small ones even out what is left (longest processing time first).
    for piece in sorted(pieces, key=lambda piece: (len(piece.holding.holders) > 1, -piece.common.numel)):
        holders, parameter = piece.holding.holders, piece.wanted.parameter
        # All target ranks that want this very box: replicas of the parameter, who share its holders out.
        rivals = copies_of(manifest, target.layout, target_rank, parameter) if len(holders) > 1 else (target_rank,)
        rank, offset = choice.choose(holders, rivals, piece.common.numel)
        found = runs_between(piece.holding.box, offset, piece.wanted.box, piece.wanted.offset, piece.common)
        runs[rank] += found
        unjoined += len(found)
        if unjoined > _UNJOINED_FACTOR * limits.runs_max:
            raise PlanError(f"target rank {target_rank}: more than {unjoined} runs, limit {limits.runs_max}")
    transfers = [_transfer(rank, found) for rank, found in sorted(runs.items())]
    own = choice.own_rank
    plan = RankPlan(
        target_rank=target_rank,
        local=next((transfer for transfer in transfers if transfer.source_rank == own), None),
        remote=tuple(transfer for transfer in transfers if transfer.source_rank != own),
        reason=choice.reason(),
    )
    _check_limits(manifest, plan, limits)
    return plan


@dataclass(frozen=True, slots=True)
class _Piece:
    """The common part of a box that the target wants and one that the source holds."""

    wanted: ResidentBox
    holding: Holding
    common: Box


def _pieces(manifest: Manifest, source: Roster, target: Roster, target_rank: int) -> list[_Piece]:
    found: list[_Piece] = []
    for wanted in resident_boxes(manifest, target.layout, target_rank):
        covered = 0
        for holding in holdings(manifest, source.layout, wanted.parameter, wanted.box):
            common = holding.box.intersect(wanted.box)
            if common:
                found.append(_Piece(wanted, holding, common))
                covered += common.numel
        if covered != wanted.box.numel:
            raise PlanError(
                f"target rank {target_rank}: {wanted.parameter} {wanted.box} has {wanted.box.numel} elements, "
                f"the source world holds {covered} of them"
            )
    return found


def _without(piece: _Piece, gone: frozenset[int]) -> _Piece:
    holders = piece.holding.holders
    if gone.isdisjoint(rank for rank, _ in holders):
        return piece
    staying = tuple(holder for holder in holders if holder[0] not in gone) or holders[:1]
    return replace(piece, holding=replace(piece.holding, holders=staying))


def _transfer(rank: int, runs: Iterable[CopyRuns]) -> Transfer:
    joined = join_runs(runs)
    return Transfer(source_rank=rank, runs=joined, elements=sum(run.elements for run in joined))


def _check_inputs(manifest: Manifest, source: Roster, target: Roster, target_rank: int) -> None:
    if source.job_id != target.job_id:
        raise PlanError(f"source is of job {source.job_id}, target of job {target.job_id}")
    if not 0 <= target_rank < target.layout.world_size:
        raise PlanError(f"target rank {target_rank} is not in 0..{target.layout.world_size - 1} of {target.layout}")
    for name, roster in (("source", source), ("target", target)):
        try:
            check_fits(manifest, roster.layout)
        except LayoutError as error:
            raise PlanError(f"{name} layout {roster.layout} does not fit the model: {error}") from error


def _check_limits(manifest: Manifest, plan: RankPlan, limits: PlanLimits) -> None:
    runs = sum(len(transfer.runs) for transfer in plan.transfers)
    nbytes = plan.elements * max(manifest.element_bytes(spec) for spec in manifest.forms)
    for what, value, most in (
        ("runs", runs, limits.runs_max),
        ("bytes", nbytes, limits.bytes_max),
        ("transfers", len(plan.transfers), limits.transfers_max),
    ):
        if value > most:
            raise PlanError(f"target rank {plan.target_rank}: the plan has {value} {what}, limit {most}")
