"""The cause with which the end of a rank's process is reported, after what the rank said of itself."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.protocol.rank import LAST_SAID, Checkpointed, Finished
from agent.supervisor.process import ProcessIdentity
from agent.supervisor.records import RankRecord, SlotKey
from agent.supervisor.supervisor import Supervisor
from agent.supervisor.zygote_client import Exited
from liver_core.handoff import FailedPart, FailureCause, Reason

ENDED = ProcessIdentity(2**22, 1.0)
"""Above the highest pid that Linux gives."""
KILLED = FailureCause(FailedPart.RANK, "SIGKILL", step=12)


@pytest.mark.parametrize(("node", "what"), [("b", FailedPart.PEER), ("", FailedPart.RANK)])
def test_a_rank_that_ends_since_another_died_ends_as_one_that_missed_it(
    tmp_path: Path, node: str, what: FailedPart
) -> None:
    """An aborted newcomer passes on the reason of the rank that died, with the cause of that one."""

    async def run() -> Reason:
        ends: list[Reason] = []
        supervisor = Supervisor(
            cast(Any, None),
            cast(Any, SimpleNamespace(delete=lambda *_: None)),
            cast(Any, None),
            on_event=lambda *_: None,
            on_exit=lambda key, reason, state: ends.append(reason),
        )
        supervisor.note_exit(Exited(ENDED, 3))
        key = SlotKey("job", 0)
        record = RankRecord(ENDED, str(tmp_path / "socket"), str(tmp_path / "log"), 2, 2, "origin")
        supervisor._watch(key, record).reason = Reason("rank 1 is dead", "connect", 1, node=node, cause=KILLED)
        await supervisor._tasks[key]
        return ends[0]

    cause = asyncio.run(run()).cause
    assert cause is not None and cause.what is what and cause.signal is None


def test_what_a_rank_said_at_its_end_is_heard_before_that_it_has_ended_and_once(tmp_path: Path) -> None:
    saved = Checkpointed(path="/checkpoints/7", step=7)
    earlier, done = Checkpointed(path="/checkpoints/6", step=6), Finished(step=8)
    (tmp_path / "log").write_text(f"{LAST_SAID}{saved.model_dump_json()}\n{LAST_SAID}{done.model_dump_json()}\nbye\n")
    heard: list[Any] = []

    async def run() -> None:
        supervisor = Supervisor(
            cast(Any, None),
            cast(Any, SimpleNamespace(delete=lambda *_: None)),
            cast(Any, None),
            on_event=lambda key, event: heard.append((event, key in supervisor.states)),
            on_exit=lambda *_: heard.append("exit"),
        )
        key = SlotKey("job", 0)
        record = RankRecord(ENDED, str(tmp_path / "socket"), str(tmp_path / "log"), 2, 2, "origin")
        state = supervisor._watch(key, record)
        for event in (earlier, saved, saved):
            supervisor._take_event(key, state, event)
        heard.append("so far")
        await supervisor._tasks[key]

    asyncio.run(run())
    assert heard == [(earlier, True), (saved, True), "so far", (done, True), "exit"]
