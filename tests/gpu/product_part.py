"""Part 7: the whole product beside the device: a real service, agents of four nodes, and a job that loses a node to a
notice, gains one, and loses two; then the same job undisturbed, to compare with."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from deploy.demo import demo_job
from deploy.demo.compare import WithoutAgents
from deploy.demo.display import open_display
from deploy.demo.report import against_undisturbed, losses_differ
from deploy.demo.run import live
from deploy.local.processes import DemoFailed, Processes
from tests.cluster.undisturbed import undisturbed_samples
from tests.gpu.check import Finding, Verdict

HANDOFFS = 3
COMPARED = 120
"""Steps whose losses are compared: a job that shares its GPU makes hundreds while a node starts."""
KEPT = ("from", "to", "rung", "state", "reason", "pause_s", "pause_steps", "lost_s", "notice_to_safe_s", "phases_s")


def run(device: str) -> Finding:
    with tempfile.TemporaryDirectory(prefix="liver-product-") as folder:
        # The embedded PostgreSQL does not run as root: it must be able to enter the folder.
        Path(folder).chmod(0o755)
        processes = Processes(Path(folder) / "logs")
        try:
            return judged(Path(folder), processes, device)
        except DemoFailed as error:
            print_logs(Path(folder) / "logs")
            return Finding(Verdict.FAILED, str(error))
        finally:
            processes.close()


def judged(folder: Path, processes: Processes, device: str) -> Finding:
    display = open_display(plain=True)
    job = demo_job.DENSE
    lived = live(folder, processes, display, device, job)
    tracker = lived.acts.tracker
    last = tracker.last_step
    alone = WithoutAgents(processes, folder / "compare", display, job, lived.data_prefix, device)
    same, other = alone.undisturbed(min(last, COMPARED))
    compared = against_undisturbed(tracker.steps, same, other)
    handoffs = [{name: item.get(name) for name in KEPT} for item in tracker.handoffs]
    wrong = losses_differ(compared)
    _, digest = undisturbed_samples(last, demo_job.MICRO_BATCH, demo_job.GLOBAL_BATCH)[last]
    if tracker.steps[last]["sample_digest"] != f"{digest:016x}":
        wrong.append("the samples trained on are not those of the first steps in their order")
    wrong += [f"{item['from']} to {item['to']}: {item['reason']}" for item in handoffs if item["state"] != "active"]
    if len(handoffs) < HANDOFFS:
        wrong.append(f"{len(handoffs)} handoffs, not {HANDOFFS}")
    found = {"handoffs": handoffs, "steps": last, "kinds": lived.kinds, "undisturbed": compared}
    return Finding(Verdict.FAILED if wrong else Verdict.PASSED, "; ".join(wrong) or said(handoffs, last), found)


def said(handoffs: list[dict[str, Any]], steps: int) -> str:
    pauses = ", ".join(
        f"{item['from']} to {item['to']} {item['rung']} {item['pause_s'] * 1e3:.0f} ms ({item['pause_steps']:.2f})"
        for item in handoffs
    )
    compared = f"samples of all and losses of the first {min(steps, COMPARED)} as undisturbed"
    return f"{steps} steps, none twice, {compared}; pauses (in steps): {pauses}"


def print_logs(folder: Path) -> None:
    """Into the log of the part: the folder does not outlive it."""
    for path in sorted(folder.glob("*.log")):
        print(f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-30:], sep="\n")
