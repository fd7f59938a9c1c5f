"""Which of several facts about one failure is its first cause."""

from dataclasses import replace

import pytest

from agent.protocol.process_end import ProcessEnd
from liver_core.handoff import OUT_OF_TIME, FailureCause, Reason
from liver_core.handoff.refusals import REFUSED
from liver_core.layout import Member, ParallelLayout, Roster
from service.jobs.causes import (
    FailedPart,
    FirstCause,
    cause_of_attempt,
    cause_of_rank,
    first_cause,
    first_of,
    in_words,
    said_of,
    stood_in_the_way,
)

OF_ITSELF = FailureCause(FailedPart.RANK, signal="SIGBUS")
FELT, STORE = FailureCause(FailedPart.PEER), FailureCause(FailedPart.STORE)
KILLED = ProcessEnd(7, signal="SIGKILL", step=6)
EXITED = ProcessEnd(8, exit_code=1, step=6, reported="IndexError: list index out of range")
SENTENCE = "rank process (pid 7) was killed by SIGKILL after step 6; the store is gone: Connection closed by peer"


def of_rank(rank: int, step: int, said: FailureCause | ProcessEnd | None) -> FirstCause:
    """Of a rank on node b that said this, or of which its agent did."""
    if isinstance(said, ProcessEnd):
        return cause_of_rank("b", rank, step, said.cause(None), said)
    return cause_of_rank("b", rank, step, said, None)


@pytest.mark.parametrize(
    ("said", "end", "cause"),
    [
        (None, None, FirstCause(FailedPart.RANK, "b", 1, step=5)),
        (OF_ITSELF, None, FirstCause(FailedPart.RANK, "b", 1, signal="SIGBUS", step=5)),
        (None, KILLED, FirstCause(FailedPart.RANK, "b", 1, signal="SIGKILL", step=6)),
        (None, EXITED, FirstCause(FailedPart.RANK, "b", 1, exit_code=1, step=6)),
        (FELT, None, FirstCause(FailedPart.PEER, step=5)),
        (FELT, EXITED, FirstCause(FailedPart.PEER, step=6)),
        (FELT, KILLED, FirstCause(FailedPart.RANK, "b", 1, signal="SIGKILL", step=6)),
        (STORE, None, FirstCause(FailedPart.STORE, step=5)),
        (FailureCause(FailedPart.STORE, step=6), None, FirstCause(FailedPart.STORE, step=6)),
    ],
)
def test_what_a_rank_or_its_agent_says_names_who_failed_and_not_who_misses_it(said, end, cause):
    assert cause_of_rank("b", 1, 5, said, end) == cause


def test_a_rank_that_agents_ended_since_a_node_goes_names_that_node_and_not_its_own():
    gone = FailureCause(FailedPart.NODE)
    assert cause_of_rank("b", 1, 5, gone, None, blamed="c") == FirstCause(FailedPart.NODE, "c", step=5)
    assert cause_of_rank("b", 1, 5, gone, None) == FirstCause(FailedPart.NODE, step=5), "who does not say it"
    assert cause_of_rank("b", 1, 5, FELT, None, blamed="c") == FirstCause(FailedPart.PEER, step=5)


def test_no_sentence_is_a_cause():
    """An older agent gives none; and a rank may print what it likes."""
    assert said_of({"reason": {"text": SENTENCE, "phase": "x", "rank": 1}}) is None
    assert said_of({"reason": {"text": "x", "cause": {"what": "peer", "signal": None, "step": 3}}}) == FailureCause(
        FailedPart.PEER, step=3
    )
    assert said_of({}) is None
    assert cause_of_attempt(Reason(SENTENCE, "read", 2, node="b"), store_node="a") == FirstCause(
        FailedPart.RANK, "b", 2
    )
    assert cause_of_attempt(Reason(SENTENCE, "read"), store_node="a") is None


def test_who_knows_of_an_end_outranks_who_reports_an_error_and_both_who_felt_it():
    causes = [of_rank(1, 6, said) for said in (KILLED, None, STORE, FELT)]
    for known in range(len(causes)):
        assert first_of(reversed(causes[known:])) == causes[known]
    assert first_of([None, causes[3]]) == causes[3]
    assert first_of([]) is None


@pytest.mark.parametrize(
    ("said", "away", "cause"),
    [
        (FELT, ["c"], FirstCause(FailedPart.NODE, "c", step=5)),
        (FELT, [], FirstCause(FailedPart.PEER, step=5)),
        (FELT, ["c", "d"], FirstCause(FailedPart.PEER, step=5)),
        (KILLED, ["c"], FirstCause(FailedPart.RANK, "b", 1, signal="SIGKILL", step=6)),
        (STORE, ["c"], FirstCause(FailedPart.STORE, step=5)),
    ],
)
def test_what_ranks_only_felt_is_the_one_node_that_is_not_heard_meanwhile(said, away, cause):
    assert first_cause([of_rank(1, 5, said)], away=away, stopped=()) == cause
    assert first_cause([None], away=away, stopped=()) is None


def test_an_attempt_that_was_taken_back_has_no_cause():
    reason = Reason("superseded: d will go too, one plan is made for all", "superseded")
    assert cause_of_attempt(reason, store_node="a") is None


def test_an_attempt_that_ran_out_of_time_has_the_cause_that_stood_in_its_way_or_none():
    late = Reason("the deadline passed before the boundary", OUT_OF_TIME)
    assert cause_of_attempt(late, store_node="a") is None and stood_in_the_way(late, [], []) is None
    assert stood_in_the_way(late, ["c"], []) == FirstCause(FailedPart.NODE, "c")
    assert stood_in_the_way(late, [], [("b", 1)]) == FirstCause(FailedPart.RANK, "b", 1)
    assert stood_in_the_way(late, ["c", "d"], []) is None, "of several nobody knows which"
    assert stood_in_the_way(Reason("superseded", "superseded"), ["c"], []) is None
    assert stood_in_the_way(None, ["c"], []) is None


def test_an_attempt_that_a_rank_rejected_has_no_cause_unless_that_rank_had_ended():
    assert cause_of_attempt(Reason("promised to handoff h1 of generation 2", REFUSED, 2), store_node="a") is None
    ended = Reason("source: this member runs no rank of generation 2", REFUSED, 2, node="b", cause=KILLED.cause(None))
    assert cause_of_attempt(ended, store_node="a") == FirstCause(FailedPart.RANK, "b", 2, signal="SIGKILL", step=6)


def test_an_attempt_names_the_node_of_its_store_or_of_the_agent_that_is_not_reached():
    known = cause_of_attempt(Reason("x", "prepare", 0, node="e", cause=KILLED.cause(None)), store_node="a")
    assert known == FirstCause(FailedPart.RANK, "e", 0, signal="SIGKILL", step=6), "two worlds have a rank 0"
    found = cause_of_attempt(Reason("x", "cutover", 2, node="b", cause=STORE), store_node="a")
    assert found == FirstCause(FailedPart.STORE, "a")
    away = cause_of_attempt(Reason("x", "prepare", 2, node="b", cause=FailureCause(FailedPart.NODE)), store_node="a")
    assert away == FirstCause(FailedPart.NODE, "b")
    felt = cause_of_attempt(Reason("x", "read", 2, node="b", cause=FELT), store_node="a")
    assert felt == FirstCause(FailedPart.PEER), "who says so is not the one"


def test_an_attempt_in_which_one_rank_could_not_be_read_names_that_rank_and_its_node_until_an_agent_knows_more():
    source = Roster("job", 2, ParallelLayout(pp=2), (Member("b", 0), Member("c", 0)))
    missed = Reason("x", "connect", 0, node="d", cause=FailureCause(FailedPart.PEER, peer=1))
    found = cause_of_attempt(missed, store_node="a", source=source)
    assert found is not None and found == FirstCause(FailedPart.PEER, "c", 1)
    assert first_of([found, of_rank(1, 6, KILLED)]) == of_rank(1, 6, KILLED)
    assert in_words(found.as_json()) == "not reached by another rank: rank 1 on c"
    beyond = replace(missed, cause=FailureCause(FailedPart.PEER, peer=2))
    for reason, world in ((beyond, source), (missed, None)):
        assert cause_of_attempt(reason, store_node="a", source=world) == FirstCause(FailedPart.PEER)


def test_causes_are_shown_in_words():
    shown = [
        in_words(cause.as_json())
        for cause in (
            of_rank(1, 6, KILLED),
            of_rank(0, 6, EXITED),
            of_rank(0, 6, FELT),
            FirstCause(FailedPart.STORE, "a"),
            FirstCause(FailedPart.NODE, "c", step=40),
            FirstCause(FailedPart.START),
        )
    ]
    assert shown == [
        "rank 1 on b, killed by SIGKILL, after step 6",
        "rank 0 on b, exit code 1, after step 6",
        "a rank that no agent has named, after step 6",
        "store on a",
        "node c, after step 40",
        "no step was made",
    ]
    assert in_words(None) == ""
