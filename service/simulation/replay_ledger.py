"""The ledger of a replay, by the rules with which the service accounts real time: each lease is covered once. Pure."""

from datetime import datetime, timedelta

from service.ledger.rules import Part, Spent, painted
from service.ledger.tables import Cause
from service.simulation.cluster_replay import START_UTC, ClusterRun

JOB = "replayed"


def ledger_of(run: ClusterRun) -> dict[str, list[list[Part]]]:
    """Node -> its leases, each as parts without gaps: idle but for what the node was used for."""
    found: dict[str, list[list[Part]]] = {}
    for lease in sorted(run.leases, key=lambda each: (each.node, each.begin_s)):
        used = [
            Part(_utc(world.begin_s), _utc(world.end_s), Spent(world.cause, JOB, world.generation))
            for world in run.worlds
            if lease.node in world.nodes and world.begin_s < lease.end_s and world.end_s > lease.begin_s
        ]
        whole = Part(_utc(lease.begin_s), _utc(lease.end_s), Spent(Cause.IDLE))
        found.setdefault(lease.node, []).append(painted(whole, used))
    return found


def hours_by_cause(run: ClusterRun) -> dict[str, float]:
    """Node-hours that were paid for, by cause."""
    hours: dict[str, float] = {}
    for leases in ledger_of(run).values():
        for part in (part for lease in leases for part in lease):
            name = part.spent.cause.value
            hours[name] = hours.get(name, 0.0) + (part.ends_at - part.starts_at).total_seconds() / 3_600.0
    return hours


def _utc(at_s: float) -> datetime:
    return START_UTC + timedelta(seconds=at_s)
