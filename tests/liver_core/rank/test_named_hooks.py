"""What of the job runs between two steps is known by its name while it runs."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from liver_core.rank import after_step
from liver_core.rank.after_step import AfterStep, CheckpointPlan, Ended
from liver_core.state.small_state import TrainingProgress
from liver_core.training.cursor import DataCursor


class Writer:
    """Notes what it is asked for. `is_busy`: the checkpoint before is still being written."""

    def __init__(self, note: Any = lambda what: None) -> None:
        self.is_busy = False
        self.started: list[dict[str, Any]] = []
        self.given_up: list[tuple[str, int, str]] = []
        self._note = note

    def start(self, _active: Any, small: dict[str, Any], *_: Any, **__: Any) -> None:
        self.started.append(small)
        self._note("checkpoint")

    def is_free(self, *_: Any) -> bool:
        self._note("checkpoint")
        return not self.is_busy

    def give_up(self, path: str, step: int, text: str, _world: Any) -> None:
        self.given_up.append((path, step, text))

    def close(self) -> None:
        self._note("checkpoint")


def after_steps(job: Any, writer: Writer, last_step: int | None = None, validate_every: int | None = None) -> AfterStep:
    metrics = SimpleNamespace(open=lambda step: None, publish=lambda *_: None, soon=lambda: None)
    rule = CheckpointPlan("/c", 2, 2)
    return AfterStep(
        job, cast(Any, None), cast(Any, writer), cast(Any, metrics), rule=rule, last_step=last_step,
        validate_every=validate_every,
    )  # fmt: skip


def do(after: AfterStep, step: int) -> None:
    world = SimpleNamespace(generation=1, roster=SimpleNamespace(job_id="job"))
    active = cast(Any, SimpleNamespace(state=None, world=world, live=None))
    after.do(active, TrainingProgress(step, DataCursor(0, 4, 2), 0), cast(Any, SimpleNamespace(loss=1.0)), None)


@pytest.fixture(autouse=True)
def collected(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The small state, as the job gives it."""
    found: dict[str, Any] = {"step": 4, "job": {"seen": [4]}}
    monkeypatch.setattr(after_step, "megatron_arguments", lambda *_: {})
    monkeypatch.setattr(after_step, "collect", lambda *_: found)
    return found


def test_hooks_and_checkpoints_are_named_while_they_run_and_not_after_an_error() -> None:
    seen: list[tuple[str, str]] = []

    def note(what: str) -> None:
        assert after.hook is not None
        seen.append((what, after.hook[0]))

    job = SimpleNamespace(
        on_step=lambda *_: note("on_step"), validate=lambda *_: note("validate"), has_validation=lambda: True
    )
    after = after_steps(job, Writer(note), validate_every=4)
    do(after, 4)
    after.close()
    checkpoint = ("checkpoint", "checkpoint")  # It waits for the one before, writes one, and waits for that at the end.
    assert seen == [("on_step", "on_step"), ("validate", "validate"), checkpoint, checkpoint, checkpoint]
    assert after.hook is None

    def fails(*_: Any) -> None:
        raise ValueError("a bug in a hook")

    job.on_step = fails
    with pytest.raises(ValueError, match="a bug"):
        do(after, 5)
    assert after.hook is None


def test_what_the_job_keeps_of_its_own_is_written_as_it_was_at_that_step(collected: dict[str, Any]) -> None:
    writer = Writer()
    do(after_steps(SimpleNamespace(on_step=lambda *_: None), writer), 4)
    collected["job"]["seen"].append(5)
    assert writer.started[0]["job"] == {"seen": [4]}


def test_a_last_checkpoint_that_cannot_be_written_since_another_one_is_is_told() -> None:
    writer = Writer()
    writer.is_busy = True
    after = after_steps(SimpleNamespace(on_step=lambda *_: None), writer, last_step=6)
    do(after, 4)
    assert writer.given_up == [], "it comes later"
    with pytest.raises(Ended):
        do(after, 6)
    assert writer.given_up == [("/c/step-000000006", 6, "the one before was still being written")]
