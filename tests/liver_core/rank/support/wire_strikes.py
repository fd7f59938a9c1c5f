"""Handoffs between machines with nothing but TCP, one of whose parts is struck: by seed, with real processes.

    python -m tests.liver_core.rank.support.wire_strikes --trials 90 [--seed 1] [--report FILE] [--resume]

What must hold: a rank that trains and was not struck neither ends nor stands still, and what a next world begins with
is bit for bit what the world before it held. Whoever fails says why.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from liver_core.handoff.messages import CutoverDeadlines, Decision, Reason, Rung
from liver_core.layout import Member
from liver_core.memory.memory_placement import GRAD
from tests.cluster.net_islands import Islands, address_of
from tests.cluster.rank_cluster import Cluster
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import Fault, RankSetup
from tests.liver_core.rank.support.chain import World, gather
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.transport.relays import RelayProcess

NAMES = ("a", "b", "c", "d")
FORMS = {
    "move": (World("TP1", "a"), World("TP1", "c")),
    "pipeline": (World("PP2", "ab"), World("PP2", "cd")),
    "one stays": (World("PP2", "ab"), World("TP2", "cb")),
}
POINTS = ("first tile", "middle tile", "last tile", "replay", "hash target", "boundary")
"""Of the newcomer on node c; the last: of the source, once it has permission."""
PROCESS = ("kill", "stop", "pause")
LINK = ("cut", "interrupt", "slow")
VICTIMS = {
    "relay of the source": PROCESS,
    "relay of the target": PROCESS,
    "target": PROCESS,
    "link of the target": LINK,
    "link of the source": LINK,
}
PAUSE_S, SLOW_S = 1.5, 4.0
PREPARED_S, ENDED_S, STEPS_S = 40.0, 40.0, 40.0
CUTOVER = CutoverDeadlines(4, 6, 10)
STREAM = {"tile_elements": 4_096}


@dataclass(frozen=True, slots=True)
class Strike:
    """What is done to whom in which form of handoff, while the stream is held at `point`."""

    seed: int
    form: str
    victim: str
    how: str
    point: str


@dataclass(slots=True)
class Verdict:
    """How it ended. `wrong`: what must not be; empty where all is well."""

    strike: dict[str, Any]
    end: str = ""
    reasons: list[str] | None = None
    seconds: float = 0.0
    wrong: str = ""


def strike_of(seed: int) -> Strike:
    """Victims, ways and points go round with the seed, so that few seeds meet many."""
    draw = random.Random(f"wire {seed}")
    victim = list(VICTIMS)[seed % len(VICTIMS)]
    # A world of several ranks trains over the links of its own nodes.
    forms = ("move",) if victim == "link of the source" else tuple(FORMS)
    return Strike(seed, draw.choice(forms), victim, VICTIMS[victim][seed // 5 % 3], draw.choice(POINTS))


class Trial:
    """One strike."""

    def __init__(self, strike: Strike, corpus: str) -> None:
        self.strike, self.corpus = strike, corpus
        self.source, self.target = FORMS[strike.form]
        self.newcomer = Member(self.target.nodes[0], 0)
        self.struck = {self.newcomer} if strike.victim == "target" else set[Member]()
        self.verdict = Verdict(asdict(strike))

    def run(self) -> Verdict:
        """Never raises for what ranks do."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            self.islands = stack.enter_context(Islands(NAMES))
            self.relays = {
                name: stack.enter_context(RelayProcess(address_of(name, NAMES), enter=self.islands.inside(name)))
                for name in sorted({*self.source.nodes, *self.target.nodes})
            }
            setup = RankSetup(
                small_gpt(self.corpus),
                record=True,
                pace_s=0.15,
                transport="mixed",
                islands=(self.islands.prefix, NAMES),
                relays={name: relay.local for name, relay in self.relays.items()},
                stream=STREAM,
            )
            self.cluster = stack.enter_context(Cluster(setup))
            try:
                self._play()
            except AssertionError as error:
                self.verdict.wrong = str(error)[-900:]
        self.verdict.seconds = time.monotonic() - began
        return self.verdict

    def _play(self) -> None:
        cluster, strike = self.cluster, self.strike
        cluster.launch(self.source.layout, self.source.nodes)
        cluster.await_step(self.source.first, 3)
        at_source = strike.point == "boundary"
        if at_source:
            cluster.arm(self.source.first, strike.point, "tell")
        else:
            cluster.faults = {self.newcomer.node_id: (Fault(strike.point, "hold"),)}
        request = cluster.open(
            self.target.layout, self.target.nodes, rung=Rung.LIVE, deadline_s=PREPARED_S + 20, cutover=CUTOVER
        )
        if at_source:
            if self._all_say(request, "prepared", PREPARED_S):
                cluster.command(cluster.members(request), "permit", request.handoff_id, 1)
                cluster.await_passage(self.source.first, strike.point)
            self._strike()
        else:
            cluster.await_passage(self.newcomer, strike.point, PREPARED_S)
            self._strike()
            cluster.command([self.newcomer], "release")
            if self._all_say(request, "prepared", PREPARED_S):
                cluster.command(cluster.members(request), "permit", request.handoff_id, 1)
        self._end(request)

    def _end(self, request: Any) -> None:
        """Wait for the next world, or call it off and see that the old one trains."""
        cluster, strike = self.cluster, self.strike
        went = self._all_say(request, "active", ENDED_S, members=request.target.members)
        if not went:
            cluster.command(cluster.members(request), "abort", request.handoff_id, Reason("it was struck", "abort"))
        self.verdict.reasons = [
            f"{member.node_id} {stage}: {reason}"
            for member in cluster.members(request)
            for stage, reason, _ in cluster.stages(member, request.handoff_id)
            if reason
        ]
        self.verdict.end = "went through" if went else "called off"
        world = self.target if went else self.source
        is_lost = strike.victim == "relay of the source" and strike.how == "kill" and strike.point != "boundary"
        assert went or not is_lost, f"state could have been copied over gloo: {self.verdict.reasons}"
        assert not (went and strike.victim == "target" and strike.how == "kill"), "a world without one of its ranks"
        if went:
            cluster.command(cluster.members(request), "retire", request.handoff_id)
            cluster.roster = request.target
        elif strike.how not in ("pause", "interrupt", "slow"):
            assert self.verdict.reasons, "nobody says why it was called off"
        stood_at = cluster.steps(world.first)[-1][1]
        cluster.await_step(world.first, stood_at + 3, STEPS_S)
        for member in self.struck:
            cluster.kill(member, signal.SIGCONT)
            if not went:
                cluster.kill(member)
        cluster.stop()
        if went:
            chain = gather(cluster, (self.source, self.target))
            if any(f"decision: {Decision.GO_REDO}" in reason for reason in self.verdict.reasons):
                # The batch is done again: gradients may have come to one target and not to another.
                for rank in itertools.chain(*(records.values() for records in chain.records.values())):
                    rank.get("regions", {}).pop(GRAD, None)
            moved = differences(chain.state("source", 1), chain.state("target", 2))
            assert not moved, f"other bits: {moved[:3]}"

    def _all_say(self, request: Any, stage: str, seconds: float, members: Sequence[Member] | None = None) -> bool:
        """Whether all of them get there. False as soon as one that was not struck says that it does not."""
        cluster = self.cluster
        members = members or cluster.members(request)
        found: list[bool] = []

        def known() -> bool:
            names = {member: {name for name, *_ in cluster.stages(member, request.handoff_id)} for member in members}
            if any({"aborted", "broken"} & said for said in names.values()):
                found.append(False)
            elif all(stage in said for said in names.values()):
                found.append(True)
            return bool(found)

        with contextlib.suppress(AssertionError):
            cluster.wait_for(known, seconds, stage)
        for rank in cluster.all_ranks:
            assert rank.member in self.struck or rank.error is None, f"{rank.member}: {rank.error}"
        return bool(found) and found[0]

    # Strikes.

    def _strike(self) -> None:
        victim, how = self.strike.victim, self.strike.how
        name = self.source.nodes[0] if "source" in victim else self.newcomer.node_id
        if victim.startswith("link"):
            self._strike_link(name)
            return
        process = self.cluster.ranks[self.newcomer].process if victim == "target" else self.relays[name].process
        pid = _innermost(process.pid) if victim == "target" else process.pid
        os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "pause":
            _later(PAUSE_S, lambda: os.kill(pid, signal.SIGCONT))

    def _strike_link(self, name: str) -> None:
        if self.strike.how == "slow":
            shape = ("tbf", "rate", "2mbit", "burst", "32kb", "latency", "200ms")
            command = [*self.islands.inside(name), "tc", "qdisc", "add", "dev", "eth0", "root", *shape]
            subprocess.run(command, check=True, timeout=10, capture_output=True)
            clear = [*self.islands.inside(name), "tc", "qdisc", "del", "dev", "eth0", "root"]
            _later(SLOW_S, lambda: subprocess.run(clear, check=False, timeout=10, capture_output=True))
            return
        self.islands.cut(name)
        if self.strike.how == "interrupt":
            _later(PAUSE_S, lambda: self.islands.join(name))


def _innermost(pid: int) -> int:
    """The rank itself, which is a child of its own process in a pid namespace of its own."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else pid


def _later(seconds: float, act: Any) -> None:
    def quietly() -> None:
        with contextlib.suppress(OSError):
            act()

    timer = threading.Timer(seconds, quietly)
    timer.daemon = True
    timer.start()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=90)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("build/reports/wire-strikes.json"))
    parser.add_argument("--resume", action="store_true", help="keep the trials that the report has")
    given = parser.parse_args(arguments)
    done = json.loads(given.report.read_text()) if given.resume and given.report.exists() else []
    known = {each["strike"]["seed"] for each in done}
    given.report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="liver-wire-") as folder:
        from tests.benchmarks.handoff import build_corpus

        corpus = build_corpus(Path(folder))
        for seed in range(given.seed, given.seed + given.trials):
            if seed in known:
                continue
            verdict = Trial(strike_of(seed), corpus).run()
            done.append(asdict(verdict))
            given.report.write_text(json.dumps(done, indent=1))
            strike = verdict.strike
            told = f"{seed} {strike['form']}: {strike['how']} {strike['victim']} at {strike['point']}"
            print(
                f"{told}: {verdict.end}, {verdict.seconds:.0f} s{', WRONG: ' if verdict.wrong else ''}{verdict.wrong}"
            )
            sys.stdout.flush()
    wrong = [each for each in done if each["wrong"]]
    print(f"{len(done)} trials, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
