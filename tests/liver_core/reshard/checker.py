"""An independent check of plans: never imports the planner, knows only the layout functions. Pure.

It walks every copied run through the boxes that it reads and writes and compares global coordinates, so it believes
neither the planner's choice of sources nor its offsets, strides or sums.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from liver_core.layout import Manifest, ResidentBox, Roster, region_numel, resident_boxes
from liver_core.reshard.bounds import missing_bytes
from liver_core.reshard.plan import RankPlan, Transfer
from liver_core.reshard.plan_error import PlanError


def lower_bound_elements(manifest: Manifest, source: Roster, target: Roster) -> int:
    """The sum of `missing_bytes` over all target ranks: each element once for every target that must get it."""
    return sum(
        missing_bytes(manifest, source, target, rank, kinds=("master",)) // 4
        for rank in range(target.layout.world_size)
    )


def check_plans(manifest: Manifest, source: Roster, target: Roster, plans: Iterable[RankPlan]) -> None:
    """Raise PlanError unless there is exactly one right plan for every target rank (see `check_rank_plan`)."""
    seen: set[int] = set()
    for plan in plans:
        if plan.target_rank in seen:
            raise PlanError(f"target rank {plan.target_rank}: more than one plan")
        seen.add(plan.target_rank)
        check_rank_plan(manifest, source, target, plan)
    absent = sorted(set(range(target.layout.world_size)) - seen)
    if absent:
        raise PlanError(f"target ranks {absent[:16]} of {target.layout} have no plan")


def check_rank_plan(manifest: Manifest, source: Roster, target: Roster, plan: RankPlan) -> None:
    """Raise PlanError, naming parameter, box and ranks, unless the plan is right.

    Right: every element of the target's parameters is written once and no padding is; each from a place where the
    source region holds exactly that element; nothing that the own process holds comes from another one.
    """
    if not 0 <= plan.target_rank < target.layout.world_size:
        raise PlanError(f"target rank {plan.target_rank}: not a rank of {target.layout}")
    _check_ends(source, target, plan)
    wanted = _Region(manifest, target, plan.target_rank, f"target rank {plan.target_rank}")
    written: list[tuple[int, int, int]] = []
    for transfer in plan.transfers:
        name = f"source rank {transfer.source_rank}, read by target rank {plan.target_rank}"
        held = _Region(manifest, source, transfer.source_rank, name)
        written += _check_transfer(held, wanted, transfer)
    _check_written_once(wanted, sorted(written))
    least = missing_bytes(manifest, source, target, plan.target_rank, kinds=("master",)) // 4
    if plan.remote_elements != least:
        raise PlanError(
            f"target rank {plan.target_rank}: reads {plan.remote_elements} elements of other processes, "
            f"{least} are not in its own"
        )


def _check_ends(source: Roster, target: Roster, plan: RankPlan) -> None:
    member = target.members[plan.target_rank]
    own = source.rank_of(member)
    ranks = [transfer.source_rank for transfer in plan.transfers]
    if len(set(ranks)) != len(ranks):
        raise PlanError(f"target rank {plan.target_rank}: reads one source rank in two transfers: {sorted(ranks)}")
    for rank in ranks:
        if not 0 <= rank < source.layout.world_size:
            raise PlanError(f"target rank {plan.target_rank}: source rank {rank} is not a rank of {source.layout}")
    if plan.local and plan.local.source_rank != own:
        raise PlanError(
            f"target rank {plan.target_rank} ({member}): local copy from source rank {plan.local.source_rank}, "
            f"which lives in {source.members[plan.local.source_rank]}"
        )
    if any(transfer.source_rank == own for transfer in plan.remote):
        raise PlanError(f"target rank {plan.target_rank}: reads source rank {own} of its own process as remote")


class _Region:
    """The boxes of one rank's region, found by offset."""

    def __init__(self, manifest: Manifest, roster: Roster, rank: int, name: str) -> None:
        self.name = name
        self.numel = region_numel(manifest, roster.layout, rank)
        self.boxes = resident_boxes(manifest, roster.layout, rank)
        self._offsets = [resident.offset for resident in self.boxes]

    def box_at(self, offset: int, purpose: str = "") -> ResidentBox:
        """The box that contains an element of the region; raises PlanError, with `purpose`, in padding and outside."""
        index = bisect_right(self._offsets, offset) - 1
        if index >= 0 and offset < self.boxes[index].offset + self.boxes[index].box.numel:
            return self.boxes[index]
        what = "padding" if 0 <= offset < self.numel else "outside the region"
        raise PlanError(f"{self.name}{purpose}: element {offset} of {self.numel} is {what}")


@dataclass(frozen=True, slots=True)
class _Cursor:
    """A position inside a resident box."""

    resident: ResidentBox
    index: tuple[int, ...]
    left: int


def _cursor(region: _Region, offset: int, purpose: str = "") -> _Cursor:
    resident = region.box_at(offset, purpose)
    flat = offset - resident.offset
    left = resident.box.numel - flat
    index = []
    for low, size in zip(reversed(resident.box.start), reversed(resident.box.shape), strict=True):
        flat, position = divmod(flat, size)
        index.append(low + position)
    return _Cursor(resident, tuple(reversed(index)), left)


def _check_transfer(held: _Region, wanted: _Region, transfer: Transfer) -> Iterator[tuple[int, int, int]]:
    """Check every run; gives (target start, target stop, source rank) of each."""
    for runs in transfer.runs:
        for source_offset, target_offset, length in runs.each():
            _check_run(held, wanted, source_offset, target_offset, length)
            yield target_offset, target_offset + length, transfer.source_rank


def _check_run(held: _Region, wanted: _Region, source_offset: int, target_offset: int, length: int) -> None:
    done = 0
    while done < length:
        target = _cursor(wanted, target_offset + done)
        purpose = f" for {target.resident.parameter} {target.resident.box}"
        source = _cursor(held, source_offset + done, purpose)
        if (source.resident.parameter, source.index) != (target.resident.parameter, target.index):
            raise PlanError(
                f"{wanted.name}: {target.resident.parameter} {target.resident.box} wants element {target.index} at "
                f"{target_offset + done}, but {held.name}, holds {source.resident.parameter} {source.index} "
                f"at {source_offset + done}"
            )
        done += min(_in_step(source, target), length - done)


def _in_step(source: _Cursor, target: _Cursor) -> int:
    """How many elements the two boxes certainly run on through the same indices, from one equal index.

    Until the first of them reaches the end of a row, where rows are the dims from the first one, seen from inside,
    in which the boxes do not have equal bounds.
    """
    row, left = 1, 1
    ends = zip(
        source.index,
        source.resident.box.start,
        source.resident.box.stop,
        target.resident.box.start,
        target.resident.box.stop,
        strict=True,
    )
    for index, s_start, s_stop, t_start, t_stop in reversed(list(ends)):
        left += (min(s_stop, t_stop) - 1 - index) * row
        if (s_start, s_stop) != (t_start, t_stop):
            break
        row *= s_stop - s_start
    return min(left, source.left, target.left)


def _check_written_once(wanted: _Region, written: list[tuple[int, int, int]]) -> None:
    """`written` ascending; every run is already known to lie in boxes."""
    position, previous = 0, -1
    for start, stop, rank in written:
        if start < position:
            resident = wanted.box_at(start)
            raise PlanError(
                f"{wanted.name}: {resident.parameter} {resident.box} is written twice at {start}, "
                f"by source ranks {previous} and {rank}"
            )
        position, previous = stop, rank
    total = sum(stop - start for start, stop, _ in written)
    if total == sum(resident.box.numel for resident in wanted.boxes):
        return
    for resident in wanted.boxes:
        low, high = resident.offset, resident.offset + resident.box.numel
        covered = sum(max(0, min(stop, high) - max(start, low)) for start, stop, _ in written)
        if covered < resident.box.numel:
            raise PlanError(
                f"{wanted.name}: {resident.parameter} {resident.box} at {low}: "
                f"{resident.box.numel - covered} of {resident.box.numel} elements are never written"
            )
