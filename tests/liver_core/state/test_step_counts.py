"""What a step of an optimizer changes is found with the job's own class, where its parameters lie, and is carried."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from liver_core.state.megatron_optimizer import element_scalars
from liver_core.state.optimizer_step import everywhere, group_key
from liver_core.state.step_counts import (
    UnsupportedState,
    counts_of,
    digest_of,
    form_of,
    set_counts,
    step_and_count,
)
from tests.liver_core.streaming.optimizers import OPTIMIZERS, FusedAdam


class OnDevice(FusedAdam):
    device_type = "cuda"


def test_an_optimizer_for_device_tensors_is_probed_on_its_device():
    """The tensors are pretended: an operation between the host and the device raises here as it does on a GPU."""
    with FakeTensorMode(), torch.no_grad():
        optimizer = OnDevice([torch.nn.Parameter(torch.zeros(5, device="cuda"))])
        form = form_of(optimizer)
        with pytest.raises(RuntimeError, match="on the device only"):
            form_of(OnDevice([torch.nn.Parameter(torch.zeros(5))]))
    assert (form.moments, form.counted) == (("exp_avg", "exp_avg_sq"), ("step",))
    assert {value.device.type for value in form.state.values()} == {"cuda"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_found_and_only_what_counts_in_the_group_is_a_count(name: str):
    kind, settings, moments = OPTIMIZERS[name]
    form = form_of(kind([torch.nn.Parameter(torch.zeros(7))], **{"lr": 0.1, **settings}))  # pyright: ignore[reportCallIssue]
    assert form.moments == moments
    assert form.counted == (("step",) if kind is FusedAdam else ())
    assert form.attributes == ({"adam_w_mode": 0} if "adam_w_mode" in settings else {})


def test_counts_are_set_in_another_group_and_absent_where_they_were_absent():
    source, target = {"lr": 0.1, "step": 7}, {"lr": 0.2, "step": 3}
    set_counts(target, counts_of(source, ("step",)), ("step",))
    assert target == {"lr": 0.2, "step": 7}
    set_counts(target, counts_of({"lr": 0.1}, ("step",)), ("step",))
    assert target == {"lr": 0.2}


class CountsAll(FusedAdam):
    """Counts in groups without parameters by itself."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                group["step"] = group.get("step", 0) + 1
        super().step(closure)


@pytest.mark.parametrize("kind", [FusedAdam, CountsAll, torch.optim.AdamW])
def test_a_rank_that_owns_nothing_of_a_group_counts_in_it_as_the_others_do(kind: type[torch.optim.Optimizer]):
    def made(*owned: bool) -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.ones(5))] if own else [], "lr": 0.1} for own in owned]
        return kind(groups)  # pyright: ignore[reportCallIssue]

    ranks = [made(True, False), made(True, True), made(False, True)]
    for _ in range(3):
        for optimizer in ranks:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones(5)
            step_and_count([optimizer], optimizer.step, form_of(optimizer))
    counted = form_of(ranks[0]).counted
    told = [[counts_of(group, counted) for group in optimizer.param_groups] for optimizer in ranks]
    assert told == [[{} if kind is torch.optim.AdamW else {"step": 3}] * 2] * 3


def test_a_group_without_parameters_counts_on_from_where_it_was_set():
    optimizer = FusedAdam([{"params": [torch.nn.Parameter(torch.ones(5))]}, {"params": []}])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(5)
    step_and_count([optimizer], optimizer.step, form_of(optimizer))
    for group in optimizer.param_groups:
        set_counts(group, {"step": 40}, ("step",))
    step_and_count([optimizer], optimizer.step, form_of(optimizer))
    assert [group["step"] for group in optimizer.param_groups] == [41, 41]


def test_a_group_has_the_same_key_wherever_a_layout_puts_it_also_in_an_older_checkpoint():
    group = {"params": [], "lr": 0.1, "step": 3, "wd_mult": 0.0, "lr_mult": 1.0}
    key = group_key(group, ("step",))
    assert key == "lr_mult=1.0;wd_mult=0.0"
    assert {group_key({**group, "is_expert_parallel": cut}, ("step",)) for cut in (True, False)} == {key}
    assert everywhere("is_expert_parallel=False;lr_mult=1.0;wd_mult=0.0") == everywhere(key) == key


def test_a_count_that_differs_has_another_digest():
    assert digest_of([{"step": 7}, {}, True]) == digest_of([{"step": 7}, {}, True])
    assert len({digest_of([{"step": step}, {}, True]) for step in range(100)}) == 100


class KeepsNan(FusedAdam):
    """Its settings hold what it does not know yet."""

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, **settings)
        self.best = math.nan
        for group in self.param_groups:
            group["trust"] = math.nan


def test_a_setting_that_is_nan_and_stays_so_is_no_count():
    form = form_of(KeepsNan([torch.nn.Parameter(torch.zeros(7))], lr=0.1))
    assert form.counted == ("step",) and form.attributes == {}


def test_a_count_that_is_nan_for_every_parameter_is_equal_for_all():
    counts = {number: {"gain": torch.tensor(math.nan), "step": torch.tensor(3.0)} for number in range(2)}
    live: Any = SimpleNamespace(moments=(), optimizer=SimpleNamespace(inner=[SimpleNamespace(state=counts)]))
    found = element_scalars(live)
    assert found["step"] == 3.0 and math.isnan(found["gain"])
    counts[1]["gain"] = torch.tensor(0.5)
    with pytest.raises(UnsupportedState, match=r"gain: nan and 0\.5 differ"):
        element_scalars(live)
