"""The job's peer key changes while one of its agents is cut off from the service, and another one is killed."""

import pytest

from agent.protocol.values import HandoffState
from tests.agent.cluster import cluster

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180), pytest.mark.real]
FIRST, SECOND = "p" * 43, "s" * 43


def test_agents_that_have_the_new_key_and_one_that_has_not_carry_out_a_handoff_also_after_a_restart() -> None:
    with cluster("a", "b", "c") as nodes:
        nodes.wait_training(1, ("a", "b", "c"))
        assert nodes.service.kept_keys == {}, "there is one key"
        # Node c hears nothing of the second key.
        with nodes.service.lock:
            nodes.service.keys = dict.fromkeys(("a", "b"), (SECOND, FIRST, 2))
        nodes.wait(lambda: nodes.service.kept_keys == {"a": 2, "b": 2}, "nodes a and b that keep the second key")
        nodes.service.stop()
        for name in ("a", "b"):
            assert SECOND in (nodes.directory / name / "journal.jsonl").read_text()
        nodes.kill_agent("b")
        nodes.start_agent("b")
        nodes.wait(lambda: nodes.log_of("b").count("peer endpoint at") == 2, "the agent of b again")
        nodes.announce("c")
        nodes.wait(lambda: "ended active" in nodes.log_of("a"), "the handoff without the service")
        nodes.service.start()
        assert nodes.wait_handoff(HandoffState.ACTIVE).target.node_ids() == ("a", "b")
        assert nodes.service.failed == []
        assert not any(key in nodes.log_of(name) for key in (FIRST, SECOND) for name in ("a", "b", "c"))
