"""What counts as the same error, and which one is named as the cause."""

from typing import Any

from agent.protocol.process_end import ProcessEnd
from liver_core.handoff import FailedPart, FailureCause
from service.jobs.causes import FirstCause
from service.jobs.crashes import Crashes, RankError

NODES = ("a", "b")


def error(text: str, rank: int = 1) -> RankError:
    return RankError(f"rank {rank} on node b is failed: {text}", text)


def ended(end: ProcessEnd, rank: int = 1, said: FailureCause | None = None) -> RankError:
    return RankError(f"rank {rank} on node b is failed: {end}", str(end), said=said, end=end)


def lost(port: int, rank: int = 1) -> RankError:
    text = f"RuntimeError: Connection closed by peer [127.0.0.1]:{port}"
    return RankError(f"rank {rank} on node b is failed: {text}", text, said=FailureCause(FailedPart.PEER))


def died(crashes: Crashes, *errors: RankError, step: int = 6, nodes: tuple[str, ...] = NODES) -> Crashes:
    return crashes.after(step, errors, nodes)


def reported(text: str, what: FailedPart, node: str = "") -> dict[str, Any]:
    cause = {"what": what, "signal": None, "exit_code": None, "step": None, "peer": None, "newer_start": None}
    return {"rank": 1, "stage": "failed", "step": 6, "reason": {"text": text, "node": node, "cause": cause}}


def test_a_rank_that_its_agent_ended_since_a_node_goes_has_not_failed_and_names_that_node():
    ends = RankError.of("b", reported("c will go, and nothing fits", FailedPart.NODE, "c"))
    assert ends.shown == "c will go, and nothing fits"
    assert ends.cause == FirstCause(FailedPart.NODE, "c", step=6)
    felt = RankError.of("b", reported("it misses a peer", FailedPart.PEER))
    assert felt.shown == "rank 1 on node b is failed: it misses a peer"


def test_process_ids_and_ranks_make_no_other_error():
    crashes = Crashes()
    for pid, rank in ((11, 0), (12, 1), (13, 0)):
        assert crashes.cause(3) is None
        end = ProcessEnd(pid, exit_code=1, step=6, reported=f"IndexError: {rank}")
        crashes = died(crashes, ended(end, rank))
    assert crashes.cause(3) == f"rank 0 on node b is failed: {end}"


def test_an_error_reported_by_the_rank_and_by_its_agent_is_one():
    said, end = "IndexError: list", ProcessEnd(9, exit_code=1, reported="IndexError: list")
    assert died(died(Crashes(), error(said)), ended(end)).cause(2) is not None


def test_a_rank_that_was_killed_is_not_an_error_that_it_reported_before():
    """Whatever killed it would have ended a rank with any error, or none."""
    said = "IndexError: list"
    killed = ended(ProcessEnd(9, signal="SIGKILL", reported=said))
    assert died(died(Crashes(), error(said)), killed).cause(2) is None


def test_another_error_or_another_step_is_not_the_same():
    crashes = died(died(Crashes(), error("IndexError: list")), error("KeyError: 'x'"))
    assert crashes.cause(2) is None
    assert died(died(Crashes(), error("IndexError: list")), error("IndexError: list"), step=7).cause(2) is None


def test_the_rank_that_failed_is_named_and_not_one_that_missed_it():
    crashes = Crashes()
    for port in (4001, 4002):
        crashes = died(crashes, lost(port, rank=0))
    crashes = died(crashes, lost(4003, rank=0), error("IndexError: list"))
    assert crashes.cause(3) == "rank 1 on node b is failed: IndexError: list"


def test_a_lost_peer_is_the_same_error_on_the_same_nodes_only():
    """Nodes that are taken without notice are no fault of the job."""
    crashes, same = Crashes(), Crashes()
    for number in range(3):
        crashes = died(crashes, lost(4000 + number), nodes=("a", f"node-{number}"))
        same = died(same, lost(4000 + number))
    assert crashes.cause(3) is None
    assert same.cause(3) is not None


def test_what_is_stored_is_what_was_counted():
    crashes = died(died(Crashes(), error("IndexError: list")), lost(1))
    assert Crashes.of(crashes.as_json()) == crashes
    assert Crashes.of({}) == Crashes()
