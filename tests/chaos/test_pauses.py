"""What a loss between boundary and decision adds to the pause, with real agents and ranks.

Where an agent sees a death the others hear of it. Of a machine that falls silent they do not, and wait until the limit
of docs/handoff.md section 5.
"""

from __future__ import annotations

import os

import pytest

from liver_core.handoff.ladder import PAUSE_LEAST_S, PAUSE_TIMES
from liver_core.rank.cutover.cutover_run import READING_SHARE
from tests.chaos.pauses import GONE, NOTHING, SEEN, SILENT, STORE, Case, Found, play
from tests.cluster import net_islands

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(400)]

ADDED_MOST_S = 2.0
RESTART_MOST_S = 8.0
"""Processes are started: 2 to 3 s, and several times that on a busy machine. Who waits needs 14 s."""


LOAD_MOST = 4.0
"""Above it processes wait for processors, and the pause says how long."""


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    load = os.getloadavg()[0]
    if load > LOAD_MOST:
        pytest.skip(f"these limits hold at a load of at most {LOAD_MOST:g}, it is {load:.1f}")


@pytest.fixture(scope="module")
def undisturbed() -> Found:
    found = play(NOTHING)
    assert (found.decision, found.lost_steps) == ("go", 0), found.text
    return found


@pytest.mark.parametrize("case", SEEN, ids=lambda case: case.name)
def test_a_death_that_an_agent_sees_adds_little_to_the_pause_and_costs_no_step(case: Case, undisturbed: Found):
    found = play(case)
    assert (found.decision in ("go", "go_redo"), found.lost_steps) == (True, 0), found.text
    assert found.pause_s <= undisturbed.pause_s + ADDED_MOST_S, (found.text, undisturbed.text)


def test_without_its_store_the_job_is_started_again_at_once():
    found = play(STORE)
    assert found.outcome == "restarted" and found.cause["what"] == "store", found.text
    assert found.pause_s <= RESTART_MOST_S, found.text


@pytest.mark.parametrize("case", [*GONE, *SILENT], ids=lambda case: case.name)
def test_a_machine_of_which_nobody_hears_any_more_is_waited_for_until_the_limit_and_costs_no_step(case: Case):
    if case in SILENT and (why_not := net_islands.why_not()):
        pytest.skip(f"network namespaces cannot be made here: {why_not}")
    found = play(case)
    assert (found.decision, found.lost_steps) == ("go_redo", 0), found.text
    limit_s = READING_SHARE * (PAUSE_LEAST_S + PAUSE_TIMES * found.usual_s)
    assert found.pause_s <= limit_s + ADDED_MOST_S, (found.text, limit_s)
