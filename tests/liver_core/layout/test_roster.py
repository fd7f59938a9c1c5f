"""Rosters: members on the ranks of a layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.layout import LayoutError, Member, MessageError, ParallelLayout, Roster, from_json, to_json
from tests.liver_core.layout.models import roster


def test_a_roster_comes_back_from_json_with_the_same_digest():
    before = roster("TP2xPP2", generation=3, slots=2)
    after = from_json(Roster, to_json(before))
    assert after == before
    assert after.digest() == before.digest()


def test_the_digest_tells_apart_generation_layout_and_order_of_members():
    rosters = [
        roster("TP2xPP2"),
        roster("TP2xPP2", generation=1),
        roster("TP2xDP2"),
        roster("TP2xPP2", order=[1, 0, 2, 3]),
    ]
    assert len({each.digest() for each in rosters}) == len(rosters)


def test_a_roster_knows_ranks_and_nodes():
    found = roster("TP2xPP2", slots=2, order=[2, 3, 0, 1])
    assert found.rank_of(Member("n0", 1)) == 3
    assert found.rank_of(Member("n9", 0)) is None
    assert found.node_ids() == ("n1", "n0")


@pytest.mark.parametrize(
    ("members", "field", "rule"),
    [
        ((Member("a", 0),), "members", "needs 2 members, 1 given"),
        ((Member("a", 0), Member("a", 0)), "members", "a/0 holds more than one rank"),
    ],
)
def test_members_must_be_as_many_as_ranks_and_all_different(members, field, rule):
    with pytest.raises(LayoutError) as error:
        Roster("job", 0, ParallelLayout(tp=2), members)
    assert (error.value.field, error.value.rule) == (field, f"TP2xPP1xDP1 {rule}" if "needs" in rule else rule)


def test_the_member_that_is_named_is_the_one_that_is_given_twice():
    with pytest.raises(LayoutError, match=r"^members: b/0 holds more than one rank$"):
        Roster("job", 0, ParallelLayout(dp=3), (Member("a", 0), Member("b", 0), Member("b", 0)))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Member("", 0), "node_id: must not be empty"),
        (lambda: Member("a", -1), "slot: must not be negative, is -1"),
        (lambda: Roster("", 0, ParallelLayout(), (Member("a", 0),)), "job_id: must not be empty"),
        (lambda: Roster("j", -1, ParallelLayout(), (Member("a", 0),)), "generation: must not be negative, is -1"),
    ],
)
def test_a_roster_without_names_or_with_negative_numbers_is_refused(make, complaint):
    with pytest.raises(LayoutError) as error:
        make()
    assert str(error.value) == complaint


def test_a_broken_member_is_found_by_its_path():
    data = to_json(roster("TP2"))
    data["members"][0]["slots"] = ["1"]
    with pytest.raises(MessageError, match=r"^members\[0\]\.slots\[0\]: must be a valid integer, is '1'$"):
        from_json(Roster, data)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=24, unique=True))
def test_seats_are_the_members_in_rank_order_however_they_lie(drawn: list[tuple[str, int]]):
    members = tuple(Member(node, slot) for node, slot in drawn)
    seats = Roster("job", 1, ParallelLayout(dp=len(members)), members).members
    assert seats == members and tuple(seats) == members and hash(seats) == hash(members) and len(seats) == len(members)
    assert [seats[rank] for rank in range(-len(members), len(members))] == [*members, *members]
    assert seats[1:3] == members[1:3] and seats != members[::-1] + members
    found = Roster("job", 1, ParallelLayout(dp=len(members)), members)
    assert [found.rank_of(member) for member in members] == list(range(len(members)))
    assert found.rank_of(Member("d", 0)) is None and Member("d", 0) not in seats
    assert found.node_ids() == tuple(dict.fromkeys(node for node, _ in drawn))
    assert from_json(Roster, to_json(found)) == found


def test_members_of_one_node_that_follow_each_other_are_one_entry_on_the_wire():
    data = to_json(roster("TP2xPP2", slots=2))
    assert data["members"] == [{"node_id": "n0", "slots": [0, 1]}, {"node_id": "n1", "slots": [0, 1]}]
    with pytest.raises(IndexError):
        roster("TP2").members[2]
