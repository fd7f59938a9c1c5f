"""A run that another test has trained for longer says the same as one that was trained for as long as is asked for."""

from __future__ import annotations

import pytest

from tests.liver_core.rank.support import undisturbed_runs
from tests.liver_core.rank.support.trio import trio_setup

pytestmark = [pytest.mark.real, pytest.mark.thorough, pytest.mark.timeout(120)]


def test_what_a_longer_run_says_up_to_a_step_is_what_one_says_that_ends_there(
    corpus: str, monkeypatch: pytest.MonkeyPatch
):
    setup = trio_setup(corpus)
    with monkeypatch.context() as alone:
        alone.setattr(undisturbed_runs, "_folder", None)
        short = undisturbed_runs.run_undisturbed(setup, "PP2", 4)
    assert len(undisturbed_runs.run_undisturbed(setup, "PP2", 9).steps) == 9
    cut = undisturbed_runs.run_undisturbed(setup, "PP2", 4)
    assert cut.traces == short.traces and cut.steps == short.steps
