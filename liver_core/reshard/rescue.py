"""What only leavers hold, divided among the survivors, and where targets find it when the leavers are gone. Pure.

Rank-local as all plans: every rank computes the same shares from manifest and rosters. Each leaver's elements keep
their order, so that its shares laid end to end are its region without what a survivor holds as well.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from liver_core.layout import Box, Manifest, ResidentBox, Roster, flat_range_to_boxes, resident_boxes
from liver_core.reshard.copy_runs import join_runs
from liver_core.reshard.plan import CopyRuns, RankPlan, Transfer
from liver_core.reshard.plan_error import PlanError
from liver_core.reshard.planner import plan_rank
from liver_core.reshard.sources import holdings


@dataclass(frozen=True, slots=True)
class Share:
    """`length` elements of every state kind: from `source_offset` on in the region of rank `leaver`, kept by rank
    `survivor` of the source world from `target_offset` on in its rescue region."""

    leaver: int
    survivor: int
    source_offset: int
    target_offset: int
    length: int

    @property
    def runs(self) -> CopyRuns:
        """The copy that rescues it."""
        return CopyRuns(self.source_offset, self.target_offset, self.length)


@dataclass(frozen=True, slots=True)
class RescuePlan:
    """All shares, ascending by leaver and source offset. `leavers` and `survivors` are ranks of the source world."""

    leavers: tuple[int, ...]
    survivors: tuple[int, ...]
    shares: tuple[Share, ...]

    def kept_by(self, survivor: int) -> tuple[Share, ...]:
        """What a survivor takes, ascending by its own offsets."""
        return tuple(share for share in self.shares if share.survivor == survivor)

    def given_by(self, leaver: int) -> tuple[Share, ...]:
        """What is taken from a leaver."""
        return tuple(share for share in self.shares if share.leaver == leaver)

    def region_numel(self, survivor: int) -> int:
        """Elements of a survivor's rescue region."""
        return sum(share.length for share in self.kept_by(survivor))


def plan_rescue(manifest: Manifest, source: Roster, target: Roster) -> RescuePlan:
    """Who takes what of the source ranks that have no part in the target world. What a survivor holds is not taken.

    Survivors get equal numbers of elements, to within one. Raises PlanError where nobody survives.
    """
    leavers, survivors = _sides(source, target)
    if not survivors:
        raise PlanError(f"no rank of {source.layout} has a part in {target.layout}: nobody can hold what leavers hold")
    ranges = [(leaver, *found) for leaver in leavers for found in _only_here(manifest, source, leaver, set(survivors))]
    total = sum(length for _, _, length in ranges)
    ends = [(index + 1) * total // len(survivors) for index in range(len(survivors))]
    return RescuePlan(leavers, survivors, tuple(_shares(ranges, survivors, ends)))


def boxes_given(manifest: Manifest, source: Roster, shares: Iterable[Share]) -> list[ResidentBox]:
    """What shares are in global coordinates, at their places in the regions of their leavers."""
    return [
        ResidentBox(part.parameter, part.box, share.source_offset + part.offset)
        for share in shares
        for part in _boxes(manifest, source, share)
    ]


def boxes_kept(manifest: Manifest, source: Roster, shares: Iterable[Share]) -> list[ResidentBox]:
    """The same at their places in the rescue regions of their survivors."""
    return [
        ResidentBox(part.parameter, part.box, share.target_offset + part.offset)
        for share in shares
        for part in _boxes(manifest, source, share)
    ]


def plan_after_rescue(
    manifest: Manifest, source: Roster, target: Roster, target_rank: int, rescue: RescuePlan
) -> tuple[RankPlan, RankPlan]:
    """How one target rank fills its region when the leavers are gone: from the survivors' live regions, and from
    their rescue regions. Together they write every element once."""
    whole = plan_rank(manifest, source, target, target_rank, gone=frozenset(rescue.leavers))
    live, lost = [], []
    for transfer in whole.transfers:
        (lost if transfer.source_rank in rescue.leavers else live).append(transfer)
    own = source.rank_of(target.members[target_rank])
    by_survivor: defaultdict[int, list[CopyRuns]] = defaultdict(list)
    for transfer in lost:
        shares = rescue.given_by(transfer.source_rank)
        for survivor, moved in _redirected(transfer, shares):
            by_survivor[survivor].append(moved)
    kept = [
        Transfer(survivor, joined, sum(run.elements for run in joined))
        for survivor, joined in ((rank, join_runs(runs)) for rank, runs in sorted(by_survivor.items()))
    ]
    return _plan_of(target_rank, live, own, whole.reason), _plan_of(target_rank, kept, own, "what was rescued")


def _sides(source: Roster, target: Roster) -> tuple[tuple[int, ...], tuple[int, ...]]:
    staying = set(target.members)
    ranks = range(source.layout.world_size)
    leavers = tuple(rank for rank in ranks if source.members[rank] not in staying)
    return leavers, tuple(rank for rank in ranks if source.members[rank] in staying)


def _only_here(manifest: Manifest, source: Roster, leaver: int, survivors: set[int]) -> Iterator[tuple[int, int]]:
    """(offset, length) of what a leaver's region has and no survivor's, as long as can be; replicas that only leavers
    hold belong to the first of them."""
    start = stop = 0
    for resident in resident_boxes(manifest, source.layout, leaver):
        if not _is_only_here(manifest, source, leaver, resident, survivors):
            continue
        if resident.offset != stop and stop > start:
            yield start, stop - start
        if resident.offset != stop:
            start = resident.offset
        stop = resident.offset + resident.box.numel
    if stop > start:
        yield start, stop - start


def _is_only_here(manifest: Manifest, source: Roster, leaver: int, resident: ResidentBox, survivors: set[int]) -> bool:
    for holding in holdings(manifest, source.layout, resident.parameter, resident.box):
        common = holding.box.intersect(resident.box)
        if common is None:
            continue
        ranks = [rank for rank, _ in holding.holders]
        if common != resident.box or leaver not in ranks:
            raise PlanError(f"source rank {leaver}: {resident.parameter} {resident.box} is held as {holding}")
        return ranks[0] == leaver and survivors.isdisjoint(ranks)
    raise PlanError(f"source rank {leaver}: {resident.parameter} {resident.box} is held by nobody")


def _shares(ranges: list[tuple[int, int, int]], survivors: tuple[int, ...], ends: list[int]) -> Iterator[Share]:
    """Ranges cut where the part of one survivor ends, counted over all of them."""
    position = index = 0
    kept = 0
    for leaver, offset, length in ranges:
        while length:
            while ends[index] == position:
                index, kept = index + 1, 0
            taken = min(length, ends[index] - position)
            yield Share(leaver, survivors[index], offset, kept, taken)
            position, kept, offset, length = position + taken, kept + taken, offset + taken, length - taken


def _boxes(manifest: Manifest, source: Roster, share: Share) -> Iterator[ResidentBox]:
    """A share in global coordinates; offsets are from its start."""
    start, stop = share.source_offset, share.source_offset + share.length
    for resident in resident_boxes(manifest, source.layout, share.leaver):
        low, high = max(start, resident.offset), min(stop, resident.offset + resident.box.numel)
        if low >= high:
            continue
        offset = low - start
        for part in flat_range_to_boxes(resident.box.shape, low - resident.offset, high - resident.offset):
            yield ResidentBox(resident.parameter, _moved(part, resident.box.start), offset)
            offset += part.numel


def _moved(box: Box, by: tuple[int, ...]) -> Box:
    start = tuple(low + shift for low, shift in zip(box.start, by, strict=True))
    return Box(start, tuple(high + shift for high, shift in zip(box.stop, by, strict=True)))


def _redirected(transfer: Transfer, shares: tuple[Share, ...]) -> Iterator[tuple[int, CopyRuns]]:
    """(survivor, the same copy from its rescue region) of what was to come from a leaver's region."""
    starts = [share.source_offset for share in shares]
    rest = list(transfer.runs)
    while rest:
        each = rest.pop()
        share = shares[bisect_right(starts, each.source_offset) - 1] if starts else None
        if share is None or not share.source_offset <= each.source_offset < share.source_offset + share.length:
            text = f"element {each.source_offset} leaves with it and was not rescued"
            raise PlanError(f"source rank {transfer.source_rank}: {text}")
        inside, beyond = _cut(each, share.source_offset + share.length)
        rest += beyond
        shift = share.target_offset - share.source_offset
        for part in inside:
            yield share.survivor, replace(part, source_offset=part.source_offset + shift)


def _cut(run: CopyRuns, border: int) -> tuple[list[CopyRuns], list[CopyRuns]]:
    """What of a run lies before a place behind its begin in the source region, and what lies from there on."""
    if border >= run.source_stop:
        return [run], []
    whole = (border - run.source_offset) // run.source_stride if run.count > 1 else 0
    split_at = border - run.source_offset - whole * run.source_stride
    if split_at >= run.length:
        whole, split_at = whole + 1, 0
    before, beyond = [_some(run, 0, whole)], [_some(run, whole + (split_at > 0), run.count)]
    if split_at:
        one = _some(run, whole, whole + 1)
        assert one is not None
        before.append(CopyRuns(one.source_offset, one.target_offset, split_at))
        at = (one.source_offset + split_at, one.target_offset + split_at)
        beyond.append(CopyRuns(*at, one.length - split_at))
    return [part for part in before if part], [part for part in beyond if part]


def _some(run: CopyRuns, first: int, stop: int) -> CopyRuns | None:
    """Runs `first` to `stop` - 1 of it."""
    if first >= stop:
        return None
    source, target = run.source_offset + first * run.source_stride, run.target_offset + first * run.target_stride
    if stop - first == 1:
        return CopyRuns(source, target, run.length)
    return CopyRuns(source, target, run.length, stop - first, run.source_stride, run.target_stride)


def _plan_of(target_rank: int, transfers: list[Transfer], own: int | None, reason: str) -> RankPlan:
    return RankPlan(
        target_rank=target_rank,
        local=next((transfer for transfer in transfers if transfer.source_rank == own), None),
        remote=tuple(transfer for transfer in transfers if transfer.source_rank != own),
        reason=reason,
    )
