"""A minute without the service, the database or both, while a job trains and every node of its world is taken away:
`python -m tests.chaos.outages [--seconds 60] [--without service database both]`.

Two nodes train, two are spare. The first goes, then the second, both within the outage: generation 1, 2, 3 without one
common node of the first and the last. Afterwards the service must know all of it, and must have suspended nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos.ground import end_all, ground_for
from tests.chaos.judge import record_of
from tests.chaos.machines import Machines
from tests.chaos.plan import Kind, TrialPlan, plan_of
from tests.chaos.trial import Trial

WITHOUT = ("service", "database", "both")
FIRST_NOTICE_S, GAP_S, NOTICE_S = 5.0, 22.0, 25.0
KNOWN_S = 60.0
_STEP = re.compile(r"^step (\d+) generation (\d+) ")


def plan(seed: int) -> TrialPlan:
    """Two of four nodes train. Nothing is struck but what the outage is."""
    nodes = (1, 1, 1, 1)
    model = {"num_layers": 6, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 120,
             "padded_vocab_size": plan_of(seed).model["padded_vocab_size"], "seq_length": 32}  # fmt: skip
    return replace(
        plan_of(seed), seed=seed, kind=Kind.REPLACEMENT, nodes=nodes, comes=(), nodes_min=2, layouts=((2, "DP2"),),
        model=model, global_batch=12, micro_batch=1, checkpoint_every=20, leave=2, notice_s=NOTICE_S, gap_s=GAP_S,
        strikes=(), build_s=0.0,
    )  # fmt: skip


class Outage(Trial):
    """One outage, and what the service knows afterwards."""

    def __init__(self, machines: Machines, *, without: str, seconds: float) -> None:
        super().__init__(plan(1), machines, print)
        self._without, self._seconds = without, seconds
        self.found: dict[str, Any] = {"without": without, "seconds": seconds}

    def _run_scenario(self) -> None:
        assert self._state() == "running"
        world = list(self._job["nodes"])
        self.found["first_world"] = world
        self._trigger()
        ended = threading.Event()
        thread = threading.Thread(target=self._be_away, args=(ended,), daemon=True)
        thread.start()
        began = time.monotonic()
        self._later += [
            (began + FIRST_NOTICE_S + number * GAP_S, lambda node=node: self._give_notice(node))
            for number, node in enumerate(world)
        ]
        try:
            self._until("the outage to be over", self._seconds + KNOWN_S, ended.is_set)
        finally:
            thread.join(KNOWN_S)
        self.found["steps_before_its_end"] = self._applied()

    def _be_away(self, ended: threading.Event) -> None:
        machines, pause = self._machines, threading.Event()
        stopped: list[int] = []
        try:
            if self._without in ("service", "both"):
                pid = machines.service_pid()
                assert pid is not None
                _send([pid], signal.SIGKILL)
            if self._without in ("database", "both"):
                stopped = _send(machines.database_pids(), signal.SIGSTOP)
                assert stopped, "no process of the database"
            pause.wait(self._seconds)
            _send(stopped, signal.SIGCONT)
            if self._without in ("service", "both"):
                machines.restart_service()
        finally:
            ended.set()

    def _stop_job(self) -> None:
        """Before the end: what the service knows of all that."""
        self._until("both handoffs to be known", KNOWN_S, lambda: len(self._active()) >= 2)
        self.found["last_world"] = list(self._job["nodes"])
        self.found["handoffs"] = [
            {name: row.get(name) for name in ("generation", "state", "pause_s", "trigger")} for row in self._active()
        ]
        found = self._get(f"/api/v1/jobs/{self._roles.job_id}/generations") or []
        self.found["generations"] = [{"generation": row["generation"], "source": row["source"]} for row in found]
        super()._stop_job()
        self.found["ledger"] = self._check_ledger()

    def _active(self) -> list[dict[str, Any]]:
        found = self._get("/api/v1/handoffs", job_id=self._roles.job_id, state="active") or []
        return sorted(found, key=lambda row: row["generation"])

    def _check_ledger(self) -> dict[str, Any]:
        """What `liver ledger check` says of one rank's lines of each step."""
        lines: dict[tuple[int, int], str] = {}
        for path in sorted(self._folder.glob(f"nodes/*/logs/{self._roles.job_id}/*.log")):
            for line in path.read_text(errors="replace").splitlines():
                if step := _STEP.match(line):
                    lines.setdefault((int(step[2]), int(step[1])), line)
        log = self._folder / "training.log"
        log.write_text("".join(f"{lines[key]}\n" for key in sorted(lines)))
        command = [sys.executable, "-m", "service.cli.main", "ledger", "check", self._roles.job_id, "--log", str(log)]
        command += ["--service-url", self._machines.url, "--json"]
        command += ["--token-file", str(self._folder / "tokens" / "operator.token")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        try:
            found = json.loads(done.stdout)
        except ValueError:
            return {"status": done.returncode, "said": (done.stdout + done.stderr)[-500:]}
        return {"status": done.returncode, **found}


def broken(found: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """What is not as it must be, in plain words."""
    rules = {
        "it went wrong: " + record["problem"]: not record["problem"],
        "steps were lost": record["lost_steps_computed"] == 0,
        "samples are wrong": record["samples_ok"],
        "a generation was used twice": not record["generation_reused"],
        "something was left behind": not record["leaked"],
        "the job was started again": [row["source"] for row in found.get("generations", ())].count("handoff")
        == len(found.get("generations", ())) - 1,
        "the worlds have a node in common": not set(found.get("first_world", "?"))
        & set(found.get("last_world", found.get("first_world", "?"))),
        "the ledger differs from the log": found.get("ledger", {}).get("status") == 0,
    }
    return [what for what, holds in rules.items() if not holds]


def play(without: str, *, seconds: float, keep: Path | None) -> dict[str, Any]:
    """One outage; everything that was started has ended."""
    folder = Path(tempfile.mkdtemp(prefix="liver-outage-"))
    folder.chmod(0o755)
    try:
        with ground_for(plan(1), folder) as machines:
            outage = Outage(machines, without=without, seconds=seconds)
            try:
                outage.play()
            finally:
                outage.facts.leaked += end_all(machines)
                if keep is not None:
                    shutil.copytree(folder / "logs", keep / without, dirs_exist_ok=True)
        record = record_of(outage.facts)
        return {**outage.found, **record, "broken": broken(outage.found, record)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _send(pids: list[int], number: signal.Signals) -> list[int]:
    """Those that got it. The database's process of a connection ends with the service that was killed."""
    reached: list[int] = []
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            reached.append(pid)
    return reached


def main() -> int:
    """0, or 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.outages", description=__doc__)
    parser.add_argument("--without", nargs="*", choices=WITHOUT, default=WITHOUT)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--report", type=Path, default=Path("build/reports/outages.json"))
    parser.add_argument("--keep", type=Path, help="folder for logs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = [play(without, seconds=options.seconds, keep=options.keep) for without in options.without]
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(found, indent=2) + "\n")
    for item in found:
        print(f"without {item['without']} for {item['seconds']:g} s: {'; '.join(item['broken']) or 'as it must be'}")
    return 1 if any(item["broken"] for item in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
