"""What a loss between boundary and decision adds to the pause: `python -m tests.chaos.pauses [--repeats 3]`.

A job of four ranks leaves a node live. The leaver's rank is held at a probe of the loop. Meanwhile a part is killed, or
the leaver's machine falls silent. The pause is measured by what the ranks wrote, less the time of the hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.chaos.facts import Facts
from tests.chaos.ground import end_all, ground_for
from tests.chaos.judge import record_of
from tests.chaos.plan import Action, Kind, Strike, TrialPlan, Victim, plan_of
from tests.chaos.trail_reader import HELD
from tests.chaos.trial import Trial

SEED = 1
NODES = ("node-1", "node-2", "node-3", "node-4")
LEAVER = random.Random(SEED).sample(NODES, 1)[0]
"""As a trial of this seed chooses it."""
LONG_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is struck while the leaver's rank is held at a probe. `who`: as the table says it."""

    who: str
    victim: Victim
    action: Action
    point: str

    @property
    def name(self) -> str:
        """For a table, and to choose the case."""
        return f"{self.who} at {self.point}"


NOTHING = Case("nothing", Victim.ZYGOTE, Action.STOP, "norm")
"""Nothing waits for a zygote here."""
SEEN = (
    Case("leaver's rank killed", Victim.LEAVER, Action.KILL, "boundary"),
    Case("leaver's rank killed", Victim.LEAVER, Action.KILL, "norm"),
    Case("leaver's agent killed", Victim.AGENT, Action.KILL, "norm"),
    Case("lead's agent killed", Victim.LEAD, Action.KILL, "norm"),
)
"""An agent sees these deaths, and the handoff goes on."""
STORE = Case("store killed", Victim.STORE, Action.KILL, "norm")
"""An agent sees it, and nothing but a checkpoint is left."""
GONE = (
    Case("leaver's machine killed", Victim.MACHINE, Action.KILL, "boundary"),
    Case("leaver's machine killed", Victim.MACHINE, Action.KILL, "norm"),
)
"""No agent sees it, but connections are closed."""
SILENT = (
    Case("leaver's machine silent", Victim.MACHINE, Action.CUT, "boundary"),
    Case("leaver's machine silent", Victim.MACHINE, Action.CUT, "norm"),
)
"""Not a packet comes."""
CASES = (NOTHING, *SEEN, STORE, *GONE, *SILENT)


@dataclass(frozen=True, slots=True)
class Found:
    """`pause_s`: from the boundary until the next world, or the one that was started again, computes a batch, less the
    hold. `usual_s`: a step before. `load`: of the machine at the end."""

    case: str
    pause_s: float
    usual_s: float
    lost_steps: int
    outcome: str
    cause: Any
    decision: str | None
    load: float

    @property
    def text(self) -> str:
        """One line."""
        ended = f"{self.outcome}, {self.decision or 'no decision'}, {self.lost_steps} steps lost"
        return f"{self.case}: {self.pause_s:.1f} s, {ended}; step {self.usual_s:.2f} s, load {self.load:.1f}"


def plan(case: Case) -> TrialPlan:
    """Four nodes with a rank each train; one of them goes in a minute."""
    model = {"num_layers": 6, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 120,
             "padded_vocab_size": plan_of(SEED).model["padded_vocab_size"], "seq_length": 32}  # fmt: skip
    node = NODES.index(LEAVER) if case.who == "leaver's agent killed" else 0
    strike = Strike(
        victim=case.victim, action=case.action, after_s=0.3, lasts_s=LONG_S if case.action is Action.CUT else 1.0,
        back_s=5.0, pick=(node + 0.5) / len(NODES), point=case.point,
    )  # fmt: skip
    return replace(
        plan_of(SEED), seed=SEED, kind=Kind.DECISION, nodes=(1, 1, 1, 1), comes=(1,), nodes_min=3,
        layouts=((3, "DP3"), (4, "DP4")), model=model, global_batch=12, micro_batch=1, checkpoint_every=20, leave=1,
        notice_s=60.0, strikes=(strike,), build_s=0.0,
    )  # fmt: skip


def play(case: Case, *, keep: Path | None = None) -> Found:
    """One trial. Raises ValueError where it did not come to the strike."""
    with tempfile.TemporaryDirectory(prefix="liver-pause-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        chosen = plan(case)
        with ground_for(chosen, folder) as machines:
            trial = Trial(chosen, machines, lambda text: None)
            try:
                trial.play()
            finally:
                trial.facts.leaked += end_all(machines)
                if keep is not None:
                    _keep(folder, keep, trial.facts)
        return found_in(case, trial.facts)


def found_in(case: Case, facts: Facts) -> Found:
    """What the trail says. Raises ValueError where nothing was struck, or the job has not gone on."""
    record = record_of(facts)
    [struck] = facts.struck
    if struck["at"] is None or facts.problem:
        raise ValueError(f"{case.name}: {facts.problem or 'not struck'}")
    held = next(line for line in facts.trail if line["event"] == HELD)
    at = [line for line in facts.trail if line["event"] == "probe" and line["point"] == "boundary"]
    handoff = [line["handoff"] for line in at if line["pid"] == held["pid"] and line["at"] <= held["at"]][-1]
    began = max(line["at"] for line in at if line["handoff"] == handoff)
    before = [line for line in facts.trail if line["event"] == "applied" and line["at"] < began]
    generation = max(line["generation"] for line in before)
    after = [line for line in facts.trail if line["event"] == "batch" and line["generation"] > generation]
    world = min(line["generation"] for line in after)
    firsts: dict[int, float] = {}
    for line in after:
        if line["generation"] == world:
            firsts.setdefault(line["pid"], line["at"])
    times = sorted({line["step"]: line["at"] for line in before}.values())
    row = next((row for row in facts.handoffs if row["handoff_id"] == handoff), {})
    return Found(
        case.name,
        pause_s=max(firsts.values()) - began - (struck["at"] - held["at"]),
        usual_s=statistics.median(late - early for early, late in pairwise(times)),
        lost_steps=record["lost_steps_computed"],
        outcome=record["outcome"],
        cause=record["cause"],
        decision=row.get("decision"),
        load=os.getloadavg()[0],
    )


def _keep(folder: Path, keep: Path, facts: Facts) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    (keep / "facts.json").write_text(json.dumps(facts.as_json(), indent=1) + "\n")
    for log in (*folder.glob("logs/*.log"), *folder.glob("nodes/*/logs/*/*.log")):
        (keep / "-".join(log.relative_to(folder).parts)).write_bytes(log.read_bytes())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line a trial."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.pauses", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", default=[case.name for case in CASES], help="names of cases, or parts of them"
    )
    parser.add_argument("--keep", type=Path, help="folder for facts and logs")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    chosen = [case for case in CASES if any(part in case.name for part in options.only)]
    for number in range(options.repeats):
        for case in chosen:
            keep = None if options.keep is None else options.keep / f"{case.name} {number}"
            try:
                print(play(case, keep=keep).text, flush=True)
            except ValueError as error:
                print(error, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
