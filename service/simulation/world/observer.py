"""What is told to whoever watches a simulated world: everything that could break a rule. Pure.

An `Observer` watches nothing. The tests' simulator checks here what no party of the protocol can see by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from liver_core.handoff import Decision, Order, Report, Rung
from liver_core.handoff.cutover import CutoverEvent, CutoverState
from liver_core.handoff.leader import Leader
from liver_core.handoff.leader_events import LeaderEffect, LeaderEvent
from liver_core.handoff.messages import Promise
from liver_core.handoff.participant_events import ParticipantEvent, ParticipantRecord, ParticipantState
from liver_core.handoff.pending import PendingState
from liver_core.handoff.pending_events import PendingEvent
from liver_core.handoff.proposer import ProposerState
from liver_core.handoff.proposer_events import HandoffEnded, ProposerEvent, ProposerRecord
from service.simulation.world.parts import Agent, Rank, RankInPause, World

if TYPE_CHECKING:
    from collections.abc import Mapping

    from liver_core.layout import Member
    from service.jobs.causes import FirstCause


class Violation(AssertionError):
    """A rule is broken."""


class Observer:
    """Told before a thing happens where it says so, else right after it."""

    # Events of machines, with the state before.

    def participant(
        self, state: ParticipantState, promise: Promise | None, event: ParticipantEvent, following: ParticipantState
    ) -> None: ...

    def proposer(self, state: ProposerState, event: ProposerEvent) -> None: ...

    def pending(self, state: PendingState, event: PendingEvent) -> None: ...

    def cutover(self, state: CutoverState, event: CutoverEvent) -> None: ...

    # Agents that lead.

    def leader_begins(self, agent: Agent, leader: Leader) -> None:
        """A process of an agent has made its leader."""

    def leader(self, agent: Agent, event: LeaderEvent, effects: tuple[LeaderEffect, ...]) -> None:
        """It has taken an event, and is about to carry out what follows."""

    def said(self, agent: Agent, text: str, about: str) -> None:
        """People are told this."""

    # Worlds.

    def world_begins(self, world: World) -> None:
        """All ranks of a world train in it: a start has made its first step, or they have all come from a handoff."""

    def world_lost(self, world: World) -> None:
        """A rank of it is gone: no step comes any more."""

    def world_ends(self, world: World) -> None:
        """All of its ranks were told to end, and are about to."""

    # Steps.

    def gradients_whole(self, rank: RankInPause) -> None:
        """`rank` is about to apply a step."""

    def step_applied(self, rank: RankInPause, world: World, *, at_cutover: bool) -> None:
        """`rank` stepped from `rank.version - 1` to `rank.version` in `world`."""

    def first_step(self, rank: RankInPause, order: Order) -> None:
        """`rank` has made its first step in the world of `order`."""

    def checkpoint_published(self, generation: int, version: int) -> None:
        """A checkpoint of this version is complete."""

    # Starts.

    def started(self, generation: int) -> None:
        """The service starts a world with this number."""

    def start_heard(self, member: Member, generation: int) -> None:
        """An agent has heard that the service has started `generation`, and has carried out what follows."""

    def rank_starts(self, member: Member, generation: int, journal: ParticipantRecord) -> None:
        """A process of the start is made."""

    def job_lost(self, cause: FirstCause | None, reason: str) -> None:
        """The service is about to start the job again since its world cannot go on."""

    # Words and what is on disk.

    def persisted(self, member: Member, record: ParticipantRecord, rank: Rank | None) -> None:
        """A participant has written its record."""

    def report_spoken(self, report: Report, journal: ParticipantRecord, rank: Rank | None) -> None:
        """A participant is about to say something."""

    def agent_restored(self, member: Member, journal: ParticipantRecord) -> None:
        """A participant came back from its journal."""

    def opened(self, handoff_id: str, proposer: str) -> None:
        """A proposer is about to open a handoff."""

    def order_spoken(self, order: Order, journal: ProposerRecord) -> None:
        """A proposer is about to say something."""

    def handoff_ended(self, ended: HandoffEnded) -> None:
        """A proposer is done with a handoff."""

    # A rank in a handoff.

    def rank_prepares(self, rank: Rank, order: Order) -> None:
        """A rank is told to prepare."""

    def build_begins(self, rank: Rank) -> None:
        """`rank` is about to take memory for a next world."""

    def streams(self, rank: Rank) -> None:
        """`rank` begins to stream."""

    def newcomer_goes(self, rank: Rank) -> None:
        """`rank` cuts over to its first world."""

    def boundary_passed(self, rank: RankInPause, order: Order, *, dropped: bool) -> None:
        """`rank` learned that the boundary of `order` was agreed."""

    def stays(self, rank: Rank) -> None:
        """All ranks of its world have agreed to cut over, and `rank` does not."""

    def decided(self, order: Order, decision: Decision, held: Mapping[Member, Rank], version: int) -> None:
        """The decision record was written for the first time."""

    def goes(self, rank: RankInPause, order: Order, *, again: bool) -> None:
        """`rank` has read GO. `again`: the batch at the boundary is to be done once more."""

    def step_after_boundary(self, rank: RankInPause, handoff_id: str, record: Decision, *, in_target: bool) -> None:
        """`rank` is about to apply the step that a cutover was about."""

    def left(self, rank: RankInPause, handoff_id: str) -> None:
        """A rank leaves since it has no part in what goes on."""

    def fell(self, rank: RankInPause, order: Order) -> None:
        """`rank` can go on in no world."""


Attempt = tuple[str, int]
"""Handoff and generation: agents that do not hear each other may open the same handoff, or take the same number."""


def attempt_of(order: Order | Report) -> Attempt:
    """Of what this is."""
    return order.handoff_id, order.generation


def voters(order: Order) -> tuple[Member, ...]:
    """Whose state counts at the decision: every target, but in a rescue only who holds state already."""
    if order.rung is not Rung.RESCUE or order.source is None:
        return tuple(order.target.members)
    return tuple(member for member in order.target.members if member in order.source.members)
