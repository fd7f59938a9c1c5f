"""An agent without ranks: says over HTTP what a test wants said, keeps what it was told."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID, uuid4

from agent.link.kept_orders import known_of, peer_keys_of, whole
from agent.protocol.joining import JOIN_PATH, JoinRequest
from agent.protocol.process_end import ProcessEnd
from agent.protocol.sync import (
    HandoffMeasures,
    HandoffMirror,
    JobOrder,
    NodeInfo,
    NoticeFact,
    NoticeKind,
    Provider,
    RankStatus,
    SourceHealth,
    SourceState,
    StepRow,
    SyncOrders,
    SyncReport,
)
from agent.protocol.values import HandoffCause, HandoffState
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.layout import Member, ParallelLayout, Roster

MISSES_A_PEER = Reason("the world cannot go on", "training", 0, cause=FailureCause(FailedPart.PEER))
JOB = {
    "name": "demo",
    "global_batch": 24,
    "micro_batch": 1,
    "nodes": {"min": 2, "max": 4},
    "layouts": {
        "pinned": [
            {"nodes": 4, "layout": "TP2xPP2"},
            {"nodes": 4, "layout": "TP2xDP2"},
            {"nodes": 3, "layout": "PP3"},
            {"nodes": 2, "layout": "TP2"},
        ],
        "prefer_change": True,
    },
    "model": {
        "num_layers": 12,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "padded_vocab_size": 264,
        "seq_length": 128,
    },
    "args": {"data_prefix": "/data/corpus"},
    "checkpoint": {"path": "/checkpoints", "every_steps": 10},
    "stop": {"steps": 1000},
}
JOB_OF_MANY = {name: value for name, value in JOB.items() if name != "checkpoint"}
"""May be submitted again while it lives, since it writes no checkpoints."""


def another_job(name: str, **changes: Any) -> dict[str, Any]:
    """A job file for a job beside one of `JOB`: no two that live may write checkpoints to one path."""
    return JOB | {"name": name, "checkpoint": {"path": f"/checkpoints/{name}", "every_steps": 10}} | changes


@dataclass
class FakeAgent:
    """`sync` sends one report with the lists given; `orders` is the last answer. `join`: the header with a join token.
    The key follows from the name, so that a second agent of a name has the key of the first."""

    node_id: str
    client: Any
    join: dict[str, str]
    clock: Any
    pool: str = "spot-a"
    slots: int = 1
    incarnation: UUID = field(default_factory=uuid4)
    seq: int = 0
    notice_source: SourceHealth | None = None
    job_user: str | None = None
    provider_id: str | None = None
    zone: str | None = None
    provider: Provider = Provider.AWS
    orders: SyncOrders | None = None
    token: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """With a token of this node, which joins for it."""
        if not self.token:
            wanted = JoinRequest(node_id=self.node_id, secret=sha256(self.node_id.encode()).hexdigest())
            answer = self.client.post(JOIN_PATH, json=wanted.model_dump(), headers=self.join)
            assert answer.status_code == 201, answer.text
            self.token = answer.json()["token"]
        return {"Authorization": f"Bearer {self.token}"}

    def report(self, **parts: Any) -> SyncReport:
        self.seq += 1
        parts.setdefault("peer_keys", peer_keys_of(self.orders.jobs if self.orders is not None else ()))
        return SyncReport(
            agent_version="test",
            agent_incarnation=self.incarnation,
            report_seq=self.seq,
            issued_utc=self.clock(),
            node=NodeInfo(
                node_id=self.node_id,
                provider=self.provider,
                pool=self.pool,
                slots=self.slots,
                peer_url=f"http://{self.node_id}.test:9000",
                private_address="127.0.0.1",
                notice_source=self.notice_source,
                job_user=self.job_user,
                provider_id=self.provider_id,
                zone=self.zone,
            ),
            **known_of(self.orders),
            **parts,
        )

    def post(self, report: SyncReport):
        content = report.model_dump_json()
        answer = self.client.post("/agent/v1/sync", content=content, headers=self.headers)
        if answer.status_code == 401:
            self.token = ""  # It has expired.
            answer = self.client.post("/agent/v1/sync", content=content, headers=self.headers)
        return answer

    def sync(self, **parts: Any) -> SyncOrders:
        response = self.post(self.report(**parts))
        assert response.status_code == 200, response.text
        self.orders = whole(SyncOrders.model_validate_json(response.content), self.orders)
        return self.orders

    def job_order(self) -> JobOrder:
        assert self.orders is not None and len(self.orders.jobs) == 1, self.orders
        return self.orders.jobs[0]

    def roster(self) -> Roster:
        """The roster that the last orders name."""
        found = self.job_order().roster
        assert found is not None
        return found

    def notice(self, *, deadline_s: float | None = 120, kind: NoticeKind = NoticeKind.INTERRUPTION) -> NoticeFact:
        now: datetime = self.clock()
        return NoticeFact(
            node_id=self.node_id,
            kind=kind,
            source="aws-imds",
            deadline_utc=None if deadline_s is None else now + timedelta(seconds=deadline_s),
            first_seen_utc=now,
        )

    def watch(
        self,
        *announces: NoticeKind,
        overdue: tuple[NoticeKind, ...] = (),
        state: SourceState = SourceState.WATCHING,
        reason: str = "",
    ) -> None:
        """What later reports say of the node's notice source."""
        self.notice_source = SourceHealth(
            source="aws-imds",
            state=state,
            reason=reason,
            since_utc=self.clock(),
            announces=announces,
            overdue=overdue,
        )

    def rank(self, order: JobOrder, *, stage: RankStage = RankStage.TRAINING, step: int = 0, **more: Any) -> RankStatus:
        """The first rank this node holds in the ordered roster."""
        assert order.roster is not None
        index = next(i for i, member in enumerate(order.roster.members) if member.node_id == self.node_id)
        return RankStatus(
            job_id=order.job_id,
            generation=more.pop("generation", order.roster.generation),
            rank=index,
            slot=order.roster.members[index].slot,
            pid=1000 + index,
            stage=stage,
            step=step,
            **more,
        )

    def dead(self, order: JobOrder, end: ProcessEnd, *, step: int, cause: FailureCause | None = None) -> RankStatus:
        """The same of a rank whose process has ended, as its agent reports it. `cause`: as the rank itself gave it."""
        reason = Reason(str(end), "training", cause=end.cause(cause))
        return self.rank(order, stage=RankStage.FAILED, step=step, reason=reason, ended=end)


def step_row(job_id: str, generation: int, step: int, at: datetime, **more: Any) -> StepRow:
    values = {"seconds": 0.5, "finished_utc": at} | more
    return StepRow(job_id=job_id, generation=generation, step=step, **values)


def roster(job_id: str, generation: int, layout: ParallelLayout, *nodes: str) -> Roster:
    members = tuple(Member(node_id=node, slot=0) for node in nodes)
    return Roster(job_id=job_id, generation=generation, layout=layout, members=members)


def mirror(source: Roster | None, target: Roster, at: datetime, **more: Any) -> HandoffMirror:
    """A handoff from `source` to `target`; active unless said otherwise."""
    assert source is not None
    values: dict[str, Any] = {
        "handoff_id": uuid4(),
        "job_id": target.job_id,
        "parent": source.generation,
        "generation": target.generation,
        "proposer": source.members[0].node_id,
        "cause": HandoffCause.NOTICE,
        "state": HandoffState.ACTIVE,
        "source": source,
        "target": target,
        "leaving": tuple(set(source.node_ids()) - set(target.node_ids())),
        "opened_utc": at,
        "changed_utc": at,
        "reason": Reason("spot notice", "open"),
        "measures": HandoffMeasures(),
    }
    return HandoffMirror(**(values | more))
