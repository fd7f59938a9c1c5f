"""What every job driver of a node shares: who the node is, where things are kept, and how to reach others."""

from collections.abc import Callable
from dataclasses import dataclass, field
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
from agent.supervisor.supervisor import Supervisor
from liver_core.handoff import Order


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

    def rank_spec(self, slot: int, order: Order, spec: JobFile, number: str) -> RankSpec:
        """What the process of a slot is started with; `number` tells it from the job's other processes here."""
        return RankSpec(
            node_id=self.node_id,
            slot=slot,
            order=order,
            spec=spec,
            private_address=self.private_address,
            socket_path=self.supervisor.socket_path("r", order.job_id, number),
            run_dir=f"{self.run_dir}/ranks/{order.job_id}/{number}",
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
