"""Single runs on the live rung: what a stream that fails leads to. Pure."""

from dataclasses import replace

import pytest

from liver_core.handoff import Phase, Rung, Stage
from liver_core.layout import Member
from tests.simulation.plans import Fault, Link, Plan
from tests.simulation.simulation import Simulation

N0, N1, N2 = (Member(f"n{index}", 0) for index in range(3))
LIVE = Link(one_sided=True)
ENDS_WITHIN_S = 40.0


def begun(*faults: str, link: Link = LIVE) -> Simulation:
    """n0 and n1 train; they shall go to n0 and n2."""
    plan = Plan((N0, N1, N2), (N0, N1), 0.5, (0.0, 0.0, 0.05), link=link, chaos_s=1e9, scripted=True)
    simulation = Simulation(0, plan=plan)
    simulation.notes = []
    for kind in faults:
        simulation.strike(Fault(kind, "", 0.0, N2, 1.0))
    open_next(simulation)
    return simulation


def open_next(simulation: Simulation) -> None:
    """Open the handoff on the rung that the ladder takes."""
    source = simulation.worlds[max(simulation.worlds)].roster
    simulation.agents[N0].leading.open_anyway(simulation.proposal(source, (N0, N2)))


def run_to_end(simulation: Simulation) -> Simulation:
    """Until the open handoff has ended."""
    count, limit_s = len(simulation.truth.ended) + 1, simulation.clock.now + ENDS_WITHIN_S
    while len(simulation.truth.ended) < count:
        assert simulation.clock.now < limit_s, simulation.notes
        simulation.clock.run_next()
    return simulation


def ended(*faults: str, link: Link = LIVE) -> Simulation:
    """The same, at the end of the handoff."""
    return run_to_end(begun(*faults, link=link))


def said(simulation: Simulation) -> str:
    assert simulation.notes is not None
    return "\n".join(note for _, note in simulation.notes)


def rung_of(simulation: Simulation, handoff_id: str) -> Rung:
    return next(
        order.rung
        for (attempt, phase), order in simulation.orders.items()
        if (attempt[0], phase) == (handoff_id, Phase.PREPARE)
    )


def test_a_handoff_streams_before_it_is_ready_and_goes():
    simulation = ended()
    assert simulation.truth.boundaries() == ["live"]
    assert simulation.truth.ended[0].stage is Stage.ACTIVE
    text = said(simulation)
    assert text.index("n2 streaming") < text.index("verdict of h1 revision 1: live") < text.index("n2 prepared")


@pytest.mark.parametrize("fault", ["stream fails", "stream stalls"])
def test_a_stream_that_does_not_converge_takes_the_next_rung_in_the_same_handoff_and_says_why(fault: str):
    simulation = ended(fault)
    assert simulation.truth.boundaries() == ["stop_and_copy after live"]
    assert simulation.truth.ended[0].stage is Stage.ACTIVE
    assert "n0 prepared: rank 1, stream" in said(simulation), "the ranks that could stream say it as well"


def test_a_stream_that_breaks_aborts_with_the_tile_and_the_next_handoff_takes_the_next_rung():
    simulation = ended("stream aborts")
    (first,) = simulation.truth.ended
    assert first.stage is Stage.ABORTED
    assert str(first.reason) == "rank 1, stream, tile decoder.layers.0/master: a tile could not be read"
    open_next(simulation)
    run_to_end(simulation)
    assert [rung_of(simulation, handoff_id) for handoff_id in ("h1", "h2")] == [Rung.LIVE, Rung.STOP_AND_COPY]
    assert simulation.truth.ended[1].stage is Stage.ACTIVE


@pytest.mark.parametrize(
    "link",
    [
        replace(LIVE, one_sided=False),
        replace(LIVE, replay_refusal="fused AdamW"),
        replace(LIVE, follow_share=1.0),
        replace(LIVE, copy_s=3.0),
    ],
)
def test_where_streaming_cannot_be_the_state_is_copied_in_the_pause(link: Link):
    simulation = ended(link=link)
    assert simulation.truth.boundaries() == ["stop_and_copy"]
    assert "streaming" not in said(simulation)


def test_a_store_that_dies_while_the_state_streams_ends_the_handoff_at_once():
    simulation = begun()
    while "n2 streaming" not in said(simulation):
        assert simulation.clock.now < ENDS_WITHIN_S, simulation.notes
        simulation.clock.run_next()
    simulation.strike(Fault("store dies", "", 0.0, N2, 1.0))
    (first,) = run_to_end(simulation).truth.ended
    assert first.stage is Stage.ABORTED
    assert first.reason.text == "the store of generation 2 on node n0 died"
