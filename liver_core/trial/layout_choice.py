"""Which layouts a trial looks at, and in which it runs the job once more; `build_one_rank` builds one of the others."""

from __future__ import annotations

from collections.abc import Iterable

from liver_core.layout import Member, ParallelLayout, Roster
from liver_core.state.built_state import check_built
from liver_core.training.job import TrainingJob
from liver_core.worlds.megatron import building, outline, retire
from liver_core.worlds.released_storage import released

USUAL = ("TP2xPP2", "TP2xDP2", "PP2xDP2", "TP2", "PP2", "DP2")
"""What is looked at where a job file names no layouts."""
RANKS_MAX = 8
"""Processes that a trial starts of itself."""


def choose(layouts: Iterable[str], *, processors: int) -> str:
    """The layout of several ranks that splits most axes and fits this machine; of two such the one with fewer ranks,
    then the first. Empty if there is none."""
    ranks_max = min(RANKS_MAX, max(2, processors))
    parsed = {text: ParallelLayout.parse(text) for text in layouts}
    fitting = [text for text, layout in parsed.items() if 1 < layout.world_size <= ranks_max]
    return max(fitting, key=lambda text: (_axes(parsed[text]), -parsed[text].world_size), default="")


def _axes(layout: ParallelLayout) -> int:
    return sum(size > 1 for size in (layout.tp, layout.pp, layout.dp, layout.ep))


def build_one_rank(job: TrainingJob, layout: ParallelLayout, *, name: str) -> None:
    """Build the last rank of this layout as a next world is built, without memory and peers, and drop it. Raises what
    the job raises. `name` must be new in this process."""
    members = tuple(Member(f"try-{each}", 0) for each in range(layout.world_size))
    world = outline(Roster(name, 1, layout, members), layout.world_size - 1, name=name)
    try:
        with building(world), released():
            check_built(job.build(world), world)
    finally:
        retire(world)
