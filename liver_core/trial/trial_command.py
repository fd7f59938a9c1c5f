"""The child process of `liver jobs try`: a plan as JSON on standard input, findings as JSON lines on standard output.

    python -m liver_core.trial.trial_command < plan.json

What the job itself prints goes to standard error. The status is 1 when something is missing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def main() -> int:
    """Read the plan, make the checks, say what was found."""
    started, content = time.monotonic(), json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    timeout_s = content.pop("timeout_s")
    _prepare()
    from liver_core.layout import ParallelLayout
    from liver_core.trial.findings import Findings, warning
    from liver_core.trial.layout_choice import RANKS_MAX
    from liver_core.trial.other_layout import fork, try_layout
    from liver_core.trial.single_process import ONE_RANK, TrialPlan

    plan = TrialPlan(**{**content, "layouts": tuple(content["layouts"])})
    reading, writing = os.pipe()
    # Ranks are forked from a process that never starts a thread, so the checks of one rank have a child of their own.
    child = fork(lambda: _one_process(plan, writing, output.write))
    os.close(writing)
    with os.fdopen(reading) as answer:
        expected: dict[str, Any] = json.loads(answer.readline() or "{}")
    _, status = os.waitpid(child, 0)
    if not expected:
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            output.write(json.dumps({"died": -code}) + "\n")
        return 1
    findings = Findings(output.write)
    layout = expected["layout"]
    if not layout:
        text = f"none was run: no layout of several ranks can run in {RANKS_MAX} processes here; --layout names one"
        findings.add("other layout", warning(text))
    elif ParallelLayout.parse(layout) != ONE_RANK:
        findings.say({"started": "other layout"})
        left_s = timeout_s - (time.monotonic() - started)
        findings.add(
            "other layout", try_layout(replace(plan, layout=layout), expected, timeout_s=max(1.0, left_s - 2.0))
        )
        findings.say({"ran": ["TP1", layout]})
    return int(expected["missing"] or findings.any_missing)


def _one_process(plan: Any, writing: int, write: Callable[[str], Any]) -> None:
    from liver_core.trial.findings import Findings
    from liver_core.trial.single_process import JobTrial
    from liver_core.worlds.megatron import prepare_process

    prepare_process()
    findings = Findings(write)
    trial = JobTrial(plan, findings)
    if trial.run():
        steps = {"losses": [step.loss for step in trial.steps], "norms": [step.norm for step in trial.steps]}
        told = {"missing": findings.any_missing, "draws": trial.draws, "layout": trial.layout, **steps}
        os.write(writing, json.dumps(told).encode() + b"\n")


def _prepare() -> None:
    """What ranks of an agent are forked from (agent.worker.preload): patches for machines without a GPU come first."""
    # Megatron and torch warn about each other; what the job itself warns of stays to be seen.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    import torch

    from liver_core.worlds import cpu_compat

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        cpu_compat.apply()


if __name__ == "__main__":
    sys.exit(main())
