"""Whatever happens to a leader, in whatever order: its rules hold at every moment."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from liver_core.handoff import Phase, RankStage, Reason
from liver_core.handoff.leader_events import (
    AskedToLead,
    AskPeers,
    Forwarded,
    ForwardNotices,
    HandoffAmended,
    HandoffOpened,
    LeaderEffect,
    Loss,
    NoPlan,
    PeersAnswered,
    PeersUnreachable,
    Promised,
    Say,
    StartStore,
    StoreDied,
    StoreFailed,
    StoreReady,
    Wait,
    WorldStarted,
)
from liver_core.handoff.proposer import ProposerState
from liver_core.handoff.proposer_events import Cancel, SendOrder, Tick
from tests.liver_core.handoff.leader_scene import ACTIVE, FOUR, STORE, Scene, wanted

NODES = (*FOUR, "e")
WELL = (RankStage.PREPARED, RankStage.READY, RankStage.CUTTING_OVER, RankStage.ACTIVE, RankStage.ACTIVE)
"""The stages of a rank where all goes well."""
STAGES = (
    RankStage.PREPARING,
    RankStage.STREAMING,
    RankStage.PREPARED,
    RankStage.READY,
    RankStage.CUTTING_OVER,
    RankStage.ACTIVE,
    RankStage.ABORTED,
    RankStage.BROKEN,
)

events = st.one_of(
    st.tuples(st.just("time"), st.floats(0.0, 20.0)),
    st.tuples(st.just("look"), st.dictionaries(st.sampled_from(NODES), st.floats(-5.0, 90.0), max_size=4)),
    st.tuples(st.just("look"), st.dictionaries(st.sampled_from(NODES), st.floats(20.0, 90.0), max_size=2)),
    st.tuples(st.just("opens"), st.dictionaries(st.sampled_from(NODES), st.floats(20.0, 90.0), min_size=1, max_size=2)),
    st.tuples(st.just("so far"), st.integers(1, 5)),
    st.tuples(st.just("proposed"), st.sampled_from(("s1", "s2"))),
    st.tuples(st.just("asked"), st.none()),
    st.tuples(st.just("answers"), st.sampled_from(("well", "well", "too few", "higher", "late"))),
    st.tuples(st.just("store"), st.sampled_from(("well", "well", "fails", "late"))),
    st.tuples(st.just("ranks"), st.sampled_from(STAGES)),
    st.tuples(st.just("plans"), st.sampled_from((None, None, NoPlan("none"), Wait("asking")))),
    st.tuples(st.just("dies"), st.integers(1, 8)),
    st.tuples(st.just("starts"), st.sampled_from((1, 100_001))),
    st.tuples(st.just("cancel"), st.none()),
    st.tuples(st.just("away"), st.sets(st.sampled_from(NODES))),
    st.tuples(st.just("tick"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)


class Attacked(Scene):
    """Checks every effect. `dying`: generations whose store this node must not use again."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id)
        self.plans.spares = ("e",)
        self.asked_for = 0
        self.stored: list[int] = []
        self.opened: list[int] = []
        self.deadlines: dict[str, float] = {}
        self.losses: tuple[Loss, ...] = ()

    def happen(self, what: str, value: object) -> None:
        own = self.leader.own
        if what == "time":
            assert isinstance(value, float)
            self.now += value
        elif what == "look":
            assert isinstance(value, dict)
            self.losses = tuple(self.goes(name, in_s) for name, in_s in value.items())
            self._look()
        elif what == "proposed":
            self._look()
            self._take(self.hear(wanted(str(value))))
        elif what == "opens":
            for each in (("look", value), ("asked", None), ("look", value), ("answers", "well"), ("store", "well")):
                self.happen(*each)
        elif what == "so far":
            assert isinstance(value, int)
            for stage in WELL[:value]:
                self.say(stage)
        elif what == "restart":
            self.stored = [each for each in self.stored if each in self.opened]  # The host knows which ones still run.
            self.restart()
        elif what == "asked":
            self.hear(AskedToLead())
        elif what == "answers":
            late, higher = value == "late", own.used + 1 if value == "higher" else 0
            answer = PeersAnswered(self.asked_for - late, "cut off" * (value == "too few"), higher)
            self._take(self.hear(answer))
        elif what == "store" and self.stored:
            number = self.stored[-1] - (value == "late")
            self._take(self.hear(StoreFailed(number, "died") if value == "fails" else StoreReady(number, STORE)))
        elif what == "ranks":
            assert isinstance(value, RankStage)
            self.say(value, reason=Reason("so it is", "test"))
        elif what == "plans":
            self.plans.finds = value  # type: ignore[assignment]
        elif what == "dies":
            assert isinstance(value, int)
            self._take(self.hear(StoreDied(value)))
        elif what == "starts":
            assert isinstance(value, int)
            self._take(self.hear(WorldStarted(value)))
        elif what == "cancel":
            self._take(self.hear(Cancel(Reason("enough", "cancel"))))
        elif what == "away":
            assert isinstance(value, set)
            self._take(self.hear(PeersUnreachable(dict.fromkeys(value, self.now - 30.0))))
        else:
            self._take(self.hear(Tick()))

    def _look(self) -> None:
        own = self.leader.own
        was_idle, waits = own.is_idle, self.now < self.leader.next_deadline and own.next_deadline > self.now
        order = next((item.record.order for item in self.participants.values() if item.record.order is not None), None)
        promised = order and Promised(order.proposer_id, frozenset(order.target.node_ids()))
        effects = self.look(*self.losses, promised=promised)
        self._take(effects)
        going = {loss.node_id for loss in self.losses} & set(ACTIVE.node_ids())
        if was_idle and self.leader.node_id in going:
            assert own.is_idle, "a node that will go opens nothing"
        may_open = self.plans.candidates(ACTIVE, going)[:1] == (self.leader.node_id,)
        if going and may_open and was_idle and not waits:
            says = any(isinstance(effect, Say) for effect in effects)
            assert says or not own.is_idle, "it acts, or says why it does not"

    def hear(self, event: object) -> tuple[LeaderEffect, ...]:
        effects = super().hear(event)  # type: ignore[arg-type]
        self._check(effects)
        return effects

    def _take(self, effects: tuple[LeaderEffect, ...]) -> None:
        """What the host does at once."""
        for effect in effects:
            if isinstance(effect, ForwardNotices):
                self.hear(Forwarded(effect.to[0]))

    def _check(self, effects: tuple[LeaderEffect, ...]) -> None:
        own = self.leader.own
        for effect in effects:
            if isinstance(effect, AskPeers):
                self.asked_for = effect.generation
            elif isinstance(effect, StartStore):
                assert effect.generation not in self.stored, "a number is never used twice"
                assert not self.stored or effect.generation > self.stored[-1]
                self.stored.append(effect.generation)
            elif isinstance(effect, HandoffOpened):
                assert effect.generation == self.stored[-1], "it has the number of its store"
                assert effect.generation not in self.opened
                self.opened.append(effect.generation)
            elif isinstance(effect, SendOrder):
                handoff_id, deadline = effect.order.handoff_id, effect.order.deadline_utc
                assert deadline <= self.deadlines.get(handoff_id, deadline), "a deadline only comes nearer"
                self.deadlines[handoff_id] = deadline
            elif isinstance(effect, HandoffAmended):
                assert not own.proposer.tally.boundary_passed(), "past the boundary it is the next handoff"
        assert own._opening is None or own.state is ProposerState.IDLE, "one at a time"
        assert (own.led is None) is (own.proposer.record.proposal is None)
        if own.led is not None and own.proposer.record.phase is not Phase.WITHDRAW:
            assert own.led.wanted is None


@given(st.sampled_from(("a", "b", "d")), st.lists(events, min_size=10, max_size=60))
@example("a", [("look", {"b": 1.0}), ("time", 1.0), ("opens", {"a": 20.0}), ("asked", None), ("look", {"b": 1.0})])
@settings(deadline=None, max_examples=300)
def test_the_rules_of_a_leader_hold_whatever_happens(node_id: str, happened: list[tuple[str, object]]):
    now = Attacked(node_id)
    for what, value in happened:
        now.happen(what, value)
