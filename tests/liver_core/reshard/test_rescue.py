"""What only leavers hold is taken once, in equal parts, and every target still finds all of it. On element ids."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from liver_core.layout import BucketRule, Manifest, ResidentBox, Roster
from liver_core.reshard import (
    PlanError,
    RescuePlan,
    boxes_given,
    boxes_kept,
    plan_after_rescue,
    plan_rescue,
)
from liver_core.reshard.bounds import missing_bytes
from tests.liver_core.layout.models import gpt, roster, worlds
from tests.liver_core.layout.oracle import element_ids
from tests.liver_core.reshard.checker import lower_bound_elements
from tests.liver_core.reshard.execute import UNWRITTEN, execute, regions_of
from tests.liver_core.reshard.test_planner_properties import BOUNDED, rosters


def only_leaving(held: list[np.ndarray], rescue: RescuePlan) -> set[int]:
    """Ids that no survivor has, by looking at every rank."""
    sides = [{int(each) for rank in side for each in held[rank]} for side in (rescue.leavers, rescue.survivors)]
    return sides[0] - sides[1] - {-1}


def rescued(held: list[np.ndarray], rescue: RescuePlan) -> dict[int, np.ndarray]:
    """The rescue region of every survivor; what was not written stays UNWRITTEN, writing twice fails."""
    regions = {rank: np.full(rescue.region_numel(rank), UNWRITTEN) for rank in rescue.survivors}
    for share in rescue.shares:
        into = regions[share.survivor][share.target_offset : share.target_offset + share.length]
        assert len(into) == share.length and (into == UNWRITTEN).all()
        into[:] = held[share.leaver][share.source_offset : share.source_offset + share.length]
    return regions


def assert_rescues(manifest: Manifest, source: Roster, target: Roster, rescue: RescuePlan) -> None:
    """Everything that only leavers hold is taken, once and in equal parts; then the leavers are gone, and every target
    rank gets its state from those who are left, and nothing over the wire that its process has."""
    held = regions_of(manifest, source)
    regions = rescued(held, rescue)
    taken = np.concatenate([*regions.values(), np.array([], dtype=int)])
    assert len(set(taken.tolist())) == len(taken)
    assert set(taken.tolist()) == only_leaving(held, rescue)
    sizes = [len(region) for region in regions.values()]
    assert max(sizes) - min(sizes) <= 1
    for rank in rescue.leavers:
        assert_placed(manifest, boxes_given(manifest, source, rescue.given_by(rank)), held[rank])
    for rank, region in regions.items():
        assert_placed(manifest, boxes_kept(manifest, source, rescue.kept_by(rank)), region)
    left = [held[rank] if rank in rescue.survivors else np.array([], dtype=int) for rank in range(len(held))]
    kept = [regions.get(rank, np.array([], dtype=int)) for rank in range(len(held))]
    wanted = regions_of(manifest, target)
    for rank, want in enumerate(wanted):
        live, lost = plan_after_rescue(manifest, source, target, rank, rescue)
        (from_live,) = execute([live], left, [want.size])
        (from_kept,) = execute([lost], kept, [want.size])
        assert ((from_live == UNWRITTEN) | (from_kept == UNWRITTEN)).all(), "written twice"
        assert np.array_equal(np.where(from_live == UNWRITTEN, from_kept, from_live), want), f"rank {rank}"
        own = source.rank_of(target.members[rank])
        mine = [] if own is None else boxes_kept(manifest, source, rescue.kept_by(own))
        least = missing_bytes(manifest, source, target, rank, kinds=("master",), kept=mine) // 4
        assert live.remote_elements + lost.remote_elements == least


def assert_placed(manifest: Manifest, boxes: Sequence[ResidentBox], region: np.ndarray) -> None:
    """The boxes are where they are said to be, and do not overlap."""
    ids, seen = element_ids(manifest), np.zeros(region.size, bool)
    for resident in boxes:
        where = tuple(slice(low, high) for low, high in zip(resident.box.start, resident.box.stop, strict=True))
        there = slice(resident.offset, resident.offset + resident.box.numel)
        assert np.array_equal(ids[resident.parameter][where].ravel(), region[there])
        assert not seen[there].any()
        seen[there] = True


@BOUNDED
@given(drawn=worlds(2), slots=st.sampled_from([1, 4, 40]), data=st.data())
def test_whatever_leaves_every_target_gets_its_state_from_those_who_stay(drawn, slots, data):
    manifest, before, after = drawn
    source = data.draw(rosters(before, generation=1, slots=slots))
    target = data.draw(rosters(after, generation=2, slots=slots))
    assume(set(source.members) & set(target.members))
    assert_rescues(manifest, source, target, plan_rescue(manifest, source, target))


CASES = "TP2xPP2>PP2 TP2xPP2>TP2 TP2xDP2>PP3 PP4>TP2 DP4>DP3 TP4>PP2 PP2xDP2>TP1 TP2xPP2>TP2xPP2"


@pytest.mark.parametrize("case", CASES.split())
@pytest.mark.parametrize("places", [[0, 1, 2, 3], [2, 3, 0, 1], [1, 9, 3, 0], [9, 8, 7, 3]])
@pytest.mark.parametrize("changes", [{}, {"tied": True, "rule": BucketRule(elements_max=3000)}])
def test_survivors_alone_or_with_newcomers_fill_the_next_world(case, places, changes):
    before, _, after = case.partition(">")
    manifest = gpt(layers=12, heads=8, groups=8, **changes)
    source = roster(before)
    size = roster(after).layout.world_size
    target = roster(after, generation=1, order=places[-size:])
    assert_rescues(manifest, source, target, plan_rescue(manifest, source, target))


def test_what_a_survivor_holds_as_well_is_left_where_it_is():
    manifest = gpt(layers=4, heads=8, groups=8)
    source, target = roster("TP2"), roster("TP1", generation=1, order=[1])
    rescue = plan_rescue(manifest, source, target)
    split = sum(spec.numel for spec in manifest.parameters if spec.tp_dim is not None)
    assert sum(share.length for share in rescue.shares) == split // 2
    assert lower_bound_elements(manifest, source, target) == split // 2
    assert (rescue.leavers, rescue.survivors) == ((0,), (1,))


def test_where_nobody_leaves_nothing_is_taken_and_where_nobody_stays_it_is_refused():
    manifest = gpt(layers=4, heads=8, groups=8)
    source = roster("TP2")
    assert plan_rescue(manifest, source, roster("PP2", generation=1)).shares == ()
    with pytest.raises(PlanError, match="nobody can hold what leavers hold"):
        plan_rescue(manifest, source, roster("PP2", generation=1, order=[7, 8]))


@pytest.mark.parametrize("wrong", ["a share is missing", "a share is short", "a share is kept twice"])
def test_a_wrong_plan_is_found(wrong: str):
    """The checks above see a bug that is planted in what they check."""
    manifest = gpt(layers=4, heads=8, groups=8)
    source, target = roster("TP2xPP2"), roster("PP2", generation=1, order=[0, 3])
    rescue = plan_rescue(manifest, source, target)
    first, *others = rescue.shares
    shares = {
        "a share is missing": others,
        "a share is short": [replace(first, length=first.length - 1), *others],
        "a share is kept twice": [first, *rescue.shares],
    }[wrong]
    with pytest.raises((AssertionError, PlanError)):
        assert_rescues(manifest, source, target, replace(rescue, shares=tuple(shares)))
    short = replace(rescue, shares=tuple(others))
    with pytest.raises(PlanError, match=f"source rank {first.leaver}: element .* was not rescued"):
        for rank in range(2):
            plan_after_rescue(manifest, source, target, rank, short)
