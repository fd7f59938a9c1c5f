"""Random stories of one job that is handed over live again and again, and the same story by stop-and-copy.

Both runs hand over at the same steps, so that every rank must hold the same bits after every step of both.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from liver_core.handoff.messages import Rung
from liver_core.layout import Member, ParallelLayout, Roster
from liver_core.streaming.follow import FollowLimits
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import EVERY_TIME
from tests.liver_core.rank.support.job_names import JOBS

LAYOUTS = ("TP1", "TP2", "PP2", "DP2", "PP3", "TP2xPP2", "TP2xDP2", "PP2xDP2", "DP4")
WEIGHTS = (2, 4, 4, 4, 3, 1, 1, 1, 1)
"""Worlds of two ranks mostly: there are two cores."""

HANDOFFS = 4
ROOM = 5_000_000
"""Of a device, beside its world: every next world fits, most of them only if a part of it waits in host memory."""
LIVE_PACE_S = 0.2
Trace = dict[str, dict[int, tuple[int, str]]]
"""Node -> step -> (generation, digest of masters and moments)."""


@dataclass(frozen=True)
class Link:
    """One world of a story, and how the state streams into it: begun after `steps_before` steps of the world before,
    permitted when it has followed `steps_followed` more after the certificate. `stands_for`: its first rank, which must
    be a survivor, stands for so many steps before each replay, until it gives up."""

    layout: str
    nodes: tuple[str, ...]
    stream: dict[str, Any]
    steps_before: int
    steps_followed: int = 0
    stands_for: int = 0

    def __str__(self) -> str:
        nodes, steps = ",".join(self.nodes), f"{self.steps_before} and {self.steps_followed} steps"
        return f"{self.layout} on {nodes} with {self.stream} after {steps}"


@dataclass(frozen=True)
class Story:
    """One job: optimizer, precision, samples of a micro-batch (of 8 in a step), its worlds, the size of a gradient
    bucket (None is one bucket and no overlap), and the bytes its devices have room for in a live handoff (None is
    enough)."""

    seed: int
    optimizer: str
    precision: str
    micro_batch: int
    links: tuple[Link, ...]
    bucket_size: int | None = None
    extra_bytes_max: int | None = None

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.optimizer}, {self.precision}, micro-batch {self.micro_batch}"
        head += "" if self.bucket_size is None else f", overlapped in buckets of {self.bucket_size}"
        head += "" if self.extra_bytes_max is None else f", {self.extra_bytes_max} bytes of device memory"
        return "\n  then ".join((head, *map(str, self.links)))


MIXED = {"precision": "bf16", "grad_reduce_in_fp32": False, "norms_in_fp32": True}
"""What the precision "mixed" is: all that has 16 bits beside what has not."""


@dataclass
class Told:
    """What a run left. `handed_at[generation]`: the version at its cutover; `verdicts[generation]`: rung and reason;
    `measures[generation]`: what its ranks measured on the way there, by node."""

    traces: Trace
    samples: dict[int, tuple[int, int]]
    handed_at: dict[int, int]
    verdicts: dict[int, tuple[str, str]]
    measures: dict[int, dict[str, dict[str, float]]]


def random_story(seed: int, handoffs: int = HANDOFFS) -> Story:
    """Optimizer, precision, accumulation and buckets go round with the seed, so that few seeds meet all of them."""
    chance = random.Random(f"story {seed}")
    optimizers = ("adam", "sgd", "lion")
    links = [_link(chance, (), 0)]
    for number in range(1, handoffs + 1):
        links.append(_link(chance, links[-1].nodes, number))
    bucket_size = (None, 20_000, 3_000, 1)[seed % 4]
    precision, micro_batch = ("fp32", "bf16")[seed // 3 % 2], (2, 1)[seed % 2]
    room = (None, ROOM)[seed // 2 % 2]
    return Story(seed, optimizers[seed % 3], precision, micro_batch, tuple(links), bucket_size, room)


def _link(chance: random.Random, present: tuple[str, ...], number: int) -> Link:
    layout = chance.choices(LAYOUTS, WEIGHTS)[0]
    size = ParallelLayout.parse(layout).world_size
    staying = chance.sample(present, chance.randint(0, min(size, len(present))))
    nodes = [*staying, *(f"n{number}{index}" for index in range(size - len(staying)))]
    chance.shuffle(nodes)
    stream = {
        "tile_elements": chance.choice((1 << 10, 1 << 12, 10_007, 1 << 15, 1 << 20)),
        "ring_depth": chance.choice((4, 8)),
        "share": chance.choice((1.0, 1.0, 0.5, 0.2)),
    }
    return Link(layout, tuple(nodes), stream, chance.randint(0, 3), chance.choice((0, 0, 2, 7)))


def setup_of(story: Story, corpus: str, **changes: Any) -> RankSetup:
    arguments = small_gpt(corpus, **(MIXED if story.precision == "mixed" else {"precision": story.precision}))
    if story.bucket_size is not None:
        arguments |= {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": story.bucket_size}
    return RankSetup(arguments, micro_batch=story.micro_batch, job=JOBS[story.optimizer], trace=True, **changes)


def told_live(story: Story, setup: RankSetup) -> Told:
    """Hand over live whenever so many steps are done."""
    verdicts, measures, first = {}, {}, story.links[0]
    setup = replace(setup, pace_s=LIVE_PACE_S)
    if story.extra_bytes_max is not None:
        setup = replace(setup, extra_bytes_max=story.extra_bytes_max, host_bytes_max=1 << 40)
    with Cluster(setup) as cluster:
        cluster.launch(first.layout, first.nodes)
        for link in story.links[1:]:
            _await_steps(cluster, link.steps_before)
            assert cluster.roster is not None
            cluster.command(cluster.roster.members, "set_stream", link.stream)
            cluster.setup = replace(setup, stream=link.stream)
            request = cluster.open(link.layout, link.nodes, rung=Rung.LIVE)
            if link.stands_for:
                _stand_still(cluster, request.target.members[0], link.stands_for)
            cluster.await_stage(cluster.members(request), request, "prepared", 60)
            verdicts[request.generation] = cluster.verdict(request.target.members[0], request)
            _await_steps(cluster, link.steps_followed)
            cluster.complete(request)
            measures[request.generation] = _measured(cluster, request)
        return _told(cluster, story, verdicts, measures)


def told_by_stop_and_copy(story: Story, setup: RankSetup, handed_at: dict[int, int]) -> Told:
    """The same, but copied in the pause, at exactly the steps of `handed_at`: the job is held there meanwhile."""
    measures, first = {}, story.links[0]
    with Cluster(replace(setup, hold_at=tuple(handed_at.values()))) as cluster:
        cluster.launch(first.layout, first.nodes)
        for link, (_, version) in zip(story.links[1:], sorted(handed_at.items()), strict=True):
            source: Roster | None = cluster.roster
            assert source is not None
            for member in source.members:
                cluster.await_passage(member, f"step {version}")
            request = cluster.open(link.layout, link.nodes)
            cluster.await_stage(cluster.members(request), request, "prepared", 60)
            cluster.command(cluster.members(request), "permit", request.handoff_id, 1)
            cluster.await_stage(source.members, request, "ready", 30)
            cluster.command(source.members, "release")
            cluster.complete(request)
            measures[request.generation] = _measured(cluster, request)
        return _told(cluster, story, {}, measures)


def _stand_still(cluster: Cluster, member: Member, steps: int) -> None:
    cluster.arm(member, "replay", "hold", EVERY_TIME)
    for _ in range(FollowLimits().losses_max + 1):
        cluster.await_passage(member, "replay")
        cluster.ranks[member].events.remove(("held", "replay"))
        _await_steps(cluster, steps)
        cluster.command([member], "release")


def _await_steps(cluster: Cluster, more: int) -> None:
    assert cluster.roster is not None
    first = cluster.roster.members[0]
    cluster.await_step(first, cluster.steps(first)[-1][1] + more)


def _measured(cluster: Cluster, request: Any) -> dict[str, dict[str, float]]:
    members = request.target.members
    return {member.node_id: cluster.stages(member, request.handoff_id)[-1][2] for member in members}


def _told(cluster: Cluster, story: Story, verdicts: dict[int, tuple[str, str]], measures: dict[int, Any]) -> Told:
    """Two more steps in the last world, and what everybody brings home."""
    _await_steps(cluster, 2)
    cluster.stop()
    results = {rank.member: rank.result for rank in cluster.all_ranks if rank.result is not None}
    rows = [row for link in story.links for row in cluster.steps(Member(link.nodes[0], 0))]
    firsts: dict[int, int] = {}
    for generation, step, *_ in rows:
        firsts[generation] = min(step, firsts.get(generation, step))
    return Told(
        traces={member.node_id: result["trace"] for member, result in results.items()},
        samples={step: (consumed, digest) for _, step, _, consumed, digest in rows},
        handed_at={generation: step - 1 for generation, step in firsts.items() if generation > 1},
        verdicts=verdicts,
        measures=measures,
    )


def first_difference(ours: Trace, theirs: Trace) -> str:
    """The first step after which a rank holds other bits, or is in another world; nothing where there is none.

    One run may have gone on a few steps longer.
    """
    last = min(max(max(steps) for steps in trace.values()) for trace in (ours, theirs))
    for step in range(last + 1):
        for node in sorted(ours.keys() | theirs.keys()):
            one, other = ours.get(node, {}).get(step), theirs.get(node, {}).get(step)
            if one != other:
                return f"after step {step} on {node}: {one} and {other}"
    return ""
