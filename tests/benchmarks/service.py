"""What agents cost the service: time of a sync, of a wake-up and of a notice, processor time, SQL and log for each.

A real `liver serve` with its embedded PostgreSQL, and in this process agents with tokens of their own, which train:
steps, losses and logs as ranks make them. All share the machine. Every request counts, also wake streams.

Run from the root of the tree: python -m tests.benchmarks.service [--agents 50 --seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.circumstances import end_when_told, hardware
from tests.benchmarks.notice_report import percentile
from tests.benchmarks.service_agents import ANSWER_S, BusyAgent, Line, Pace, Reader, Watch, own_lag_ms, submit
from tests.benchmarks.service_host import Host, Used, host
from tests.benchmarks.service_rows import INTERVAL_S, add_intervals, unsummed
from tests.service.fake_agent import JOB

NODES_OF_A_JOB = 4
START_S, START_S_AN_AGENT = 240.0, 1.0
AT_ONCE = 8
"""So many nodes join, and jobs are submitted, at the same time."""
WARM_PERIODS = 2
TRIAL_S = 1.0
READS_PER_S = 100.0
READERS_ASK = 1.5
"""How much more readers ask for than one token gets."""
QUERIES = 3
UNSUMMED_MAX = 10_000
"""So many intervals may wait for their sums, or still grow, when the ledger is read."""
SUMS_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Case:
    """So many agents with so many ranks each, which report once in a period."""

    agents: int
    jobs: int
    ranks_per_node: int
    period_s: float
    seconds: float
    steps_per_s: float
    trials: int
    is_on_aws: bool = False

    def settings(self) -> dict[str, str]:
        """The service's own defaults are for a period of one second."""
        return {
            "AGENT_POLL_S": str(self.period_s),
            "SILENT_AFTER_S": str(max(6.0, 4 * self.period_s)),
            "GONE_AFTER_S": str(max(30.0, 12 * self.period_s)),
            "AGENT_REQUESTS_PER_S": "100000",  # One join token is for them all.
        }

    def job_file(self) -> dict[str, Any]:
        """A job on its share of the nodes, and on half of them."""
        nodes = self.agents // self.jobs
        ranks = nodes * self.ranks_per_node
        pinned = [{"nodes": count, "layout": f"DP{count * self.ranks_per_node}"} for count in (nodes, nodes // 2)]
        return JOB | {
            "global_batch": ranks * 2,
            "nodes": {"min": nodes // 2, "max": nodes},
            "layouts": {"pinned": pinned},
            "stop": {"steps": 10_000_000},
        }


class Run:
    """One service with the agents of one case, while they report."""

    def __init__(self, place: Host, case: Case) -> None:
        self.place, self.case, self.watch = place, case, Watch()
        self.pace = Pace(case.period_s, case.steps_per_s)
        self.agents = [
            BusyAgent(
                f"n{number:05}",
                place.url,
                slots=case.ranks_per_node,
                watch=self.watch,
                pace=self.pace,
                machine=f"i-n{number:05}" if case.is_on_aws else None,
            )
            for number in range(case.agents)
        ]
        self.unnamed = 0
        self.late_ms: list[float] = []
        self.start_up: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Run:
        """Every node has joined and works for a job."""
        began = self.place.used()
        await _in_turns(self._join, range(len(self.agents)))
        joined = self.place.used()
        await _in_turns(self._submit, range(self.case.jobs))
        within_s = START_S + START_S_AN_AGENT * len(self.agents)
        await _until(lambda: all(agent.is_at_work for agent in self.agents), within_s, self._without_job)
        self.start_up = {"join": _cost(began, joined), "start": _cost(joined, self.place.used())}
        await pause(WARM_PERIODS * self.case.period_s)
        self.watch.begin()
        return self

    async def _join(self, number: int) -> None:
        """Who has joined reports from then on: others may take so long that it would count as silent."""
        agent, period_s = self.agents[number], self.case.period_s
        await agent.join(self.place.token("join"))
        await agent.sync()
        self._tasks.append(asyncio.create_task(agent.run(period_s * number / len(self.agents))))
        self._tasks.append(asyncio.create_task(agent.listen()))

    async def _submit(self, number: int) -> None:
        own = {"checkpoint": JOB["checkpoint"] | {"path": f"/checkpoints/{number}"}}
        await submit(self.place.url, self.place.token("operator"), self.case.job_file() | own)

    def _without_job(self) -> str:
        idle = sum(not agent.is_at_work for agent in self.agents)
        return f"a job on every node: {idle} of {len(self.agents)} report none. Not taken: {self.watch.refused}"

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def steady(self, seconds: float) -> tuple[Used, Used]:
        """What was used before and after so many seconds without any change."""
        self.watch.begin()
        before = self.place.used()
        await pause(seconds)
        return before, self.place.used()

    async def time_wakes(self) -> None:
        """A person asks for a checkpoint; how long until the members' streams say so."""
        line = Line(self.place.url)
        for job_id in self._jobs():
            self.watch.asked_at[job_id] = time.monotonic()
            path = f"/api/v1/jobs/{job_id}/checkpoint"
            status, _ = await line.ask("POST", path, self.place.token("operator"))
            if status != 200:
                self.watch.refuse(f"checkpoint: status {status}")
            await pause(TRIAL_S / 2)
            del self.watch.asked_at[job_id]

    async def time_notices(self) -> None:
        """A node reports a notice; how long until the other members have orders that name it. What takes longer than
        `ANSWER_S` is counted, not timed. Each member of a job in turn, once all know that the one before stays."""
        members: dict[str, list[BusyAgent]] = {}
        for agent in self.agents:
            if (job := agent.job()) is not None:
                members.setdefault(job.job_id, []).append(agent)
        with own_lag_ms() as self.late_ms:
            for trial, job_id in enumerate(self._jobs()):
                of_job = members[job_id]
                agent = of_job[trial // len(members) % len(of_job)]
                known = len(self.watch.notices_ms) + len(of_job) - 1
                fact = agent.report_notice()
                await self._within(ANSWER_S, lambda known=known: len(self.watch.notices_ms) >= known)
                self.unnamed += max(0, known - len(self.watch.notices_ms))
                agent.withdraw(fact)
                await self._within(
                    ANSWER_S, lambda of_job=of_job, fact=fact: all(each.has_taken_back(fact) for each in of_job)
                )

    async def _within(self, seconds: float, is_so: Callable[[], bool]) -> None:
        """Let the agents work for a second, and for up to so many if it takes longer."""
        ends_s = time.monotonic() + seconds
        await pause(TRIAL_S)
        while not is_so() and time.monotonic() < ends_s:
            await pause(TRIAL_S / 10)

    def _jobs(self) -> list[str]:
        known = list(dict.fromkeys(job.job_id for agent in self.agents if (job := agent.job()) is not None))
        return (known * self.case.trials)[: self.case.trials]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    report = asyncio.run(measure(options))
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for."""
    report: dict[str, Any] = hardware("tests.benchmarks.service") | {"cases": [], "one_large_job": []}
    small = _case(options, jobs=max(1, options.agents // NODES_OF_A_JOB))
    with host(small.settings()) as place:
        async with Run(place, small) as run:
            report["cases"].append(await _measured(run))
            report["readers"] = await _readers(run)
        report["ledger"] = await _ledger(place, options.intervals)
    if options.large:
        large = _case(options, jobs=1, agents=options.large)
        with host(large.settings()) as place:
            async with Run(place, large) as run:
                found = await _measured(run)
        cost, usual = (sum(each["cpu_ms_per_agent_period"].values()) for each in (found, report["cases"][0]))
        report["one_large_job"].append(found | {"cost_of_a_small_job": round(cost / usual, 2)})
    report["load_average_at_end"] = [round(each, 2) for each in os.getloadavg()]
    return report


async def _measured(run: Run) -> dict[str, Any]:
    case = run.case
    before, after = await run.steady(case.seconds)
    syncs_ms, refused = sorted(run.watch.syncs_ms), dict(run.watch.refused)
    answer_bytes = round(sum(run.watch.order_bytes) / len(syncs_ms))
    await run.time_wakes()
    await run.time_notices()
    count = len(syncs_ms)
    return {
        "agents": case.agents,
        "jobs": case.jobs,
        "ranks_per_node": case.ranks_per_node,
        "hz": 1.0 / case.period_s,
        "sync_ms": _spread(syncs_ms),
        "wake_ms": _round(percentile(sorted(run.watch.wakes_ms), 50)),
        "notice_to_order_ms": _spread(sorted(run.watch.notices_ms)),
        "notices_without_order": run.unnamed,
        "generator_late_ms": _spread(sorted(run.late_ms)),
        "cpu_ms_per_agent_period": {
            "service": _round((after.service_cpu_s - before.service_cpu_s) * 1e3 / count),
            "database": _round((after.database_cpu_s - before.database_cpu_s) * 1e3 / count),
        },
        "statements_per_sync": _round((after.statements - before.statements) / count),
        "rss_mb": _round(run.place.rss_mb()),
        "wal_bytes_per_sync": round((after.wal_bytes - before.wal_bytes) / count),
        "syncs_per_s": _round(count / (after.at_s - before.at_s)),
        "answer_bytes": answer_bytes,
        "not_taken": refused,
        "start_up": run.start_up,
    }


async def _readers(run: Run) -> dict[str, Any]:
    """Readers who ask for more than one token gets, beside the agents."""
    with own_lag_ms() as late_alone_ms:
        await run.steady(run.case.seconds)
    alone = percentile(sorted(run.watch.syncs_ms), 99)
    reader = Reader(run.place.url, run.place.token("operator"))
    # A token may use what it has saved up, two seconds of its rate; after that it gets its rate.
    await reader.run(READERS_ASK * READS_PER_S, 2 / (READERS_ASK - 1))
    reader.served, reader.refused = 0, 0
    run.watch.begin()
    began = time.monotonic()
    with own_lag_ms() as late_beside_ms:
        await reader.run(READERS_ASK * READS_PER_S, run.case.seconds)
    assert reader.others == 0, f"{reader.others} reads were neither served nor refused for their number"
    beside = percentile(sorted(run.watch.syncs_ms), 99)
    return {
        "requests_per_s": _round(reader.served / (time.monotonic() - began)),
        "refused": reader.refused,
        "agents_p99_ratio": _round(beside / alone) if beside and alone else None,
        "agents_p99_ms": {"alone": _round(alone), "beside": _round(beside)},
        "generator_late_p99_ms": {
            "alone": _round(percentile(sorted(late_alone_ms), 99)),
            "beside": _round(percentile(sorted(late_beside_ms), 99)),
        },
    }


async def _ledger(place: Host, sizes: Sequence[int]) -> list[dict[str, Any]]:
    found, present = [], 0
    async with httpx.AsyncClient(base_url=place.url, timeout=120) as client:
        for size in sizes:
            add_intervals(place, size - present)
            present = size
            # Most come with their sums. Upkeep makes those of the rest, once a minute and then without a rest.
            await _until(lambda: unsummed(place) < UNSUMMED_MAX, SUMS_S, lambda: "sums of the intervals")
            times_ms: list[float] = []
            for _ in range(QUERIES):
                began = time.monotonic()
                answer = await client.get(
                    "/api/v1/ledger", headers={"Authorization": f"Bearer {place.token('operator')}"}
                )
                if answer.status_code == 200:
                    times_ms.append((time.monotonic() - began) * 1e3)
                    counted_s = answer.json()["slot_seconds"]
                    assert counted_s >= size * INTERVAL_S, f"{counted_s} slot seconds of {size} intervals"
            middle = percentile(sorted(times_ms), 50) if len(times_ms) == QUERIES else None
            found.append({"intervals": size, "query_ms": _round(middle)})
    return found


async def pause(seconds: float) -> None:
    """Let the agents work."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


async def _in_turns(work: Callable[[int], Awaitable[None]], numbers: range) -> None:
    """Each once, `AT_ONCE` at the same time."""

    async def turn(mine: range) -> None:
        for number in mine:
            await work(number)

    await asyncio.gather(*(turn(numbers[first::AT_ONCE]) for first in range(AT_ONCE)))


async def _until(is_so: Callable[[], bool], within_s: float, what: Callable[[], str]) -> None:
    ends_at = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < ends_at, f"not within {within_s:.0f} s: {what()}"
        await pause(0.1)


def _cost(before: Used, after: Used) -> dict[str, float]:
    return {
        "seconds": round(after.at_s - before.at_s, 1),
        "service_cpu_s": round(after.service_cpu_s - before.service_cpu_s, 1),
        "database_cpu_s": round(after.database_cpu_s - before.database_cpu_s, 1),
    }


def _case(options: argparse.Namespace, *, jobs: int, agents: int | None = None) -> Case:
    return Case(
        agents=agents or jobs * NODES_OF_A_JOB,
        jobs=jobs,
        ranks_per_node=options.ranks,
        period_s=options.period,
        seconds=options.seconds,
        steps_per_s=options.steps_per_s,
        trials=options.trials,
    )


def _spread(ordered: Sequence[float]) -> dict[str, float | None]:
    return {"p50": _round(percentile(ordered, 50)), "p99": _round(percentile(ordered, 99))}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.service", description=__doc__)
    parser.add_argument("--agents", type=int, default=1_000, help="in jobs of four nodes each")
    parser.add_argument("--large", type=int, default=1_000, help="nodes of the one large job; 0: none")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each node")
    parser.add_argument("--period", type=float, default=5.0, help="seconds between two reports of an agent")
    parser.add_argument("--steps-per-s", type=float, default=1.0, help="how fast jobs train")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each part is measured")
    parser.add_argument("--trials", type=int, default=20, help="how many wake-ups, and how many notices, are timed")
    parser.add_argument(
        "--intervals", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000], help="rows of the ledger"
    )
    parser.add_argument("--report", type=Path, default=Path("build/reports/service.json"))
    return parser


if __name__ == "__main__":
    end_when_told()
    raise SystemExit(main())
