"""By whom a notice about a node would be heard, as the command line shows it."""

from service.cli.nodes import _heard_by


def channel(name: str, alive: bool) -> dict:
    return {"channel": name, "alive": alive}


def test_a_node_that_no_living_channel_tells_of_is_shown_as_deaf_and_one_that_is_gone_is_not():
    node = {"state": "ready", "deaf": True, "channels": [channel("aws-imds", False), channel("aws-queue", False)]}
    assert _heard_by(node) == "nobody: deaf"
    assert _heard_by(node | {"state": "gone"}) == "-"


def test_of_the_channels_of_a_node_those_that_live_are_named():
    channels = [channel("aws-imds", False), channel("aws-queue", True), channel("shutdown", True)]
    assert _heard_by({"state": "ready", "deaf": False, "channels": channels}) == "aws-queue, shutdown"
