"""Victims are found in the journals of agents, as the agents write them."""

from pathlib import Path
from typing import Any

import pytest

from agent.journal import Journal, Table
from deploy.local.cluster import LocalNode
from deploy.local.processes import Processes
from tests.chaos.machines import Machines
from tests.chaos.plan import Victim
from tests.chaos.victims import Roles, find, leads_now

JOB = "chaos-1-abcd"
ROLES = Roles(JOB, leavers=["node-2"], newcomers=["node-3"])


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    """Three nodes with a rank each; the first two have hosted a store, and know of two generations."""
    made = Machines(tmp_path, Processes(tmp_path / "logs"))
    for number, node in enumerate(("node-1", "node-2", "node-3")):
        nobody: Any = None
        made.nodes[node] = LocalNode(node, nobody, nobody, "")
        journal = Journal(made.run_dir(node)).open()
        journal.put(Table.RANK, f"{JOB}/0", {"process": process(10 + number), "rank": number})
        journal.put(Table.RANK, "another-job/0", {"process": process(20 + number), "rank": 7})
        journal.put(Table.ZYGOTE, "zygote", process(30 + number))
        journal.put(Table.STORE, f"{JOB}/{number + 1}", {"process": process(40 + number)})
        if number == 2:
            journal.delete(Table.STORE, f"{JOB}/3")
        journal.put(Table.ORDERS, JOB, {"generation": number + 1, "lead_order": [node, "node-9"]})
        journal.close()
    return made


def process(pid: int) -> dict[str, Any]:
    return {"pid": pid, "start_time": 1.0}


@pytest.mark.parametrize(
    ("victim", "node", "pid"),
    [
        (Victim.SURVIVOR, "node-1", 10),
        (Victim.LEAVER, "node-2", 11),
        (Victim.MACHINE, "node-2", 11),
        (Victim.NEWCOMER, "node-3", 12),
        (Victim.STORE, "node-2", 41),
    ],
)
def test_a_victim_is_who_its_name_says(machines: Machines, victim: Victim, node: str, pid: int):
    found = find(victim, machines, ROLES, 0.99)
    assert found is not None
    assert (found.node, found.processes[0].pid) == (node, pid)


def test_one_of_several_is_picked_by_its_share(machines: Machines):
    picked = [find(Victim.ZYGOTE, machines, ROLES, pick) for pick in (0.0, 0.5, 0.99)]
    assert [found.processes[0].pid for found in picked if found] == [30, 31, 32]


def test_there_is_no_victim_while_there_is_none(machines: Machines):
    assert find(Victim.NEWCOMER, machines, Roles(JOB), 0.5) is None
    assert find(Victim.SERVICE, machines, ROLES, 0.5) is None
    assert find(Victim.DATABASE, machines, ROLES, 0.5) is None


def test_the_node_that_leads_an_open_handoff_of_the_job_is_found_in_its_journal(machines: Machines):
    journals = {"node-1": ("active", JOB), "node-2": ("streaming", JOB), "node-3": ("streaming", "another-job")}
    assert leads_now(machines, JOB) is None
    for node, (state, job_id) in journals.items():
        journal = Journal(machines.run_dir(node)).open()
        journal.put(Table.HANDOFF, "id", {"job_id": job_id, "state": state})
        journal.close()
    assert leads_now(machines, JOB) == "node-2"
