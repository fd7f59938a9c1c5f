"""What an optimizer's step changes besides tensors of its parameters' size: counts, in its state or in its groups.

torch's Adam counts steps for each parameter; the fused Adam of Transformer Engine and of Apex counts in the parameter
group. Both are found by stepping one tiny parameter with the job's class and settings, so the code names no optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch

from liver_core.same_value import same_value

PROBE_ELEMENTS = 3
_RATES = ("params", "lr", "weight_decay")
"""What a schedule sets, and what is no setting: never counts."""
_PLAIN = (bool, int, float, str, type(None))


class UnsupportedState(RuntimeError):
    """The job uses something whose state we cannot move. The text names it and what to change."""


@dataclass(frozen=True, slots=True)
class OptimizerForm:
    """`state`: what the class keeps for a parameter of PROBE_ELEMENTS elements, after one step. `counted`: the names of
    the plain values of a group that a step changes. `attributes`: plain settings that the optimizer has on itself.
    `device`: of its parameters."""

    state: Mapping[str, Any]
    counted: tuple[str, ...]
    attributes: Mapping[str, Any]
    device: torch.device

    @property
    def moments(self) -> tuple[str, ...]:
        """What is kept for each element."""
        return tuple(sorted(name for name, value in self.state.items() if _is_moment(value)))

    @property
    def scalars(self) -> dict[str, Any]:
        """All else, in the form in which the class keeps it."""
        return {name: value for name, value in self.state.items() if not _is_moment(value)}


_FORMS: WeakKeyDictionary[torch.optim.Optimizer, OptimizerForm] = WeakKeyDictionary()


def form_of(optimizer: torch.optim.Optimizer) -> OptimizerForm:
    """The form of an optimizer, found on the device of its parameters, once for each object.

    Call it where tensors get memory. Raises UnsupportedState if a step changes something that cannot be carried.
    """
    found = _FORMS.get(optimizer)
    if found is None:
        found = _FORMS[optimizer] = _probed(optimizer)
    return found


def _probed(optimizer: torch.optim.Optimizer) -> OptimizerForm:
    groups = [group for group in optimizer.param_groups if group["params"]]
    device = groups[0]["params"][0].device if groups else torch.device("cpu")
    attributes = _attributes_apart(optimizer, groups[0], device) if groups else {}
    state: dict[str, Any] = {}
    counted: set[str] = set()
    for group in groups:
        probe = _probe(optimizer, group, attributes, device)
        own = _attributes(probe)
        # What a first step makes, a second one counts on.
        for _ in range(2):
            before, own = _copied(probe.param_groups[0]), _attributes(probe)
            probe.step()
            counted.update(_changed(optimizer, before, probe.param_groups[0]))
            state = state or _copied(next(iter(probe.state.values()), {}))
        if named := [name for name, value in _attributes(probe).items() if not same_value(own.get(name), value)]:
            raise UnsupportedState(
                f"optimizer {type(optimizer).__name__}: a step changes {', '.join(named)} of the optimizer itself, "
                "which no other world would know; keep it in the parameter groups"
            )
    return OptimizerForm(state, tuple(sorted(counted)), attributes, device)


def _probe(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], attributes: Mapping[str, Any], device: torch.device
) -> Any:
    """An optimizer like the job's over one tiny parameter, with the settings of `group`."""
    parameter = torch.nn.Parameter(torch.zeros(PROBE_ELEMENTS, device=device))
    parameter.grad = torch.ones(PROBE_ELEMENTS, device=device)
    settings = {name: value for name, value in group.items() if name != "params"}
    make: Any = type(optimizer)
    made = make([{"params": [parameter], **settings}])
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _attributes_apart(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Fused optimizers keep settings (`adam_w_mode`) on themselves that no group has: those that one made of the groups
    alone has otherwise. Not what a step sets, which is no setting."""
    bare = _probe(optimizer, group, {}, device)
    before = _attributes(bare)
    bare.step()
    after = _attributes(bare)
    return {
        name: value
        for name, value in _attributes(optimizer).items()
        if not same_value(before.get(name, _ABSENT), value)
        and same_value(before.get(name, _ABSENT), after.get(name, _ABSENT))
    }


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and isinstance(value, (*_PLAIN, torch.dtype))
    }


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A step counts a tensor up in place."""
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in values.items()}


def _changed(optimizer: torch.optim.Optimizer, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    found = [name for name in after if name not in _RATES and not _same(before.get(name, _ABSENT), after[name])]
    for name in found:
        if not isinstance(after[name], _PLAIN):
            raise UnsupportedState(
                f"optimizer {type(optimizer).__name__}: a step changes {name} of the parameter group, a "
                f"{type(after[name]).__name__}; a handoff carries numbers and texts only"
                + ("; set capturable=False" if torch.is_tensor(after[name]) else "")
            )
    return found


_ABSENT = object()


def _same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one, other)
    return type(one) is type(other) and same_value(one, other)


def counts_of(group: Mapping[str, Any], counted: Iterable[str]) -> dict[str, Any]:
    """The present values of a group that a step changes; those that a first step makes are absent before it."""
    return {name: group[name] for name in counted if name in group}


def set_counts(group: dict[str, Any], counts: Mapping[str, Any], counted: Iterable[str]) -> None:
    """Set them in another optimizer's group, absent where they were absent."""
    for name in counted:
        group.pop(name, None)
    group.update(counts)


def step_and_count(
    optimizers: Iterable[torch.optim.Optimizer], step: Callable[[], object], form: OptimizerForm
) -> None:
    """Make one step of all by `step`, and have the groups of which this rank owns nothing count it too.

    Fused optimizers skip a group without parameters. With many data-parallel ranks one may own matrices only. It would
    say of the norms' group that it never stepped, and it may be the one that speaks for its world.
    """
    empty = [
        (optimizer, number, counts_of(group, form.counted))
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        if form.counted and not group["params"]
    ]
    step()
    for optimizer, number, counts in empty:
        group = optimizer.param_groups[number]
        if counts_of(group, form.counted) == counts:
            set_counts(group, _counted_on(optimizer, number, counts, form), form.counted)


_COUNTERS: WeakKeyDictionary[torch.optim.Optimizer, dict[int, torch.optim.Optimizer]] = WeakKeyDictionary()
"""For each group without parameters, an optimizer of the same class that counts for it."""


def _counted_on(
    optimizer: torch.optim.Optimizer, number: int, counts: Mapping[str, Any], form: OptimizerForm
) -> dict[str, Any]:
    """`counts` after one more step, by a step of the job's class."""
    counters = _COUNTERS.setdefault(optimizer, {})
    if number not in counters:
        counters[number] = _probe(optimizer, optimizer.param_groups[number], form.attributes, form.device)
    (group,) = counters[number].param_groups
    set_counts(group, counts, form.counted)
    counters[number].step()
    return counts_of(group, form.counted)


def digest_of(counts: Any) -> int:
    """64 bits of plain values as JSON carries them, the same before and after they were sent."""
    text = json.dumps(counts, sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def as_kept(form: Mapping[str, Any], name: str, value: Any) -> Any:
    """`value` in the form in which the class keeps it; each call makes a tensor of its own."""
    kept = form.get(name)
    return torch.full_like(kept, value) if torch.is_tensor(kept) else value


def _is_moment(value: Any) -> bool:
    return torch.is_tensor(value) and value.shape == (PROBE_ELEMENTS,)
