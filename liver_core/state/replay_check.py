"""Replay with the job's own optimizer and Megatron's own clipping, and the check that replay gives the same bits.

`liver_core.streaming.window_step` steps on windows. This module adds what only the live optimizer knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from liver_core.device.region import Piece
from liver_core.state.live_state import LiveState
from liver_core.state.megatron_optimizer import MASTER
from liver_core.state.optimizer_step import group_key
from liver_core.state.step_counts import OptimizerForm, UnsupportedState, counts_of
from liver_core.streaming.header import StepHeader
from liver_core.streaming.window_step import Clip, GroupSpan, Replayer, StepRule

CHECK_STEPS = 4
CHECK_ELEMENTS = 4099
CHECK_CUTS = (0, 1, 18, 1049, 1050, 2111, 4098, CHECK_ELEMENTS)
"""Odd lengths at odd offsets show a kernel that treats the end of a tensor differently from its middle."""


def clip(parameters: list[torch.nn.Parameter], limit: float, norm: float) -> None:
    """Megatron's own clipping, in place on the gradients of `parameters`."""
    # A new list, since the function's annotation names tensors, not parameters.
    clip_grad_by_total_norm_fp32([*parameters], limit, norm)


def step_rule(
    optimizers: Sequence[torch.optim.Optimizer], form: OptimizerForm, moments: tuple[str, ...], *, clip: Clip = clip
) -> StepRule:
    """The job's optimizer class and settings, from its live inner optimizers and what a step of them changes."""
    of_all = (group for optimizer in optimizers for group in optimizer.param_groups)
    groups = tuple({key: value for key, value in group.items() if key != "params"} for group in of_all)
    return StepRule(
        type(optimizers[0]),
        groups,
        tuple(group_key(group, form.counted) for group in groups),
        moments,
        clip,
        counted=form.counted,
        attributes=form.attributes,
    )


def replayer(live: LiveState, *, window_elements: int) -> Replayer:
    """A replayer over a world's regions, on the device or in host memory. Raises UnsupportedState if a parameter lies
    in no region."""
    rule = step_rule(live.optimizer.inner, live.optimizer.form, live.moments)
    return Replayer(
        rule,
        live.regions,
        _places(live),
        window_elements=window_elements,
        staged=live.homes,
        device=live.device,
    )


def _places(live: LiveState) -> list[GroupSpan]:
    """Each optimizer parameter's place in the regions and its group, checked against the layout function."""
    masters = live.homes.get(MASTER, live.regions[MASTER])
    windows = {id(owned.main): owned.window for owned in live.owned}
    found = []
    for number, group in enumerate(live.optimizer.groups):
        for parameter in group["params"]:
            window = windows.get(id(parameter))
            if window is None or not _lies_at(masters.piece_at(window.start), window.start, parameter):
                raise UnsupportedState(f"group {number}: a master of {parameter.numel()} elements is in no region")
            found.append(GroupSpan(window.start, window.stop, number))
    owned = {(part.region_offset, part.region_offset + part.numel) for part in live.shards.parameters}
    if {(place.start, place.stop) for place in found} != owned:
        raise UnsupportedState("the optimizer's masters differ from the parameters of the layout function")
    return found


def _lies_at(piece: Piece, element: int, tensor: torch.Tensor) -> bool:
    """Whether a tensor begins at that element of the region; memory that waits is not looked at."""
    same = tensor.untyped_storage()._cdata == piece.tensor.untyped_storage()._cdata
    return same and tensor.storage_offset() == piece.tensor.storage_offset() + element - piece.start


def check_replay(live: LiveState) -> None:
    """Check, before anything streams, that a step on windows equals the step on whole tensors, bit for bit.

    Raises UnsupportedState naming class, settings and first difference. Draws its numbers from a generator of its own.
    Runs once per process for each optimizer class, settings and device. Rates change every step and are left out.
    """
    rule, device = step_rule(live.optimizer.inner, live.optimizer.form, live.moments), live.device
    passed = (rule.optimizer, rule.keys, tuple(sorted(rule.attributes.items())), device)
    if passed not in _PASSED:
        check_rule(rule, device)
        _PASSED.add(passed)


_PASSED: set[tuple[type, tuple[str, ...], tuple[tuple[str, Any], ...], torch.device]] = set()


def check_rule(rule: StepRule, device: torch.device) -> None:
    """`check_replay` for a rule: each parameter group separately, a few steps from empty state, on `device`."""
    for number, settings in enumerate(rule.groups):
        problem = _difference(rule, number, device)
        if problem:
            # Leave out settings that are off, and those that Megatron adds for its own use.
            shown = {key: value for key, value in settings.items() if key in _SHOWN or value is True}
            raise UnsupportedState(
                f"optimizer {rule.optimizer.__name__} with {shown}: a step on parts of a tensor differs from the step "
                f"on the whole tensor ({problem}), so steps cannot be replayed. "
                "Choose its foreach or for-loop implementation"
            )


_SHOWN = ("lr", "betas", "eps", "momentum", "fused", "foreach", "weight_decay")


def _difference(rule: StepRule, number: int, device: torch.device) -> str:
    """The first difference between whole and replayed steps of one group, or an empty text."""
    generator = torch.Generator().manual_seed(20_000 + number)
    start = torch.randn(CHECK_ELEMENTS, generator=generator)
    regions = {kind: torch.zeros(CHECK_ELEMENTS, device=device) for kind in ("master", "grad", *rule.moments)}
    regions["master"].copy_(start)
    whole = torch.nn.Parameter(start.clone().to(device))
    # From empty state, so without the counts of a live optimizer.
    settings = {name: value for name, value in rule.groups[number].items() if name not in rule.counted}
    settings |= {"lr": 1e-2, "weight_decay": settings.get("weight_decay", 0.0)}
    optimizer = rule.make([{**settings, "params": [whole]}])
    replaying = Replayer(rule, regions, [GroupSpan(0, CHECK_ELEMENTS, number)], window_elements=CHECK_ELEMENTS // 2)
    for version in range(1, CHECK_STEPS + 1):
        gradients = torch.randn(CHECK_ELEMENTS, generator=generator) * 10.0**-version
        rates = {"lr": 1e-2 / version, "weight_decay": settings["weight_decay"]}
        counts = counts_of(optimizer.param_groups[0], rule.counted)
        header = _header(rule, number, version, {**rates, "counts": counts}, optimizer.state.get(whole, {}))
        optimizer.param_groups[0].update(rates)
        whole.grad = gradients.clone().to(device)
        rule.clip([whole], header.clip, header.norm)
        optimizer.step()
        for low, high in pairwise(CHECK_CUTS):
            regions["grad"][low:high].copy_(gradients[low:high])
            replaying.replay([(low, high)], header)
        expected = {"master": whole.detach(), **{kind: optimizer.state[whole].get(kind) for kind in rule.moments}}
        for kind, tensor in expected.items():
            if tensor is not None and not torch.equal(tensor.view(torch.int32), regions[kind].view(torch.int32)):
                count = int((tensor.view(torch.int32) != regions[kind].view(torch.int32)).sum())
                return f"{kind} differs in {count} of {CHECK_ELEMENTS} elements after step {version}"
    return ""


def _header(
    rule: StepRule, number: int, version: int, rates: Mapping[str, Any], state: Mapping[str, Any]
) -> StepHeader:
    """The header as a source writes it, encoded and decoded once."""
    scalars = {
        name: float(value) if torch.is_tensor(value) else value
        for name, value in state.items()
        if name not in rule.moments
    }
    groups = ({"key": rule.keys[number], **rates},)
    norm = 3.7 if version % 2 else 0.2
    return StepHeader.decode(StepHeader(version, norm, 1.0, groups, scalars, bool(state)).encode())
