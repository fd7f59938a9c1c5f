"""The pending handoff of a rank: what it builds, shows and drops, whatever comes in which order."""

import random
from collections.abc import Callable

import pytest

from liver_core.handoff import Agreement, Rung
from liver_core.handoff.messages import Order, RankStage, Reason, Tick
from liver_core.handoff.pending import Pending, PendingState
from liver_core.handoff.pending_events import (
    Aborted,
    Amend,
    BetweenSteps,
    BoundaryFound,
    BoundaryMissed,
    BoundaryOver,
    BuildFailed,
    BuildWorld,
    Built,
    BuiltWorld,
    Connect,
    Connected,
    CutOver,
    CutoverEnded,
    Dropped,
    DropWorld,
    EndNewcomer,
    Entered,
    OrderCame,
    PendingEffects,
    PendingEvent,
    Permitted,
    RankEnds,
    Say,
    Warn,
    Withdrawn,
)
from liver_core.handoff.ready_tag import NOTHING_WANTED, BoundaryPhase, agreed, ready_tag
from tests.liver_core.handoff.samples import DEADLINE, H1, H2, WHY, A, B, C, order, roster

FIRST = order()
NEARER = order(plan_revision=2, deadline_utc=DEADLINE - 50.0)
OTHER = order(plan_revision=2, target_revision=2, target=roster(2, A))
WITHOUT_US = order(plan_revision=2, target_revision=2, source=roster(1, B), target=roster(2, C))
READY = Agreement(BoundaryPhase.READY, ready_tag(H1, 1))


def feed(rank: Pending, *events: PendingEvent, now: float = 1.0) -> PendingEffects:
    """The effects of the last of these events."""
    effects: PendingEffects = ()
    for event in events:
        effects = rank.handle(event, now)
    return effects


def survivor(*events: PendingEvent) -> Pending:
    rank = Pending(A, trains=True)
    feed(rank, *events)
    return rank


def built(world: BuiltWorld | None = None, first: Order = FIRST) -> Pending:
    return survivor(OrderCame(first), Built(1, world or BuiltWorld()))


def permitted(world: BuiltWorld | None = None, first: Order = FIRST) -> Pending:
    rank = built(world, first)
    feed(rank, Permitted(first.handoff_id, first.plan_revision))
    return rank


def newcomer() -> Pending:
    rank = Pending(C, trains=False)
    feed(rank, Entered(FIRST), Built(1, BuiltWorld()))
    return rank


def stages(effects: PendingEffects) -> list[RankStage]:
    return [effect.stage for effect in effects if isinstance(effect, Say)]


def test_an_order_is_built_and_its_tag_is_shown_once_it_has_permission():
    rank = survivor()
    assert feed(rank, OrderCame(FIRST)) == (Say(FIRST, RankStage.PREPARING, build=1), BuildWorld(1, FIRST))
    assert rank.show() == NOTHING_WANTED
    assert stages(feed(rank, BoundaryOver(None), Built(1, BuiltWorld()))) == [RankStage.PREPARED]
    assert rank.show() == NOTHING_WANTED
    assert stages(feed(rank, BoundaryOver(None), Permitted(H1, 1))) == [RankStage.READY]
    word = rank.show()
    assert agreed(word, word) == READY
    assert feed(rank, BoundaryOver(READY)) == (CutOver(1),)


def test_a_boundary_on_which_not_all_agree_changes_nothing():
    rank = permitted()
    word = rank.show()
    assert feed(rank, BoundaryOver(None)) == ()
    assert rank.show() == word


def test_an_order_of_another_handoff_is_refused_while_one_is_pending():
    rank, other = built(), order(handoff_id=H2)
    [said] = feed(rank, OrderCame(other))
    assert isinstance(said, Say)
    assert (said.order, said.stage, str(said.reason)) == (
        other,
        RankStage.ABORTED,
        "rank 0, prepare: still preparing handoff h1",
    )


def test_an_order_that_is_repeated_or_older_changes_nothing():
    rank = survivor(OrderCame(NEARER))
    assert feed(rank, OrderCame(NEARER)) == feed(rank, OrderCame(FIRST)) == ()


def test_a_newer_revision_of_the_same_target_keeps_what_is_built():
    fell = Reason("the ring was overwritten", "stream")
    rank = built(BuiltWorld(fell=fell))
    assert feed(rank, OrderCame(NEARER)) == (Amend(1, NEARER), Say(NEARER, RankStage.PREPARED, fell, 1))
    assert not rank.is_permitted and feed(rank, Permitted(H1, 2)) == (Say(NEARER, RankStage.READY, fell, 1),)


def test_another_target_is_built_after_what_was_built_gives_way():
    rank = built()
    assert feed(rank, OrderCame(OTHER)) == (
        Say(OTHER, RankStage.PREPARING, build=2),
        BuildWorld(2, OTHER, gives_way=1),
    )


@pytest.mark.parametrize("ends", [Built(1, BuiltWorld()), BuildFailed(1, WHY)])
def test_another_target_waits_for_the_end_of_a_build_under_way(ends: Built | BuildFailed):
    rank = survivor(OrderCame(FIRST))
    assert feed(rank, OrderCame(OTHER)) == (Say(OTHER, RankStage.PREPARING, build=2),)
    assert rank.is_useless(1) and not rank.is_useless(2)
    gives_way = 1 if isinstance(ends, Built) else None
    assert feed(rank, ends) == (BuildWorld(2, OTHER, gives_way),)


def test_a_newer_revision_is_refused_while_the_older_one_has_permission():
    rank = permitted()
    [warned] = feed(rank, OrderCame(OTHER))
    assert isinstance(warned, Warn) and "revision 2 of handoff h1 is rejected" in warned.text


def test_a_newer_revision_waits_for_the_boundary_that_still_shows_the_older_one():
    rank = permitted()
    rank.show()
    assert feed(rank, Withdrawn(H1), OrderCame(OTHER)) == ()
    prepared, *builds = feed(rank, BoundaryOver(None))
    assert prepared == Say(FIRST, RankStage.PREPARED, build=1) and builds[-1] == BuildWorld(2, OTHER, gives_way=1)


def test_a_newer_revision_that_comes_after_the_boundary_was_agreed_is_forgotten():
    rank = permitted()
    rank.show()
    feed(rank, Withdrawn(H1), OrderCame(OTHER))
    assert feed(rank, BoundaryOver(READY)) == (CutOver(1),)
    assert rank.order == FIRST
    assert [type(effect) for effect in feed(rank, OrderCame(OTHER))] == [Warn]


def test_the_answer_to_a_withdrawal_is_the_outcome_of_the_boundary_that_is_under_way():
    rank = permitted()
    assert stages(feed(rank, Withdrawn(H1))) == [RankStage.PREPARED]
    feed(rank, Permitted(H1, 1))
    rank.show()
    assert feed(rank, Withdrawn(H1)) == ()
    assert stages(feed(rank, BoundaryOver(None))) == [RankStage.PREPARED]


def test_permission_for_a_revision_that_was_replaced_is_not_taken():
    rank = survivor(OrderCame(NEARER), Built(1, BuiltWorld()))
    [warned] = feed(rank, Permitted(H1, 1))
    assert isinstance(warned, Warn) and rank.show() == NOTHING_WANTED


def test_a_rank_without_a_part_in_the_newer_revision_drops_what_it_built():
    rank = built()
    assert feed(rank, OrderCame(WITHOUT_US)) == ()
    [dropped] = feed(rank, BetweenSteps())
    assert isinstance(dropped, DropWorld) and "no part in revision 2" in str(dropped.reason)


def test_an_abort_takes_the_tag_at_once_and_the_world_between_two_steps():
    rank = permitted()
    assert feed(rank, Aborted(H1, WHY)) == ()
    assert rank.show() == NOTHING_WANTED
    assert feed(rank, BoundaryOver(None), BetweenSteps()) == (DropWorld(1, WHY, beside=True),)
    assert rank.dropping == FIRST
    assert feed(rank, Dropped(1)) == (Say(FIRST, RankStage.ABORTED, WHY, 1),)
    assert rank.dropping is None


def test_an_abort_beside_a_boundary_counts_only_if_that_was_not_agreed():
    rank = permitted()
    rank.show()
    feed(rank, Aborted(H1, WHY))
    assert feed(rank, BoundaryOver(READY)) == (CutOver(1),)
    rank = permitted()
    rank.show()
    assert feed(rank, Aborted(H1, WHY), BoundaryOver(None), BetweenSteps()) == (DropWorld(1, WHY, beside=True),)


def test_an_abort_while_it_builds_ends_the_build_with_the_reason_of_the_abort():
    rank = survivor(OrderCame(FIRST), Aborted(H1, WHY))
    assert rank.is_useless(1)
    felt = Reason("aborted before plan", "prepare")
    assert feed(rank, BuildFailed(1, felt)) == (Say(FIRST, RankStage.ABORTED, WHY, 1),)
    assert rank.state is PendingState.IDLE


def test_an_abort_that_comes_before_its_order_ends_it():
    rank = survivor(Aborted(H1, WHY))
    assert feed(rank, OrderCame(FIRST)) == (Say(FIRST, RankStage.ABORTED, WHY, 0),)
    assert feed(rank, OrderCame(order(handoff_id=H2)))[-1] == BuildWorld(1, order(handoff_id=H2))


def test_a_newer_revision_that_crosses_the_report_of_the_end_begins_nothing():
    """The participant has let go of the handoff, so that nobody would ever abort it."""
    rank = survivor(OrderCame(FIRST), BuildFailed(1, WHY))
    assert feed(rank, OrderCame(NEARER)) == (Say(NEARER, RankStage.ABORTED, WHY, 1),)
    assert rank.state is PendingState.IDLE
    rank = built()
    feed(rank, Aborted(H1, WHY), BetweenSteps())
    assert feed(rank, OrderCame(NEARER)) == ()
    assert feed(rank, Dropped(1)) == (Say(NEARER, RankStage.ABORTED, WHY, 1),)


def test_aborts_of_handoffs_that_never_come_are_bounded():
    rank = survivor(*(Aborted(f"h{number}", WHY) for number in range(1000)))
    assert len(rank._over) == 64


def test_the_next_handoff_is_built_once_the_older_world_is_dropped():
    rank = built()
    feed(rank, Aborted(H1, WHY), BetweenSteps())
    following = order(handoff_id=H2)
    assert feed(rank, OrderCame(following)) == (Say(following, RankStage.PREPARING, build=2),)
    assert feed(rank, Dropped(1)) == (Say(FIRST, RankStage.ABORTED, WHY, 1), BuildWorld(2, following))


def test_a_handoff_that_is_aborted_before_it_could_be_built_is_over_at_once():
    rank = built()
    following = order(handoff_id=H2)
    feed(rank, Aborted(H1, WHY), BetweenSteps(), OrderCame(following))
    assert feed(rank, Aborted(H2, WHY)) == (Say(following, RankStage.ABORTED, WHY, 2),)
    assert feed(rank, Dropped(1)) == (Say(FIRST, RankStage.ABORTED, WHY, 1),)


def test_a_rank_that_ends_tells_the_reason_of_what_it_still_drops_once():
    rank = built()
    feed(rank, Aborted(H1, WHY), BetweenSteps())
    assert feed(rank, RankEnds()) == (Say(FIRST, RankStage.ABORTED, WHY, 1),)
    assert feed(rank, RankEnds()) == feed(rank, Dropped(1)) == ()


def test_communicators_are_made_at_a_boundary_of_their_own_whatever_came_since():
    rank = permitted(BuiltWorld(lacks_communicators=True))
    word = rank.show()
    connect = agreed(word, word)
    assert connect is not None and connect.phase is BoundaryPhase.CONNECT
    assert feed(rank, BoundaryOver(connect), BetweenSteps()) == (Connect(1),)
    feed(rank, Aborted(H1, WHY))
    assert feed(rank, BetweenSteps()) == (Connect(1),), "the others wait for this rank"
    feed(rank, Connected(1))
    assert feed(rank, BetweenSteps()) == (DropWorld(1, WHY, beside=True),)


def test_a_rank_that_could_connect_shows_that_it_is_ready_and_one_that_could_not_drops():
    rank = permitted(BuiltWorld(lacks_communicators=True))
    word = rank.show()
    feed(rank, BoundaryOver(agreed(word, word)), BetweenSteps(), Connected(1))
    word = rank.show()
    assert agreed(word, word) == READY
    rank = permitted(BuiltWorld(lacks_communicators=True))
    word = rank.show()
    feed(rank, BoundaryOver(agreed(word, word)), BetweenSteps(), Connected(1, WHY))
    assert rank.show() == NOTHING_WANTED and feed(rank, BetweenSteps()) == (DropWorld(1, WHY, beside=True),)


@pytest.mark.parametrize(("streams", "left_s", "drops"), [(False, 50.0, True), (True, 50.0, False), (True, 5.0, True)])
def test_a_step_is_dropped_if_its_end_would_be_too_late_or_the_state_must_be_copied(
    streams: bool, left_s: float, drops: bool
):
    rank = permitted(BuiltWorld(streams=streams), order(rung=Rung.DROP_STEP))
    word = rank.show_between_parts(10.0, DEADLINE - left_s)
    assert (word != NOTHING_WANTED) is drops
    if drops:
        agreement = agreed(word, word)
        assert agreement is not None and agreement.phase is BoundaryPhase.DROP
        assert feed(rank, BoundaryOver(agreement)) == (CutOver(1),)


def test_no_step_is_dropped_on_another_rung_or_before_communicators_are_made():
    assert permitted().show_between_parts(1e9, 0.0) == NOTHING_WANTED
    lacks = permitted(BuiltWorld(lacks_communicators=True), order(rung=Rung.DROP_STEP))
    assert lacks.show_between_parts(1e9, 0.0) == NOTHING_WANTED


@pytest.mark.parametrize("dropped", [None, WHY])
def test_after_a_cutover_the_next_handoff_can_come(dropped: Reason | None):
    rank = permitted()
    rank.show()
    feed(rank, BoundaryOver(READY))
    effects = feed(rank, CutoverEnded(dropped, beside=True))
    assert effects == (() if dropped is None else (DropWorld(1, WHY, beside=True),))
    feed(rank, Dropped(1))
    following = order(handoff_id=H2)
    assert feed(rank, OrderCame(following))[-1] == BuildWorld(2, following)


def test_a_newcomer_takes_the_newest_revision_that_came_before_it_could_build():
    rank = Pending(C, trains=False)
    assert feed(rank, OrderCame(NEARER)) == ()
    assert feed(rank, Entered(FIRST))[-1] == BuildWorld(1, NEARER)


def test_a_newcomer_goes_when_the_boundary_was_agreed_and_it_has_permission():
    rank = newcomer()
    assert feed(rank, BoundaryFound(1)) == ()
    assert feed(rank, Permitted(H1, 1))[-1] == CutOver(1)
    rank = newcomer()
    feed(rank, Permitted(H1, 1), Withdrawn(H1))
    assert feed(rank, BoundaryFound(1)) == ()
    assert feed(rank, Permitted(H1, 1))[-1] == CutOver(1), "the others had agreed before it was taken back"


def test_a_newcomer_needs_permission_for_the_revision_that_it_goes_with():
    rank = newcomer()
    feed(rank, Permitted(H1, 1), Withdrawn(H1), OrderCame(NEARER))
    assert feed(rank, BoundaryFound(1)) == ()
    assert feed(rank, Permitted(H1, 2))[-1] == CutOver(1)


def test_a_newcomer_without_permission_ends_at_the_deadline():
    rank = newcomer()
    late = FIRST.boundary_by(C)
    assert feed(rank, Tick(), now=late - 0.1) == ()
    dropped, ended = feed(rank, Tick(), now=late)
    assert isinstance(dropped, DropWorld) and not dropped.beside
    assert isinstance(ended, EndNewcomer) and ended.reason.text == "no permission before the deadline"
    assert stages(feed(rank, Dropped(1))) == [RankStage.ABORTED]
    assert feed(rank, Tick(), OrderCame(OTHER), now=late + 1) == ()


def test_a_newcomer_that_misses_the_boundary_or_cannot_build_ends_with_the_reason_of_an_abort_if_there_is_one():
    missed = Reason("the store is gone", "boundary")
    rank = newcomer()
    assert feed(rank, Permitted(H1, 1), BoundaryMissed(1, missed))[-1] == EndNewcomer(missed)
    rank = newcomer()
    assert feed(rank, Permitted(H1, 1), Aborted(H1, WHY), BoundaryMissed(1, missed))[-1] == EndNewcomer(WHY)
    rank = Pending(C, trains=False)
    said, ended = feed(rank, Entered(FIRST), BuildFailed(1, missed))
    assert said == Say(FIRST, RankStage.ABORTED, missed, 1) and isinstance(ended, EndNewcomer)


def test_a_first_world_has_permission_before_it_is_built():
    start = order(source=None, parent=0, generation=2, target=roster(2, C))
    rank = Pending(C, trains=False)
    feed(rank, Permitted(H1, 1), Entered(start), Built(1, BuiltWorld()))
    assert feed(rank, BoundaryFound(1)) == (CutOver(1),)
    assert feed(rank, CutoverEnded()) == () and rank.trains


class Walk:
    """A host that answers in any order, beside an agent that says anything; and what must hold after each event."""

    def __init__(self, seed: int, *, trains: bool) -> None:
        self.random = random.Random(seed)
        self.rank = Pending(A if trains else C, trains=trains)
        self.building: dict[int, Order] = {}
        self.worlds: set[int] = set()
        self.dropping: set[int] = set()
        self.shown: Order | None = None
        self.agreed_on: Order | None = None
        self.connecting: int | None = None
        self.cutting: int | None = None
        self.over = False
        self.begun = self.ended = 0

    def take(self, event: PendingEvent, now: float = 1.0) -> None:
        was_idle = self.rank.order is None
        if isinstance(event, OrderCame) and (dropping := self.rank.dropping) is not None:
            was_idle = was_idle and dropping.handoff_id != event.order.handoff_id
        effects = self.rank.handle(event, now)
        self.begun += was_idle and isinstance(event, OrderCame | Entered) and self.rank.state is not PendingState.ENDED
        for effect in effects:
            self.carry_out(effect)
        assert len(self.worlds) + len(self.building) <= 1, "two next worlds take memory"
        if self.agreed_on is not None and self.cutting is not None:
            assert self.rank.order == self.agreed_on, "the boundary was agreed for another revision"

    def carry_out(self, effect: object) -> None:
        match effect:
            case BuildWorld(build=build, order=request, gives_way=older):
                self.worlds.discard(older or 0)
                assert not self.dropping and not self.building
                self.building[build] = request
            case CutOver(build=build):
                assert build in self.worlds and self.cutting is None
                self.cutting = build
            case Connect(build=build):
                assert build in self.worlds
                self.connecting = build
            case DropWorld(build=build):
                assert build in self.worlds and build != self.connecting
                self.dropping.add(build)
                if self.cutting == build:
                    self.cutting = None
            case Say(stage=RankStage.ABORTED, reason=reason) if "still preparing" not in str(reason):
                self.ended += 1
            case Say(stage=RankStage.READY | RankStage.PREPARED):
                assert self.cutting is None
                assert effect.stage is RankStage.READY or self.shown is None, "the tag may be agreed on right now"
            case EndNewcomer():
                self.over = True
            case _:
                pass

    def choices(self) -> list[Callable[[], None]]:
        pick, rank = self.random, self.rank
        handoff, revision = pick.choice([H1, H2]), pick.randint(1, 4)
        request = order(handoff_id=handoff, plan_revision=revision, target_revision=(revision + 1) // 2)
        found: list[Callable[[], None]] = [
            lambda: self.take(OrderCame(request)),
            lambda: self.take(Permitted(handoff, revision)),
            lambda: self.take(Withdrawn(handoff)),
            lambda: self.take(BetweenSteps()) if self.shown is None and self.connecting is None else None,
        ]
        if pick.random() < 0.2:
            found.append(lambda: self.take(Aborted(handoff, WHY)))
        found += [lambda build=build: self.built(build) for build in self.building]
        found += [lambda build=build: self.dropped(build) for build in self.dropping]
        if self.cutting is not None:
            return [*found[:3], self.cutover_ends]
        if self.connecting is not None:
            return [*found, self.connected]
        if not rank.trains:
            return [*found, lambda: self.take(BoundaryFound(rank.build)), lambda: self.take(Tick(), DEADLINE * 9)]
        return [*found, self.shows if self.shown is None else self.boundary_over]

    def built(self, build: int) -> None:
        del self.building[build]
        if self.random.random() < 0.3:
            return self.take(BuildFailed(build, WHY))
        self.worlds.add(build)
        return self.take(Built(build, BuiltWorld(lacks_communicators=self.random.random() < 0.3)))

    def dropped(self, build: int) -> None:
        self.dropping.discard(build)
        self.worlds.discard(build)
        self.take(Dropped(build))

    def shows(self) -> None:
        if self.rank.show() != NOTHING_WANTED:
            self.shown = self.rank.order
            assert self.rank.build in self.worlds and self.rank.is_permitted

    def boundary_over(self) -> None:
        shown, self.shown = self.shown, None
        assert shown is not None
        world = self.rank.world
        phase = BoundaryPhase.CONNECT if world and world.lacks_communicators else BoundaryPhase.READY
        agrees = self.random.random() < 0.5
        self.agreed_on = shown if agrees and phase is BoundaryPhase.READY else None
        self.take(BoundaryOver(Agreement(phase, ready_tag(shown.handoff_id, shown.plan_revision)) if agrees else None))
        assert not agrees or self.rank.state in (PendingState.CONNECTING, PendingState.CUTTING), "a rank is left alone"

    def connected(self) -> None:
        build, self.connecting = self.connecting, None
        assert build is not None
        self.take(Connected(build, WHY if self.random.random() < 0.3 else None))

    def cutover_ends(self) -> None:
        build, self.cutting, self.agreed_on = self.cutting, None, None
        assert build is not None
        if self.random.random() < 0.5:
            self.worlds.discard(build)
            self.ended += 1
            self.take(CutoverEnded())
        else:
            self.take(CutoverEnded(WHY, beside=True))

    def settle(self) -> None:
        """Nothing more comes from outside: the walk comes to rest."""
        for _ in range(50):
            if self.cutting is not None:
                self.cutover_ends()
            elif self.connecting is not None:
                self.connected()
            elif self.shown is not None:
                self.boundary_over()
            elif self.building:
                self.built(next(iter(self.building)))
            elif self.dropping:
                self.dropped(next(iter(self.dropping)))
            elif self.rank.order is not None:
                self.take(Aborted(self.rank.order.handoff_id, WHY))
                self.take(BetweenSteps())
        assert self.over or self.rank.state is PendingState.IDLE
        assert not self.worlds and not self.building, "something is left behind"
        assert self.begun == self.ended, "each handoff that began ends with one report"


@pytest.mark.parametrize("trains", [True, False])
def test_whatever_comes_in_whichever_order_no_rank_is_left_alone_and_no_world_behind(trains: bool):
    for seed in range(1500):
        walk = Walk(seed, trains=trains)
        if not trains:
            walk.take(Entered(order()))
        for _ in range(40):
            if walk.over:
                break
            walk.random.choice(walk.choices())()
        walk.settle()


def test_why_the_state_is_copied_after_all_goes_with_every_stage():
    """The participant takes the newest report: without it nobody would hear that the next rung was taken."""
    fell = Reason("the certificate differs", "stream")
    rank = built(BuiltWorld(fell=fell))
    assert feed(rank, Permitted(H1, 1)) == (Say(FIRST, RankStage.READY, fell, 1),)
    assert feed(rank, Withdrawn(H1)) == (Say(FIRST, RankStage.PREPARED, fell, 1),)
