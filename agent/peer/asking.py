"""What the job's other agents tell when they are asked: which numbers they know, and whether they hear the service.

An agent without a rank asks how long a step takes. One that leads asks whether it hears enough of them: an agent that
is cut off would open a handoff that nobody else can join, under a number that another one, which leads meanwhile, takes
as well. Whoever hears more than half of the nodes is not cut off alone. Of two nodes nobody can tell which one is.
"""

import asyncio
import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from agent.peer.peer_client import PeerClient, PeerUnreachable
from agent.protocol.step_leases import highest_of
from liver_core.layout.limits import listed

ASKED_MAX = 8
"""Of the agents of a large job so many are asked, chosen at random."""
STEP_FIELD = "step_s"
STEP_WITHIN_S = 1.0
"""How long an agent waits for the first answer that tells it how long a step takes."""


@dataclass(frozen=True, slots=True)
class PeersHeard:
    """What the others answered. `too_few`: why this node may be the one that is cut off, empty if enough answered.
    `highest`: the greatest number that those who answered have seen used; 0 where none was asked."""

    too_few: str = ""
    highest: int = 0


async def ask_others(peers: PeerClient, job_id: str, own: str, nodes: Collection[str]) -> PeersHeard:
    """Ask the agents of these nodes of the job. It takes as long as the answers that are needed; where too few come, as
    long as `peers` waits for one."""
    others = sorted(set(nodes) - {own})
    if len(others) < 2:
        return PeersHeard()
    asked = random.sample(others, min(ASKED_MAX, len(others)))
    waiting = [asyncio.create_task(_highest(peers, job_id, name)) for name in asked]
    needed, answers = (len(asked) + 1) // 2, dict[str, int]()
    try:
        for each in asyncio.as_completed(waiting):
            name, highest = await each
            if highest is not None:
                answers[name] = highest
            if len(answers) >= needed:
                return PeersHeard(highest=max(answers.values()))
    finally:
        for task in waiting:
            task.cancel()
    missed = sorted(set(asked) - set(answers))
    return PeersHeard(f"{own} may be cut off: no answer from {listed(missed)}", max(answers.values(), default=0))


async def status_of(peers: PeerClient, job_id: str, node_id: str) -> dict[str, Any] | None:
    """What this agent tells of the job, None without an answer."""
    try:
        return await peers.status(job_id, node_id)
    except PeerUnreachable:
        return None


async def ask_step_s(peers: PeerClient, job_id: str, nodes: Collection[str]) -> float:
    """The usual seconds of a step, by the first of these nodes' agents that tells them; all ranks of a world step
    together. 0 where none does within `STEP_WITHIN_S`."""
    asked = random.sample(sorted(nodes), min(ASKED_MAX, len(nodes)))
    waiting = [asyncio.create_task(status_of(peers, job_id, name)) for name in asked]
    try:
        for each in asyncio.as_completed(waiting, timeout=STEP_WITHIN_S):
            told = (await each or {}).get(STEP_FIELD)
            if isinstance(told, int | float) and told is not True and 0 < told < math.inf:
                return told
    except TimeoutError:
        return 0.0
    finally:
        for task in waiting:
            task.cancel()
    return 0.0


async def _highest(peers: PeerClient, job_id: str, name: str) -> tuple[str, int | None]:
    """The number that this agent tells; None without an answer. One that tells none knows of none."""
    answer = await status_of(peers, job_id, name)
    return name, None if answer is None else highest_of(answer)
