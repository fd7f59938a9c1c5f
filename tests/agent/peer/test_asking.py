"""Whether an agent that is about to lead hears enough of the others, and what it learns of them."""

import asyncio
import math
from typing import Any, cast

import pytest

from agent.peer.asking import (
    ASKED_MAX,
    STEP_FIELD,
    STEP_WITHIN_S,
    PeersHeard,
    ask_others,
    ask_step_s,
)
from agent.peer.peer_client import PeerClient, PeerUnreachable
from agent.protocol.step_leases import HIGHEST_FIELD, answered_ago
from liver_core.layout.limits import GENERATION_MAX
from tests.agent import virtual_time

SILENT_S = 2.0


class Peers:
    """Each agent's answer, None from one that is not reached; it takes as long as `PeerClient` tries."""

    def __init__(self, **answers: dict[str, Any] | None) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def status(self, job_id: str, node_id: str) -> dict[str, Any]:
        assert job_id == "job"
        self.asked.append(node_id)
        answer = self.answers[node_id]
        if answer is None:
            await asyncio.sleep(SILENT_S)
            raise PeerUnreachable("away")
        return answer


def ask(**answers: dict[str, Any] | None) -> tuple[PeersHeard, float, Peers]:
    """What node a hears, after how long."""

    async def scenario() -> tuple[PeersHeard, float, Peers]:
        peers, loop = Peers(**answers), asyncio.get_running_loop()
        began = loop.time()
        heard = await ask_others(cast(PeerClient, peers), "job", "a", ("a", *answers))
        return heard, loop.time() - began, peers

    return virtual_time.run(scenario())


def knows(highest: Any) -> dict[str, Any]:
    return {HIGHEST_FIELD: highest}


def test_whoever_hears_more_than_half_of_the_nodes_is_not_cut_off_and_waits_for_no_more() -> None:
    assert ask(b=knows(4), c=None)[:2] == (PeersHeard(highest=4), 0.0)
    assert ask(b=knows(4), c=knows(5), d=None, e=None)[:2] == (PeersHeard(highest=5), 0.0)


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({"b": None, "c": None}, "no answer from b, c"),
        ({"b": knows(4), "c": None, "d": None}, "no answer from c, d"),
        (dict.fromkeys("bcdefg"), "no answer from b, c, d, e, f, g"),
    ],
)
def test_whoever_hears_no_more_than_half_may_be_cut_off(answers: dict[str, Any], text: str) -> None:
    heard, took_s, _ = ask(**answers)
    assert (heard.too_few, took_s) == (f"a may be cut off: {text}", SILENT_S)


def test_of_two_nodes_nobody_can_tell_and_nobody_is_asked() -> None:
    for answers in ({"b": None}, {}):
        heard, took_s, peers = ask(**answers)
        assert (heard, took_s, peers.asked) == (PeersHeard(), 0.0, [])


def test_of_many_a_few_are_asked() -> None:
    everybody = {f"n{index}": knows(index) for index in range(100)}
    heard, _, peers = ask(**everybody)
    assert len(set(peers.asked)) == len(peers.asked) == ASKED_MAX
    assert not heard.too_few and f"n{heard.highest}" in peers.asked


@pytest.mark.parametrize("told", [None, "7", True, -1, GENERATION_MAX + 1, 1.5])
def test_a_number_that_is_none_is_not_believed(told: Any) -> None:
    assert ask(b=knows(told), c=knows(told))[0] == PeersHeard()
    assert ask(b={}, c={})[0] == PeersHeard()


@pytest.mark.parametrize(
    ("heard_s", "highest", "ago"),
    [
        (7.5, 3, 7.5),
        (7.5, 0, 7.5),
        (None, 3, math.inf),
        (7.5, 100_001, -math.inf),
        (None, 100_002, -math.inf),
        (7.5, 100_000, -math.inf),
    ],
    ids=["this start", "no number", "never heard", "a newer start", "a handoff from it", "no part in a newer start"],
)
def test_an_agent_that_knows_of_a_newer_start_has_heard_the_service_since(
    heard_s: float | None, highest: int, ago: float
) -> None:
    """Whether it still has a rank of it or not."""
    status = {"service_heard_s": heard_s, "active_generation": None, **knows(highest)}
    assert answered_ago(status, wanted=3) == ago


@pytest.mark.parametrize(
    ("answers", "told_s", "after_s"),
    [
        ({"b": {STEP_FIELD: 0.8}}, 0.8, 0.0),
        ({"b": None, "c": {STEP_FIELD: 2}}, 2, 0.0),
        ({"b": {STEP_FIELD: 0.0}, "c": {}}, 0.0, 0.0),
        ({"b": {STEP_FIELD: True}, "c": {STEP_FIELD: math.nan}, "d": {STEP_FIELD: "1"}}, 0.0, 0.0),
        ({"b": None}, 0.0, STEP_WITHIN_S),
        ({}, 0.0, 0.0),
    ],
    ids=["one", "one of two", "none knows", "no number", "silent", "nobody"],
)
def test_the_first_that_tells_it_says_how_long_a_step_takes(
    answers: dict[str, dict[str, Any] | None], told_s: float, after_s: float
) -> None:
    async def scenario() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await ask_step_s(cast(PeerClient, Peers(**answers)), "job", tuple(answers))
        return found, loop.time() - began

    assert virtual_time.run(scenario()) == (told_s, pytest.approx(after_s))
