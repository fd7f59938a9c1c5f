"""Finds the processes of a victim in a running trial, from the journals of its agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.supervisor.process import ProcessIdentity, read_start_time
from tests.chaos.machines import Machines
from tests.chaos.plan import Victim

OPEN = ("preparing", "streaming", "ready")
"""States of a handoff before its boundary."""


@dataclass(slots=True)
class Roles:
    """Who is who: nodes that got a notice, and nodes that came after the start."""

    job_id: str = ""
    leavers: list[str] = field(default_factory=list)
    newcomers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Found:
    """What a victim is at this moment. `rank`: in its world, where it is a rank."""

    node: str
    processes: tuple[ProcessIdentity, ...]
    rank: int | None = None


def find(victim: Victim, machines: Machines, roles: Roles, pick: float) -> Found | None:
    """One of the victim's candidates; None while there is none."""
    journals = {node: machines.journal(node) for node in tuple(machines.nodes)}
    found = _candidates(victim, machines, journals, roles)
    return found[int(pick * len(found))] if found else None


def _candidates(victim: Victim, machines: Machines, journals: dict[str, Any], roles: Roles) -> Sequence[Found]:
    ranks = _ranks(journals, roles.job_id)
    members = list(dict.fromkeys(found.node for found in ranks))
    match victim:
        case Victim.SERVICE:
            return _running("", machines.service_pid())
        case Victim.DATABASE:
            return _running("", *machines.database_pids())
        case Victim.AGENT | Victim.LEAD:
            nodes = members if victim is Victim.AGENT else _lead(journals, roles.job_id)
            return [found for node in nodes for found in _running(node, machines.agent_pid(node))]
        case Victim.SURVIVOR:
            return [found for found in ranks if found.node not in (*roles.leavers, *roles.newcomers)]
        case Victim.LEAVER | Victim.MACHINE:
            return [found for found in ranks if found.node in roles.leavers]
        case Victim.NEWCOMER:
            return [found for found in ranks if found.node in roles.newcomers]
        case Victim.STORE:
            return _newest_store(journals, roles.job_id)
        case Victim.ZYGOTE:
            records = [(node, journals[node].get("zygote", {}).get("zygote")) for node in members]
            return [Found(node, (ProcessIdentity.from_json(record),)) for node, record in records if record]


def _running(node: str, *pids: int | None) -> list[Found]:
    started = [(pid, read_start_time(pid)) for pid in pids if pid is not None]
    found = tuple(ProcessIdentity(pid, start_time) for pid, start_time in started if start_time is not None)
    return [Found(node, found)] if found else []


def _ranks(journals: dict[str, Any], job_id: str) -> list[Found]:
    return [
        Found(node, (ProcessIdentity.from_json(record["process"]),), record["rank"])
        for node, journal in journals.items()
        for key, record in journal.get("rank", {}).items()
        if key.rpartition("/")[0] == job_id
    ]


def _lead(journals: dict[str, Any], job_id: str) -> list[str]:
    """The first of the lead order, as the agents have it from the service."""
    orders = [order for journal in journals.values() if (order := journal.get("orders", {}).get(job_id))]
    newest = max(orders, key=lambda order: order.get("generation") or 0, default={})
    return [node for node in newest.get("lead_order", ()) if node in journals][:1]


def leads_now(machines: Machines, job_id: str) -> str | None:
    """The node that leads an open handoff of the job, by its own journal; None while none does."""
    for node in tuple(machines.nodes):
        for record in machines.journal(node).get("handoff", {}).values():
            if record["job_id"] == job_id and record["state"] in OPEN:
                return node
    return None


def _newest_store(journals: dict[str, Any], job_id: str) -> list[Found]:
    stores = [
        (int(key.rpartition("/")[2]), Found(node, (ProcessIdentity.from_json(record["process"]),)))
        for node, journal in journals.items()
        for key, record in journal.get("store", {}).items()
        if key.rpartition("/")[0] == job_id
    ]
    return [max(stores, key=lambda item: item[0])[1]] if stores else []
