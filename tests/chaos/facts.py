"""What a trial leaves for the judge, as it stands in `facts.json`, and how it is read from logs and the API."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_STEP = re.compile(r"^step (\d+) generation (\d+) ")
_START = re.compile(r"starting rank (\d+) of generation (\d+)$")
_ORIGIN = re.compile(r"^handoff (\S+)(?: \(revision \d+\))? to generation (\d+): ")


@dataclass(slots=True)
class Facts:
    """One trial. Moments are of the machine's monotonic clock, `_utc` seconds since 1970.

    `capacity_at`: when the job had enough nodes again, None where it never lacked any. `trail`: see `trail`. `logged`:
    [generation, step] of each step in the logs of ranks. `partly`: those that some ranks of that world did not log, as
    when one was killed in the middle of a step. `births`: [generation, id of the handoff or start]. `taken`: when a
    node was taken away, by node. `started`: [generation, rank] of each process that agents started for a world of the
    service, as often as they did.
    `lead_notice`: the notice for the node that led an open handoff, with `node`, `opened_at`, `at` and `ends_in_s`, or
    None where none led. `build_s`: as planned. `problem`: what the trial waited for in vain.
    """

    seed: int
    global_batch: int
    kind: str
    struck: list[dict[str, Any]] = field(default_factory=list)
    triggered_at: float = 0.0
    triggered_utc: float = 0.0
    capacity_at: float | None = None
    taken: dict[str, float] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    handoffs: list[dict[str, Any]] = field(default_factory=list)
    trail: list[dict[str, Any]] = field(default_factory=list)
    logged: list[list[int]] = field(default_factory=list)
    partly: list[list[int]] = field(default_factory=list)
    births: list[list[Any]] = field(default_factory=list)
    started: list[list[int]] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    lead_notice: dict[str, Any] | None = None
    build_s: float = 0.0
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """For facts.json."""
        return asdict(self)


def read_rank_logs(logs: list[Path]) -> tuple[list[list[int]], list[list[int]], list[list[Any]]]:
    """`logged`, `partly` and `births` from the logs of rank processes."""
    logged: dict[tuple[int, int], set[Path]] = defaultdict(set)
    births: set[tuple[int, str]] = set()
    for path in logs:
        for line in path.read_text(errors="replace").splitlines():
            if found := _STEP.match(line):
                logged[int(found[2]), int(found[1])].add(path)
            elif found := _ORIGIN.match(line):
                births.add((int(found[2]), found[1]))
    worlds: dict[int, set[Path]] = defaultdict(set)
    for (generation, _), paths in logged.items():
        worlds[generation] |= paths
    partly = [list(item) for item in sorted(logged) if logged[item] != worlds[item[0]]]
    return [list(item) for item in sorted(logged)], partly, [list(item) for item in sorted(births)]


def read_agent_logs(logs: list[Path]) -> list[list[int]]:
    """`started` from the logs of agents."""
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines()]
    return [[int(found[2]), int(found[1])] for line in lines if (found := _START.search(line))]


def births_of_service(job: dict[str, Any], handoffs: list[dict[str, Any]]) -> list[list[Any]]:
    """`births` as the service has them."""
    started = [[row["generation"], row["origin_id"]] for row in job.get("generations", ())]
    return started + [[row["generation"], row["handoff_id"]] for row in handoffs if row["generation"] is not None]
