"""A device that works late, on the CPU: operations wait in the queue of their stream, and a seed draws when they run.

It stands beneath the product: a dispatch mode takes each operation of torch, and `liver_core.device.waits` is given
this device in place of CUDA. The host reads memory raw, as another process does, and sees what is done so far.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from liver_core.device import DeviceWait, Event
from liver_core.device.waits import pretending

GARBAGE = 0x5A
"""What new memory holds until the device has written to it."""

_ALIASES = ("aten::detach", "aten::alias", "aten::lift_fresh", "aten::_unsafe_view")


@dataclass(frozen=True)
class Moment:
    """A place in the queue of a stream."""

    device: LateDevice
    stream: int
    position: int

    def passed(self) -> bool:
        with self.device.lock:
            self.device.drift()
            return self.device.done[self.stream] >= self.position


class LateDevice:
    """`liver_core.device.waits.Streams`. `removed`: waits for this reason are left out, as if never made."""

    def __init__(self, seed: int, removed: DeviceWait | None = None) -> None:
        self.lock = threading.RLock()
        self.done: list[int] = []
        self._queues: list[list[Callable[[], Any]]] = []
        self._eagerness: list[float] = []
        self._draw = random.Random(seed)
        self._removed = removed
        self._here = threading.local()
        self._host: dict[int, torch.Tensor] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Beneath this thread and the product, which begins on a stream of its own."""
        with pretending(self), self.own(_CPU):
            yield
            self.finish()

    # What the product calls.

    def mark(self, device: torch.device) -> Event:
        with self.lock:
            return Moment(self, self._stream, len(self._queues[self._stream]))

    def await_event(self, why: DeviceWait, event: Event) -> None:
        assert isinstance(event, Moment)
        with self.lock:
            self.drift()
            if why is not self._removed:
                self._run(event.stream, event.position)

    def follow(self, why: DeviceWait, event: Event) -> None:
        assert isinstance(event, Moment)
        if why is not self._removed:
            self._queue(lambda: self._run(event.stream, event.position))

    def settle(self, why: DeviceWait, device: torch.device) -> None:
        self.await_event(why, self.mark(device))

    def settle_all(self, why: DeviceWait, device: torch.device) -> None:
        with self.lock:
            for stream, queue in enumerate(self._queues):
                self.await_event(why, Moment(self, stream, len(queue)))

    @contextmanager
    def own(self, device: torch.device) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        with self.lock:
            self._queues.append([])
            self.done.append(0)
            # How eager it is: a stream that does nothing until somebody waits is one of those drawn.
            self._eagerness.append(self._draw.choice((0.0, 0.0, 0.1, 0.5)))
            self._here.stream = len(self._queues) - 1
        try:
            with _Late(self):
                yield
        finally:
            self._here.stream = before

    def read(self, tensor: torch.Tensor) -> list[Any]:
        self.settle(DeviceWait.READ, tensor.device)
        with _disable_current_modes():
            return tensor.tolist()

    def host_zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():
            made = torch.zeros(elements, dtype=dtype)
        self._host[made.untyped_storage().data_ptr()] = made
        return made

    # What tests call.

    def finish(self) -> None:
        """Do all that is queued."""
        with self.lock:
            for stream, queue in enumerate(self._queues):
                self._run(stream, len(queue))

    def chance(self) -> bool:
        """Whether something that may happen at any time happens now."""
        return self._draw.random() < 0.5

    def drift(self) -> None:
        """Time passes: the device does some of its work, of any stream."""
        with self.lock:
            for stream, queue in enumerate(self._queues):
                while self.done[stream] < len(queue) and self._draw.random() < self._eagerness[stream]:
                    self._run(stream, self.done[stream] + 1)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        name = func._schema.name
        with self.lock:
            self.drift()
            if func.is_view or name in _ALIASES or (tensors and all(map(self._on_host, tensors))):
                return func(*args, **kwargs)
            if name == "aten::_local_scalar_dense":
                # A host read waits for its stream by itself.
                self._run(self._stream, len(self._queues[self._stream]))
                return func(*args, **kwargs)
            if name.endswith("_"):
                self._queue(lambda: _held(tensors) and func(*args, **kwargs))
                return args[0]
            made = func(*args, **kwargs) if not tensors else _shapes_of(func, args, kwargs)
            out = tree_map(lambda each: _garbage(each) if isinstance(each, torch.Tensor) else each, made)
            if not name.startswith("aten::empty"):
                self._queue(lambda: _held(tensors) and _fill(out, made if not tensors else func(*args, **kwargs)))
            return out

    @property
    def _stream(self) -> int:
        return self._here.stream

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._host

    def _queue(self, action: Callable[[], Any]) -> None:
        with self.lock:
            self._queues[self._stream].append(action)

    def _run(self, stream: int, upto: int) -> None:
        while self.done[stream] < upto:
            action = self._queues[stream][self.done[stream]]
            self.done[stream] += 1
            with _disable_current_modes(), torch.no_grad():
                action()


class _Late(TorchDispatchMode):
    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._device.dispatch(func, args, kwargs or {})


def raw(tensor: torch.Tensor) -> list[float]:
    """What another process reads at this moment in the memory of a float32 tensor."""
    data = ctypes.string_at(tensor.data_ptr(), tensor.numel() * 4)
    return list(memoryview(data).cast("f"))


def land(tensor: torch.Tensor, value: float) -> None:
    """What a read from another process does, which no stream knows of."""
    bits = (ctypes.c_float * tensor.numel())(*[value] * tensor.numel())
    ctypes.memmove(tensor.data_ptr(), bits, ctypes.sizeof(bits))


def _held(tensors: list[torch.Tensor]) -> bool:
    """A real device would read and write what others have by now."""
    if any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in tensors):
        raise RuntimeError("works on memory that was freed")
    return True


def _shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    return func(*tree_map(meta, args), **tree_map(meta, kwargs))


def _garbage(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
    ctypes.memset(made.data_ptr(), GARBAGE, made.untyped_storage().nbytes())
    return made


def _fill(outs: Any, values: Any) -> None:
    for out, value in zip(tree_flatten(outs)[0], tree_flatten(values)[0], strict=True):
        if isinstance(out, torch.Tensor) and _held([out]):
            out.copy_(value)


_CPU = torch.device("cpu")
