"""However state streams, what a job holds after every step is bit for bit what stop-and-copy at the same steps gives.

Each seed is a job with its own optimizer, precision, accumulation and gradient buckets that goes through several random
worlds, each with its own tile size, ring depth and throttle, on devices with much room or little. Stop-and-copy is
judged against undisturbed runs and by Megatron's loader in `test_exactness`.
"""

from __future__ import annotations

import math

import pytest

from liver_core.handoff.messages import Rung
from tests.liver_core.rank.support.stream_random import (
    HANDOFFS,
    first_difference,
    random_story,
    setup_of,
    told_by_stop_and_copy,
    told_live,
)

LATE = "not certified in time"
OVERTAKEN = "was overtaken"

pytestmark = [pytest.mark.real, pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.mark.parametrize("seed", range(26))
def test_a_random_story_told_live_leaves_the_bits_of_stop_and_copy(corpus: str, seed: int):
    story = random_story(seed)
    setup = setup_of(story, corpus)
    live = told_live(story, setup)
    assert len(live.handed_at) == HANDOFFS, story
    for generation, (rung, reason) in live.verdicts.items():
        fell = LATE in reason or OVERTAKEN in reason
        assert rung == Rung.LIVE or fell, f"generation {generation}: {rung}, {reason}\n{story}"
    streamed = sum(rung == Rung.LIVE for rung, _ in live.verdicts.values())
    assert streamed >= HANDOFFS - 1, f"{live.verdicts}\n{story}"
    for said in (said for by_node in live.measures.values() for said in by_node.values()):
        assert said["extra_bytes_peak"] <= said.get("extra_bytes_budget", math.inf), story
    copied = told_by_stop_and_copy(story, setup, live.handed_at)
    assert copied.handed_at == live.handed_at
    assert not first_difference(live.traces, copied.traces), (
        f"{first_difference(live.traces, copied.traces)}; handed over at {live.handed_at}\n{story}"
    )
    common = live.samples.keys() & copied.samples.keys()
    assert {step: live.samples[step] for step in common} == {step: copied.samples[step] for step in common}, story
