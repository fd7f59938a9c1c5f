"""Random models, layouts and placements: plans, executed on element ids, give every target exactly its state."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liver_core.layout import Member, ParallelLayout, Roster
from tests.liver_core.layout.models import worlds
from tests.liver_core.reshard.execute import move, regions_of

BOUNDED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@st.composite
def rosters(draw, layout: ParallelLayout, *, generation: int, slots: int) -> Roster:
    """Random slots of up to 24 processes: survivors, newcomers and leavers in any order."""
    places = draw(st.permutations(range(36)))[: layout.world_size]
    return Roster("job", generation, layout, tuple(Member(f"n{at // slots}", at % slots) for at in places))


@BOUNDED
@given(drawn=worlds(2), slots=st.sampled_from([1, 4, 40]), data=st.data())
def test_every_target_gets_exactly_its_state_and_going_back_is_the_identity(drawn, slots, data):
    manifest, before, after = drawn
    first = data.draw(rosters(before, generation=1, slots=slots))
    second = data.draw(rosters(after, generation=2, slots=slots))
    start = regions_of(manifest, first)
    there = move(manifest, first, second, start)
    back = move(manifest, second, first, there)
    assert all(np.array_equal(before, after) for before, after in zip(start, back, strict=True))
