"""What the service does not decide before it has heard its nodes again."""

from tests.service.reconcilers.conftest import Fleet


def after_an_outage(fleet: Fleet) -> None:
    """A job on a, b and c; d is free and could take part. Then nobody could report for half a minute."""
    fleet.add("a", "b", "c")
    fleet.submit()
    for _ in range(3):
        fleet.round()
    assert fleet.job()["layout"] == "TP1xPP3xDP1"
    fleet.add("d")
    fleet.agents["d"].sync()
    fleet.clock.advance(33)
    d = fleet.agents.pop("d")
    for _ in range(4):
        fleet.round(seconds=0.5)
    assert fleet.handoffs() == [], "what d has to tell may be that it goes"
    fleet.agents["d"] = d


def test_a_job_does_not_grow_onto_a_node_whose_notice_could_not_be_reported_yet(fleet: Fleet):
    after_an_outage(fleet)
    fleet.round(parts={"d": {"notices": (fleet.agents["d"].notice(),)}})
    for _ in range(5):
        fleet.round()
    assert fleet.handoffs() == []


def test_a_job_grows_once_all_nodes_have_been_heard_again(fleet: Fleet):
    after_an_outage(fleet)
    for _ in range(5):
        fleet.round()
    assert [item["target_nodes"] for item in fleet.handoffs()] == [["a", "b", "c", "d"]]
