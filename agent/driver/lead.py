"""The leading side of one job on this node: opens handoffs when it is this node's turn and mirrors them to the service.

Whose turn it is and what the plan is are decided in `planning`, how a handoff goes on by the proposer machine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from uuid import UUID, uuid4

from agent.driver.journal_records import keep_proposal
from agent.driver.mirrors import Mirrors
from agent.driver.node_context import Node
from agent.driver.planning import (
    FIRST,
    Intent,
    Learned,
    NoPlan,
    Plan,
    Pulse,
    Turn,
    Wait,
    intent_of,
    ladder_inputs,
    next_number,
    on_rung,
    plan_loss,
    proposal_of,
    same_plan,
)
from agent.driver.progress import Amendment, LostTime, Progress, first_mirror, learned_from, state_of_end
from agent.journal import Table
from agent.peer.asking import PeersHeard
from agent.peer.unreached import cut_off, lost_members, started_again
from agent.protocol.peer import RankMeasures
from agent.protocol.sync import HandoffDeclined, HandoffMirror, HandoffOrder, JobOrder
from agent.protocol.values import HandoffCause
from agent.supervisor.records import StoreKey
from agent.supervisor.stores import StoreError
from liver_core.handoff import (
    FailedPart,
    FailureCause,
    LadderInputs,
    Order,
    Proposal,
    Proposer,
    ProposerRecord,
    Reason,
    Report,
    Rung,
    Stage,
    StoreAddress,
)
from liver_core.handoff.ladder import rung_for_nearer_deadline, weigh
from liver_core.handoff.proposer import AMENDABLE, PEER_LOST_S, SILENT_IS_LOST, ProposerState
from liver_core.handoff.proposer_events import (
    Amend,
    Cancel,
    HandoffEnded,
    Open,
    PersistProposal,
    ProposerEffect,
    ProposerEvent,
    Refused,
    ReportReceived,
    SendOrder,
    Tick,
)
from liver_core.handoff.rung_costs import choose_by, estimate_costs
from liver_core.layout import Member, Roster, from_json, to_json
from liver_core.layout.limits import fitting
from liver_core.retries import retry_in_s

SOONER_LEAST_S = 1.0
"""A deadline that is nearer by less is not worth a revision."""
FENCED_LOST_S = 2.0
"""As PEER_LOST_S, where the service has started a newer world: that fences the ranks of a member that is not reached,
and this node may be needed to lead the next handoff."""
LIVE_RUNGS = (Rung.LIVE, Rung.DROP_STEP, Rung.STOP_AND_COPY, Rung.RESCUE)
"""Rungs on which the job goes on without a restart; the others are the service's to take."""

Leaving = dict[str, tuple[float, float]]
"""Each node that will go: when its notice was heard, and by when its state must be elsewhere."""

_log = logging.getLogger(__name__)


class Lead:
    """`send_order` takes an order to a member; `post` runs something later in the job's own task; `ask` hears other
    nodes of the job; `uses_store` hears of the generation whose store a handoff needs; `seen`: the highest number that
    the ranks of this node have seen used, by whichever lead."""

    def __init__(
        self,
        node: Node,
        job_id: str,
        *,
        send_order: Callable[[Member, Order], Awaitable[None]],
        post: Callable[[Callable[[], Awaitable[None]]], None],
        pulse: Callable[[], Pulse],
        ask: Callable[[Collection[str]], Awaitable[PeersHeard]],
        uses_store: Callable[[int], None] = lambda generation: None,
        seen: Callable[[], int] = lambda: 0,
    ) -> None:
        self.mirrors = Mirrors(node)
        self.status = self._said = ""
        self._unkept: HandoffMirror | None = None
        self._node = node
        self._job_id = job_id
        self._send_order = send_order
        self._post = post
        self._pulse = pulse
        self._ask = ask
        self._uses_store = uses_store
        self._seen = seen
        self._proposer = self._new_proposer(ProposerRecord())
        self._opening: tuple[Intent, asyncio.Task[None], int] | None = None
        self._no_plan_since: float | None = None
        self._failures = 0
        self._retry_at = float("-inf")
        self._learned = Learned()
        self._barred: frozenset[str] = frozenset()
        self._declined: UUID | None = None
        self._started = 0

    @property
    def progress(self) -> Progress | None:
        """How far the open handoff is."""
        return self.mirrors.progress

    def restore(self) -> None:
        """What the journal kept: the proposer's record, and the mirrors."""
        record = self._node.journal.get(Table.PROPOSER, self._job_id)
        if record is not None:
            self._proposer = self._new_proposer(from_json(ProposerRecord, record))
        if (proposal := self._proposer.record.proposal) is not None:
            self._proposer.handle(started_again(self._node.node_id), self._node.now())
        open_id = proposal.handoff_id if proposal is not None else None
        self.mirrors.restore(self._job_id, open_id, self._proposer.record.ended)

    @property
    def is_idle(self) -> bool:
        """Whether no handoff is open or being opened here."""
        return self._proposer.state is ProposerState.IDLE and self._opening is None

    def next_generation(self, order: JobOrder, active: Roster) -> int | None:
        """The number of the next handoff, if one can be opened."""
        number = next_number(self.used(), order, active)
        return None if isinstance(number, str) else number

    def used(self) -> int:
        """The greatest number that is known here as used, or is about to be."""
        opening = 0 if self._opening is None else self._opening[2]
        return max(self._proposer.record.highest_generation, self._seen(), opening)

    @property
    def open_id(self) -> str:
        """The handoff that is open or being opened here, empty if none."""
        if self._opening is not None:
            return self._opening[0].handoff_id
        proposal = self._proposer.record.proposal
        return "" if proposal is None else proposal.handoff_id

    @property
    def coming(self) -> frozenset[str]:
        """Nodes that the open handoff brings in."""
        proposal = self._proposer.record.proposal
        if proposal is None or proposal.source is None:
            return frozenset()
        return frozenset(member.node_id for member in proposal.members) - set(proposal.source.node_ids())

    def knows(self, handoff_id: str) -> bool:
        """Whether this handoff was led here."""
        return handoff_id == self.open_id or handoff_id in {ended.handoff_id for ended in self._proposer.record.ended}

    async def answer_loss(
        self, order: JobOrder, active: Roster, leaving: Leaving, *, barred: Collection[str] = (), turn: Turn = FIRST
    ) -> Intent | Wait | NoPlan | None:
        """Nodes will go: open a handoff without them, or amend or end the open one that does not answer all of them.
        `leaving`: members, also of the open handoff's target; this node may be among them where one is open. `barred`:
        nodes that no plan may take. Returns what was found, None where none is looked for now."""
        nodes, self._barred = frozenset(leaving), frozenset(barred)
        if self._opening is not None or self._node.now() < self._retry_at:
            return None
        if self._proposer.state is not ProposerState.IDLE:
            if self.progress is not None:
                await self._answer_another(order, leaving, nodes - self.progress.leaving)
            return None
        wanted = self._plan(order, active, leaving)
        if isinstance(wanted, Intent):
            self._open(order, wanted, turn)
        return wanted

    async def answer_proposal(self, order: JobOrder, active: Roster, wanted: HandoffOrder, turn: Turn = FIRST) -> None:
        """Open what the service proposes, such as capacity that appeared, or tell it why not. While a handoff is open
        it waits."""
        if not self.is_idle or self.knows(str(wanted.handoff_id)) or wanted.handoff_id == self._declined:
            return
        intent = intent_of(order, wanted, active, now=self._node.now(), budget=self._node.budget)
        refusal = self._open(order, intent, turn)
        if refusal:
            self.decline(wanted, refusal)

    def decline(self, wanted: HandoffOrder, refusal: str) -> None:
        """Tell the service once why its proposal is not opened."""
        if wanted.handoff_id != self._declined:
            self._declined = wanted.handoff_id
            fact = HandoffDeclined(handoff_id=wanted.handoff_id, job_id=self._job_id, reason=fitting(refusal))
            self._node.outbox.put_declined(fact)
            self._node.sync_soon()

    def wait(self, reason: str) -> None:
        """Nothing can be opened yet; people see why."""
        self._say(reason)

    async def cancel(self, reason: Reason) -> None:
        """A person or the service wants no handoff any more, or it cannot end well."""
        if self._proposer.state is not ProposerState.IDLE:
            await self._feed(Cancel(reason))

    async def give_way(self, started: int) -> None:
        """The service has started this world: what leads to a successor of an older one ends. Said again and again."""
        if started <= self._started:
            return
        self._started = started
        proposal = self._proposer.record.proposal
        if proposal is not None and proposal.parent < started:
            await self.cancel(Reason(f"generation {started} starts afresh", "cancel"))

    async def take_store_death(self, generation: int) -> None:
        """The store of a world died. A handoff to that world cannot be decided any more."""
        if self._proposer.record.proposal is not None and self._proposer.record.generation == generation:
            text = f"the store of generation {generation} on node {self._node.node_id} died"
            await self.cancel(Reason(text, "store", cause=FailureCause(FailedPart.STORE)))

    async def take_report(self, report: Report, measured: RankMeasures | None) -> None:
        """A participant reported, and its rank has `measured` so much; both may come after the handoff has ended."""
        progress = self.mirrors.find(report.handoff_id)
        if progress is not None:
            progress.take_report(report, measured, self._node.now())
        await self._feed(ReportReceived(report))
        # The report may have been the last one that the handoff waited for; then its end has been mirrored already.
        if progress is None or progress is not self.progress:
            return
        # A state that is new is told at once; all else soon, so that many reports make few mirrors.
        if progress.state_of(self._proposer.record) is not progress.mirror.state:
            await self.mirrors.say_open(self._proposer.record)

    async def tick(self, unreachable: dict[str, float]) -> None:
        """About twice a second. `unreachable`: since when each node's agent has not been reached."""
        await self.mirrors.say_stale(self._proposer.record)
        if self._proposer.state is ProposerState.IDLE:
            return
        now = self._node.now()
        if (proposal := self._proposer.record.proposal) is not None:
            source = proposal.source.members if proposal.source is not None else ()
            members, own = (*source, *proposal.members), self._node.node_id
            if (trouble := cut_off(own, members, unreachable, now=now)) is not None:
                await self._feed(trouble)
            if (state := self._proposer.state) in SILENT_IS_LOST:
                lost_s = FENCED_LOST_S if proposal.parent < self._started else PEER_LOST_S
                for lost in lost_members(own, members, unreachable, phase=str(state), now=now, lost_s=lost_s):
                    await self._feed(lost)
        await self._feed(Tick())

    async def close(self) -> None:
        """Let go of what is being opened."""
        if self._opening is not None:
            self._opening[1].cancel()
            await asyncio.gather(self._opening[1], return_exceptions=True)

    # Opening.

    def _plan(self, order: JobOrder, active: Roster, leaving: Leaving) -> Intent | Wait | NoPlan:
        """The handoff that answers all these notices."""
        nodes, now = frozenset(leaving), self._node.now()
        if self._no_plan_since is None:
            self._no_plan_since = now
        waited_s, safe_by = now - self._no_plan_since, min(safe for _, safe in leaving.values())
        is_there, barred, left_s = self._node.service_is_there(), self._barred, safe_by - now
        where = (order, active, nodes)
        plan = plan_loss(*where, left_s=left_s, waited_s=waited_s, service_is_there=is_there, barred=barred)
        if not isinstance(plan, Plan):
            self._say(plan.reason)
            return plan
        self._no_plan_since = None
        heard_at = min(heard for heard, _ in leaving.values())
        return Intent(str(uuid4()), HandoffCause.NOTICE, plan, active, nodes, safe_by, heard_at)

    async def _answer_another(self, order: JobOrder, leaving: Leaving, more: frozenset[str]) -> None:
        """What is known by now, against the open handoff: `more` nodes go than it answers, or one goes sooner.

        It is amended until the boundary; past it the notice becomes the next handoff. One that cannot be amended is
        given up for all notices. Permission is taken back for more nodes only. Capacity that appears waits.
        """
        assert self.progress is not None
        state, past = self._proposer.state, "boundary" in self.progress.marks
        leaving = {node: times for node, times in leaving.items() if node not in self.coming}
        if state is ProposerState.PREPARING and not more and leaving:
            await self._amend_deadline(order, leaving)
        if not more or past or state is ProposerState.WITHDRAWING:
            return
        if state not in AMENDABLE or not await self._amend(order, leaving, more):
            await self._supersede(more)

    async def _amend_deadline(self, order: JobOrder, leaving: Leaving) -> None:
        """A node goes sooner than the open handoff allows: the same plan until then, of which ranks keep everything;
        but a rescue where what they prepare would be ready too late."""
        current, now = self._proposer.record.proposal, self._node.now()
        node, (heard_at, safe_by) = min(leaving.items(), key=lambda item: item[1][1])
        if current is None or not now < safe_by < current.deadline_utc - SOONER_LEAST_S:
            return
        assert self.progress is not None
        inputs = self._ladder(order, same_plan(current, frozenset(leaving), safe_by, heard_at))
        rung, why = rung_for_nearer_deadline(
            inputs, current.rung, spent_s=now - self.progress.mirror.opened_utc.timestamp()
        )
        text = f"{node} goes {current.deadline_utc - safe_by:.1f} s sooner than was known{why}"
        costs = estimate_costs(inputs, self.mirrors.costs)
        expected = Amendment(frozenset(), heard_at, text, costs, weigh(rung, inputs).seconds)
        await self._revise(replace(current, deadline_utc=safe_by, rung=rung), expected)

    async def _amend(self, order: JobOrder, leaving: Leaving, more: frozenset[str]) -> bool:
        """A newer revision of the open handoff, for all that go; False when there can be none. While the service is
        asked for a plan the open handoff goes on."""
        current, progress = self._proposer.record.proposal, self.progress
        assert current is not None and current.source is not None and progress is not None
        # A handoff of the service may answer nodes that no notice is known of here.
        if not leaving:
            return False  # It answers no notice, and who was to come goes: another plan may be another layout.
        wanted = self._plan(order, current.source, leaving)
        if isinstance(wanted, Wait):
            return True
        if isinstance(wanted, NoPlan) or not progress.leaving <= wanted.leaving:
            return False
        wanted = replace(wanted, deadline_utc=min(wanted.deadline_utc, current.deadline_utc))
        inputs = self._ladder(order, wanted)
        choice, costs = choose_by(order.spec.prefer, inputs, self.mirrors.costs)
        if choice.rung not in LIVE_RUNGS:
            return False
        # Ranks keep what they have of a target that stays; when time is short they take the next rung by themselves.
        same = (wanted.plan.layout, wanted.plan.members) == (current.layout, current.members)
        rung = current.rung if same else choice.rung
        amended = replace(
            current,
            layout=wanted.plan.layout,
            members=wanted.plan.members,
            plan_digest=wanted.plan.digest,
            cause=str(wanted.cause),
            rung=rung,
            deadline_utc=wanted.deadline_utc,
        )
        text = f"{', '.join(sorted(more))} will go too: {wanted.plan.reason}; {choice.reason}"
        expected = Amendment(more - self.coming, wanted.notice_at, text, costs, weigh(rung, inputs).seconds)
        return await self._revise(amended, expected)

    async def _revise(self, amended: Proposal, amendment: Amendment) -> bool:
        """Make `amended` the newest revision of the open handoff; False where it was refused."""
        assert self.progress is not None
        effects = self._proposer.handle(Amend(amended), self._node.now())
        taken = amended in (self._proposer.record.proposal, self._proposer.record.pending)
        if taken:
            self._say(f"amending handoff {amended.handoff_id} to {amended.layout}: {amendment.reason}")
            self.progress.amendment = amendment
        await self._carry_out(effects)
        if taken:
            await self.mirrors.say_open(self._proposer.record)
        return taken

    async def _supersede(self, more: frozenset[str]) -> None:
        assert self.progress is not None
        if self.progress.superseded:
            return
        text = f"superseded: {', '.join(sorted(more))} will go too, one plan is made for all"
        self.progress.superseded = True
        if not await self._feed(Cancel(Reason(text, "superseded"))):
            # Too late to take it back: the notice becomes the next handoff, at the first boundary of the next world.
            self.progress.superseded = False

    def _open(self, order: JobOrder, wanted: Intent, turn: Turn) -> str:
        """Choose the rung; where it is a live one, have a store first, then open. Returns why not, empty if so."""
        inputs = self._ladder(order, wanted)
        choice, costs = choose_by(order.spec.prefer, inputs, self.mirrors.costs)
        if choice.rung not in LIVE_RUNGS:
            where = f"without {', '.join(sorted(wanted.leaving))}" if wanted.leaving else f"to {wanted.plan.layout}"
            refusal = f"no live handoff {where}"
            self._say(f"{refusal}: {choice.reason}", about=f"{refusal} {order.generation} {choice.rung}")
            return self.status
        intent = on_rung(wanted, choice, inputs, now=self._node.now(), costs=costs)
        generation = next_number(self.used(), order, wanted.source, place=turn.place)
        if isinstance(generation, str):
            self._say(generation)
            return generation
        self._proposer.record = replace(self._proposer.record, highest_generation=generation - 1)
        asks = not turn.in_touch or self._failures > 0  # Of the first attempt every millisecond counts.
        self._opening = (intent, asyncio.create_task(self._prepare(intent, generation, asks=asks)), generation)
        return ""

    def _ladder(self, order: JobOrder, wanted: Intent) -> LadderInputs:
        left_s = wanted.deadline_utc - self._node.now() if wanted.notice_at is not None else None
        where = (order, wanted.source, wanted.plan, wanted.leaving, left_s)
        return ladder_inputs(*where, pulse=self._pulse(), learned=self._learned)

    async def _prepare(self, intent: Intent, generation: int, *, asks: bool) -> None:
        """Hear whether others are there and know of greater numbers, and have a store."""
        heard = await self._ask(intent.source.node_ids()) if asks else PeersHeard()
        if heard.too_few or heard.highest >= generation:
            why = heard.too_few or f"another node knows of a generation {heard.highest}"
            return self._post(lambda: self._give_up(why, heard.highest))
        self._uses_store(generation)
        try:
            store = await self._node.stores.host(StoreKey(self._job_id, generation), self._node.private_address)
        except StoreError as error:
            text = str(error)
            # The number of a store that died is burned: no second record for the same decision.
            return self._post(lambda: self._give_up(text, generation))
        self._post(lambda: self._open_with(intent, store))

    async def _give_up(self, text: str, used: int) -> None:
        self._opening = None
        self._proposer.record = replace(self._proposer.record, highest_generation=max(used, self.used()))
        self._say(f"no handoff could be opened: {text}")

    async def _open_with(self, intent: Intent, store: StoreAddress) -> None:
        self._opening = None
        self._say(f"opening handoff {intent.handoff_id} to {intent.plan.layout}: {intent.reason}")
        now, pulse = self._node.now(), self._pulse()
        proposal = proposal_of(intent, self._job_id, store)
        effects = self._proposer.handle(Open(proposal), now)
        opened = self._proposer.record.proposal
        if opened is not None and opened.handoff_id == proposal.handoff_id:
            leavers = frozenset(set(intent.source.members) - set(intent.plan.members))
            # Counted from the end of the last whole step, so that the step under way is not taken for lost.
            lost_time = LostTime(now - pulse.step_age_s, pulse.step, pulse.median_step_s, known=pulse.step > 0)
            mirror = first_mirror(intent, proposal, self._proposer.record.generation, self._node.node_id, now)
            expected = {"estimate_s": intent.estimate_s, "costs": intent.costs}
            self.mirrors.progress = Progress(mirror, lost_time, intent.notice_at, leavers, **expected)
            self._unkept = mirror
        await self._carry_out(effects)
        await self.mirrors.say_open(self._proposer.record)

    # The machine.

    def _new_proposer(self, record: ProposerRecord) -> Proposer:
        return Proposer(
            job_id=self._job_id, proposer_id=self._node.node_id, agent_incarnation=self._node.incarnation, record=record
        )

    async def _feed(self, event: ProposerEvent) -> bool:
        """One event; False when it was refused."""
        phase = self._proposer.record.phase
        effects = self._proposer.handle(event, self._node.now())
        taken = await self._carry_out(effects)
        if self._proposer.record.phase is not phase and self._proposer.record.proposal is not None:
            await self.mirrors.say_open(self._proposer.record)
        return taken

    async def _carry_out(self, effects: tuple[ProposerEffect, ...]) -> bool:
        taken = True
        for effect in effects:
            match effect:
                case PersistProposal(record=record):
                    mirror, self._unkept = self._unkept, None
                    await asyncio.to_thread(keep_proposal, self._node.journal, self._job_id, to_json(record), mirror)
                    if self.progress is not None:
                        self.progress.take_record(record, self._node.now())
                case SendOrder(member=member, order=order):
                    await self._send_order(member, order)
                case HandoffEnded():
                    await self._take_end(effect)
                case Refused(reason=reason):
                    taken = False
                    self._say(f"refused: {reason}")
        return taken

    async def _take_end(self, ended: HandoffEnded) -> None:
        progress, self.mirrors.progress = self.mirrors.progress, None
        _log.info("job %s: handoff %s ended %s: %s", self._job_id, ended.handoff_id, ended.stage, ended.reason)
        # A handoff that fails is tried again while there is time, but not in a tight loop: each burns a generation.
        if ended.stage is Stage.ACTIVE or (progress is not None and progress.superseded):
            self._failures = 0
        else:
            self._failures += 1
            self._retry_at = self._node.now() + retry_in_s(self._failures)
        if progress is None:
            return
        progress.take_end(ended)
        if ended.stage is Stage.ACTIVE:
            progress.marks.setdefault("retired", self._node.now())
        self._learned = learned_from(progress, self._learned, ended)
        await self.mirrors.say_ended(ended.handoff_id, progress, state_of_end(ended), str(ended.stage))

    def _say(self, text: str, *, about: str = "") -> None:
        """Show it, and log it if it is news. `about`: what must differ then, where numbers in the text always do."""
        if (about or text) != self._said:
            _log.info("job %s: %s", self._job_id, text)
        self.status, self._said = text, about or text
