"""What a plan costs a rank of a large job, and how evenly the plans of a job load its sources and its network.

    python -m tests.benchmarks.plan --report build/reports/plan.json

No process of a job runs: each plan is made by the product's own planner from the message that a rank gets. Up to 1,024
ranks all plans are looked at, above that those of the ranks of one pipeline stage and of one replica, and above 32,768
a few that say nothing of the load.
"""

import argparse
import json
import os
import random
import resource
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

from agent.protocol.rank import Prepare
from liver_core.handoff import HandoffId, Phase, Rung, StoreAddress
from liver_core.handoff.messages import CutoverDeadlines, Order
from liver_core.layout import Manifest, Member, ParallelLayout, Roster, shard_ranges, to_json
from liver_core.layout.codec import decode
from liver_core.memory.memory_budget import TILE_ELEMENTS_MOST
from liver_core.memory.transformer_shape import TransformerShape, manifest_of
from liver_core.reshard import missing_bytes, plan_rank, planner
from liver_core.reshard.plan import RankPlan
from liver_core.reshard.replicas import ReplicaChoice
from liver_core.reshard.seating import seat
from liver_core.streaming.tiles import cut_tiles
from tests.benchmarks.circumstances import hardware
from tests.benchmarks.wire_model import Reader, least_seconds, seconds
from tests.liver_core.layout.expert_models import BUCKETS, deepseek_671b, qwen_235b

SLOTS, CARD_BYTES_PER_S = 8, 50e9
WHOLE_UP_TO, STAGE_UP_TO, DRAWN, SEED = 1_024, 32_768, 16, 46
_70B = TransformerShape(80, 8_192, 64, 8, 28_672, 128_256, 8_192, gradients_fp32=False, buckets=BUCKETS)
_405B = TransformerShape(126, 16_384, 128, 8, 53_248, 128_256, 8_192, gradients_fp32=False, buckets=BUCKETS)
MODELS: dict[str, Callable[[], Manifest]] = {
    "70b": partial(manifest_of, _70B),
    "405b": partial(manifest_of, _405B),
    "235b": partial(qwen_235b, 94),
    "235b, 96 layers": partial(qwen_235b, 96),
    "671b, 64 layers": partial(deepseek_671b, 64),
}


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    source: str
    target: str


CASES = (
    Case("70b", "TP8xDP8", "TP8xDP7"),
    Case("70b", "TP4xPP4xDP4", "TP8xPP2xDP4"),
    Case("70b", "TP8xPP4xDP8", "TP8xPP5xDP6"),
    Case("70b", "TP8xPP4xDP32", "TP8xPP4xDP31"),
    Case("405b", "TP8xPP9xDP7", "TP8xPP7xDP9"),
    Case("405b", "TP8xPP7xDP18", "TP8xPP9xDP13"),
    Case("405b", "TP8xPP14xDP36", "TP8xPP14xDP35"),
    Case("405b", "TP8xPP14xDP146", "TP8xPP14xDP145"),
    Case("405b", "TP8xPP14xDP146", "TP8xPP7xDP290"),
    Case("235b", "TP8xDP32xEP32xETP1", "TP8xDP28xEP32xETP1"),
    Case("235b", "TP4xPP2xDP32xEP32xETP1", "TP4xPP2xDP31xEP4xETP1"),
    Case("235b, 96 layers", "TP1xPP8xDP16xCP2xEP8xVPP4", "TP1xPP8xDP12xCP2xEP8xVPP4"),
    Case("235b, 96 layers", "TP2xPP8xDP64xEP16xETP1", "TP2xPP8xDP56xEP16xETP1"),
    Case("235b, 96 layers", "TP2xPP8xDP64xEP16xETP1", "TP4xPP4xDP64xEP32xETP1"),
    Case("671b, 64 layers", "TP2xPP8xDP64xEP32xVPP4xETP1", "TP1xPP4xDP192xEP64xVPP4"),
    Case("671b, 64 layers", "TP1xPP16xDP128xEP64", "TP1xPP16xDP96xEP32"),
    Case("671b, 64 layers", "TP1xPP16xDP1024xEP64", "TP1xPP16xDP960xEP64"),
    Case("671b, 64 layers", "TP2xPP16xDP4096xEP64xETP1", "TP2xPP16xDP4064xEP64xETP1"),
    Case("671b, 64 layers", "TP2xPP16xDP4096xEP64xETP1", "TP1xPP8xDP16384xEP128"),
)


def rosters(case: Case) -> tuple[Roster, Roster]:
    """The source on whole nodes in rank order. Nodes that the target has no room for go, drawn by a seed; what is left
    is seated as an agent does it."""
    layouts = [ParallelLayout.parse(text) for text in (case.source, case.target)]
    members = tuple(Member(f"ip-10-0-{at // SLOTS}.ec2", at % SLOTS) for at in range(layouts[0].world_size))
    nodes = list(dict.fromkeys(member.node_id for member in members))
    too_many = max(0, len(members) - layouts[1].world_size) // SLOTS
    leaving = set(random.Random(SEED).sample(nodes, too_many))
    kept = [member for member in members if member.node_id not in leaving]
    source = Roster("job", 1, layouts[0], members)
    return source, Roster("job", 2, layouts[1], seat(layouts[1], kept, ()))


# One rank alone.


def drawn_ranks(layout: ParallelLayout) -> list[int]:
    """The ends of the first and of the last stage, and more of both, drawn by a seed."""
    stage = layout.world_size // layout.pp
    ends = [0, stage - 1, layout.world_size - stage, layout.world_size - 1]
    others = [*range(stage), *range(layout.world_size - stage, layout.world_size)]
    more = random.Random(SEED).sample(others, min(DRAWN, len(others)))
    return list(dict.fromkeys([*ends, *more]))[:DRAWN]


def order_of(source: Roster, target: Roster) -> str:
    """The message that a rank gets, as its agent writes it."""
    text = to_json(
        Order(
            job_id="job", handoff_id=HandoffId(str(UUID(int=46))), parent=1, generation=2, plan_revision=1,
            plan_digest="", phase=Phase.PREPARE, source=source, target=target, target_revision=1,
            store=StoreAddress("10.0.0.1", 29_500), cause="notice", rung=Rung.LIVE, deadline_utc=1.8e9,
            cutover=CutoverDeadlines(10.0, 20.0, 30.0, 60.0), proposer_id="ip-10-0-0.ec2", agent_incarnation=1,
            report_seq=1, issued_at=1.79e9,
        )
    )  # fmt: skip
    return json.dumps({"type": "prepare", "order": text, "clock_zero": 0.0})


@dataclass(frozen=True, slots=True)
class Alone:
    """What one rank takes, in processor seconds: to load the manifest, to read the message, and to plan. And the MB of
    the latter two above the loaded manifest."""

    load: float
    read: float
    plan: float
    peak_mb: float


def one_rank(order: str, manifest: str, rank: int) -> Alone:
    """In a process of its own, since a rank has made no plan before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        times = [time.process_time()]
        known = decode(Manifest, manifest)
        times.append(time.process_time())
        before = _resident_mb()
        Path("/proc/self/clear_refs").write_text("5")  # The peak is counted from here.
        asked = Prepare.model_validate_json(order).order
        assert asked.source is not None
        times.append(time.process_time())
        plan_rank(known, asked.source, asked.target, rank)
        times.append(time.process_time())
        os.write(writer, json.dumps([*(after - at for at, after in pairwise(times)), _peak_mb() - before]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        return Alone(*json.loads(said.read()))


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1_024 / 1e6


# A whole job.


@dataclass(frozen=True, slots=True)
class Planned:
    """One rank's share of a job. `fixed`: bytes from each source that no other holds; `free`: bytes by all that hold
    them; `given`: bytes from each source as chosen; `tiles`: of each tile the bytes from each source."""

    rank: int
    fixed: dict[int, int]
    free: dict[tuple[int, ...], int]
    given: dict[int, int]
    least_bytes: int
    tiles: tuple[tuple[tuple[int, int], ...], ...]


class _Told(ReplicaChoice):
    """Tells what it chose among."""

    said: list[tuple[tuple[int, ...], int, int]]

    def choose(self, holders: Any, copies: tuple[int, ...], elements: int) -> tuple[int, int]:
        chosen = super().choose(holders, copies, elements)
        type(self).said.append((tuple(rank for rank, _ in holders), chosen[0], elements))
        return chosen


def look_at(manifest: Manifest, source: Roster, target: Roster, rank: int, choice: type = _Told) -> Planned:
    """Plan for one rank, and what of it loads others. All elements have the same bytes."""
    (size,) = {manifest.element_bytes(spec) for spec in manifest.parameters}
    own = source.rank_of(target.members[rank])
    told = type("Told", (choice,), {"said": []})
    with mock.patch.object(planner, "ReplicaChoice", told):
        plan = plan_rank(manifest, source, target, rank)
    fixed, free, given = Counter[int](), Counter[tuple[int, ...]](), Counter[int]()
    for holders, chosen, elements in told.said:
        if chosen == own:
            continue
        given[chosen] += elements * size
        if len(holders) == 1:
            fixed[chosen] += elements * size
        else:
            free[holders] += elements * size
    kinds = [kind.name for kind in manifest.kinds]
    least = missing_bytes(manifest, source, target, rank, kinds=kinds)
    return Planned(rank, fixed, free, given, least, tuple(_tiles(manifest, target, plan, size)))


def _tiles(manifest: Manifest, target: Roster, plan: RankPlan, size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    owned = shard_ranges(manifest, target.layout, plan.target_rank).parameters
    spans = [(part.region_offset, part.region_offset + part.numel) for part in owned]
    for tile in cut_tiles(plan, spans, TILE_ELEMENTS_MOST):
        yield tuple((read.peer, size * sum(run.elements for run in read.runs)) for read in tile.reads if read.peer >= 0)


def looked_at(layout: ParallelLayout) -> tuple[list[int], str]:
    """Whose plans are looked at, and how that is said in the report."""
    if layout.world_size <= WHOLE_UP_TO:
        return list(range(layout.world_size)), "all ranks"
    if layout.world_size > STAGE_UP_TO:
        return drawn_ranks(layout), "drawn ranks"
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    ranks = [rank for rank, here in enumerate(at) if here.pp == 0 or (here.dp == 0 and here.cp == 0)]
    return ranks, "the ranks of pipeline stage 0 and of replica 0"


def source_imbalance(planned: Iterable[Planned]) -> float:
    """Bytes of the busiest source over the least that any choice among holders allows.

    Sets of holders are equal or disjoint, since ranks of one tensor-parallel group hold the same; so what a set has to
    choose is poured evenly over its members, on top of what only one of them holds.
    """
    fixed, free, given = Counter[int](), Counter[tuple[int, ...]](), Counter[int]()
    for each in planned:
        fixed.update(each.fixed)
        free.update(each.free)
        given.update(each.given)
    if not given:
        return 1.0
    members = [rank for holders in free for rank in holders]
    assert len(set(members)) == len(members), "sets of holders overlap"
    least = max(fixed.values(), default=0)
    for holders, size in free.items():
        least = max(least, _level([fixed[rank] for rank in holders], size))
    return max(given.values()) / least


def _level(levels: Sequence[int], poured: int) -> float:
    """How high the fullest stands when `poured` is spread over these so that it stands as low as it can."""
    rising = sorted(levels)
    for count in range(1, len(rising) + 1):
        level = (sum(rising[:count]) + poured) / count
        if count == len(rising) or level <= rising[count]:
            return max(level, rising[-1])
    return 0.0


def wire(source: Roster, target: Roster, planned: Sequence[Planned]) -> float:
    """Seconds of all reads over the least that the busiest network card needs."""
    numbers: dict[str, int] = {}
    readers = []
    for each in planned:
        here = numbers.setdefault(target.members[each.rank].node_id, len(numbers))
        tiles = []
        for tile in each.tiles:
            by_node = defaultdict[int, float](float)
            for peer, size in tile:
                there = numbers.setdefault(source.members[peer].node_id, len(numbers))
                by_node[there] += size if there != here else 0.0
            parts = tuple((node, size) for node, size in by_node.items() if size)
            tiles += [parts] if parts else []
        readers.append(Reader(here, tuple(tiles)))
    least = least_seconds(readers, len(numbers), CARD_BYTES_PER_S)
    return seconds(readers, len(numbers), CARD_BYTES_PER_S) / least if least else 1.0


# The report.

_KNOWN: dict[Case, tuple[Manifest, Roster, Roster]] = {}


def _look(asked: tuple[Case, int]) -> Planned:
    case, rank = asked
    if case not in _KNOWN:
        _KNOWN[case] = (MODELS[case.model](), *rosters(case))
    return look_at(*_KNOWN[case], rank)


def measured(case: Case, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """One record of the report."""
    source, target = rosters(case)
    manifest = MODELS[case.model]()
    order, text = order_of(source, target), json.dumps(to_json(manifest))
    alone = [one_rank(order, text, rank) for rank in drawn_ranks(target.layout)]
    ranks, which = looked_at(target.layout)
    planned = list(pool.map(_look, [(case, rank) for rank in ranks], chunksize=max(1, len(ranks) // 16)))
    moved = sum(sum(each.given.values()) for each in planned)
    least = sum(each.least_bytes for each in planned)
    found: dict[str, Any] = {
        "model": case.model,
        "ranks_from": source.layout.world_size,
        "ranks_to": target.layout.world_size,
        "from": case.source,
        "to": case.target,
        "looked_at": f"{which} ({len(ranks)})",
        "parameters": len(manifest.parameters),
        "load_seconds": _spread(each.load for each in alone),
        "read_seconds": _spread(each.read for each in alone),
        "plan_seconds": _spread(each.plan for each in alone),
        "ranks_alone": len(alone),
        "peak_mb": round(max(each.peak_mb for each in alone), 1),
        "bytes_moved": moved,
        "bytes_lower_bound": least,
    }
    if target.layout.world_size <= STAGE_UP_TO:
        found["source_imbalance"] = round(source_imbalance(planned), 4)
        found["wire_seconds_over_bound"] = round(wire(source, target, planned), 3)
    return found


def _spread(seconds_taken: Iterable[float]) -> dict[str, float]:
    taken = list(seconds_taken)
    return {"median": round(statistics.median(taken), 4), "max": round(max(taken), 4)}


def _line(found: dict[str, Any]) -> str:
    took = [f"{each} {found[f'{each}_seconds']['median']:.3f}" for each in ("load", "read", "plan")]
    text = (
        f"{found['model']:>15} {found['from']:>27} -> {found['to']:<27} seconds: {', '.join(took)} (max "
        f"{found['plan_seconds']['max']:.3f}); {found['peak_mb']:.0f} MB; bytes "
        f"{found['bytes_moved'] / max(1, found['bytes_lower_bound']):.3f} of the least"
    )
    if "source_imbalance" in found:
        text += f"; busiest source {found['source_imbalance']:.3f}; wire {found['wire_seconds_over_bound']:.2f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--cases", default="", help="numbers of cases, as 0,3; all by default")
    options = parser.parse_args()
    chosen = [CASES[int(number)] for number in options.cases.split(",")] if options.cases else list(CASES)
    report: dict[str, Any] = {
        **hardware("tests.benchmarks.plan"),
        "seconds_are": "processor seconds of one process",
        "network": f"one card of {CARD_BYTES_PER_S / 1e9:.0f} GB/s in each direction a node of {SLOTS} ranks",
        "cases": [],
    }
    options.report.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for case in chosen:
            found = measured(case, pool)
            report["cases"].append(found)
            options.report.write_text(json.dumps(report, indent=2) + "\n")
            print(_line(found), flush=True)


if __name__ == "__main__":
    main()
