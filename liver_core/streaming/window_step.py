"""One optimizer step on windows of flat regions, bit for bit the step that the whole tensors take elsewhere.

Windows are parameters of an optimizer of the job's own class. Scalars, norm and rates come from the source's header and
are never computed here. A region in host memory is stepped through the device, one window after another. Knows no
Megatron: clipping is handed in (`liver_core.state.replay_check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from liver_core.device.region import AnyRegion, Region, as_region
from liver_core.streaming.header import StepHeader
from liver_core.streaming.tiles import Span

Clip = Callable[[list[torch.nn.Parameter], float, float], None]
"""(parameters, limit, total norm): scales their gradients in place, as the job's own step does."""


class ReplayError(RuntimeError):
    """A step that cannot be replayed as it was made; the text names group or state."""


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Elements start <= i < stop of the regions belong to a parameter of group number `group`."""

    start: int
    stop: int
    group: int


@dataclass(frozen=True, slots=True)
class StepRule:
    """The job's optimizer: class, settings of each group without "params", the content keys of the groups, the names of
    its moments, and how it clips. `master` and `grad` are the kinds of the regions that hold these. `counted`: the
    values of a group that a step changes. `attributes`: settings that the optimizer has on itself."""

    optimizer: type[torch.optim.Optimizer]
    groups: tuple[Mapping[str, Any], ...]
    keys: tuple[str, ...]
    moments: tuple[str, ...]
    clip: Clip
    master: str = "master"
    grad: str = "grad"
    counted: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """An optimizer like the job's over other parameters."""
        kind: Any = self.optimizer
        made = kind(groups)
        for name, value in self.attributes.items():
            setattr(made, name, value)
        return made


class Replayer:
    """Replays steps on the resident part of `regions`, which have the same elements for all kinds.

    `places` say to which group every element belongs; they may not overlap, and no piece of a region ends inside one.
    At most `window_elements` elements are stepped at once, which bounds the temporaries of the optimizer. Regions of
    the kinds `staged` lie in host memory: a window of them is copied to `device`, stepped there in fp32 and copied
    back. Gradients of another dtype are staged too, and become fp32 there as in the step of the source. Copies are
    queued on the current stream, which the caller waits for; host memory should be pinned.
    """

    def __init__(
        self,
        rule: StepRule,
        regions: Mapping[str, AnyRegion],
        places: Iterable[GroupSpan],
        *,
        window_elements: int,
        staged: Iterable[str] = (),
        device: torch.device | None = None,
    ) -> None:
        if window_elements < 1:
            raise ValueError(f"window_elements must be positive, is {window_elements}")
        device = device or regions[rule.master].device
        self._rule = rule
        self._regions = {kind: as_region(memory) for kind, memory in regions.items()}
        kinds = dict.fromkeys(staged) | dict.fromkeys([rule.grad] if is_cast(self._regions[rule.grad]) else [])
        self.stages = {kind: torch.zeros(window_elements, dtype=torch.float32, device=device) for kind in kinds}
        self._places = tuple(sorted(places, key=lambda place: place.start))
        self._window_elements = window_elements
        self._spans: tuple[Span, ...] = ()
        self._parts: list[_Part] = []
        self._templates = [_scalar_template(rule, index, device) for index in range(len(rule.keys))]

    def replay(self, spans: Sequence[Span], header: StepHeader) -> None:
        """Step the elements of `spans`, whose gradients of `header`'s step lie in the "grad" region; clips those.

        Windows are made anew only when the spans are others than the last time. Raises ReplayError for a group that
        the header does not know.
        """
        wanted = tuple(_joined(spans))
        if wanted != self._spans:
            self._parts = list(self._cut(wanted))
            self._spans = wanted
        rates = {group["key"]: group for group in header.groups}
        for part in self._parts:
            part.fetch()
            part.set_up(rates, header, self._templates, self._rule.counted)
            if header.clip > 0.0:
                self._rule.clip([window.parameter for window in part.windows], header.clip, header.norm)
            part.optimizer.step()
            part.bring_home(header.stepped)
            part.store()

    def _cut(self, spans: Sequence[Span]) -> Iterator[_Part]:
        """Windows of at most `window_elements`, gathered into optimizers of no more than that."""
        held: list[_Window] = []
        size = 0
        for start, stop, group in _windows(spans, self._places, self._window_elements):
            if held and size + stop - start > self._window_elements:
                yield _Part.of(self._rule, held)
                held, size = [], 0
            stages = {kind: stage[size : size + stop - start] for kind, stage in self.stages.items()}
            held.append(_Window.of(self._rule, self._regions, GroupSpan(start, stop, group), stages))
            size += stop - start
        if held:
            yield _Part.of(self._rule, held)


@dataclass(slots=True)
class _Window:
    """One parameter of a replaying optimizer: views of the regions, or of stages. No memory of its own.

    `fetched` and `stored` are (in host memory, its stage): what is copied before a step, and what back after it.
    """

    parameter: torch.nn.Parameter
    moments: dict[str, torch.Tensor]
    group: int
    fetched: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    stored: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @staticmethod
    def of(
        rule: StepRule, regions: Mapping[str, Region], place: GroupSpan, stages: Mapping[str, torch.Tensor]
    ) -> _Window:
        def lies(kind: str) -> torch.Tensor:
            return regions[kind].window(place.start, place.stop)

        def view(kind: str) -> torch.Tensor:
            return stages[kind] if kind in stages else lies(kind)

        parameter = torch.nn.Parameter(view(rule.master))
        parameter.grad = view(rule.grad)
        fetched = tuple((lies(kind), stage) for kind, stage in stages.items())
        # Gradients are used up by a step.
        stored = tuple((lies(kind), stage) for kind, stage in stages.items() if kind != rule.grad)
        return _Window(parameter, {kind: view(kind) for kind in rule.moments}, place.group, fetched, stored)


@dataclass(slots=True)
class _Part:
    """An optimizer over some windows; `keys` are the content keys of its parameter groups."""

    optimizer: torch.optim.Optimizer
    windows: list[_Window]
    keys: list[str]

    @staticmethod
    def of(rule: StepRule, windows: list[_Window]) -> _Part:
        numbers = sorted({window.group for window in windows})
        groups = [
            {**rule.groups[number], "params": [window.parameter for window in windows if window.group == number]}
            for number in numbers
        ]
        return _Part(rule.make(groups), windows, [rule.keys[number] for number in numbers])

    def fetch(self) -> None:
        """Copy to the device what lies in host memory."""
        with torch.no_grad():
            for window in self.windows:
                for lies, stage in window.fetched:
                    stage.copy_(lies, non_blocking=True)

    def store(self) -> None:
        """Copy masters and moments back. The stream keeps the order: the next part's `fetch` comes after it."""
        with torch.no_grad():
            for window in self.windows:
                for lies, stage in window.stored:
                    lies.copy_(stage, non_blocking=True)

    def set_up(
        self,
        rates: Mapping[str, Mapping[str, Any]],
        header: StepHeader,
        templates: Sequence[Mapping[str, Any]],
        counted: Sequence[str],
    ) -> None:
        """Rates and counts, and the state before the step: moments are windows, or absent where the source had none."""
        for group, key in zip(self.optimizer.param_groups, self.keys, strict=True):
            if key not in rates:
                raise ReplayError(f"parameter group {key}: the header of version {header.version} has {sorted(rates)}")
            group["lr"], group["weight_decay"] = rates[key]["lr"], rates[key]["weight_decay"]
            for name in counted:
                group.pop(name, None)
            group.update(rates[key].get("counts", {}))
        for window in self.windows:
            self.optimizer.state.pop(window.parameter, None)
            if header.stepped:
                scalars = {name: _like(templates[window.group], name, value) for name, value in header.scalars.items()}
                self.optimizer.state[window.parameter].update({**window.moments, **scalars})

    def bring_home(self, stepped: bool) -> None:
        """The moments of a first step were made by the optimizer: they move into the regions."""
        if stepped:
            return
        with torch.no_grad():
            for window in self.windows:
                state = self.optimizer.state.pop(window.parameter, {})
                for kind in window.moments.keys() & state.keys():
                    window.moments[kind].copy_(state[kind])


def is_cast(gradients: Region) -> bool:
    """Whether a step makes fp32 of some of these gradients before it does anything else."""
    return any(tensor.dtype != torch.float32 for tensor in gradients.tensors)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Ascending, with neighbours as one."""
    held: Span | None = None
    for start, stop in sorted(spans):
        if held is not None and start == held[1]:
            held = (held[0], stop)
            continue
        if held is not None:
            yield held
        held = (start, stop)
    if held is not None:
        yield held


def _windows(spans: Sequence[Span], places: Sequence[GroupSpan], most: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, group) of what lies in both, cut into pieces of at most `most` elements. Both ascend."""
    at = 0
    for start, stop in spans:
        while at < len(places) and places[at].stop <= start:
            at += 1
        index = at
        while index < len(places) and places[index].start < stop:
            low, high = max(start, places[index].start), min(stop, places[index].stop)
            for cut in range(low, high, most):
                yield cut, min(cut + most, high), places[index].group
            index += 1


def _scalar_template(rule: StepRule, group: int, device: torch.device) -> dict[str, Any]:
    """The state that is no moment, as the class makes it in its first step: which of it are tensors, of what type."""
    parameter = torch.nn.Parameter(torch.zeros(3, device=device))
    parameter.grad = torch.zeros(3, device=device)
    probe = rule.make([{**rule.groups[group], "params": [parameter]}])
    probe.step()
    return {name: value for name, value in probe.state[parameter].items() if name not in rule.moments}


def _like(template: Mapping[str, Any], name: str, value: Any) -> Any:
    """`value` in the form the class keeps it; every window gets a tensor of its own."""
    form = template.get(name)
    return torch.full_like(form, value) if torch.is_tensor(form) else value
