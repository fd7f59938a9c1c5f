"""A job that goes on from another job's checkpoint trains as its own file says, or is refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.real_ranks import run_alone
from tests.cluster.real_ranks_model import small_gpt

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
OTHER = {"lr": 1e-5, "min_lr": 1e-6, "weight_decay": 0.1, "decay_steps": 500, "warmup_steps": 0}


@pytest.fixture(scope="module")
def found(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = str(tmp_path_factory.mktemp("written") / "step-000000002")
    arguments = small_gpt(corpus, num_layers=2)
    jobs: dict[str, tuple[dict[str, Any], str]] = {
        "equal": ({}, "GptJob"),
        **{name: ({name: value} | _with(name), "GptJob") for name, value in OTHER.items()},
        "override": ({**OTHER, "override_opt_param_scheduler": True, "adam_eps": 1e-6}, "GptJob"),
        "none": (OTHER, "none"),
    }
    return run_alone(_go_on, arguments, jobs, path, timeout_s=150.0)


def _with(name: str) -> dict[str, Any]:
    return {"min_lr": 1e-6} if name == "lr" else {}


def test_equal_settings_go_on_with_the_rate_that_stood(found: dict[str, Any]):
    assert found["equal"]["rates"] == found["written"]["rates"]
    assert found["equal"]["overruled"] == ""


@pytest.mark.parametrize(
    ("name", "stands"),
    [
        ("lr", "max_lr is 0.001 there and 1e-05 in the job, min_lr is 0.0001 there and 1e-06 in the job"),
        ("min_lr", "min_lr is 0.0001 there and 1e-06 in the job"),
        ("weight_decay", "start_wd is 0.01 there and 0.1 in the job, end_wd is 0.01 there and 0.1 in the job"),
        ("decay_steps", "lr_decay_steps is 10000 there and 500 in the job"),
        ("warmup_steps", "lr_warmup_steps is 10 there and 0 in the job"),
    ],
)
def test_other_rates_are_refused_by_field_with_what_to_do(found: dict[str, Any], name: str, stands: str):
    refusal = found[name]["refusal"]
    assert stands in refusal and "override_opt_param_scheduler in args" in refusal


def test_the_jobs_own_rates_count_from_the_first_step_where_it_says_so(found: dict[str, Any]):
    """At step 2, without warm-up; and a next world, which is built from the same file, knows the groups."""
    assert all(9.9e-6 < rate <= 1e-5 for rate, _ in found["override"]["rates"])
    assert {decay for _, decay in found["override"]["rates"]} == {0.0, 0.1}
    assert all(9.9e-6 < rate <= 1e-5 for rate, _ in found["override"]["stepped"])
    assert found["override"]["keys"] == found["override"]["next_keys"]


def test_rates_that_do_not_count_without_a_schedule_are_told(found: dict[str, Any]):
    assert found["none"]["rates"] == found["written"]["rates"]
    assert "lr is 0.0002 there" in found["none"]["overruled"] and "1e-05 in the job" in found["none"]["overruled"]
    assert "weight_decay is 0.0 and 0.01 there and 0.0 and 0.1 in the job" in found["none"]["overruled"]


def _go_on(arguments: dict[str, Any], jobs: dict[str, tuple[dict[str, Any], str]], path: str) -> dict[str, Any]:
    import torch.distributed as dist

    from liver_core.layout import ParallelLayout
    from liver_core.state.checkpoint import CheckpointError, check_ours
    from liver_core.state.optimizer_chain import optimizer_chain
    from liver_core.state.optimizer_step import hyper_parameters
    from liver_core.training.gpt import GptJob
    from liver_core.trial.trial_world import TrialWorld

    class WithoutSchedule(GptJob):
        def build(self, world: Any) -> Any:
            state = super().build(world)
            for group in state.optimizer.param_groups:
                group["lr"] = self.args.lr
            state.scheduler = None
            return state

    def built(changes: dict[str, Any], kind: str, name: str) -> TrialWorld:
        made = WithoutSchedule if kind == "none" else GptJob
        job = made({**arguments, **changes}, global_batch=4, micro_batch=1, seed=7)
        world = TrialWorld(job, ParallelLayout(), 0, dist.HashStore(), name)
        world.build()
        world.lay_out(world.describe())
        job.warm_up()
        return world

    def rates(world: TrialWorld) -> list[tuple[float, float]]:
        groups = optimizer_chain(world.state.optimizer).groups
        return [(group["lr"], group["weight_decay"]) for group in groups]

    def keys(world: TrialWorld) -> list[str]:
        return [group["key"] for group in hyper_parameters(world.state)]

    first = built({}, "GptJob", "first")
    first.fill()
    for _ in range(2):
        first.step()
    first.save(path)
    found: dict[str, Any] = {"written": {"rates": rates(first)}}
    first.close()
    for name, (changes, kind) in jobs.items():
        world = built(changes, kind, name)
        said: dict[str, Any] = {"next_keys": keys(world)}
        found[name] = said
        try:
            said["overruled"] = check_ours(path, world.job, world.state, world.world)
            world.load(path)
            said |= {"rates": rates(world), "keys": keys(world)}
            world.step()
            said["stepped"] = rates(world)
        except CheckpointError as error:
            said["refusal"] = str(error)
        world.close()
    return found
