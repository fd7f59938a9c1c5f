"""The end of a process: its sentence for people, and what it tells of the cause."""

import pytest

from agent.protocol.process_end import ProcessEnd
from liver_core.handoff import FailedPart, FailureCause

ENDS = (
    ProcessEnd(17, signal="SIGKILL", step=4),
    ProcessEnd(17, exit_code=5, step=0, reported="ValueError: no item 7; it reported: nothing"),
    ProcessEnd(17, exit_code=1, step=0, logged="FileNotFoundError: [Errno 2] No such file or directory: '/nope'"),
    ProcessEnd(17),
)
FELT, STORE = FailureCause(FailedPart.PEER, peer=3), FailureCause(FailedPart.STORE)


def test_the_sentence_is_plain():
    assert [str(end) for end in ENDS] == [
        "rank process (pid 17) was killed by SIGKILL after step 4",
        "rank process (pid 17) ended with exit code 5 after step 0; it reported: "
        "ValueError: no item 7; it reported: nothing",
        "rank process (pid 17) ended with exit code 1 after step 0; its log ends: "
        "FileNotFoundError: [Errno 2] No such file or directory: '/nope'",
        "rank process (pid 17) ended with an unknown exit code",
    ]


@pytest.mark.parametrize(
    ("end", "reported", "cause"),
    [
        (ENDS[0], None, FailureCause(FailedPart.RANK, signal="SIGKILL", step=4)),
        (ENDS[1], None, FailureCause(FailedPart.RANK, exit_code=5, step=0)),
        (ENDS[1], FailureCause(FailedPart.RANK, exit_code=9), FailureCause(FailedPart.RANK, exit_code=5, step=0)),
        (ENDS[1], FELT, FailureCause(FailedPart.PEER, step=0, peer=3)),
        (ENDS[1], STORE, FailureCause(FailedPart.STORE, step=0)),
        # It was killed meanwhile, and that is what its peers will miss.
        (ENDS[0], FELT, FailureCause(FailedPart.RANK, signal="SIGKILL", step=4)),
        (ProcessEnd(17, signal="SIGABRT", step=4), FELT, FailureCause(FailedPart.PEER, step=4, peer=3)),
    ],
)
def test_a_rank_that_ended_since_it_missed_another_part_is_not_the_cause_unless_something_killed_it(
    end: ProcessEnd, reported: FailureCause | None, cause: FailureCause
):
    assert end.cause(reported) == cause
