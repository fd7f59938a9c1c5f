"""A storm of notices: thousands of messages of an AWS account within seconds, while the service is killed twice and its
database is away. Nothing may be lost, and nothing acted on twice; and how long from a message to the order of a node.

A real `liver serve` on a real PostgreSQL, an emulator of SQS over HTTP, and in this process the agents of a fleet at
work. `--calm`: without faults, beside four ranks that train. All share the machine.

Run from the root of the tree: python -m tests.benchmarks.storm [--messages 2000 --seconds 10] [--calm]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from agent.protocol.notice_life import TAKES_THE_NODE
from service.notices.rules import AWS_QUEUE
from tests.benchmarks.circumstances import end_when_told, hardware
from tests.benchmarks.notice_report import percentile
from tests.benchmarks.service import NODES_OF_A_JOB, Case, Run, pause
from tests.benchmarks.service_agents import BusyAgent, own_lag_ms
from tests.benchmarks.storm_messages import ANNOUNCES, Message, machines_of, storm
from tests.benchmarks.storm_place import Faults, StormPlace, as_monotonic, emulator_ms, storm_place

TAKEN_OF_A_JOB = 2
KNOWN_S, LOOK_S = 240.0, 0.5
KILLS = 2
RANKS = {"hidden_size": 256, "ffn_hidden_size": 1024, "seq_length": 128}
"""What the four ranks train: large enough that they are busy, and no larger."""
_LATENESS = ("p50", "p99")


@dataclass
class Told:
    """What agents were told of machines that go, by the queue. `first`, `all_members`: when the node's own agent, and
    the last of its job, first had an order that names it. `losses`: of a node, as told apart by agents."""

    first: dict[str, float] = field(default_factory=dict)
    members: dict[tuple[str, str], float] = field(default_factory=dict)
    losses: dict[str, set[tuple[str, datetime]]] = field(default_factory=dict)

    def take(self, agent: BusyAgent) -> None:
        """The agent has new orders."""
        now, job = time.monotonic(), agent.job()
        for fact in job.notices if job is not None else ():
            if fact.source != AWS_QUEUE or fact.kind not in TAKES_THE_NODE:
                continue
            self.members.setdefault((fact.node_id, agent.node_id), now)
            if fact.node_id == agent.node_id:
                self.first.setdefault(fact.node_id, now)
            self.losses.setdefault(fact.node_id, set()).add((fact.kind, fact.first_seen_utc))


@dataclass(frozen=True)
class Found:
    """What the database holds afterwards. `acts`, `occurrences`: of each node. `events`: ids of what was kept of our
    machines. `heard`: when the service had each node's first one. `counts`: of messages by what was done."""

    acts: Mapping[str, int]
    occurrences: Mapping[str, int]
    events: frozenset[tuple[str, str]]
    unread: int
    counts: Mapping[str, int]
    heard: Mapping[str, float]


def judge(
    messages: Sequence[Message], sent: Mapping[str, float], found: Found, told: Told, *, left: int, dlq: int
) -> dict[str, Any]:
    """The report of one storm. Pure. An agent that was told of one loss with several times was not told of several: the
    service moves times into the clock of each node as it measures that, which it does badly while it stands still."""
    expected = sorted({item.machine.removeprefix("i-") for item in messages if item.is_ours})
    wanted = {(item.event, item.machine) for item in messages if item.is_ours}
    torn = sum(not item.part for item in messages)
    strange = sum(bool(item.part) and not item.is_ours for item in messages)
    lost = {
        "machines_not_acted_on": sum(not found.acts.get(node) for node in expected),
        "agents_not_told": sum(node not in told.first for node in expected),
        "messages_of_ours": len(wanted - found.events),
        "messages_of_others": max(0, strange - found.counts.get("foreign", 0)),
        "unreadable_messages": max(0, torn - found.unread),
        "left_in_queue": left,
    }
    twice = {
        "acted": sum(max(0, found.acts.get(node, 0) - 1) for node in expected),
        "occurrences": sum(max(0, found.occurrences.get(node, 0) - 1) for node in expected),
        "strangers": len(set(found.acts) - set(expected)),
    }
    said: dict[str, float] = {}
    for item in messages:
        if item.is_ours and item.part in ANNOUNCES and not item.is_repeated:
            node = item.machine.removeprefix("i-")
            said[node] = min(said.get(node, sent[item.event]), sent[item.event])
    last = {node: max(at for (of, _), at in told.members.items() if of == node) for node in told.first}
    return {
        "messages": len(messages),
        "acted": sum(found.acts.values()),
        "expected": len(expected),
        "duplicates": sum(twice.values()),
        "lost": sum(lost.values()),
        "message_to_order_ms": _spread(_between(said, told.first)),
        "dlq": dlq,
        "lost_what": lost,
        "twice_what": twice,
        "told_with_other_times": sum(len(names) - len({kind for kind, _ in names}) for names in told.losses.values()),
        "by_disposition": dict(sorted(found.counts.items())),
        "delivered_again": sum(found.counts.values()) - len(messages),
        "message_to_heard_ms": _spread(_between(said, found.heard)),
        "heard_to_order_ms": _spread(_between(found.heard, told.first)),
        "message_to_order_of_all_members_ms": _spread(_between(said, last)),
    }


def look(place: StormPlace) -> Found:
    """What the database holds now."""
    account = f"channel = '{AWS_QUEUE}'"
    kinds = ", ".join(f"'{kind}'" for kind in TAKES_THE_NODE)
    acts = f"SELECT node_id, count(*) FROM notice_hearings WHERE disposition = 'acts' AND {account} GROUP BY 1"
    taken = f"SELECT node_id, count(DISTINCT occurrence_id) FROM notices WHERE kind IN ({kinds}) GROUP BY 1"
    events = f"SELECT message_id, provider_id FROM notice_hearings WHERE node_id IS NOT NULL AND {account}"
    unread = "SELECT count(*) FROM notice_hearings WHERE disposition = 'malformed'"
    counts = f"SELECT disposition, heard FROM notice_hearing_counts WHERE {account}"
    heard = f"SELECT node_id, min(recorded_at) FROM notices WHERE kind IN ({kinds}) GROUP BY 1"
    return Found(
        acts=dict(place.rows(acts)),
        occurrences=dict(place.rows(taken)),
        events=frozenset(place.rows(events)),
        unread=place.rows(unread)[0][0],
        counts=dict(place.rows(counts)),
        heard=as_monotonic(place.rows(heard)),
    )


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


async def play(options: argparse.Namespace) -> dict[str, Any]:
    """One storm, and its report."""
    machines = machines_of(options.messages)
    jobs = -(-machines // TAKEN_OF_A_JOB)
    case = Case(
        agents=jobs * NODES_OF_A_JOB, jobs=jobs, ranks_per_node=1, period_s=options.period, seconds=0.0,
        steps_per_s=1.0, trials=0, is_on_aws=True,
    )  # fmt: skip
    kills, away_s = (0, 0.0) if options.calm else (options.kills, options.away)
    report = hardware("tests.benchmarks.storm")
    with storm_place(case.settings() | {"AWS_VISIBILITY_S": str(options.visibility)}) as place:
        report["emulator_ms"] = _spread(await asyncio.to_thread(emulator_ms, place.account, options.probes))
        _say(f"{case.agents} nodes join, of which {machines} will go")
        async with Run(place.host, case) as run:
            told = Told()
            run.watch.take_orders = told.take
            with four_ranks() if options.calm else nullcontext():
                await pause(options.settle)
                named = [f"i-{node}" for node in _taken(run)][:machines]
                run.watch.begin()
                with own_lag_ms() as late_ms:
                    _say(f"{options.messages} messages in {options.seconds:g} s")
                    faults = Faults(place, kills=kills, away_s=away_s, first_in_s=options.seconds / 10)
                    faults.start()
                    sent = await _send(place, options, named)
                    _say("all are sent")
                    await _until_known(place, faults, told, expected=machines)
                work = {"reports": len(run.watch.syncs_ms), "report_ms": _spread(sorted(run.watch.syncs_ms))}
        messages = storm(options.messages, named, seconds=options.seconds, seed=options.seed)
        left, dlq = place.account.left(), place.account.left(place.account.dlq_url)
        found = await asyncio.to_thread(look, place)
        outcome = judge(messages, sent["sent"], found, told, left=left, dlq=dlq)
    outcome |= {"own_lag_ms": _spread(sorted(late_ms)), **work, "not_taken": dict(run.watch.refused)}
    outcome["sent_in_s"] = round(sent["ended"] - sent["began"], 1)
    outcome |= {"faults": faults.done, "agents": case.agents, "period_s": case.period_s, "calm": options.calm}
    return outcome | report | {"load_average_at_end": [round(each, 2) for each in os.getloadavg()]}


def _taken(run: Run) -> list[str]:
    """So many nodes of each job."""
    rosters = {job.job_id: job.roster for agent in run.agents if (job := agent.job()) is not None}
    return [
        node
        for _, roster in sorted(rosters.items())
        if roster is not None
        for node in sorted(roster.node_ids())[:TAKEN_OF_A_JOB]
    ]


async def _send(place: StormPlace, options: argparse.Namespace, machines: Sequence[str]) -> dict[str, Any]:
    plan = {
        "endpoint": place.account.url, "queue": place.account.queue_url, "count": options.messages,
        "machines": machines, "seconds": options.seconds, "seed": options.seed,
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        command = (sys.executable, "-m", "tests.benchmarks.storm_sender", file.name)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    assert process.returncode == 0, f"the sender ended with status {process.returncode}"
    return json.loads(output)


async def _until_known(place: StormPlace, faults: Faults, told: Told, *, expected: int) -> None:
    """Until the faults are over, the queue is empty and every node's agent was told, or for as long as it may take."""
    until = time.monotonic() + KNOWN_S
    while time.monotonic() < until:
        if not faults.is_alive():
            if faults.error is not None:
                raise faults.error
            if len(told.first) == expected and not await asyncio.to_thread(place.account.left):
                return
        await pause(LOOK_S)


@contextmanager
def four_ranks() -> Iterator[None]:
    """Four real ranks train meanwhile, on loopback, as fast as they can."""
    from tests.cluster.rank_cluster import Cluster
    from tests.cluster.real_ranks_model import build_corpus, small_gpt
    from tests.cluster.real_ranks_process import RankSetup

    with tempfile.TemporaryDirectory(prefix="liver-storm-") as folder:
        setup = RankSetup(small_gpt(build_corpus(Path(folder)), **RANKS), global_batch=8, micro_batch=2)
        with Cluster(setup) as cluster:
            roster = cluster.launch("DP4", "abcd", timeout_s=120)
            cluster.await_step(roster.members[0], 3)
            yield


def _between(begin: Mapping[str, float], end: Mapping[str, float]) -> list[float]:
    return sorted((end[name] - begin[name]) * 1e3 for name in begin.keys() & end.keys())


def _spread(ordered: Sequence[float]) -> dict[str, float | None]:
    found = {name: percentile(ordered, int(name[1:])) for name in _LATENESS}
    return {name: None if value is None else round(value, 1) for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 where something was lost or acted on twice."""
    options = _parser().parse_args(arguments)
    report = asyncio.run(play(options))
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 1 if report["lost"] or report["duplicates"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.storm", description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="in which they are sent")
    parser.add_argument("--calm", action="store_true", help="without faults, beside four ranks that train")
    parser.add_argument("--kills", type=int, default=KILLS, help="how often the service is killed")
    parser.add_argument("--away", type=float, default=5.0, help="for how many seconds the database is away")
    parser.add_argument("--period", type=float, default=20.0, help="seconds between two reports of an agent")
    parser.add_argument("--visibility", type=int, default=30, help="the service's own setting, seconds")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds from the start of the fleet to the storm")
    parser.add_argument("--probes", type=int, default=40, help="messages that measure the emulator alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("build/reports/storm.json"))
    return parser


if __name__ == "__main__":
    end_when_told()
    raise SystemExit(main())
