"""Pretends a GPU where torch has none: tensors with a device and no memory, on which every operation is checked.

`python -m tests.liver_core.device.fake_cuda SOURCE TARGET PRECISION` builds the reference job in SOURCE, does two
steps, opens the source's ring, builds TARGET beside it and allocates it, as rank 0, and prints as JSON what was found.
`... fake_cuda example` builds the job that docs tell people to copy, and does a step of it.
Torch's fake tensors raise where an operation mixes devices. It changes this process for good, so tests start one of
its own.

Not here: values (all are unknown), the time at which anything happens (`late_device`), and kernels.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from liver_core.device import waits
from liver_core.worlds import groups, released_storage

CUDA = torch.device("cuda", 0)
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_DEVICES = 22
_PLACES = ("liver_core/", "megatron/core/")


def pretend() -> None:
    """Before Megatron is imported: torch says that there is one GPU."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: CUDA  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    # C++ looks up who switches devices before it knows that a tensor is fake. The CPU's switch does nothing.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _DEVICES).in_dll(library, _GUARDS)
    guards[1] = guards[0]
    torch.Tensor.type = _type_name  # type: ignore[method-assign, assignment]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign, assignment]
    torch.autograd.backward = _backward  # type: ignore[assignment]
    torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata = None  # type: ignore[attr-defined]
    dist.all_gather_object = _gather_object  # type: ignore[assignment]
    _release_fakes()


def pretend_megatron() -> None:
    """After Megatron is imported: groups without peers, no random streams of a device, hooks of `_backward`, and host
    memory that is not pinned."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    from liver_core.state import host_memory
    from liver_core.worlds import megatron

    host_memory.pin = lambda tensor: None
    CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()  # type: ignore[method-assign]
    megatron.make_group = groups.make_group = make_group  # type: ignore[assignment]
    made = DistributedDataParallel._make_backward_post_hook

    def remembered(self: Any, parameter: torch.nn.Parameter) -> Callable[..., None]:
        _hooks[id(parameter)] = made(self, parameter)
        return _hooks[id(parameter)]

    DistributedDataParallel._make_backward_post_hook = remembered  # type: ignore[method-assign]


class Watch(TorchDispatchMode):
    """Counts, by place in our or Megatron's code, where the host reads from the device (`reads`) and where bytes are
    copied from it (`copies`), and lists what collectives got that does not lie on it (`strays`)."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.strays: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name == "aten::_local_scalar_dense":
            self.reads[_place()] += sum(each.is_cuda for each in args)
            return 1.0
        if func.namespace == "c10d":
            return self._collective(func, args)
        if name == "aten::_pin_memory":
            return next(iter(args)).clone()
        if name in ("aten::_to_copy", "aten::copy_") and _leaves_the_device(name, args, kwargs):
            self.copies[_place()] += 1
        return func(*args, **kwargs)

    def _collective(self, func: Any, args: Sequence[Any]) -> Any:
        """What a collective returns: its first argument, as far as it returns tensors, and that it is done."""
        for tensor in pytree.tree_leaves(args):
            if isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
                self.strays[_place()] += 1
        kinds = [str(each.type) for each in func._schema.returns]
        work: Any = FakeWork()
        found = tuple(work.boxed() if kind.endswith("Work") else next(iter(args)) for kind in kinds)
        return found if len(found) > 1 else next(iter(found))

    def tensor(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`torch.tensor`, which reads the tensors in its list in C++, one after the other, and there asks which device
        "cuda" is."""

        def made(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            held = [each for each in pytree.tree_leaves(data) if isinstance(each, torch.Tensor)]
            if held and not isinstance(data, torch.Tensor):
                self.reads[_place()] += sum(each.is_cuda for each in held)
                data = pytree.tree_map(lambda each: 1.0, data)
            named = kwargs.pop("device", None)
            if named is None:
                return make(data, *args, **kwargs)
            # A fake tensor that knows its numbers would be computed with, on a device that is not there.
            known = make(data, *args, **kwargs)
            return torch.empty(known.shape, dtype=known.dtype, device=CUDA if named == "cuda" else named)

        return made


class Streams(waits._Host):
    """The product's own seam: no queue, a read of many numbers is one, and host memory is real, since numpy looks at
    it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def read(self, tensor: torch.Tensor) -> list[Any]:
        self._watch.reads[_place()] += int(tensor.is_cuda)
        return [1.0] * tensor.numel()

    def host_zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.zeros(elements, dtype=dtype, device="cpu")


def make_group(store: Any, ranks: Sequence[int], rank: int, *, name: str, **_: Any) -> dist.ProcessGroup:
    """A group that has all its members by name only."""
    prefix = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(prefix, tuple(ranks).index(rank), len(ranks))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    kind: Any = FakeProcessGroup  # Its stub knows neither its options nor what it takes.
    backend = kind._create_internal(group.rank(), group.size(), kind.Options())
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    groups._register(group, prefix, name, ranks, backends="cpu:gloo,cuda:nccl")  # type: ignore[arg-type]
    return group


def _gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
    found[:] = [mine] * len(found)


def _place() -> str:
    """The innermost of our or Megatron's functions that is not the read itself."""
    for frame in reversed(traceback.extract_stack()):
        for start in _PLACES:
            is_read = "/tests/" in frame.filename or frame.filename == waits.__file__
            if f"/{start}" in frame.filename and not is_read:
                return f"{start}{frame.filename.rpartition(f'/{start}')[2]} {frame.name}"
    return "elsewhere"


def _leaves_the_device(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name == "aten::copy_":
        return args[1].is_cuda and not args[0].is_cuda
    wanted = kwargs.get("device")
    return args[0].is_cuda and wanted is not None and torch.device(wanted).type == "cpu"


_plain_type = torch.Tensor.type


def _type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Of a fake tensor torch names the type that holds it, not the one that it pretends."""
    if dtype is not None:
        return _plain_type(self, dtype, *args, **kwargs)
    return ("torch.cuda." if self.is_cuda else "torch.") + str(_plain_type(self)).rpartition(".")[2]


def _apply(self: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """`Module.to` and the like. Of a fake parameter only another object can have another device or dtype."""
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                changed = change(parameter)
            if (changed.device, changed.dtype) != (parameter.device, parameter.dtype):
                made = torch.nn.Parameter(changed.detach(), parameter.requires_grad)
                for key, value in vars(parameter).items():
                    if not hasattr(made, key):
                        setattr(made, key, value)
                module._parameters[name] = made
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else change(buffer)
    return self


def _release_fakes() -> None:
    """Fake tensors are asked for their device by an operation, which is none on memory."""
    plain = released_storage._ReleaseMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        return plain(self, func, types, args, kwargs)

    released_storage._ReleaseMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


# Backward. Torch's engine starts a thread for each real device; this one walks the same graph in this thread.

_hooks: dict[int, Callable[..., None]] = {}


def _backward(tensors: Any, grad_tensors: Any = None, **_: Any) -> None:
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
    nodes: list[Any] = [root.grad_fn for root in roots]
    got = {
        node: {root.output_nr: torch.ones_like(root) if gradient is None else gradient}
        for node, root, gradient in zip(nodes, roots, given, strict=True)
    }
    missing, ready = _edges(nodes), list(nodes)
    with torch.no_grad():
        while ready:
            node = ready.pop()
            for (following, number), gradient in _passed_on(node, got.pop(node, {})):
                if gradient is not None:
                    fitting = gradient.sum_to_size(following._input_metadata[number].shape)
                    slot = got.setdefault(following, {})
                    slot[number] = slot[number] + fitting if number in slot else fitting
                missing[following] -= 1
                if not missing[following]:
                    ready.append(following)


def _edges(nodes: Sequence[Any]) -> Counter[Any]:
    """Node -> how many others lead to it."""
    missing: Counter[Any] = Counter()
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            following = [each for each, _ in node.next_functions if each is not None]
            missing.update(following)
            todo += following
    return missing


def _passed_on(node: Any, gradients: Mapping[int, torch.Tensor]) -> list[tuple[tuple[Any, int], Any]]:
    if type(node).__name__ == "AccumulateGrad":
        if gradients:
            parameter, gradient = node.variable, gradients[0]
            # The engine converts, and checks what it converts.
            assert parameter.shape == gradient.shape and parameter.device == gradient.device
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            _hooks.get(id(parameter), lambda: None)()
        return []
    inputs = [gradients.get(number) for number in range(max(gradients, default=0) + 1)]
    run: Any = node if callable(node) else node.apply
    outputs = run(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = zip(getattr(node, "next_functions", ()), outputs, strict=False)
    return [(edge, gradient) for edge, gradient in pairs if edge[0] is not None]


if __name__ == "__main__":
    pretend()
    from tests.liver_core.device import fake_cuda_run

    fake_cuda_run.main()
