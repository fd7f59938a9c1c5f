"""What happens to one job and its nodes, drawn from a seed: agents' words, as far as the service would hear them.

Agents have only what a test needs of them. They do what the orders of the simulated service say, or fail, or lag.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar
from uuid import UUID

from agent.protocol.process_end import STOPPED, ProcessEnd
from agent.protocol.sync import DesiredState, NoticeFact, NoticeKind
from agent.protocol.values import HandoffState, Placement
from liver_core.handoff import OUT_OF_TIME, Decision, FailedPart, FailureCause, RankStage, Reason, Rung
from liver_core.handoff.generations import next_handoff
from liver_core.layout import Member, ParallelLayout, Roster
from service.jobs.tables import ENDED, JobState
from service.ledger.rules import LOST, OVER
from service.simulation.world.moments import utc, utc_or_none
from service.simulation.world.reports import AgentReport, DeclinedProposal, Mirror, RankSays
from tests.service.conftest import FakeClock
from tests.service.simulation.two_services import TwoServices

NAMES = "abcdef"
LAYOUTS = {2: ParallelLayout(tp=2), 3: ParallelLayout(pp=3), 4: ParallelLayout(tp=2, pp=2)}
AWAY_MOST = 2
"""More nodes that fall silent together, and the service takes itself for deaf, which a simulated one never does."""
REPORTS_EACH_S = 4.9
PREPARING = (RankStage.PREPARING, RankStage.STREAMING, RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER)
ENDINGS = (HandoffState.ACTIVE, HandoffState.ABORTED, HandoffState.BROKEN)
ValueT = TypeVar("ValueT")


@dataclass(slots=True)
class Machine:
    """A node and its agent. `said`: its reports of this start, the newest last; `notices`: what it has heard."""

    name: str
    incarnation: int = 0
    is_up: bool = True
    is_revoked: bool = False
    ranks: dict[tuple[int, int], RankSays] = field(default_factory=dict)
    said: list[AgentReport] = field(default_factory=list)
    notices: dict[str, NoticeFact] = field(default_factory=dict)

    @property
    def living(self) -> list[tuple[int, int]]:
        """Of its ranks."""
        return [key for key, rank in self.ranks.items() if rank.stage not in OVER]


@dataclass(slots=True)
class Led:
    """A handoff that agents drive, by its newest copy. `is_told`: that copy has been; `older`: those before."""

    copy: Mirror
    is_told: bool = False
    older: list[Mirror] = field(default_factory=list)

    @property
    def went_through(self) -> bool:
        """Whether its world trains."""
        return self.copy.state is HandoffState.ACTIVE

    @property
    def is_over(self) -> bool:
        """Whether it ended, however it did."""
        return self.copy.state in ENDINGS


class DrawnFacts:
    """`happen` lets one thing happen. `log`: what happened."""

    def __init__(self, services: TwoServices, clock: FakeClock, seed: int) -> None:
        self._services, self._clock, self._draw = services, clock, Random(seed)
        self._machines: dict[str, Machine] = {}
        self._led: dict[str, Led] = {}
        self._ids = 0
        self.log: list[str] = []
        self._kinds: dict[Callable[[], str | None], float] = {
            self._train: 30,
            self._look: 18,
            self._time_passes: 10,
            self._open: 8,
            self._move: 22,
            self._tell_late: 4,
            self._tell_old: 2,
            self._decline: 3,
            self._hear_notice: 3,
            self._withdraw_notice: 1.5,
            self._fail: 3,
            self._stand_or_end: 1.5,
            self._fall_silent: 2.5,
            self._come_back: 4,
            self._repeat: 2,
            self._checkpoint: 3,
            self._service_away: 0.7,
            self._stop: 0.15,
            self._revoke: 0.3,
        }
        # Each seed has more of some things, and nothing of others.
        for kind in list(self._kinds)[3:]:
            self._kinds[kind] *= self._draw.choice((0.0, 0.5, 1.0, 1.0, 2.0, 4.0))

    def begin(self) -> None:
        """All nodes come, and the job starts."""
        for name in NAMES[: self._choose((3, 4, 6, 6))]:
            self._machines[name] = Machine(name)
            self._services.comes(name, incarnation=0, is_machine=True)
            self._report(self._machines[name])
            self._passes(0.01)
        self._services.look()

    def happen(self) -> None:
        """Something, after a moment."""
        self._passes(self._choose((0.001, 0.04, 0.3)))
        kinds = dict(self._kinds)
        while True:
            kind = self._draw.choices(list(kinds), list(kinds.values()))[0]
            what = kind()
            if what is not None:
                break
            del kinds[kind]
        self.log.append(f"{self._clock():%M:%S.%f} {what}")
        self._services.compare()

    # Time.

    def _passes(self, seconds: float) -> None:
        """Nodes that are up are heard often enough."""
        self._clock.advance(seconds)
        for machine in self._machines.values():
            if machine.is_up and machine.said and self._services.now_s - machine.said[-1].sent_at > REPORTS_EACH_S:
                self._report(machine)

    def _time_passes(self) -> str:
        seconds = self._choose((0.5, 1.7, 3.1, 4.4))
        self._clock.advance(seconds)
        for machine in self._up():
            if self._draw.random() < 0.8:
                self._go_on(machine)
            self._report(machine)
        return f"{seconds} s pass"

    def _look(self) -> str:
        action = self._services.look()
        return f"look: {action.do}: {action.reason}"

    def _service_away(self) -> str:
        seconds, up = self._choose((6.0, 20.0, 90.0, 200.0)), self._up()
        self._services.goes_away()
        self._clock.advance(seconds)
        self._draw.shuffle(up)
        self._services.is_back(self._new_report(up[0]))
        for machine in up[1:]:
            self._go_on(machine)
            self._report(machine)
        return f"the service is away for {seconds} s"

    # Ranks.

    def _train(self) -> str | None:
        machine = self._any(self._up())
        if machine is None:
            return None
        self._go_on(machine)
        self._report(machine)
        return f"{machine.name} goes on: {_shown(machine)}"

    def _go_on(self, machine: Machine) -> None:
        """Its ranks do what they are told to."""
        orders = self._services.simulated.orders()
        if orders.desired is not DesiredState.RUN:
            ends = {key: replace(machine.ranks[key], stage=RankStage.LEFT) for key in machine.living}
            machine.ranks = machine.ranks | ends if self._draw.random() < 0.5 else {}
            return
        worlds = [led.copy.target for led in self._led.values() if led.went_through]
        newest = max((*worlds, *((orders.roster,) if orders.roster else ())), key=_number, default=None)
        if newest is None:
            return
        for key in machine.living:
            if key[0] < newest.generation and (newest.generation, key[1]) != key:
                self._leave(machine, key)
        if machine.name in newest.node_ids():
            self._step(machine, newest)
        for led in self._led.values():
            if not led.is_over and led.copy.parent == newest.generation:
                self._prepare(machine, led.copy)

    def _leave(self, machine: Machine, key: tuple[int, int]) -> None:
        if self._draw.random() < 0.6:
            del machine.ranks[key]
        else:
            machine.ranks[key] = replace(machine.ranks[key], stage=self._choose((RankStage.LEFT, RankStage.ABORTED)))

    def _step(self, machine: Machine, world: Roster) -> None:
        key = (world.generation, _rank_in(world, machine.name))
        before, job = machine.ranks.get(key), self._services.simulated.rows.job
        if before is not None and before.stage in OVER:
            return
        if before is None and self._draw.random() < 0.5:
            machine.ranks[key] = RankSays(*key, RankStage.STARTING)
            return
        step = max(before.step if before else 0, min(job.last_step + self._draw.randint(0, 2), 990))
        stages = (RankStage.TRAINING, RankStage.TRAINING, RankStage.ACTIVE)
        machine.ranks[key] = RankSays(*key, self._choose(stages), step)

    def _prepare(self, machine: Machine, copy: Mirror) -> None:
        """A new process for a rank of the next world, or the present one gets ready."""
        stage = self._choose(PREPARING)
        if machine.name in copy.target.node_ids() and self._draw.random() < 0.5:
            key = (copy.generation, _rank_in(copy.target, machine.name))
            if key not in machine.ranks or machine.ranks[key].stage not in OVER:
                machine.ranks[key] = RankSays(*key, stage)
        elif self._draw.random() < 0.3:
            for key in machine.living:
                machine.ranks[key] = replace(machine.ranks[key], stage=stage)

    def _fail(self) -> str | None:
        machine = self._any([each for each in self._up() if each.living])
        if machine is None:
            return None
        key = self._choose(machine.living)
        if machine.said and any(rank.rank == key[1] and rank.stage in LOST for rank in machine.said[-1].ranks):
            return None  # The real service takes it for the one of another world of which it was told before.
        machine.ranks[key] = self._failed(machine.ranks[key])
        self._report(machine)
        return f"{machine.name} fails: {machine.ranks[key]}"

    def _failed(self, rank: RankSays) -> RankSays:
        step = rank.step
        seen = self._choose(
            (
                ProcessEnd(1, signal="SIGKILL", step=step),
                ProcessEnd(1, signal="SIGABRT", step=step),
                ProcessEnd(1, exit_code=1, step=step, reported="division by 0x12ab"),
                None,
                None,
            )
        )
        said = self._choose(
            (
                None,
                FailureCause(FailedPart.RANK, exit_code=3),
                FailureCause(FailedPart.PEER),
                FailureCause(FailedPart.PEER, peer=1),
                FailureCause(FailedPart.STORE),
                FailureCause(FailedPart.NODE),
            )
        )
        cause, node = (said if seen is None else seen.cause(said)), self._choose(("", "", *NAMES))
        reason = Reason(f"it cannot go on ({said and said.what})", "training", rank.rank, node=node, cause=cause)
        reason = self._choose((reason, reason, reason, None)) if seen is None else reason
        stage = RankStage.FAILED if seen is not None else self._choose((RankStage.BROKEN, RankStage.FAILED))
        return replace(rank, stage=stage, reason=reason, ended=seen)

    def _stand_or_end(self) -> str | None:
        machine = self._any([each for each in self._up() if each.living])
        if machine is None:
            return None
        key = self._choose(machine.living)
        if self._draw.random() < 0.5:
            changed = replace(machine.ranks[key], reason=Reason("its process is stopped", STOPPED, key[1]))
        else:
            stage = self._choose((RankStage.FINISHED, RankStage.LEFT, RankStage.ABORTED))
            changed = replace(machine.ranks[key], stage=stage)
        machine.ranks[key] = changed
        self._report(machine)
        return f"{machine.name}: {changed}"

    # Handoffs.

    def _open(self) -> str | None:
        orders, state = self._services.simulated.orders(), self._services.simulated.state
        source = orders.roster
        open_ones = [led for led in self._led.values() if not led.is_over]
        if source is None or state not in (JobState.STARTING, JobState.RUNNING) or len(open_ones) > 1:
            return None
        if open_ones and self._draw.random() < 0.7:
            return None
        lead = self._any([each for each in self._up() if each.name in source.node_ids()])
        highest = max([orders.next_generation - 1, *(led.copy.generation for led in self._led.values())])
        if self._draw.random() < 0.1:
            highest = max(source.generation, highest - 1)  # Somebody else may have taken it.
        number = next_handoff(highest, source.generation)
        if lead is None or number is None:
            return None
        proposal, handoff_id = orders.proposal, self._new_id()
        target = self._target(source)
        if proposal is not None and self._draw.random() < 0.7:
            handoff_id, target = proposal.handoff_id, proposal.target
            if handoff_id in self._led:
                return None
        if target is None:
            return None
        world = Roster(self._services.job_id, number, target.layout, target.members)
        copy = Mirror(
            handoff_id,
            source.generation,
            number,
            HandoffState.PREPARING,
            world,
            1,
            lead.name,
            self._services.now_s,
            source=source,
            leaving=self._leaving(source, world),
            deadline_s=self._choose((None, self._services.now_s + 60.0)),
            rung=self._choose((Rung.LIVE, Rung.STOP_AND_COPY, Rung.RESCUE)),
            cause="notice" if self._draw.random() < 0.5 else "grow",
            store_node=self._choose((None, lead.name)),
        )
        self._led[handoff_id] = Led(copy)
        return f"{lead.name} opens {copy}; {self._tell(handoff_id, lead, most=0.85)}"

    def _move(self) -> str | None:
        handoff_id = self._any([name for name, led in self._led.items() if not led.is_over])
        if handoff_id is None:
            return None
        led = self._led[handoff_id]
        copy, members = led.copy, led.copy.source.node_ids() if led.copy.source is not None else ()
        lead = self._any([each for each in self._up() if each.name in members])
        if lead is None:
            return None
        what = self._draw.choices(("next", "amend", "abort", "break", "through"), (10, 3, 2.5, 1.5, 5))[0]
        changed: Mirror | None = None
        match what:
            case "next":
                states = (HandoffState.STREAMING, HandoffState.READY, HandoffState.CUTTING_OVER)
                decision = self._choose((Decision.UNDECIDED, Decision.UNDECIDED, Decision.GO))
                changed = replace(copy, state=self._choose(states), decision=decision)
            case "amend":
                changed = self._amended(copy)
            case "abort" | "break":
                state = HandoffState.ABORTED if what == "abort" else HandoffState.BROKEN
                superseded = what == "abort" and self._draw.random() < 0.2
                changed = replace(copy, state=state, reason=self._reason(copy), superseded=superseded)
            case "through":
                changed = replace(copy, state=HandoffState.ACTIVE, decision=Decision.GO, store_node=lead.name)
        if changed is None:
            return None
        led.older.append(copy)
        led.copy, led.is_told = replace(changed, mirror_seq=copy.mirror_seq + 1), False
        return f"{handoff_id[-2:]}: {what}: {led.copy}; {self._tell(handoff_id, lead, most=0.85)}"

    def _amended(self, copy: Mirror) -> Mirror | None:
        assert copy.source is not None
        target = self._target(copy.source)
        if target is None:
            return None
        world = Roster(copy.target.job_id, copy.generation, target.layout, target.members)
        for machine in self._machines.values():
            machine.ranks = {key: rank for key, rank in machine.ranks.items() if key[0] != copy.generation}
        leaving = self._leaving(copy.source, world)
        return replace(copy, target=world, leaving=leaving, plan_revision=copy.plan_revision + 1)

    def _tell_late(self) -> str | None:
        """What was not told, by whoever can."""
        untold = [name for name, led in self._led.items() if not led.is_told]
        if not untold:
            return None
        handoff_id = self._choose(untold)
        copy = self._led[handoff_id].copy
        teller = self._any([each for each in self._up() if each.name in (copy.source or copy.target).node_ids()])
        return None if teller is None else f"late: {copy}; {self._tell(handoff_id, teller, most=1.0)}"

    def _tell_old(self) -> str | None:
        """An earlier copy, or another agent's word of an end."""
        led = self._any([each for each in self._led.values() if each.older])
        if led is None or led.copy.source is None:
            return None
        copy = self._choose(led.older)
        if led.is_told and led.is_over and self._draw.random() < 0.3:
            state = self._choose((HandoffState.ABORTED, HandoffState.BROKEN))
            copy = replace(led.copy, state=state, reason=self._reason(copy), mirror_seq=led.copy.mirror_seq + 1)
        teller = self._any([each for each in self._up() if each.name in led.copy.source.node_ids()])
        if teller is None or not self._may_tell(copy):
            return None
        self._report(teller, mirrors=(copy,))
        return f"{teller.name} tells again: {copy}"

    def _tell(self, handoff_id: str, teller: Machine, *, most: float) -> str:
        led = self._led[handoff_id]
        if self._draw.random() > most or not self._may_tell(led.copy):
            return "told nobody"
        self._report(teller, mirrors=(led.copy,))
        led.is_told = True
        return f"told by {teller.name}"

    def _may_tell(self, copy: Mirror) -> bool:
        """Whether the service would hear it: of nodes that have a part in the job, and of a world that it knows."""
        nodes = {*copy.target.node_ids(), *(copy.source.node_ids() if copy.source is not None else ())}
        return nodes <= self._services.granted(nodes)

    def _decline(self) -> str | None:
        orders = self._services.simulated.orders()
        proposal, roster = orders.proposal, orders.roster
        if proposal is None or roster is None:
            return None
        lead = self._any([each for each in self._up() if each.name in roster.node_ids()])
        if lead is None:
            return None
        self._report(lead, declined=(DeclinedProposal(proposal.handoff_id, "no memory is left"),))
        return f"{lead.name} declines {proposal.handoff_id[-4:]}"

    def _target(self, source: Roster) -> Placement | None:
        granted = sorted(self._services.granted(set(self._machines)))
        count = self._choose((2, 3, 4))
        if len(granted) < count:
            return None
        members = tuple(Member(name, 0) for name in self._draw.sample(granted, count))
        return Placement(layout=LAYOUTS[count], members=members)

    @staticmethod
    def _leaving(source: Roster, target: Roster) -> tuple[str, ...]:
        return tuple(sorted(set(source.node_ids()) - set(target.node_ids())))

    def _reason(self, copy: Mirror) -> Reason | None:
        node = self._choose(copy.target.node_ids())
        return self._choose(
            (
                Reason("too little time is left", OUT_OF_TIME),
                Reason("rank 0 failed", "prepare", 0, node=node, cause=FailureCause(FailedPart.RANK, exit_code=1)),
                Reason("rank 1 is not reached", "cutover", 1, node=node, cause=FailureCause(FailedPart.PEER, peer=0)),
                Reason("some rank is not reached", "cutover", 1, cause=FailureCause(FailedPart.PEER)),
                Reason("the store is not reached", "cutover", 0, cause=FailureCause(FailedPart.STORE)),
                Reason(f"{node} is not heard", "prepare", node=node, cause=FailureCause(FailedPart.NODE)),
                Reason("it was taken back", "withdraw"),
                None,
            )
        )

    # Notices.

    def _hear_notice(self) -> str | None:
        """A new one, a nearer deadline, or the same from a peer."""
        machine = self._any(list(self._machines.values()))
        if machine is None:
            return None
        source, now_s = self._choose(("aws-imds", "host", "host")), self._services.now_s
        known = machine.notices.get(source)
        kinds = (NoticeKind.INTERRUPTION, NoticeKind.INTERRUPTION, NoticeKind.MAINTENANCE, NoticeKind.REBALANCE)
        deadline_s = self._choose((None, now_s + 20.0, now_s + 120.0))
        fact = NoticeFact(
            node_id=machine.name,
            kind=self._choose(kinds),
            source=source,
            deadline_utc=utc_or_none(deadline_s),
            first_seen_utc=self._clock(),
        )
        if known is not None and known.withdrawn_utc is None and self._draw.random() < 0.8:
            fact = known.model_copy(update={"deadline_utc": utc(now_s + 15.0)}) if self._draw.random() < 0.5 else known
        machine.notices[source] = fact
        mates = [each for each in self._mates(machine.name) if each is not machine]
        teller = self._any(mates) if not machine.is_up or self._draw.random() < 0.4 else machine
        if teller is None:
            return None
        self._report(teller, notices=(fact,))
        return f"{teller.name} tells {fact!r}"

    def _withdraw_notice(self) -> str | None:
        machine = self._any([each for each in self._up() if each.notices])
        if machine is None:
            return None
        source = self._choose(sorted(machine.notices))
        fact = machine.notices[source].model_copy(update={"withdrawn_utc": self._clock()})
        machine.notices[source] = fact
        self._report(machine, notices=(fact,))
        return f"{machine.name} withdraws {source}"

    def _mates(self, name: str) -> list[Machine]:
        """Members of the world of which this node is one."""
        roster = self._services.simulated.orders().roster
        has_ranks = self._services.simulated.state in (JobState.STARTING, JobState.RUNNING)
        names = roster.node_ids() if roster is not None and has_ranks else ()
        return [each for each in self._up() if each.name in names] if name in names else []

    # Nodes.

    def _fall_silent(self) -> str | None:
        machine = self._any(self._up())
        if machine is None or len(self._machines) - len(self._up()) >= AWAY_MOST:
            return None
        machine.is_up = False
        return f"{machine.name} is not heard any more"

    def _come_back(self) -> str | None:
        machine = self._any([each for each in self._machines.values() if not each.is_up and not each.is_revoked])
        if machine is None:
            return None
        how = self._choose(("the same", "another agent", "another machine"))
        machine.is_up = True
        if how != "the same":
            machine.incarnation, machine.said = machine.incarnation + 1, []
            is_machine = how == "another machine"
            self._services.comes(machine.name, incarnation=machine.incarnation, is_machine=is_machine)
            if is_machine:
                machine.ranks, machine.notices = {}, {}
        self._report(machine, notices=tuple(machine.notices.values()))
        return f"{machine.name} is back: {how}"

    def _repeat(self) -> str | None:
        """An old report arrives late, or a second time."""
        machine = self._any([each for each in self._machines.values() if each.said and not each.is_revoked])
        if machine is None:
            return None
        back = self._draw.randrange(min(3, len(machine.said)))
        self._services.report_again(machine.said[-1 - back], back=back)
        return f"an old report of {machine.name}, {back} before the last"

    # The job.

    def _checkpoint(self) -> str | None:
        orders, job = self._services.simulated.orders(), self._services.simulated.rows.job
        if orders.roster is None or job.state in ENDED:
            return None
        writer = self._any([each for each in self._up() if each.name in orders.roster.node_ids()])
        if writer is None or job.last_step < 1:
            return None
        report = self._new_report(writer)
        asked = orders.checkpoint_asked if self._draw.random() < 0.7 else 0
        seconds = self._choose((None, 1.5))
        step = self._draw.randint(max(1, job.last_step - 3), job.last_step)
        self._services.checkpoint(report, orders.roster.generation, step, seconds=seconds, asked=asked)
        return f"a checkpoint of step {step}, asked {asked}"

    def _revoke(self) -> str | None:
        machine = self._any(self._up())
        if machine is None or len(self._machines) - len(self._up()) >= AWAY_MOST:
            return None
        machine.is_up, machine.is_revoked = False, True
        self._services.revoke(machine.name)
        return f"the key of {machine.name} is revoked"

    def _stop(self) -> str | None:
        if self._services.simulated.has_ended or self._services.simulated.rows.job.stop_requested:
            return None
        self._services.stop()
        return "somebody stops the job"

    # Parts of all that.

    def _up(self) -> list[Machine]:
        return [each for each in self._machines.values() if each.is_up]

    def _report(
        self,
        machine: Machine,
        *,
        mirrors: tuple[Mirror, ...] = (),
        declined: tuple[DeclinedProposal, ...] = (),
        notices: tuple[NoticeFact, ...] = (),
    ) -> None:
        report = self._new_report(machine)
        self._services.report(replace(report, mirrors=mirrors, declined=declined, notices=notices))

    def _new_report(self, machine: Machine) -> AgentReport:
        self._clock.advance(0.001)  # No two of one agent are of one moment.
        ranks = tuple(machine.ranks.values())
        report = AgentReport(machine.name, self._services.now_s, machine.incarnation, ranks)
        machine.said.append(report)
        return report

    def _new_id(self) -> str:
        self._ids += 1
        return str(UUID(int=self._ids))

    def _any(self, values: list[ValueT]) -> ValueT | None:
        return self._draw.choice(values) if values else None

    def _choose(self, values: tuple[ValueT, ...] | list[ValueT]) -> ValueT:
        return self._draw.choice(values)


def _number(world: Roster) -> int:
    return world.generation


def _rank_in(world: Roster, name: str) -> int:
    return next(rank for rank, member in enumerate(world.members) if member.node_id == name)


def _shown(machine: Machine) -> str:
    return ", ".join(f"{rank.generation}/{rank.rank} {rank.stage} {rank.step}" for rank in machine.ranks.values())
