"""The reference job on a pretended GPU: build, steps, ring, and the next world built and allocated beside it.

In processes of their own, since what pretends stays. Nothing here says that a kernel runs or what it computes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PASSED_AT_ONCE_MOST = 16_384
"""Bytes: of a single parameter of this small model, where a build passes one through memory."""
RUNS = [("TP2xDP2", "TP2xPP2", "bf16"), ("TP2xPP2", "DP4", "fp32"), ("TP1", "TP2", "fp32")]
READS = "liver_core/rank/step_boundary.py read_numbers"
"""Where the host waits for the device in a step: for the loss and the gradient norm, at once."""


@pytest.fixture(
    scope="module",
    params=[RUNS[0], *(pytest.param(run, marks=pytest.mark.thorough) for run in RUNS[1:])],
    ids="-".join,
)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    return pretended(*request.param)


def pretended(*arguments: str) -> dict[str, Any]:
    """What a process of its own found."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.liver_core.device.fake_cuda", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_everything_that_trains_moves_or_comes_next_lies_on_the_device(found: dict[str, Any]) -> None:
    where = found["devices"]
    assert where.pop("counters") == ["cpu"], "the CPU alone writes them"
    assert where.pop("buffers") in ([], ["cuda:0"]) and where.pop("next buffers") in ([], ["cuda:0"])
    assert where.pop("next moments") == [], "moments are attached at the cutover"
    assert len(where) == 8
    assert {name: on for name, on in where.items() if on != ["cuda:0"]} == {}
    phases = ("build", "first_step", "step", "published_step", "next_build", "allocate", "move_in")
    assert all(found[phase]["strays"] == {} for phase in phases)


def test_the_host_reads_from_the_device_once_in_a_step_and_never_in_a_build(found: dict[str, Any]) -> None:
    for phase in ("first_step", "step", "published_step"):
        assert (found[phase]["reads"], found[phase]["copies"]) == ({READS: 1}, {}), phase
    for phase in ("build", "next_build", "allocate", "move_in"):
        assert (found[phase]["reads"], found[phase]["copies"]) == ({}, {}), phase


def test_the_next_world_takes_no_memory_until_it_is_allocated_and_then_what_was_planned(found: dict[str, Any]) -> None:
    assert found["next_build"]["held_bytes"] == 0
    assert found["next_build"]["peak_bytes"] <= PASSED_AT_ONCE_MOST
    assert found["allocated_bytes"] + found["move_in"]["device_bytes"] == found["planned_bytes"]


def test_what_waits_in_host_memory_takes_what_was_planned_there_and_nothing_once_it_has_moved_in(
    found: dict[str, Any],
) -> None:
    taken, planned = found["waiting"]
    assert taken == planned > 0 and found["left_on_host"] == 0
    assert found["waiting_devices"] == ["cpu", "cuda:0"]
    assert found["devices"]["next regions"] == ["cuda:0"]


def test_the_present_world_and_its_ring_take_what_the_pure_half_counts_for_the_model(found: dict[str, Any]) -> None:
    taken, planned = found["present_bytes"]
    assert taken == planned <= found["fullest_bytes"][0]
    assert found["planned_bytes"] <= found["fullest_bytes"][1]
    assert found["ring_bytes"][0] == found["ring_bytes"][1]


def test_the_job_that_people_copy_trains_on_the_device_though_its_samples_are_on_the_host() -> None:
    found = pretended("example")
    assert found["loss"] == "cuda:0"
    assert found["step"] == {"reads": {}, "copies": {}, "strays": {}}
