"""What every job driver of a node shares: who the node is, where things are kept, and how to reach others."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from agent.journal import Journal
from agent.link.outbox import Outbox
from agent.notices.warning_budget import WarningBudget
from agent.peer.peer_client import PeerClient
from agent.protocol.jobfile import JobFile
from agent.protocol.peer import Envelope, PeerBody
from agent.protocol.worker import RankSpec
from agent.supervisor.stores import Stores
from agent.supervisor.stream_relays import StreamRelays
from agent.supervisor.supervisor import Supervisor
from agent.supervisor.wire_checks import WireChecks
from liver_core.handoff import Order
from liver_core.steady_clock import SteadyClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This node. `incarnation` grows with every start of the agent; `service_is_there` tells how the last sync went,
    `service_heard_at` when the last answered report was sent (time.monotonic), and `look_for_service` has the next one
    sent soon."""

    node_id: str
    private_address: str
    slots: int
    incarnation: int
    incarnation_id: UUID
    journal: Journal
    supervisor: Supervisor
    stores: Stores
    relays: StreamRelays
    wires: WireChecks
    peers: PeerClient
    outbox: Outbox
    budget: WarningBudget
    sync_soon: Callable[[], None]
    sync_with_progress: Callable[[], None]
    service_url: str
    service_is_there: Callable[[], bool]
    service_heard_at: Callable[[], float]
    look_for_service: Callable[[], None]
    clock: SteadyClock

    def now(self) -> float:
        """Seconds since 1970, UTC, by this agent's clock."""
        return self.clock.now()

    def rank_spec(self, slot: int, order: Order, spec: JobFile, number: str) -> RankSpec:
        """What the process of a slot is started with; `number` tells it from the job's other processes here."""
        return RankSpec(
            node_id=self.node_id,
            slot=slot,
            order=order,
            clock_zero=self.clock.zero,
            spec=spec,
            private_address=self.private_address,
            socket_path=self.supervisor.socket_path("r", order.job_id, number),
        )

    def envelope(self, job_id: str, receiver: str, body: PeerBody) -> Envelope:
        """A message of this node to another agent of the job."""
        return Envelope(
            sender=self.node_id,
            receiver=receiver,
            agent_incarnation=self.incarnation_id,
            job_id=job_id,
            issued_utc=datetime.fromtimestamp(self.now(), UTC),
            body=body,
        )
