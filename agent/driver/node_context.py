"""What every job driver of a node shares: who the node is, where things are kept, and how to reach others."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from agent.journal import Journal
from agent.link.outbox import Outbox
from agent.notices.warning_budget import WarningBudget
from agent.peer.peer_client import PeerClient
from agent.protocol.peer import Envelope, PeerKind, RankMeasures
from agent.supervisor.stores import Stores
from agent.supervisor.supervisor import Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """Seconds, bytes per second. `bandwidth_bytes_per_s`, `prepare_s`, and `endpoints_s`, which is all that a rescue
    prepares, are guesses until a handoff measured them.

    Streaming is guessed to get `stream_share` of the bandwidth, and a replay to take `replay_share` of a step.
    """

    handoff_deadline_s: float = 180.0
    start_deadline_s: float = 240.0
    stop_grace_s: float = 20.0
    suspend_checkpoint_s: float = 10.0
    abort_grace_s: float = 10.0
    peer_lost_s: float = 20.0
    lead_turn_s: float = 3.0
    forward_again_s: float = 2.0
    forward_patience_s: float = 5.0
    missing_rank_s: float = 15.0
    bandwidth_bytes_per_s: float = 500e6
    prepare_s: float = 5.0
    endpoints_s: float = 1.0
    margin_s: float = 2.0
    stream_share: float = 0.5
    replay_share: float = 0.1
    one_sided: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This node. `incarnation` grows with every start of the agent; `service_is_there` tells how the last sync went."""

    node_id: str
    private_address: str
    slots: int
    incarnation: int
    incarnation_id: UUID
    run_dir: str
    journal: Journal
    supervisor: Supervisor
    stores: Stores
    peers: PeerClient
    outbox: Outbox
    budget: WarningBudget
    poke: Callable[[], None]
    mention: Callable[[], None]
    service_is_there: Callable[[], bool]
    now: Callable[[], float]
    settings: DriverSettings = field(default_factory=DriverSettings)

    def envelope(
        self,
        job_id: str,
        receiver: str,
        kind: PeerKind,
        body: dict[str, Any],
        *,
        slot: int | None = None,
        measured: RankMeasures | None = None,
    ) -> Envelope:
        """A message of this node to another agent of the job."""
        return Envelope(
            sender=self.node_id,
            receiver=receiver,
            agent_incarnation=self.incarnation_id,
            job_id=job_id,
            issued_utc=datetime.fromtimestamp(self.now(), UTC),
            kind=kind,
            slot=slot,
            body=body,
            measured=measured,
        )
