"""Plays trials and writes the report: `python -m tests.chaos.run --trials 40 --seed 1 --report FILE`.

One trial again: `--trials 1 --seed 17 --keep FOLDER`. Ctrl-C and SIGTERM end everything that was started.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.chaos.facts import Facts
from tests.chaos.ground import end_all, ground_for, possible_actions
from tests.chaos.judge import record_of
from tests.chaos.machines import DATABASE_FOLDER, FILLER
from tests.chaos.plan import TrialPlan, plan_of
from tests.chaos.report import broken_rules, load, save, summary, tree_now
from tests.chaos.side_by_side import COMMAND, play_side_by_side
from tests.chaos.trial import Trial

_OWN_PID = os.getpid()
NOT_KEPT = (DATABASE_FOLDER, "checkpoints", FILLER)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 when a trial broke a rule, 2 when the report cannot be read, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupted)
    # Megatron warns at every import about optional parts that are not here.
    warnings.simplefilter("ignore")
    try:
        records = load(options.report)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    seeds = range(options.seed, options.seed + options.trials)
    until = time.monotonic() + 60.0 * options.minutes

    tree = tree_now()

    def done(seed: int, record: dict[str, Any]) -> None:
        records[seed] = record | {"tree": tree}
        save(options.report, records)

    has = {seed for seed, record in records.items() if options.resume and tree and record.get("tree") == tree}
    due = (seed for seed in seeds if time.monotonic() <= until and seed not in has)
    failed: list[int] = []
    try:
        if options.workers > 1:
            failed = play_side_by_side(due, options.workers, command=_command(options), say=_say, done=done)
        else:
            for seed in due:
                done(seed, run_trial(plan_of(seed, possible_actions()), keep=options.keep, say=_say))
    except KeyboardInterrupt:
        print("interrupted; the trials before are in the report", flush=True)
        return 130
    played = [records[seed] for seed in seeds if seed in records]
    print(summary(played), flush=True)
    return 1 if failed or any(broken_rules(record) for record in played) else 0


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    return COMMAND if options.keep is None else (*COMMAND, "--keep", str(options.keep))


def run_trial(plan: TrialPlan, *, keep: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """The record of one trial. What it wrote is moved to `keep`/seed-N if it broke a rule."""
    folder = Path(tempfile.mkdtemp(prefix="liver-chaos-"))
    # The embedded PostgreSQL does not run as root: it must be able to enter the folder.
    folder.chmod(0o755)
    began = time.monotonic()
    strikes = ", ".join(f"{item.victim} {item.action} after {item.after_s:g} s" for item in plan.strikes)
    say(f"seed {plan.seed}: {plan.kind} on {plan.nodes} slots, {strikes}")
    broken = ["interrupted"]
    try:
        with ground_for(plan, folder) as machines:
            trial = Trial(plan, machines, lambda text: say(f"    {time.monotonic() - began:5.1f} s  {text}"))
            try:
                trial.play()
            finally:
                trial.facts.leaked += end_all(machines)
                if keep is not None:
                    _copy(folder, keep / f"seed-{plan.seed}")
        record = record_of(trial.facts)
        broken = broken_rules(record)
        say(f"    {time.monotonic() - began:5.1f} s  {record['outcome']}{': ' * bool(broken)}{', '.join(broken)}")
        if keep is not None:
            _write_facts(keep / f"seed-{plan.seed}", trial.facts, record)
        return record
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if keep is not None and not broken:
            shutil.rmtree(keep / f"seed-{plan.seed}", ignore_errors=True)


def _write_facts(folder: Path, facts: Facts, record: dict[str, Any]) -> None:
    (folder / "facts.json").write_text(json.dumps({"record": record, "facts": facts.as_json()}, indent=1) + "\n")


def _copy(folder: Path, kept: Path) -> None:
    """Before small disks, with what is on them, are taken away."""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept, ignore=lambda _, names: [name for name in names if _is_left_out(name)])


def _is_left_out(name: str) -> bool:
    return name in NOT_KEPT or name.endswith(".sock")


def _say(text: str) -> None:
    print(text, flush=True)


def _interrupted(number: int, frame: object) -> NoReturn:
    if os.getpid() != _OWN_PID:
        # pyroute2 forks, and ends its forks by this signal: they must not end what the trial has started.
        os._exit(128 + number)
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--trials", type=int, default=40, help="how many seeds")
    parser.add_argument("--seed", type=int, default=1, help="the first of them")
    parser.add_argument("--report", type=Path, default=Path("build/reports/chaos.json"))
    parser.add_argument("--resume", action="store_true", help="leave out seeds that the report has of this tree")
    parser.add_argument("--workers", type=int, default=1, help="trials at a time; a quiet trial takes half a core")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no trial after so many minutes")
    parser.add_argument("--keep", type=Path, help="folder for logs and facts of trials that broke a rule")
    return parser


if __name__ == "__main__":
    sys.exit(main())
