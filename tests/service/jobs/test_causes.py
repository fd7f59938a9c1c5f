"""Which of several facts about one failure is its first cause."""

import pytest

from agent.protocol.process_end import ProcessEnd
from liver_core.handoff import Reason
from liver_core.handoff.refusals import REFUSED
from service.jobs.causes import FailedPart, FirstCause, cause_of_attempt, cause_of_rank, first_of, in_words, node_behind

FELT = "the world cannot go on: RuntimeError: Connection closed by peer [127.0.0.1]:4001"
BROKEN = f"rank process (pid 9) ended with exit code 4 after step 6; it reported: {FELT}"
KILLED = "rank process (pid 7) was killed by SIGKILL after step 6"
ERROR = "IndexError: list index out of range"
EXITED = f"rank process (pid 8) ended with exit code 1 after step 6; it reported: {ERROR}"
STORE = "ExchangeTimeout: the store is gone at decision: Connection was likely closed"


def of_rank(rank: int, step: int, text: str) -> FirstCause:
    """Of a rank whose agent says the same as a value and as a sentence."""
    return cause_of_rank("b", rank, step, text, ProcessEnd.read(text))


def test_what_an_agent_knows_of_an_end_is_taken_from_no_sentence():
    end = ProcessEnd(7, signal="SIGKILL", step=6)
    assert cause_of_rank("b", 1, 5, "it is gone", end) == FirstCause(FailedPart.RANK, "b", 1, signal="SIGKILL", step=6)
    # A rank that reports such a sentence itself has not ended.
    assert cause_of_rank("b", 1, 5, KILLED, None) == FirstCause(FailedPart.RANK, "b", 1, step=5)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (KILLED, FirstCause(FailedPart.RANK, "b", 1, signal="SIGKILL", step=6)),
        (EXITED, FirstCause(FailedPart.RANK, "b", 1, exit_code=1, step=6)),
        (ERROR, FirstCause(FailedPart.RANK, "b", 1, step=5)),
        (FELT, FirstCause(FailedPart.PEER, step=5)),
        (BROKEN, FirstCause(FailedPart.PEER, step=6)),
        (STORE, FirstCause(FailedPart.STORE, step=5)),
        ("the store of generation 4 on node a died", FirstCause(FailedPart.STORE, step=5)),
        ("the store gave no decision before the deadline", FirstCause(FailedPart.STORE, step=5)),
        ("the store says GO, rank 2 is out of memory", FirstCause(FailedPart.RANK, "b", 1, step=5)),
        (f"{KILLED}; it reported: {FELT}", FirstCause(FailedPart.RANK, "b", 1, signal="SIGKILL", step=6)),
        (
            f"rank process (pid 9) was killed by SIGABRT after step 6; it reported: {FELT}",
            FirstCause(FailedPart.PEER, step=6),
        ),
    ],
)
def test_a_reason_of_a_rank_or_of_its_agent_names_who_failed_and_not_who_misses_it(text, cause):
    assert of_rank(1, 5, text) == cause


def test_who_knows_of_an_end_outranks_who_reports_an_error_and_both_who_felt_it():
    causes = [of_rank(1, 6, text) for text in (KILLED, ERROR, STORE, FELT)]
    for known in range(len(causes)):
        assert first_of(reversed(causes[known:])) == causes[known]
    assert first_of([None, causes[3]]) == causes[3]
    assert first_of([]) is None


@pytest.mark.parametrize(
    ("text", "away", "cause"),
    [
        (FELT, ["c"], FirstCause(FailedPart.NODE, "c", step=5)),
        (FELT, [], FirstCause(FailedPart.PEER, step=5)),
        (FELT, ["c", "d"], FirstCause(FailedPart.PEER, step=5)),
        (KILLED, ["c"], FirstCause(FailedPart.RANK, "b", 1, signal="SIGKILL", step=6)),
        (STORE, ["c"], FirstCause(FailedPart.STORE, step=5)),
    ],
)
def test_what_ranks_only_felt_is_the_one_node_that_is_not_heard_meanwhile(text, away, cause):
    assert node_behind(of_rank(1, 5, text), away) == cause
    assert node_behind(None, away) is None


def test_an_attempt_that_was_taken_back_has_no_cause():
    reason = Reason("superseded: d will go too, one plan is made for all", "superseded")
    assert cause_of_attempt(reason, store_node="a") is None


def test_an_attempt_that_a_rank_rejected_has_no_cause_unless_that_rank_had_ended():
    assert cause_of_attempt(Reason("promised to handoff h1 of generation 2", REFUSED, 2), store_node="a") is None
    ended = Reason(f"source: this member runs no rank of generation 2 ({KILLED})", REFUSED, 2)
    assert cause_of_attempt(ended, store_node="a") == FirstCause(FailedPart.RANK, None, 2, signal="SIGKILL", step=6)


def test_an_attempt_names_the_node_of_its_store():
    known = cause_of_attempt(Reason(KILLED, "prepare", 0, node="e"), store_node="a")
    assert known == FirstCause(FailedPart.RANK, "e", 0, signal="SIGKILL", step=6), "two worlds have a rank 0"
    found = cause_of_attempt(Reason(STORE, "cutover", 2, node="b"), store_node="a")
    assert found == FirstCause(FailedPart.STORE, "a")
    assert cause_of_attempt(Reason(KILLED, "prepare", 2), store_node="a") == FirstCause(
        FailedPart.RANK, None, 2, signal="SIGKILL", step=6
    )


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
