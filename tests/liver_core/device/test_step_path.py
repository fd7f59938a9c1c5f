"""What runs in a training step, beside it or in the pause neither reads from a device nor starts threads in passing.

A read of one number makes the host wait for all that the device has to do; a tensor made without a device lies on the
host; a thread without a queue of its own works in that of training. What is meant stands here, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3] / "liver_core"

STEP_PATH = (
    "certificate/on_device.py",
    "rank/active_world.py",
    "rank/after_step.py",
    "rank/checkpoint_writer.py",
    "rank/cutover",
    "rank/droppable_step.py",
    "rank/loop.py",
    "rank/pending_handoff.py",
    "rank/prepare",
    "rank/retire.py",
    "rank/step_boundary.py",
    "rank/step_lease.py",
    "rank/stream",
    "state/buckets.py",
    "state/host_memory.py",
    "state/live_state.py",
    "state/optimizer_step.py",
    "streaming/counters.py",
    "streaming/reader.py",
    "streaming/ring.py",
    "streaming/window_step.py",
    "training/megatron_job.py",
)
READS = {"item", "cpu", "tolist", "numpy"}
FACTORIES = {"tensor", "zeros", "ones", "full", "empty", "arange", "randn", "rand", "eye", "linspace"}

MEANT = {
    "rank/checkpoint_writer.py is_free tensor": "flags, compared over gloo where a checkpoint is due",
    "rank/checkpoint_writer.py is_free tolist": "flags, compared over gloo where a checkpoint is due",
    "rank/cutover/cutover_run.py _barrier item": "a vote over gloo, in host memory",
    "rank/cutover/cutover_run.py _barrier tensor": "a vote over gloo, in host memory",
    "rank/cutover/cutover_run.py _counted zeros": "sums of a certificate, compared over gloo",
    "rank/cutover/cutover_run.py _sent tensor": "sums of a certificate, compared over gloo",
    "rank/cutover/source_side.py _publish_certificate tolist": "sums of a certificate, in host memory",
    "rank/cutover/source_side.py words tensor": "sums of a certificate, compared over gloo",
    "rank/cutover/vote.py count tensor": "flags, compared over gloo",
    "rank/cutover/vote.py count tolist": "flags, compared over gloo",
    "rank/cutover/vote.py differing tolist": "sums of a certificate, in host memory",
    "rank/step_boundary.py agree tensor": "the agreement of a boundary goes over gloo",
    "rank/step_boundary.py agree tolist": "the agreement of a boundary goes over gloo",
    "rank/step_boundary.py start_total tensor": "the totals of a step go over gloo",
    "rank/step_boundary.py wait tolist": "the totals of a step go over gloo",
    "streaming/counters.py __init__ numpy": "counters lie in host memory",
    "streaming/reader.py _look numpy": "counters land in host memory",
    "streaming/reader.py _read_gradients numpy": "headers land in host memory",
    "streaming/ring.py __init__ numpy": "headers lie in host memory",
}
"""'file function call' -> why it is no read from a device, or no tensor that should lie on one."""


def test_the_step_path_reads_nothing_from_a_device_and_places_every_tensor():
    found = {f"{path} {function} {name}" for path, function, name in _calls() if name not in ("Thread", "Timer")}
    assert found - MEANT.keys() == set(), "a read from the device or a tensor without one, in the step path"
    assert MEANT.keys() - found == set(), "an exception that nothing needs"


def test_threads_of_the_step_path_have_a_queue_of_their_own():
    assert [call for call in _calls() if call[2] in ("Thread", "Timer")] == []


def test_only_the_room_of_the_device_synchronizes():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        if any(isinstance(node, ast.Attribute) and node.attr == "synchronize" for node in nodes):
            found.append(str(path.relative_to(ROOT)))
    assert found == ["device/waits.py", "worlds/cpu_compat.py"]


def _calls() -> Iterator[tuple[str, str, str]]:
    """(file, function, name) of each call that is looked for."""
    for place in STEP_PATH:
        path = ROOT / place
        assert path.exists(), place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for function, call in _in_functions(ast.parse(file.read_text()), "module"):
                name = _looked_for(call)
                if name:
                    yield str(file.relative_to(ROOT)), function, name


def _in_functions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Call):
            yield inside, child
        yield from _in_functions(child, inside)


def _looked_for(call: ast.Call) -> str:
    if not isinstance(call.func, ast.Attribute):
        return ""
    name, of = call.func.attr, call.func.value
    owner = of.id if isinstance(of, ast.Name) else ""
    if name in READS and not call.args:
        return name
    if owner == "torch" and name in FACTORIES and "device" not in {keyword.arg for keyword in call.keywords}:
        return name
    return name if owner == "threading" and name in ("Thread", "Timer") else ""
