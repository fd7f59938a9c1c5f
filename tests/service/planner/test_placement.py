"""Where ranks go: TP groups stay on one node wherever any choice of nodes allows it, and state stays where it is."""

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.layout import Member, ParallelLayout
from liver_core.reshard.seating import near_units
from service.planner import placement as module
from service.planner.inputs import PlanInputs, PlanNode, World
from service.planner.placement import NodeChoice, place, preferred
from tests.service.planner.test_decision import job

fleets = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(
    lambda sizes: tuple(PlanNode(f"n{index}", slots) for index, slots in enumerate(sizes))
)
dense = st.builds(ParallelLayout, tp=st.integers(1, 4), pp=st.integers(1, 3), dp=st.integers(1, 4))
layouts = dense | st.sampled_from(
    [ParallelLayout.parse(text) for text in ("DP4xEP2", "DP4xEP4", "TP2xDP2xEP2", "TP2xDP2xEP4xETP1", "PP2xDP2xEP2")]
)
bounds = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted)


def can_lie_whole(layout: ParallelLayout, room: NodeChoice, size: int) -> bool:
    """By trying every set of nodes, for groups of so many ranks."""
    groups = layout.world_size // size
    sizes = [node.slots // size for node in room.nodes]
    return any(
        min(chosen) >= 1 and sum(chosen) >= groups >= count
        for count in range(room.least, min(room.most, len(sizes)) + 1)
        for chosen in combinations(sizes, count)
    )


def can_lie(layout: ParallelLayout, room: NodeChoice) -> bool:
    """By trying every set of nodes, whether TP groups are spread or not."""
    sizes = [node.slots for node in room.nodes]
    return any(
        sum(chosen) >= layout.world_size >= count
        for count in range(room.least, min(room.most, len(sizes)) + 1)
        for chosen in combinations(sizes, count)
    )


def is_whole(layout: ParallelLayout, members: tuple[Member, ...], size: int | None = None) -> bool:
    size = size or layout.tp
    groups = (members[at : at + size] for at in range(0, len(members), size))
    return all(len({member.node_id for member in group}) == 1 for group in groups)


def seats(*names: str) -> tuple[Member, ...]:
    """`a0` is slot 0 of node a."""
    return tuple(Member(name[:-1], int(name[-1])) for name in names)


@settings(deadline=None, max_examples=300)
@given(fleet=fleets, layout=layouts, least_most=bounds, before=st.one_of(st.none(), layouts), data=st.data())
def test_a_placement_is_found_wherever_there_is_one_and_keeps_every_group_whole_where_any_does(
    fleet, layout, least_most, before, data
):
    room = NodeChoice(fleet, *least_most)
    everything = NodeChoice(fleet, 1, len(fleet))
    world = place(before, everything) or () if before else ()
    world = tuple(data.draw(st.permutations(world)))
    members = place(layout, room, world)
    assert (members is not None) == can_lie(layout, room)
    assert room.near(layout) == next(filter(partial(can_lie_whole, layout, room), near_units(layout)), 1)
    if members is None:
        return
    slots = {node.node_id: node.slots for node in fleet}
    assert len(members) == layout.world_size == len(set(members))
    assert all(member.slot < slots[member.node_id] for member in members)
    assert room.least <= len({member.node_id for member in members}) <= room.most
    assert all(is_whole(layout, members, size) or not can_lie_whole(layout, room, size) for size in near_units(layout))


@settings(deadline=None, max_examples=200)
@given(fleet=fleets, more=fleets, layout=layouts, before=layouts)
def test_a_world_keeps_its_places_whatever_nodes_come(fleet, more, layout, before):
    """The same layout stays rank by rank; in another one, whoever stays, stays in order."""
    room = NodeChoice(fleet, 1, len(fleet))
    members = place(before, room)
    if members is None or not is_whole(before, members, near_units(before)[0]):
        return
    fleet = (*fleet, *(PlanNode(f"m{node.node_id}", node.slots) for node in more))
    nodes = preferred(PlanInputs(job(), fleet, World(1, before, members)))
    assert place(before, NodeChoice(nodes, 1, len(nodes)), members) == members
    after = place(layout, NodeChoice(nodes, 1, len(nodes)), members)
    assert after is not None or layout.world_size > sum(node.slots for node in fleet)
    if near_units(layout) == near_units(before) and after is not None:
        kept = [member for member in members if member in after]
        assert kept == [member for member in after if member in members]
        assert len(kept) == min(len(members), layout.world_size)


def test_newcomers_come_from_the_zones_of_the_world_and_zones_are_not_mixed():
    fleet = (PlanNode("a", 1, zone="x"), PlanNode("b", 4, zone="y"), PlanNode("c", 1, zone="x"))
    inputs = PlanInputs(job(), fleet, World(1, ParallelLayout(), seats("a0")))
    assert [node.node_id for node in preferred(inputs)] == ["a", "c", "b"]
    start = (*fleet, PlanNode("d", 1, zone="y"), PlanNode("e", 1))
    assert [node.node_id for node in preferred(PlanInputs(job(), start))] == ["b", "d", "a", "c", "e"]


def test_a_group_of_tensor_parallel_ranks_goes_to_the_node_that_has_room_for_all_of_it():
    room = NodeChoice((PlanNode("m", 2), PlanNode("x", 1), PlanNode("y", 2)), 1, 3)
    assert place(ParallelLayout(tp=2, pp=2), room, seats("m0", "m1", "x0")) == seats("m0", "m1", "y0", "y1")


def test_survivors_give_up_their_seats_where_only_that_keeps_a_tensor_parallel_group_on_one_node():
    room = NodeChoice(tuple(PlanNode(name, 2) for name in "abc"), 1, 3)
    assert place(ParallelLayout(tp=2), room, seats("a0", "b0", "c0")) == seats("a0", "a1")


def test_a_tensor_parallel_group_that_no_node_can_hold_is_spread_and_the_others_are_not():
    room = NodeChoice((PlanNode("a", 1), PlanNode("b", 3), PlanNode("c", 1), PlanNode("d", 1)), 1, 4)
    assert place(ParallelLayout(tp=2, pp=3), room) == seats("a0", "b2", "b0", "b1", "c0", "d0")


def test_an_expert_group_goes_to_the_node_that_has_room_for_all_of_it():
    layout = ParallelLayout.parse("TP2xDP2xEP4xETP1")
    room = NodeChoice((PlanNode("m", 2), PlanNode("x", 2), PlanNode("y", 4)), 1, 3)
    assert place(layout, room, seats("m0", "m1", "x0", "x1")) == seats("y0", "y1", "y2", "y3")
    smaller = NodeChoice((PlanNode("m", 3), PlanNode("x", 2)), 1, 2)
    assert place(layout, smaller) == seats("m0", "m1", "x0", "x1"), "TP groups are whole where no node holds all four"


def test_a_thousand_nodes_are_placed_at_once():
    room = NodeChoice(tuple(PlanNode(f"n{index:04}", 8 if index % 3 else 6) for index in range(1_000)), 1, 1_000)
    members = place(ParallelLayout(tp=8, dp=600), room)
    assert members is not None and is_whole(ParallelLayout(tp=8, dp=600), members)


def test_nodes_are_preferred_by_what_they_hold_where_they_are_and_how_large_and_safe_they_are():
    fleet = (
        PlanNode("z", 1, zone="far"), PlanNode("y", 9, zone="far"), PlanNode("m2", 1, zone="near"),
        PlanNode("m1", 1, zone="near"), PlanNode("b", 2, zone="near"), PlanNode("a", 2, zone="near", is_at_risk=True),
        PlanNode("c", 3, zone="near"), PlanNode("d", 2),
    )  # fmt: skip
    world = World(1, ParallelLayout(dp=2), seats("m10", "m20"))
    # Members in rank order, then the larger of their zone and of none; at risk after others of its size; others last.
    assert [node.node_id for node in preferred(PlanInputs(job(), fleet, world))] == [
        "m1", "m2", "c", "b", "d", "a", "y", "z",
    ]  # fmt: skip
    # Without a world: by size, by risk, by the slots of all of the zone (10, 9 and 2), by name.
    assert [node.node_id for node in preferred(PlanInputs(job(), fleet))] == [
        "y", "c", "b", "d", "a", "z", "m1", "m2",
    ]  # fmt: skip
    # Whatever outlived its announced end comes last; what has ranks keeps them.
    late = tuple(replace(node, is_overdue=node.node_id in ("m1", "y", "c")) for node in fleet)
    assert [node.node_id for node in preferred(PlanInputs(job(), late, world))] == [
        "m1", "m2", "b", "d", "a", "z", "c", "y",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("slots", "least", "most", "layout", "expected"),
    [
        # The first nodes are filled first; as many are used as must be, and no more than may be.
        ((2, 2, 2), 1, 3, "DP3", ("a0", "a1", "b0")),
        ((2, 2, 2), 3, 3, "DP3", ("a0", "b0", "c0")),
        ((2, 2, 2), 2, 3, "DP2", ("a0", "b0")),
        ((2, 4), 1, 1, "DP3", ("b0", "b1", "b2")),
        # With the first one, only the last can hold the rest on two nodes.
        ((1, 2, 3), 1, 2, "DP4", ("a0", "c0", "c1", "c2")),
        ((1, 2, 3), 1, 2, "DP5", ("b0", "b1", "c0", "c1", "c2")),
        ((0, 1, 1), 1, 3, "DP2", ("b0", "c0")),
        # Groups of two: one on the first, or on each of two.
        ((4, 4), 1, 2, "TP2xDP3", ("a0", "a1", "a2", "a3", "b0", "b1")),
        ((4, 4), 2, 2, "TP2xDP2", ("a0", "a1", "b0", "b1")),
        ((3, 1, 2), 1, 3, "TP2xDP2", ("a0", "a1", "c0", "c1")),
        ((1, 1, 1), 2, 3, "TP2", ("a0", "b0")),
        ((2, 2), 3, 3, "DP3", None),
        ((2, 2), 1, 2, "DP5", None),
    ],
)
def test_where_ranks_go_by_hand(slots, least, most, layout, expected):
    room = NodeChoice(tuple(PlanNode(name, count) for name, count in zip("abc", slots, strict=False)), least, most)
    assert place(ParallelLayout.parse(layout), room) == (None if expected is None else seats(*expected))


def test_nodes_that_hold_state_keep_what_they_have_before_others_get_more():
    room = NodeChoice((PlanNode("a", 4), PlanNode("b", 4)), 1, 2)
    three_groups = place(ParallelLayout(tp=2, dp=3), room, seats("b0", "b1", "b2", "b3"))
    assert three_groups is not None and set(three_groups) == set(seats("a0", "a1", "b0", "b1", "b2", "b3"))
    # Two slots of b are of no world: one group is there as before.
    half = place(ParallelLayout(tp=2, dp=3), room, seats("b0", "b1"))
    assert half is not None and set(half) == set(seats("a0", "a1", "a2", "a3", "b0", "b1"))
    six = place(ParallelLayout(dp=5), room, seats("b0", "b1", "b2"))
    assert six is not None and set(six) == set(seats("a0", "a1", "b0", "b1", "b2"))


def test_as_many_groups_as_can_be_lie_whole_where_not_all_can():
    """One of two groups on the only node that holds it, though it is the last; without that the first four would do."""
    room = NodeChoice((*(PlanNode(name, 1) for name in "abcd"), PlanNode("e", 2)), 1, 5)
    members = place(ParallelLayout(tp=2, pp=2), room)
    assert members is not None and set(members) == set(seats("a0", "b0", "e0", "e1"))
    assert {member.node_id for member in members[:2]} in ({"e"}, {"a", "b"})
    assert place(ParallelLayout(pp=4), room) == seats("a0", "b0", "c0", "d0")


def test_no_more_numbers_of_whole_groups_are_tried_than_is_worth_it(monkeypatch):
    """Three groups of three on two nodes: three whole ones would need all nodes, two leave room for a third."""
    room, tried, find = NodeChoice(tuple(PlanNode(name, 5) for name in "abc"), 1, 2), [], module._with_singles

    def counted(room: NodeChoice, size: int, whole: int, *rest):
        tried.append(whole)
        return find(room, size, whole, *rest)

    monkeypatch.setattr(module, "_with_singles", counted)
    layout = ParallelLayout(tp=3, pp=3)
    assert place(layout, room) is not None and tried == [3, 2]
    tried.clear()
    monkeypatch.setattr(module, "FEWER_WHOLE_GROUPS_MAX", 1)
    assert place(layout, room) is not None and tried == [3, 0]
