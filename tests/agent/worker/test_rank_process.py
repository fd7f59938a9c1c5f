"""What a rank tells its agent of a handoff."""

import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from agent.driver.driver import Driver
from agent.link.outbox import Outbox
from agent.protocol import rank
from agent.protocol.worker import RankSpec
from agent.supervisor.child_entry import LastStep
from agent.supervisor.logs import read_last_said
from agent.supervisor.records import SlotKey
from agent.worker import rank_process
from agent.worker.control import ControlSocket
from agent.worker.rank_process import Worker
from liver_core.handoff import Decision, HandoffId, Order, RankStage, StoreAddress, start_order
from liver_core.rank.after_step import Ended, Ending
from liver_core.rank.boundary_requests import BoundaryRequests
from liver_core.steady_clock import PROCESS_CLOCK
from tests.agent.stub_service import roster_of
from tests.agent.waiting import fake_job


@pytest.fixture
def order() -> Order:
    return start_order(
        roster_of(1, ("a", "b")),
        StoreAddress("127.0.0.1", 1),
        str(HandoffId(str(uuid4()))),
        deadline_utc=2_000.0,
        issued_at=1_000.0,
        proposer_id="a",
        cause="start",
        checkpoint="",
    )


def listened_to(order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> tuple[Worker, list[Any]]:
    """A rank process, and what it says to its agent."""
    spec = RankSpec(
        node_id="a",
        slot=0,
        order=order,
        spec=fake_job(tmp_path),
        private_address="127.0.0.1",
        socket_path=str(tmp_path / "r.sock"),
        clock_zero=0.0,
    )
    monkeypatch.setattr(PROCESS_CLOCK, "zero", 0.0)
    worker, said = Worker(spec, socket.socket(socket.AF_UNIX), LastStep()), []
    monkeypatch.setattr(worker.control, "say", said.append)
    return worker, said


def test_every_stage_of_a_handoff_tells_when_the_rank_was_first_asked_to_prepare_it(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    worker, said = listened_to(order, monkeypatch, tmp_path)
    moments = iter((1_001.0, 1_002.0))
    monkeypatch.setattr(rank_process, "utc_now", lambda: next(moments))
    worker.stage(order, RankStage.PREPARING, reason=None, measures={}, certificate="")
    for zero in (5.0, 7.0):
        worker._obey(rank.Prepare(order=order, clock_zero=zero))
        assert PROCESS_CLOCK.zero == zero, "a rank counts as its agent does"
    worker.stage(order, RankStage.PREPARED, reason=None, measures={"build_s": 2.0}, certificate="")
    assert [report.measures for report in said] == [{}, {"build_s": 2.0, "ordered_at_utc": 1_001.0}]


@pytest.mark.parametrize(("wanted", "tells"), [("/c/step-000000040", True), ("/c/step-000000050", False)])
def test_a_rank_tells_of_a_later_checkpoint_that_its_start_has_found(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, wanted: str, tells: bool
) -> None:
    worker, said = listened_to(order, monkeypatch, tmp_path)
    made = SimpleNamespace(loaded="/c/step-000000050", small={"step": 50}, target_rank=0)
    worker.loop = cast(Any, SimpleNamespace(following=made, decided=("", Decision.UNDECIDED)))
    for stage in (RankStage.PREPARING, RankStage.PREPARED, RankStage.READY):
        worker.stage(replace(order, checkpoint=wanted), stage, reason=None, measures={}, certificate="")
    told = [each for each in said if each.type == "checkpointed"]
    assert [(each.path, each.step, each.generation, each.loaded) for each in told] == (
        [("/c/step-000000050", 50, order.generation, True)] * tells
    )


def test_a_rank_that_cannot_go_on_says_nothing_more_of_what_one_of_its_threads_still_prepares(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    worker, said = listened_to(order, monkeypatch, tmp_path)
    worker.fail("the world cannot go on", None)
    worker.stage(order, RankStage.PREPARED, reason=None, measures={}, certificate="")
    assert [report.type for report in said] == ["failed"]
    assert worker.stage_now is RankStage.FAILED


@pytest.mark.parametrize("error", [None, RuntimeError("no peer")])
def test_a_rank_ends_its_log_with_its_facts_each_on_a_line_of_its_own(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture, error: Any
) -> None:
    """Whoever is connected: an agent may end before it passes on what it has heard."""
    worker, _ = listened_to(order, monkeypatch, tmp_path)
    saved = rank.Checkpointed(path="/checkpoints/7", step=7)

    def train() -> int:
        ControlSocket.say(worker.control, saved)
        print("an unfinished line", end="")
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(worker, "run", train)
    monkeypatch.setattr(rank_process, "Worker", lambda spec, control, last_step: worker)
    monkeypatch.setattr(rank_process.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(rank_process, "RankSpec", SimpleNamespace(model_validate_json=lambda text: worker.spec))
    status = rank_process.run({}, cast(Any, None), worker.last_step)
    (tmp_path / "log").write_text(capsys.readouterr().out)
    assert (status, read_last_said(tmp_path / "log")) == (0 if error is None else 1, [saved])


def test_the_numbers_of_a_step_reach_the_agent_and_its_outbox_as_they_are(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    worker, said = listened_to(order, monkeypatch, tmp_path)
    values = {"loss": 0.5, "gradient_norm": None, "own/score": 7.0}
    worker.metrics(3, 12, values)
    (event,) = (rank.decode_event(rank.encode_line(message)) for message in said)
    driver, outbox = Driver(), Outbox()
    monkeypatch.setattr(driver, "_node", SimpleNamespace(outbox=outbox, now=lambda: 2_000_000_000.0))
    driver.take_rank_event(SlotKey("job-1", 0), event)
    (row,) = outbox.metrics.batch(1)
    assert (row.job_id, row.generation, row.step, row.values) == ("job-1", 3, 12, values)
    assert row.at_utc.timestamp() == 2_000_000_000.0
    outbox.acknowledge(1)
    assert outbox.metrics.batch(2) == ()


def test_a_step_is_written_where_it_outlives_the_rank(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    worker, _ = listened_to(order, monkeypatch, tmp_path)
    assert worker.last_step.read() is None
    progress = SimpleNamespace(step=8, digest=1, cursor=SimpleNamespace(consumed=96))
    worker.step(2, cast(Any, progress), cast(Any, SimpleNamespace(loss=0.5, tokens=None)), 0.1)
    assert worker.last_step.read() == (2, 8)


class StubLoop:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.requests = BoundaryRequests()
        self.has_lease: bool | None = None

    def permit(self, handoff_id: str, plan_revision: int) -> None:
        pass

    def run(self, first: Order) -> Ended:
        self.has_lease = self.requests.has_lease()
        return Ended(Ending.STOPPED)


def test_a_lease_that_comes_just_as_the_loop_is_made_is_kept(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    class Interrupted(Worker):
        """The other thread gives a lease just after this one has read which there is."""

        kept = 0.0
        is_due = True

        @property
        def leased_until(self) -> float:  # type: ignore[override]
            before = self.kept
            if self.loop is not None and self.is_due:
                self.is_due = False
                self._obey(rank.StepLease(until_s=time.monotonic() + 60.0))
            return before

        @leased_until.setter
        def leased_until(self, until: float) -> None:
            self.kept = until

    made, _ = listened_to(order, monkeypatch, tmp_path)
    worker = Interrupted(made.spec, socket.socket(socket.AF_UNIX), LastStep())
    for name, stub in (("RankLoop", StubLoop), ("load_job", StubLoop), ("prepare_process", lambda: None)):
        monkeypatch.setattr(rank_process, name, stub)
    monkeypatch.setattr(worker.control, "start", lambda: None)
    assert worker.run() == 0
    assert isinstance(worker.loop, StubLoop) and not worker.is_due and worker.loop.has_lease


@pytest.mark.parametrize("has_one", [False, True], ids=["none came", "one came while the job was imported"])
def test_a_rank_of_a_start_makes_no_step_before_its_agent_has_given_it_a_lease(
    order: Order, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, has_one: bool
) -> None:
    """An older world may step on beside it, and its agent may die before it has said so."""
    worker, _ = listened_to(order, monkeypatch, tmp_path)
    leased: list[bool] = []

    class Loop(StubLoop):
        def run(self, first: Order) -> Ended:
            leased.append(self.requests.has_lease())
            return Ended(Ending.STOPPED)

    for name, stub in (("RankLoop", Loop), ("load_job", Loop), ("prepare_process", lambda: None)):
        monkeypatch.setattr(rank_process, name, stub)
    monkeypatch.setattr(worker.control, "start", lambda: None)
    if has_one:
        worker._obey(rank.StepLease(until_s=time.monotonic() + 60.0))
    assert worker.run() == 0
    assert leased == [has_one]
