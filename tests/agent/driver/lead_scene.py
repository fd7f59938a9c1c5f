"""The lead of a job on node a, against the participants' own machines; ranks do what a test says."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any, cast

from agent.driver.lead import Lead
from agent.driver.node_context import Node
from agent.driver.planning import Pulse, wanted_of
from agent.notices.warning_budget import warning_budget
from agent.peer.asking import PeersHeard
from agent.protocol.peer import RankMeasures
from agent.protocol.sync import HandoffDeclined, HandoffMirror, HandoffOrder, JobOrder, Provider
from agent.supervisor.records import StoreKey
from agent.supervisor.stores import StoreError
from liver_core.handoff import Order, Participant, ParticipantRecord, Reason, StoreAddress
from liver_core.handoff.leader_events import AskedToLead, Loss, LossesKnown
from liver_core.handoff.participant_events import OrderReceived, RankReported, RankStage, SendReport
from liver_core.handoff.proposer import ProposerState
from liver_core.layout import Member
from tests.agent.stub_service import JOB_ID, roster_of

FOUR = ("a", "b", "c", "d")
ACTIVE = roster_of(1, FOUR)
START_S = 1_700_000_000.0


class Journal:
    """In memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], dict] = {}

    def put(self, table: str, key: str, data: dict) -> None:
        self.kept[table, key] = data

    def get(self, table: str, key: str) -> dict | None:
        return self.kept.get((table, key))

    def items(self, table: str) -> list[tuple[str, dict]]:
        return [(key, data) for (owner, key), data in self.kept.items() if owner == table]

    def delete(self, table: str, key: str) -> None:
        del self.kept[table, key]


class Stores:
    """Every store can be had, but for the next `dying`."""

    def __init__(self) -> None:
        self.dying = 0
        self.asked: list[StoreKey] = []

    async def host(self, key: StoreKey, address: str) -> StoreAddress:
        self.asked.append(key)
        if self.dying:
            self.dying -= 1
            raise StoreError("the store ended before it listened")
        return StoreAddress(host=address, port=4_000)


class Scene:
    """A participant per member of the running world, on nodes a to d."""

    def __init__(self, order: JobOrder, journal: Journal | None = None) -> None:
        self.order = order
        self.now = START_S
        self.pulse = Pulse(100, 0.1, 0.5, 90)
        self.heard = PeersHeard()  # What the other nodes answer before a handoff is opened, to so many questions.
        self.questions = 0
        self.journal = journal or Journal()
        self.stores = Stores()
        self.mirrors: list[HandoffMirror] = []
        self.declined: list[HandoffDeclined] = []
        self.sent: list[tuple[Member, Order]] = []
        self.participants = {
            member: Participant(
                job_id=JOB_ID,
                member=member,
                agent_incarnation=1,
                record=ParticipantRecord(active=ACTIVE, highest_generation=1),
            )
            for member in ACTIVE.members
        }
        self.posted: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        node = SimpleNamespace(
            node_id="a",
            incarnation=1,
            private_address="127.0.0.1",
            journal=self.journal,
            stores=self.stores,
            outbox=SimpleNamespace(put_handoff=self.mirrors.append, put_declined=self.declined.append),
            budget=warning_budget(Provider.AWS),
            sync_soon=lambda: None,
            sync_with_progress=lambda: None,
            now=lambda: self.now,
            service_is_there=lambda: False,
        )
        self.lead = Lead(
            cast(Node, node),
            JOB_ID,
            send_order=self._send,
            post=self.posted.put_nowait,
            pulse=lambda: self.pulse,
            ask=self._ask,
        )

    async def _ask(self, nodes: Collection[str]) -> PeersHeard:
        assert set(nodes) == set(FOUR)
        self.questions += 1
        return self.heard

    async def _send(self, member: Member, order: Order) -> None:
        self.sent.append((member, order))

    async def notice(self, ends_in_s: float, *nodes: str, place: int = 0, in_touch: bool = False) -> None:
        """These nodes will go. Node a is at this place of those that may lead, `in_touch` if it has just been asked."""
        await self.answer(dict.fromkeys(nodes, (self.now, START_S + ends_in_s)), place=place, in_touch=in_touch)
        await self.settle()

    async def answer(
        self,
        leaving: dict[str, tuple[float, float]],
        *,
        barred: Collection[str] = (),
        place: int = 0,
        in_touch: bool = False,
    ) -> None:
        """The same: when each was heard, and by when its state must be elsewhere. The store is not there yet."""
        self._asked(0.0 if in_touch else 10.0)
        others = [name for name in FOUR if name != "a" and name not in leaving]
        lead_order = (*others[:place], "a", *others[place:])
        losses = tuple(Loss(name, heard, safe, safe, safe) for name, (heard, safe) in leaving.items())
        known = LossesKnown(world=ACTIVE, losses=losses, barred=frozenset(barred), used=self.order.next_generation - 1)
        await self.lead.hear(self.order.model_copy(update={"lead_order": lead_order}), known)

    async def propose(self, wanted: HandoffOrder, **losses_s: float) -> None:
        """The service proposes it, where these nodes will go in so many seconds."""
        await self.answer({name: (self.now, self.now + left_s) for name, left_s in losses_s.items()})
        budget = warning_budget(Provider.AWS)
        await self.lead.hear(self.order, wanted_of(wanted, self.order.notices, now=self.now, budget=budget))
        await self.settle()

    async def settle(self) -> None:
        """What is being opened is open, or given up."""
        while self.lead.open_id and self.state is ProposerState.IDLE:
            await (await asyncio.wait_for(self.posted.get(), timeout=10.0))()

    def _asked(self, ago_s: float) -> None:
        self.now -= ago_s
        self.lead.note(AskedToLead())
        self.now += ago_s

    @property
    def state(self) -> ProposerState:
        return self.lead._proposer.state

    async def deliver(
        self, *said: RankStage, reason: Reason | None = None, measured: RankMeasures | None = None
    ) -> None:
        """All orders that were sent, then what each rank of the newest revision says; reports go back shuffled."""
        sent, self.sent = self.sent, []
        reports = []
        for member, order in sent:
            reports += self._feed(member, OrderReceived(order))
        for member, participant in self.participants.items():
            for each in said:
                promise = participant.record.promise
                if promise is None:
                    continue
                order = participant.record.order
                leaves = each is RankStage.ACTIVE and order is not None and member not in order.target.members
                stage = RankStage.LEFT if leaves else each
                event = RankReported(promise.handoff_id, 1, stage, reason=reason, plan_revision=promise.plan_revision)
                reports += self._feed(member, event)
        random.Random(0).shuffle(reports)
        for report in reports:
            await self.lead.take_report(report, measured)

    def _feed(self, member: Member, event: Any) -> list[Any]:
        effects = self.participants[member].handle(event, self.now)
        return [effect.report for effect in effects if isinstance(effect, SendReport)]

    def revisions(self) -> set[int]:
        return {item.record.promise.plan_revision for item in self.participants.values() if item.record.promise}


async def all_say(now: Scene, *stages: RankStage, seconds: float = 0.0) -> None:
    """Every rank gets so far, each stage so many seconds after the last one."""
    for stage in stages:
        now.now += seconds
        await now.deliver(stage)


TO_THE_END = (RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER, RankStage.ACTIVE)
