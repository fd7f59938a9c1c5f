"""Placement: members on the ranks of a target layout so that little moves; compared with all placements when small."""

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.layout import LayoutError, Member, ParallelLayout, Roster
from liver_core.reshard import NodeSlots, PlanError, place, seat
from tests.liver_core.layout.models import gpt, roster
from tests.liver_core.reshard.checker import lower_bound_elements

MANIFEST = gpt(layers=12, hidden=48, heads=12, groups=12, ffn=96, vocab=48)


def one_slot_nodes(*numbers: int) -> list[NodeSlots]:
    return [NodeSlots(f"n{number}", 1) for number in numbers]


def test_the_same_layout_on_the_same_nodes_moves_nothing():
    source = roster("TP2xPP2xDP2", slots=4, order=[5, 4, 2, 3, 7, 6, 0, 1])
    target = place(MANIFEST, source, [NodeSlots("n1", 4), NodeSlots("n0", 4)], source.layout)
    assert lower_bound_elements(MANIFEST, source, target) == 0
    assert target.members == source.members
    assert target.generation == source.generation + 1


def test_when_a_node_leaves_the_others_stay_where_their_state_is():
    # PP4 -> PP2 on two of four nodes: the node of stages 0 and 1 keeps the front, that of 2 and 3 the back.
    source = roster("PP4")
    target = place(MANIFEST, source, one_slot_nodes(3, 1), ParallelLayout(pp=2), generation=7)
    assert target.members == (Member("n1", 0), Member("n3", 0))
    assert target.generation == 7


CHANGES = [
    ("TP2xPP2", "PP3", [0, 1, 2]),
    ("TP2xPP2", "PP3", [1, 2, 3]),
    ("PP3", "TP2xPP2", [0, 1, 2, 9]),
    ("PP4", "TP2xDP2", [3, 2, 1, 0]),
    ("TP2xDP2", "DP4", [0, 1, 2, 3]),
    ("TP2xPP2", "TP2", [1, 3]),
    ("DP2", "DP3", [0, 1, 4]),
    ("TP2xDP2", "TP4", [0, 1, 2, 3]),
    ("PP2xDP2", "DP3", [0, 1, 3]),
]


@pytest.mark.parametrize(("before", "after", "numbers"), CHANGES)
def test_greedy_placement_is_near_the_best_of_all_placements(before, after, numbers):
    source, layout = roster(before), ParallelLayout.parse(after)
    placed = place(MANIFEST, source, one_slot_nodes(*numbers), layout)
    costs = []
    for order in permutations([Member(f"n{number}", 0) for number in numbers], layout.world_size):
        costs.append(lower_bound_elements(MANIFEST, source, Roster("job", 1, layout, order)))
    cost = lower_bound_elements(MANIFEST, source, placed)
    assert cost <= 1.15 * min(costs), (cost, min(costs), max(costs))


def test_a_tensor_parallel_group_stays_on_one_node():
    source = roster("TP2xPP2xDP2", slots=4)
    nodes = [NodeSlots("n0", 4), NodeSlots("n5", 4), NodeSlots("n1", 4)]
    target = place(MANIFEST, source, nodes, ParallelLayout(tp=4, pp=3))
    for group in target.layout.groups("tp"):
        assert len({target.members[rank].node_id for rank in group}) == 1


def test_a_tensor_parallel_group_that_no_node_can_hold_is_spread():
    target = place(MANIFEST, roster("TP4"), one_slot_nodes(0, 1, 2, 3), ParallelLayout(tp=4))
    assert target.members == roster("TP4").members


def test_nodes_of_different_sizes_are_filled_within_their_slots():
    nodes = [NodeSlots("n0", 1), NodeSlots("n1", 4), NodeSlots("n2", 2)]
    target = place(MANIFEST, roster("TP2xPP3", slots=2), nodes, ParallelLayout(pp=6))
    for node in nodes:
        slots = [member.slot for member in target.members if member.node_id == node.node_id]
        assert all(slot < node.slots for slot in slots)
    assert len(set(target.members)) == 6


def test_newcomers_take_what_is_left_in_the_order_given():
    target = place(MANIFEST, roster("TP1"), one_slot_nodes(7, 8, 0), ParallelLayout(dp=3))
    assert {member.node_id for member in target.members} == {"n7", "n8", "n0"}
    assert target == place(MANIFEST, roster("TP1"), one_slot_nodes(7, 8, 0), ParallelLayout(dp=3))


def test_too_few_slots_a_node_twice_and_a_layout_that_does_not_fit_are_refused():
    source = roster("TP2")
    with pytest.raises(PlanError, match="TP2xPP2xDP1 needs 4 slots, 3 nodes have 3"):
        place(MANIFEST, source, one_slot_nodes(0, 1, 2), ParallelLayout(tp=2, pp=2))
    with pytest.raises(PlanError, match="given twice"):
        place(MANIFEST, source, one_slot_nodes(0, 0), ParallelLayout(tp=2))
    with pytest.raises(LayoutError, match="num_layers: 12"):
        place(MANIFEST, source, one_slot_nodes(0, 1, 2, 3, 4), ParallelLayout(pp=5))


def seats(*names: str) -> tuple[Member, ...]:
    """`a0` is slot 0 of node a."""
    return tuple(Member(name[:-1], int(name[-1])) for name in names)


@pytest.mark.parametrize(
    ("layout", "kept", "free", "seated"),
    [
        ("DP3", ["c0", "a0", "b0"], ["d0"], ["c0", "a0", "b0"]),
        ("DP3", ["c0", "a0"], ["b0", "d0"], ["c0", "a0", "b0"]),
        ("DP2", ["c0", "a0", "b0"], [], ["c0", "a0"]),
        ("DP2", [], ["b0", "a0", "c0"], ["b0", "a0"]),
        # A group that is whole comes before one whose ranks stay; of whole ones, that of which more stay.
        ("TP2", ["a0", "b0"], ["b1", "c0", "c1"], ["b0", "b1"]),
        ("TP2", ["a0"], ["c0", "c1", "b0", "b1"], ["c0", "c1"]),
        ("TP2xDP2", ["a0", "b0", "c0", "c1"], ["a1", "b1"], ["a0", "a1", "c0", "c1"]),
        ("TP2", ["a0", "b0", "b1"], ["a1"], ["b0", "b1"]),
        # A node with room for two groups holds two, one with a slot too few holds one.
        ("TP2xDP2", ["a0"], ["a1", "a2", "a3", "b0", "b1"], ["a0", "a1", "a2", "a3"]),
        ("TP2xDP2", ["a0"], ["a1", "a2", "b0", "b1"], ["a0", "a1", "b0", "b1"]),
        # What no node can hold whole is spread, and stands where its first member did.
        ("TP2xDP2", ["b0", "a0", "a1"], ["c0"], ["b0", "c0", "a0", "a1"]),
        ("TP2xDP3", ["a0"], ["b0", "c0", "d0", "d1", "e0"], ["a0", "b0", "c0", "e0", "d0", "d1"]),
    ],
)  # fmt: skip
def test_members_that_stay_keep_their_order_unless_a_tensor_parallel_group_needs_one_node(layout, kept, free, seated):
    assert seat(ParallelLayout.parse(layout), seats(*kept), seats(*free)) == seats(*seated)


def test_too_few_members_are_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"^TP2xPP1xDP2 needs 4 members, 3 can be had$"):
        seat(ParallelLayout(tp=2, dp=2), seats("a0", "a1"), seats("b0"))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_tensor_parallel_groups_lie_on_one_node_each_wherever_the_nodes_can_hold_them(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    tp = data.draw(st.integers(1, max(sizes)))
    groups = data.draw(st.integers(1, sum(sizes) // tp))
    members = [Member(f"n{index}", slot) for index, slots in enumerate(sizes) for slot in range(slots)]
    members = data.draw(st.permutations(members))
    cut = data.draw(st.integers(0, len(members)))
    layout, kept = ParallelLayout(tp=tp, dp=groups), members[:cut]
    placed = seat(layout, kept, members[cut:])

    assert len(set(placed)) == layout.world_size and set(placed) <= set(members)
    split = [group for group in layout.groups("tp") if len({placed[rank].node_id for rank in group}) > 1]
    assert len(split) == max(0, groups - sum(size // tp for size in sizes))
    if not split:
        assert len(set(placed) & set(kept)) == most_that_stay(sizes, tp, groups, kept)


def most_that_stay(sizes: list[int], tp: int, groups: int, kept: list[Member]) -> int:
    """Over every number of whole groups on each node: how many members of `kept` can stay at most."""
    stay = [sum(member.node_id == f"n{index}" for member in kept) for index in range(len(sizes))]
    counts = product(*(range(size // tp + 1) for size in sizes))
    return max(
        sum(min(there, tp * count) for there, count in zip(stay, chosen, strict=True))
        for chosen in counts
        if sum(chosen) == groups
    )
