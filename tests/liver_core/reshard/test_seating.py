"""Placement: members on the ranks of a target layout so that little moves; compared with all placements when small."""

from itertools import permutations

import pytest

from liver_core.layout import LayoutError, Member, ParallelLayout, Roster
from liver_core.reshard import NodeSlots, PlanError, place
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
