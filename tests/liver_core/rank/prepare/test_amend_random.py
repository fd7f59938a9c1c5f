"""Whatever the revisions and whenever they come, the job ends in the newest and holds the bits of stop-and-copy.

Each seed is a job with its own optimizer, precision and buckets. Every handoff is amended one to three times, after
some steps or at once, to another random world or to a nearer deadline; some ranks hear of a revision later than others.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from liver_core.layout import ParallelLayout
from tests.liver_core.rank.support.amended import AmendedJob
from tests.liver_core.rank.support.stream_random import LAYOUTS, LIVE_PACE_S, WEIGHTS, random_story, setup_of

pytestmark = [pytest.mark.real, pytest.mark.thorough, pytest.mark.timeout(300)]

HANDOFFS = 3
DEADLINES_S = (60.0, 50.0, 45.0, 40.0)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_job_amended_at_random(corpus: str, seed: int):
    story, chance = random_story(seed, 0), random.Random(f"amended {seed}")
    with AmendedJob(setup_of(story, corpus, pace_s=LIVE_PACE_S, stream=story.links[0].stream)) as job:
        job.begin(story.links[0].layout, story.links[0].nodes)
        for number in range(1, HANDOFFS + 1):
            layout, nodes = _world(chance, job.links[-1].nodes, f"{number}0")
            newest = job.live(layout, nodes)
            for revision in range(1, chance.randint(1, 3) + 1):
                job.trains_on(chance.choice((0, 0, 1, 2, 4, 8)))
                if chance.random() < 0.7:
                    layout, nodes = _world(chance, (*job.links[-1].nodes, *nodes), f"{number}{revision}")
                newest = _revised(job, chance, newest, layout, nodes, DEADLINES_S[revision])
            job.prepared(newest)
            job.switches_to(newest, layout, nodes)
        job.held_what_stop_and_copy_gives(story)


def _revised(
    job: AmendedJob, chance: random.Random, request: Any, layout: str, nodes: tuple[str, ...], deadline_s: float
) -> Any:
    """Amend; now and then one rank hears of it only when the others have gone on for two steps."""
    late = chance.choice(job.members(request)) if chance.random() < 0.5 else None
    command, kept = job.command, []

    def but_late(members: Any, name: str, *arguments: Any) -> None:
        if late in members:
            kept.append((name, arguments))
        command([each for each in members if each != late], name, *arguments)

    job.command = but_late  # type: ignore[method-assign]
    newer = job.amend(request, layout, nodes, deadline_s=deadline_s)
    job.command = command
    if kept:
        job.trains_on(2)
    for name, arguments in kept:
        job.command([late], name, *arguments)  # type: ignore[list-item]
    return newer


def _world(chance: random.Random, present: tuple[str, ...], name: str) -> tuple[str, tuple[str, ...]]:
    layout = chance.choices(LAYOUTS, WEIGHTS)[0]
    size, here = ParallelLayout.parse(layout).world_size, tuple(dict.fromkeys(present))
    staying = chance.sample(here, chance.randint(0, min(size, len(here))))
    nodes = [*staying, *(f"m{name}{index}" for index in range(size - len(staying)))]
    chance.shuffle(nodes)
    return layout, tuple(nodes)
