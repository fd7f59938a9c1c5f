"""Who is blamed for the loss of a world: what somebody saw, in whatever order it is reported; never an inference."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import HandoffState
from service.jobs.causes import FailedPart, FirstCause, Known, first_cause, first_of
from service.jobs.crashes import RankError
from service.jobs.tables import JobState
from service.jobs.view import Do, JobView, Loss
from tests.service.jobs.test_rules import FELT, act, at, handoff, view

SAID = {
    Known.KILLED: FirstCause(FailedPart.RANK, "d", 3, signal="SIGKILL", step=50),
    Known.EXITED: FirstCause(FailedPart.RANK, "c", 2, exit_code=1, step=50),
    Known.ABORTED: FirstCause(FailedPart.RANK, "a", 0, signal="SIGABRT", step=50),
    Known.FAILED: FirstCause(FailedPart.RANK, "b", 1, step=49),
    Known.STORE: FirstCause(FailedPart.STORE, "a", step=50),
    Known.CHECKPOINT: FirstCause(FailedPart.CHECKPOINT, step=50),
    Known.START: FirstCause(FailedPart.START),
    Known.NODE: FirstCause(FailedPart.NODE, "e", step=50),
    Known.FELT: FirstCause(FailedPart.PEER, step=50),
}
SEEN_BESIDE = {
    Known.NODE: ({"away": ["e"], "stopped": ()}, FirstCause(FailedPart.NODE, "e", step=50)),
    Known.STOPPED: ({"away": [], "stopped": (("f", 5),)}, FirstCause(FailedPart.RANK, "f", 5, step=50)),
}
NOTHING_BESIDE = {"away": [], "stopped": ()}
FELT_BY_A = RankError("rank 0 on node a is broken", "no answer", "a", 0, 50, FELT)
FELT_BY_B = RankError("rank 1 on node b is broken", "no answer", "b", 1, 50, FELT)
END = ProcessEnd(7, signal="SIGKILL", step=50)
NEWCOMER = RankError("rank 2 on node d is failed", str(END), "d", 2, 50, None, END)


def test_what_was_seen_wins_over_what_is_inferred_in_either_order_and_an_inference_names_nobody():
    felt = SAID[Known.FELT]
    assert (felt.node, felt.rank) == (None, None)
    assert first_cause([felt], **NOTHING_BESIDE) == felt
    for seen, cause in SAID.items():
        assert cause.known is seen
        if seen.is_seen:
            assert first_cause([cause, felt], **NOTHING_BESIDE) == first_cause([felt, cause], **NOTHING_BESIDE) == cause
    for beside, cause in SEEN_BESIDE.values():
        assert first_cause([felt], **beside) == cause


def test_each_line_of_the_table_outranks_those_below_it_in_either_order():
    for (known, cause), (other, second) in product(SAID.items(), repeat=2):
        if known < other:
            assert first_of([cause, second]) == first_of([second, cause]) == cause
    for known, cause in SAID.items():
        for beside, (facts, found) in SEEN_BESIDE.items():
            expected = cause if known <= beside else replace(found, step=cause.step)
            assert first_cause([cause], **facts) == expected


def test_of_several_nodes_that_are_not_heard_or_ranks_that_are_stopped_none_is_named():
    felt = SAID[Known.FELT]
    assert first_cause([felt], away=["d", "e"], stopped=()) == felt
    assert first_cause([felt], away=[], stopped=(("a", 0), ("b", 1))) == felt


CAUSES = st.builds(
    FirstCause,
    st.sampled_from(FailedPart),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([None, "SIGKILL", "SIGABRT"]),
    st.sampled_from([None, 1]),
    st.sampled_from([None, 1, 2]),
)


ORDERS = st.lists(CAUSES, min_size=1, max_size=6).flatmap(
    lambda found: st.tuples(st.just(found), st.permutations(found))
)


@given(ORDERS)
def test_the_first_cause_depends_on_no_order_of_arrival(orders: tuple[list[FirstCause], list[FirstCause]]):
    first, second = orders
    assert first_of(first) == first_of(second)
    assert first_of([first_of(second[:-1]), second[-1]]) == first_of(first), "nor on what was settled meanwhile"


ABORTS = ProcessEnd(8, signal="SIGABRT", step=50)
ABORTED_ON_C = RankError("rank 2 on node c is failed", str(ABORTS), "c", 2, 50, None, ABORTS)
BROKEN = Loss("handoff 7 is broken: no answer", FirstCause(FailedPart.PEER), since=at(0))
TOLD = {"a rank misses another": FELT_BY_A, "and one more": FELT_BY_B, "a rank aborts itself": ABORTED_ON_C}
FACTS = (*TOLD, "the handoff is broken", "the rank that was killed")


def arrived(facts: tuple[str, ...], *, now_s: float) -> JobView:
    """A world of which so much has been reported since second 0, and whose handoff was past its boundary."""
    errors, is_broken = tuple(TOLD[fact] for fact in facts if fact in TOLD), FACTS[-2] in facts
    return view(
        now=at(now_s),
        errors=errors,
        error_at=at(0) if errors else None,
        broken=(BROKEN,) if is_broken else (),
        clues=(NEWCOMER,) if FACTS[-1] in facts else (),
        handoff=None if is_broken else handoff(state=HandoffState.CUTTING_OVER, leaving=(), target_nodes=tuple("abcd")),
    )


@pytest.mark.parametrize("facts", list(permutations(FACTS)))
def test_in_whatever_order_a_loss_is_reported_the_rank_that_was_killed_is_the_cause(facts: tuple[str, ...]):
    """A tenth of a second apart: its agent is never much later than what others feel."""
    actions = [act(arrived(facts[:count], now_s=0.1 * count)) for count in range(1, len(FACTS) + 1)]
    causes = [action.cause for action in actions if action.do is Do.START]
    assert causes and set(causes) == {NEWCOMER.cause}


# What a handoff says that broke.


def test_of_a_handoff_that_broke_the_node_that_is_not_heard_is_the_cause_and_is_waited_for():
    """A machine that fell at the switch: its ranks say nothing, and the others only that they get no answer."""
    broke = view(broken=(BROKEN,), now=at(1))
    waits = act(broke)
    assert (waits.do, waits.look_again_s) == (Do.NOTHING, 0.3)
    known = act(replace(broke, now=at(9), silent=("c",)))
    assert (known.do, known.cause) == (Do.START, FirstCause(FailedPart.NODE, "c"))
    assert known.reason.startswith("c is not heard; handoff 7 is broken: no answer; restart")
    unknown = act(replace(broke, now=at(9)))
    assert (unknown.do, unknown.cause) == (Do.START, FirstCause(FailedPart.PEER))
    store = replace(BROKEN, cause=FirstCause(FailedPart.STORE, "a"))
    assert act(replace(broke, broken=(store,))).cause == store.cause, "nobody knows more of it"


def test_a_newcomer_whose_machine_is_gone_is_the_cause_once_its_handoff_is_past_the_boundary():
    felt = view(errors=(FELT_BY_A, FELT_BY_B), error_at=at(0), now=at(9), absent=("d",))
    node = FirstCause(FailedPart.NODE, "d", step=50)
    assert act(replace(felt, broken=(BROKEN,))).cause == node
    targets = {"leaving": (), "target_nodes": tuple("abcd")}
    assert act(replace(felt, handoff=handoff(state=HandoffState.CUTTING_OVER, **targets))).cause == node
    before = act(replace(felt, handoff=handoff(state=HandoffState.PREPARING, **targets)))
    assert before.cause is not None and before.cause.is_felt, "the world did without it until then"


def test_a_newcomer_that_was_killed_is_the_cause_and_not_the_healthy_rank_that_was_the_last_to_report():
    last = view(errors=(FELT_BY_A,), error_at=at(0), now=at(9))
    action = act(replace(last, clues=(NEWCOMER,)))
    assert (action.do, action.cause) == (Do.START, NEWCOMER.cause)
    assert action.reason.startswith("rank 2 on node d is failed; restart")
    assert act(last).cause == FirstCause(FailedPart.PEER, step=50)


def test_what_ranks_of_a_next_world_say_is_no_loss_of_this_one():
    assert act(view(clues=(NEWCOMER,))).do is Do.NOTHING


def test_a_start_that_broke_waits_for_the_nodes_that_its_lead_may_have_missed():
    broke = view(state=JobState.STARTING, state_changed_at=at(-30), now=at(9), broken=(BROKEN,), unconfirmed=("c",))
    assert act(broke).do is Do.NOTHING
    assert act(replace(broke, unconfirmed=())).do is Do.START


# Where every member leaves.

EVERYBODY = tuple(
    RankError(f"rank {rank} on node {node} is failed", str(END), node, rank, 50, None, END)
    for rank, node in enumerate("abc")
)


def test_where_every_member_leaves_and_all_have_died_the_next_world_has_seconds_to_say_that_it_goes():
    swap = handoff(state=HandoffState.CUTTING_OVER, leaving=tuple("abc"), target_nodes=("d", "e"))
    died = view(errors=EVERYBODY, error_at=at(0), last_step_at=at(-1), handoff=swap)
    assert act(replace(died, now=at(4.9))).do is Do.NOTHING
    lost = act(replace(died, now=at(5.1)))
    assert (lost.do, lost.cause) == (Do.START, EVERYBODY[0].cause)
    assert act(replace(died, now=at(5.1), handoff=replace(swap, may_lose_leavers=True))).do is Do.NOTHING, "it goes"
    assert act(replace(died, now=at(60), errors=EVERYBODY[:2])).do is Do.NOTHING, "one of them can still be read"


def test_a_leaver_that_broke_another_handoff_too_is_lost_by_the_one_that_goes_without_it():
    """Two were open at once: that the earlier one broke says no more than that the leaver died."""
    died = FirstCause(FailedPart.RANK, "c", 2)
    broke = Loss("handoff 7 is broken: there is no such process", died, since=at(0))
    goes = handoff(state=HandoffState.CUTTING_OVER, leaving=("c",), target_nodes=("a", "b"))
    both = view(broken=(broke,), now=at(9), last_step_at=at(-1), handoff=goes)
    assert act(both).do is Do.NOTHING
    for other in (replace(died, node="b"), FirstCause(FailedPart.PEER), None):
        assert act(replace(both, broken=(broke, replace(broke, cause=other)))).do is Do.START, other
    assert act(replace(both, handoff=None)).do is Do.START
