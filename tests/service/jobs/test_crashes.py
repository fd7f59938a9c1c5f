"""What counts as the same error, and which one is named as the cause."""

from agent.protocol.process_end import ProcessEnd
from service.jobs.crashes import Crashes, RankError

NODES = ("a", "b")
LOST = "the world cannot go on: RuntimeError: Connection closed by peer [127.0.0.1]:{port}"


def error(text: str, rank: int = 1) -> RankError:
    return RankError(f"rank {rank} on node b is failed: {text}", text, end=ProcessEnd.read(text))


def died(crashes: Crashes, *errors: RankError, step: int = 6, nodes: tuple[str, ...] = NODES) -> Crashes:
    return crashes.after(step, errors, nodes)


def test_process_ids_and_ranks_make_no_other_error():
    crashes = Crashes()
    for pid, rank in ((11, 0), (12, 1), (13, 0)):
        assert crashes.cause(3) is None
        text = f"rank process (pid {pid}) ended with exit code 1 after step 6; it reported: IndexError: {rank}"
        crashes = died(crashes, error(text, rank))
    assert crashes.cause(3) == "rank 0 on node b is failed: " + text


def test_an_error_reported_by_the_rank_and_by_its_agent_is_one():
    said, ended = "IndexError: list", "rank process (pid 9) ended with exit code 1; it reported: IndexError: list"
    assert died(died(Crashes(), error(said)), error(ended)).cause(2) is not None


def test_another_error_or_another_step_is_not_the_same():
    crashes = died(died(Crashes(), error("IndexError: list")), error("KeyError: 'x'"))
    assert crashes.cause(2) is None
    assert died(died(Crashes(), error("IndexError: list")), error("IndexError: list"), step=7).cause(2) is None


def test_the_rank_that_failed_is_named_and_not_one_that_missed_it():
    crashes = Crashes()
    for port in (4001, 4002):
        crashes = died(crashes, error(LOST.format(port=port), rank=0))
    crashes = died(crashes, error(LOST.format(port=4003), rank=0), error("IndexError: list"))
    assert crashes.cause(3) == "rank 1 on node b is failed: IndexError: list"


def test_a_lost_peer_is_the_same_error_on_the_same_nodes_only():
    """Nodes that are taken without notice are no fault of the job."""
    crashes, same = Crashes(), Crashes()
    for number in range(3):
        lost = error(LOST.format(port=4000 + number))
        crashes = died(crashes, lost, nodes=("a", f"node-{number}"))
        same = died(same, lost)
    assert crashes.cause(3) is None
    assert same.cause(3) is not None


def test_what_is_stored_is_what_was_counted():
    crashes = died(died(Crashes(), error("IndexError: list")), error(LOST.format(port=1)))
    assert Crashes.of(crashes.as_json()) == crashes
    assert Crashes.of({}) == Crashes()
