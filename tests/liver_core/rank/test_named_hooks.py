"""What of the job runs between two steps is known by its name while it runs."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from liver_core.rank import after_step
from liver_core.rank.after_step import AfterStep, CheckpointPlan
from liver_core.state.small_state import TrainingProgress
from liver_core.training.cursor import DataCursor


def test_hooks_and_checkpoints_are_named_while_they_run_and_not_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def note(what: str) -> None:
        assert after.hook is not None
        seen.append((what, after.hook[0]))

    job = SimpleNamespace(
        on_step=lambda *_: note("on_step"), validate=lambda *_: note("validate"), has_validation=lambda: True
    )
    writer = SimpleNamespace(start=lambda *_, **__: note("checkpoint"), is_free=lambda *_: True)
    metrics = SimpleNamespace(open=lambda step: None, publish=lambda *_: None, soon=lambda: None)
    monkeypatch.setattr(after_step, "megatron_arguments", lambda *_: {})
    monkeypatch.setattr(after_step, "collect", lambda *_: {"step": 4})
    rule = CheckpointPlan("/c", 2, 2)
    after = AfterStep(
        cast(Any, job), cast(Any, None), cast(Any, writer), cast(Any, metrics), rule=rule, last_step=None,
        validate_every=4,
    )  # fmt: skip
    world = SimpleNamespace(generation=1, roster=SimpleNamespace(job_id="job"))
    active = cast(Any, SimpleNamespace(state=None, world=world, live=None))
    after.do(active, TrainingProgress(4, DataCursor(0, 4, 2), 0), cast(Any, SimpleNamespace(loss=1.0)), None)
    assert seen == [("on_step", "on_step"), ("validate", "validate"), ("checkpoint", "checkpoint")]
    assert after.hook is None

    def fails(*_: Any) -> None:
        raise ValueError("a bug in a hook")

    job.on_step = fails
    with pytest.raises(ValueError, match="a bug"):
        after.do(active, TrainingProgress(5, DataCursor(0, 4, 2), 0), cast(Any, SimpleNamespace(loss=1.0)), None)
    assert after.hook is None
