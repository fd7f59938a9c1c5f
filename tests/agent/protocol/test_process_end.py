"""The sentence about the end of a process: what an agent writes is what the service reads."""

import pytest

from agent.protocol.process_end import ProcessEnd

ENDS = (
    ProcessEnd(17, signal="SIGKILL", step=4),
    ProcessEnd(17, exit_code=5, step=0, reported="ValueError: no item 7; it reported: nothing"),
    ProcessEnd(17, exit_code=1, step=0, logged="FileNotFoundError: [Errno 2] No such file or directory: '/nope'"),
    ProcessEnd(17),
)


@pytest.mark.parametrize("end", ENDS)
def test_what_is_written_is_read_again_also_from_within_another_sentence(end: ProcessEnd):
    assert ProcessEnd.read(str(end)) == end
    assert ProcessEnd.read(f"rank 1, build model: {end}") == end


def test_the_sentence_is_plain():
    assert [str(end) for end in ENDS[:3]] == [
        "rank process (pid 17) was killed by SIGKILL after step 4",
        "rank process (pid 17) ended with exit code 5 after step 0; it reported: "
        "ValueError: no item 7; it reported: nothing",
        "rank process (pid 17) ended with exit code 1 after step 0; its log ends: "
        "FileNotFoundError: [Errno 2] No such file or directory: '/nope'",
    ]


def test_another_text_tells_of_no_end():
    assert ProcessEnd.read("the world cannot go on: RuntimeError: Connection closed by peer") is None
