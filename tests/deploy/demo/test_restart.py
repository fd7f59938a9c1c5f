"""The restart baseline does what it claims to measure: the same job goes on from its checkpoint, both ways alike."""

import json
from pathlib import Path

import pytest

from deploy.demo.restart.one_process import JobSpec, WorldSpec, WorldsPlan, read_events
from deploy.demo.restart.torchrun import BaselineFailed, BaselineSettings, measure_as_today, measure_at_best, run_plan
from tests.cluster.real_ranks_model import small_gpt

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(400)]
STEPS = 2
LAYOUT = "PP2"
PHASES = ["save", "teardown", "start", "imports", "init_and_build", "load", "enter"]


def job(corpus: str) -> JobSpec:
    args = small_gpt(corpus)
    return JobSpec(entrypoint="liver_core.training.gpt:GptJob", args=args, global_batch=8, micro_batch=2, seed=7)


def settings(corpus: str, folder: Path, layout: str = LAYOUT) -> BaselineSettings:
    return BaselineSettings(job=job(corpus), layout=layout, folder=folder, repeats=1, steps=STEPS)


def losses(folder: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(folder)[0] if event["event"] == "step"}


@pytest.fixture(scope="module")
def undisturbed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    world = WorldSpec(layout=LAYOUT, last_step=2 * STEPS, events=str(folder / "events"), timeout_s=120)
    plan = folder / "plan.json"
    plan.write_text(WorldsPlan(job=job(corpus), worlds=(world,)).to_json())
    run_plan(plan, timeout_s=180)
    return losses(folder / "events")


def test_a_restart_as_today_goes_on_where_the_run_before_it_stopped(
    corpus: str, tmp_path: Path, undisturbed: dict[int, float]
):
    measured = measure_as_today(settings(corpus, tmp_path))
    assert list(measured["phases_s"]) == PHASES
    assert sum(measured["phases_s"].values()) == pytest.approx(measured["downtime_s"])
    assert all(seconds >= 0 for seconds in measured["phases_s"].values())
    made = losses(tmp_path / "as-today" / "world-0") | losses(tmp_path / "as-today" / "world-1")
    assert made == undisturbed
    world = json.loads((tmp_path / "as-today" / "world-0" / "world.json").read_text())
    assert world["save_to"].startswith("/dev/shm/") and not Path(world["save_to"]).exists()


def test_a_restart_at_best_goes_on_too_and_imports_nothing(corpus: str, tmp_path: Path, undisturbed: dict[int, float]):
    measured = measure_at_best(settings(corpus, tmp_path))
    assert list(measured["phases_s"]) == [name for name in PHASES if name != "imports"]
    assert sum(measured["phases_s"].values()) == pytest.approx(measured["downtime_s"])
    made = losses(tmp_path / "at-best" / "world-0") | losses(tmp_path / "at-best" / "world-1")
    assert made == undisturbed


@pytest.mark.parametrize("measure", [measure_as_today, measure_at_best])
def test_a_rank_that_fails_is_told_with_its_own_reason(measure, tmp_path: Path):
    broken = settings(str(tmp_path / "no-corpus"), tmp_path, "TP1")
    with pytest.raises(BaselineFailed, match=r"data_prefix|rank \d ended with status 1") as caught:
        measure(broken)
    assert str(tmp_path) in str(caught.value)
